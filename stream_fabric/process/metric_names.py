"""Table of all metrics that our processes export: name, kind, unit, help and labels. Pure.

The module is long because it is a table: one entry per metric. ``process.metrics_registry`` builds registries from it;
a test holds dashboards, alerts, runbook and docs to it. Names have no colon, so that no client library renames them.
Labels have few values: streams, users, tenants and adapters are no labels; ask ClickHouse about those.
"""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple

from stream_fabric.pool.replica_load import TTFT_BUCKETS_S

Kind = Literal["counter", "gauge", "histogram"]
Role = Literal["gateway", "agent", "controller", "telemetry"]

_EMITTERS: tuple[Role, ...] = ("gateway", "agent", "controller")
_POOL = ("pool",)
_PART = ("topic", "partition")

# Each list contains the bound of its objective (``dashboards/objectives.py``)
ITL_BUCKETS_US = (
    1024, 2048, 4096, 8192, 16384, 32768, 49152, 65536, 98304, 131072, 196608, 262144, 524288, 1048576, 4194304,
)  # fmt: skip
"""Bounds that are also bounds of ``stream_fabric.gap_histogram.itl_bucket``, so that a sketch converts exactly."""
_DURATION_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
_WAIT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TTFT_ERROR_S = (-10.0, -2.5, -1.0, -0.5, -0.25, -0.1, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_WAKE_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_INSERT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1.0, 10.0, 100.0, 1000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0)


class Metric(NamedTuple):
    """One metric of the table."""

    name: str
    kind: Kind
    unit: str
    """Unit of the value; names of quantities end with it."""
    help: str
    roles: tuple[Role, ...]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    only: str = ""
    """Condition under which the metric has samples; empty: always."""

    @property
    def series(self) -> tuple[str, ...]:
        """Names of the metric's time series in Prometheus."""
        if self.kind != "histogram":
            return (self.name,)
        if self.buckets[0] < 0:  # Prometheus allows no sum that may fall
            return (f"{self.name}_bucket", f"{self.name}_count")
        return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")


METRICS: dict[str, Metric] = {}


def _add(metric: Metric) -> Metric:
    """Add a metric to ``METRICS`` and return it."""
    assert metric.name not in METRICS
    METRICS[metric.name] = metric
    return metric


def _gateway(
    name: str, kind: Kind, unit: str, help_: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
) -> Metric:
    return _add(Metric(name, kind, unit, help_, ("gateway",), labels, buckets))


def _agent(
    name: str,
    kind: Kind,
    unit: str,
    help_: str,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
    only: str = "",
) -> Metric:
    return _add(Metric(name, kind, unit, help_, ("agent",), (*_POOL, *labels), buckets, only))


def _controller(
    name: str, kind: Kind, unit: str, help_: str, labels: tuple[str, ...] = _POOL, only: str = ""
) -> Metric:
    return _add(Metric(name, kind, unit, help_, ("controller",), labels, (), only))


def _telemetry(
    name: str,
    kind: Kind,
    unit: str,
    help_: str,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
    only: str = "",
) -> Metric:
    return _add(Metric(name, kind, unit, help_, ("telemetry",), labels, buckets, only))


def _emitter(name: str, kind: Kind, unit: str, help_: str, labels: tuple[str, ...] = (), only: str = "") -> Metric:
    return _add(Metric(name, kind, unit, help_, _EMITTERS, labels, (), only))


# --- gateways ------------------------------------------------------------------------------------------------

