"""The scaling decision for one pool: how many replicas, which of them rest, and when the count may fall. Pure.

The pool grows on leading figures (arrivals, the queue, time to first token), at once and by as much as it needs. It
shrinks on a trailing figure (low utilisation for long), by half of its surplus, and only while the whole fleet is as
planned.

A replica never leaves with work. It first stops taking requests and becomes warm, and may be promoted again. Only an
idle one lets the count fall. Missing information is not zero load: a late look, an incomplete fleet, a rollout or a
hold take nothing away.
"""

from __future__ import annotations

import math
from collections.abc import Set

import msgspec

from inference.control.policy.condition_timers import ConditionTimers
from inference.control.policy.figures import Figures, LoadEstimator
from inference.control.policy.fleet_view import FleetView, Observation, profile_of, steady_profile
from inference.control.policy.pool_size import PoolSize
from inference.control.policy.replica_choice import Moves, ReplicaChoice
from inference.control.policy.scale_policy import ScalePolicy
from inference.control.policy.traffic_model import PoolTrafficModel
from stream_fabric.pool.plan import PoolPlan, ReplicaProfile
from stream_fabric.stream.ids import ReplicaId

FIRST_PLAN = "first plan: the replicas that exist"
"""Reason of a pool's first plan."""
GAP_S = 5.0
"""Longest time between two consecutive looks. After a longer gap, durations begin anew."""
_LACKING_COLD_STARTS = 3.0
"""Cold starts after which replicas that have not started are given up, and the pool is planned without them."""
_PATIENCE = 2.0
"""Cold starts, the longer of learned and declared, that a request waits for the first replica."""


class PoolScaler:
    """Decides the plan of one declared pool, every second while its controller leads."""

    def __init__(self, policy: ScalePolicy, plan: PoolPlan | None = None) -> None:
        """``plan``: the pool's last written plan; None: there is none."""
        self.policy = policy
        """Declared policy with the learned cold start."""
        self.plan = plan
        self._declared = policy
        self._model: PoolTrafficModel | None = None
        self._looked_at = -math.inf
        self._timers = ConditionTimers()
        self._pods = 0
        """Planned replicas at the last look."""
        self._started: Set[ReplicaId] = frozenset()
        """Replicas that were seen started since the fleet was last whole."""
        self._load = LoadEstimator(policy, plan.peak_rise if plan is not None else 0.0)
        self._size = PoolSize(self._timers)
        self._choice = ReplicaChoice(self._timers)

    def learn(self, model: PoolTrafficModel | None) -> None:
        """Use this traffic model from now on."""
        if model is None or model is self._model:
            return
        self._model, declared = model, self._declared
        self._load.learn(model)
        self.policy = msgspec.structs.replace(declared, cold_start_s=model.cold_start_s(declared.cold_start_s))

    def decide(self, seen: Observation, now: float) -> tuple[PoolPlan, Moves, Figures]:
        """Return the plan from now on, the states to request of replicas, and the figures of this look."""
        is_first = math.isinf(self._looked_at)
        passed_s = self._time_since_last_look(now)
        fleet = FleetView(seen.infos)
        old = self.plan or self._first_plan(fleet)
        profile = self._profile(fleet, old)
        figures = self._load.estimate(seen, fleet, profile, self.policy, passed_s, now, is_first=is_first)
        self._size.receive(figures, self.policy, passed_s, now)
        plan = _forget_gone(self._with_known_fields(old, profile), fleet)
        calm = self._is_calm(plan, fleet, seen, passed_s)
        plan = self._size.decide(plan, figures, fleet, seen, self.policy, passed_s, self._load.filled, calm=calm)
        plan, moves = self._choice.choose(plan, fleet, seen, self.policy, passed_s, now, calm=calm)
        if plan.reason == old.reason or _decided_fields(plan) == _decided_fields(old):
            plan = msgspec.structs.replace(plan, reason=old.reason, figures=old.figures)
        else:
            values = {name: float(value) for name, value in msgspec.structs.asdict(figures).items()}
            plan = msgspec.structs.replace(plan, figures=values)
        self.plan = plan
        return plan, moves, figures

    def _time_since_last_look(self, now: float) -> float:
        """Seconds since the last look; after a gap 0, and all durations start again."""
        passed_s = now - self._looked_at
        self._looked_at = now
        if 0 <= passed_s <= GAP_S:
            return passed_s
        self._timers.clear()
        self._load.clear_arrivals()
        self._size.clear_history()
        self._choice.clear_idle()
        return 0.0

    def _first_plan(self, fleet: FleetView) -> PoolPlan:
        """First plan of a pool without one: the replicas that exist."""
        policy = self.policy
        ready = min(max(policy.replicas_min, len(fleet.ready) + len(fleet.coming)), policy.replicas_max)
        warm = policy.warm_count(ready)
        return PoolPlan(ready, warm, max(fleet.present, ready + warm), reason=FIRST_PLAN)

    def _profile(self, fleet: FleetView, old: PoolPlan) -> ReplicaProfile | None:
        """Profile of the ready replicas; without one, the learned or last known profile."""
        profile = profile_of(fleet.ready)
        if profile is None and self._model is not None:
            profile = self._model.typical_replica(old.typical_replica)
        return steady_profile(profile, old.typical_replica)

    def _with_known_fields(self, old: PoolPlan, profile: ReplicaProfile | None) -> PoolPlan:
        """The plan with what gateways read from it (models, waits, overload marks), and what the next leader does."""
        return msgspec.structs.replace(
            old,
            typical_replica=profile,
            models=self.policy.models,
            cold_start_s=self.policy.cold_start_s,
            patience_s=_PATIENCE * max(self.policy.cold_start_s, self._declared.cold_start_s),
            outputs=old.outputs if self._model is None else self._model.outputs(),
            overload_marks=self.policy.marks(profile),
            peak_rise=self._load.peak_rise(self.policy),
        )

    def _is_calm(self, plan: PoolPlan, fleet: FleetView, seen: Observation, passed_s: float) -> bool:
        """Whether replicas may be taken away: the fleet is as planned, and nobody is changing it."""
        lacks = bool(fleet.coming) or fleet.present < plan.pods
        started = {info.replica for info in (*fleet.ready, *fleet.rested)}
        # A replica that starts, or is newly asked for, gives all others their time anew. One that dies at each start
        # does not, although the platform starts it again and again
        if plan.pods > self._pods or started - self._started:
            self._timers.reset("lacks")
        self._pods, self._started = plan.pods, started | self._started if lacks else started
        lacks_s = self._timers.update("lacks", lacks, passed_s)
        given_up = lacks_s > _LACKING_COLD_STARTS * self.policy.cold_start_s
        undisturbed = fleet.one_revision and not fleet.draining and not seen.held
        return (not lacks or given_up) and undisturbed and not self._load.lacks_mean(self.policy)


def _forget_gone(plan: PoolPlan, fleet: FleetView) -> PoolPlan:
    """Clear the plan's resting replica if it is done, and the scale-down targets that are gone or have work."""
    if plan.resting is not None and (plan.resting not in fleet.by_name or fleet.is_idle(plan.resting)):
        plan = msgspec.structs.replace(plan, resting=None)
    if not all(map(fleet.is_idle, plan.victims)):
        plan = msgspec.structs.replace(plan, victims=tuple(filter(fleet.is_idle, plan.victims)))
    return plan


def _decided_fields(plan: PoolPlan) -> tuple[object, ...]:
    """The fields of a plan whose change needs a reason."""
    return plan.ready, plan.warm, plan.pods, plan.resting, plan.victims
