"""Users of tenants that differ from their tenant's other users."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Row, insert, select, update

from stream_fabric.errors import NotFound
from stream_gw.tenancy.errors import Conflict
from stream_gw.tenancy.models import TenantUser, UserChange, UserCreate, merged_user
from stream_gw.tenancy.sql import tables
from stream_gw.tenancy.sql.tenants import Tenants, stamp_users
from stream_gw.tenancy.sql.transaction import Transaction

_USERS = tables.users


class Users:
    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def find(self, tenant: str, user: str) -> TenantUser:
        """Raises NotFound: the tenant has no such user, or the user has no row."""
        row = await self._row(tenant, user)
        if row is None or row.deleted_at is not None:
            raise NotFound(
                f"user {user[:64]!r} of tenant {tenant[:64]!r} has no settings of its own; "
                "add some with stream-gw users add",
                param="id",
            )
        return user_of(row)

    async def page(self, tenant: str, after: str = "", limit: int = 100) -> list[TenantUser]:
        """List a tenant's users by id, at most ``limit`` after an id. Raises NotFound."""
        await Tenants(self._transaction).find(tenant)
        query = select(_USERS).where(_USERS.c.tenant == tenant, _USERS.c.id > after, _USERS.c.deleted_at.is_(None))
        reply = await self._transaction.connection.execute(query.order_by(_USERS.c.id).limit(limit))
        return [user_of(row) for row in reply]

    async def create(self, asked: UserCreate) -> TenantUser:
        """Raises NotFound, or Conflict when the user has a row."""
        await Tenants(self._transaction).find(asked.tenant)
        row = await self._row(asked.tenant, asked.id)
        if row is not None and row.deleted_at is None:
            told = "change it with PATCH or stream-gw users set"
            raise Conflict(f"user {asked.id!r} of tenant {asked.tenant!r} exists; {told}", param="id")
        now, who = self._transaction.now, self._transaction.who
        user = TenantUser(asked.tenant, asked.id, asked.label, asked.suspended, asked.limits, now, who)
        values = _values(user) | {"created_at": now, "created_by": who, "deleted_at": None}
        if row is None:
            await self._transaction.connection.execute(
                insert(_USERS).values(
                    tenant=asked.tenant, id=asked.id, **values, revision=self._transaction.next_revision()
                )
            )
        else:
            await self._update(user, values)
        await self._transaction.audit("user.create", _subject(user), None, user)
        return user

    async def change(self, tenant: str, user: str, change: UserChange) -> TenantUser:
        """Raises NotFound."""
        before = await self.find(tenant, user)
        after = merged_user(before, change)
        await self._update(before, _values(after))
        await self._transaction.audit("user.change", _subject(before), before, after)
        return after

    async def delete(self, tenant: str, user: str) -> None:
        """Delete the row: the user is like the tenant's others again. Raises NotFound."""
        before = await self.find(tenant, user)
        await self._update(before, {"deleted_at": self._transaction.now})
        await self._transaction.audit("user.delete", _subject(before), before, None)

    async def renew_revisions(self) -> None:
        """Give every row a new revision."""
        await stamp_users(self._transaction, None, {})

    async def _row(self, tenant: str, user: str) -> Row[Any] | None:
        query = select(_USERS).where(_USERS.c.tenant == tenant, _USERS.c.id == user)
        return (await self._transaction.connection.execute(query)).one_or_none()

    async def _update(self, user: TenantUser, values: dict[str, Any]) -> None:
        stamped = values | {"revision": self._transaction.next_revision()}
        change = update(_USERS).where(_USERS.c.tenant == user.tenant, _USERS.c.id == user.id)
        await self._transaction.connection.execute(change.values(**stamped))


def user_of(row: Row[Any]) -> TenantUser:
    """Raises msgspec.ValidationError."""
    return msgspec.convert(tables.fields_of(row), TenantUser)


def _values(user: TenantUser) -> dict[str, Any]:
    limits = None if user.limits is None else msgspec.to_builtins(user.limits)
    return {"label": user.label, "suspended": user.suspended, "limits": limits}


def _subject(user: TenantUser) -> str:
    return f"user:{user.tenant}:{user.id}"
