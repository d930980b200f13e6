"""Reads all pools every two seconds and shows them as metrics."""

from __future__ import annotations

import asyncio
import logging

from inference.control.metrics import ControllerMetrics
from stream_fabric.errors import FabricError
from stream_fabric.ports import Pools, Random

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0


async def watch_pools(pools: Pools, metrics: ControllerMetrics, random: Random) -> None:
    """Read all pools every two seconds and show them as metrics, until cancelled."""
    while True:
        try:
            names = await pools.pools()
            seen = {name: (await pools.replicas(name), await pools.tier_queues(name)) for name in names}
            metrics.receive_pools(seen)
            metrics.receive_shortfalls(seen, asyncio.get_running_loop().time())
        except FabricError as error:
            metrics.receive_failure()
            log.warning("pools not read, retrying: error=%s", error)
        await asyncio.sleep(_LOOK_EVERY_S * random.uniform(0.9, 1.0))
