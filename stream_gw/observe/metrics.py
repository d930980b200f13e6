"""The gateway's metrics."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Literal

from prometheus_client import CollectorRegistry

from stream_fabric.errors import Draining, PoolBusy
from stream_fabric.events import Event, FleetEvent
from stream_fabric.moderation.metrics import ModerationMetrics
from stream_fabric.pool.placement import BATCH_TIER, TIERS
from stream_fabric.process import metric_names as listed
from stream_fabric.process.budget_events import KINDS as BUDGET_EVENT_KINDS
from stream_fabric.process.metrics_registry import CappedLabels, MetricsRegistry, Page
from stream_gw.observe.trace import ReaderOutcome

_LAYERS: dict[str, str] = {
    "too_many": "rate",
    "draining": "gateway",
    "no_replica": "pool",
    "pool_full": "pool",
    "pool_busy": "pool",
    "deadline_exceeded": "queue",
}
"""Errors that mean a rejection for lack of capacity, with the layer that rejected."""
_YIELDING = TIERS[BATCH_TIER:]
"""Tiers whose requests may wait and may be rejected, without a breach of any objective."""


class Metrics:
    def __init__(self) -> None:
        self.exposition = make = MetricsRegistry("gateway")
        # The library looks a series up in microseconds, under a lock: those of each request are looked up once
        self.requests = cache(make.counter(listed.REQUESTS).labels)
        self.cancels = make.counter(listed.CANCELS)
        self._inputs = make.counter(listed.INPUTS)
        for result in ("accepted", "duplicate", "terminal"):  # others are codes of errors
            self._inputs.labels(result)
        self.resumes = make.counter(listed.RESUMES)
        self.stalled = make.counter(listed.STALLED)
        self.open_streams = make.gauge(listed.OPEN_STREAMS)
        self.open_sockets = make.gauge(listed.OPEN_SOCKETS)
        self.connections_cut = make.counter(listed.CONNECTIONS_CUT)
        self.lagging = make.gauge(listed.LAGGING)
        self._frames_passed_over = make.counter(listed.FRAMES_PASSED_OVER)
        self._passed_over = 0
        self.records_skipped = make.counter(listed.RECORDS_SKIPPED)
        self._dead = make.counter(listed.DEAD)
        self.spans_sent = make.counter(listed.SPANS_SENT)
        self.spans_dropped = make.counter(listed.SPANS_DROPPED)
        self._durations = cache(make.histogram(listed.REQUEST_DURATION).labels)
        self._ttft = cache(make.histogram(listed.TTFT).labels)
        self._ttft_error = cache(make.histogram(listed.TTFT_ERROR).labels)
        self._reads = cache(make.counter(listed.READS).labels)
        self._reads_by_dialect = cache(make.counter(listed.READS_BY_DIALECT).labels)
        self._begin_reads = cache(self._begin_reads_of)
        self._tokens = cache(make.counter(listed.TOKENS_STREAMED).labels)
        self._rejections = make.counter(listed.SHEDS)
        self.limits_failed_open = make.counter(listed.LIMITS_FAILED_OPEN)
        self._limited = make.counter(listed.LIMITED)
        self._budget_events = make.counter(listed.BUDGET_EVENTS)
        self._pool_rejections = make.counter(listed.POOL_SHEDS)
        self._pool_overflows = make.counter(listed.POOL_SHIFTS)
        self._batch_hosted = make.counter(listed.BATCH_HOSTED)
        self._fallbacks = make.counter(listed.FALLBACKS)
        self._responses_stored = make.counter(listed.RESPONSES_STORED)
        self._responses_unsaved = make.gauge(listed.RESPONSES_UNSAVED)
        for outcome in ("saved", "deferred", "too_large", "no_stream", "unreadable"):
            self._responses_stored.labels(outcome)
        for layer in ("gateway", *_LAYERS.values()):
            self._rejections.labels(layer)
        for kind in BUDGET_EVENT_KINDS:
            self._budget_events.labels(*kind)
        self.moderation = ModerationMetrics(make, "prompt")
        self._pools = CappedLabels()
        self._lost = make.gauge(listed.POOL_LOST)
        self._begin_reads("", "none")

    def receive_stored(self, outcome: str) -> None:
        """Count what became of a stored response."""
        self._responses_stored.labels(outcome).inc()

    def receive_unsaved(self, count: int) -> None:
        """Take the number of responses that wait for the database."""
        self._responses_unsaved.set(count)

    @property
    def registry(self) -> CollectorRegistry:
        return self.exposition.registry

    def receive_skipped_record(self, kind: str) -> None:
        """Count a record in Redis that could not be decoded."""
        self.records_skipped.labels(kind).inc()

    def receive(self, event: Event) -> None:
        """Count a dead replica that this gateway has found; ignore other events."""
        match event:
            case FleetEvent(what="dead"):
                self._dead.inc()

    def receive_lost_pools(self, pools: Collection[str]) -> None:
        """Show all pools whose last replica has died."""
        self._lost.clear()
        for pool in pools:
            self._lost.labels(self._pools(pool)).set(1)

    def receive_passed_over(self, total: int) -> None:
        """Take the total of frames of unknown kinds that this process has passed over."""
        self._frames_passed_over.inc(total - self._passed_over)
        self._passed_over = total

    def receive_limited(self, subject: str, kind: str) -> None:
        """Count a request that a limit or a budget of its tenant's plan refused."""
        self._limited.labels(subject, kind).inc()

    def receive_input(self, result: str) -> None:
        """Count an input of a running stream."""
        self._inputs.labels(result).inc()

    def receive_budget_event(self, what: str, budget: str) -> None:
        """Count a budget of a tenant that has crossed a mark."""
        self._budget_events.labels(what, budget).inc()

    def receive_outcome(self, outcome: ReaderOutcome) -> None:
        """Count a reader that has ended, sampled or not."""
        pool = self._pools(outcome.pool)
        self._begin_reads(pool, outcome.dialect or "none")
        self._reads(pool, outcome.role, outcome.ended, fault(outcome)).inc()
        self._reads_by_dialect(outcome.dialect or "none", fault(outcome)).inc()
        if outcome.tokens:
            self._tokens(pool).inc(outcome.tokens)
        if layer := rejection_layer(outcome):
            self._rejections.labels(layer).inc()
        if outcome.error_code == PoolBusy.code and outcome.role == "refused":
            self._pool_rejections.labels(pool, outcome.tier).inc()
        if outcome.overflow_to and outcome.role == "created":
            moved = {"batch_host": self._batch_hosted, "fallback": self._fallbacks}
            moved.get(outcome.elsewhere, self._pool_overflows).labels(pool).inc()
        if outcome.role == "created":
            exemplar = {"trace_id": outcome.trace_id}
            self._durations(pool).observe(outcome.wall_us / 1e6)
            if outcome.ttft_us and outcome.tier not in _YIELDING:
                self._ttft(pool).observe(outcome.ttft_us / 1e6, exemplar)
            if outcome.ttft_error_us is not None:
                self._ttft_error(pool).observe(outcome.ttft_error_us / 1e6)

    def _begin_reads_of(self, pool: str, dialect: str) -> None:
        """Show failures from 0 on: Prometheus counts none of those that a series has in its first sample."""
        for role, ended in (("created", "failed"), ("refused", "refused")):
            self._reads(pool, role, ended, "platform")
        self._reads_by_dialect(dialect, "platform")

    async def scraped(self, accept: str) -> Page:
        """Render the metrics page in a thread. ``accept``: the request header that chooses the format."""
        return await self.exposition.scraped(accept)


def rejection_layer(outcome: ReaderOutcome) -> str:
    """Return the layer that rejected the request for lack of capacity; empty: it was not rejected.

    A reader that comes back makes no request, and one that a drain sends to another gateway loses nothing.
    """
    if outcome.role not in ("created", "refused") or outcome.ended == "drained" or outcome.ttft_us:
        return ""
    return _LAYERS.get(outcome.error_code, "")


def fault(outcome: ReaderOutcome) -> Literal["none", "client", "platform"]:
    """Return the side that caused the reader to get less than it asked for.

    A draining gateway is an ordinary deployment: the request that it refuses is served by another one. Requests of
    tiers that yield are asked to come again when a pool has much to do.
    """
    if outcome.error_code == Draining.code or (outcome.error_code == PoolBusy.code and outcome.tier in _YIELDING):
        return "none"
    match outcome.ended:
        case "completed" | "incomplete" | "cancelled" | "drained":
            return "none"
        case "left" | "stalled":
            return "client"
        case "failed" | "refused":
            return "platform" if outcome.http_status >= 500 else "client"
