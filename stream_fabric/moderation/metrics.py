"""Metrics of moderation."""

from __future__ import annotations

from typing import Literal

from stream_fabric.process import metric_names as listed
from stream_fabric.process.metrics_registry import MetricsRegistry


class ModerationMetrics:
    """Counts and times the checks of one process. ``where``: what it checks."""

    def __init__(self, make: MetricsRegistry, where: Literal["prompt", "answer"]) -> None:
        self._where = where
        self._checks = make.counter(listed.MODERATION_CHECKS)
        self._seconds = make.histogram(listed.MODERATION_SECONDS)

    def receive(self, outcome: str, seconds: float) -> None:
        """Take one check: passed, flagged or failed."""
        self._checks.labels(self._where, outcome).inc()
        self._seconds.labels(self._where).observe(seconds)
