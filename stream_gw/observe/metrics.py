"""The gateway's metrics."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry

from stream_fabric.accounts.account import LimitKind
from stream_fabric.errors import PoolBusy
from stream_fabric.process import metric_names as listed
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


class Metrics:
    def __init__(self) -> None:
        self.exposition = make = MetricsRegistry("gateway")
        self.requests = make.counter(listed.REQUESTS)
        self.cancels = make.counter(listed.CANCELS)
        self.resumes = make.counter(listed.RESUMES)
        self.stalled = make.counter(listed.STALLED)
        self.open_streams = make.gauge(listed.OPEN_STREAMS)
        self.open_sockets = make.gauge(listed.OPEN_SOCKETS)
        self.lagging = make.gauge(listed.LAGGING)
        self.records_skipped = make.counter(listed.RECORDS_SKIPPED)
        self.spans_sent = make.counter(listed.SPANS_SENT)
        self.spans_dropped = make.counter(listed.SPANS_DROPPED)
        self._durations = make.histogram(listed.REQUEST_DURATION)
        self._ttft = make.histogram(listed.TTFT)
        self._ttft_error = make.histogram(listed.TTFT_ERROR)
        self._reads = make.counter(listed.READS)
        self._tokens = make.counter(listed.TOKENS_STREAMED)
        self._rejections = make.counter(listed.SHEDS)
        self.limits_failed_open = make.counter(listed.LIMITS_FAILED_OPEN)
        self._limited = make.counter(listed.LIMITED)
        self._pool_rejections = make.counter(listed.POOL_SHEDS)
        self._pool_overflows = make.counter(listed.POOL_SHIFTS)
        self._batch_hosted = make.counter(listed.BATCH_HOSTED)
        for layer in ("gateway", *_LAYERS.values()):
            self._rejections.labels(layer)
        self._pools = CappedLabels()

    @property
    def registry(self) -> CollectorRegistry:
        return self.exposition.registry

    def receive_skipped_record(self, kind: str) -> None:
        """Count a record in Redis that could not be decoded."""
        self.records_skipped.labels(kind).inc()

    def receive_limited(self, subject: str, kind: LimitKind) -> None:
        """Count a request that a limit of its tenant's plan refused."""
        self._limited.labels(subject, kind).inc()

    def receive_outcome(self, outcome: ReaderOutcome) -> None:
        """Count a reader that has ended, sampled or not."""
        pool = self._pools(outcome.pool)
        self._reads.labels(pool, outcome.role, outcome.ended, fault(outcome)).inc()
        if outcome.tokens:
            self._tokens.labels(pool).inc(outcome.tokens)
        if layer := rejection_layer(outcome):
            self._rejections.labels(layer).inc()
        if outcome.error_code == PoolBusy.code and outcome.role == "refused":
            self._pool_rejections.labels(pool, outcome.tier).inc()
        if outcome.overflow_to and outcome.role == "created":
            (self._batch_hosted if outcome.batch_hosted else self._pool_overflows).labels(pool).inc()
        if outcome.role == "created":
            exemplar = {"trace_id": outcome.trace_id}
            self._durations.labels(pool).observe(outcome.wall_us / 1e6)
            if outcome.ttft_us:
                self._ttft.labels(pool).observe(outcome.ttft_us / 1e6, exemplar)
            if outcome.ttft_error_us is not None:
                self._ttft_error.labels(pool).observe(outcome.ttft_error_us / 1e6)

    async def scraped(self, accept: str) -> Page:
        """Render the metrics page in a thread. ``accept``: the request header that chooses the format."""
        return await self.exposition.scraped(accept)


def rejection_layer(outcome: ReaderOutcome) -> str:
    """Return the layer that rejected the request for lack of capacity; empty: it was not rejected."""
    return _LAYERS.get(outcome.error_code, "") if not outcome.ttft_us else ""


def fault(outcome: ReaderOutcome) -> Literal["none", "client", "platform"]:
    """Return the side that caused the reader to get less than it asked for."""
    match outcome.ended:
        case "completed" | "incomplete" | "cancelled" | "drained":
            return "none"
        case "left" | "stalled":
            return "client"
        case "failed" | "refused":
            return "platform" if outcome.http_status >= 500 else "client"
