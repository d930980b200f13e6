"""The items that a new response builds on: those of its chain of previous responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stream_fabric.limits import RESPONSE_CHAIN_MAX, RESPONSE_HISTORY_BYTES_MAX
from stream_fabric.stream.ids import StreamId, TenantId, is_stream_id
from stream_gw.responses.errors import HistoryTooLong, PreviousResponseNotFound, PreviousResponseRunning
from stream_gw.responses.held import HeldRecords
from stream_gw.responses.packing import Count, uncounted, unpack_record
from stream_gw.responses.records import History, Item, ResponseRecord
from stream_gw.responses.seal import is_window

if TYPE_CHECKING:
    from stream_gw.responses.database import ResponseRows

_ROWS = 50
"""Responses that are read from the database at once."""


async def chain_items(
    held: HeldRecords, tenant: TenantId, response: str, user: str | None, count: Count = uncounted
) -> History:
    """Return the items of a response and of all that it builds on, the oldest first.

    Raises PreviousResponseNotFound, PreviousResponseRunning, HistoryTooLong, ResponsesUnavailable, FabricError, and
    what ``count`` raises.
    """
    chain = _Chain()
    before: str | None = response
    while before is not None:
        record = await _held(held, tenant, before, count)
        if record is not None:
            if not may_see(user, record.user):
                raise PreviousResponseNotFound(before)
            if record.response is None:
                raise PreviousResponseRunning(before)
            before = record.previous_response_id if chain.add(record) else None
        elif held.rows is None:
            raise PreviousResponseNotFound(before)
        else:
            # One that is in the database can build on one that still waits for it, so the loop goes on
            before = await _add_rows(chain, held.rows, tenant, before, user, count)
    return chain.items()


def may_see(user: str | None, owner: str | None) -> bool:
    """True if a caller whose credential is bound to a user (None: to none) may see what belongs to ``owner``."""
    return user is None or user == owner


async def _held(held: HeldRecords, tenant: TenantId, response: str, count: Count) -> ResponseRecord | None:
    if not is_stream_id(response):
        raise PreviousResponseNotFound(response)
    record = await held.find(tenant, StreamId(response), count)
    if record == "deleted":
        raise PreviousResponseNotFound(response)
    return record


async def _add_rows(
    chain: _Chain, rows: ResponseRows, tenant: TenantId, response: str, user: str | None, count: Count
) -> str | None:
    """Add what the database has of a chain; return the first response that it does not have."""
    links = await rows.chain(tenant, response)
    if not links:
        raise PreviousResponseNotFound(response)
    for link in links:
        if not may_see(user, link.user):
            raise PreviousResponseNotFound(link.id)
    begin = 0
    while begin < len(links):
        # Compressed, so the items have no fewer bytes: what is too long is not read
        part = links[begin : begin + chain.room([link.bytes for link in links[begin : begin + _ROWS]])]
        begin += len(part)
        found = await rows.read(tenant, [link.id for link in part])
        for link in part:
            row = found.get(link.id)
            if row is None:  # deleted between the two reads
                raise PreviousResponseNotFound(link.id)
            if not chain.add(await unpack_record(row.request, row.response, count)):
                return None
    return links[-1].previous


class _Chain:
    """Responses from the newest to the oldest, within the limits."""

    def __init__(self) -> None:
        self._parts: list[list[Item]] = []
        self._bytes = 0

    def check(self, count: int, size: int) -> None:
        """Check that so many more responses of so many bytes fit. Raises HistoryTooLong."""
        if len(self._parts) + count > RESPONSE_CHAIN_MAX:
            raise HistoryTooLong(
                f"the response builds on more than {RESPONSE_CHAIN_MAX} others; compact the conversation with "
                "POST /v1/responses/compact",
                param="previous_response_id",
            )
        if self._bytes + size > RESPONSE_HISTORY_BYTES_MAX:
            raise too_many_bytes("previous_response_id")

    def room(self, sizes: list[int]) -> int:
        """Return how many of the next responses, of so many bytes each, fit. Raises HistoryTooLong if none does."""
        self.check(1, sizes[0])
        count, size = 0, self._bytes
        while count < min(len(sizes), RESPONSE_CHAIN_MAX - len(self._parts)):
            size += sizes[count]
            if size > RESPONSE_HISTORY_BYTES_MAX:
                break
            count += 1
        return count

    def add(self, record: ResponseRecord) -> bool:
        """Add a response. False: it has what stands for all items before. Raises HistoryTooLong."""
        items = record.input + (record.output or [])
        window = next((at for at in range(len(items) - 1, -1, -1) if is_window(items[at])), None)
        items = items[window:]
        size = len(msgspec.json.encode(items))
        self.check(1, size)
        self._parts.append(items)
        self._bytes += size
        return window is None

    def items(self) -> History:
        return History((item for part in reversed(self._parts) for item in part), size=self._bytes)


def too_many_bytes(param: str) -> HistoryTooLong:
    return HistoryTooLong(
        f"what the response builds on exceeds {RESPONSE_HISTORY_BYTES_MAX} bytes; compact the conversation with "
        "POST /v1/responses/compact",
        param=param,
    )
