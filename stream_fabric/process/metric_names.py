"""The names of every metric that a process of ours shows, in one list. Pure.

Registries are built from it (``stream_fabric.exposition``); dashboards, alerts, the runbook and the docs are held to it
by a test. A name has no colon, so that no client library renames it, and a label has few values: no stream, user,
tenant or adapter is one. What is asked of those is in ClickHouse.
"""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]
Role = Literal["gateway", "agent", "controller", "telemetry"]

_EMITTERS: tuple[Role, ...] = ("gateway", "agent", "controller")
_POOL = ("pool",)
_PART = ("topic", "partition")

# Each has the bound that its objective is about (``dashboards/objectives.py``)
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
ITL_BUCKETS_US = (
    1024, 2048, 4096, 8192, 16384, 32768, 49152, 65536, 98304, 131072, 196608, 262144, 524288, 1048576, 4194304,
)  # fmt: skip
"""Bounds of ``stream_fabric.events.itl_bucket``, so that a sketch is counted exactly."""
_DURATION_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
_WAIT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_WAKE_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_INSERT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1.0, 10.0, 100.0, 1000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0)


class Metric(NamedTuple):
    name: str
    kind: Kind
    unit: str
    """What one is; a name that is a quantity ends with it."""
    help: str
    roles: tuple[Role, ...]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    only: str = ""
    """When it has samples, where a healthy platform on any machine has none."""

    @property
    def series(self) -> tuple[str, ...]:
        """The names that its samples have."""
        if self.kind != "histogram":
            return (self.name,)
        return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")


METRICS: dict[str, Metric] = {}


def _listed(metric: Metric) -> Metric:
    assert metric.name not in METRICS
    METRICS[metric.name] = metric
    return metric


def _gateway(
    name: str, kind: Kind, unit: str, help_: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
) -> Metric:
    return _listed(Metric(name, kind, unit, help_, ("gateway",), labels, buckets))


def _agent(
    name: str,
    kind: Kind,
    unit: str,
    help_: str,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
    only: str = "",
) -> Metric:
    return _listed(Metric(name, kind, unit, help_, ("agent",), (*_POOL, *labels), buckets, only))


def _controller(
    name: str, kind: Kind, unit: str, help_: str, labels: tuple[str, ...] = _POOL, only: str = ""
) -> Metric:
    return _listed(Metric(name, kind, unit, help_, ("controller",), labels, (), only))


def _telemetry(
    name: str,
    kind: Kind,
    unit: str,
    help_: str,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
    only: str = "",
) -> Metric:
    return _listed(Metric(name, kind, unit, help_, ("telemetry",), labels, buckets, only))


def _sink(name: str, kind: Kind, unit: str, help_: str, labels: tuple[str, ...] = (), only: str = "") -> Metric:
    return _listed(Metric(name, kind, unit, help_, _EMITTERS, labels, (), only))


# --- gateways ------------------------------------------------------------------------------------------------

