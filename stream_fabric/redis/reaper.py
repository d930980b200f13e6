"""Looks after the streams of replicas whose lease died, and after what waits in queues. Every gateway and controller
runs one; what they do is idempotent, and a claim keeps them from doing it all at once."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from stream_fabric.errors import DeadlineExceeded, FabricUnavailable, ReplicaLost
from stream_fabric.frames import ErrorInfo
from stream_fabric.ids import ReplicaId, StreamId
from stream_fabric.limits import LEASE_TTL_S, REAP_EVERY_S
from stream_fabric.log import Head
from stream_fabric.redis.pool import RedisPools
from stream_fabric.redis.rescue import Rescue, Witness
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.wire import ReplyError

log = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

SEEN_DEAD_S = 0.9
"""Seen dead for so long while Redis answered: after an outage of Redis the agents renew first."""
_QUEUE = ReplicaId("(queue)")
_HEADS_MAX = 500
_AT_ONCE_MAX = 256
"""Calls on their way; the process has others to serve."""

WAITED = DeadlineExceeded("no replica had room in time; ask again later")
LOST = ReplicaLost("the replica that produced this stream died; ask again")


class Reaper:
    def __init__(self, pools: RedisPools, streams: RedisStreamLog, witness: Witness | None = None) -> None:
        self._pools = pools
        self._streams = streams
        self._witness = witness
        self._rescue = Rescue(pools, streams, witness)
        self._dead_since: dict[tuple[str, ReplicaId], float] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # a long queue must not keep the dead waiting
            tasks.create_task(self._every(self._reap, "dead replicas cannot be looked for"), name="reap")
            tasks.create_task(self._every(self._sweep, "queues cannot be looked through"), name="sweep")

    async def _every(self, turn: Callable[[], Awaitable[None]], failed: str) -> None:
        while True:
            # Jitter spreads the many reapers of a fleet
            await asyncio.sleep(REAP_EVERY_S * random.uniform(0.7, 1.0))
            try:
                await turn()
            except (FabricUnavailable, ReplyError) as error:
                log.warning("%s: %s", failed, error)

    async def _reap(self) -> None:
        now = asyncio.get_running_loop().time()
        since, self._dead_since = self._dead_since, {}  # what was seen before an outage counts no more
        expired = await _of_each(self._pools.expired, await self._pools.pools())
        dead = [(pool, replica) for pool, replicas in expired.items() for replica in replicas]
        dead_since = {key: since.get(key, now) for key in dead}
        whole = True
        for (pool, replica), seen_at in list(dead_since.items()):
            if now - seen_at < SEEN_DEAD_S or not await self._pools.claim_rescue(pool, replica, LEASE_TTL_S):
                continue
            streams = await self._pools.in_flight(pool, replica)
            log.warning("replica %s of pool %s is dead; its %d streams go elsewhere", replica, pool, len(streams))
            if self._witness is not None:
                self._witness.tell_dead(pool, replica, len(streams))
            done = await _of_each(partial(self._rescue.rescue, pool, replica, error=LOST, dead=True), streams)
            whole = whole and len(done) == len(streams)
            if len(done) == len(streams) and await self._pools.retire(pool, replica):
                del dead_since[(pool, replica)]
        if whole:
            self._dead_since = dead_since

    async def _sweep(self) -> None:
        await _of_each(self._sweep_queue, await self._pools.pools())

    async def _sweep_queue(self, pool: str) -> None:
        """End what has waited too long, and let go of what was cancelled or has lost its readers."""
        count, _ = await self._pools.line(pool, [])
        if not count or not await self._pools.claim_rescue(pool, _QUEUE, REAP_EVERY_S / 2):
            return
        waiting = await self._pools.waiting(pool)
        overdue = await self._pools.waiting(pool, overdue=True)
        gone = list(await _of_each(self._fail, overdue))
        heads = await self._heads([s for s in waiting if s not in set(overdue)])
        gone += [stream for stream, head in heads.items() if head.status != "live"]
        unwatched = [stream for stream, head in heads.items() if head.status == "live" and head.unwatched]
        abandoned = await _of_each(lambda stream: self._abandoned(pool, stream, heads[stream]), unwatched)
        gone += [stream for stream, cancelled in abandoned.items() if cancelled]
        if gone:
            await self._pools.leave(pool, gone)

    async def _fail(self, stream: StreamId) -> None:
        await self._streams.fence(stream, None, secrets.token_hex(4), ErrorInfo.of(WAITED))

    async def _heads(self, streams: list[StreamId]) -> dict[StreamId, Head]:
        """Of those that there are."""
        by_partition: dict[int, list[StreamId]] = {}
        for stream in streams:
            by_partition.setdefault(self._streams.partition(stream), []).append(stream)
        parts = [
            (partition, tuple(some[start : start + _HEADS_MAX]))
            for partition, some in by_partition.items()
            for start in range(0, len(some), _HEADS_MAX)
        ]
        read = await _of_each(lambda part: self._streams.heads(part[0], part[1], None), parts)
        return {
            stream: head
            for (_, some), heads in read.items()
            for stream, head in zip(some, heads, strict=True)
            if head is not None
        }

    async def _abandoned(self, pool: str, stream: StreamId, head: Head) -> bool:
        """Whether nobody has watched a waiting stream for as long as it runs on without readers."""
        try:
            work = await self._pools.work(pool, stream)
        except msgspec.MsgspecError:  # another version's: it waits until it is handed out, or its time is over
            return False
        if work is None or work.unwatched_s is None or head.unwatched_ms < work.unwatched_s * 1000:
            return False
        reply = await self._streams.cancel(stream, work.tenant, int(work.unwatched_s * 1000))
        return reply.result == "accepted"


async def _of_each(call: Callable[[K], Awaitable[T]], keys: Sequence[K]) -> dict[K, T]:
    """What ``call`` says of each. Without those whose part of the fabric is away: they keep no other waiting, and are
    looked after next time."""
    found: dict[K, T] = {}
    for start in range(0, len(keys), _AT_ONCE_MAX):
        some = keys[start : start + _AT_ONCE_MAX]
        for key, outcome in zip(some, await asyncio.gather(*map(call, some), return_exceptions=True), strict=True):
            if isinstance(outcome, FabricUnavailable | ReplyError):
                log.warning("%s cannot be looked after: %s", key, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                found[key] = outcome
    return found
