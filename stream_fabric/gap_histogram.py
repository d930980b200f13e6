"""Buckets of the histogram of gaps between output tokens (inter-token latency). Pure."""

from __future__ import annotations

ITL_BUCKETS = 112


def itl_bucket(gap_us: int) -> int:
    """Histogram bucket of a gap between two output tokens (inter-token latency), in microseconds.

    There are four buckets per doubling, so a bucket's bounds are at most 25 % apart.
    """
    if gap_us < 4:
        return gap_us if gap_us > 0 else 0
    bits = gap_us.bit_length()
    bucket = 4 * (bits - 2) + (gap_us >> (bits - 3) & 3)
    return bucket if bucket < ITL_BUCKETS else ITL_BUCKETS - 1


def itl_bounds_us(bucket: int) -> tuple[int, int]:
    """Lower (inclusive) and upper (exclusive) bound of an ``itl_bucket``, in microseconds."""
    if bucket < 4:
        return bucket, bucket + 1
    shift = bucket // 4 - 1
    low = (4 + bucket % 4) << shift
    return low, low + (1 << shift)
