"""How many replicas a pool gets, and which of them leave: the decision alone, on virtual time."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest

from inference.control.policy.arrivals import Arrivals
from inference.control.policy.figures import replicas_with_spare
from inference.control.policy.pool_scaler import GAP_S
from inference.control.policy.scale_policy import ScalePolicy
from stream_fabric.pool.plan import ReplicaProfile
from stream_fabric.pool.records import DemandTotals
from stream_fabric.stream.ids import ReplicaId
from tests.control.scaled_pool import POLICY, SLOTS, SLOW, STREAM_S, Pod, World, changes

# --- up ------------------------------------------------------------------------------------------------------


def test_a_steady_load_is_left_alone() -> None:
    world = World(lambda t: 2.2).boot(4)  # 22 of 40 slots
    world.run(600)
    assert changes(world) == [(4, 0, 4)]


def test_chance_is_given_room_and_the_less_the_more_arrives() -> None:
    """By arithmetic: standard deviations of the streams that run at a time, of which the square root is one."""
    policy = ScalePolicy(replicas_max=1000, warm_share=0.0)
    needs = {}
    for rate in (1.0, 4.0, 16.0, 64.0, 256.0):
        world = World(lambda t, rate=rate: rate, policy).boot(int(3 * rate))
        world.run(60)
        assert world.figures is not None
        needs[rate] = world.figures.needed
        work, streams = rate * STREAM_S / SLOTS, rate * STREAM_S
        decode = work * (1 / policy.utilisation_aimed + min(policy.spare_sigmas / math.sqrt(streams), 1.0))
        prefill = 0.01 * rate * (1 / policy.utilisation_aimed + min(policy.spare_sigmas / math.sqrt(rate), 1.0))
        assert needs[rate] == math.ceil(decode + prefill), "what arrives is a steady figure here"
    filled = [rate * STREAM_S / SLOTS / need for rate, need in needs.items()]
    assert filled == sorted(filled) and filled[0] <= 0.5 and filled[-1] > 0.7


def test_where_prompts_have_a_share_of_the_time_their_room_for_chance_has_it_too() -> None:
    """By arithmetic: prompts fill 8 replicas of 2,000 tokens/s, with two deviations of 16 requests 12, in 3/8 of 32."""
    rates, profile = DemandTotals(16.0, 16000.0, 0.0), ReplicaProfile(20, 2000.0, 400.0, 1.0, 4.0)
    policy = ScalePolicy(ttft_objective_s=1.0, itl_objective_s=0.08, utilisation_aimed=0.8)
    assert policy.prefill_share(profile) == pytest.approx(3 / 8)
    assert replicas_with_spare(rates, profile, policy) == pytest.approx(32)
    kept_by_engines = msgspec.structs.replace(profile, itl_objective_ms=80.0)
    assert replicas_with_spare(rates, kept_by_engines, policy) == pytest.approx(8 / 0.8 + 4)


def test_five_times_the_load_is_asked_for_at_once_and_not_much_more() -> None:
    world = World(lambda t: 1.0 if t < 300 else 5.0).boot(2)
    world.run(300)
    before = world.plans[-1][1].ready
    world.run(45)
    asked = world.plans[-1][1]
    needed = 5.0 * STREAM_S / SLOTS / POLICY.utilisation_aimed
    assert before == 2 and asked.ready >= needed
    world.run(600)
    most = max(plan.ready for _, plan in world.plans)
    assert most <= math.ceil(POLICY.growth_max * needed) + 2, "a step is no growth without end"
    assert world.queue < 1 and world.figures is not None and world.figures.utilisation < POLICY.utilisation_max


def test_what_grows_is_met_before_it_is_there() -> None:
    """Ten minutes from 10 to 90 requests a second, and a replica takes a minute to come: once the slope is known nobody
    waits."""
    policy = msgspec.structs.replace(POLICY, replicas_max=200)
    world = World(lambda t: 10.0 if t < 300 else min(10.0 + (t - 300) * 80 / 600, 90.0), policy).boot(15)
    world.run(480)
    worst = 0.0
    for _ in range(520):
        world.step()
        worst = max(worst, world.queue)
    assert worst < 2, "nothing but fractions"
    assert world.figures is not None and world.figures.utilisation > 0.5, "and not by having twice of all"


def test_slow_first_tokens_for_a_minute_ask_for_a_tenth_more_once() -> None:
    world = World(lambda t: 11.0).boot(20)
    world.scaler.policy = world.policy = msgspec.structs.replace(POLICY, replicas_max=100)
    world.run(20)
    for pod in world.pods:
        pod.ttft = SLOW
    world.run(59)
    assert world.plans[-1][1].ready == 20
    world.run(5)
    plan = world.plans[-1][1]
    assert plan.ready == 22 and "p99 TTFT" in plan.reason and plan.figures["ttft_p99_s"] > 30
    world.run(50)
    assert world.plans[-1][1].ready == 22, "those are on their way"


def test_slow_prompts_do_not_make_an_idle_pool_grow() -> None:
    world = World(lambda t: 0.2).boot(2)
    for pod in world.pods:
        pod.ttft = SLOW
    world.run(300)
    assert max(plan.ready for _, plan in world.plans) == 2


def test_who_is_told_to_have_no_more_has_no_more() -> None:
    world = World(lambda t: 50.0, msgspec.structs.replace(POLICY, replicas_max=7, warm_share=0.2)).boot(2)
    world.run(300)
    plan = world.plans[-1][1]
    assert (plan.ready, plan.warm, plan.pods) == (7, 0, 7)


def test_nobody_there_and_somebody_waits() -> None:
    world = World(lambda t: 0.5 if t > 100 else 0.0, msgspec.structs.replace(POLICY, replicas_min=0))
    world.run(100)
    assert world.plans[-1][1].pods == 0
    world.run(4)
    assert world.plans[-1][1].pods == 1, "asked for within seconds"
    world.run(120)
    assert world.queue < 1 and len(world.pods) <= 3


# --- down ----------------------------------------------------------------------------------------------------


def test_down_by_one_that_has_rested_and_only_after_its_time() -> None:
    world = World(lambda t: 0.5).boot(4)
    world.run(int(POLICY.low_s) - 2)
    assert changes(world) == [(4, 0, 4)]
    world.run(400)
    assert [c[2] for c in changes(world) if c[2]][-1] == 1 or world.plans[-1][1].pods == 1
    pods = [plan.pods for _, plan in world.plans]
    assert all(old - new in (0, 1) for old, new in pairwise(pods))
    for (_, old), (_, new) in pairwise(world.plans):
        assert new.ready == old.ready or old.pods == old.ready, "the one before is gone"


def test_the_one_with_the_fewest_streams_and_the_smallest_cache_rests() -> None:
    world = World(lambda t: 0.0).boot(3)
    for pod, (running, blocks) in zip(world.pods, [(0, 50), (0, 20), (1, 10)], strict=True):
        pod.running, pod.blocks = running, blocks
    world.policy = POLICY
    second = world.pods[1].name
    world.run(POLICY.low_s + 20)
    rested = next(plan.resting for _, plan in world.plans if plan.resting)
    assert rested == second


def test_a_long_stream_keeps_its_replica() -> None:
    world = World(lambda t: 0.0).boot(2)
    for pod in world.pods:
        pod.running = 1  # and it never ends
    world.run(600)
    plan = world.plans[-1][1]
    assert plan.ready == 1 and plan.resting is not None and plan.pods == 2
    world.pods[[pod.name for pod in world.pods].index(plan.resting)].running = 0
    world.run(10)
    assert world.plans[-1][1].pods == 1


def test_idle_replicas_that_are_too_many_leave_together() -> None:
    world = World(lambda t: 0.2).boot(33)
    world.run(600)
    counts = [plan.pods for _, plan in world.plans]
    falls = [old - new for old, new in pairwise(counts) if new < old]
    assert counts[0] == 33 and counts[-1] <= 3
    assert falls[0] > 10 and len(falls) <= 10, "half of the surplus at a time, and not one by one"


def test_replicas_leave_only_when_all_of_them_are_marked() -> None:
    world = World(lambda t: 0.2).boot(9)
    while not world.step().victims:
        pass
    plan = world.plans[-1][1]
    assert len(plan.victims) > 1
    for marked in (frozenset[ReplicaId](), frozenset(plan.victims[1:])):
        world.now += 1
        assert world.scaler.decide(world.seen(marked), world.now)[0].pods == 9
    world.now += 1
    plan = world.scaler.decide(world.seen(frozenset(plan.victims)), world.now)[0]
    assert plan.pods == 9 - len(plan.victims)
    assert f"{plan.victims[0]} and {len(plan.victims) - 1} others leave" in plan.reason


@pytest.mark.parametrize("total", [7, 9])
def test_victims_that_are_wanted_again_do_not_end_all_further_shrinking(total: int) -> None:
    world = World(lambda t: 0.2).boot(9)
    while not world.step().victims:
        pass
    plan = world.plans[-1][1]
    world.scaler.policy = msgspec.structs.replace(world.policy, warm_min=total - plan.ready)
    warm = total - plan.ready
    plan = world.run(600)
    assert (plan.ready, plan.pods, len(world.pods)) == (1, 1 + warm, 1 + warm)


def test_a_replica_that_gets_work_before_it_is_marked_stays() -> None:
    world = World(lambda t: 0.2).boot(9)
    while not world.step().victims:
        pass
    first, *others = world.plans[-1][1].victims
    world.pods[[pod.name for pod in world.pods].index(first)].running = 1
    world.now += 1
    plan = world.scaler.decide(world.seen(frozenset([first, *others])), world.now)[0]
    assert list(plan.victims) == others and plan.pods == 9 - len(others)


def test_load_that_comes_back_takes_the_rested_one_at_once() -> None:
    world = World(lambda t: 0.3 if t < 90 else 3.0).boot(3)
    world.pods[0].running = world.pods[1].running = world.pods[2].running = 1
    world.ends = False
    world.run(85)
    assert any(pod.wants == "warm" for pod in world.pods)
    world.run(30)
    assert [pod.wants for pod in world.pods[:3]] == ["ready"] * 3
    assert not world.plans[-1][1].victims


@pytest.mark.parametrize("why", ["held", "rollout", "draining", "coming", "gap"])
def test_nothing_is_taken_away_while(why: str) -> None:
    world = World(lambda t: 0.2, msgspec.structs.replace(POLICY, cold_start_s=140)).boot(4)
    world.ends = world.boots = False
    for _ in range(400):  # less than three cold starts
        match why:
            case "held":
                world.held = True
            case "rollout":
                world.pods[0].revision = "new"
            case "draining":
                world.pods[0].wants = "draining"
            case "coming":
                world.pods[0].up_at = world.now + 100
            case "gap":
                world.now += GAP_S
        world.step()
    there = 4 - (why == "draining")
    assert {(plan.ready, plan.resting, plan.victims) for _, plan in world.plans} == {(there, None, ())}
    assert min(plan.pods for _, plan in world.plans) >= there


def test_a_rollout_ends_with_as_many_as_it_began_with() -> None:
    """It starts one more before it ends one, and whoever starts replicas takes the number that is wanted: one more
    wanted for each that is started would never end."""
    world = World(lambda t: 2.0).boot(4)
    world.ends = world.boots = False
    world.run(30)
    old = list(world.pods)
    while old:
        wanted = world.plans[-1][1].pods
        while len(world.pods) < wanted + 1:
            world.boot(1, cold_s=5.0)
            world.pods[-1].revision = "new"
        world.run(8)
        while old and len(world.pods) > world.plans[-1][1].pods:
            gone = old.pop()
            gone.wants = "draining"
            world.run(3)
            world.pods.remove(gone)
    world.run(30)
    assert {plan.pods for _, plan in world.plans} == {4} and len(world.pods) == 4


def test_a_fleet_that_vanishes_is_not_a_fleet_that_is_not_needed() -> None:
    world = World(lambda t: 3.0).boot(8)
    world.run(100)
    there, world.pods, world.boots = world.pods, [], False
    world.run(1000)
    plan = world.plans[-1][1]
    assert plan.ready >= 8 and plan.pods >= 8
    world.pods = there
    world.run(30)
    assert world.plans[-1][1].resting is None


def test_replicas_that_never_come_are_planned_without_in_the_end() -> None:
    world = World(lambda t: 4.0 if t < 100 else 0.1, msgspec.structs.replace(POLICY, cold_start_s=30)).boot(3)
    world.boots = world.ends = False
    world.run(100)
    assert world.plans[-1][1].pods > 3
    world.ends = True
    world.run(600)
    assert world.plans[-1][1].pods <= 2


def test_a_replica_that_dies_at_each_start_does_not_keep_the_pool_from_shrinking() -> None:
    """The platform lowers its count after 45 s, and ends the pod that is not ready first."""
    world = World(lambda t: 0.2).boot(4)
    world.boots = world.ends = False
    crashes = True
    for second in range(1500):
        healthy = [pod for pod in world.pods if pod.up_at <= world.now]
        starts = crashes and second % 60 < 20  # 20 s to its death, and 40 s to the next process
        world.pods = healthy + [Pod(ReplicaId(f"crashing-{second // 60}"), math.inf)] * starts
        plan = world.step()
        count = max(plan.pods for _, plan in world.plans[-45:])
        crashes = crashes and len(healthy) < count
        for victim in plan.victims if len(healthy) > count else ():
            world.pods = [pod for pod in world.pods if pod.name != victim]
    assert not crashes and (plan.ready, plan.pods, len(world.pods)) == (1, 1, 1)


def test_replicas_that_were_just_asked_for_are_waited_for_although_another_dies_at_each_start() -> None:
    """The load is gone before they come."""
    world = World(lambda t: 8.0 if 600 < t < 640 else 2.2).boot(4)
    world.pods.append(Pod(ReplicaId("crashing"), math.inf))
    world.run(600)
    before = world.plans[-1][1]
    world.run(50)
    asked = world.plans[-1][1].ready
    assert asked > before.ready
    while any(pod.name != "crashing" and pod.up_at > world.now for pod in world.pods):
        assert world.step().ready >= asked


def test_replicas_that_start_anew_one_after_the_other_are_not_given_up() -> None:
    """At each moment one is on its way, and each comes."""
    world = World(lambda t: 0.2).boot(4)
    world.ends = world.boots = False
    for turn in range(16):
        world.pods[turn % 4] = Pod(ReplicaId(f"anew-{turn}"), world.now + 30)
        assert world.run(25).ready == 4


def test_the_last_one_goes_only_after_its_own_time_without_a_request() -> None:
    world = World(lambda t: 0.0, msgspec.structs.replace(POLICY, replicas_min=0, zero_s=300)).boot(1)
    world.run(299)
    assert world.plans[-1][1].pods == 1
    world.run(30)
    assert world.plans[-1][1].pods == 0 and not world.pods


# --- warm ----------------------------------------------------------------------------------------------------


def test_a_warm_pool_is_filled_promoted_from_and_filled_again() -> None:
    policy = msgspec.structs.replace(POLICY, warm_min=2)
    world = World(lambda t: 1.0 if t < 300 else 4.0, policy).boot(2)
    world.run(200)
    assert sum(pod.wants == "warm" for pod in world.pods) == 2 and world.plans[-1][1].pods == 4
    world.run(100)
    jumped = world.now
    while sum(pod.wants == "ready" for pod in world.pods if pod.up_at <= world.now) < 4:
        world.step()
    assert world.now - jumped < 20, "long before a cold start is over"
    world.run(400)
    assert sum(pod.wants == "warm" for pod in world.pods) == 2


# --- arrivals ------------------------------------------------------------------------------------------------


def test_rates_are_of_the_last_half_minute_and_survive_a_loss() -> None:
    arrivals = Arrivals()
    for second in range(100):
        arrivals.receive(float(second), DemandTotals(second * 4, second * 40, second * 400))
    assert arrivals.per_s() == DemandTotals(4, 40, 400)
    assert arrivals.growth(300, 3) == 1.0
    arrivals.receive(100.0, DemandTotals(1, 10, 100))
    assert arrivals.per_s() is None, "one sample tells no rate"
    for second in range(101, 111):
        arrivals.receive(float(second), DemandTotals(2 * second, 20 * second, 200 * second))
    assert arrivals.per_s() == DemandTotals(21.9, 219, 2190)


def test_chance_is_no_growth() -> None:
    arrivals = Arrivals()
    counts = [3, 5, 4, 2, 6, 4, 3, 5]  # around 4 in each half minute
    total = 0
    for block, count in enumerate(counts):
        for second in range(30):
            total += count if second == 15 else 0
            arrivals.receive(block * 30.0 + second, DemandTotals(total, total, total))
            assert arrivals.growth(300, 3) == 1.0
