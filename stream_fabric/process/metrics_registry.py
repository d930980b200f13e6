"""A process's metrics, as Prometheus reads them: a registry built from the list of names.

Each process is asked by itself and its registry is its own, so several on a host share nothing. Rendering many series
takes a tenth of a second of Python: it is done in a thread, and the loop goes on.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from stream_fabric.metrics import Metric, Role

disable_created_metrics()  # type: ignore[no-untyped-call]  # else each counter has a second name

TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text"
VALUES_MAX = 64
OTHER = "(other)"


class Page(NamedTuple):
    content_type: str
    body: bytes


class Exposition:
    """Of one role's process. Each metric is asked for once, by its entry in the list."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.registry = CollectorRegistry()

    def counter(self, metric: Metric) -> Counter:
        self._check(metric, "counter")
        return Counter(metric.name.removesuffix("_total"), metric.help, metric.labels, registry=self.registry)

    def gauge(self, metric: Metric) -> Gauge:
        self._check(metric, "gauge")
        return Gauge(metric.name, metric.help, metric.labels, registry=self.registry)

    def histogram(self, metric: Metric) -> Histogram:
        self._check(metric, "histogram")
        return Histogram(metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=self.registry)

    def _check(self, metric: Metric, kind: str) -> None:
        assert metric.kind == kind and self.role in metric.roles, metric.name

    def render(self, accept: str | None = None) -> Page:
        """``accept``: the reader's header. OpenMetrics, which has exemplars, where it is asked for; None: never, as
        where names with colons go along, which its writer would rename."""
        if accept is not None and _OPENMETRICS in accept:
            return Page(f"{_OPENMETRICS}; version=1.0.0; charset=utf-8", generate_openmetrics(self.registry))  # type: ignore[no-untyped-call]
        return Page(TEXT, generate_latest(self.registry))

    async def scraped(self, accept: str | None = None) -> Page:
        return await asyncio.to_thread(self.render, accept)


class Capped:
    """Values of a label, of which there may be only so many: those that come first, and one for all others."""

    def __init__(self, most: int = VALUES_MAX) -> None:
        self._most = most
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        if value in self._seen:
            return value
        if len(self._seen) >= self._most:
            return OTHER
        self._seen.add(value)
        return value
