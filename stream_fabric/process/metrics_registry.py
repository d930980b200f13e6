"""Prometheus registry of a process, built from the table of metrics.

Every process has its own registry, so several processes on a host share nothing. Rendering many series takes 0.1 s of
Python, so it runs in a thread and does not block the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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

from stream_fabric.events import Event
from stream_fabric.ports import EventSink
from stream_fabric.process.metric_names import Metric, Role

disable_created_metrics()  # type: ignore[no-untyped-call]  # else each counter has a second name

TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text"
VALUES_MAX = 64
OTHER = "(other)"


class Page(NamedTuple):
    """Response of ``/metrics``."""

    content_type: str
    body: bytes


class MetricsRegistry:
    """Registry of one role's process. Each metric is created once, by its entry in the table."""

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
        """Assert that the table lists the metric with this kind, and for this role."""
        assert metric.kind == kind and self.role in metric.roles, metric.name

    def render(self, accept: str | None = None) -> Page:
        """Render all metrics, in OpenMetrics (with exemplars) if ``accept``, the scraper's Accept header, asks for it.

        ``accept`` None: never in OpenMetrics, whose writer would rename metrics with colons in their names.
        """
        if accept is not None and _OPENMETRICS in accept:
            return Page(f"{_OPENMETRICS}; version=1.0.0; charset=utf-8", generate_openmetrics(self.registry))  # type: ignore[no-untyped-call]
        return Page(TEXT, generate_latest(self.registry))

    async def scraped(self, accept: str | None = None) -> Page:
        """Call ``render`` in a thread, so that it does not block the event loop."""
        return await asyncio.to_thread(self.render, accept)


class CappedLabels:
    """Bounds the values of a label: the first ``most`` values stay, all others become ``OTHER``."""

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


class CountingSink:
    """An ``EventSink`` that passes each event to ``count``, for metrics, and then to another sink."""

    def __init__(self, count: Callable[[Event], None], sink: EventSink) -> None:
        self._count = count
        self._sink = sink

    def emit(self, event: Event) -> None:
        self._count(event)
        self._sink.emit(event)
