"""Whether this gateway should get new traffic."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from stream_fabric.errors import FabricError
from stream_fabric.ports import Pools, StreamLog

_CHECK_S = 1.0
"""Time limit of one check; load balancers wait little longer."""
_PARTITIONS_ASKED = 8


class Readiness:
    """The state behind ``/readyz``."""

    def __init__(self, pools: Pools, log: StreamLog, ready_without_redis_s: float) -> None:
        self._pools = pools
        self._log = log
        self._ready_without_redis_s = ready_without_redis_s
        self._away_since: float | None = None
        """When Redis was first found to be away, on the loop's clock."""
        self.leaving = False
        """Whether the process will end. New requests are answered until ``draining``, while load balancers notice."""
        self.draining = False
        """Whether new requests are refused."""

    async def check(self) -> tuple[bool, str]:
        """Return whether new traffic should come here, and the reason.

        An outage as short as a failover does not count. All gateways would leave their load balancer at once, although
        their running streams go on and new requests get a retriable error.
        """
        if self.leaving or self.draining:
            return False, "draining"
        reason = await self._why_away()
        if reason:
            now = asyncio.get_running_loop().time()
            if self._away_since is None:
                self._away_since = now
            away_s = now - self._away_since
            return away_s < self._ready_without_redis_s, f"for {away_s:.0f} s: {reason}"
        self._away_since = None
        return True, "ready"

    async def _why_away(self) -> str:
        """Return why Redis is away; empty: a part of it answers.

        The list of pools is on one shard of a cluster, and the gateway serves what the others have.
        """
        step = max(1, self._log.partitions // _PARTITIONS_ASKED)
        reads: list[Coroutine[Any, Any, object]] = [self._pools.pools(_CHECK_S / 2)]
        reads += [self._log.heads(partition, [], None) for partition in range(0, self._log.partitions, step)]
        asked = [asyncio.create_task(read) for read in reads]
        reason = ""
        try:
            async with asyncio.timeout(_CHECK_S):
                for answer in asyncio.as_completed(asked):
                    try:
                        await answer
                        return ""
                    except FabricError as error:
                        reason = reason or error.message
        except TimeoutError:
            pass
        finally:
            for task in asked:
                task.cancel()
        return reason or "Redis does not answer"
