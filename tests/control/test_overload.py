"""When a surge begins and ends, and that what is told of it is bounded and never lacks its last word."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.control.decision_log import DecisionLog
from inference.control.policy.fleet_view import profile_of
from inference.control.policy.overload import QUIET_S, OverloadChange, OverloadWatch
from inference.control.policy.scale_policy import PREFILL_SHARE_MIN, ScalePolicy
from inference.control.pool_planner import describe_overload
from stream_fabric.limits import DECISIONS_PER_MINUTE_MAX
from stream_fabric.pool.overload import SPAN
from stream_fabric.pool.plan import PoolPlan, ReplicaProfile, decode_plan, encode_plan
from stream_fabric.pool.records import EngineLoad, OverloadTotals, ReplicaInfo
from stream_fabric.stream.ids import ReplicaId
from tests.support.events import Heard, SetClock

POLICY = ScalePolicy(adjacent=("south",))
MARKS = POLICY.marks(None)


def counts(
    batch: int = 0, standard: int = 0, interactive: int = 0, shifted: int = 0, yielded_to: int = 0
) -> OverloadTotals:
    return OverloadTotals((interactive, standard, batch, 0), shifted, (1000, 1000, 1000, 1000), yielded_to)


def test_each_layer_begins_and_ends_once_in_the_order_of_the_marks() -> None:
    watch, told = OverloadWatch(), list[OverloadChange]()
    refused = shifted = standard = 0
    for second in range(60):
        if 5 <= second < 30:
            refused, shifted, standard = refused + 3, shifted + 2, standard + (second > 20)
        watch.update(counts(refused, standard, 0, shifted), MARKS, float(second))
        told += watch.take_changes()
        assert watch.rejecting == tuple(
            tier for tier, since in (("standard", 21), ("batch", 5)) if since <= second < 29 + QUIET_S
        )
    assert [(change.event, change.tier) for change in told] == [
        ("shed_begin", "batch"), ("shift_begin", ""), ("shed_begin", "standard"),
        ("shed_end", "batch"), ("shift_end", ""), ("shed_end", "standard"),
    ]  # fmt: skip
    assert (told[3].requests, told[3].seconds) == (75, 24.0) and told[4].requests == 50
    assert not watch.overflowing


def test_yielding_begins_before_the_tier_that_it_is_for_is_rejected_and_ends_once() -> None:
    watch, told = OverloadWatch(), list[OverloadChange]()
    for second in range(40):
        came = min(max(second - 4, 0), 10)
        watch.update(counts(standard=came, yielded_to=2 * came), MARKS, float(second))
        told += watch.take_changes()
        assert watch.yielding == (5 <= second < 14 + QUIET_S)
    assert [change.event for change in told] == ["yield_begin", "shed_begin", "yield_end", "shed_end"]
    assert told[2] == OverloadChange("yield_end", "", 20, 9.0)
    reason, mark_s = describe_overload(told[0], MARKS)
    assert (reason, mark_s) == (
        "batch work yields to requests of higher tiers: the backlog ahead of them is above 0.4 s", 0.4,
    )  # fmt: skip
    assert describe_overload(told[2], MARKS)[0] == "batch work no longer yields"


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_whatever_comes_beginnings_and_ends_take_turns_and_are_not_many(seconds: list[bool]) -> None:
    watch, count, told = OverloadWatch(), 0, list[tuple[int, str]]()
    watch.update(counts(), MARKS, 0.0)
    for second, refuses in enumerate(seconds, 1):
        count += refuses
        watch.update(counts(count), MARKS, float(second))
        told += [(second, change.event) for change in watch.take_changes()]
    turns = ["shed_begin", "shed_end"] * len(told)
    assert [what for _, what in told] == turns[: len(told)]
    assert all(end - begin >= QUIET_S for (begin, what), (end, _) in pairwise(told) if what == "shed_begin")
    assert bool(watch.rejecting) == (len(told) % 2 == 1)


def test_who_leads_next_tells_of_the_end_and_of_no_second_beginning() -> None:
    plan = decode_plan(
        encode_plan(
            PoolPlan(1, 0, 1, overload_marks=MARKS, rejecting_tiers=("batch",), is_overflowing=True, is_yielding=True)
        )
    )
    assert plan.overload_marks == MARKS
    watch = OverloadWatch(plan.rejecting_tiers, plan.is_overflowing, plan.is_yielding)
    watch.update(counts(batch=900, shifted=80, yielded_to=7), MARKS, 100.0)
    assert watch.take_changes() == []
    watch.update(counts(batch=901, shifted=80, yielded_to=7), MARKS, 101.0)
    assert watch.take_changes() == [], "it goes on"
    watch.update(counts(batch=901, shifted=80, yielded_to=7), MARKS, 101.0 + QUIET_S)
    assert [change.event for change in watch.take_changes()] == ["shed_end", "shift_end", "yield_end"]


def test_a_pool_that_is_lost_counts_anew() -> None:
    watch = OverloadWatch()
    watch.update(counts(batch=900), MARKS, 0.0)
    watch.update(counts(batch=0), MARKS, 1.0)
    assert watch.take_changes() == []
    watch.update(counts(batch=2), MARKS, 2.0)
    assert [(change.event, change.requests) for change in watch.take_changes()] == [("shed_begin", 2)]


def test_the_level_is_the_share_of_a_tiers_own_requests_over_the_last_seconds() -> None:
    watch = OverloadWatch()
    assert watch.reject_shares == [0, 0, 0, 0]

    def after(seconds: float, asked: tuple[int, ...], rejected: tuple[int, ...]) -> list[float]:
        watch.update(OverloadTotals((*rejected, 0), 0, (*asked, 7)), MARKS, seconds)
        *shares, free = watch.reject_shares
        assert free == 0
        return shares

    assert after(0.0, (100, 100, 100), (0, 0, 90)) == [0, 0, 0], "what was before is not known"
    assert after(10.0, (100, 140, 120), (0, 10, 110)) == [0, 0.25, 1]
    assert after(20.0, (110, 140, 140), (0, 10, 110)) == [0, 0, 0], "only the last seconds count"
    assert after(21.0, (1, 1, 1), (0, 0, 0)) == [0, 0, 0], "the pool was lost and counts anew"
    assert after(36.0, (3, 1, 5), (1, 0, 1)) == [0.5, 0, 0.25]


def test_by_default_the_layers_stand_in_their_order() -> None:
    policy = ScalePolicy(adjacent=("south",))
    interactive_s, standard_s, batch_s, free_s = policy.marks(None).reject_s
    assert 0 < free_s < batch_s < policy.overflow_s < standard_s < interactive_s
    assert SPAN * interactive_s <= policy.ttft_objective_s, "who is admitted is served in time"
    assert batch_s <= policy.backlog_s_max and policy.backlog_over_s > 0, "refusing takes no time, growing does"


def test_the_time_between_tokens_leaves_prompts_a_share_of_a_replicas_time() -> None:
    """32 streams in steps of 56 ms: at 120 ms between tokens, prompts may take 53 % of the time."""
    profile = ReplicaProfile(32, 2000.0, 571.0, 100, 4)
    assert ScalePolicy().marks(profile).duty_max == (), "nothing is promised"
    assert ScalePolicy(itl_objective_s=0.12).prefill_share(None) == 1.0
    policy = ScalePolicy(itl_objective_s=0.12)
    assert policy.prefill_share(profile) == pytest.approx(0.533, abs=1e-3)
    interactive, standard, batch, free = policy.marks(profile).duty_max
    assert interactive == pytest.approx(0.533, abs=1e-3) and interactive > standard > batch > free
    assert ScalePolicy(itl_objective_s=0.05).prefill_share(profile) == PREFILL_SHARE_MIN, "it cannot be kept anyway"


def test_engines_that_limit_their_steps_need_no_limit_for_prompts() -> None:
    policy = ScalePolicy(itl_objective_s=0.12)
    for objective_ms, limited in ((120.0, False), (50.0, False), (200.0, True), (0.0, True)):
        profile = ReplicaProfile(32, 2000.0, 571.0, 100, 4, objective_ms)
        assert bool(policy.marks(profile).duty_max) == limited
        assert (policy.prefill_share(profile) < 1) == limited


def test_a_pool_keeps_an_objective_only_if_each_of_its_replicas_does() -> None:
    def found(*objectives_ms: float) -> float:
        loads = [EngineLoad(0, 0, 8, itl_objective_ms=objective_ms) for objective_ms in objectives_ms]
        infos = [ReplicaInfo(ReplicaId(str(n)), "p", "vllm", ("m",), "ready", load) for n, load in enumerate(loads)]
        profile = profile_of(infos)
        assert profile is not None
        return profile.itl_objective_ms

    assert (found(50, 50), found(50, 80), found(50, 0)) == (50, 80, 0)


def test_a_new_replica_counts_in_the_profile_from_its_first_token() -> None:
    """A new one reports defaults: with its long answers and slow prompts the pool would seem to need more replicas."""
    load, name = EngineLoad(0, 0, 24), ReplicaId("r")
    served = ReplicaInfo(
        name, "p", "sim", ("m",), "ready", load, prefill_per_s=4000.0, decode_per_s=600.0, output_tokens_mean=100.0,
        bytes_per_token=3.0, ttft_counts=(30, 60),
    )  # fmt: skip
    new = msgspec.structs.replace(
        served, prefill_per_s=8000.0, decode_per_s=480.0, output_tokens_mean=256.0, bytes_per_token=4.0, ttft_counts=()
    )
    assert profile_of([served, new, new, new]) == ReplicaProfile(24, 4000.0, 600.0, 100.0, 3.0)
    other = msgspec.structs.replace(new, ttft_counts=(0, 0, 1))
    assert profile_of([served, other, new]) == ReplicaProfile(24, 6000.0, 540.0, 178.0, 3.5)
    assert profile_of([new]) == ReplicaProfile(24, 8000.0, 480.0, 256.0, 4.0), "nobody knows better"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shed_batch_s": 11.0}, "shed_batch_s <= shed_standard_s"),
        ({"shed_free_s": 0.2, "shed_batch_s": 0.1}, "shed_free_s <= shed_batch_s"),
        ({"adjacent": ("b",), "shift_backlog_s": 0.0}, "shift_backlog_s"),
        ({"adjacent": ("b",), "shift_backlog_s": 0.1}, "shift_backlog_s"),
        ({"shift_utilisation_max": 0.0}, "shift_utilisation_max"),
        ({"shed_standard_s": -1.0}, "times must be 0 or more"),
        ({"itl_objective_s": -1.0}, "times must be 0 or more"),
        ({"shed_standard_s": 0.6, "shed_interactive_s": 0.6}, "half of ttft_objective_s, which is 1"),
        ({"shed_interactive_s": 5.0}, "half of ttft_objective_s"),
    ],
)
def test_what_cannot_be_meant_is_not_taken(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ScalePolicy(**wrong)  # type: ignore[arg-type]


# --- the decisions -------------------------------------------------------------------------------------------


def test_what_changes_each_second_is_told_so_often_and_its_last_word_always() -> None:
    heard, clock = Heard(), SetClock()
    clock.at_us = 0
    decisions = DecisionLog(heard, clock, "c")
    for second in range(600):
        clock.at_us = second * 1_000_000
        decisions.catch_up()
        decisions.report("scale", "flapping", state=f"{second}", reason=f"reason {second}", figures={"n": second})
        if second % 100 == 0:
            decisions.report("scale", "calm", state=f"{second}")
    flapping = [event for event in heard.fleet if event.pool == "flapping"]
    for minute in range(10):
        of = [event for event in flapping if event.at_us // 60_000_000 == minute]
        assert len(of) <= DECISIONS_PER_MINUTE_MAX + 1
    assert [event.state for event in heard.fleet if event.pool == "calm"] == ["0", "100", "200", "300", "400", "500"]
    assert flapping[-1].state != "599"
    clock.at_us = 600 * 1_000_000
    decisions.catch_up()
    last = heard.fleet[-1]
    assert (last.state, last.reason, last.figures["n"]) == ("599", "reason 599", 599), "what holds is told"
    told = len([event for event in heard.fleet if event.pool == "flapping"])
    assert told + sum(int(event.figures.get("untold", 0)) for event in heard.fleet) == 600


def test_what_ends_a_minute_of_change_is_told_when_the_process_ends() -> None:
    heard, clock = Heard(), SetClock()
    decisions = DecisionLog(heard, clock, "c")
    for number in range(DECISIONS_PER_MINUTE_MAX + 3):
        decisions.report("scale", "p", state=f"{number}")
    decisions.close()
    assert heard.fleet[-1].state == f"{DECISIONS_PER_MINUTE_MAX + 2}" and heard.fleet[-1].figures["untold"] == 2
    count = len(heard.fleet)
    decisions.close()
    assert len(heard.fleet) == count


def test_what_is_told_in_one_moment_keeps_its_order_and_kinds_do_not_take_each_others_room() -> None:
    heard, clock = Heard(), SetClock()
    decisions = DecisionLog(heard, clock, "c")
    for _ in range(2 * DECISIONS_PER_MINUTE_MAX):
        decisions.report("scale", "p")
    for what in ("shed_begin", "shift_begin", "promote"):
        decisions.report(what, "p")  # type: ignore[arg-type]
    assert [event.what for event in heard.fleet[-3:]] == ["shed_begin", "shift_begin", "promote"]
    ats = [event.at_us for event in heard.fleet]
    assert ats == sorted(set(ats)) and len({event.id for event in heard.fleet}) == len(heard.fleet)
