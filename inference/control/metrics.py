"""A controller's metrics: what the pools have to do. Every controller shows the same; dashboards take the largest."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Sequence
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry

from stream_fabric import metrics as listed
from stream_fabric.errors import FabricUnavailable
from stream_fabric.events import Event, FleetEvent
from stream_fabric.exposition import Exposition, Page
from stream_fabric.placement import TIERS, ReplicaState
from stream_fabric.ports import EventSink
from stream_fabric.redis.pool import Line, RedisPools, ReplicaInfo
from stream_fabric.redis.wire import ReplyError

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
_FULL = 0.8
"""Of a replica's slots, what demand fills: the rest is for the time until another is up."""
_STATES: tuple[str, ...] = get_args(ReplicaState)


class Need(NamedTuple):
    """What a pool has to do."""

    running: int
    backlog_s: float
    demand: int


def need(replicas: Sequence[ReplicaInfo], lines: Sequence[Line]) -> Need:
    """``lines``: of each tier. Without a ready replica the backlog is what a replica that makes a token a second
    would have, so that it is never hidden."""
    ready = [info for info in replicas if info.state == "ready"]
    running = sum(info.load.running + info.load.waiting for info in replicas)
    waiting = sum(line.depth for line in lines)
    own_s = sum(info.prefill_ms + info.decode_ms for info in ready) / 1000 / max(len(ready), 1)
    prefill_per_s = max(sum(info.prefill_per_s for info in ready), 1.0)
    decode_per_s = max(sum(info.decode_per_s for info in ready), 1.0)
    waits_s = sum(line.prompt_tokens / prefill_per_s + line.output_tokens / decode_per_s for line in lines)
    slots = max((info.load.slots for info in replicas), default=1)
    return Need(running, own_s + waits_s, math.ceil((running + waiting) / (_FULL * max(slots, 1))))


class ControllerMetrics:
    def __init__(self) -> None:
        self._exposition = make = Exposition("controller")
        self._replicas = make.gauge(listed.POOL_REPLICAS)
        self._running = make.gauge(listed.POOL_RUNNING)
        self._depth = make.gauge(listed.QUEUE_DEPTH)
        self._age = make.gauge(listed.QUEUE_AGE)
        self._backlog = make.gauge(listed.BACKLOG)
        self._demand = make.gauge(listed.DEMAND)
        self._stuck = make.counter(listed.STUCK)
        self._dead = make.counter(listed.DEAD)
        self._failures = make.counter(listed.LOOK_FAILURES)

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

    def receive_pools(self, pools: dict[str, tuple[Sequence[ReplicaInfo], Sequence[Line]]]) -> None:
        """All pools as they are now."""
        for gauge in (self._replicas, self._running, self._depth, self._age, self._backlog, self._demand):
            gauge.clear()  # a pool that is gone has no figures
        for pool, (replicas, lines) in pools.items():
            for state in _STATES:
                self._replicas.labels(pool, state).set(sum(info.state == state for info in replicas))
            for tier, line in zip(TIERS, lines, strict=True):
                self._depth.labels(pool, tier).set(line.depth)
                self._age.labels(pool, tier).set(line.oldest_s)
            found = need(replicas, lines)
            self._running.labels(pool).set(found.running)
            self._backlog.labels(pool).set(found.backlog_s)
            self._demand.labels(pool).set(found.demand)

    async def watch(self, pools: RedisPools) -> None:
        while True:
            try:
                names = await pools.pools()
                self.receive_pools({name: (await pools.replicas(name), await pools.lines(name)) for name in names})
            except (FabricUnavailable, ReplyError) as error:
                self._failures.inc()
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
