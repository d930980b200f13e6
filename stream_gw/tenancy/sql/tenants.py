"""Tenants: their plan, whether they are suspended, and their own prices."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Row, bindparam, insert, select, update

from stream_fabric.errors import NotFound
from stream_gw.tenancy.errors import Conflict
from stream_gw.tenancy.models import Tenant, TenantChange, TenantCreate, merged_tenant
from stream_gw.tenancy.sql import tables
from stream_gw.tenancy.sql.plans import Plans
from stream_gw.tenancy.sql.transaction import Transaction

_TENANTS = tables.tenants


class Tenants:
    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def find(self, tenant: str) -> Tenant:
        """Raises NotFound."""
        row = await self._row(tenant)
        if row is None or row.deleted_at is not None:
            raise NotFound(f"there is no tenant {tenant[:64]!r}; list them with stream-gw tenants list", param="tenant")
        return tenant_of(row)

    async def page(self, after: str = "", limit: int = 100) -> list[Tenant]:
        """List tenants by id, at most ``limit`` after an id."""
        query = select(_TENANTS).where(_TENANTS.c.id > after, _TENANTS.c.deleted_at.is_(None))
        reply = await self._transaction.connection.execute(query.order_by(_TENANTS.c.id).limit(limit))
        return [tenant_of(row) for row in reply]

    async def create(self, asked: TenantCreate) -> Tenant:
        """Create a tenant; keys of a deleted one with the same id stay revoked. Raises NotFound or Conflict."""
        await Plans(self._transaction).find(asked.plan)
        row = await self._row(asked.id)
        if row is not None and row.deleted_at is None:
            raise Conflict(f"tenant {asked.id!r} exists; change it with PATCH or stream-gw tenants set", param="id")
        now, who = self._transaction.now, self._transaction.who
        tenant = Tenant(asked.id, asked.label, asked.plan, False, dict(asked.prices), now, who)
        values = _values(tenant) | {"created_at": now, "created_by": who, "deleted_at": None}
        if row is None:
            await self._transaction.connection.execute(
                insert(_TENANTS).values(id=asked.id, **values, revision=self._transaction.next_revision())
            )
        else:
            await self._update(asked.id, values)
        await self._transaction.audit("tenant.create", f"tenant:{asked.id}", None, tenant)
        return tenant

    async def change(self, tenant: str, change: TenantChange) -> Tenant:
        """Raises NotFound: no such tenant or plan."""
        before = await self.find(tenant)
        after = merged_tenant(before, change)
        if after.plan != before.plan:
            await Plans(self._transaction).find(after.plan)
        await self._update(tenant, _values(after))
        await self._transaction.audit("tenant.change", f"tenant:{tenant}", before, after)
        return after

    async def delete(self, tenant: str) -> None:
        """Delete the tenant with its users, and revoke its keys. Its audit events stay. Raises NotFound."""
        before, now = await self.find(tenant), self._transaction.now
        keys = tables.api_keys
        await self._transaction.connection.execute(
            update(keys).where(keys.c.tenant == tenant, keys.c.revoked_at.is_(None)).values(revoked_at=now)
        )
        await stamp_users(self._transaction, tenant, {"deleted_at": now})
        await self._update(tenant, {"deleted_at": now})
        await self._transaction.audit("tenant.delete", f"tenant:{tenant}", before, None)

    async def stamp(self, tenant: str) -> None:
        """Give the tenant's record a new revision, because one of its keys has changed."""
        await self._update(tenant, {})

    async def _row(self, tenant: str) -> Row[Any] | None:
        query = select(_TENANTS).where(_TENANTS.c.id == tenant)
        return (await self._transaction.connection.execute(query)).one_or_none()

    async def _update(self, tenant: str, values: dict[str, Any]) -> None:
        stamped = values | {"revision": self._transaction.next_revision()}
        await self._transaction.connection.execute(update(_TENANTS).where(_TENANTS.c.id == tenant).values(**stamped))


async def stamp_users(transaction: Transaction, tenant: str | None, values: dict[str, Any]) -> None:
    """Change a tenant's users that are not deleted, or with None all rows. Each row gets a revision of its own."""
    users = tables.users
    query = select(users.c.tenant, users.c.id)
    if tenant is not None:
        query = query.where(users.c.tenant == tenant, users.c.deleted_at.is_(None))
    found = (await transaction.connection.execute(query.order_by(users.c.tenant, users.c.id))).all()
    if not found:
        return
    stamps = [{"of": row.tenant, "one": row.id, "stamp": transaction.next_revision()} for row in found]
    change = update(users).where(users.c.tenant == bindparam("of"), users.c.id == bindparam("one"))
    await transaction.connection.execute(change.values(**values, revision=bindparam("stamp")), stamps)


def tenant_of(row: Row[Any]) -> Tenant:
    """Raises msgspec.ValidationError."""
    return msgspec.convert(tables.fields_of(row), Tenant)


def _values(tenant: Tenant) -> dict[str, Any]:
    return {
        "label": tenant.label,
        "plan": tenant.plan,
        "suspended": tenant.suspended,
        "prices": msgspec.to_builtins(tenant.prices),
    }
