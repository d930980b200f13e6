"""Health of the event pipeline."""

from __future__ import annotations

from dashboards.boards.queries import AGENT, RATE, highest, quantiles, rate
from dashboards.build import Board, Panel, Prom, Sql
from stream_fabric.process import metric_names as listed

TELEMETRY = Board(
    "stream-gw-telemetry",
    "stream-gw: telemetry",
    [
        Panel(
            "Events", [
                Prom(rate(listed.EVENTS_EMITTED, "kind"), "emitted {{kind}}"),
                Prom(rate(listed.EVENTS_SENT, "kind"), "delivered {{kind}}"),
            ], "ops",
        ),
        Panel(
            "Events lost", [Prom(rate(listed.EVENTS_DROPPED, "kind, reason"), "{{kind}} {{reason}}")], "ops",
            only="once an event is lost",
        ),
        Panel("Billing events lost", [Prom(f"sum({listed.BILLS_DROPPED.name})", "total")], kind="number"),
        Panel("Events waiting in memory", [Prom(f"sum by (instance) ({listed.EVENTS_QUEUE.name})", AGENT)]),
        Panel(
            "Disk spool", [
                Prom(f"sum by (instance) ({listed.SPOOL_BYTES.name})", AGENT),
                Prom(f"sum(rate({listed.EVENTS_SPOOLED.name}[{RATE}]))", "events per second"),
            ],
        ),
        Panel("Oldest event in the spool", [Prom(f"max by (instance) ({listed.SPOOL_OLDEST.name})", AGENT)], "s"),
        Panel("Transport unavailable", [Prom(f"max by (instance) ({listed.EVENTS_AWAY.name})", AGENT)]),
        Panel(
            "Room for undelivered events in use",
            [Prom(f"max by (instance) ({listed.EVENTS_ROOM.name})", AGENT)], "percentunit",
        ),
        Panel("Events consumed", [Prom(rate(listed.CONSUMED, "topic"), "{{topic}}")], "ops"),
        Panel("Consumer lag in events", [Prom(f"sum by (topic) ({listed.LAG.name})", "{{topic}}")]),
        Panel("Insert time of a block", quantiles(listed.INSERT), "s"),
        Panel("Build time of a block", quantiles(listed.BUILD), "s"),
        Panel("Rows per block", quantiles(listed.BLOCK_ROWS)),
        Panel("Memory held by the consumer", [Prom(f"sum by (instance) ({listed.HELD.name})", AGENT)], "bytes"),
        Panel(
            "Age of the block being inserted",
            [Prom(highest(listed.PENDING, "topic, partition"), "{{topic}} {{partition}}")], "s",
        ),
        Panel(
            "Dead letters", [Prom(rate(listed.POISON, "topic"), "{{topic}}")], "ops",
            only="once a record cannot be decoded",
        ),
        Panel(
            "Expired before they were inserted", [Prom(rate(listed.EXPIRED, "topic"), "{{topic}}")], "ops",
            only="once Kafka's retention was shorter than an outage of the consumers or of ClickHouse",
        ),
        Panel(
            "Failed attempts", [Prom(rate(listed.CONSUME_FAILURES, "code"), "{{code}}")], "ops",
            only="once an attempt has failed",
        ),
        Panel(
            "Repeated records and skipped offsets", [
                Prom(f"sum({listed.REPEATED.name})", "repeated"), Prom(f"sum({listed.SKIPPED.name})", "skipped"),
            ],
        ),
        Panel(
            "Traces exported as spans", [
                Prom(rate(listed.SPANS_SENT), "sent"), Prom(rate(listed.SPANS_DROPPED), "dropped"),
            ], "ops", about="Where STREAM_GW_OTLP_ENDPOINT is set.",
        ),
        Panel("Missing vLLM metrics", [Prom(f"max by (instance) ({listed.METRICS_MISSING.name})", AGENT)]),
        Panel(
            "Position of each partition", Sql(
                "SELECT topic, partition, argMax(next, inserted_at) AS next, max(ingest_state.inserted_at) AS at "
                "FROM ingest_state GROUP BY topic, partition ORDER BY topic, partition"
            ), kind="table",
        ),
    ],
)  # fmt: skip
