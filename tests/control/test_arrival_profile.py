"""The arrival profile: learned from rows, and used by a pool's plan."""

from __future__ import annotations

import pytest

from inference.control.policy.arrival_profile import DAY_S, SLOT_S, SLOTS, WEEK_S, ArrivalProfile, learn_profile
from inference.control.policy.scale_policy import ScalePolicy
from inference.control.policy.traffic_model import PoolTrafficModel
from stream_fabric.pool.records import DemandTotals
from tests.control.scaled_pool import World

NOW_S = 100.0 * WEEK_S
NOON_S = 12 * 3600


def rows(*at: tuple[float, float]) -> list[tuple[float, float, float, float]]:
    return [(at_s, count, 10 * count, 100 * count) for at_s, count in at]


def test_what_comes_every_day_is_known_after_three() -> None:
    two = learn_profile(rows(*((NOW_S - day * DAY_S + NOON_S, 60.0) for day in (1, 2))), NOW_S)
    assert two.at(NOW_S + NOON_S).requests == 0
    three = learn_profile(rows(*((NOW_S - day * DAY_S + NOON_S, 60.0 * day) for day in (1, 2, 3))), NOW_S)
    assert three.at(NOW_S + NOON_S) == DemandTotals(2.0, 20.0, 200.0), "a second, the mean of the three"
    assert three.at(NOW_S + 6 * DAY_S + NOON_S).requests == 2.0, "on whichever day"
    assert three.at(NOW_S + NOON_S + SLOT_S).requests == 0 == three.at(NOW_S + NOON_S - SLOT_S).requests


def test_what_comes_once_a_week_is_known_after_one() -> None:
    profile = learn_profile(rows((NOW_S - WEEK_S + NOON_S, 60.0)), NOW_S)
    assert profile.at(NOW_S + NOON_S).requests == 1.0
    assert profile.at(NOW_S + DAY_S + NOON_S).requests == 0
    older = rows(*((NOW_S - week * WEEK_S + NOON_S, 60.0 * week) for week in (1, 2, 3, 4, 5)))
    assert learn_profile(older, NOW_S).at(NOW_S + NOON_S).requests == 2.5, "the mean of the last four"


def test_a_minute_tells_of_itself_only_what_is_more_than_chance() -> None:
    """One request in one of five minutes is chance; an hour that begins with ten times as many is not."""
    begin = NOW_S - WEEK_S + NOON_S
    few = learn_profile(rows((begin, 1.0)), NOW_S)
    minutes = [60 * few.at(begin + k * SLOT_S).requests for k in range(-3, 4)]
    assert minutes == pytest.approx([0, 0.2, 0.2, 0.2, 0.2, 0.2, 0], abs=0.01)
    step = learn_profile(rows(*((begin + k * SLOT_S, 600.0 if k >= 0 else 60.0) for k in range(-10, 10))), NOW_S)
    assert step.at(begin).requests == 10.0 and step.at(begin - SLOT_S).requests == 1.0, "not smeared over its edge"


def test_the_most_of_a_while_is_of_every_slot_that_it_touches() -> None:
    profile = learn_profile(rows((NOW_S - WEEK_S + NOON_S, 600.0), (NOW_S - WEEK_S + NOON_S + SLOT_S, 1800.0)), NOW_S)
    assert profile.highest(NOW_S + NOON_S, NOW_S + NOON_S + SLOT_S - 1).requests == 10.0
    assert profile.highest(NOW_S + NOON_S, NOW_S + NOON_S + SLOT_S).requests == 30.0
    assert learn_profile([], NOW_S).highest(NOW_S, NOW_S + WEEK_S) == DemandTotals(0, 0, 0)
    with pytest.raises(ValueError, match="rates"):
        ArrivalProfile(0.0, (1.0,), (1.0,), (1.0,))


def known(times: float, from_s: float) -> ArrivalProfile:
    """One request a second, and so many from then on; the test's world begins at 1000."""
    rates = [times if slot * SLOT_S >= from_s else 1.0 for slot in range(SLOTS)]
    return ArrivalProfile(0.0, rates, [100 * rate for rate in rates], [100 * rate for rate in rates])


def test_what_is_known_to_come_is_there_before_it_comes() -> None:
    """Five times the requests from 1800 on, and a replica takes a minute: with the profile nobody waits."""
    worst = []
    for profile in (known(5.0, 1800), None):
        world = World(lambda t: 5.0 if t >= 800 else 1.0).boot(2)
        if profile is not None:
            world.scaler.learn(PoolTrafficModel(arrivals=profile))
        most = 0.0
        for _ in range(1000):
            world.step()
            most = max(most, world.queue)
        worst.append(most)
    assert worst[0] < 10 < 100 < worst[1], worst


def test_a_profile_only_raises_and_little_is_made_of_a_wrong_one() -> None:
    busy = World(lambda t: 5.0).boot(8)
    busy.scaler.learn(PoolTrafficModel(arrivals=known(0.0, 0)))
    busy.run(300)
    assert min(plan.ready for _, plan in busy.plans) == 8, "that nothing usually comes takes nothing away"
    wrong = World(lambda t: 1.0, ScalePolicy(replicas_max=100, cold_start_s=60)).boot(2)
    wrong.scaler.learn(PoolTrafficModel(arrivals=known(5.0, 0)))
    wrong.run(7200)
    assert wrong.figures is not None and wrong.figures.foreseen == pytest.approx(2.5, rel=0.05), "half of it, in time"
