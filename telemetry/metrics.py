"""The consumer's metrics, in a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stream_fabric.errors import StreamGwError
from telemetry.blocks import PartitionBlocks
from telemetry.record import Part, Record
from telemetry.rows import Poison

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ROWS = (1, 10, 100, 1000, 5000, 10_000, 20_000, 50_000)


class ConsumerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        part = ("topic", "partition")
        r = self.registry
        self._events = Counter("telemetry_events", "Records of the log that were inserted", part, registry=r)
        self._poison = Counter("telemetry_dlq", "Records that are no events, put aside", part, registry=r)
        self._lag = Gauge("telemetry_lag_events", "Offsets in the log that are not yet committed", part, registry=r)
        self._held = Gauge("telemetry_held_bytes", "Records in memory that are not yet inserted", part, registry=r)
        self._pending = Gauge(
            "telemetry_pending_age_seconds",
            "How long the claimed block has not been inserted; 0: none is",
            part,
            registry=r,
        )
        self._repeated = Gauge(
            "telemetry_repeated_records", "Records that came again though they are done", part, registry=r
        )
        self._skipped = Gauge("telemetry_skipped_offsets", "Offsets that no record had", part, registry=r)
        self._rows = Histogram("telemetry_block_rows", "Rows of a block", buckets=_ROWS, registry=r)
        self._build = Histogram(
            "telemetry_build_seconds", "Making rows of a block's records", buckets=_SECONDS, registry=r
        )
        self._insert = Histogram("telemetry_insert_seconds", "Inserting a block", buckets=_SECONDS, registry=r)
        self._failures = Counter("telemetry_failures", "Tries that failed and were made again", ("code",), registry=r)

    def state(self, part: Part, end: int | None, law: PartitionBlocks[Record], claimed_since: float) -> None:
        labels = (part.topic, str(part.partition))
        if end is not None:
            self._lag.labels(*labels).set(max(end - law.next, 0))
        self._held.labels(*labels).set(law.held_bytes)
        self._pending.labels(*labels).set(time.monotonic() - claimed_since if claimed_since else 0)
        self._repeated.labels(*labels).set(law.repeated)
        self._skipped.labels(*labels).set(law.skipped)

    def gone(self, part: Part) -> None:
        """Another consumer tells of it now."""
        for gauge in (self._lag, self._held, self._pending, self._repeated, self._skipped):
            gauge.labels(part.topic, str(part.partition))  # removing one that was never set raises
            gauge.remove(part.topic, str(part.partition))

    def inserted(self, part: Part, records: int, rows: int, build_s: float, insert_s: float) -> None:
        self._events.labels(part.topic, str(part.partition)).inc(records)
        self._rows.observe(rows)
        self._build.observe(build_s)
        self._insert.observe(insert_s)

    def poison(self, part: Part, poison: Sequence[Poison]) -> None:
        self._poison.labels(part.topic, str(part.partition)).inc(len(poison))

    def failed(self, error: StreamGwError) -> None:
        self._failures.labels(error.code).inc()

    def page(self) -> bytes:
        return generate_latest(self.registry)
