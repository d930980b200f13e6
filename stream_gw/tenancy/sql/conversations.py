"""Stored conversations and their items. Items are opaque bytes here, with an id."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Row, Select, delete, func, insert, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from stream_gw.tenancy.sql import tables
from stream_gw.tenancy.sql.responses import NewItem, count_bytes, delete_counted

_CONVERSATIONS = tables.conversations
_ITEMS = tables.conversation_items
_ROW_BYTES = 256
"""Bytes that a conversation without items counts for."""


class StoredConversation(NamedTuple):
    tenant: str
    id: str
    user: str | None
    metadata: dict[str, str]
    created_at: float
    last_seq: int
    """Place of the last item that was ever added."""
    bytes: int
    """Bytes of its items, its metadata and its row together."""
    expires_at: float


class StoredItem(NamedTuple):
    id: str
    item: bytes


class StoredPage(NamedTuple):
    items: list[StoredItem]
    has_more: bool


class Conversations:
    """Each method's ``user``: only a conversation of this user counts; None: any."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def insert(self, row: StoredConversation) -> int:
        """Add a conversation without items; return its bytes, for ``count_bytes``."""
        size = _ROW_BYTES + _metadata_bytes(row.metadata)
        await self._connection.execute(
            insert(_CONVERSATIONS).values(
                tenant=row.tenant,
                id=row.id,
                user_id=row.user,
                metadata=row.metadata,
                created_at=row.created_at,
                last_seq=0,
                bytes=size,
                expires_at=row.expires_at,
            )
        )
        return size

    async def find(self, tenant: str, conversation: str, now: float) -> StoredConversation | None:
        query = select(_CONVERSATIONS).where(
            _CONVERSATIONS.c.tenant == tenant, _CONVERSATIONS.c.id == conversation, _CONVERSATIONS.c.expires_at > now
        )
        row = (await self._connection.execute(query)).one_or_none()
        return None if row is None else _stored(row)

    async def change(self, tenant: str, conversation: str, metadata: dict[str, str], expires_at: float) -> int:
        """Replace the metadata; return the bytes that it takes more than before, for ``count_bytes``."""
        kept = self._update(tenant, conversation).values(expires_at=expires_at).returning(_CONVERSATIONS.c.metadata)
        before = (await self._connection.execute(kept)).scalar_one_or_none()
        if before is None:
            return 0
        size = _metadata_bytes(metadata) - _metadata_bytes(before)
        changed = self._update(tenant, conversation).values(metadata=metadata, bytes=_CONVERSATIONS.c.bytes + size)
        await self._connection.execute(changed)
        return size

    async def append(self, tenant: str, conversation: str, items: Sequence[NewItem], expires_at: float) -> int:
        """Add items at the end; return their bytes, for ``count_bytes``. 0: there is no such conversation any more."""
        size = sum(len(each.item) for each in items)
        changed = self._update(tenant, conversation).values(
            last_seq=_CONVERSATIONS.c.last_seq + len(items),
            bytes=_CONVERSATIONS.c.bytes + size,
            expires_at=expires_at,
        )
        reply = await self._connection.execute(changed.returning(_CONVERSATIONS.c.last_seq))
        last = reply.scalar_one_or_none()
        if last is None or not items:
            return 0
        rows = [
            {"tenant": tenant, "conversation": conversation, "seq": seq, "id": each.id, "item": each.item}
            for seq, each in enumerate(items, last - len(items) + 1)
        ]
        await self._connection.execute(insert(_ITEMS), rows)
        return size

    async def items(self, tenant: str, conversation: str) -> list[StoredItem]:
        """Return all items, the oldest first."""
        found = await self._connection.execute(self._items(tenant, conversation).order_by(_ITEMS.c.seq))
        return [StoredItem(row.id, bytes(row.item)) for row in found]

    async def page(
        self, tenant: str, conversation: str, after: str | None, limit: int, bytes_max: int, *, newest_first: bool
    ) -> StoredPage | None:
        """Return at most ``limit`` items after the one with the id ``after``; None: there is no such item.

        All but the first have at most ``bytes_max`` bytes with those before them.
        """
        query = self._items(tenant, conversation)
        if after is not None:
            place = await self._seq(tenant, conversation, after)
            if place is None:
                return None
            query = query.where(_ITEMS.c.seq < place if newest_first else _ITEMS.c.seq > place)
        ordered = query.order_by(_ITEMS.c.seq.desc() if newest_first else _ITEMS.c.seq)
        sizes = ordered.with_only_columns(func.length(_ITEMS.c.item)).limit(limit + 1)
        held = list(accumulate((await self._connection.execute(sizes)).scalars()))
        count = max(1, bisect_right(held[:limit], bytes_max))
        items = [StoredItem(row.id, bytes(row.item)) for row in await self._connection.execute(ordered.limit(count))]
        return StoredPage(items, len(held) > count)

    async def item(self, tenant: str, conversation: str, item: str) -> StoredItem | None:
        query = self._items(tenant, conversation).where(_ITEMS.c.id == item).order_by(_ITEMS.c.seq).limit(1)
        row = (await self._connection.execute(query)).one_or_none()
        return None if row is None else StoredItem(row.id, bytes(row.item))

    async def delete_item(self, tenant: str, conversation: str, item: str) -> bool:
        found = await self.item(tenant, conversation, item)
        seq = await self._seq(tenant, conversation, item)
        if found is None or seq is None:
            return False
        size = len(found.item)
        gone = delete(_ITEMS).where(
            _ITEMS.c.tenant == tenant, _ITEMS.c.conversation == conversation, _ITEMS.c.seq == seq
        )
        if (await self._connection.execute(gone)).rowcount == 0:  # another request was faster
            return False
        shrunk = self._update(tenant, conversation).values(bytes=_CONVERSATIONS.c.bytes - size)
        await self._connection.execute(shrunk)
        await count_bytes(self._connection, tenant, -size)
        return True

    async def delete(self, tenant: str, conversation: str) -> bool:
        """Delete a conversation with its items; False: there is none."""
        return await self._delete([(tenant, conversation)]) > 0

    async def sweep(self, now: float, limit: int) -> int:
        """Delete conversations that have expired or whose tenant was deleted; return how many. At most ``limit``."""
        gone = select(tables.tenants.c.id).where(tables.tenants.c.deleted_at.is_not(None))
        found = (
            select(_CONVERSATIONS.c.tenant, _CONVERSATIONS.c.id)
            .where(or_(_CONVERSATIONS.c.expires_at <= now, _CONVERSATIONS.c.tenant.in_(gone)))
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        names = [(row.tenant, row.id) for row in await self._connection.execute(found)]
        return await self._delete(names) if names else 0

    async def _delete(self, names: Sequence[tuple[str, str]]) -> int:
        conversations = delete(_CONVERSATIONS).where(tuple_(_CONVERSATIONS.c.tenant, _CONVERSATIONS.c.id).in_(names))
        items = delete(_ITEMS).where(tuple_(_ITEMS.c.tenant, _ITEMS.c.conversation).in_(names))
        count = await delete_counted(
            self._connection, conversations.returning(_CONVERSATIONS.c.tenant, _CONVERSATIONS.c.bytes)
        )
        await self._connection.execute(items)
        return count

    async def _seq(self, tenant: str, conversation: str, item: str) -> int | None:
        query = select(_ITEMS.c.seq).where(
            _ITEMS.c.tenant == tenant, _ITEMS.c.conversation == conversation, _ITEMS.c.id == item
        )
        found: int | None = (await self._connection.execute(query.order_by(_ITEMS.c.seq).limit(1))).scalar_one_or_none()
        return found

    @staticmethod
    def _items(tenant: str, conversation: str) -> Select[Any]:
        return select(_ITEMS.c.id, _ITEMS.c.item).where(
            _ITEMS.c.tenant == tenant, _ITEMS.c.conversation == conversation
        )

    @staticmethod
    def _update(tenant: str, conversation: str) -> Any:
        return update(_CONVERSATIONS).where(_CONVERSATIONS.c.tenant == tenant, _CONVERSATIONS.c.id == conversation)


def _metadata_bytes(metadata: dict[str, str]) -> int:
    return len(msgspec.json.encode(metadata))


def _stored(row: Row[Any]) -> StoredConversation:
    return StoredConversation(
        row.tenant, row.id, row.user_id, row.metadata, row.created_at, row.last_seq, row.bytes, row.expires_at
    )
