"""Whether this gateway should get new traffic."""

from __future__ import annotations

import asyncio

from stream_fabric.errors import FabricError
from stream_fabric.ports import Pools

_CHECK_S = 1.0
"""Time limit of one check; load balancers wait little longer."""


class Readiness:
    """The state behind ``/readyz``."""

    def __init__(self, pools: Pools, ready_without_redis_s: float) -> None:
        self._pools = pools
        self._ready_without_redis_s = ready_without_redis_s
        self._away_since: float | None = None
        """When Redis was first found to be away, on the loop's clock."""
        self.draining = False

    async def check(self) -> tuple[bool, str]:
        """Return whether new traffic should come here, and the reason.

        An outage as short as a failover does not count. All gateways would leave their load balancer at once, although
        their running streams go on and new requests get a retriable error.
        """
        if self.draining:
            return False, "draining"
        try:
            async with asyncio.timeout(_CHECK_S):
                await self._pools.pools(_CHECK_S / 2)
        except (FabricError, TimeoutError) as error:
            reason = error.message if isinstance(error, FabricError) else "Redis does not answer"
            now = asyncio.get_running_loop().time()
            if self._away_since is None:
                self._away_since = now
            away_s = now - self._away_since
            return away_s < self._ready_without_redis_s, f"for {away_s:.0f} s: {reason}"
        self._away_since = None
        return True, "ready"