REQUESTS = _gateway("requests_total", "counter", "requests", "HTTP requests answered", ("route", "status"))
REQUEST_DURATION = _gateway(
    "request_duration_seconds",
    "histogram",
    "seconds",
    "Duration of requests that created a stream, from the first byte in to the last byte out",
    _POOL,
    _DURATION_S,
)
TTFT = _gateway(
    "ttft_seconds",
    "histogram",
    "seconds",
    "Time to first token of requests that created a stream, measured at the gateway from the request's first byte; "
    "without tiers batch and free",
    _POOL,
    TTFT_BUCKETS_S,
)
TTFT_ERROR = _gateway(
    "ttft_error_seconds",
    "histogram",
    "seconds",
    "Time from placement to the first token, less what placement expected; below 0: it came earlier. Only of requests "
    "that a replica got at once",
    _POOL,
    _TTFT_ERROR_S,
)
READS = _gateway(
    "reads_total",
    "counter",
    "readers",
    "Finished readers of streams by outcome; fault: side that caused a bad outcome (none, client, platform)",
    ("pool", "role", "ended", "fault"),
)
READS_BY_DIALECT = _gateway(
    "reads_by_dialect_total",
    "counter",
    "readers",
    "Finished readers by the dialect that they read in; fault: side that caused a bad outcome (none, client, platform)",
    ("dialect", "fault"),
)
TOKENS_STREAMED = _gateway("tokens_streamed_total", "counter", "tokens", "Output tokens sent to readers", _POOL)
SHEDS = _gateway(
    "sheds_total",
    "counter",
    "requests",
    "Requests rejected for lack of capacity, by layer: gateway, rate, pool, queue (waited too long)",
    ("layer",),
)
STRUCTURED_REPLIES = _agent(
    "structured_replies_total",
    "counter",
    "replies",
    "Replies checked against the JSON schema of their request: valid, invalid, repaired (valid after a repair), "
    "unchecked",
    ("result",),
    only="after the first check",
)
INPUTS_ANSWERED = _agent(
    "inputs_answered_total",
    "counter",
    "inputs",
    "Inputs of running streams: applied (another answer follows), or refused because the answer takes none",
    ("result",),
)
INPUT_WAIT = _agent(
    "inputs_wait_seconds",
    "histogram",
    "seconds",
    "Time from a gateway's receipt of an input until its replica applied or refused it",
    (),
    _WAIT_S,
)
STEERED_FIRST_TOKEN = _agent(
    "steered_first_token_seconds",
    "histogram",
    "seconds",
    "Time from the cut of an answer by an input to the first token of the next; counted when the attempt ends",
    (),
    _WAIT_S,
)
STRUCTURED_REPAIRS = _agent(
    "structured_repairs_total",
    "counter",
    "replies",
    "Replies that the engine made again, because the one before did not fit its JSON schema",
    only="after the first repair",
)
RESPONSES_UNSAVED = _gateway(
    "responses_unsaved",
    "gauge",
    "responses",
    "Stored responses in Redis that wait for the database; each gateway reports all",
)
RESPONSES_STORED = _add(
    Metric(
        "responses_stored_total",
        "counter",
        "responses",
        "Stored responses by outcome: saved in the database, deferred (it refused, retried), too_large, no_stream, "
        "unreadable",
        ("gateway",),
        ("outcome",),
    )
)
MODERATION_CHECKS = _add(
    Metric(
        "moderation_checks_total",
        "counter",
        "checks",
        "Checks by moderation, by what was checked (prompt, answer) and outcome: passed, flagged, failed (endpoint)",
        ("gateway", "agent"),
        ("where", "outcome"),
        only="after the first check",
    )
)
MODERATION_SECONDS = _add(
    Metric(
        "moderation_seconds",
        "histogram",
        "seconds",
        "Time of a check by moderation, which a prompt and a window of an answer wait for",
        ("gateway", "agent"),
        ("where",),
        buckets=_WAIT_S,
        only="after the first check",
    )
)
LIMITED = _add(
    Metric(
        "limited_total",
        "counter",
        "requests",
        "Requests refused by a limit or a budget of their plan, by subject (tenant, key, user, model or budget) and "
        "kind of limit",
        ("gateway",),
        ("subject", "limit"),
        only="after the first refusal",
    )
)
LIMITS_FAILED_OPEN = _gateway(
    "limits_failed_open_total",
    "counter",
    "requests",
    "Requests admitted without their limits, because Redis did not answer for their tenant's account",
)
BUDGET_EVENTS = _add(
    Metric(
        "budget_events_total",
        "counter",
        "events",
        "Tenants' budgets that warned (budget_warning), were exceeded (budget_exceeded) or tripped for an hour "
        "(velocity_trip), each once in its period",
        ("gateway", "agent"),
        ("event", "budget"),
    )
)
_ONLY_SURGE = "for declared pools, after their first overload"
POOL_SHEDS = _add(
    Metric(
        "pool_sheds_total",
        "counter",
        "requests",
        "Requests that the pool rejected because the backlog ahead of their tier was too long; some may have been "
        "answered by a smaller model (pool_fallbacks_total)",
        ("gateway",),
        ("pool", "tier"),
        only=_ONLY_SURGE,
    )
)
POOL_SHIFTS = _add(
    Metric(
        "pool_shifts_total",
        "counter",
        "requests",
        "Requests of the pool that overflowed to an adjacent pool",
        ("gateway",),
        _POOL,
        only=_ONLY_SURGE,
    )
)
FALLBACKS = _add(
    Metric(
        "pool_fallbacks_total",
        "counter",
        "requests",
        "Requests of the pool that a smaller model answered, because the pool was saturated",
        ("gateway",),
        _POOL,
        only="for models with fallbacks in a plan",
    )
)
BATCH_HOSTED = _add(
    Metric(
        "pool_batch_hosted_total",
        "counter",
        "requests",
        "Batch requests of the pool that a batch host took",
        ("gateway",),
        _POOL,
        only="for pools with batch_pools",
    )
)
OPEN_STREAMS = _gateway("open_streams", "gauge", "streams", "Streams with a reader on this gateway")
OPEN_SOCKETS = _gateway("open_websockets", "gauge", "sockets", "Open WebSockets")
CONNECTIONS_CUT = _gateway(
    "connections_cut_total",
    "counter",
    "connections",
    "Connections cut at once because the gateway held the most it may; its limit of open files may be low",
)
LAGGING = _gateway(
    "lagging_clients",
    "gauge",
    "readers",
    "Readers that are behind: the gateway keeps only their cursor and refills from the log",
)
RESUMES = _gateway("resumes_total", "counter", "readers", "Readers that resumed from a cursor over SSE")
CANCELS = _gateway("cancels_total", "counter", "requests", "Cancel requests by result", ("result",))
INPUTS = _gateway(
    "inputs_total",
    "counter",
    "inputs",
    "Inputs of running streams by result, or by the code of their error",
    ("result",),
)
STALLED = _gateway("stalled_readers_total", "counter", "readers", "Readers closed because they accepted no bytes")

