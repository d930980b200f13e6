"""Delay against false alarms, of detectors on made arrivals."""

from __future__ import annotations

import random

from bench.scaling.roc import Point, best, informed_score, window_score
from bench.scaling.scenes import BURST_S, BURST_SHAPE, BURSTS_PER_S, STEP_TIMES


def counts(seconds: int, step_at: int, seed: int) -> list[int]:
    """Counts by second as the bench makes bursts, with a step."""
    rng, out, per_s = random.Random(seed), [0], 0.0
    for second in range(1, seconds):
        if (second - 1) % BURST_S == 0:
            per_s = BURSTS_PER_S * rng.gammavariate(BURST_SHAPE, 1 / BURST_SHAPE)
        rate = per_s * (STEP_TIMES if second > step_at else 1.0)
        out.append(sum(rng.random() < rate / 100 for _ in range(100)))
    return out


def test_who_knows_the_trace_sees_most_steps_and_hardly_anything_else() -> None:
    scores = [informed_score(0)(counts(260, 200, seed)) for seed in range(20)]
    assert sum(max(one[200:]) > 1000 for one in scores) >= 15
    assert sum(max(one[60:200]) > 1000 for one in scores) <= 1


def test_the_informed_score_counts_from_the_moments_at_which_the_rate_changes() -> None:
    """The same counts from another moment of the trace on: only the first rate's span differs."""
    made = counts(260, 200, 3)
    whole, later = informed_score(0)(made), informed_score(40)(made[40:])
    assert later[-1] == whole[-1]
    assert informed_score(47)(made[40:])[-1] != whole[-1]


def test_a_window_is_compared_with_the_level() -> None:
    scores = window_score(5)([2] * 200 + [10] * 5)
    assert scores[150] == 1.0
    assert scores[204] == 10 / ((115 * 2 + 50) / 120)


def test_the_quickest_detector_within_the_limit_is_the_best() -> None:
    points = [Point(400.0, 1.0, 5.0, "a"), Point(100.0, 3.0, 9.0, "b"), Point(90.0, 2.0, 12.0, "c")]
    assert best(points, 150.0) == "3 / 9 s (b)"
    assert best(points, 95.0) == "2 / 12 s (c)"
    assert best(points, 10.0) == "-"
