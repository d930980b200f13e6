"""Looks after the streams of replicas whose lease died, and after what waits in queues. Every gateway and controller
runs one; what they do is idempotent, and a claim keeps them from doing it all at once."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets

from stream_fabric.errors import DeadlineExceeded, FabricUnavailable, ReplicaLost
from stream_fabric.frames import ErrorInfo
from stream_fabric.ids import ReplicaId, StreamId
from stream_fabric.limits import LEASE_TTL_S, REAP_EVERY_S
from stream_fabric.log import Head
from stream_fabric.redis.pool import RedisPools
from stream_fabric.redis.rescue import Rescue
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.wire import ReplyError

log = logging.getLogger(__name__)

_SEEN_DEAD_S = 0.9
"""Seen dead for so long while Redis answered: after an outage of Redis the agents renew first."""
_QUEUE = ReplicaId("(queue)")
_HEADS_MAX = 500

WAITED = DeadlineExceeded("no replica had room in time; ask again later")
LOST = ReplicaLost("the replica that produced this stream died; ask again")


class Reaper:
    def __init__(self, pools: RedisPools, streams: RedisStreamLog) -> None:
        self._pools = pools
        self._streams = streams
        self._rescue = Rescue(pools, streams)
        self._dead_since: dict[tuple[str, ReplicaId], float] = {}

    async def run(self) -> None:
        while True:
            # Jitter spreads the many reapers of a fleet
            await asyncio.sleep(REAP_EVERY_S * random.uniform(0.7, 1.0))
            try:
                await self._reap()
                for pool in await self._pools.pools():
                    await self._sweep_queue(pool)
            except (FabricUnavailable, ReplyError) as error:
                self._dead_since.clear()
                log.warning("dead replicas cannot be looked for: %s", error)

    async def _reap(self) -> None:
        now = asyncio.get_running_loop().time()
        dead = {(pool, replica) for pool in await self._pools.pools() for replica in await self._pools.expired(pool)}
        self._dead_since = {key: self._dead_since.get(key, now) for key in dead}
        for (pool, replica), since in list(self._dead_since.items()):
            if now - since < _SEEN_DEAD_S or not await self._pools.claim_rescue(pool, replica, LEASE_TTL_S):
                continue
            streams = await self._pools.in_flight(pool, replica)
            log.warning("replica %s of pool %s is dead; its %d streams go elsewhere", replica, pool, len(streams))
            rescues = (self._rescue.rescue(pool, replica, stream, LOST) for stream in streams)
            for outcome in await asyncio.gather(*rescues, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
            if await self._pools.retire(pool, replica):
                del self._dead_since[(pool, replica)]

    async def _sweep_queue(self, pool: str) -> None:
        """End what has waited too long, and let go of what was cancelled or has lost its readers."""
        waiting = await self._pools.waiting(pool)
        if not waiting or not await self._pools.claim_rescue(pool, _QUEUE, REAP_EVERY_S / 2):
            return
        error = ErrorInfo.of(WAITED)
        overdue = await self._pools.waiting(pool, overdue=True)
        for stream in overdue:
            await self._streams.fence(stream, None, secrets.token_hex(4), error)
        gone = list(overdue)
        for stream, head in await self._heads([s for s in waiting if s not in set(overdue)]):
            if head is not None and (head.status != "live" or await self._abandoned(pool, stream, head)):
                gone.append(stream)
        if gone:
            await self._pools.leave(pool, gone)

    async def _heads(self, streams: list[StreamId]) -> list[tuple[StreamId, Head | None]]:
        by_partition: dict[int, list[StreamId]] = {}
        for stream in streams:
            by_partition.setdefault(self._streams.partition(stream), []).append(stream)
        found: list[tuple[StreamId, Head | None]] = []
        for partition, some in by_partition.items():
            for start in range(0, len(some), _HEADS_MAX):
                part = some[start : start + _HEADS_MAX]
                found += zip(part, await self._streams.heads(partition, part, None), strict=True)
        return found

    async def _abandoned(self, pool: str, stream: StreamId, head: Head) -> bool:
        """Whether nobody has watched a waiting stream for as long as it runs on without readers."""
        if not head.unwatched:
            return False
        work = await self._pools.work(pool, stream)
        if work is None or work.unwatched_s is None or head.unwatched_ms < work.unwatched_s * 1000:
            return False
        reply = await self._streams.cancel(stream, work.tenant, int(work.unwatched_s * 1000))
        return reply.result == "accepted"
