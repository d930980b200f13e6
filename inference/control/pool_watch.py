"""Reads all pools every two seconds and shows them as metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from inference.control.metrics import ControllerMetrics
from stream_fabric.errors import FabricError
from stream_fabric.pool.records import ReplicaInfo, TierQueue
from stream_fabric.ports import Pools, Random

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
_AT_ONCE_MAX = 256
"""Concurrent reads of pools."""


async def watch_pools(pools: Pools, metrics: ControllerMetrics, random: Random) -> None:
    """Read all pools every two seconds and show them as metrics, until cancelled.

    A pool that cannot be read has no values until it can be, and the others have theirs.
    """
    slots = asyncio.Semaphore(_AT_ONCE_MAX)

    async def read(pool: str) -> tuple[Sequence[ReplicaInfo], Sequence[TierQueue]] | None:
        """Read a pool; None: it did not answer before the next look."""
        try:
            async with slots, asyncio.timeout(_LOOK_EVERY_S):
                return await pools.replicas(pool), await pools.tier_queues(pool)
        except (FabricError, TimeoutError) as error:
            metrics.receive_failure()
            why = str(error) or f"it did not answer in {_LOOK_EVERY_S:g} s"
            log.warning("pool not read, retrying: pool=%s error=%s", pool, why)
            return None

    while True:
        try:
            # A planned pool that has left the list, because it has no replica, must show 0 ready ones
            names = sorted({*await pools.pools(), *metrics.planned})
            answers = dict(zip(names, await asyncio.gather(*map(read, names)), strict=True))
            seen = {name: answer for name, answer in answers.items() if answer is not None}
            metrics.receive_pools(seen)
            metrics.receive_shortfalls(seen, asyncio.get_running_loop().time(), answers.keys() - seen.keys())
        except FabricError as error:
            metrics.receive_failure()
            log.warning("pools not read, retrying: error=%s", error)
        await asyncio.sleep(_LOOK_EVERY_S * random.uniform(0.9, 1.0))
