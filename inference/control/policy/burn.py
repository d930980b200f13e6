"""How fast a pool uses up what may be slow, from what its replicas say of their first tokens. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from stream_fabric.metrics import TTFT_BUCKETS_S
from stream_fabric.redis.pool import ReplicaInfo

SHORT_S, LONG_S = 300.0, 3600.0
_SLOT_S = 10.0
_SKETCH_S = 60.0
"""What a replica tells is of its last minute."""
_SAMPLES_MIN = 20
"""First tokens below which one slow one would be a fire."""
_BOUNDS = (0.0, *TTFT_BUCKETS_S, 2 * TTFT_BUCKETS_S[-1])


class Burn:
    """Of a pool that promises that this share of first tokens come within its objective."""

    def __init__(self, objective_s: float, share: float) -> None:
        self._objective_s = objective_s
        self._budget = 1 - share
        self._slots: deque[tuple[float, float, float]] = deque()
        """When each began, with how many first tokens were slow and how many there were."""

    def receive(self, infos: Sequence[ReplicaInfo], passed_s: float, now: float) -> None:
        """Each look tells of a minute and stands for the time since the one before."""
        slow = total = 0.0
        for info in infos:
            for (low, high), count in zip(pairwise(_BOUNDS), info.ttft_counts, strict=False):
                total += count
                # Within its bucket as if they were spread evenly over it
                slow += count * min(max((high - self._objective_s) / (high - low), 0.0), 1.0)
        weight = passed_s / _SKETCH_S
        if not self._slots or now - self._slots[-1][0] >= _SLOT_S:
            self._slots.append((now, 0.0, 0.0))
        began, before, all_before = self._slots[-1]
        self._slots[-1] = (began, before + weight * slow, all_before + weight * total)
        while now - self._slots[0][0] > LONG_S:
            self._slots.popleft()

    def rate(self, window_s: float, now: float) -> float:
        """The share that was slow, to the share that may be; 0: too few to tell."""
        slots = [slot for slot in self._slots if now - slot[0] <= window_s]
        total = sum(slot[2] for slot in slots)
        return sum(slot[1] for slot in slots) / total / self._budget if total >= _SAMPLES_MIN else 0.0