SPANS_SENT = _gateway("traces_sent_total", "counter", "traces", "Traces sent as OpenTelemetry spans")
SPANS_DROPPED = _gateway(
    "traces_dropped_total", "counter", "traces", "Traces not sent as spans: queue full, or refused by the collector"
)

RECORDS_SKIPPED = _add(
    Metric(
        "records_skipped_total",
        "counter",
        "records",
        "Records in Redis that were skipped because another version wrote them, by kind: replica, slot, prefix, "
        "blocks, plan",
        ("gateway", "controller"),
        ("kind",),
        only="while processes of versions that do not understand each other run together",
    )
)
DEAD = _add(
    Metric(
        "dead_replicas_total",
        "counter",
        "replicas",
        "Expired replica leases that this process recovered; add up those of all gateways and controllers",
        ("gateway", "controller"),
        (),
    )
)
POOL_LOST = _add(
    Metric(
        "pool_lost",
        "gauge",
        "bool",
        "1 while the pool has no replica, because the last one died without a shutdown; for a day at most",
        ("gateway", "controller"),
        _POOL,
        only="after a pool's last replica has died, from the process that recovered its streams",
    )
)
FRAMES_PASSED_OVER = _add(
    Metric(
        "frames_passed_over_total",
        "counter",
        "frames",
        "Frames of a stream passed over because a newer release wrote their kind",
        ("gateway", "agent"),
    )
)

# --- agents --------------------------------------------------------------------------------------------------

