"""Where the consumer's records come from: the port, and the Redis Stream behind it. Kafka is in ``kafka_source.py``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from stream_fabric.errors import FabricUnavailable, StreamGwError
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from stream_fabric.redis.ingest import RedisIngest
from telemetry.blocks import Block
from telemetry.record import Part, PlainRecord, Record

_T = TypeVar("_T")
Assigned = Callable[[Collection[Part]], None]
Revoked = Callable[[Collection[Part]], Awaitable[None]]


class Fenced(StreamGwError):
    """The partition is another consumer's now; nothing was committed."""

    code = "fenced"


class SourceUnavailable(StreamGwError):
    """The log cannot be reached; whether a commit is in is unknown."""

    code = "source_unavailable"
    http_status = 503
    retriable = True


@dataclass(frozen=True)
class Position:
    """As the partition's group has committed it, and what the log holds."""

    next: int | None
    claim: Block | None
    begin: int
    end: int


class Source(Protocol):
    """A log in partitions, of which this consumer owns some. All methods but ``start`` raise SourceUnavailable."""

    async def start(self, assigned: Assigned, revoked: Revoked) -> None:
        """Connect and take part. ``assigned``: partitions are ours; read them only after ``seek``. ``revoked`` is
        awaited before another can own them: when it returns, nothing of them may be committed any more."""

    async def read(self, wanted: Collection[Part], timeout_s: float) -> Mapping[Part, Sequence[Record]]:
        """New records of the wanted ones; the others rest. Empty after the timeout."""

    async def position(self, part: Part) -> Position: ...

    def seek(self, part: Part, offset: int) -> None: ...

    async def commit(self, part: Part, next: int, claim: Block | None) -> None:
        """Raises Fenced."""

    def end(self, part: Part) -> int | None:
        """The offset after the last in the log, as last heard."""

    async def close(self) -> None:
        """Leave, so that others take over at once."""


_LEASE_S = 10.0
_RENEW_S = 2.0
_POLL_S = 0.05
_READ_MAX = 2000


class RedisSource:
    """One partition; whoever holds the lease owns it. Offsets are the stream's own, and only grow."""

    def __init__(self, client: RedisClient, consumer: str, *, lease_s: float = _LEASE_S) -> None:
        self._events = RedisEvents(client)
        self._ingest = RedisIngest(client, consumer, int(lease_s * 1000))
        self._renew_s = min(_RENEW_S, lease_s / 5)
        self._lease_s = lease_s
        self._part = Part("redis", 0)
        self._next: int | None = None
        self._end: int | None = None
        self._owner = False
        self._lost = False
        self._task: asyncio.Task[None] | None = None

    async def start(self, assigned: Assigned, revoked: Revoked) -> None:
        self._task = asyncio.create_task(self._own(assigned, revoked), name="event lease")

    async def _own(self, assigned: Assigned, revoked: Revoked) -> None:
        heard = 0.0
        while True:
            asked = time.monotonic()
            try:
                mine = await self._ingest.own() is not None
            except FabricUnavailable:
                # Redis does not know our lease's end either; what would be written after it is fenced there
                mine = self._owner and time.monotonic() - heard < self._lease_s
            else:
                heard = asked
            if self._lost:
                # Somebody else had it meanwhile, or might have: begin again with what is written down
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
        while True:
            if self._part in wanted and self._next is not None:
                found = await _told(self._events.read(self._next - 1, _READ_MAX))
                # A seek may have come meanwhile
                found = [item for item in found if self._next is not None and item[0] >= self._next]
                if found:
                    self._next = found[-1][0] + 1
                    self._end = max(self._end or 0, self._next)
                    # An offset is the clock's milliseconds times 1024, and what came within one
                    return {self._part: [PlainRecord(offset, offset >> 10, None, value) for offset, value in found]}
            if time.monotonic() >= until:
                return {}
            await asyncio.sleep(_POLL_S)

    async def position(self, part: Part) -> Position:
        state = await _told(self._ingest.own())
        if state is None:
            raise self._fenced()
        head = await _told(self._events.head())
        self._end = head + 1
        return Position(state.next, Block.decode(state.claim), 0, head + 1)

    def seek(self, part: Part, offset: int) -> None:
        self._next = offset

    async def commit(self, part: Part, next: int, claim: Block | None) -> None:
        if not await _told(self._ingest.commit(next, claim.encode() if claim else "")):
            raise self._fenced()
        head = await _told(self._events.head())
        self._end = head + 1

    def _fenced(self) -> Fenced:
        self._lost = True
        return Fenced("another consumer holds the event stream, or the lease ended")

    def end(self, part: Part) -> int | None:
        return self._end

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._owner:
            self._owner = False
            try:
                await self._ingest.leave()
            except FabricUnavailable:
                return  # the lease ends by itself


async def _told(call: Awaitable[_T]) -> _T:
    try:
        return await call
    except FabricUnavailable as error:
        raise SourceUnavailable(error.message) from error
