"""Metrics of a controller about the pools. Every controller shows the same values; dashboards take the largest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from typing import get_args

from prometheus_client import CollectorRegistry

from inference.control.policy.figures import Figures
from inference.control.policy.fleet_view import FleetView, pending_work, profile_of
from inference.control.policy.scale_policy import ScalePolicy
from stream_fabric.events import Event, FleetEvent
from stream_fabric.pool.placement import BATCH_TIER, TIERS, ReplicaState
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import ReplicaInfo, TierQueue
from stream_fabric.pool.traffic_model import TrafficModel
from stream_fabric.process import metric_names as listed
from stream_fabric.process.metrics_registry import MetricsRegistry, Page

_DEMAND_UTILISATION = 0.8
"""Utilisation that ``pool_demand_replicas`` plans for; the rest is for the time until another replica starts."""
_STATES: tuple[str, ...] = get_args(ReplicaState)


class Shortfall:
    """Measures for how long a pool has had too few started replicas. Each that starts begins the time anew."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._started = 0

    def receive(self, started: int, wanted: int, now: float) -> float:
        """Seconds of the shortfall; 0: none."""
        if started >= wanted:
            self._since, self._started = None, 0
            return 0.0
        if self._since is None or started > self._started:
            self._since, self._started = now, started
        return now - self._since


def decision_kind(old: PoolPlan | None, new: PoolPlan) -> str:
    """Return the value of the label ``kind`` of ``pool_decisions_total``."""
    if old is None:
        return "other"
    if new.pods != old.pods or new.ready != old.ready:
        return "up" if (new.pods, new.ready) > (old.pods, old.ready) else "down"
    if new.resting not in (old.resting, None):
        return "rest"
    return "victim" if set(new.victims).difference(old.victims) else "other"


