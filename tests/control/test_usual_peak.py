"""Replicas that a pool keeps because its peaks usually bring them back into use."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import msgspec
import pytest

from inference.control.policy.figures import PEAK_MEAN_S, UsualPeak
from inference.control.policy.pool_scaler import PoolScaler
from inference.control.policy.scale_policy import ScalePolicy
from stream_fabric.pool.plan import PoolPlan
from tests.control.scaled_pool import POLICY, World

PEAKS = msgspec.structs.replace(POLICY, replicas_max=60, cold_start_s=30.0)
NO_PEAKS = msgspec.structs.replace(PEAKS, peak_share=0.0)


def looked_at(needed: Callable[[int], int], seconds: int, begin: int = 0, inherited: float = 0.0) -> UsualPeak:
    peak = UsualPeak(inherited)
    for second in range(begin, begin + seconds):
        peak.receive(float(second), needed(second))
    return peak


def bursts(t: float) -> float:
    """Requests a second: 12 for half a minute of every four, else 1."""
    return 12.0 if t % 240 < 30 else 1.0


def replicas_between_bursts(policy: ScalePolicy) -> list[int]:
    """Ready replicas just before each burst, from the fourth one on."""
    world = World(bursts, policy).boot(4)
    found = []
    for second in range(3600):
        plan = world.step()
        if second % 240 == 235 and second > 800:
            assert world.figures is not None and plan.ready >= world.figures.peak
            found.append(plan.ready)
    return found


def test_replicas_that_bursts_bring_back_into_use_are_kept() -> None:
    kept, lost = replicas_between_bursts(PEAKS), replicas_between_bursts(NO_PEAKS)
    assert min(kept) >= 11, "what a burst fills"
    assert max(lost) <= 6, "so long after a burst no look of the last minute needed them"


def test_a_step_that_is_over_is_no_peak() -> None:
    """The load is even but for ten minutes of five times as much. Then as few replicas remain as without the rule."""

    def surge(t: float) -> float:
        return 10.0 if 600 <= t < 1200 else 2.0

    remain = {}
    for policy in (PEAKS, NO_PEAKS):
        world = World(surge, policy).boot(5)
        world.run(1200)
        most = world.plans[-1][1].ready
        world.run(POLICY.low_s + PEAK_MEAN_S + 60)
        remain[policy] = world.plans[-1][1].ready
        assert most >= 15
    assert remain[PEAKS] == remain[NO_PEAKS] <= 5


def test_an_even_need_is_its_own_peak() -> None:
    assert looked_at(lambda _: 7, 600).replicas(0.99) == 7


def test_a_peak_is_a_multiple_of_the_mean_also_when_the_mean_has_changed() -> None:
    peak = looked_at(lambda s: 8 if s % 60 < 15 else 2, 2400)
    one = peak.replicas(0.99)
    for second in range(2400, 2400 + 360):
        peak.receive(float(second), 24 if second % 60 < 15 else 6)
    assert one == 8 and peak.replicas(0.99) == 24


@pytest.mark.parametrize(("share", "enough"), [(0.2, 2), (0.5, 5), (0.8, 8), (1.0, 9)])
def test_the_share_says_for_how_much_of_the_time_it_is_enough(share: float, enough: int) -> None:
    """Needs from 1 to 9, each a ninth of the time, so that the mean of three minutes is always 5."""
    assert looked_at(lambda s: 1 + s // 20 * 2 % 9, 1800).replicas(share) == enough


def test_what_is_not_known_keeps_nothing() -> None:
    assert UsualPeak().replicas(0.99) == 0
    assert looked_at(lambda _: 9, int(PEAK_MEAN_S) - 10).replicas(0.99) == 0, "too short a time"
    assert looked_at(lambda _: 0, 600).replicas(0.99) == 0, "no request"
    assert looked_at(lambda _: 9, 600).replicas(0.0) == 0, "not wanted"


def test_after_a_gap_the_mean_is_unknown_and_the_peaks_are_not() -> None:
    peak = looked_at(lambda s: 8 if s % 60 < 6 else 2, 1200)
    before = peak.replicas(0.99)
    peak.clear()
    assert peak.replicas(0.99) == 0
    for second in range(1230, 1231 + int(PEAK_MEAN_S)):
        peak.receive(float(second), 2)
    assert before == 8 and peak.replicas(0.99) >= 5


def test_a_peak_of_more_than_an_hour_ago_is_forgotten() -> None:
    peak = looked_at(lambda s: 20 if 300 <= s < 900 else 2, 900)
    peak.receive(900.0, 2)
    for second in range(901, 901 + 3700):
        peak.receive(float(second), 2)
    assert peak.replicas(1.0) == 2


def test_a_new_leader_goes_on_with_the_peaks_of_the_one_before() -> None:
    """Bursts end, and a leader begins that has seen none: the pool keeps what one fills."""
    world = World(lambda t: bursts(t) if t < 1700 else 1.0, PEAKS).boot(4)
    world.run(1700)
    known = world.scaler.plan
    assert known is not None and known.peak_rise > 2

    def remain(plan: PoolPlan) -> int:
        later = deepcopy(world)
        later.scaler = PoolScaler(PEAKS, plan)
        return later.run(700).ready

    assert remain(known) >= 4 > 2 >= remain(msgspec.structs.replace(known, peak_rise=0.0))


def test_an_inherited_peak_is_forgotten_within_an_hour_whoever_inherits_it() -> None:
    for leaders in (1, 30):
        rise = 8.0
        for leader in range(leaders):
            peak = looked_at(lambda _: 2, 3600 // leaders + 1, begin=leader * 10_000, inherited=rise)
            assert peak.rise(0.99) < rise
            rise = peak.rise(0.99)
        assert rise < 8 / 2.7, f"{leaders} leaders"
