"""The consumer's metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import Gauge

from stream_fabric.errors import StreamGwError
from stream_fabric.process import metric_names as listed
from stream_fabric.process.metrics_registry import MetricsRegistry, Page
from telemetry.consume.blocks import PartitionBlocks
from telemetry.consume.rows import Poison
from telemetry.emit.record import Part, Record


class ConsumerMetrics:
    def __init__(self) -> None:
        self._exposition = make = MetricsRegistry("telemetry")
        self._events = make.counter(listed.CONSUMED)
        self._poison = make.counter(listed.POISON)
        self._expired = make.counter(listed.EXPIRED)
        self._lag = make.gauge(listed.LAG)
        self._held = make.gauge(listed.HELD)
        self._pending = make.gauge(listed.PENDING)
        self._repeated = make.gauge(listed.REPEATED)
        self._skipped = make.gauge(listed.SKIPPED)
        self._rows = make.histogram(listed.BLOCK_ROWS)
        self._build = make.histogram(listed.BUILD)
        self._insert = make.histogram(listed.INSERT)
        self._failures = make.counter(listed.CONSUME_FAILURES)

    def report_lag(self, part: Part, lag: int | None) -> None:
        """Set the lag of a partition. None: unknown for now, and the last one stands."""
        if lag is not None:
            self._lag.labels(part.topic, str(part.partition)).set(lag)

    def remove_lag(self, part: Part) -> None:
        """Remove the lag of a partition that cannot be read: alerts take one without it for unread."""
        self._remove(self._lag, part)

    def report_partition(self, part: Part, blocks: PartitionBlocks[Record], claimed_since: float) -> None:
        """Set the other gauges of a partition. ``claimed_since`` 0: no claim."""
        labels = (part.topic, str(part.partition))
        self._held.labels(*labels).set(blocks.held_bytes)
        self._pending.labels(*labels).set(time.monotonic() - claimed_since if claimed_since else 0)
        self._repeated.labels(*labels).set(blocks.repeated)
        self._skipped.labels(*labels).set(blocks.skipped)

    def remove_partition(self, part: Part) -> None:
        """Remove the gauges of a partition that another consumer reports now."""
        for gauge in (self._lag, self._held, self._pending, self._repeated, self._skipped):
            self._remove(gauge, part)

    def _remove(self, gauge: Gauge, part: Part) -> None:
        gauge.labels(part.topic, str(part.partition))  # removing one that was never set raises
        gauge.remove(part.topic, str(part.partition))

    def count_insert(self, part: Part, records: int, rows: int, build_s: float, insert_s: float) -> None:
        self._events.labels(part.topic, str(part.partition)).inc(records)
        self._rows.observe(rows)
        self._build.observe(build_s)
        self._insert.observe(insert_s)

    def count_poison(self, part: Part, poison: Sequence[Poison]) -> None:
        self._poison.labels(part.topic, str(part.partition)).inc(len(poison))

    def count_expired(self, part: Part, records: int) -> None:
        self._expired.labels(part.topic, str(part.partition)).inc(records)

    def count_failure(self, error: StreamGwError) -> None:
        self._failures.labels(error.code).inc()

    async def scraped(self) -> Page:
        return await self._exposition.scraped()
