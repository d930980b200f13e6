"""Responses that Redis holds: completes them from their streams' logs, and hands them to the database."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from stream_fabric.accounts.records import PlanRecord
from stream_fabric.accounts.stored import HeldResponses
from stream_fabric.errors import Unsupported
from stream_fabric.limits import RESPONSE_BYTES_MAX, RESPONSE_DAYS, RESPONSE_NO_LOG_S_MAX, RESPONSES_STORED_BYTES_MAX
from stream_fabric.ports import Clock, StreamLog
from stream_fabric.stream.cursor import BEGINNING, Cursor
from stream_fabric.stream.ids import StreamId, TenantId, created_ms
from stream_gw.dialects.facts import meta_decoder
from stream_gw.dialects.responses.requests import OPENAI
from stream_gw.dialects.responses.whole import DIALECTS, response_of
from stream_gw.responses.packing import Count, off_loop, pack, pack_items, uncounted, unpack_record
from stream_gw.responses.records import ResponseRecord, stored_items

if TYPE_CHECKING:
    from stream_gw.responses.database import ResponseRows
    from stream_gw.tenancy.sql.conversations import StoredItem
    from stream_gw.tenancy.sql.responses import NewRow

_log = logging.getLogger(__name__)

Outcome = Literal["saved", "deferred", "too_large", "no_stream", "unreadable"]
"""Outcome of a stored response: written to the database, refused by it for now, too large, without a stream, or with a
record that cannot be decoded."""

_FRAME_BYTES: Final = 256
"""A frame takes as long to collect as so many bytes take to be decoded."""
FULL_S: Final = 300.0
"""Time in which a tenant with too many bytes in the database gets no new response; then one is tried."""


@dataclass(frozen=True)
class StorePolicy:
    """Bounds of what is stored."""

    days: int = RESPONSE_DAYS
    """Days that the database keeps a response, where the plan does not say; 0: none is written there."""
    bytes_max: int = RESPONSE_BYTES_MAX
    """Most bytes of one response's request, and of its output."""
    stored_bytes_max: int = RESPONSES_STORED_BYTES_MAX
    """Most bytes of one tenant in the database; 0: no limit."""

    def days_of(self, plan: PlanRecord) -> int:
        """Return the days that the database keeps a response of a tenant with the plan; 0: it gets none."""
        return self.days if plan.response_days is None else plan.response_days


