"""Stored responses: what a request was, what came of it, and what later requests build on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from stream_fabric.accounts.records import PlanRecord
from stream_fabric.accounts.stored import NewResponse
from stream_fabric.errors import BadRequest, StreamGwError, Unsupported
from stream_fabric.limits import RESPONSE_UNSAVED_S_MAX, RETENTION_S
from stream_fabric.stream.ids import StreamId, TenantId, is_stream_id
from stream_gw.responses.conversations import Conversations
from stream_gw.responses.errors import (
    ConversationLocked,
    ItemNotFound,
    ResponseNotFound,
    ResponseTooLarge,
    storage_full,
)
from stream_gw.responses.held import HeldRecords
from stream_gw.responses.lineage import chain_items, may_see
from stream_gw.responses.packing import Count, pack, pack_begun, uncounted, unpack_record
from stream_gw.responses.records import History, Item, ItemPage, Order, ResponseRecord, page_of
from stream_gw.responses.references import ReferencedBytes, resolved
from stream_gw.responses.seal import Seals, is_window

_DAY_S = 86_400


class DeletesStreams(Protocol):
    """The part of the log that deletes content."""

    async def delete(self, stream: StreamId, tenant: TenantId) -> bool:
        """Delete the content of an ended stream of the tenant. False: there is none, or it has not ended."""


class ResponseStore:
    """Stored responses of all tenants. ``user``: the user that the caller's credential is bound to; None: any.

    Ids of other tenants and users look like unknown ones. Methods raise FabricError where Redis does not answer, and
    ResponsesUnavailable where the database is needed and does not answer.
    """

    def __init__(
        self,
        held: HeldRecords,
        streams: DeletesStreams,
        conversations: Conversations,
        plan: Callable[[TenantId], PlanRecord],
        seals: Seals,
    ) -> None:
        """``plan``: returns a tenant's plan."""
        self.conversations = conversations
        self.seals = seals
        self._held = held
        self._streams = streams
        self._plan = plan

    # --- a new response ------------------------------------------------------------------------------------

    def stores(self, tenant: TenantId, *, store: bool) -> bool:
        """Whether a response of the tenant will be stored: it asks for it, and the plan keeps something."""
        return store and self._plan(tenant).retention_s != 0

    async def history(
        self,
        tenant: TenantId,
        previous_response_id: str | None,
        conversation: str | None,
        *,
        user: str | None = None,
        count: Count = uncounted,
    ) -> History:
        """Return the items that a new response builds on, the oldest first. Compactions are messages in there.

        Raises PreviousResponseNotFound, PreviousResponseRunning, ConversationNotFound, ConversationLocked,
        HistoryTooLong, what ``count`` raises, or BadRequest when both are given.
        """
        if previous_response_id is not None and conversation is not None:
            raise BadRequest(
                "give previous_response_id or conversation, not both: a conversation has its responses",
                param="previous_response_id",
            )
        found = History()
        if previous_response_id is not None:
            found = await chain_items(self._held, tenant, previous_response_id, user, count)
        elif conversation is not None:
            found = await self.conversations.history(tenant, conversation, user, count)
        return History(self.expanded(tenant, found), found.last_seq, found.size)

    def expanded(self, tenant: TenantId, items: list[Item]) -> list[Item]:
        """Return items with each compaction replaced by what it stands for, which may be all items before it.

        Raises BadRequest for one that was not sealed here for the tenant.
        """
        if not any(item.get("type") == "compaction" for item in items):
            return items
        made: list[Item] = []
        for item in items:
            if is_window(item):
                made.clear()
            made += self.seals.expanded(tenant, item) if item.get("type") == "compaction" else [item]
        return made

    async def resolved(
        self,
        tenant: TenantId,
        items: list[Item],
        history: list[Item],
        *,
        user: str | None = None,
        count: Count = uncounted,
    ) -> list[Item]:
        """Return a request's items with the stored ones that it refers to.

        Raises ReferenceNotFound, HistoryTooLong, and what ``count`` raises.
        """
        return await resolved(items, history, partial(self.read, tenant, user=user, count=ReferencedBytes().add), count)

    async def begun(self, tenant: TenantId, record: ResponseRecord, history: History | None = None) -> bool:
        """Store the request of a response, before its stream is created. Returns whether it is stored.

        ``history``: what it builds on. One in a conversation that has changed since is refused as locked.

        Its output is stored by itself when the stream has ended, whatever becomes of this process. Raises
        ConversationLocked, ResponseTooLarge, ResponseStorageFull, or Unsupported: a response in a conversation must be
        stored.
        """
        plan, conversation = self._plan(tenant), record.conversation
        days = self._held.policy.days_of(plan)
        if not self.stores(tenant, store=record.store):
            if conversation is not None:
                raise Unsupported(
                    "a response in a conversation is stored, but store is false or the plan keeps nothing; leave "
                    "conversation out",
                    param="conversation",
                )
            return False
        if conversation is not None:
            self.conversations.check_usable(tenant)
        kept_s = RETENTION_S if plan.retention_s is None else plan.retention_s
        expires_at = record.created_at + days * _DAY_S if days else 0
        packed, size = await pack_begun(msgspec.structs.replace(record, expires_at=expires_at, response=None))
        if size > self._held.policy.bytes_max:
            raise ResponseTooLarge(
                f"the request has {size} bytes, and of one response at most {self._held.policy.bytes_max} are stored; "
                "send less, or store: false",
                param="input",
            )
        # Without a database here it waits no longer than it is kept: another gateway may have one
        waits_s = (max(RESPONSE_UNSAVED_S_MAX, kept_s) if self._held.rows else kept_s) if days else 0
        await self._begin(tenant, NewResponse(record.id, packed, conversation, kept_s, int(waits_s)))
        if conversation is not None and history is not None:
            await self._check_unchanged(tenant, record.id, conversation, history)
        return True

    async def _check_unchanged(self, tenant: TenantId, response: StreamId, conversation: str, history: History) -> None:
        """Check that no other response ran between the read of the history and this one's lock."""
        try:
            last_seq = await self.conversations.last_seq(tenant, conversation)
        except StreamGwError:
            await self.withdrawn(tenant, response)
            raise
        if last_seq != history.last_seq:
            await self.withdrawn(tenant, response)
            raise ConversationLocked(conversation)

    async def _begin(self, tenant: TenantId, new: NewResponse) -> None:
        begun = await self._held.held.begin(tenant, new)
        if begun.blocked_by is not None:
            assert new.conversation is not None
            raise ConversationLocked(new.conversation)
        if begun.is_full:
            raise storage_full("delete some, or send store: false")

    async def completed(self, tenant: TenantId, response: StreamId, whole: dict[str, Any]) -> None:
        """Store what came of a response that has no stream, after ``begun``."""
        packed, _ = await pack(whole)
        await self._held.held.complete(tenant, response, packed)

    async def withdrawn(self, tenant: TenantId, response: StreamId) -> None:
        """Forget a response whose stream was not created after all."""
        await self._held.held.drop(tenant, response)

    # --- responses that are there ----------------------------------------------------------------------------

    async def read(
        self, tenant: TenantId, response: str, *, user: str | None = None, count: Count = uncounted
    ) -> ResponseRecord | None:
        """Return a stored response, with its whole response once the stream has ended."""
        if not is_stream_id(response):
            return None
        record = await self._held.find(tenant, StreamId(response), count)
        if record is None and self._held.rows is not None:
            row = await self._held.rows.find(tenant, response)
            record = None if row is None else await unpack_record(row.request, row.response, count)
        if record is None or record == "deleted" or not may_see(user, record.user):
            return None
        return record

    async def delete(self, tenant: TenantId, response: str, *, user: str | None = None) -> bool:
        """Delete a response everywhere; False: there is none. Cancel a stream that runs before: else its log stays.

        When the database does not answer, Redis remembers the deletion for a day and repeats it.
        """
        if await self.read(tenant, response, user=user) is None:
            return False
        stream = StreamId(response)
        await self._held.held.delete(tenant, stream)
        await self._streams.delete(stream, tenant)
        if self._held.rows is not None:
            await self._held.rows.delete(tenant, response)
        return True

    async def input_items(
        self,
        tenant: TenantId,
        response: str,
        after: str | None = None,
        limit: int = 20,
        order: Order = "desc",
        *,
        user: str | None = None,
    ) -> ItemPage:
        """Return a page of a response's own input items. Raises ResponseNotFound or ItemNotFound."""
        record = await self.read(tenant, response, user=user)
        if record is None:
            raise ResponseNotFound(response)
        page = page_of(record.input, after, limit, order)
        if page is None:
            raise ItemNotFound(after or "")
        return page
