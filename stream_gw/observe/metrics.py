"""The gateway's metrics. Scraping only reads numbers that are kept anyway."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry

from stream_fabric import metrics as listed
from stream_fabric.errors import PoolBusy
from stream_fabric.exposition import Capped, Exposition, Page
from stream_gw.trace import Over

_LAYERS: dict[str, str] = {
    "too_many": "rate",
    "draining": "gateway",
    "no_replica": "pool",
    "pool_full": "pool",
    "pool_busy": "pool",
    "deadline_exceeded": "queue",
}
"""Errors that say that there was no room, and where."""


class Metrics:
    def __init__(self) -> None:
        self.exposition = make = Exposition("gateway")
        self.requests = make.counter(listed.REQUESTS)
        self.cancels = make.counter(listed.CANCELS)
        self.resumes = make.counter(listed.RESUMES)
        self.stalled = make.counter(listed.STALLED)
        self.open_streams = make.gauge(listed.OPEN_STREAMS)
        self.open_sockets = make.gauge(listed.OPEN_SOCKETS)
        self.lagging = make.gauge(listed.LAGGING)
        self.spans_sent = make.counter(listed.SPANS_SENT)
        self.spans_dropped = make.counter(listed.SPANS_DROPPED)
        self._durations = make.histogram(listed.REQUEST_DURATION)
        self._ttft = make.histogram(listed.TTFT)
        self._reads = make.counter(listed.READS)
        self._tokens = make.counter(listed.TOKENS_STREAMED)
        self._sheds = make.counter(listed.SHEDS)
        self._pool_sheds = make.counter(listed.POOL_SHEDS)
        self._pool_shifts = make.counter(listed.POOL_SHIFTS)
        for layer in ("gateway", *_LAYERS.values()):
            self._sheds.labels(layer)
        self._pools = Capped()

    @property
    def registry(self) -> CollectorRegistry:
        return self.exposition.registry

    def receive_over(self, over: Over) -> None:
        """A reader is over, sampled or not."""
        pool = self._pools(over.pool)
        self._reads.labels(pool, over.role, over.ended, fault(over)).inc()
        if over.tokens:
            self._tokens.labels(pool).inc(over.tokens)
        if layer := shed_layer(over):
            self._sheds.labels(layer).inc()
        if over.error_code == PoolBusy.code and over.role == "refused":
            self._pool_sheds.labels(pool, over.tier).inc()
        if over.shifted_to and over.role == "created":
            self._pool_shifts.labels(pool).inc()
        if over.role == "created":
            exemplar = {"trace_id": over.trace_id}
            self._durations.labels(pool).observe(over.wall_us / 1e6)
            if over.ttft_us:
                self._ttft.labels(pool).observe(over.ttft_us / 1e6, exemplar)

    async def scraped(self, accept: str) -> Page:
        return await self.exposition.scraped(accept)


def shed_layer(over: Over) -> str:
    """Where there was no room for the request; empty: there was, or it did not end by that."""
    return _LAYERS.get(over.error_code, "") if not over.ttft_us else ""


def fault(over: Over) -> Literal["none", "client", "platform"]:
    """Whose fault it is that the reader did not get all it asked for."""
    match over.ended:
        case "completed" | "incomplete" | "cancelled" | "drained":
            return "none"
        case "left" | "stalled":
            return "client"
        case "failed" | "refused":
            return "platform" if over.http_status >= 500 else "client"
