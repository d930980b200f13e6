"""Quantiles and histogram arithmetic. Pure: every plane computes its percentiles here.

Two kinds of input: a sorted list of values, or a histogram, which is one count per bucket and the buckets' bounds.
Bucket ``i`` holds the values from ``bounds[i]`` to ``bounds[i + 1]``, so there is one bound more than there are counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


def percentile(ordered: Sequence[float], share: float) -> float:
    """Smallest value that at least ``share`` (0 to 1) of the sorted values do not exceed; NaN for no values."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else math.nan


class Position(NamedTuple):
    """Bucket of a quantile in a histogram, and its place in the bucket."""

    bucket: int
    fraction: float
    """Distance from the bucket's lower bound, as a share of its width (0 to 1), for evenly spread values."""


def locate_quantile(counts: Iterable[float], share: float, total: float) -> Position | None:
    """Find the bucket that holds the quantile ``share`` (0 to 1) of ``total`` values; None for an empty histogram."""
    wanted, seen = share * total, 0.0
    for bucket, count in enumerate(counts):
        if count and seen + count >= wanted:
            return Position(bucket, (wanted - seen) / count)
        seen += count
    return None


def bucket_quantile(counts: Sequence[float], bounds: Sequence[float], share: float) -> float | None:
    """Quantile ``share`` (0 to 1) of a histogram, interpolated within its bucket; None for an empty histogram."""
    found = locate_quantile(counts, share, sum(counts))
    if found is None:
        return None
    low, high = bounds[found.bucket], bounds[found.bucket + 1]
    return low + (high - low) * found.fraction


def count_above(counts: Sequence[float], bounds: Sequence[float], limit: float) -> float:
    """Number of values above ``limit``; a bucket that contains the limit counts in proportion."""
    above = 0.0
    for bucket, count in enumerate(counts):
        low, high = bounds[bucket], bounds[bucket + 1]
        if low >= limit:
            above += count
        elif high > limit:
            above += count * (high - limit) / (high - low)
    return above


def add_counts(histograms: Iterable[Sequence[int]], buckets: int) -> list[int]:
    """Sum of histograms, bucket by bucket. Missing buckets count 0; buckets after ``buckets`` are ignored."""
    total = [0] * buckets
    for counts in histograms:
        for bucket, count in enumerate(counts[:buckets]):
            total[bucket] += count
    return total
