"""Sends readers of queued streams their queue position once a second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from stream_fabric.errors import FabricError
from stream_fabric.ports import Pools
from stream_gw.delivery.local_stream import Subscription
from stream_gw.routing.directory import Directory

log = logging.getLogger(__name__)

_SEND_EVERY_S = 1.0
_STREAMS_PER_READ = 1000


class QueuePositions:
    def __init__(self, pools: Pools, directory: Directory, now_us: Callable[[], int]) -> None:
        """``now_us`` is on the fabric's clock."""
        self._now_us = now_us
        self._pools = pools
        self._directory = directory
        self._by_pool: dict[str, list[Subscription]] = {}
        self._sending: set[str] = set()
        """Pools whose positions are being read."""

    def add(self, pool: str, subscription: Subscription) -> None:
        """Send the reader its queue position once a second until the stream leaves the queue."""
        self._by_pool.setdefault(pool, []).append(subscription)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(_SEND_EVERY_S)
                for pool in [each for each in self._by_pool if each not in self._sending]:
                    self._sending.add(pool)  # nothing waits for it: a silent shard of Redis delays its own pools alone
                    tasks.create_task(self._try_send(pool))

    async def _try_send(self, pool: str) -> None:
        try:
            await self._send(pool)
        except FabricError as error:
            log.warning("queue positions not read, retrying: pool=%s error=%s", pool, error)
        finally:
            self._sending.discard(pool)

    async def _send(self, pool: str) -> None:
        """Read the positions of the pool's queued streams, and send each to its reader."""
        waiting = [sub for sub in self._by_pool.pop(pool) if not sub.local.head and sub in sub.local.subs]
        for start in range(0, len(waiting), _STREAMS_PER_READ):
            batch = waiting[start : start + _STREAMS_PER_READ]
            try:
                length, positions = await self._pools.queue_positions(pool, [sub.local.id for sub in batch])
            except FabricError:
                self._by_pool.setdefault(pool, []).extend(waiting[start:])
                raise
            plan = self._directory.warming(pool)  # None: the pool has replicas, so the queue waits for a free slot
            now_us, wake_s = self._now_us(), self._directory.wake_s(pool)
            for sub, position in zip(batch, positions, strict=True):
                if position and sub in sub.local.subs:
                    warming_s = None if plan is None else plan.warming_s(position, now_us, wake_s)
                    sub.outlet.queued(position, length, warming_s)
                    self.add(pool, sub)