REQUESTS = _gateway("requests_total", "counter", "requests", "HTTP requests answered", ("route", "status"))
REQUEST_DURATION = _gateway(
    "request_duration_seconds",
    "histogram",
    "seconds",
    "Of requests that made a stream, from the first byte in to the last byte out",
    _POOL,
    _DURATION_S,
)
TTFT = _gateway(
    "ttft_seconds",
    "histogram",
    "seconds",
    "Of requests that made a stream, from their first byte to the first token's arrival at the gateway",
    _POOL,
    TTFT_BUCKETS_S,
)
READS = _gateway(
    "reads_total",
    "counter",
    "readers",
    "Readers of streams by how it ended for them; fault: whose it was if it did not go well (none, client, platform)",
    ("pool", "role", "ended", "fault"),
)
TOKENS_STREAMED = _gateway("tokens_streamed_total", "counter", "tokens", "Output tokens shown to readers", _POOL)
SHEDS = _gateway(
    "sheds_total",
    "counter",
    "requests",
    "Requests turned away for want of room, by where: gateway, rate, pool, queue (waited too long)",
    ("layer",),
)
_ONLY_SURGE = "of pools that are declared, once there was a surge"
POOL_SHEDS = _listed(
    Metric(
        "pool_sheds_total",
        "counter",
        "requests",
        "Requests refused since too much work was ahead of their tier",
        ("gateway",),
        ("pool", "tier"),
        only=_ONLY_SURGE,
    )
)
POOL_SHIFTS = _listed(
    Metric(
        "pool_shifts_total",
        "counter",
        "requests",
        "Requests of the pool that an adjacent one took",
        ("gateway",),
        _POOL,
        only=_ONLY_SURGE,
    )
)
OPEN_STREAMS = _gateway("open_streams", "gauge", "streams", "Streams with a reader here")
OPEN_SOCKETS = _gateway("open_websockets", "gauge", "sockets", "WebSockets")
LAGGING = _gateway("lagging_clients", "gauge", "readers", "Readers that keep only a cursor")
RESUMES = _gateway("resumes_total", "counter", "readers", "Readers that continued after a cursor, over SSE")
CANCELS = _gateway("cancels_total", "counter", "requests", "Cancels by result", ("result",))
STALLED = _gateway("stalled_readers_total", "counter", "readers", "Readers that took nothing, and were closed")

SPANS_SENT = _gateway("traces_sent_total", "counter", "traces", "Traces sent as OpenTelemetry's spans")
SPANS_DROPPED = _gateway("traces_dropped_total", "counter", "traces", "Traces not sent as spans: too many, or refused")

# --- agents --------------------------------------------------------------------------------------------------

REPLICA_READY = _agent("replica_ready", "gauge", "bool", "1 while the replica takes requests")
RUNNING_SEQS = _agent("running_seqs", "gauge", "sequences", "Streams in flight on this agent")
WAITING_SEQS = _agent("waiting_seqs", "gauge", "sequences", "Sequences that wait in the engine")
BATCH_SIZE = _agent("batch_size_seqs", "gauge", "sequences", "Sequences that the engine computes together")
BATCH_SLOTS = _agent("batch_slots_seqs", "gauge", "sequences", "The most that it computes together")
KV_USED_TOKENS = _agent("kv_cache_usage_tokens", "gauge", "tokens", "Of the KV cache, what is in use")
KV_TOTAL_TOKENS = _agent("kv_cache_total_tokens", "gauge", "tokens", "What the KV cache holds")
_ONLY_BYTES = "engines tell tokens; bytes where STREAM_GW_KV_BYTES_PER_TOKEN says what a token takes"
KV_USED_BYTES = _agent("kv_cache_usage_bytes", "gauge", "bytes", "The same in bytes", only=_ONLY_BYTES)
KV_TOTAL_BYTES = _agent("kv_cache_total_bytes", "gauge", "bytes", "The same in bytes", only=_ONLY_BYTES)
_ONLY_GPU = "on a host with nvidia-smi"
GPU_UTILIZATION = _agent(
    "gpu_utilization", "gauge", "ratio", "Share of the time that a kernel ran, 0 to 1", ("gpu",), only=_ONLY_GPU
)
GPU_MEMORY = _agent(
    "gpu_memory_utilization", "gauge", "ratio", "Share of the memory in use, 0 to 1", ("gpu",), only=_ONLY_GPU
)
TOKENS_GENERATED = _agent("tokens_generated_total", "counter", "tokens", "Output tokens that the engine has made")
TOKENS_PROMPT = _agent("tokens_prompt_total", "counter", "tokens", "Prompt tokens of the attempts that are over")
ATTEMPTS = _agent("attempts_total", "counter", "attempts", "Attempts at streams by how they ended", ("ended",))
ITL = _agent(
    "inter_token_latency_seconds",
    "histogram",
    "seconds",
    "Gaps between the tokens of a stream as the engine makes them, counted when its attempt is over",
    (),
    tuple(bound / 1e6 for bound in ITL_BUCKETS_US),
)
ENGINE_QUEUE = _agent(
    "engine_queue_seconds", "histogram", "seconds", "In the engine before the prompt's computation", (), _WAIT_S
)
PREFILL = _agent("prefill_seconds", "histogram", "seconds", "The prompt's computation", (), _WAIT_S)
PREFIX_QUERIES = _agent(
    "prefix_cache_queries_tokens_total", "counter", "tokens", "Prompt tokens looked up in the engine's prefix cache"
)
PREFIX_HITS = _agent("prefix_cache_hits_tokens_total", "counter", "tokens", "Of them, those found")
BREAKER = _agent("breaker_state", "gauge", "state", "0 closed, 1 half open: one request for a try, 2 open: none")
QUEUE_P99 = _agent(
    "replica_queue_p99_seconds", "gauge", "seconds", "Wait before the prompt's computation, 99th of the last minute"
)
WAKE = _agent(
    "replica_wake_seconds", "histogram", "seconds", "From a sleeping engine's call to its first token", (), _WAKE_S
)
METRICS_MISSING = _agent(
    "engine_metrics_missing",
    "gauge",
    "names",
    "Metrics of vLLM that this version relies on and the server does not show",
)

