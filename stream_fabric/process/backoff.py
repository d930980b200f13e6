"""Exponential backoff with jitter, for everything that tries again after a failure."""

from __future__ import annotations

import msgspec

from stream_fabric.ports import Random

_DOUBLINGS_MAX = 30


class BackoffPolicy(msgspec.Struct, frozen=True):
    """Delays that double from ``first_s`` to at most ``longest_s`` seconds."""

    first_s: float
    longest_s: float
    jitter: float = 0.5
    """Random share of each delay: 0 gives exact delays, 1 gives delays from 0 to the full one (full jitter)."""

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.longest_s or not 0 <= self.jitter <= 1:
            raise ValueError(f"not 0 < first_s <= longest_s, or jitter not from 0 to 1: {self}")

    def delay_s(self, attempt: int, random: Random) -> float:
        """Seconds to wait before retry number ``attempt``, counted from 0 since the last success."""
        longest_s = min(self.longest_s, self.first_s * 2.0 ** min(attempt, _DOUBLINGS_MAX))
        return longest_s * (1 - self.jitter * random.random())


class Backoff:
    """Delays between the retries of one operation."""

    def __init__(self, policy: BackoffPolicy, random: Random) -> None:
        self._policy = policy
        self._random = random
        self.attempts = 0
        """Delays taken since the last success."""

    def next_s(self) -> float:
        """Return the seconds to wait before the next retry, and count the retry."""
        delay_s = self._policy.delay_s(self.attempts, self._random)
        self.attempts += 1
        return delay_s

    def reset(self) -> None:
        """Start from the shortest delay again, after a success."""
        self.attempts = 0
