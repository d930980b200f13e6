"""The traffic model of a pool: learned from telemetry and cold starts, kept, checked and used."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from inference.control.metrics import ControllerMetrics
from inference.control.policy import traffic_model
from inference.control.policy.arrival_profile import SLOT_S, WEEK_S, learn_profile
from inference.control.policy.cold_starts import ColdStarts
from inference.control.policy.fleet_view import Observation
from inference.control.policy.pool_scaler import PoolScaler
from inference.control.policy.scale_policy import ScalePolicy
from inference.control.policy.traffic_model import PoolTrafficModel, learn_jumps, learn_routes, learn_speeds
from stream_fabric.pool.plan import PoolPlan, ReplicaProfile, decode_plan, encode_plan
from stream_fabric.pool.records import DemandTotals, EngineLoad, ReplicaInfo, TierQueue
from stream_fabric.pool.traffic_model import (
    Jump,
    Lengths,
    Route,
    Speed,
    TrafficModel,
    append_cold_starts,
    decode_traffic_model,
)
from stream_fabric.stream.ids import ReplicaId
from tests.control.scaled_pool import POLICY, World

NOW_S = 100.0 * WEEK_S
NAN, INF = float("nan"), float("inf")


def a_route(mean: float, requests: float = 100) -> Route:
    return Route("m", "openai.chat", "standard", requests, Lengths(10, 20, 30, 15), Lengths(mean, mean, mean, mean))


# --- what cannot be -----------------------------------------------------------------------------------------


def row(**bad: Any) -> traffic_model.LengthsRow:
    good: dict[str, Any] = {
        "model": "m", "dialect": "openai.chat", "tier": "batch", "requests": 100.0, "prompt_mean": 15.0,
        "prompt_q": [10.0, 20.0, 30.0], "output_mean": 150.0, "output_q": [100.0, 200.0, 300.0],
    }  # fmt: skip
    return tuple({**good, **bad}.values())


@pytest.mark.parametrize(
    "bad",
    [
        {"requests": 3.0}, {"requests": 0.0}, {"requests": NAN}, {"requests": INF}, {"prompt_mean": 0.0},
        {"prompt_mean": None}, {"prompt_mean": NAN}, {"prompt_q": [NAN, 2.0, 3.0]}, {"prompt_q": [3.0, 2.0, 1.0]},
        {"prompt_q": []}, {"prompt_q": [1.0, None, 3.0]}, {"output_q": [1.0, 2.0, 1e12]}, {"output_mean": -1.0},
        {"output_q": [-5.0, 2.0, 3.0]}, {"output_mean": INF},
    ],
    ids=str,
)  # fmt: skip
def test_lengths_that_cannot_be_teach_nothing_and_the_others_do(bad: dict[str, Any]) -> None:
    found = learn_routes([row(**bad), row(model="well", requests=60.0), row(model="most", requests=900.0)])
    assert [one.model for one in found] == ["most", "well"]
    assert found[0].output == Lengths(100, 200, 300, 150)


def test_speeds_that_cannot_be_teach_nothing_and_the_others_do() -> None:
    well = [(50.0, 8.0, 400.0, 1000.0, 1e6), (50.0, 1.0, 100.0, 3000.0, 1e6)]
    bad = [
        (3.0, 16.0, 1.0, 1.0, 1e6),
        *((50.0, batch, per_s, 1.0, 1.0) for batch, per_s in ((None, 9.0), (NAN, 9.0), (0.5, 9.0), (INF, 9.0))),
        *((50.0, 4.0, per_s, 1.0, 1.0) for per_s in (None, NAN, 0.0, -1.0, 1e9)),
    ]
    assert learn_speeds([*well, *bad]) == ((Speed(1, 100), Speed(8, 400)), 2000.0)
    assert learn_speeds([(50.0, 1.0, 100.0, 0.0, 0.0)]) == ((Speed(1, 100),), 0.0), "no prompt was computed"
    assert learn_speeds([]) == ((), 0.0)


@pytest.mark.parametrize(
    "record",
    [
        {"version": 2, "starts_s": [0.0]}, {"version": 2, "starts_s": [1e9]}, {"version": 2, "learned_s": -1},
        {"version": 2, "prefill_per_s": 1e12}, {"version": 2, "speeds": [{"batch": 0, "tokens_per_s": 5}]},
        {"version": 2, "speeds": [{"batch": 2, "tokens_per_s": 5}, {"batch": 1, "tokens_per_s": 5}]},
        *({"version": 2, "jumps": [{"within_s": 60, "rises": rises, "prompt_tokens": 0, "output_tokens": 0}]}
          for rises in ([-1, 0, 0, 0, 0, 0, 0], [2, 1, 2, 2, 2, 2, 2], [1, 2])),
        {"version": 2, "arrivals": {"learned_s": 0, "requests": [1], "prompt_tokens": [1], "output_tokens": [1]}},
        [], "no",
    ],
    ids=str,
)  # fmt: skip
def test_a_snapshot_that_cannot_be_is_refused_whole(record: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_traffic_model(msgspec.json.encode(record), msgspec.json.Decoder(PoolTrafficModel))


def test_a_snapshot_of_another_version_is_none() -> None:
    decoder = msgspec.json.Decoder(PoolTrafficModel)
    for record in ({"version": 99, "routes": "who knows"}, {"learned_s": 5, "requests": [1.0]}):
        assert decode_traffic_model(msgspec.json.encode(record), decoder) is None
    known = PoolTrafficModel(
        arrivals=learn_profile([(NOW_S - WEEK_S, 1, 2, 3)], NOW_S), routes=(a_route(5),), starts_s=(3.0,)
    )
    again = decode_traffic_model(msgspec.json.encode(known), decoder)
    assert again is not None and again.routes == known.routes and again.arrivals is not None
    assert decode_traffic_model(msgspec.json.encode(known), msgspec.json.Decoder(TrafficModel)) is not None, (
        "without arrivals"
    )


# --- figures ------------------------------------------------------------------------------------------------


def test_a_cold_start_is_what_was_declared_until_enough_have_been_seen_and_never_far_from_it() -> None:
    def of(*took: float) -> float:
        return TrafficModel(starts_s=append_cold_starts((), took)).cold_start_s(100)

    assert of(40, 40, 40, 40) == 100
    assert of(40, 40, 40, 40, 40) == 40
    assert of(*range(40, 50), 80, 90) == 80, "the 90th percentile"
    assert of(*[1.0] * 9) == 10 and of(*[9000.0] * 9) == 300
    assert of(NAN, 0, -5, INF, 1e6, 40, 40, 40, 40) == 100, "what cannot be is not counted"
    assert len(append_cold_starts(range(1, 50), (5.0, 6.0))) == 50
    assert append_cold_starts(range(1, 51), (99.0,))[-1] == 99
    # A clock that steps may make a start almost 0 or a day: a model with that figure rounded would be refused
    assert TrafficModel(starts_s=append_cold_starts((), (0.04, 86_399.97, -3.0, 7.04))).starts_s == (7.0,)


def test_tokens_a_second_lie_between_what_was_seen() -> None:
    known = TrafficModel(speeds=(Speed(2, 100), Speed(8, 250), Speed(32, 400)))
    assert [known.decode_per_s(batch) for batch in (1, 2, 5, 8, 32, 500)] == [50, 100, 175, 250, 400, 400]
    assert TrafficModel().decode_per_s(8) == 0


def test_what_replicas_usually_do_is_known_without_one() -> None:
    known = TrafficModel(
        speeds=(Speed(4, 200), Speed(15.2, 500)), prefill_per_s=2000, routes=(a_route(100, 300), a_route(500, 100))
    )
    assert known.typical_replica(None) == ReplicaProfile(16, 2000, 500, 200, 4.0), (
        "of as many slots as were ever filled"
    )
    assert known.typical_replica(ReplicaProfile(4, 9000, 1, 1, 3.0)) == ReplicaProfile(4, 9000, 200, 200, 3.0)
    last = ReplicaProfile(4, 9000, 1, 1, 3.0)
    assert TrafficModel(routes=known.routes).typical_replica(last) == last
    assert TrafficModel().typical_replica(None) is None
    assert TrafficModel(speeds=known.speeds, routes=known.routes).typical_replica(None) is None, (
        "how fast prompts go is not known"
    )


def test_the_jump_that_few_exceed() -> None:
    """Each hour of a week a burst of one slot, five times the rest, and one of a hundred times that."""
    rates = [500.0 if slot == 77 else 50.0 if slot * SLOT_S % 3600 == 0 else 10.0 for slot in range(WEEK_S // SLOT_S)]
    begin = NOW_S - WEEK_S
    rows = [(begin + k * SLOT_S, SLOT_S * rate, 10 * SLOT_S * rate, 99 * SLOT_S * rate) for k, rate in enumerate(rates)]
    found = learn_jumps(rows, NOW_S)
    assert [jump.within_s for jump in found] == list(traffic_model.JUMP_HORIZONS_S)
    assert {(jump.rise(0.99), jump.prompt_tokens, jump.output_tokens) for jump in found} == {(40.0, 10.0, 99.0)}
    assert {jump.rise(1.0) for jump in found} == {490.0}
    # A burst an hour: in 1 of 60 minutes the next one holds it, in 20 of 60 one of the next twenty does
    assert [(jump.within_s, jump.rise(0.9)) for jump in found] == [(60, 0), (120, 0), (300, 0), (600, 40), (1200, 40)]
    assert found[0].in_replicas(0.99, ReplicaProfile(8, 4000.0, 990.0, 1, 1.0)) == pytest.approx(0.1 + 4.0)
    assert max(learn_jumps([(at_s, SLOT_S, 1, 1) for at_s, *_ in rows], NOW_S)[0].rises) == 0, (
        "what is even does not jump"
    )
    assert learn_jumps([], NOW_S) == ()
    known = TrafficModel(jumps=(Jump(60, (1,) * 7, 1, 1), Jump(300, (2,) * 7, 2, 2)))
    assert [jump and jump.within_s for jump in map(known.jump, (10, 60, 61, 9000))] == [60, 60, 300, 300]
    assert TrafficModel().jump(60) is None


@pytest.mark.parametrize("per_slot", [0.3, 5.0, 600.0])
def test_chance_is_no_jump(per_slot: float) -> None:
    draw = random.Random(7)
    slots = WEEK_S // SLOT_S
    came = [max(round(draw.gauss(per_slot, per_slot**0.5)), 0) for _ in range(slots)]
    found = learn_jumps([(NOW_S - WEEK_S + k * SLOT_S, count, count, count) for k, count in enumerate(came)], NOW_S)
    assert {rise for jump in found for rise in jump.rises} == {0.0}


def test_the_largest_of_what_follows_is_found_whatever_follows() -> None:
    draw = random.Random(4)
    for ahead in (1, 3, 7):
        counts = [draw.choice([0.0, 100.0, 200.0, draw.random() * 900]) for _ in range(60)]
        pairs = [(counts[i], max(counts[i + 1 : i + 1 + ahead])) for i in range(60 - ahead)]
        slow = [most - own if most - own > 5 * (most + own) ** 0.5 else 0.0 for own, most in pairs]
        assert sorted(traffic_model._rises(counts, ahead)) == sorted(slow) and any(slow)


# --- starts -------------------------------------------------------------------------------------------------


def infos(**states: Any) -> list[ReplicaInfo]:
    return [
        ReplicaInfo(ReplicaId(name), "p", "sim", ("m",), state, EngineLoad(0, 0, 4)) for name, state in states.items()
    ]


def test_a_start_lasts_from_when_the_replica_was_asked_for_until_it_is_up() -> None:
    starts = ColdStarts()
    assert starts.update(1, infos(a="ready"), 1000) == []
    assert starts.update(3, infos(a="ready"), 1010) == [] and starts.pending() == ((1_010_000_000, 2),)
    assert starts.update(4, infos(a="ready", b="starting"), 1020) == []
    assert starts.pending() == ((1_010_000_000, 2), (1_020_000_000, 1))
    assert starts.update(4, infos(a="ready", b="ready"), 1070) == [60]
    assert starts.update(4, infos(a="ready", b="ready", c="warm", d="sleeping"), 1090) == [80, 70]
    assert starts.pending() == ()


def test_what_was_asked_for_and_is_not_wanted_any_more_was_asked_for_last() -> None:
    starts = ColdStarts()
    starts.update(1, infos(a="ready"), 0)
    starts.update(2, infos(a="ready"), 10)
    starts.update(3, infos(a="ready"), 20)
    starts.update(2, infos(a="ready"), 30)
    assert starts.pending() == ((10_000_000, 1),)


def test_a_lease_that_lapsed_is_no_start_and_a_replica_that_died_is_asked_for_again() -> None:
    starts = ColdStarts()
    starts.update(2, infos(a="ready", b="ready"), 0)
    starts.update(2, infos(a="ready"), 100)
    assert starts.pending() == ((100_000_000, 1),)
    assert starts.update(2, infos(a="ready", b="ready"), 105) == [] and starts.pending() == ()
    starts.update(2, infos(a="ready"), 200)
    assert starts.update(2, infos(a="ready", c="ready"), 260) == [60]


def test_who_leads_next_knows_when_they_were_asked_for() -> None:
    before = ColdStarts()
    before.update(1, infos(a="ready"), 0)
    before.update(2, infos(a="ready"), 10)
    before.update(4, infos(a="ready"), 20)
    plan = decode_plan(encode_plan(PoolPlan(4, 0, 4, requested=before.pending())))
    after = ColdStarts(plan.requested)
    assert after.update(4, infos(a="ready", b="ready"), 60) == [], "it came while nobody looked"
    assert after.update(4, infos(a="ready", b="ready", c="ready"), 80) == [60]


# --- what is made of it -------------------------------------------------------------------------------------


def test_the_wait_told_counts_down_from_when_the_replica_was_asked_for() -> None:
    plan = PoolPlan(1, 0, 1, cold_start_s=100, requested=((1_000_000_000, 1), (1_050_000_000, 2)), at_us=1_080_000_000)
    assert [plan.warming_s(1, now_s * 1_000_000) for now_s in (1000, 1030, 1090)] == [100, 70, 10]
    assert plan.warming_s(1, 1_500_000_000) == 10, "one that is late is not known to come at once"
    assert plan.warming_s(1, 900_000_000) == 100, "clocks differ"
    assert PoolPlan(0, 0, 0, cold_start_s=100).warming_s(1, 0) == 100, "nobody was asked for yet"
    assert PoolPlan(1, 0, 1, cold_start_s=100).warming_s(1, 0) == 1, "all are up, and one is promoted"
    served = msgspec.structs.replace(plan, ready=2, typical_replica=ReplicaProfile(8, 1000, 80, 200, 4))
    asleep = PoolPlan(1, 0, 1, cold_start_s=100)
    assert [asleep.warming_s(1, 0, wake_s) for wake_s in (0.0, 0.2, 8.0)] == [1, 1, 8], "one is woken"
    assert plan.warming_s(1, 1_030_000_000, 8.0) == 8 and plan.warming_s(1, 1_090_000_000, 30.0) == 10, "who is sooner"
    assert [served.warming_s(place, 1_030_000_000) for place in (1, 16, 17, 33)] == [70, 70, 90, 110], "by turns of 16"


def test_a_learned_cold_start_is_how_far_ahead_is_looked_and_what_is_told() -> None:
    policy = ScalePolicy(cold_start_s=300)
    scaler = PoolScaler(policy)
    scaler.learn(None)
    assert scaler.policy is policy
    scaler.learn(PoolTrafficModel(starts_s=(100.0,) * 9))
    plan, _, figures = scaler.decide(Observation(infos(a="ready"), [], DemandTotals(0, 0, 0)), 0.0)
    assert plan.cold_start_s == figures.cold_start_s == scaler.policy.cold_start_s == 100
    assert plan.patience_s == 600, "nobody is sent away for a start that takes as long as was declared"
    scaler.learn(PoolTrafficModel())
    assert scaler.policy.cold_start_s == 300, "of what was declared, and not of what was learned before"


def test_what_waits_for_a_pool_without_replicas_is_reckoned_by_what_was_learned() -> None:
    """Two thousand requests of 500 output tokens, and no replica was ever seen: at 1,000 tokens a second each, and 100
    seconds for a start, ten are needed."""
    policy = ScalePolicy(replicas_min=0, replicas_max=50, warm_share=0, cold_start_s=100, utilisation_aimed=1.0,
                         utilisation_max=1.0)  # fmt: skip
    lines = [TierQueue(2000, 1.0, 2000, 2000 * 500), *[TierQueue(0, 0, 0, 0)] * 3]
    known = PoolTrafficModel(speeds=(Speed(2, 200), Speed(20, 1000)), prefill_per_s=100_000, routes=(a_route(500),))
    wanted = []
    for snapshot in (known, None):
        scaler = PoolScaler(policy)
        scaler.learn(snapshot)
        for second in range(5):
            plan, _, _ = scaler.decide(Observation([], lines, DemandTotals(2000, 2000, 2000 * 500)), float(second))
        wanted.append(plan.ready)
    assert wanted == [11, 1], "nothing of it is known without"
    assert known.typical_replica(None) is not None
    metrics = ControllerMetrics()
    value = metrics.registry.get_sample_value
    backlog = []
    for plan in (PoolPlan(1, 0, 1, typical_replica=known.typical_replica(None)), PoolPlan(1, 0, 1)):
        metrics.receive_plans({"p": plan}, leads=True)
        metrics.receive_pools({"p": ([], lines)})
        backlog.append(value("pool_backlog_seconds", {"pool": "p"}))
    assert backlog == [pytest.approx(1000.02), pytest.approx(1_002_000)]


def jumping(output_tokens: float) -> PoolTrafficModel:
    """As many output tokens a second at the default share; at the next one ten times as many."""
    rises = (0, 0, 0, 1, 10, 10, 10)
    return PoolTrafficModel(jumps=(Jump(60, rises, 0, output_tokens), Jump(300, rises, 0, 9e7)))


@pytest.mark.parametrize(
    ("jump_replicas", "max_share", "warm"),
    [(0.0, 0.5, 0), (2.0, 0.5, 0), (5.0, 0.5, 4), (5.0, 0.25, 2), (500.0, 0.25, 2), (5.0, 0.0, 0)],
    ids=str,
)
def test_warm_replicas_are_for_the_jumps_that_the_ready_ones_cannot_take(
    jump_replicas: float, max_share: float, warm: int
) -> None:
    """Eight that are filled to 0.6 take 2 replicas' worth of work more until they are filled to 0.85."""
    policy = msgspec.structs.replace(POLICY, replicas_min=8, replicas_max=20, warm_max_share=max_share)
    world = World(lambda t: 4.0, policy).boot(8)
    world.scaler.learn(jumping(jump_replicas * 100))
    plan = world.run(200)
    assert (plan.ready, plan.warm, plan.pods) == (8, warm, 8 + warm)
    if warm:
        told = [plan for _, plan in world.plans if "warm for arrival jumps" in plan.reason]
        assert told and told[0].figures["jump"] == jump_replicas
    assert world.figures is not None and world.figures.jump == jump_replicas


@pytest.mark.parametrize(("share", "warm"), [(0.9, 0), (0.95, 0), (0.96, 2), (0.99, 2), (0.991, 8), (1.0, 8)])
def test_the_risk_that_is_declared_sets_the_warm_replicas(share: float, warm: int) -> None:
    """Arrivals jump by 3.5 replicas of work, and by 35 in a hundredth of the time."""
    policy = msgspec.structs.replace(
        POLICY, replicas_min=8, replicas_max=20, warm_share=0.0, warm_max_share=1.0, jump_share=share
    )
    world = World(lambda t: 4.0, policy).boot(8)
    world.scaler.learn(jumping(350))
    assert world.run(200).warm == warm


def test_jumps_take_no_warm_replica_away_and_keep_none_of_a_pool_at_zero() -> None:
    declared = msgspec.structs.replace(POLICY, warm_min=3, replicas_min=2)
    world = World(lambda t: 0.0, declared).boot(2)
    world.scaler.learn(jumping(0))
    assert world.run(200).warm == 3
    asleep = World(lambda t: 0.0, msgspec.structs.replace(POLICY, replicas_min=0))
    asleep.scaler.learn(jumping(1e6))
    assert asleep.run(200).pods == 0