# --- controllers ---------------------------------------------------------------------------------------------

POOL_REPLICAS = _controller("pool_replicas", "gauge", "replicas", "Live replicas by state", ("pool", "state"))
POOL_RUNNING = _controller("pool_running_seqs", "gauge", "sequences", "What all replicas of the pool run")
QUEUE_DEPTH = _controller(
    "pool_queue_depth", "gauge", "requests", "Requests that wait for a replica", ("pool", "priority")
)
QUEUE_AGE = _controller(
    "pool_queue_age_seconds", "gauge", "seconds", "How long the oldest of them has waited", ("pool", "priority")
)
BACKLOG = _controller(
    "pool_backlog_seconds",
    "gauge",
    "seconds",
    "Time in which the ready replicas would begin all that has no first token yet, here or in the pool's queue",
)
TO_FREE = _controller(
    "pool_time_to_free_seconds", "gauge", "seconds", "Time in which they would have done all that is asked of them"
)
DEMAND = _controller(
    "pool_demand_replicas", "gauge", "replicas", "Replicas of which what runs and waits would fill four fifths"
)
_DECLARED = "of pools that the controllers' STREAM_GW_POOLS_FILE declares"
_OF_LEADER = f"{_DECLARED}, from the controller that leads"
DESIRED = _controller(
    "pool_desired_replicas",
    "gauge",
    "replicas",
    "Replicas in all that are wanted: what KEDA is to ask for; falls only when one has nothing left to do",
    only=_DECLARED,
)
WANTED = _controller(
    "pool_wanted_replicas", "gauge", "replicas", "Of them, by the state wanted", ("pool", "state"), only=_DECLARED
)
NEEDED = _controller(
    "pool_needed_replicas", "gauge", "replicas", "Replicas that arrivals, their forecast and the load need",
    only=_OF_LEADER,
)  # fmt: skip
UTILISATION = _controller(
    "pool_utilisation_ratio", "gauge", "ratio", "Of the ready replicas' slots, those in use", only=_OF_LEADER
)
POOL_TTFT = _controller(
    "pool_ttft_p99_seconds",
    "gauge",
    "seconds",
    "Time to first token of the last minute, from placement, 99th percentile; 0: too few to tell",
    only=_OF_LEADER,
)
GROWTH = _controller(
    "pool_forecast_ratio", "gauge", "ratio", "Arrivals expected a cold start from now, to those of now", only=_OF_LEADER
)
BURN = _controller(
    "pool_slo_burn_ratio",
    "gauge",
    "ratio",
    "First tokens over the pool's own objective, to those that slo_share lets be; window: 5m, 1h; 0: too few to tell",
    ("pool", "window"),
    only=_OF_LEADER,
)
PROFILE_AGE = _controller(
    "pool_profile_age_seconds",
    "gauge",
    "seconds",
    "Since the traces last told what the pool is usually like",
    only=f"{_OF_LEADER}, once something was",
)
SHORT = _controller(
    "pool_short_seconds",
    "gauge",
    "seconds",
    "For how long fewer replicas have been there than wanted and none came; 0: all are there",
    only=_DECLARED,
)
TTFT_OBJECTIVE = _controller("pool_ttft_objective_seconds", "gauge", "seconds", "As it is declared", only=_DECLARED)
COLD_START = _controller(
    "pool_cold_start_seconds",
    "gauge",
    "seconds",
    "From asking for a replica until it takes requests, as learned, or as declared until then",
    only=_DECLARED,
)
MAX_REPLICAS = _controller("pool_max_replicas", "gauge", "replicas", "As it is declared", only=_DECLARED)
SHED_LEVEL = _controller(
    "pool_shed_level_ratio",
    "gauge",
    "ratio",
    "Of a tier's new requests, the share that is refused for the work ahead of them",
    ("pool", "tier"),
    only=_OF_LEADER,
)
SURGING = _controller(
    "pool_surging",
    "gauge",
    "bool",
    "1 while requests are refused or given to adjacent pools, by layer: shed of any tier, shift",
    ("pool", "layer"),
    only=_DECLARED,
)
LEADS = _controller("controller_leads", "gauge", "bool", "1 on the controller that plans the declared pools", ())
DECISIONS = _controller(
    "pool_decisions_total",
    "counter",
    "decisions",
    "Plans that this controller changed, by kind: up, down (how many there are to be), rest, victim (which), other",
    ("pool", "kind"),
    only=_OF_LEADER,
)
STUCK = _controller(
    "stuck_replicas_drained_total", "counter", "replicas", "Replicas drained for making others wait", ()
)
DEAD = _controller(
    "dead_replicas_total", "counter", "replicas", "Replicas whose lease ended, found by this process", ()
)
LOOK_FAILURES = _controller("pool_looks_failed_total", "counter", "looks", "Times that the pools could not be read", ())
_ONLY_SCALER = "where STREAM_GW_SCALER_PORT is set and KEDA asks there"
SCALER_CALLS = _controller(
    "scaler_calls_total", "counter", "calls", "Questions that KEDA asked by gRPC", ("call",), only=_ONLY_SCALER
)
SCALER_REFUSALS = _controller(
    "scaler_refusals_total", "counter", "calls", "Of them, those not answered, by why: unavailable is that no plan was "
    "known", ("call", "code"), only="once one was not",
)  # fmt: skip
SCALER_STREAMS = _controller(
    "scaler_streams", "gauge", "streams", "Streams on which KEDA hears at once of a pool's first replica", ()
)

