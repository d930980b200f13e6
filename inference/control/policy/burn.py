"""Error-budget burn rate of a pool's TTFT objective, from its replicas' counts of first tokens. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.pool.replica_load import TTFT_BOUNDS_S
from stream_fabric.process.stats import add_counts, count_above

SHORT_S, LONG_S = 300.0, 3600.0
"""Windows of the burn rate, in seconds."""
_SLOT_S = 10.0
_REPORTED_S = 60.0
"""Time that a replica's counts cover."""
_SAMPLES_MIN = 20
"""First tokens needed for a rate; with fewer, one slow token would look like an outage."""


class Burn:
    """Burn rate of one pool. ``share`` (0 to 1) of first tokens are promised within ``objective_s`` seconds."""

    def __init__(self, objective_s: float, share: float) -> None:
        self._objective_s = objective_s
        self._budget = 1 - share
        self._slots: deque[tuple[float, float, float]] = deque()
        """Start of each slot, with its slow first tokens and all its first tokens."""

    def receive(self, infos: Sequence[ReplicaInfo], passed_s: float, now: float) -> None:
        """Add the first tokens that replicas counted in the last minute, weighted by the time since the last look."""
        counts = add_counts((info.ttft_counts for info in infos), len(TTFT_BOUNDS_S) - 1)
        slow, total = count_above(counts, TTFT_BOUNDS_S, self._objective_s), sum(counts)
        weight = passed_s / _REPORTED_S
        if not self._slots or now - self._slots[-1][0] >= _SLOT_S:
            self._slots.append((now, 0.0, 0.0))
        began, slow_before, total_before = self._slots[-1]
        self._slots[-1] = (began, slow_before + weight * slow, total_before + weight * total)
        while now - self._slots[0][0] > LONG_S:
            self._slots.popleft()

    def rate(self, window_s: float, now: float) -> float:
        """Share of slow first tokens divided by the share that may be slow; 0: too few samples."""
        slots = [slot for slot in self._slots if now - slot[0] <= window_s]
        total = sum(slot[2] for slot in slots)
        return sum(slot[1] for slot in slots) / total / self._budget if total >= _SAMPLES_MIN else 0.0
