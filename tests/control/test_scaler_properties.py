"""Properties of every scaling decision, whatever is observed."""

from __future__ import annotations

import msgspec
from hypothesis import event, given, settings
from hypothesis import strategies as st

from inference.control.policy.figures import Figures
from inference.control.policy.fleet_view import Observation
from inference.control.policy.pool_scaler import PoolScaler
from inference.control.policy.replica_choice import Moves
from inference.control.policy.scale_policy import ScalePolicy
from stream_fabric.pool.placement import ReplicaState
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import DemandTotals, ReplicaInfo, TierQueue
from stream_fabric.stream.ids import ReplicaId
from tests.control.scaled_pool import OUTPUT, POLICY, Pod

_STATES: list[ReplicaState] = ["starting", "warming", "warm", "ready", "ready", "ready", "draining", "sleeping"]
_INFOS = st.lists(
    st.builds(
        lambda k, state, running, revision: (k, state, running, revision),
        st.integers(0, 7),
        st.sampled_from(_STATES),
        st.sampled_from([0, 0, 0, 3, 10, 14]),
        st.sampled_from(["", "", "", "b"]),
    ),
    max_size=8,
    unique_by=lambda pod: pod[0],
)
_LOOKS = st.lists(
    st.tuples(
        st.one_of(st.none(), _INFOS),  # None: as at the last look
        st.sampled_from([1.0, 1.0, 1.0, 3.0, 60.0, -5.0]),
        st.sampled_from([0, 0, 1, 30]),
        st.integers(0, 20),
        st.booleans(),
        st.booleans(),
    ),
    min_size=2,
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(_LOOKS, st.integers(0, 2), st.integers(0, 2))
def test_whatever_is_seen_nothing_is_taken_by_mistake(
    looks: list[tuple[list[tuple[int, ReplicaState, int, str]] | None, float, int, int, bool, bool]],
    least: int,
    warm: int,
) -> None:
    policy = msgspec.structs.replace(
        POLICY, replicas_min=least, replicas_max=9, warm_min=warm, low_s=2, zero_s=2, cold_start_s=3,
        sleep_level=1, sleep_after_s=2,
    )  # fmt: skip
    scaler = PoolScaler(policy)
    now, total = 0.0, 0
    infos: list[ReplicaInfo] = []
    before: PoolPlan | None = None
    for pods, passed_s, waiting, arrived, held, marks in looks:
        if pods is not None:
            infos = [
                Pod(
                    ReplicaId(f"r{k}"),
                    0.0,
                    state,
                    running,
                    k,
                    revision,
                    asleep=int(state == "sleeping" or (state == "warming" and k % 2 > 0)),
                ).info(1.0)
                for k, state, running, revision in pods
            ]
        now, total = now + passed_s, total + arrived
        marked = frozenset(before.victims if before and marks else ())
        lines = [TierQueue(waiting, 1.0, 100 * waiting, OUTPUT * waiting), TierQueue(0, 0, 0, 0), TierQueue(0, 0, 0, 0)]
        plan, moves, figures = scaler.decide(
            Observation(infos, lines, DemandTotals(total, total, total), held, now, marked), now
        )
        by_name = {info.replica: info for info in infos}
        _check(plan, moves, figures, by_name, policy)
        assert not (held and moves.sleep)
        event(f"sleeps {len(moves.sleep)}")
        if before is not None:
            _check_step(before, plan, by_name, held, marked, policy)
            event(f"ready {(plan.ready > before.ready) - (plan.ready < before.ready):+}")
            event(f"pods {(plan.pods > before.pods) - (plan.pods < before.pods):+}")
        before = plan


def _check(
    plan: PoolPlan, moves: Moves, figures: Figures, by_name: dict[ReplicaId, ReplicaInfo], policy: ScalePolicy
) -> None:
    assert policy.replicas_min <= plan.ready <= policy.replicas_max
    assert plan.warm >= 0 and plan.ready + plan.warm <= max(policy.replicas_max, plan.pods)
    assert plan.pods >= plan.ready + plan.warm
    assert not moves.rest or moves.rest[0] == plan.resting, "written before it is said"
    assert len(set(moves.rest)) == len(moves.rest)
    taking = [info.replica for info in by_name.values() if info.state == "ready"]
    assert len(set(taking) - set(moves.rest)) >= min(plan.ready, len(taking)) or len(moves.rest) == 1
    assert not moves.promote or not moves.rest
    assert not {plan.resting, *plan.victims} & {*moves.promote}
    assert not any(by_name[victim].load.running for victim in plan.victims)
    sleeping = [by_name[name] for name in moves.sleep]
    assert all(info.state == "warm" and not info.load.running for info in sleeping)
    assert not sleeping or not {plan.resting, *plan.victims, *moves.promote} & {*moves.sleep}
    assert sum(info.state == "warm" for info in by_name.values()) - len(sleeping) >= policy.awake_min or not sleeping


def _check_step(
    old: PoolPlan,
    new: PoolPlan,
    by_name: dict[ReplicaId, ReplicaInfo],
    held: bool,
    marked: frozenset[ReplicaId],
    policy: ScalePolicy,
) -> None:
    states = [info.state for info in by_name.values()]
    present = sum(state != "draining" for state in states)
    disturbed = held or "draining" in states or len({info.revision for info in by_name.values()}) > 1
    if new.ready < old.ready:
        assert not disturbed
        if states.count("ready") < old.ready:
            assert "the missing ones did not start" in new.reason and 0 < states.count("ready") <= new.ready
        else:
            assert new.ready >= old.ready - max((old.ready - max(policy.replicas_min, 1)) // 2, 1) or not new.ready
    if new.resting is not None and new.resting != old.resting:
        assert not disturbed and by_name[new.resting].state == "ready"
        assert states.count("ready") > new.ready
        assert old.resting is None or old.resting not in by_name or by_name[old.resting].load.running == 0
    if {*new.victims} - {*old.victims}:
        assert not disturbed and not old.victims, "all at once"
        assert {by_name[victim].state for victim in new.victims} <= {"warm", "sleeping"}
        assert len(new.victims) <= new.pods - new.ready - new.warm
    if new.pods < old.pods:
        assert not disturbed
        if present >= old.pods:
            assert new.victims and {*new.victims} <= marked
            assert new.pods == max(old.pods - len(new.victims), new.ready + new.warm)
        else:
            assert new.pods >= present, "what is there stays"