# --- what carries telemetry ----------------------------------------------------------------------------------

EVENTS_EMITTED = _sink("events_emitted_total", "counter", "events", "Events that parts of this process told", ("kind",))
EVENTS_SENT = _sink("events_sent_total", "counter", "events", "Events that the transport has acknowledged", ("kind",))
EVENTS_SPOOLED = _sink("events_spooled_total", "counter", "events", "Events that went to the disk spool", ("kind",))
EVENTS_DROPPED = _sink(
    "events_dropped_total", "counter", "events", "Events lost, by kind and reason", ("kind", "reason"), "once one is"
)
BILLS_DROPPED = _sink("events_billing_dropped_total", "counter", "events", "Of them, billing facts: there must be none")
EVENTS_QUEUE = _sink("events_queue_depth", "gauge", "events", "Events in memory, not yet handed to the transport")
EVENTS_AWAY = _sink("events_transport_away", "gauge", "bool", "1 while the transport takes no events")
EVENTS_ROOM = _sink(
    "events_room_used_ratio",
    "gauge",
    "ratio",
    "Of the room for events not delivered, what is taken; at 1 they are lost",
)
SPOOL_BYTES = _sink("events_spool_bytes", "gauge", "bytes", "Bytes in the disk spool")
SPOOL_OLDEST = _sink("events_spool_oldest_seconds", "gauge", "seconds", "Age of the oldest spooled event; 0: none")

