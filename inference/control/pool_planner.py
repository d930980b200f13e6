"""Plans one declared pool while this controller leads: reads it, decides, and carries the plan out.

The plan is written before anything is requested of a replica, so that the next leader goes on with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

import msgspec

from inference.control.decision_log import DecisionLog
from inference.control.metrics import ControllerMetrics
from inference.control.policy.cold_starts import ColdStarts
from inference.control.policy.figures import Figures
from inference.control.policy.fleet_view import Observation
from inference.control.policy.overload import OverloadChange, OverloadWatch, yield_mark_s
from inference.control.policy.pool_scaler import PoolScaler
from inference.control.policy.replica_choice import Moves
from inference.control.policy.rollout import RolloutChange, RolloutWatch
from inference.control.policy.scale_policy import ScalePolicy
from inference.control.traffic_model_job import TrafficModelJob
from stream_fabric.pool.overload import OverloadMarks
from stream_fabric.pool.placement import TIERS
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import DesiredState
from stream_fabric.ports import Clock, Control, Pools
from stream_fabric.stream.ids import ReplicaId

log = logging.getLogger(__name__)

_ADOPT_S = 10.0
"""Time that a pool without a known plan is watched before its first plan. After a total loss of Redis its replicas come
back one by one."""


class PoolDecision(NamedTuple):
    """Outcome of one look at a pool."""

    old: PoolPlan | None
    plan: PoolPlan
    moves: Moves
    figures: Figures
    reject_shares: Sequence[float]
    """Share of new requests that is rejected, by tier."""

    @property
    def is_new(self) -> bool:
        """True if the decision changed the pool's counts, and has a reason of its own."""
        return self.plan.reason != (self.old.reason if self.old else "")