REPLICA_READY = _agent("replica_ready", "gauge", "bool", "1 while the replica takes requests")
RUNNING_SEQS = _agent("running_seqs", "gauge", "sequences", "Streams in flight on this agent")
WAITING_SEQS = _agent("waiting_seqs", "gauge", "sequences", "Sequences waiting in the engine")
BATCH_SIZE = _agent("batch_size_seqs", "gauge", "sequences", "Sequences that the engine runs in its current batch")
BATCH_SLOTS = _agent("batch_slots_seqs", "gauge", "sequences", "Maximum number of sequences in a batch")
KV_USED_TOKENS = _agent("kv_cache_usage_tokens", "gauge", "tokens", "KV cache in use")
KV_TOTAL_TOKENS = _agent("kv_cache_total_tokens", "gauge", "tokens", "Capacity of the KV cache")
_ONLY_BYTES = "where STREAM_GW_KV_BYTES_PER_TOKEN gives the bytes per token"
KV_USED_BYTES = _agent("kv_cache_usage_bytes", "gauge", "bytes", "KV cache in use", only=_ONLY_BYTES)
KV_TOTAL_BYTES = _agent("kv_cache_total_bytes", "gauge", "bytes", "Capacity of the KV cache", only=_ONLY_BYTES)
_ONLY_GPU = "on a host with NVIDIA's driver"
GPU_UTILIZATION = _agent(
    "gpu_utilization", "gauge", "ratio", "Share of time in which a GPU kernel ran, 0 to 1", ("gpu",), only=_ONLY_GPU
)
GPU_MEMORY = _agent(
    "gpu_memory_utilization", "gauge", "ratio", "Share of GPU memory in use, 0 to 1", ("gpu",), only=_ONLY_GPU
)
TOKENS_GENERATED = _agent("tokens_generated_total", "counter", "tokens", "Output tokens generated by the engine")
TOKENS_PROMPT = _agent("tokens_prompt_total", "counter", "tokens", "Prompt tokens of finished attempts")
ATTEMPTS = _agent("attempts_total", "counter", "attempts", "Finished attempts by outcome", ("ended",))
ITL = _agent(
    "inter_token_latency_seconds",
    "histogram",
    "seconds",
    "Time between the tokens of a stream as the engine generates them; counted when the attempt ends",
    (),
    tuple(bound / 1e6 for bound in ITL_BUCKETS_US),
)
ENGINE_QUEUE = _agent(
    "engine_queue_seconds", "histogram", "seconds", "Time in the engine's queue, before prefill starts", (), _WAIT_S
)
PREFILL = _agent("prefill_seconds", "histogram", "seconds", "Prefill time", (), _WAIT_S)
PREFIX_QUERIES = _agent(
    "prefix_cache_queries_tokens_total", "counter", "tokens", "Prompt tokens looked up in the engine's prefix cache"
)
PREFIX_HITS = _agent(
    "prefix_cache_hits_tokens_total", "counter", "tokens", "Prompt tokens found in the engine's prefix cache"
)
BREAKER = _agent(
    "breaker_state",
    "gauge",
    "state",
    "Circuit breaker: 0 closed, 1 half open (one request is tried), 2 open (no requests)",
)
QUEUE_P99 = _agent(
    "replica_queue_p99_seconds", "gauge", "seconds", "Time before prefill starts, 99th percentile of the last minute"
)
WAKE = _agent(
    "replica_wake_seconds",
    "histogram",
    "seconds",
    "Time a sleeping engine takes to wake, until its first token",
    (),
    _WAKE_S,
)
BILLS_AT_RISK = _agent(
    "agent_bills_at_risk", "gauge", "bool", "1 while bills can neither be delivered nor kept in memory or spool"
)
METRICS_MISSING = _agent(
    "engine_metrics_missing",
    "gauge",
    "names",
    "Metrics of vLLM that this version needs and the server does not export",
)

# --- controllers ---------------------------------------------------------------------------------------------

