"""Metrics of a sink, read from its own counters at each scrape, so that ``emit`` pays for no metric."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from telemetry.emit.sink import Sink

_KINDS = ("request", "attempt", "fleet")


class EmitMetrics(Collector):
    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def collect(self) -> Iterator[Metric]:
        sink, backlog = self._sink, self._sink.backlog
        for name, text, counts in (
            ("events_emitted", "Events that this process emitted", backlog.emitted),
            ("events_sent", "Events that the transport has acknowledged", backlog.sent),
            ("events_spooled", "Events written to the disk spool", backlog.spooled),
        ):
            family = CounterMetricFamily(name, text, labels=["kind"])
            for kind in _KINDS:
                family.add_metric([kind], counts[kind])
            yield family
        dropped = CounterMetricFamily("events_dropped", "Events lost, by kind and reason", labels=["kind", "reason"])
        for (kind, reason), count in tuple(backlog.dropped.items()):
            dropped.add_metric([kind, reason], count)
        yield dropped
        bills = CounterMetricFamily("events_billing_dropped", "Billing events lost; must stay 0")
        bills.add_metric([], backlog.bills_dropped.total())
        yield bills
        for name, text, value in (
            ("events_queue_depth", "Events in memory, not yet handed to the transport", sink.depth),
            ("events_transport_away", "1 while the transport takes no events", int(sink.away)),
            ("events_room_used_ratio", "Used share of the room for undelivered events", sink.room_used),
            ("events_spool_bytes", "Bytes in the disk spool", sink.spool_bytes),
            (
                "events_spool_oldest_seconds",
                "Age of the oldest spooled event; 0 when there is none",
                sink.spool_oldest_s,
            ),
        ):
            yield GaugeMetricFamily(name, text, value)
