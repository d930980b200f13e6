"""Desired number of replicas of each pool, as planned at this controller's last look; others wait for its changes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from stream_fabric.pool.plan import PoolPlan

STALE_S = 10.0
"""Age from which the counts of the last look are unknown."""


class DesiredReplicas:
    """Desired replicas of each pool, with a wake-up of waiting calls on each change."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._read_at = -math.inf
        self._changed = asyncio.Event()

    def receive(self, plans: Mapping[str, PoolPlan], now: float) -> None:
        """Replace all counts by those of these plans."""
        counts = {pool: plan.pods for pool, plan in plans.items()}
        changed = counts != self._counts or now - self._read_at > STALE_S
        self._counts, self._read_at = counts, now
        if changed:
            self.notify()

    def count(self, pool: str, now: float) -> int | None:
        """Desired replicas of the pool; None: unknown, because the last look is too old or had no plan."""
        return self._counts.get(pool) if now - self._read_at <= STALE_S else None

    def next_change(self) -> asyncio.Event:
        """Event that the next change sets. Take it before reading counts, so that no change is missed."""
        return self._changed

    def notify(self) -> None:
        """Wake everyone who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()
