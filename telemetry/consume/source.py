"""Port of the log that the consumer reads, and its adapter for a Redis Stream. Kafka's adapter is in
``telemetry/kafka/source.py``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from stream_fabric.errors import FabricError, StreamGwError
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from stream_fabric.redis.ingest import RedisIngest
from telemetry.consume.blocks import Block
from telemetry.emit.record import Part, PlainRecord, Record

_T = TypeVar("_T")
Assigned = Callable[[Collection[Part]], None]
Revoked = Callable[[Collection[Part]], Awaitable[None]]


FRESH_S = 1.0
"""Time for which an answer of the log tells where it ends. A log that does not answer may have grown since."""


class Fenced(StreamGwError):
    """Another consumer owns the partition now; nothing was committed."""

    code = "fenced"


class SourceUnavailable(StreamGwError):
    """The log cannot be reached. A commit that was under way may have succeeded or failed."""

    code = "source_unavailable"
    http_status = 503
    retriable = True


@dataclass(frozen=True)
class Position:
    """Committed state of a partition (``next``, ``claim``), and the offsets that its log holds."""

    next: int | None
    claim: Block | None
    begin: int
    end: int


class Source(Protocol):
    """A log in partitions, of which this consumer owns some. All methods but ``start`` raise SourceUnavailable."""

    async def start(self, assigned: Assigned, revoked: Revoked) -> None:
        """Connect and join the group.

        ``assigned`` is called with partitions that this consumer now owns; read them only after ``seek``. ``revoked``
        is awaited before another consumer can own them. After it returns, nothing of them may be committed.
        """

    async def read(self, wanted: Collection[Part], timeout_s: float) -> Mapping[Part, Sequence[Record]]:
        """Return new records of the wanted partitions only. Empty after the timeout."""

    async def position(self, part: Part) -> Position:
        """Read a partition's committed state and the offsets in its log."""

    def seek(self, part: Part, offset: int) -> None:
        """Set the offset from which ``read`` continues."""

    async def commit(self, part: Part, next: int, claim: Block | None) -> None:
        """Commit the next offset and the claim. Raises Fenced when another consumer owns the partition."""

    def end(self, part: Part) -> int | None:
        """Return the offset after the last record of the log. None: unknown, or older than ``FRESH_S``."""

    def lag(self, part: Part, next: int) -> int | None:
        """Return the number of records from ``next`` on, the committed offset, as last known. None: unknown."""

    async def close(self) -> None:
        """Leave the group, so that others take over at once."""


_LEASE_S = 10.0
_RENEW_S = 2.0
_POLL_S = 0.05
_READ_MAX = 2000


class RedisSource:
    """The Redis Stream as one partition. The holder of a lease owns it. Offsets are the Stream's ids and only grow."""

    def __init__(self, client: RedisClient, consumer: str, *, lease_s: float = _LEASE_S) -> None:
        self._events = RedisEvents(client)
        self._ingest = RedisIngest(client, consumer, int(lease_s * 1000))
        self._renew_s = min(_RENEW_S, lease_s / 5)
        self._lease_s = lease_s
        self._part = Part("redis", 0)
        self._next: int | None = None
        self._end: int | None = None
        self._answered_at = float("-inf")
        self._count: int | None = None
        """Records that the Stream held at the last read; a commit deletes those before it."""
        self._owner = False
        self._lost = False
        self._task: asyncio.Task[None] | None = None

    async def start(self, assigned: Assigned, revoked: Revoked) -> None:
        self._task = asyncio.create_task(self._hold_lease(assigned, revoked), name="event lease")

    async def _hold_lease(self, assigned: Assigned, revoked: Revoked) -> None:
        """Acquire and renew the lease; report the partition as assigned or revoked when ownership changes."""
        renewed_at = 0.0
        while True:
            asked_at = time.monotonic()
            try:
                mine = await self._ingest.own() is not None
            except FabricError:
                # Keep the partition until our lease has surely expired; Redis fences later commits itself
                mine = self._owner and time.monotonic() - renewed_at < self._lease_s
            else:
                renewed_at = asked_at
            if self._lost:
                # Another consumer may have had the lease: give the partition up and read its position again
                mine, self._lost = False, False
            if mine and not self._owner:
                self._owner = True
                assigned([self._part])
            elif self._owner and not mine:
                self._owner, self._next = False, None
                await revoked([self._part])
            await asyncio.sleep(self._renew_s)

    async def read(self, wanted: Collection[Part], timeout_s: float) -> Mapping[Part, Sequence[Record]]:
        until = time.monotonic() + timeout_s
        self._count = await from_redis(self._events.count())
        while True:
            if self._part in wanted and self._next is not None:
                asked_at = time.monotonic()
                found = await from_redis(self._events.read(self._next - 1, _READ_MAX))
                self._answered_at = asked_at
                # seek() may have been called meanwhile
                found = [item for item in found if self._next is not None and item[0] >= self._next]
                if found:
                    self._next = found[-1][0] + 1
                    self._end = max(self._end or 0, self._next)
                    # An offset is the clock's milliseconds times 1024, plus a count within the millisecond
                    return {self._part: [PlainRecord(offset, offset >> 10, None, value) for offset, value in found]}
            if time.monotonic() >= until:
                return {}
            await asyncio.sleep(_POLL_S)

    async def position(self, part: Part) -> Position:
        state = await from_redis(self._ingest.own())
        if state is None:
            raise self._fenced_error()
        head = await from_redis(self._events.head())
        self._end = head + 1
        return Position(state.next, Block.decode(state.claim), 0, head + 1)

    def seek(self, part: Part, offset: int) -> None:
        self._next = offset

    async def commit(self, part: Part, next: int, claim: Block | None) -> None:
        if not await from_redis(self._ingest.commit(next, claim.encode() if claim else "")):
            raise self._fenced_error()
        head = await from_redis(self._events.head())
        self._end = head + 1

    def _fenced_error(self) -> Fenced:
        """Mark the lease as lost, and return the error to raise."""
        self._lost = True
        return Fenced("another consumer holds the lease of the event stream, or our lease has expired")

    def end(self, part: Part) -> int | None:
        return self._end if time.monotonic() - self._answered_at <= FRESH_S else None

    def lag(self, part: Part, next: int) -> int | None:
        return self._count  # offsets are moments: their difference is no number of records

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._owner:
            self._owner = False
            try:
                await self._ingest.leave()
            except FabricError:
                return  # the lease expires by itself


async def from_redis(call: Awaitable[_T]) -> _T:
    """Await a call to Redis; a FabricError becomes SourceUnavailable."""
    try:
        return await call
    except FabricError as error:
        raise SourceUnavailable(error.message) from error
