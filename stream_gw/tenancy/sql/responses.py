"""Stored responses and the bytes that a tenant's rows take. Requests, responses and items are opaque bytes here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from sqlalchemy import Row, Table, delete, literal, or_, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from stream_gw.tenancy.sql import tables

_RESPONSES = tables.responses
_HELD = tables.stored_bytes


class StoredResponse(NamedTuple):
    tenant: str
    id: str
    user: str | None
    previous: str | None
    """The response that it builds on."""
    request: bytes
    response: bytes
    expires_at: float

    @property
    def bytes(self) -> int:
        return len(self.request) + len(self.response)


class NewItem(Protocol):
    """An item of a conversation; ``conversations.StoredItem``."""

    @property
    def id(self) -> str: ...
    @property
    def item(self) -> bytes: ...


class NewRow(NamedTuple):
    """A response, with the items that it adds to its conversation."""

    response: StoredResponse
    conversation: str | None
    items: Sequence[NewItem]


class Link(NamedTuple):
    """One response of a chain."""

    id: str
    user: str | None
    previous: str | None
    bytes: int


class Responses:
    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def insert(self, row: StoredResponse) -> bool:
        """Add a row; False: it is there, or was there in this transaction's view."""
        values = {
            "tenant": row.tenant,
            "id": row.id,
            "user_id": row.user,
            "previous": row.previous,
            "request": row.request,
            "response": row.response,
            "bytes": row.bytes,
            "expires_at": row.expires_at,
        }
        reply = await self._connection.execute(inserting(self._connection, _RESPONSES, values))
        return reply.rowcount == 1

    async def find(self, tenant: str, response: str, now: float) -> StoredResponse | None:
        query = select(_RESPONSES).where(_RESPONSES.c.tenant == tenant, _RESPONSES.c.id == response)
        row = (await self._connection.execute(query.where(_RESPONSES.c.expires_at > now))).one_or_none()
        return None if row is None else _stored(row)

    async def read(self, tenant: str, responses: Sequence[str]) -> dict[str, StoredResponse]:
        """Read several rows by id."""
        query = select(_RESPONSES).where(_RESPONSES.c.tenant == tenant, _RESPONSES.c.id.in_(responses))
        return {row.id: _stored(row) for row in await self._connection.execute(query)}

    async def chain(self, tenant: str, response: str, now: float, depth: int) -> list[Link]:
        """Return a response and those that it builds on, the newest first, as far as they are there."""
        columns = (_RESPONSES.c.id, _RESPONSES.c.user_id, _RESPONSES.c.previous, _RESPONSES.c.bytes)
        first = select(*columns, literal(1).label("depth")).where(
            _RESPONSES.c.tenant == tenant, _RESPONSES.c.id == response, _RESPONSES.c.expires_at > now
        )
        links = first.cte("links", recursive=True)
        before = select(*columns, links.c.depth + 1).where(
            _RESPONSES.c.tenant == tenant,
            _RESPONSES.c.id == links.c.previous,
            _RESPONSES.c.expires_at > now,
            links.c.depth < depth,
        )
        links = links.union_all(before)
        found = await self._connection.execute(select(links).order_by(links.c.depth))
        return [Link(row.id, row.user_id, row.previous, row.bytes) for row in found]

    async def delete(self, tenant: str, response: str, user: str | None = None) -> bool:
        """Delete a row and count its bytes no more; ``user``: only of this user. False: there is none."""
        gone = delete(_RESPONSES).where(_RESPONSES.c.tenant == tenant, _RESPONSES.c.id == response)
        if user is not None:
            gone = gone.where(_RESPONSES.c.user_id == user)
        return await delete_counted(self._connection, gone.returning(_RESPONSES.c.tenant, _RESPONSES.c.bytes)) > 0

    async def sweep(self, now: float, limit: int) -> int:
        """Delete rows that have expired or whose tenant was deleted; return how many. At most ``limit``."""
        gone = select(tables.tenants.c.id).where(tables.tenants.c.deleted_at.is_not(None))
        found = (
            select(_RESPONSES.c.tenant, _RESPONSES.c.id)
            .where(or_(_RESPONSES.c.expires_at <= now, _RESPONSES.c.tenant.in_(gone)))
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        expired = delete(_RESPONSES).where(tuple_(_RESPONSES.c.tenant, _RESPONSES.c.id).in_(found))
        return await delete_counted(self._connection, expired.returning(_RESPONSES.c.tenant, _RESPONSES.c.bytes))

    async def bytes(self, tenant: str) -> int:
        """Return the bytes of a tenant's rows."""
        reply = await self._connection.execute(select(_HELD.c.bytes).where(_HELD.c.tenant == tenant))
        return reply.scalar_one_or_none() or 0


async def count_bytes(connection: AsyncConnection, tenant: str, change: int) -> int:
    """Change the bytes of a tenant's rows, in the transaction that changes the rows; return their sum."""
    await connection.execute(inserting(connection, _HELD, {"tenant": tenant, "bytes": 0}))
    sum_ = update(_HELD).where(_HELD.c.tenant == tenant).values(bytes=_HELD.c.bytes + change)
    return int((await connection.execute(sum_.returning(_HELD.c.bytes))).scalar_one())


async def delete_counted(connection: AsyncConnection, deletion: Any) -> int:
    """Run a deletion that returns (tenant, bytes) of each row; return the number of rows."""
    freed: dict[str, int] = {}
    rows = (await connection.execute(deletion)).all()
    for tenant, size in rows:
        freed[tenant] = freed.get(tenant, 0) + size
    for tenant in sorted(freed):  # in one order, so that two transactions do not wait for each other
        await count_bytes(connection, tenant, -freed[tenant])
    return len(rows)


def inserting(connection: AsyncConnection, table: Table, values: dict[str, Any]) -> Any:
    """Make the statement that inserts a row unless it is there."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    return insert(table).values(**values).on_conflict_do_nothing()


def _stored(row: Row[Any]) -> StoredResponse:
    return StoredResponse(
        row.tenant, row.id, row.user_id, row.previous, bytes(row.request), bytes(row.response), row.expires_at
    )
