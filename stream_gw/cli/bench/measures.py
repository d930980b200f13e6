"""Quantiles of times: exact for requests, in narrow buckets for the gaps between tokens, which are many. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

_BUCKET = math.log(1.005)
"""A bucket is 0.5 % wide."""
_LEAST_S = 1e-6


class Quantiles(msgspec.Struct, frozen=True):
    """Distribution of times in seconds. Without values all are None."""

    count: int
    mean_s: float | None = None
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    max_s: float | None = None


class Histogram:
    """Counts of times in buckets: constant memory for any number of tokens, quantiles within 0.5 %."""

    def __init__(self) -> None:
        self.count = 0
        self._sum_s = 0.0
        self._max_s = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, time_s: float) -> None:
        self.count += 1
        self._sum_s += time_s
        self._max_s = max(self._max_s, time_s)
        bucket = round(math.log(max(time_s, _LEAST_S) / _LEAST_S) / _BUCKET)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def merge(self, other: Histogram) -> None:
        self.count += other.count
        self._sum_s += other._sum_s
        self._max_s = max(self._max_s, other._max_s)
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def quantile_s(self, share: float) -> float:
        """Return the quantile in seconds; NaN without values."""
        rank, seen = math.ceil(share * self.count), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return min(_LEAST_S * math.exp(bucket * _BUCKET), self._max_s)
        return math.nan

    def quantiles(self) -> Quantiles:
        if not self.count:
            return Quantiles(0)
        p50, p95, p99 = map(self.quantile_s, (0.5, 0.95, 0.99))
        return Quantiles(self.count, self._sum_s / self.count, p50, p95, p99, self._max_s)


def quantiles_of(times_s: Iterable[float]) -> Quantiles:
    found = sorted(times_s)
    if not found:
        return Quantiles(0)
    p50, p95, p99 = (quantile(found, share) for share in (0.5, 0.95, 0.99))
    return Quantiles(len(found), sum(found) / len(found), p50, p95, p99, found[-1])


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of ordered values, by the nearest rank; NaN without values."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else math.nan
