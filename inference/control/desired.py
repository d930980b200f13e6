"""How many replicas each pool is to have, as the plans stood at this controller's last look. For whoever is told of
changes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from stream_fabric.plans import PoolPlan

STALE_S = 10.0
"""Who has not looked for so long does not know."""


class Desired:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._read_at = -math.inf
        self._changed = asyncio.Event()

    def receive(self, plans: Mapping[str, PoolPlan], now: float) -> None:
        """All plans, at a look."""
        counts = {pool: plan.pods for pool, plan in plans.items()}
        changed = counts != self._counts or now - self._read_at > STALE_S
        self._counts, self._read_at = counts, now
        if changed:
            self.wake()

    def of(self, pool: str, now: float) -> int | None:
        """None: nobody knows, which is not 0."""
        return self._counts.get(pool) if now - self._read_at <= STALE_S else None

    def change(self) -> asyncio.Event:
        """Of the next change: take it before what it may change."""
        return self._changed

    def wake(self) -> None:
        """Whoever waits for a change is to look again."""
        self._changed.set()
        self._changed = asyncio.Event()
