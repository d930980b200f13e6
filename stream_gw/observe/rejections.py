"""Reports requests that were rejected for lack of capacity as fleet events.

Rejections are counted, and reported periodically with one event per layer, pool and reason.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from stream_fabric.limits import SHED_KINDS_MAX, SHED_TOLD_EVERY_S
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_gw.observe.metrics import rejection_layer
from stream_gw.observe.trace import ReaderOutcome

_OTHERS = ("", "others")


class Rejections:
    def __init__(self, fleet_events: FleetEventReporter) -> None:
        self._fleet_events = fleet_events
        self._counts: Counter[tuple[str, str, str]] = Counter()
        """Rejections since the last report by (layer, pool, reason)."""

    def receive_outcome(self, outcome: ReaderOutcome) -> None:
        """Count a reader that was rejected for lack of capacity."""
        layer = rejection_layer(outcome)
        if layer:
            kind = (layer, outcome.pool, outcome.error_code)
            if kind not in self._counts and len(self._counts) >= SHED_KINDS_MAX:
                kind = (layer, *_OTHERS)
            self._counts[kind] += 1

    async def run(self) -> None:
        """Report periodically, and once more at the end."""
        try:
            while True:
                await asyncio.sleep(SHED_TOLD_EVERY_S)
                self.report()
        finally:
            self.report()

    def report(self) -> None:
        """Report one fleet event per layer, pool and reason since the last report."""
        counts, self._counts = self._counts, Counter()
        for (layer, pool, reason), count in counts.items():
            self._fleet_events.report(
                "shed", pool=pool, state=layer, reason=reason,
                figures={"requests": count, "within_s": SHED_TOLD_EVERY_S},
            )  # fmt: skip
