"""A controller's metrics: what the pools have to do. Every controller shows the same; dashboards take the largest."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Mapping, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry

from inference.control.scaling import Figures, ScalePolicy, need, usual_of
from stream_fabric import metrics as listed
from stream_fabric.errors import FabricUnavailable
from stream_fabric.events import Event, FleetEvent
from stream_fabric.exposition import Exposition, Page
from stream_fabric.learned import Learned
from stream_fabric.placement import TIERS, ReplicaState
from stream_fabric.plans import PoolPlan
from stream_fabric.ports import EventSink
from stream_fabric.redis.pool import Line, RedisPools, ReplicaInfo
from stream_fabric.redis.wire import ReplyError

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
_FULL = 0.8
"""Of a replica's slots, what demand fills: the rest is for the time until another is up."""
_STATES: tuple[str, ...] = get_args(ReplicaState)


class Shortfall:
    """For how long a pool has lacked replicas without one coming: while they come it is only a matter of time."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._most = 0

    def receive(self, present: int, wanted: int, now: float) -> float:
        if present >= wanted:
            self._since, self._most = None, 0
            return 0.0
        if self._since is None or present > self._most:
            self._since, self._most = now, present
        return now - self._since


def kind_of(old: PoolPlan | None, new: PoolPlan) -> str:
    if old is None:
        return "other"
    if new.pods != old.pods or new.ready != old.ready:
        return "up" if (new.pods, new.ready) > (old.pods, old.ready) else "down"
    if new.resting not in (old.resting, None):
        return "rest"
    return "victim" if new.victim not in (old.victim, None) else "other"


class ControllerMetrics:
    def __init__(self) -> None:
        self._exposition = make = Exposition("controller")
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
        self._utilisation = make.gauge(listed.UTILISATION)
        self._ttft = make.gauge(listed.POOL_TTFT)
        self._growth = make.gauge(listed.GROWTH)
        self._burn = make.gauge(listed.BURN)
        self._profile_age = make.gauge(listed.PROFILE_AGE)
        self._short = make.gauge(listed.SHORT)
        self._objective = make.gauge(listed.TTFT_OBJECTIVE)
        self._cold_start = make.gauge(listed.COLD_START)
        self._most = make.gauge(listed.MAX_REPLICAS)
        self._shed_level = make.gauge(listed.SHED_LEVEL)
        self._surging = make.gauge(listed.SURGING)
        self._leads = make.gauge(listed.LEADS)
        self._decisions = make.counter(listed.DECISIONS)
        self._stuck = make.counter(listed.STUCK)
        self._dead = make.counter(listed.DEAD)
        self._failures = make.counter(listed.LOOK_FAILURES)
        self._calls = make.counter(listed.SCALER_CALLS)
        self._refusals = make.counter(listed.SCALER_REFUSALS)
        self._streams = make.gauge(listed.SCALER_STREAMS)
        self._plans: dict[str, PoolPlan] = {}
        self._shortfalls: dict[str, Shortfall] = {}

    @property
    def registry(self) -> CollectorRegistry:
        return self._exposition.registry

    def of(self, sink: EventSink) -> EventSink:
        """A sink before another, which counts what passes."""
        return _Counting(self, sink)

    def receive(self, event: Event) -> None:
        match event:
            case FleetEvent(what="dead"):
                self._dead.inc()

    def receive_stuck(self) -> None:
        self._stuck.inc()

    def receive_pools(self, pools: Mapping[str, tuple[Sequence[ReplicaInfo], Sequence[Line]]]) -> None:
        """All pools as they are now."""
        for gauge in (
            self._replicas, self._running, self._depth, self._age, self._backlog, self._to_free, self._demand,
        ):  # fmt: skip
            gauge.clear()  # a pool that is gone has no figures
        for pool, (replicas, lines) in pools.items():
            for state in _STATES:
                self._replicas.labels(pool, state).set(sum(info.state == state for info in replicas))
            for tier, line in zip(TIERS, lines, strict=True):
                self._depth.labels(pool, tier).set(line.depth)
                self._age.labels(pool, tier).set(line.oldest_s)
            usual = usual_of([info for info in replicas if info.state == "ready"])
            if usual is None and pool in self._plans:
                usual = self._plans[pool].usual
            found = need(replicas, lines, usual)
            self._running.labels(pool).set(found.running)
            self._backlog.labels(pool).set(found.backlog_s)
            self._to_free.labels(pool).set(found.to_free_s)
            self._demand.labels(pool).set(math.ceil(found.busy / _FULL))

    def receive_policies(self, policies: Mapping[str, ScalePolicy]) -> None:
        """Of the declared pools, once."""
        for pool, policy in policies.items():
            self._objective.labels(pool).set(policy.ttft_objective_s)
            self._most.labels(pool).set(policy.replicas_max)

    def receive_decision(self, pool: str, old: PoolPlan | None, new: PoolPlan) -> None:
        self._decisions.labels(pool, kind_of(old, new)).inc()

    def receive_short(self, pools: Mapping[str, tuple[Sequence[ReplicaInfo], Sequence[Line]]], now: float) -> None:
        """What of the last plans is there."""
        self._short.clear()
        for pool in self._shortfalls.keys() - self._plans.keys():
            del self._shortfalls[pool]
        for pool, plan in self._plans.items():
            infos, _ = pools.get(pool, ((), ()))
            present = sum(info.state != "draining" for info in infos)
            shortfall = self._shortfalls.setdefault(pool, Shortfall())
            self._short.labels(pool).set(shortfall.receive(present, plan.pods, now))

    def receive_plans(self, plans: Mapping[str, PoolPlan], leads: bool) -> None:
        """What is wanted of the declared pools, whoever leads; of the last look when the fabric is away."""
        self._leads.set(leads)
        self._plans = dict(plans)
        for gauge in (self._desired, self._wanted, self._cold_start, self._surging):
            gauge.clear()
        for pool, plan in plans.items():
            self._desired.labels(pool).set(plan.pods)
            self._wanted.labels(pool, "ready").set(plan.ready)
            self._wanted.labels(pool, "warm").set(plan.warm)
            self._cold_start.labels(pool).set(plan.cold_start_s)
            self._surging.labels(pool, "shed").set(bool(plan.shedding))
            self._surging.labels(pool, "shift").set(plan.shifting)

    def receive_figures(self, figures: Mapping[str, Figures]) -> None:
        """What the plans rest on, told by who leads; empty: this one does not."""
        for gauge in (self._needed, self._utilisation, self._ttft, self._growth, self._burn):
            gauge.clear()
        for pool, found in figures.items():
            self._needed.labels(pool).set(found.needed)
            self._utilisation.labels(pool).set(found.utilisation)
            self._ttft.labels(pool).set(found.ttft_p99_s)
            self._growth.labels(pool).set(found.growth)
            self._burn.labels(pool, "5m").set(found.burn_5m)
            self._burn.labels(pool, "1h").set(found.burn_1h)

    def receive_levels(self, by_pool: Mapping[str, Sequence[float]]) -> None:
        """Of each tier the share that is refused, told by who leads; empty: this one does not."""
        self._shed_level.clear()
        for pool, levels in by_pool.items():
            for tier, level in zip(TIERS, levels, strict=True):
                self._shed_level.labels(pool, tier).set(level)

    def receive_learned(self, known: Mapping[str, Learned], unix_s: float) -> None:
        self._profile_age.clear()
        for pool, learned in known.items():
            if learned.learned_s:
                self._profile_age.labels(pool).set(max(unix_s - learned.learned_s, 0.0))

    def receive_call(self, call: str) -> None:
        self._calls.labels(call).inc()

    def receive_refusal(self, call: str, code: str) -> None:
        self._refusals.labels(call, code).inc()

    def receive_streams(self, count: int) -> None:
        self._streams.set(count)

    def receive_lost_lead(self) -> None:
        """It cannot say that it leads any more: another may."""
        self._leads.set(0)

    def receive_failure(self) -> None:
        self._failures.inc()

    async def watch(self, pools: RedisPools) -> None:
        while True:
            try:
                names = await pools.pools()
                seen = {name: (await pools.replicas(name), await pools.lines(name)) for name in names}
                self.receive_pools(seen)
                self.receive_short(seen, asyncio.get_running_loop().time())
            except (FabricUnavailable, ReplyError) as error:
                self.receive_failure()
                log.warning("the pools cannot be read: %s", error)
            await asyncio.sleep(_LOOK_EVERY_S * random.uniform(0.9, 1.0))

    async def scraped(self) -> Page:
        return await self._exposition.scraped()


class _Counting:
    def __init__(self, metrics: ControllerMetrics, sink: EventSink) -> None:
        self._metrics = metrics
        self._sink = sink

    def emit(self, event: Event) -> None:
        self._metrics.receive(event)
        self._sink.emit(event)
