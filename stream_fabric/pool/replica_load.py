"""Estimates of a replica's speed and pending work. Pure: time is an argument.

Agents put them into their leases; the fleet simulator computes them in the same way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets for time to first token, in seconds. One more bucket takes everything above."""
TTFT_BOUNDS_S = (0.0, *TTFT_BUCKETS_S, 2 * TTFT_BUCKETS_S[-1])
"""Lower and upper bounds of all buckets. The last bucket is taken to end at twice the largest bound."""

_PREFILL_PER_S = 8000.0
_SPEED_DECAY = 0.98
"""Weight that older samples keep when a new sample comes."""
_SAMPLE_TOKENS = 8192
"""A sample of the prefill speed ends at this many tokens, even if more prompts wait."""
_FIRST_LENGTH_TOKENS = 256.0
_FIRST_ANSWERS = 4
"""Weight of the first length, in answers. The first answers to end are the short ones, which it makes up for."""
_LENGTH_WEIGHT = 0.02
_WINDOW_S = 60.0
_SLOT_S = 5.0


class PrefillSpeed:
    """Prefill speed of a replica: prompt tokens computed per second while prompts are pending.

    Older samples weigh less. A sample covers prompts computed without a pause. A short sample says little: most of
    its time belongs to the engine step that was under way when it began.
    """

    def __init__(self, at_first_per_s: float = _PREFILL_PER_S) -> None:
        self._tokens = at_first_per_s
        self._seconds = 1.0
        self._sample_tokens = 0
        self._sample_s = 0.0

    @property
    def per_s(self) -> float:
        return self._tokens / self._seconds

    def receive(self, tokens: int, seconds: float, *, goes_on: bool) -> None:
        """Add prompt tokens that were computed in the last ``seconds``. ``goes_on``: more prompts are pending."""
        self._sample_tokens += tokens
        self._sample_s += seconds
        if self._sample_tokens >= _SAMPLE_TOKENS:
            self._tokens = self._tokens * _SPEED_DECAY + self._sample_tokens
            self._seconds = self._seconds * _SPEED_DECAY + self._sample_s
            goes_on = False
        if not goes_on:
            self.drop_sample()

    def drop_sample(self) -> None:
        """Forget the sample under way. The speed stays."""
        self._sample_tokens, self._sample_s = 0, 0.0


class TypicalLength:
    """Mean of the answers' lengths, in tokens, in which older answers soon weigh less."""

    def __init__(self) -> None:
        self.tokens = _FIRST_LENGTH_TOKENS
        self._answers = _FIRST_ANSWERS

    def receive_end(self, tokens: int) -> None:
        self._answers += 1
        self.tokens += (tokens - self.tokens) * max(1 / self._answers, _LENGTH_WEIGHT)


class TtftHistogram:
    """Times to first token of the last minute, counted by ``TTFT_BUCKETS_S`` and one bucket for all above."""

    def __init__(self) -> None:
        self._slots: deque[tuple[float, list[int]]] = deque()

    def receive(self, ttft_s: float, now: float) -> None:
        if not self._slots or now - self._slots[-1][0] >= _SLOT_S:
            self._slots.append((now, [0] * (len(TTFT_BUCKETS_S) + 1)))
        self._slots[-1][1][bisect_left(TTFT_BUCKETS_S, ttft_s)] += 1

    def counts(self, now: float) -> tuple[int, ...]:
        """Counts by bucket, without the empty buckets at the end."""
        while self._slots and now - self._slots[0][0] >= _WINDOW_S:
            self._slots.popleft()
        counts = [sum(column) for column in zip(*(slot for _, slot in self._slots), strict=True)]
        while counts and not counts[-1]:
            counts.pop()
        return tuple(counts)


def pending_prefill_s(total_tokens: int, first_tokens: int, spent_s: float, per_s: float) -> float:
    """Seconds until all pending prompts are computed, at ``per_s`` prompt tokens per second.

    ``spent_s``: time already spent on the first prompt, which has ``first_tokens`` tokens to compute.
    """
    return total_tokens / per_s - min(spent_s, first_tokens / per_s)


def pending_output_tokens(typical: float, limit: int, made: int) -> float:
    """Expected number of output tokens that a running answer has still to generate.

    Lengths of answers vary so much that a long answer is no closer to its end: each still has the ``typical`` length
    to come, within its ``limit``. ``made``: tokens generated until now.
    """
    return min(typical, max(limit - made, 1))
