"""Ends the streams of replicas whose lease died. Every gateway and controller runs one; what they do is idempotent."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets

from stream_fabric.errors import FabricUnavailable, ReplicaLost
from stream_fabric.frames import ErrorInfo
from stream_fabric.ids import ReplicaId
from stream_fabric.limits import REAP_EVERY_S
from stream_fabric.log import StreamLog
from stream_fabric.redis.pool import RedisPools
from stream_fabric.redis.wire import ReplyError

log = logging.getLogger(__name__)

_SEEN_DEAD_S = 0.9
"""Seen dead for so long while Redis answered: after an outage of Redis the agents renew first."""

LOST = ErrorInfo.of(ReplicaLost("the replica that produced this stream died; ask again"))


class Reaper:
    def __init__(self, pools: RedisPools, streams: StreamLog) -> None:
        self._pools = pools
        self._streams = streams
        self._dead_since: dict[tuple[str, ReplicaId], float] = {}

    async def run(self) -> None:
        while True:
            # Jitter spreads the many reapers of a fleet
            await asyncio.sleep(REAP_EVERY_S * random.uniform(0.7, 1.0))
            try:
                await self._reap()
            except (FabricUnavailable, ReplyError) as error:
                self._dead_since.clear()
                log.warning("dead replicas cannot be looked for: %s", error)

    async def _reap(self) -> None:
        now = asyncio.get_running_loop().time()
        dead = {(pool, replica) for pool in await self._pools.pools() for replica in await self._pools.expired(pool)}
        self._dead_since = {key: self._dead_since.get(key, now) for key in dead}
        for (pool, replica), since in list(self._dead_since.items()):
            if now - since < _SEEN_DEAD_S:
                continue
            streams = await self._pools.in_flight(pool, replica)
            log.warning("replica %s of pool %s is dead; ending its %d streams", replica, pool, len(streams))
            fences = (self._streams.fence(stream, replica, secrets.token_hex(4), LOST) for stream in streams)
            for outcome in await asyncio.gather(*fences, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
            await self._pools.retire(pool, replica)
            del self._dead_since[(pool, replica)]