class PoolPlanner:
    """Plans one pool during one term."""

    def __init__(
        self,
        pool: str,
        policy: ScalePolicy,
        pools: Pools,
        control: Control,
        clock: Clock,
        models: TrafficModelJob,
        decisions: DecisionLog,
        metrics: ControllerMetrics,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._pools = pools
        self._control = control
        self._clock = clock
        self._models = models
        self._decisions = decisions
        self._metrics = metrics
        self._unknown_since: float | None = None
        self._scaler: PoolScaler | None = None
        self._cold_starts = ColdStarts()
        self._overload = OverloadWatch()
        self._rollout = RolloutWatch()

    async def decide(self, known: PoolPlan | None, announced: Set[ReplicaId], now: float) -> PoolDecision | None:
        """Read the pool and decide. None: the pool has no plan yet and is still observed.

        ``known``: the last known plan. ``announced``: scale-down targets that the platform knows of. Raises
        FabricUnavailable.
        """
        seen = Observation(
            await self._pools.replicas(self._pool),
            await self._pools.tier_queues(self._pool),
            await self._pools.demand_totals(self._pool),
            await self._control.held_s(self._pool) > 0,
            self._clock.now_us() / 1e6,
            announced & set(known.victims) if known is not None else frozenset(),
        )
        overload_totals = await self._pools.overload_totals(self._pool)
        self._rollout.update(seen.infos)
        scaler = self._scaler or self._make_scaler(known, now)
        if scaler is None:
            return None
        scaler.learn(self._models.known.get(self._pool))
        plan, moves, figures = scaler.decide(seen, now)
        self._models.receive_starts(self._pool, self._cold_starts.update(plan.pods, seen.infos, seen.at_unix_s))
        plan = msgspec.structs.replace(plan, requested=self._cold_starts.pending())
        marks = plan.overload_marks or self._policy.marks(None)
        if self._overload.update(overload_totals, marks, now):
            overload = self._overload
            plan = msgspec.structs.replace(
                plan,
                rejecting_tiers=overload.rejecting,
                is_overflowing=overload.overflowing,
                is_yielding=overload.yielding,
            )
        decision = PoolDecision(known, plan, moves, figures, self._overload.reject_shares)
        if decision.is_new:
            decision = decision._replace(plan=msgspec.structs.replace(plan, at_us=self._clock.now_us()))
        scaler.plan = decision.plan
        return decision

    def _make_scaler(self, known: PoolPlan | None, now: float) -> PoolScaler | None:
        """Make the scaler, from the known plan if there is one. None: a pool without a plan is still observed."""
        if known is None:
            if self._unknown_since is None:
                self._unknown_since = now
            if now - self._unknown_since < _ADOPT_S:
                return None
        self._scaler = PoolScaler(self._policy, known)
        if known is not None:
            self._cold_starts = ColdStarts(known.requested)
            self._overload = OverloadWatch(known.rejecting_tiers, known.is_overflowing, known.is_yielding)
        return self._scaler

    async def carry_out(self, decision: PoolDecision, leads: Callable[[], bool]) -> None:
        """Report the decision and request states of replicas, after the plan is written. Raises FabricUnavailable.

        ``leads``: whether this controller still leads; nothing more is requested once it does not.
        Events of one look stand on the timeline in the order in which overload is met: reject, overflow, promote, add.
        """
        for rollout in self._rollout.take_changes():
            self._report_rollout(rollout)
        for change in self._overload.take_changes():
            self._report_overload(change, decision)
        try:
            await self._request_moves(decision.plan, decision.moves, leads)
        finally:
            if decision.is_new:
                self._metrics.receive_decision(self._pool, decision.old, decision.plan)
                self._report_plan(decision.plan)

    async def _request_moves(self, plan: PoolPlan, moves: Moves, leads: Callable[[], bool]) -> None:
        """Request the states that the moves need, and report each promotion that was requested."""
        for replica in moves.promote:
            if await self._request_state(replica, "ready", leads):
                self._decisions.report(
                    "promote",
                    self._pool,
                    replica=replica,
                    reason=plan.reason,
                    figures=plan.figures,
                    asked_by="controller",
                )
        for replica in moves.rest:
            await self._request_state(replica, "warm", leads)
        for replica in moves.sleep:
            await self._request_state(replica, "sleeping:1" if self._policy.sleep_level == 1 else "sleeping:2", leads)

    async def _request_state(self, replica: ReplicaId, state: DesiredState, leads: Callable[[], bool]) -> bool:
        requested = leads() and await self._pools.request_state(self._pool, replica, state, "controller")
        if requested:
            log.info("state requested: pool=%s replica=%s state=%s", self._pool, replica, state)
        return requested

    def _report_plan(self, plan: PoolPlan) -> None:
        log.info("pool planned: pool=%s reason=%s", self._pool, plan.reason)
        self._decisions.report(
            "scale",
            self._pool,
            replica=next(iter(plan.victims), plan.resting or ""),
            state=f"{plan.ready} ready, {plan.warm} warm, {plan.pods} in all",
            reason=plan.reason,
            figures=plan.figures,
        )

    def _report_rollout(self, change: RolloutChange) -> None:
        log.info("rollout %s: pool=%s reason=%s", change.state, self._pool, change.reason)
        figures = {"revisions": change.revisions, "replicas": change.replicas}
        self._decisions.report("rollout", self._pool, state=change.state, reason=change.reason, figures=figures)

    def _report_overload(self, change: OverloadChange, decision: PoolDecision) -> None:
        figures = decision.figures
        reason, mark_s = describe_overload(change, decision.plan.overload_marks or self._policy.marks(None))
        log.info("overload response changed: pool=%s reason=%s", self._pool, reason)
        lasted = {"lasted_s": round(change.seconds, 1)} if change.seconds else {}
        values = {"requests": change.requests, "backlog_s": round(figures.backlog_s, 3), "mark_s": mark_s, **lasted}
        kind = f"{change.event.partition('_')[0]} {change.tier}"
        self._decisions.report(change.event, self._pool, kind=kind, state=change.tier, reason=reason, figures=values)


def describe_overload(change: OverloadChange, marks: OverloadMarks) -> tuple[str, float]:
    """Return the reason of a change, and the backlog mark that it refers to."""
    if change.tier:
        mark_s = marks.reject_s[TIERS.index(change.tier)]
    else:
        mark_s = yield_mark_s(marks) if change.event in ("yield_begin", "yield_end") else marks.overflow_s
    why = f"the backlog ahead of them is above {mark_s:g} s"
    if marks.duty_max:
        share = marks.duty_max[TIERS.index(change.tier)] if change.tier else min(marks.duty_max)
        why += f", or the replicas' prefill duty above {share:.0%}"
    to = ", ".join(marks.adjacent)
    match change.event:
        case "shed_begin":
            return f"requests of tier {change.tier} are rejected: {why}", mark_s
        case "shed_end":
            return f"requests of tier {change.tier} are no longer rejected", mark_s
        case "shift_begin":
            return f"requests that tolerate a cache miss overflow to {to}: {why}", mark_s
        case "shift_end":
            return f"requests no longer overflow to {to}", mark_s
        case "yield_begin":
            return f"batch work yields to requests of higher tiers: {why}", mark_s
        case "yield_end":
            return "batch work no longer yields", mark_s
