"""Pools as controllers and operators see them: the cells of a divided pool added up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from stream_fabric.pool.cells import pool_of, pools_of
from stream_fabric.pool.records import (
    DemandTotals,
    DesiredState,
    OverloadTotals,
    ReplicaInfo,
    SlotUse,
    TierQueue,
)
from stream_fabric.redis.pools import RedisPools
from stream_fabric.stream.ids import ReplicaId, StreamId

T = TypeVar("T")


class DividedPools(RedisPools):
    """``Pools`` whose reads also take the name of a divided pool; other calls take a cell, as ``RedisPools``."""

    _seen: dict[str, dict[str, None]] | None = None
    """Cells of each pool, also those that have no replica now: totals that they counted must not come and go."""

    async def pools(self, timeout_s: float | None = None) -> list[str]:
        return pools_of(await super().pools(timeout_s))

    async def _each(self, pool: str, read: Callable[[str], Awaitable[T]]) -> list[T]:
        """Read every cell of the pool, or the pool itself where it is not divided or is a cell."""
        self._seen = self._seen or {}
        cells = self._seen.setdefault(pool, {})
        cells |= dict.fromkeys(name for name in await RedisPools.pools(self) if pool in (name, pool_of(name)))
        return await asyncio.gather(*map(read, cells or [pool]))

    async def replicas(self, pool: str) -> list[ReplicaInfo]:
        return [info for infos in await self._each(pool, super().replicas) for info in infos]

    async def slot_uses(self, pool: str) -> list[SlotUse]:
        return [use for uses in await self._each(pool, super().slot_uses) for use in uses]

    async def queue_positions(self, pool: str, streams: Sequence[StreamId]) -> tuple[int, list[int]]:
        if streams:
            return await super().queue_positions(pool, streams)
        read = super().queue_positions
        return sum(length for length, _ in await self._each(pool, lambda cell: read(cell, ()))), []

    async def tier_queues(self, pool: str) -> list[TierQueue]:
        by_cell = await self._each(pool, super().tier_queues)
        return [
            TierQueue(
                sum(queue.depth for queue in tier),
                max(queue.oldest_s for queue in tier),
                sum(queue.prompt_tokens for queue in tier),
                sum(queue.output_tokens for queue in tier),
            )
            for tier in zip(*by_cell, strict=True)
        ]

    async def demand_totals(self, pool: str) -> DemandTotals:
        return DemandTotals(*map(sum, zip(*await self._each(pool, super().demand_totals), strict=True)))

    async def overload_totals(self, pool: str) -> OverloadTotals:
        found = await self._each(pool, super().overload_totals)
        rejected = tuple(map(sum, zip(*(totals.rejected for totals in found), strict=True)))
        asked = tuple(map(sum, zip(*(totals.asked for totals in found), strict=True)))
        overflowed = sum(totals.overflowed for totals in found)
        return OverloadTotals(rejected, overflowed, asked, sum(totals.yielded_to for totals in found))

    async def request_state(
        self, pool: str, replica: ReplicaId, state: DesiredState, asked_by: str = "operator"
    ) -> bool:
        infos = await self.replicas(pool)
        cell = next((info.pool for info in infos if info.replica == replica), pool)
        return await super().request_state(cell, replica, state, asked_by)
