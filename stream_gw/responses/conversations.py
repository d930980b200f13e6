"""Conversations: lists of items in the database, to which responses and clients add. One response runs at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from stream_fabric.accounts.records import PlanRecord
from stream_fabric.errors import Unsupported
from stream_fabric.limits import RESPONSE_HISTORY_BYTES_MAX
from stream_fabric.ports import Clock, Random
from stream_fabric.stream.ids import TenantId, new_stream_id
from stream_gw.responses.errors import ConversationLocked, ConversationNotFound, ItemNotFound
from stream_gw.responses.held import HeldRecords
from stream_gw.responses.lineage import may_see, too_many_bytes
from stream_gw.responses.packing import Count, pack_items, uncounted, unpack_items
from stream_gw.responses.records import Conversation, History, Item, ItemPage, Order, stored_items
from stream_gw.responses.seal import is_window
from stream_gw.tenancy.errors import NoDatabase

if TYPE_CHECKING:
    from stream_gw.responses.database import ResponseRows
    from stream_gw.tenancy.sql.conversations import StoredConversation

_ID = re.compile(r"conv_[0-9a-f]{32}")
_DAY_S = 86_400


class Conversations:
    """Conversations of all tenants; they are in the database alone, so all methods raise ResponsesUnavailable.

    What stores more raises ResponseStorageFull at the tenant's limit. ``user``: the user that the caller's credential
    is bound to; None: any. Ids of other tenants and users look like unknown ones: ConversationNotFound.
    """

    def __init__(self, held: HeldRecords, plan: Callable[[TenantId], PlanRecord], clock: Clock, random: Random) -> None:
        self._held = held
        self._plan = plan
        self._clock = clock
        self._random = random

    def check_usable(self, tenant: TenantId) -> ResponseRows:
        """Check that the tenant can have conversations. Raises NoDatabase or Unsupported."""
        if self._held.rows is None:
            raise NoDatabase("conversations need the database of tenants; set STREAM_GW_DATABASE_URL on the gateways")
        plan = self._plan(tenant)
        days = self._held.policy.days_of(plan)
        if plan.retention_s == 0 or days == 0:
            raise Unsupported("the plan stores no responses in the database, so it has no conversations")
        return self._held.rows

    # --- conversations -------------------------------------------------------------------------------------

    async def create(
        self, tenant: TenantId, metadata: dict[str, str], items: list[Item], user: str | None = None
    ) -> Conversation:
        rows = self.check_usable(tenant)
        now = self._now_s()
        id_ = "conv_" + new_stream_id(int(now * 1000), self._random.token_bytes(10))[5:]
        row = _row(tenant, id_, user, metadata, now, self._expires_at(tenant))
        await rows.begin_conversation(row, await pack_items(self._stored(items)), self._bytes_max)
        return Conversation(id_, int(now), metadata, user)

    async def read(self, tenant: TenantId, conversation: str, user: str | None = None) -> Conversation:
        row = await self._find(self.check_usable(tenant), tenant, conversation, user)
        return Conversation(row.id, int(row.created_at), row.metadata, row.user)

    async def change(
        self, tenant: TenantId, conversation: str, metadata: dict[str, str], user: str | None = None
    ) -> Conversation:
        """Replace the metadata."""
        rows = self.check_usable(tenant)
        row = await self._find(rows, tenant, conversation, user)
        changed = row._replace(metadata=metadata, expires_at=self._expires_at(tenant))
        await rows.change_conversation(changed, self._bytes_max)
        return Conversation(row.id, int(row.created_at), metadata, row.user)

    async def delete(self, tenant: TenantId, conversation: str, user: str | None = None) -> None:
        """Delete a conversation with its items; its responses stay. One that runs adds nothing more."""
        rows = self.check_usable(tenant)
        await self._find(rows, tenant, conversation, user)
        await rows.delete_conversation(tenant, conversation)

    # --- items ---------------------------------------------------------------------------------------------

    async def history(
        self, tenant: TenantId, conversation: str, user: str | None = None, count: Count = uncounted
    ) -> History:
        """Return the items, the oldest first: all of them, or those from the last window on, which stands for the rest.

        Raises ConversationLocked while a response runs, or HistoryTooLong.
        """
        rows = self.check_usable(tenant)
        await self._find(rows, tenant, conversation, user)
        await self._settle(tenant, conversation)
        # Read again: the response that has just ended has added to it
        row = await self._find(rows, tenant, conversation, user)
        if row.bytes > RESPONSE_HISTORY_BYTES_MAX:  # compressed, so the items have no fewer: they are not read
            raise too_many_bytes("conversation")
        count(row.bytes)
        newest_first = [each.item for each in reversed(await rows.items(tenant, conversation))]
        items, size = await unpack_items(newest_first, RESPONSE_HISTORY_BYTES_MAX, is_window)
        if size > RESPONSE_HISTORY_BYTES_MAX:
            raise too_many_bytes("conversation")
        count(size - row.bytes)  # in place of the packed ones
        return History(reversed(items), row.last_seq, size)

    async def last_seq(self, tenant: TenantId, conversation: str) -> int:
        """Return the place of the last item that was ever added."""
        return (await self._find(self.check_usable(tenant), tenant, conversation, None)).last_seq

    async def items(
        self,
        tenant: TenantId,
        conversation: str,
        after: str | None = None,
        limit: int = 20,
        order: Order = "desc",
        user: str | None = None,
    ) -> ItemPage:
        """Return a page of items, fewer than ``limit`` where they are large. Raises ItemNotFound for an unknown
        ``after``."""
        rows = self.check_usable(tenant)
        await self._find(rows, tenant, conversation, user)
        await self._add_ended(tenant, conversation)
        bytes_max = RESPONSE_HISTORY_BYTES_MAX
        found = await rows.page(tenant, conversation, after, limit, bytes_max, newest_first=order == "desc")
        if found is None:
            raise ItemNotFound(after or "")
        items, _ = await unpack_items([each.item for each in found.items], bytes_max)
        return ItemPage(items, found.has_more or len(items) < len(found.items))

    async def add(self, tenant: TenantId, conversation: str, items: list[Item], user: str | None = None) -> ItemPage:
        """Add items at the end; return them as they are stored. Raises ConversationLocked while a response runs."""
        rows = self.check_usable(tenant)
        await self._find(rows, tenant, conversation, user)
        await self._settle(tenant, conversation)
        stored = self._stored(items)
        await rows.append(tenant, conversation, await pack_items(stored), self._expires_at(tenant), self._bytes_max)
        return ItemPage(stored, has_more=False)

    async def item(self, tenant: TenantId, conversation: str, item: str, user: str | None = None) -> Item:
        """Return one item. Raises ItemNotFound."""
        rows = self.check_usable(tenant)
        await self._find(rows, tenant, conversation, user)
        await self._add_ended(tenant, conversation)
        found = await rows.item(tenant, conversation, item)
        if found is None:
            raise ItemNotFound(item)
        items, _ = await unpack_items([found.item], RESPONSE_HISTORY_BYTES_MAX)
        return items[0]

    async def delete_item(
        self, tenant: TenantId, conversation: str, item: str, user: str | None = None
    ) -> Conversation:
        """Delete one item; return its conversation. Raises ItemNotFound."""
        rows = self.check_usable(tenant)
        row = await self._find(rows, tenant, conversation, user)
        await self._add_ended(tenant, conversation)
        if not await rows.delete_item(tenant, conversation, item):
            raise ItemNotFound(item)
        return Conversation(row.id, int(row.created_at), row.metadata, row.user)

    async def _settle(self, tenant: TenantId, conversation: str) -> None:
        """Add what the last response made, if no job has done it yet. Raises ConversationLocked while it runs."""
        if not await self._add_ended(tenant, conversation):
            raise ConversationLocked(conversation)

    async def _add_ended(self, tenant: TenantId, conversation: str) -> bool:
        """Add what the last response made, if it has ended and no job has done it yet. False: it runs."""
        running = await self._held.held.runs_in(tenant, conversation)
        return running is None or await self._held.save(tenant, running)

    async def _find(
        self, rows: ResponseRows, tenant: TenantId, conversation: str, user: str | None
    ) -> StoredConversation:
        row = await rows.conversation(tenant, conversation) if _ID.fullmatch(conversation) else None
        if row is None or not may_see(user, row.user):
            raise ConversationNotFound(conversation)
        return row

    @property
    def _bytes_max(self) -> int:
        return self._held.policy.stored_bytes_max

    def _stored(self, items: list[Item]) -> list[Item]:
        return stored_items(items, self._random.token_hex(16))

    def _expires_at(self, tenant: TenantId) -> float:
        return self._now_s() + self._held.policy.days_of(self._plan(tenant)) * _DAY_S

    def _now_s(self) -> float:
        return self._clock.now_us() / 1e6


def _row(
    tenant: TenantId, id_: str, user: str | None, metadata: dict[str, str], now: float, expires_at: float
) -> StoredConversation:
    from stream_gw.tenancy.sql.conversations import StoredConversation

    return StoredConversation(tenant, id_, user, metadata, now, 0, 0, expires_at)