POOL_REPLICAS = _controller("pool_replicas", "gauge", "replicas", "Live replicas by state", ("pool", "state"))
POOL_RUNNING = _controller("pool_running_seqs", "gauge", "sequences", "Sequences that all replicas of the pool run")
QUEUE_DEPTH = _controller(
    "pool_queue_depth", "gauge", "requests", "Requests waiting for a replica", ("pool", "priority")
)
QUEUE_AGE = _controller(
    "pool_queue_age_seconds", "gauge", "seconds", "Waiting time of the oldest request", ("pool", "priority")
)
BACKLOG = _controller(
    "pool_backlog_seconds",
    "gauge",
    "seconds",
    "Time the ready replicas need to begin all requests without a first token, in engines and in the pool's queue; "
    "without queued ones of tiers batch and free",
)
TO_FREE = _controller(
    "pool_time_to_free_seconds", "gauge", "seconds", "Time the ready replicas need to finish all their work"
)
DEMAND = _controller(
    "pool_demand_replicas",
    "gauge",
    "replicas",
    "Replicas needed to serve running and waiting sequences at 80 % utilisation",
)
_DECLARED = "for pools declared in STREAM_GW_POOLS_FILE"
_OF_LEADER = f"{_DECLARED}, from the leading controller"
DESIRED = _controller(
    "pool_desired_replicas",
    "gauge",
    "replicas",
    "Total replicas wanted, which KEDA scales to; falls only when a replica has no work left",
    only=_DECLARED,
)
WANTED = _controller(
    "pool_wanted_replicas", "gauge", "replicas", "Replicas wanted, by state", ("pool", "state"), only=_DECLARED
)
NEEDED = _controller(
    "pool_needed_replicas", "gauge", "replicas", "Replicas needed for arrivals, their forecast and the load",
    only=_OF_LEADER,
)  # fmt: skip
PEAK = _controller(
    "pool_peak_replicas", "gauge", "replicas", "Replicas that usual peaks bring back into use; at least so many stay",
    only=_OF_LEADER,
)  # fmt: skip
UTILISATION = _controller(
    "pool_utilisation_ratio", "gauge", "ratio", "Share of the ready replicas' slots in use", only=_OF_LEADER
)
POOL_TTFT = _controller(
    "pool_ttft_p99_seconds",
    "gauge",
    "seconds",
    "Time from placement to first token, 99th percentile of the last minute; 0: too few samples",
    only=_OF_LEADER,
)
GROWTH = _controller(
    "pool_forecast_ratio",
    "gauge",
    "ratio",
    "Forecast arrival rate one cold start ahead, relative to the current rate",
    only=_OF_LEADER,
)
BURN = _controller(
    "pool_slo_burn_ratio",
    "gauge",
    "ratio",
    "SLO burn rate: share of first tokens over the objective, relative to the share allowed; window 5m, 1h; 0: too few",
    ("pool", "window"),
    only=_OF_LEADER,
)
PROFILE_AGE = _controller(
    "pool_profile_age_seconds",
    "gauge",
    "seconds",
    "Age of the pool's traffic model",
    only=f"{_OF_LEADER}, once there is a traffic model",
)
SHORT = _controller(
    "pool_short_seconds",
    "gauge",
    "seconds",
    "Time for which fewer replicas than planned have started, and none has come; 0: all have started",
    only=_DECLARED,
)
TTFT_OBJECTIVE = _controller(
    "pool_ttft_objective_seconds", "gauge", "seconds", "Declared TTFT objective", only=_DECLARED
)
COLD_START = _controller(
    "pool_cold_start_seconds",
    "gauge",
    "seconds",
    "Time from requesting a replica until it takes requests: learned, or declared until then",
    only=_DECLARED,
)
MAX_REPLICAS = _controller("pool_max_replicas", "gauge", "replicas", "Declared maximum of replicas", only=_DECLARED)
SHED_LEVEL = _controller(
    "pool_shed_level_ratio",
    "gauge",
    "ratio",
    "Share of a tier's requests of the last 15 s that was rejected for overload",
    ("pool", "tier"),
    only=_OF_LEADER,
)
SURGING = _controller(
    "pool_surging",
    "gauge",
    "bool",
    "1 while requests are rejected (layer shed), overflow to adjacent pools (layer shift), or batch work yields "
    "(layer yield)",
    ("pool", "layer"),
    only=_DECLARED,
)
LEADS = _controller("controller_leads", "gauge", "bool", "1 on the controller that plans the declared pools", ())
_RECONCILES = "with STREAM_GW_POOLS_FILE and STREAM_GW_TELEMETRY_URL"
USAGE_DISAGREEMENTS = _controller(
    "usage_disagreements",
    "gauge",
    "hours",
    "Hours of a tenant and model whose settled and billed usage differ, in the last reconciliation",
    (),
    only=_RECONCILES,
)
USAGE_DRIFT = _controller(
    "usage_drift_tokens",
    "gauge",
    "tokens",
    "Tokens by which settled and billed usage differ, in the last reconciliation",
    (),
    only=_RECONCILES,
)
RECONCILED_AGE = _controller(
    "usage_reconciled_age_seconds",
    "gauge",
    "seconds",
    "Time since the last successful reconciliation, or since the process's start",
    (),
    only=_RECONCILES,
)
RECONCILED_AT = _controller(
    "usage_reconciled_timestamp_seconds",
    "gauge",
    "seconds",
    "Unix time of the last successful reconciliation by this process; 0: none yet",
    (),
    only=_RECONCILES,
)
DECISIONS = _controller(
    "pool_decisions_total",
    "counter",
    "decisions",
    "Plans changed by this controller, by kind: up, down (replica count), rest, victim (choice of a replica), other",
    ("pool", "kind"),
    only=_OF_LEADER,
)
STUCK = _controller(
    "stuck_replicas_drained_total",
    "counter",
    "replicas",
    "Replicas drained because their requests waited far longer than others'",
    (),
)
LOOK_FAILURES = _controller("pool_looks_failed_total", "counter", "looks", "Failed reads of the pools", ())
_ONLY_SCALER = "where STREAM_GW_SCALER_PORT is set and KEDA uses it"
SCALER_CALLS = _controller(
    "scaler_calls_total", "counter", "calls", "gRPC calls from KEDA", ("call",), only=_ONLY_SCALER
)
SCALER_REFUSALS = _controller(
    "scaler_refusals_total", "counter", "calls", "gRPC calls from KEDA that failed, by code; unavailable: no plan was "
    "known", ("call", "code"), only="after the first",
)  # fmt: skip
SCALER_STREAMS = _controller(
    "scaler_streams", "gauge", "streams", "Open gRPC streams that push a pool's first replica to KEDA", ()
)

