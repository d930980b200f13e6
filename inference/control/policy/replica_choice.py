"""Which replicas of a pool are promoted, stop taking requests, or sleep. Pure: time is an argument."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from inference.control.policy.condition_timers import ConditionTimers
from inference.control.policy.fleet_view import FleetView, Observation, drain_cost, streams_of
from inference.control.policy.scale_policy import ScalePolicy
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.stream.ids import ReplicaId

_SURPLUS_S = 2.0
"""Time for which more replicas than planned take requests before one stops."""
_WAKING_S = 10.0
"""Time that a waking replica gets before another is promoted beside it."""


class Moves(NamedTuple):
    """States to request of replicas so that the plan comes true. Requesting a state again changes nothing."""

    promote: tuple[ReplicaId, ...] = ()
    rest: tuple[ReplicaId, ...] = ()
    sleep: tuple[ReplicaId, ...] = ()


class ReplicaChoice:
    """Chooses which replicas of one pool are promoted, rest or sleep."""

    def __init__(self, timers: ConditionTimers) -> None:
        self._timers = timers
        self._idle_since: dict[ReplicaId, float] = {}
        """Idle warm replicas."""
        self._waking_since: dict[ReplicaId, float] = {}

    def clear_idle(self) -> None:
        """Forget for how long replicas were idle, after a gap in looking."""
        self._idle_since.clear()

    def choose(
        self,
        plan: PoolPlan,
        fleet: FleetView,
        seen: Observation,
        policy: ScalePolicy,
        passed_s: float,
        now: float,
        *,
        calm: bool,
    ) -> tuple[PoolPlan, Moves]:
        """Return the plan with ``resting`` as chosen, and the moves."""
        plan, moves = self._promote_or_rest(plan, fleet, seen, passed_s, now, calm=calm)
        sleep = self._replicas_to_sleep(plan, fleet, policy, now)  # idle time counts also while nothing may fall asleep
        return plan, moves if moves.promote or seen.held else moves._replace(sleep=sleep)

    def _promote_or_rest(
        self, plan: PoolPlan, fleet: FleetView, seen: Observation, passed_s: float, now: float, *, calm: bool
    ) -> tuple[PoolPlan, Moves]:
        """Promote replicas when too few are ready, or choose one to rest when too many are."""
        taking = [info for info in fleet.ready if info.replica != plan.resting]
        short = plan.ready - len(taking)
        surplus_s = self._timers.update("surplus", short < 0, passed_s)
        waking = self._count_waking(fleet, now)
        if short > waking:
            return _promote(plan, fleet, short - waking)
        settled = calm or surplus_s > _SURPLUS_S
        may_rest = plan.resting is None and fleet.one_revision and not fleet.draining and not seen.held
        if short < 0 and settled and may_rest:
            first, *others = [info.replica for info in sorted(taking, key=drain_cost)[:-short]]
            who = f"{first} stops" if not others else f"{first} and {len(others)} others stop"
            reason = f"{who} taking requests: {len(taking)} replicas are ready, {plan.ready} are planned"
            # The plan remembers one. The others are seen to rest before it is done, or are chosen again
            return msgspec.structs.replace(plan, resting=first, reason=reason), Moves(rest=(first, *others))
        return plan, Moves(rest=(plan.resting,) if plan.resting is not None else ())

    def _count_waking(self, fleet: FleetView, now: float) -> int:
        """Number of waking replicas that should be ready before another one could be."""
        waking = [info.replica for info in fleet.coming if info.load.asleep]
        self._waking_since = {name: self._waking_since.get(name, now) for name in waking}
        return sum(now - since <= _WAKING_S for since in self._waking_since.values())

    def _replicas_to_sleep(
        self, plan: PoolPlan, fleet: FleetView, policy: ScalePolicy, now: float
    ) -> tuple[ReplicaId, ...]:
        """Warm replicas that were idle for ``sleep_after_s``, without those that stay awake.

        The smallest caches come first, because sleep loses the cache.
        """
        warm = [
            info
            for info in fleet.rested
            if info.state == "warm" and not streams_of(info) and info.replica not in (plan.resting, *plan.victims)
        ]
        self._idle_since = {info.replica: self._idle_since.get(info.replica, now) for info in warm}
        due = [
            info
            for info in sorted(warm, key=drain_cost)
            if not info.sleepless and now - self._idle_since[info.replica] >= policy.sleep_after_s
        ]
        limit = max(len(warm) - policy.awake_min, 0) if policy.sleep_level else 0
        return tuple(info.replica for info in due[:limit])


def _promote(plan: PoolPlan, fleet: FleetView, count: int) -> tuple[PoolPlan, Moves]:
    """Promote rested replicas: first the resting one, whose cache is warmest; last the scale-down targets."""

    def order(info: ReplicaInfo) -> tuple[bool, bool, bool, float, int, ReplicaId]:
        asleep = info.state == "sleeping"
        wake_s = info.wake_s if asleep else 0.0
        is_resting, is_victim = info.replica == plan.resting, info.replica in plan.victims
        return not is_resting, is_victim, asleep, wake_s, -info.prefix_blocks, info.replica

    names = [info.replica for info in sorted(fleet.rested, key=order)]
    if plan.resting in fleet.by_name and plan.resting not in names:
        names.insert(0, plan.resting)  # it has not changed its state yet
    promoted = tuple(names[:count])
    if plan.resting in promoted:
        plan = msgspec.structs.replace(plan, resting=None)
    if any(victim in promoted for victim in plan.victims):
        victims = tuple(victim for victim in plan.victims if victim not in promoted)
        plan = msgspec.structs.replace(plan, victims=victims)
    return plan, Moves(promoted)
