"""The streams' shares of a replica's busy time, and their cost. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Hashable

_HOUR_US = 3_600_000_000


class GpuTime:
    """Divides the time in which a replica computes among the sequences that it computes.

    At each moment every sequence with a slot of the engine gets an equal part. So the shares of all streams add up to
    the time in which the replica had at least one. A sequence without a slot gets nothing until one is free.
    """

    def __init__(self, now: float) -> None:
        self.busy_s = 0.0
        """Time so far in which at least one sequence was computed."""
        self._share_s = 0.0
        """Share of a sequence that had been computed since the beginning."""
        self._at = now
        self._computed: dict[Hashable, float] = {}
        """Sequences with a slot, each with ``_share_s`` at its start."""
        self._waiting: dict[Hashable, None] = {}
        """Sequences without a slot, in the order they came."""

    def begin(self, sequence: Hashable, slots: int, now: float) -> None:
        """Take a new sequence. ``slots``: number of sequences that the engine computes at once."""
        self._pass(now)
        if len(self._computed) < max(slots, 1):
            self._computed[sequence] = self._share_s
        else:
            self._waiting[sequence] = None

    def end(self, sequence: Hashable, slots: int, now: float) -> float:
        """Remove a sequence and return its share in seconds; 0 when it had no slot or is not known."""
        self._pass(now)
        began = self._computed.pop(sequence, None)
        self._waiting.pop(sequence, None)
        while self._waiting and len(self._computed) < max(slots, 1):
            following = next(iter(self._waiting))
            del self._waiting[following]
            self._computed[following] = self._share_s
        return 0.0 if began is None else self._share_s - began

    def _pass(self, now: float) -> None:
        passed_s = max(now - self._at, 0.0)
        self._at = now
        if self._computed:
            self.busy_s += passed_s
            self._share_s += passed_s / len(self._computed)


class GpuPrice:
    """Price of GPU time. What rounding leaves of one cost goes into the next one, so that sums are exact."""

    def __init__(self, hour_micro: int) -> None:
        self._hour_micro = hour_micro
        self._rest = 0

    def cost_of(self, gpu_us: int) -> int:
        """Cost of ``gpu_us`` microseconds in micro-units."""
        cost, self._rest = divmod(gpu_us * self._hour_micro + self._rest, _HOUR_US)
        return cost