# --- what carries telemetry ----------------------------------------------------------------------------------

EVENTS_EMITTED = _emitter("events_emitted_total", "counter", "events", "Events emitted by this process", ("kind",))
EVENTS_SENT = _emitter("events_sent_total", "counter", "events", "Events acknowledged by the transport", ("kind",))
EVENTS_SPOOLED = _emitter("events_spooled_total", "counter", "events", "Events written to the disk spool", ("kind",))
EVENTS_DROPPED = _emitter(
    "events_dropped_total",
    "counter",
    "events",
    "Events lost, by kind and reason",
    ("kind", "reason"),
    "after the first",
)
BILLS_DROPPED = _emitter("events_billing_dropped_total", "counter", "events", "Billing events lost; must stay 0")
EVENTS_QUEUE = _emitter("events_queue_depth", "gauge", "events", "Events in memory that are not yet sent")
EVENTS_AWAY = _emitter("events_transport_away", "gauge", "bool", "1 while the transport accepts no events")
EVENTS_ROOM = _emitter(
    "events_room_used_ratio",
    "gauge",
    "ratio",
    "Share of the buffer for undelivered events in use; at 1 events are lost",
)
SPOOL_BYTES = _emitter("events_spool_bytes", "gauge", "bytes", "Bytes in the disk spool")
SPOOL_OLDEST = _emitter("events_spool_oldest_seconds", "gauge", "seconds", "Age of the oldest spooled event; 0: none")