class ControllerMetrics:
    def __init__(self) -> None:
        self._registry = make = MetricsRegistry("controller")
        self._replicas = make.gauge(listed.POOL_REPLICAS)
        self._running = make.gauge(listed.POOL_RUNNING)
        self._depth = make.gauge(listed.QUEUE_DEPTH)
        self._age = make.gauge(listed.QUEUE_AGE)
        self._backlog = make.gauge(listed.BACKLOG)
        self._to_free = make.gauge(listed.TO_FREE)
        self._demand = make.gauge(listed.DEMAND)
        self._desired = make.gauge(listed.DESIRED)
        self._wanted = make.gauge(listed.WANTED)
        self._needed = make.gauge(listed.NEEDED)
        self._peak = make.gauge(listed.PEAK)
        self._utilisation = make.gauge(listed.UTILISATION)
        self._ttft = make.gauge(listed.POOL_TTFT)
        self._growth = make.gauge(listed.GROWTH)
        self._burn = make.gauge(listed.BURN)
        self._profile_age = make.gauge(listed.PROFILE_AGE)
        self._short = make.gauge(listed.SHORT)
        self._objective = make.gauge(listed.TTFT_OBJECTIVE)
        self._cold_start = make.gauge(listed.COLD_START)
        self._replicas_max = make.gauge(listed.MAX_REPLICAS)
        self._reject_share = make.gauge(listed.SHED_LEVEL)
        self._overload = make.gauge(listed.SURGING)
        self._leads = make.gauge(listed.LEADS)
        self._usage_found = make.gauge(listed.USAGE_DISAGREEMENTS)
        self._usage_drift = make.gauge(listed.USAGE_DRIFT)
        self._reconciled_age = make.gauge(listed.RECONCILED_AGE)
        self._reconciled_at = make.gauge(listed.RECONCILED_AT)
        self._decisions = make.counter(listed.DECISIONS)
        self._stuck = make.counter(listed.STUCK)
        self._dead = make.counter(listed.DEAD)
        self._lost = make.gauge(listed.POOL_LOST)
        self._failures = make.counter(listed.LOOK_FAILURES)
        self._records_skipped = make.counter(listed.RECORDS_SKIPPED)
        self._calls = make.counter(listed.SCALER_CALLS)
        self._refusals = make.counter(listed.SCALER_REFUSALS)
        self._streams = make.gauge(listed.SCALER_STREAMS)
        self._plans: dict[str, PoolPlan] = {}
        self._shortfalls: dict[str, Shortfall] = {}

    @property
    def registry(self) -> CollectorRegistry:
        return self._registry.registry

    @property
    def planned(self) -> Set[str]:
        """Pools that have a plan."""
        return self._plans.keys()

    def receive(self, event: Event) -> None:
        """Count a dead replica; ignore other events."""
        match event:
            case FleetEvent(what="dead"):
                self._dead.inc()

    def receive_lost_pools(self, pools: Collection[str]) -> None:
        """Show all pools whose last replica has died."""
        self._lost.clear()
        for pool in pools:
            self._lost.labels(pool).set(1)

    def receive_stuck(self) -> None:
        """Count a stuck replica that this controller drains."""
        self._stuck.inc()

    def receive_pools(self, pools: Mapping[str, tuple[Sequence[ReplicaInfo], Sequence[TierQueue]]]) -> None:
        """Show all pools as they are now."""
        for gauge in (
            self._replicas, self._running, self._depth, self._age, self._backlog, self._to_free, self._demand,
        ):  # fmt: skip
            gauge.clear()  # a pool that is gone has no values
        for pool, (replicas, queues) in pools.items():
            for state in _STATES:
                self._replicas.labels(pool, state).set(sum(info.state == state for info in replicas))
            for tier, queue in zip(TIERS, queues, strict=True):
                self._depth.labels(pool, tier).set(queue.depth)
                self._age.labels(pool, tier).set(queue.oldest_s)
            profile = profile_of([info for info in replicas if info.state == "ready"])
            if profile is None and pool in self._plans:
                profile = self._plans[pool].typical_replica
            pending = pending_work(replicas, queues, profile)
            self._running.labels(pool).set(pending.running)
            # Batch work may wait for an hour, and its wait is no reason to wake somebody
            self._backlog.labels(pool).set(pending_work(replicas, queues[:BATCH_TIER], profile).backlog_s)
            self._to_free.labels(pool).set(pending.to_free_s)
            self._demand.labels(pool).set(math.ceil(pending.busy / _DEMAND_UTILISATION))

    def receive_policies(self, policies: Mapping[str, ScalePolicy]) -> None:
        """Show the declared pools' limits, once."""
        for pool, policy in policies.items():
            self._objective.labels(pool).set(policy.ttft_objective_s)
            self._replicas_max.labels(pool).set(policy.replicas_max)

    def receive_decision(self, pool: str, old: PoolPlan | None, new: PoolPlan) -> None:
        """Count a changed plan by its kind: what it raises, lowers or prepares."""
        self._decisions.labels(pool, decision_kind(old, new)).inc()

    def receive_shortfalls(
        self,
        pools: Mapping[str, tuple[Sequence[ReplicaInfo], Sequence[TierQueue]]],
        now: float,
        unread: Set[str] = frozenset(),
    ) -> None:
        """Show for how long each planned pool has had too few replicas; not for ``unread`` pools, which may have."""
        self._short.clear()
        for pool in self._shortfalls.keys() - self._plans.keys():
            del self._shortfalls[pool]
        for pool, plan in self._plans.items():
            if pool in unread:
                continue
            infos, _ = pools.get(pool, ((), ()))
            shortfall = self._shortfalls.setdefault(pool, Shortfall())
            self._short.labels(pool).set(shortfall.receive(FleetView(infos).started, plan.pods, now))

    def receive_plans(self, plans: Mapping[str, PoolPlan], leads: bool) -> None:
        """Show the plans of the declared pools, also when another controller leads.

        While Redis is unreachable the plans of the last look stay.
        """
        self._leads.set(leads)
        self._plans = dict(plans)
        for gauge in (self._desired, self._wanted, self._cold_start, self._overload):
            gauge.clear()
        for pool, plan in plans.items():
            self._desired.labels(pool).set(plan.pods)
            self._wanted.labels(pool, "ready").set(plan.ready)
            self._wanted.labels(pool, "warm").set(plan.warm)
            self._cold_start.labels(pool).set(plan.cold_start_s)
            self._overload.labels(pool, "shed").set(bool(plan.rejecting_tiers))
            self._overload.labels(pool, "shift").set(plan.is_overflowing)
            self._overload.labels(pool, "yield").set(plan.is_yielding)

    def receive_figures(self, figures: Mapping[str, Figures]) -> None:
        """Show the figures behind the plans; empty: another controller leads."""
        for gauge in (self._needed, self._peak, self._utilisation, self._ttft, self._growth, self._burn):
            gauge.clear()
        for pool, figure in figures.items():
            self._needed.labels(pool).set(figure.needed)
            self._peak.labels(pool).set(figure.peak)
            self._utilisation.labels(pool).set(figure.utilisation)
            self._ttft.labels(pool).set(figure.ttft_p99_s)
            self._growth.labels(pool).set(figure.growth)
            self._burn.labels(pool, "5m").set(figure.burn_5m)
            self._burn.labels(pool, "1h").set(figure.burn_1h)

    def receive_reject_shares(self, by_pool: Mapping[str, Sequence[float]]) -> None:
        """Show the rejected share of each tier's requests; empty: another controller leads."""
        self._reject_share.clear()
        for pool, shares in by_pool.items():
            for tier, share in zip(TIERS, shares, strict=True):
                self._reject_share.labels(pool, tier).set(share)

    def receive_models(self, by_pool: Mapping[str, TrafficModel], unix_s: float) -> None:
        """Show the age of each pool's traffic model."""
        self._profile_age.clear()
        for pool, model in by_pool.items():
            if model.learned_s:
                self._profile_age.labels(pool).set(max(unix_s - model.learned_s, 0.0))

    def receive_call(self, call: str) -> None:
        """Count a call from KEDA."""
        self._calls.labels(call).inc()

    def receive_refusal(self, call: str, code: str) -> None:
        """Count a call from KEDA that was answered with an error code."""
        self._refusals.labels(call, code).inc()

    def receive_streams(self, count: int) -> None:
        """Show the number of open streams to KEDA."""
        self._streams.set(count)

    def receive_comparison(self, found: int, drift_tokens: int) -> None:
        """Show the result of the last reconciliation of usage."""
        self._usage_found.set(found)
        self._usage_drift.set(drift_tokens)

    def receive_reconciliation(self, at_unix_s: float) -> None:
        """Show that this controller has reconciled usage at this moment."""
        self._reconciled_at.set(at_unix_s)

    def receive_reconciled(self, age_s: float) -> None:
        """Show the time since the last reconciliation."""
        self._reconciled_age.set(age_s)

    def receive_lost_lead(self) -> None:
        """Show that this controller does not lead, and none of the figures that the leader alone shows."""
        self._leads.set(0)
        self.receive_figures({})
        self.receive_reject_shares({})
        self.receive_models({}, 0.0)

    def receive_skipped_record(self, kind: str) -> None:
        """Count a record in Redis that could not be decoded."""
        self._records_skipped.labels(kind).inc()

    def receive_failure(self) -> None:
        """Count a failed look at the pools."""
        self._failures.inc()

    async def scraped(self) -> Page:
        """Return the metrics page."""
        return await self._registry.scraped()
