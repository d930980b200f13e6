"""Arrival rates of a pool and their growth, from counters that only grow. Pure: time is an argument."""

from __future__ import annotations

import math
from collections import deque

from stream_fabric.pool.records import DemandTotals

RATE_S = 30.0
"""Span of the short rate, which reacts to a step."""
_LEVEL_S = 120.0
"""Span of the long rate, which smooths random variation."""
_KNOWN_S = 10.0
"""Shortest span that gives a rate."""
_SLOPE_S = 60.0
_SLOPE_EVERY_S = 5.0
_SIGMAS = 3.0
"""Standard deviations of a count above which a difference is not random variation."""
_KEPT_S = 600.0


class Arrivals:
    """Rates of requests and tokens that arrive at one pool."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, DemandTotals]] = deque()
        self._growths: deque[tuple[float, float]] = deque()

    def clear(self) -> None:
        self._samples.clear()
        self._growths.clear()

    def receive(self, now: float, arrived: DemandTotals) -> None:
        """Take the counters' values. Values lower than before mean that the counters were lost and start again."""
        if self._samples and any(new < old for new, old in zip(arrived, self._samples[-1][1], strict=True)):
            self._samples.clear()
        self._samples.append((now, arrived))
        while now - self._samples[0][0] > _KEPT_S:
            self._samples.popleft()

    def per_s(self) -> DemandTotals | None:
        """Requests, prompt tokens and output tokens per second now; None: not enough samples.

        The mean over two minutes, or over the last half minute if that is higher by more than random variation.
        """
        long, short = self._rate(_LEVEL_S), self._rate(RATE_S)
        if long is None or short is None:
            return None
        return short if short.requests - long.requests > _SIGMAS * math.sqrt(long.requests / RATE_S) else long

    def _rate(self, span_s: float, ago_s: float = 0.0) -> DemandTotals | None:
        """Mean rates over the ``span_s`` seconds that ended ``ago_s`` seconds ago.

        For ``ago_s`` 0 a shorter span is accepted.
        """
        end = self._samples[-1][0] - ago_s
        after = next(((at, counts) for at, counts in reversed(self._samples) if at <= end), None)
        before = next(((at, counts) for at, counts in reversed(self._samples) if at <= end - span_s), None)
        if before is None and not ago_s:
            before = self._samples[0]
        if after is None or before is None or after[0] - before[0] < _KNOWN_S:
            return None
        passed_s = after[0] - before[0]
        return DemandTotals(*((new - old) / passed_s for new, old in zip(after[1], before[1], strict=True)))

    def growth(self, horizon_s: float, limit: float) -> float:
        """Expected arrival rate in ``horizon_s`` seconds as a multiple of the current one, from 1 to ``limit``.

        Growth counts only if the rate rose in both halves of a span, each time by more than random variation, and still
        rises, as estimated at every moment of the last minute. A step is not growth.
        """
        now = self._samples[-1][0]
        if not self._growths or now - self._growths[-1][0] >= _SLOPE_EVERY_S:
            self._growths.append((now, self._estimate_growth(horizon_s)))
        while now - self._growths[0][0] > _SLOPE_S:
            self._growths.popleft()
        known_s = now - self._growths[0][0]
        return min(min(growth for _, growth in self._growths), limit) if known_s >= _SLOPE_S - _SLOPE_EVERY_S else 1.0

    def _estimate_growth(self, horizon_s: float) -> float:
        now, growth = self._rate(RATE_S), 1.0
        if now is None or now.requests <= 0:
            return 1.0
        for half_s in (60.0, 150.0):
            late, middle, start = (self._rate(RATE_S, ago_s) for ago_s in (half_s / 2, half_s, 2 * half_s))
            if late is None or middle is None or start is None:
                continue
            recent = 4 * max(now.requests - late.requests, 0.0)
            slope = min(_rise(middle, now), _rise(start, middle), recent) / half_s
            growth = max(growth, 1 + slope * (horizon_s + RATE_S / 2) / now.requests)
        return growth


def _rise(before: DemandTotals, now: DemandTotals) -> float:
    """Increase in requests per second; 0 if it is within random variation."""
    rise = now.requests - before.requests
    return rise if rise > _SIGMAS * math.sqrt((now.requests + before.requests) / RATE_S) else 0.0