class HeldRecords:
    """Responses in Redis. ``rows`` None: this gateway has no database."""

    def __init__(
        self,
        held: HeldResponses,
        log: StreamLog,
        rows: ResponseRows | None,
        clock: Clock,
        policy: StorePolicy,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self.held = held
        self.rows = rows
        self.policy = policy
        self.on_outcome = on_outcome
        self._log = log
        self._clock = clock

    async def find(
        self, tenant: TenantId, response: StreamId, count: Count = uncounted
    ) -> ResponseRecord | Literal["deleted"] | None:
        """Read a response, and complete it if its stream has ended. Raises FabricError."""
        found = await self.held.find(tenant, response)
        if found is None or found == "deleted":
            return found
        try:
            record = await unpack_record(found.request, found.response, count)
            if record.response is None:
                return await self._find_ended(tenant, record)
        except (msgspec.MsgspecError, zlib.error, KeyError) as error:
            _log.error("stored response cannot be read, dropped: response=%s error=%r", response, error)
            self.on_outcome("unreadable")
            await self.held.drop(tenant, response)
            return None
        return record

    async def _find_ended(self, tenant: TenantId, record: ResponseRecord) -> ResponseRecord | None:
        """Return a record with what came of it, if its stream has ended; None: there is no such stream."""
        read = await self._read_log(tenant, record.id)
        if read is None:
            return None if self._age_s(record.id) > RESPONSE_NO_LOG_S_MAX else record
        status, meta, lines = read
        if status == "live":
            return record
        try:
            whole = await off_loop(_FRAME_BYTES * len(lines), lambda: _whole_response(meta, lines))
        except Unsupported:  # begun by a newer gateway, which will complete it
            return record
        return await self._complete(tenant, msgspec.structs.replace(record, response=whole))

    async def _complete(self, tenant: TenantId, record: ResponseRecord) -> ResponseRecord | None:
        assert record.response is not None
        packed, size = await pack(record.response)
        if size > self.policy.bytes_max:
            _log.warning(
                "response not stored, too large: response=%s bytes=%d limit=%d", record.id, size, self.policy.bytes_max
            )
            self.on_outcome("too_large")
            await self.held.drop(tenant, record.id)
            return None
        return record if await self.held.complete(tenant, record.id, packed) else None

    async def look(self, tenant: TenantId, response: StreamId) -> None:
        """Complete a response if its stream has ended; forget it if there is no stream. Raises FabricError."""
        state = await self._log.settled(response)
        if state is None and self._age_s(response) > RESPONSE_NO_LOG_S_MAX:
            _log.warning("response not stored, its stream does not exist: response=%s", response)
            self.on_outcome("no_stream")
            await self.held.drop(tenant, response)
        elif state is not None and state[0] != "live":
            await self.find(tenant, response)

    async def save(self, tenant: TenantId, response: StreamId) -> bool:
        """Write an ended response to the database, once however often this is called. False: it has not ended.

        Raises ResponsesUnavailable or FabricError.
        """
        return await self.save_all([(tenant, response)]) > 0

    async def save_all(self, wanted: Sequence[tuple[TenantId, StreamId]]) -> int:
        """Write ended responses in one transaction; return how many the database has, or has deleted. Raises as
        ``save``."""
        assert self.rows is not None
        found = await asyncio.gather(*(self.prepare(*each) for each in wanted))
        rows = [each for each in found if each is not None and not isinstance(each, str)]
        for tenant, total in (await self.rows.insert_all(rows)).items():
            if 0 < self.policy.stored_bytes_max < total:
                await self.held.mark_full(TenantId(tenant), FULL_S)
        done = [each for each, made in zip(wanted, found, strict=True) if made is not None]
        kept = await asyncio.gather(*(self.held.saved(*each) for each in done))
        for (tenant, response), is_kept in zip(done, kept, strict=True):
            if not is_kept:  # deleted before or meanwhile
                await self.rows.delete(tenant, response)
        for _ in rows:
            self.on_outcome("saved")
        return len(done)

    async def prepare(self, tenant: TenantId, response: StreamId) -> NewRow | Literal["none"] | None:
        """Return the row of an ended response; ``none``: the database gets none; None: it has not ended."""
        from stream_gw.tenancy.sql.responses import NewRow, StoredResponse

        found = await self.held.find(tenant, response)
        if found == "deleted":
            return "none"
        if found is None or not found.response:
            completed = await self.find(tenant, response)
            if completed is None or completed == "deleted" or completed.response is None:
                return None
            found = await self.held.find(tenant, response)
            if found is None or found == "deleted":
                return None
        record = await unpack_record(found.request, b"")
        if not record.expires_at:
            return "none"
        user = None if record.user is None else record.user.replace("\0", "\ufffd")  # PostgreSQL has no NUL
        row = StoredResponse(
            tenant, record.id, user, record.previous_response_id, found.request, found.response, record.expires_at
        )
        items: list[StoredItem] = []
        if record.conversation is not None:
            output = (await unpack_record(found.request, found.response)).output or []
            added = record.input + stored_items(output, f"{record.id[5:]}o")
            items = await pack_items(added)
        return NewRow(row, record.conversation, items)

    async def _read_log(self, tenant: TenantId, stream: StreamId) -> tuple[str, bytes, list[bytes]] | None:
        """Read a stream's status, meta and, once it has ended, all frames; None: there is no such stream."""
        lines: list[bytes] = []
        after = BEGINNING
        while True:
            page = await self._log.watch(stream, tenant, None, after)
            if page is None or page.status == "live":
                return page and (page.status, page.facts, [])
            for entry in page.entries:
                lines += entry.frames.split(b"\n")
                after = Cursor(entry.epoch, entry.last)
            if not page.entries or after.seq >= page.head:
                return page.status, page.facts, lines

    def _age_s(self, response: StreamId) -> float:
        """Seconds since the stream was named."""
        return self._clock.now_us() / 1e6 - created_ms(response) / 1e3


def _whole_response(meta: bytes, lines: list[bytes]) -> dict[str, Any]:
    """Return the response of an ended stream as its readers have it, from its meta and all its frames."""
    facts = meta_decoder.decode(meta).facts
    dialect = facts.own_dialect if facts.own_dialect in DIALECTS else OPENAI
    whole: dict[str, Any] = msgspec.json.decode(response_of(facts, dialect, lines))
    return whole
