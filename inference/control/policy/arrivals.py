"""Arrival rates of a pool and their growth, from counters that only grow. Pure: time is an argument."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise

from stream_fabric.pool.records import DemandTotals

RATE_S = 30.0
"""Longest span of the short rates, which react to a step."""
_SHORT_S = (5.0, 10.0)
"""Shorter spans. In so few seconds a step is seen sooner, and chance is larger, so only what exceeds chance counts."""
_LEVEL_S = 120.0
"""Span of the long rate, which smooths random variation."""
_KNOWN_S = 10.0
"""Shortest time of looking that gives a rate."""
_SLOPE_S = 60.0
_SLOPE_EVERY_S = 5.0
SIGMAS = 3.0
"""Standard deviations of a count above which a difference is not random variation."""
_KEPT_S = 600.0
_USUAL_AGO_S = 60.0
"""Time that the measure of usual variation leaves out: a step is not usual."""
_USUAL_SPANS = 10
"""Spans needed to measure it; before, arrivals are taken as independent of each other."""
_BURSTS_EVERY_S = 5.0


class Arrivals:
    """Rates of requests and tokens that arrive at one pool."""

    def __init__(self, sigmas: float = SIGMAS) -> None:
        """``sigmas``: standard deviations above which a shorter span's rate counts."""
        self._sigmas = sigmas
        self._samples: deque[tuple[float, DemandTotals]] = deque()
        self._growths: deque[tuple[float, float]] = deque()
        self._burstiness: dict[float, tuple[float, float]] = {}
        """By span: the moment of its measurement, and the result."""

    def clear(self) -> None:
        self._samples.clear()
        self._growths.clear()
        self._burstiness.clear()

    def receive(self, now: float, arrived: DemandTotals) -> None:
        """Take the counters' values. Values lower than before mean that the counters were lost and start again."""
        if self._samples and any(new < old for new, old in zip(arrived, self._samples[-1][1], strict=True)):
            self._samples.clear()
        self._samples.append((now, arrived))
        while now - self._samples[0][0] > _KEPT_S:
            self._samples.popleft()

    def per_s(self) -> DemandTotals | None:
        """Requests, prompt tokens and output tokens per second now; None: not enough samples.

        The mean over two minutes, or over the last half minute if that is higher by more than random variation. Until
        a step fills half a minute, it is the part of a shorter span's rate that exceeds random variation.
        """
        long, short = self._rate(_LEVEL_S), self._rate(RATE_S)
        if long is None or short is None:
            return None
        best = short if short.requests - long.requests > self._noise_per_s(long, RATE_S) else long
        for span_s in _SHORT_S:
            latest = self._rate(span_s)
            if latest is None:
                continue
            certain = latest.requests - self._noise_per_s(long, span_s)
            if certain > best.requests:  # with the lengths of more requests than arrive in so short a time
                best = DemandTotals(*(figure * certain / short.requests for figure in short))
        return best

    def _noise_per_s(self, long: DemandTotals, span_s: float) -> float:
        """Largest rise of a span's rate above the long rate that is random variation."""
        return self._sigmas * math.sqrt(self._dispersion(span_s) * max(long.requests, 1 / span_s) / span_s)

    def _dispersion(self, span_s: float) -> float:
        """Variance of the number of requests in such a span, relative to independent arrivals; at least 1.

        From differences of consecutive spans, so that a rate that rises slowly counts little.
        """
        now = self._samples[-1][0]
        at, known = self._burstiness.get(span_s, (-math.inf, 1.0))
        if now - at < _BURSTS_EVERY_S:
            return known
        counts = self._counts(span_s, now - _USUAL_AGO_S)
        if len(counts) >= _USUAL_SPANS and (mean := sum(counts) / len(counts)):
            squares = [(two - one) ** 2 for one, two in pairwise(counts)]
            known = max(sum(squares) / len(squares) / 2 / mean, 1.0)
        else:
            known = 1.0
        self._burstiness[span_s] = now, known
        return known

    def _counts(self, span_s: float, until: float) -> list[float]:
        """Requests in each whole span before ``until``."""
        counts: list[float] = []
        begin: tuple[float, float] | None = None
        for at, totals in self._samples:
            if at > until:
                break
            if begin is None:
                begin = at, totals.requests
            elif at - begin[0] >= span_s - 1e-3:
                counts.append((totals.requests - begin[1]) * span_s / (at - begin[0]))
                begin = at, totals.requests
        return counts

    def _rate(self, span_s: float, ago_s: float = 0.0) -> DemandTotals | None:
        """Mean rates over the ``span_s`` seconds that ended ``ago_s`` seconds ago.

        For ``ago_s`` 0 a shorter span is accepted.
        """
        end = self._samples[-1][0] - ago_s
        after = next(((at, counts) for at, counts in reversed(self._samples) if at <= end), None)
        before = next(((at, counts) for at, counts in reversed(self._samples) if at <= end - span_s), None)
        if before is None and not ago_s:
            before = self._samples[0]
        if after is None or before is None or after[0] - before[0] < min(_KNOWN_S, span_s):
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
    return rise if rise > SIGMAS * math.sqrt((now.requests + before.requests) / RATE_S) else 0.0
