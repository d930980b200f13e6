"""Who waits in a pool's queue and is read here: told each second where they stand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from stream_fabric.errors import FabricUnavailable
from stream_fabric.redis.pool import RedisPools
from stream_gw.directory import Directory
from stream_gw.hub import Subscription

log = logging.getLogger(__name__)

_TOLD_EVERY_S = 1.0
_ASKED_MAX = 1000


class Lines:
    def __init__(self, pools: RedisPools, directory: Directory, now_us: Callable[[], int]) -> None:
        """``now_us``: on the fabric's clock."""
        self._now_us = now_us
        self._pools = pools
        self._directory = directory
        self._by_pool: dict[str, list[Subscription]] = {}

    def add(self, pool: str, subscription: Subscription) -> None:
        """The stream waits: its reader will hear where it stands, until it does no more."""
        self._by_pool.setdefault(pool, []).append(subscription)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_TOLD_EVERY_S)
            for pool in list(self._by_pool):
                try:
                    await self._tell(pool)
                except FabricUnavailable as error:
                    log.warning("the queue of %s cannot be read: %s", pool, error)

    async def _tell(self, pool: str) -> None:
        waiting = [sub for sub in self._by_pool.pop(pool) if not sub.local.head and sub in sub.local.subs]
        for start in range(0, len(waiting), _ASKED_MAX):
            some = waiting[start : start + _ASKED_MAX]
            try:
                of, positions = await self._pools.line(pool, [sub.local.id for sub in some])
            except FabricUnavailable:
                self._by_pool.setdefault(pool, []).extend(waiting[start:])  # they wait on, and are told later
                raise
            plan = self._directory.warming(pool)  # None: there are replicas, and who waits waits for room
            now_us, wake_s = self._now_us(), self._directory.wake_s(pool)
            for sub, position in zip(some, positions, strict=True):
                if position and sub in sub.local.subs:
                    sub.outlet.waits(position, of, None if plan is None else plan.warming_s(position, now_us, wake_s))
                    self.add(pool, sub)