# --- the consumer --------------------------------------------------------------------------------------------

CONSUMED = _telemetry("telemetry_events_total", "counter", "records", "Records of the log that were inserted", _PART)
POISON = _telemetry(
    "telemetry_dlq_total", "counter", "records", "Records that are no events, put aside", _PART, only="once one is"
)
LAG = _telemetry("telemetry_lag_events", "gauge", "records", "Offsets in the log that are not yet committed", _PART)
HELD = _telemetry("telemetry_held_bytes", "gauge", "bytes", "Records in memory that are not yet inserted", _PART)
PENDING = _telemetry(
    "telemetry_pending_age_seconds",
    "gauge",
    "seconds",
    "How long the claimed block has not been inserted; 0: none is",
    _PART,
)
REPEATED = _telemetry(
    "telemetry_repeated_records", "gauge", "records", "Records that came again though they are done", _PART
)
SKIPPED = _telemetry("telemetry_skipped_offsets", "gauge", "offsets", "Offsets that no record had", _PART)
BLOCK_ROWS = _telemetry("telemetry_block_rows", "histogram", "rows", "Rows of a block", (), _ROWS)
BUILD = _telemetry("telemetry_build_seconds", "histogram", "seconds", "Making rows of a block's records", (), _INSERT_S)
INSERT = _telemetry("telemetry_insert_seconds", "histogram", "seconds", "Inserting a block", (), _INSERT_S)
CONSUME_FAILURES = _telemetry(
    "telemetry_failures_total",
    "counter",
    "tries",
    "Tries that failed and were made again",
    ("code",),
    only="once something has failed",
)


def of(role: Role) -> tuple[Metric, ...]:
    """A role's, in the list's order."""
    return tuple(metric for metric in METRICS.values() if role in metric.roles)


_HEAD = """# Metrics

Each process shows its own at `/metrics`, in Prometheus' text format: gateways on their port, agents and controllers at
`STREAM_GW_METRICS_PORT`, the consumer of events at `STREAM_GW_TELEMETRY_PORT`; these listen on loopback unless
`STREAM_GW_METRICS_HOST` and `STREAM_GW_TELEMETRY_HOST` say otherwise, as the Helm chart does. Gateways answer in
OpenMetrics, with exemplars that name traces, where the reader asks for it. An agent on the simulator shows its engine's
metrics under vLLM's names, too. No metric has a tenant, user or stream as label: ask ClickHouse. Of pools a gateway
names the first 64.

Made by `python -m stream_fabric.metrics`; a test compares.
"""


def page() -> str:
    """``docs/metrics.md``."""
    out = [_HEAD]
    titles: dict[tuple[Role, ...], str] = {
        ("gateway",): "Gateway", ("agent",): "Agent", ("controller",): "Controller",
        _EMITTERS: "Whoever tells events: gateway, agent, controller", ("telemetry",): "Consumer of events",
    }  # fmt: skip
    for roles, title in titles.items():
        out.append(f"\n## {title}\n\n| name | kind | labels | what it is |\n| --- | --- | --- | --- |\n")
        for metric in METRICS.values():
            if metric.roles == roles:
                labels = ", ".join(metric.labels)
                when = f" (only {metric.only})" if metric.only else ""
                out.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{when} |\n")
    return "".join(out)


if __name__ == "__main__":
    sys.stdout.write(page())
