"""The rate that a pool is planned for, second by second."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from bench.scaling.detection import detection
from inference.control.policy.arrivals import Arrivals
from inference.simulate.traces import Request
from stream_fabric.pool.records import DemandTotals


def rates(per_s: Callable[[int], float], seconds: int, seed: int = 0) -> Iterator[tuple[int, DemandTotals]]:
    """Moments and planned rates of independent arrivals; each request has 100 prompt and 10 output tokens."""
    rng, arrivals, total = random.Random(seed), Arrivals(), 0
    for second in range(seconds):
        at = rng.expovariate(per_s(second))
        while at < 1:
            total, at = total + 1, at + rng.expovariate(per_s(second))
        arrivals.receive(float(second), DemandTotals(total, 100 * total, 10 * total))
        found = arrivals.per_s()
        if found is not None:
            yield second, found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("usual", [4.0, 40.0])
def test_a_step_is_seen_within_seconds_and_not_made_larger_than_it_is(usual: float, seed: int) -> None:
    found = dict(rates(lambda second: 5 * usual if second >= 700 else usual, 800, seed))
    assert max(found[second].requests for second in range(300, 700)) < 1.5 * usual
    assert next(second for second in range(700, 800) if found[second].requests > 1.5 * usual) <= 704
    assert 4 * usual < found[730].requests < 6 * usual
    assert max(rate.requests for rate in found.values()) < 6 * usual
    assert found[705].prompt_tokens == pytest.approx(100 * found[705].requests)


@pytest.mark.parametrize("seed", range(5))
def test_bursts_that_are_usual_are_no_step_and_a_step_beyond_them_is_one(seed: int) -> None:
    """Every 40 s come ten seconds of three times the rate: more than chance, and known after some minutes."""

    def per_s(second: int) -> float:
        return (20.0 if second >= 900 else 4.0) * (3 if second % 40 < 10 else 1)

    found = dict(rates(per_s, 1000, seed))
    mean = 4.0 * 1.5
    assert max(found[second].requests for second in range(400, 900)) < 1.6 * mean
    assert next(second for second in range(900, 1000) if found[second].requests > 1.6 * mean) <= 910


def test_the_bench_finds_a_step_and_counts_wishes_that_nothing_followed() -> None:
    rng, at_s, requests = random.Random(1), 0.0, []
    while at_s < 1500:
        # At 1,000 s come seven seconds of four times the requests
        at_s += rng.expovariate(40.0 if 1000 <= at_s < 1007 else 10.0)
        requests.append(Request(len(requests), at_s, 100, 10, (), str(len(requests))))
    found = detection(requests, 0, steps=6)
    assert all(time_s < 30 for time_s in found.delays_s[1.0]) and min(found.delays_s[1.0]) < 5
    assert sum(found.delays_s[30.0]) > sum(found.delays_s[1.0])
    assert found.false_per_day * 900 / 86_400 == pytest.approx(1, abs=0.01)
