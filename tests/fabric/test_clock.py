"""Estimate of the fabric's clock from readings with round trips."""

from __future__ import annotations

import random

from stream_fabric.redis.clock import ClockEstimate


def test_the_reading_with_the_shortest_round_trip_counts() -> None:
    estimate = ClockEstimate()
    assert estimate.offset_us is None
    estimate.receive(0, 5_000_400, 1_000)
    estimate.receive(10_000, 5_010_090, 10_200)
    estimate.receive(20_000, 5_021_000, 24_000)
    assert estimate.offset_us == 4_999_990


def test_after_a_failover_the_clock_of_the_new_host_counts_at_once() -> None:
    estimate = ClockEstimate()
    for sent_us in range(0, 300_000_000, 20_000_000):
        estimate.receive(sent_us, sent_us + 50, sent_us + 100)
    assert estimate.offset_us == 0
    estimate.receive(300_000_000, 302_000_500, 300_001_000)  # its clock is 2 s ahead, its link slower
    assert estimate.offset_us == 2_000_000


def test_readings_of_one_clock_never_contradict_each_other() -> None:
    rng = random.Random(7)
    estimate = ClockEstimate()
    errors: list[tuple[int, int]] = []
    for sent_us in range(0, 200_000_000, 20_000_000):
        there_us, back_us = rng.randrange(1, 5_000), rng.randrange(1, 5_000)
        estimate.receive(sent_us, sent_us + there_us + 777, sent_us + there_us + back_us)
        errors.append((there_us + back_us, abs(there_us - back_us)))
        assert estimate.offset_us is not None
        assert abs(estimate.offset_us - 777) <= min(errors)[0] // 2 + 1, "none with a shorter trip was dropped"