# --- the consumer --------------------------------------------------------------------------------------------

CONSUMED = _telemetry("telemetry_events_total", "counter", "records", "Event records inserted into the store", _PART)
POISON = _telemetry(
    "telemetry_dlq_total",
    "counter",
    "records",
    "Records that are no valid events, moved to the dead-letter queue",
    _PART,
    only="after the first",
)
EXPIRED = _telemetry(
    "telemetry_expired_events_total",
    "counter",
    "records",
    "Records that Kafka's retention deleted before they were inserted",
    _PART,
    only="after the first",
)
LAG = _telemetry(
    "telemetry_lag_events",
    "gauge",
    "records",
    "Records not yet committed; without a value while the log cannot be read",
    _PART,
)
HELD = _telemetry(
    "telemetry_held_bytes", "gauge", "bytes", "Bytes of records in memory that are not yet inserted", _PART
)
PENDING = _telemetry(
    "telemetry_pending_age_seconds",
    "gauge",
    "seconds",
    "Age of the claimed block that is not yet inserted; 0: none",
    _PART,
)
REPEATED = _telemetry(
    "telemetry_repeated_records", "gauge", "records", "Records received again after they were inserted", _PART
)
SKIPPED = _telemetry("telemetry_skipped_offsets", "gauge", "offsets", "Offsets without a record", _PART)
BLOCK_ROWS = _telemetry("telemetry_block_rows", "histogram", "rows", "Rows per inserted block", (), _ROWS)
BUILD = _telemetry(
    "telemetry_build_seconds", "histogram", "seconds", "Time to convert a block's records into rows", (), _INSERT_S
)
INSERT = _telemetry("telemetry_insert_seconds", "histogram", "seconds", "Time to insert a block", (), _INSERT_S)
CONSUME_FAILURES = _telemetry(
    "telemetry_failures_total",
    "counter",
    "tries",
    "Failed operations that were retried, by error code",
    ("code",),
    only="after the first",
)


def metrics_of(role: Role) -> tuple[Metric, ...]:
    """The role's metrics, in the table's order."""
    return tuple(metric for metric in METRICS.values() if role in metric.roles)


_HEAD = """# Metrics

Each process exports its own metrics at `/metrics` in Prometheus' text format: gateways on their port, agents and
controllers at `STREAM_GW_METRICS_PORT`, the event consumer at `STREAM_GW_TELEMETRY_PORT`. All but gateways listen on
loopback unless `STREAM_GW_METRICS_HOST` and `STREAM_GW_TELEMETRY_HOST` are set, as the Helm chart does. Gateways use
OpenMetrics, with exemplars that name traces, if the scraper asks for it. An agent with the simulated engine also
exports the engine's metrics under vLLM's names. No metric has a tenant, user or stream as label: ask ClickHouse. A
gateway names its first 64 pools; further pools share one label value.

Made by `python -m stream_fabric.process.metric_names`; a test compares.
"""


def docs_page() -> str:
    """Text of ``docs/metrics.md``."""
    out = [_HEAD]
    titles: dict[tuple[Role, ...], str] = {
        ("gateway",): "Gateway", ("agent",): "Agent", ("controller",): "Controller",
        ("gateway", "controller"): "Gateway and controller", ("gateway", "agent"): "Gateway and agent",
        _EMITTERS: "Senders of events: gateway, agent, controller", ("telemetry",): "Event consumer",
    }  # fmt: skip
    for roles, title in titles.items():
        out.append(f"\n## {title}\n\n| name | kind | labels | description |\n| --- | --- | --- | --- |\n")
        for metric in METRICS.values():
            if metric.roles == roles:
                labels = ", ".join(metric.labels)
                when = f" (only {metric.only})" if metric.only else ""
                out.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{when} |\n")
    return "".join(out)


if __name__ == "__main__":
    sys.stdout.write(docs_page())
