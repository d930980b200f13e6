"""Quantiles and histogram arithmetic."""

from __future__ import annotations

import math
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.process.stats import add_counts, bucket_quantile, count_above, locate_quantile, percentile

_COUNTS = st.lists(st.integers(0, 50), min_size=1, max_size=12)
_SHARES = st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0])


def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed() -> None:
    values = [float(value) for value in range(1, 11)]
    assert [percentile(values, share) for share in (0.0, 0.1, 0.11, 0.5, 0.99, 1.0)] == [1, 1, 2, 5, 10, 10]
    assert math.isnan(percentile([], 0.5))


def test_a_bucket_quantile_lies_evenly_within_its_bucket() -> None:
    assert bucket_quantile([4, 0, 4], [0, 1, 2, 4], 0.25) == 0.5
    assert bucket_quantile([4, 0, 4], [0, 1, 2, 4], 0.75) == 3
    assert bucket_quantile([0, 0], [0, 1, 2], 0.5) is None


@given(_COUNTS, _SHARES)
def test_a_bucket_quantile_is_in_the_bucket_of_the_exact_one(counts: list[int], share: float) -> None:
    values = [float(bucket) for bucket, count in enumerate(counts) for _ in range(count)]
    found = locate_quantile(counts, share, len(values))
    if found is None:
        assert not values
    else:
        assert found.bucket == percentile(values, share)
        assert 0 < found.fraction <= 1


@given(_COUNTS, st.floats(-1, 20))
def test_values_above_a_limit_are_counted_whole_and_in_proportion(counts: list[int], limit: float) -> None:
    bounds = list(range(len(counts) + 1))
    above = count_above(counts, bounds, limit)
    from_bucket = list(accumulate(reversed(counts), initial=0))[::-1]
    first_whole = min(max(math.ceil(limit), 0), len(counts))
    assert from_bucket[first_whole] <= above <= from_bucket[max(first_whole - 1, 0)] + 1e-9


def test_half_a_bucket_above_the_limit_counts_half() -> None:
    assert count_above([10, 10], [0, 1, 3], 2) == 5


def test_histograms_of_other_lengths_add_up() -> None:
    assert add_counts([(1, 2), (1, 1, 1, 9), ()], 3) == [2, 3, 1]
