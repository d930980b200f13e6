"""How many replicas a pool is to have: ready, warm and in total. Pure: time is an argument.

The pool grows at once, by as much as it needs. It shrinks by half of its surplus at a time, and only while the whole
fleet is as planned. It keeps what its peaks usually need. Of the replicas that rest, all that are idle leave together.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

from inference.control.policy.condition_timers import ConditionTimers
from inference.control.policy.figures import Figures
from inference.control.policy.fleet_view import FleetView, Observation, drain_cost
from inference.control.policy.scale_policy import ScalePolicy
from inference.control.policy.schedule import scheduled_event
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.stream.ids import ReplicaId


class PoolSize:
    """Decides one pool's counts of ready, warm and total replicas."""

    def __init__(self, timers: ConditionTimers) -> None:
        self._timers = timers
        self._needs: deque[tuple[float, int]] = deque()
        """Needed replicas at the looks of the last ``low_s`` seconds."""
        self._quiet_s = 0.0

    def clear_history(self) -> None:
        """Forget past needs, after a gap in looking."""
        self._needs.clear()

    def receive(self, figures: Figures, policy: ScalePolicy, passed_s: float, now: float) -> None:
        """Take the figures of a look: how long the pool was quiet, and how many replicas were needed."""
        is_quiet = not (figures.running or figures.waiting or figures.arrivals_per_s)
        self._quiet_s = self._quiet_s + passed_s if is_quiet else 0.0
        self._needs.append((now, figures.needed))
        while self._needs[0][0] < now - policy.low_s:
            self._needs.popleft()

    def decide(
        self,
        plan: PoolPlan,
        figures: Figures,
        fleet: FleetView,
        seen: Observation,
        policy: ScalePolicy,
        passed_s: float,
        filled: float,
        *,
        calm: bool,
    ) -> PoolPlan:
        """Return the plan with new counts. ``calm``: replicas may be taken away. ``filled``: planned utilisation."""
        before = plan.ready
        plan = self._raise_ready(plan, figures, seen, policy, passed_s)
        if plan.ready == before:
            plan = self._lower_ready(plan, figures, policy, passed_s, calm=calm)
        return _count_pods(plan, figures, fleet, seen, policy, filled, calm=calm)

    def _raise_ready(
        self, plan: PoolPlan, figures: Figures, seen: Observation, policy: ScalePolicy, passed_s: float
    ) -> PoolPlan:
        """Return the plan with more ready replicas, if a rule asks for them."""
        proposals = self._proposals(figures, policy, passed_s)
        event = scheduled_event(policy.schedule, seen.at_unix_s, policy.cold_start_s)
        if event is not None:
            proposals.insert(0, (event.replicas, f"event {event.label!r} begins within a cold start, or has begun"))
        wanted, reason = max(proposals, key=lambda proposal: proposal[0])
        wanted = min(wanted, policy.replicas_max)
        if wanted <= plan.ready:
            return plan
        for name in ("slow", "full"):  # replicas on their way get time to take effect
            self._timers.reset(name)
        return msgspec.structs.replace(
            plan, ready=wanted, reason=f"ready replicas from {plan.ready} to {wanted}: {reason}"
        )

    def _proposals(self, figures: Figures, policy: ScalePolicy, passed_s: float) -> list[tuple[int, str]]:
        """Ready replicas that each applicable rule asks for, with the reason."""
        timers, ready = self._timers, figures.ready
        slow = figures.ttft_p99_s > policy.ttft_over * policy.ttft_objective_s
        # More replicas do not help an idle pool: its prompts are long, or its objective is too tight
        slow_s = timers.update("slow", slow and figures.utilisation >= policy.utilisation_low, passed_s)
        backlog_s = timers.update("backlog", bool(ready) and figures.backlog_s > policy.backlog_s_max, passed_s)
        full_s = timers.update("full", figures.utilisation > policy.utilisation_max, passed_s)
        proposals = [
            (policy.replicas_min, f"replicas_min is {policy.replicas_min}"),
            (
                figures.needed,
                f"expected work is {figures.work:.2f} replicas (arrivals forecast at {figures.growth:.2f} times the "
                f"current rate, usually {figures.foreseen:.2f} replicas), {figures.busy:.2f} replicas are busy",
            ),
        ]
        if slow_s and slow_s >= policy.ttft_over_s:
            limit = f"{policy.ttft_over:g} x {policy.ttft_objective_s:g} s"
            reason = f"p99 TTFT {figures.ttft_p99_s:.2f} s, above {limit} for {slow_s:.0f} s"
            proposals.append((_increased(ready, policy.ttft_step), reason))
        if backlog_s and backlog_s >= policy.backlog_over_s:
            reason = f"backlog {figures.backlog_s:.2f} s, above {policy.backlog_s_max:g} s for {backlog_s:.0f} s"
            proposals.append((_increased(ready, policy.backlog_step), reason))
        if full_s and full_s >= policy.utilisation_over_s:
            reason = f"utilisation {figures.utilisation:.0%}, above {policy.utilisation_max:.0%} for {full_s:.0f} s"
            proposals.append((_increased(ready, policy.utilisation_step), reason))
        return proposals

    def _lower_ready(
        self, plan: PoolPlan, figures: Figures, policy: ScalePolicy, passed_s: float, *, calm: bool
    ) -> PoolPlan:
        """Return the plan with fewer ready replicas, if their utilisation has been low for long enough."""
        ready = plan.ready
        # One step at a time. And the replicas must be the planned ones: else their utilisation says nothing about fewer
        done = plan.resting is None and not plan.victims and plan.pods == ready + plan.warm
        as_planned = calm and done and figures.ready == ready
        is_low = figures.ready > 0 and figures.utilisation < policy.utilisation_low
        low_s = self._timers.update("low", is_low, passed_s)
        low = is_low and as_planned
        came = max(figures.ready, figures.needed, policy.replicas_min)
        if calm and 0 < figures.ready < ready and came < ready and not figures.warm:
            reason = f"ready replicas from {ready} to {came}: the missing ones did not start"
            return msgspec.structs.replace(plan, ready=came, reason=reason)
        lowered = ready - 1
        if ready > policy.replicas_max and as_planned:
            reason = f"replicas_max is {policy.replicas_max}"
        elif ready == 1 and not policy.replicas_min and low:
            if figures.needed or self._quiet_s < policy.zero_s:
                return plan
            reason = f"no request for {self._quiet_s:.0f} s"
        elif low and ready > 1 and low_s >= policy.low_s:
            # A replica that peaks usually need, or a recent look, may be needed again, and one that left costs a cold
            # start
            least = max(
                policy.replicas_min,
                1,
                math.ceil(figures.utilisation * ready / policy.utilisation_aimed),
                figures.peak,
                *(needed for _, needed in self._needs),
            )
            if ready <= least:
                return plan
            # Half of the surplus: what remains shows whether the estimate holds, before the next half stops
            lowered = ready - max((ready - least) // 2, 1)
            reason = f"utilisation {figures.utilisation:.0%}, below {policy.utilisation_low:.0%} for {low_s:.0f} s"
        else:
            return plan
        return msgspec.structs.replace(
            plan, ready=lowered, reason=f"ready replicas from {ready} to {lowered}: {reason}"
        )


def _count_pods(
    plan: PoolPlan,
    figures: Figures,
    fleet: FleetView,
    seen: Observation,
    policy: ScalePolicy,
    filled: float,
    *,
    calm: bool,
) -> PoolPlan:
    """Return the plan with the total count: it grows at once, and shrinks by the idle replicas that are not needed."""
    warm = policy.warm_count(plan.ready, filled, figures.jump)
    plan = msgspec.structs.replace(plan, warm=warm)
    wanted = plan.ready + warm
    if wanted > plan.pods:
        reason = f"{plan.reason}; replicas in total from {plan.pods} to {wanted}"
        if warm > policy.warm_count(plan.ready):
            reason += f", {warm} of them warm for arrival jumps of {figures.jump:.2f} replicas of work"
        return msgspec.structs.replace(plan, pods=wanted, victims=(), reason=reason)
    # The extra replica that a rollout starts is not a wanted one. Nor is one that has been given up and begins again
    if fleet.started > plan.pods and not plan.victims and fleet.one_revision:
        reason = f"replicas in total from {plan.pods} to {fleet.started}: so many exist"
        return msgspec.structs.replace(plan, pods=fleet.started, reason=reason)
    if not calm:
        return plan
    if wanted == plan.pods:
        if not plan.victims or fleet.present > plan.pods:
            return plan
        # More are wanted than when they were chosen. A victim that nothing removes would end all further shrinking
        reason = f"{_named(plan.victims)} may stay: {wanted} replicas in total are planned"
        return msgspec.structs.replace(plan, victims=(), reason=reason)
    if fleet.present < plan.pods:  # they did not start in all that time, and nobody needs them
        pods = max(wanted, fleet.present)
        reason = f"replicas in total from {plan.pods} to {pods}: the missing ones did not start"
        return msgspec.structs.replace(plan, pods=pods, reason=reason)
    spare = [name for name in fleet.idle if name != plan.resting]
    if not plan.victims:
        surplus = min(len(spare) - warm, plan.pods - wanted)
        if surplus > 0:
            victims = tuple(sorted(spare, key=lambda name: drain_cost(fleet.by_name[name]))[:surplus])
            who = f"{_named(victims)} {'is' if surplus == 1 else 'are'} idle and the next to leave"
            reason = f"{who}: {len(spare)} are warm, {warm} are planned"
            return msgspec.structs.replace(plan, victims=victims, reason=reason)
    elif fleet.present == plan.pods and seen.marked >= set(plan.victims):
        pods = max(plan.pods - len(plan.victims), wanted)
        leaves = "leaves" if len(plan.victims) == 1 else "leave"
        reason = f"replicas in total from {plan.pods} to {pods}: {_named(plan.victims)} {leaves}"
        return msgspec.structs.replace(plan, pods=pods, reason=reason)
    return plan


def _named(victims: tuple[ReplicaId, ...]) -> str:
    """The victims for a reason; the plan has all their names."""
    first, *others = victims
    return f"{first} and {len(others)} others" if others else first


def _increased(ready: int, share: float) -> int:
    """Ready replicas increased by this share, rounded up."""
    return math.ceil(ready * (1 + share) - 1e-9)
