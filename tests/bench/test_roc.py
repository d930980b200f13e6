"""Delay against false alarms, of detectors on made arrivals."""

from __future__ import annotations

import random

import pytest

from bench.scaling.roc import Point, best, even, rise, step_score, trace_score, window_score
from bench.scaling.scenes import BURSTS, STEP_TIMES
from inference.simulate.traces import Request

SUDDEN = rise(1.0)


def counts(seconds: int, step_at: int, seed: int) -> list[int]:
    """Counts by second as the bench makes bursts, with a step."""
    rng, out, per_s = random.Random(seed), [0], 0.0
    for second in range(1, seconds):
        if (second - 1) % BURSTS.seconds == 0:
            per_s = BURSTS.per_s * rng.gammavariate(BURSTS.shape, 1 / BURSTS.shape)
        rate = per_s * (STEP_TIMES if second > step_at else 1.0)
        out.append(sum(rng.random() < rate / 100 for _ in range(100)))
    return out


def test_who_knows_the_trace_sees_most_steps_and_hardly_anything_else() -> None:
    scores = [trace_score(SUDDEN, 0)(counts(260, 200, seed)) for seed in range(20)]
    assert sum(max(one[200:]) > 1000 for one in scores) >= 15
    assert sum(max(one[60:200]) > 1000 for one in scores) <= 1


def test_the_score_of_who_knows_the_trace_counts_from_the_moments_at_which_the_rate_changes() -> None:
    """The same counts from another moment of the trace on: only the first rate's span differs."""
    made = counts(260, 200, 3)
    whole, later = trace_score(SUDDEN, 0)(made), trace_score(SUDDEN, 40)(made[40:])
    assert later[-1] == pytest.approx(whole[-1])
    assert trace_score(SUDDEN, 47)(made[40:])[-1] != pytest.approx(whole[-1])


def poisson(per_s: float, rng: random.Random) -> int:
    return sum(rng.random() < per_s / 100 for _ in range(100))


@pytest.mark.parametrize("ramp_s", [1.0, 30.0])
def test_who_knows_how_a_step_rises_sees_it_and_hardly_anything_else(ramp_s: float) -> None:
    times, rng = rise(ramp_s), random.Random(1)
    for _ in range(10):
        score = step_score(times)([poisson(5.0 * (times[k - 300] if k >= 300 else 1.0), rng) for k in range(330)])
        assert max(score[150:300]) < 10_000 < max(score[300:])


def test_a_rise_that_the_counts_do_not_have_is_less_likely_than_the_one_that_they_have() -> None:
    rng, slow = random.Random(2), rise(30.0)
    counts = [poisson(20.0 * (slow[k - 200] if k >= 200 else 1.0), rng) for k in range(212)]
    assert step_score(slow)(counts)[-1] > 10 * step_score(SUDDEN)(counts)[-1]


def test_who_knows_the_trace_needs_the_rise_of_each_second() -> None:
    """One rate, one step: the sum of likelihood ratios by hand. The prior's mean of the rate is the bursts'."""
    shape, per_rate, (first, second) = BURSTS.shape, BURSTS.shape / BURSTS.per_s, rise(30.0)[:2]

    def likelihood(*times: float) -> float:
        """Likelihood of the counts 3 and 4, but for what all hypotheses have in common."""
        return times[0] ** 3 * times[1] ** 4 / (per_rate + sum(times)) ** (shape + 7)

    both, last, none = likelihood(first, second), likelihood(1.0, first), likelihood(1.0, 1.0)
    assert trace_score(rise(30.0), 1)([3, 4])[-1] == pytest.approx((both + last) / none)


def test_even_requests_are_as_many_times_as_many() -> None:
    made = even([Request(k, float(k), 100, 10, (), str(k)) for k in range(100)], 0, 3)
    assert len(made) == 300 and made == sorted(made, key=lambda one: one.at_s)
    assert 120 < sum(one.at_s < 49.5 for one in made) < 180


def test_a_window_is_compared_with_the_level() -> None:
    scores = window_score(5)([2] * 200 + [10] * 5)
    assert scores[150] == 1.0
    assert scores[204] == 10 / ((115 * 2 + 50) / 120)


def test_the_quickest_detector_within_the_limit_is_the_best() -> None:
    points = [Point(400.0, 1.0, 5.0, "a"), Point(100.0, 3.0, 9.0, "b"), Point(90.0, 2.0, 12.0, "c")]
    assert best(points, 150.0) == "3 / 9 s (b)"
    assert best(points, 95.0) == "2 / 12 s (c)"
    assert best(points, 10.0) == "-"
