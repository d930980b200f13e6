"""Pools whose last replica has died. One that leaves with a shutdown takes its pool away on purpose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from stream_fabric.pool.cells import pool_of
from stream_fabric.ports import Clock, Pools
from stream_fabric.stream.ids import ReplicaId

_KEPT_US = 86_400_000_000
"""Time after which a pool without replicas is taken for one that nobody wants any more."""


class LostPools:
    """Pools that this process has seen lose their last replica, until a replica joins them or a day has passed."""

    def __init__(self, pools: Pools, clock: Clock, on_change: Callable[[Collection[str]], None]) -> None:
        """``on_change`` is called with the names of all lost pools."""
        self._pools = pools
        self._clock = clock
        self._on_change = on_change
        self._since_us: dict[str, int] = {}

    async def receive_dead(self, cell: str, dead: Collection[ReplicaId], listed: Sequence[str]) -> None:
        """Look whether the pool of the cell is lost, before its dead replicas are retired.

        ``listed``: all cells that have replicas. Raises FabricError.
        """
        pool = pool_of(cell)
        took_requests = stays = False
        for each in {cell, *(name for name in listed if pool_of(name) == pool)}:
            changes = await self._pools.changes(each, 0, "")
            for name, info in changes.changed:
                state = "" if info is None else info.state
                took_requests |= name in dead and state == "ready"
                stays |= name not in changes.expired and state != "draining"
        if took_requests and not stays:
            self._since_us[pool] = self._clock.monotonic_us()
            self._on_change(self._since_us.keys())

    async def renew(self, listed: Sequence[str]) -> None:
        """Forget the pools that have a replica again, and those that were lost a day ago. Raises FabricError."""
        now_us = self._clock.monotonic_us()
        for pool, since_us in list(self._since_us.items()):
            cells = [name for name in listed if pool_of(name) == pool]
            infos = [info for cell in cells for info in await self._pools.replicas(cell)]
            if now_us - since_us > _KEPT_US or any(info.state != "draining" for info in infos):
                del self._since_us[pool]
                self._on_change(self._since_us.keys())
