"""What Grafana's dashboards show. Names of metrics come from the list, so a wrong one is no dashboard. A test runs each
query."""

from __future__ import annotations

from pathlib import Path

from dashboards.build import Board, Panel, Prom, Sql, render
from dashboards.objectives import DAYS, OBJECTIVES, error_ratio
from stream_fabric import metrics as listed
from stream_fabric.metrics import Metric

FOLDER = Path(__file__).parent / "grafana"
_RATE = "$__rate_interval"


def _rate(metric: Metric, by: str = "", where: str = "") -> str:
    summed = f"sum by ({by})" if by else "sum"
    return f"{summed} (rate({metric.name}{where}[{_RATE}]))"


def _quantile(metric: Metric, share: float, by: str = "", where: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric.name}_bucket{where}[{_RATE}])))"


def _quantiles(metric: Metric, where: str = "") -> list[Prom]:
    return [
        Prom(_quantile(metric, share, "", where), name) for share, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    ]


def _max(metric: Metric, by: str, where: str = "") -> str:
    """Of what several processes say of the same thing."""
    return f"max by ({by}) ({metric.name}{where})"


_IN_POOL = '{pool=~"$pool"}'
_THERE = '{pool=~"$pool",state!="draining"}'
"""Who drains is as good as gone."""
_AGENT = "{{instance}}"

FLEET = Board(
    "stream-gw-fleet",
    "stream-gw: fleet",
    [
        Panel("Requests", [Prom(_rate(listed.REQUESTS, "status"), "{{status}}")], "reqps"),
        Panel("Readers by how it ended", [Prom(_rate(listed.READS, "ended"), "{{ended}}")], "ops"),
        Panel(
            "Whose fault", [Prom(_rate(listed.READS, "fault"), "{{fault}}")], "ops",
            about="Of readers that did not get all they asked for; none: they did.",
        ),
        Panel("Time to the first token", _quantiles(listed.TTFT), "s"),
        Panel("Between tokens", _quantiles(listed.ITL), "s"),
        Panel("Whole requests", _quantiles(listed.REQUEST_DURATION), "s"),
        Panel("Tokens shown", [Prom(_rate(listed.TOKENS_STREAMED, "pool"), "{{pool}}")], "ops"),
        Panel("Tokens made", [Prom(_rate(listed.TOKENS_GENERATED, "pool"), "{{pool}}")], "ops"),
        Panel("Prompt tokens", [Prom(_rate(listed.TOKENS_PROMPT, "pool"), "{{pool}}")], "ops"),
        Panel("Replicas", [Prom(f"sum by (state) ({_max(listed.POOL_REPLICAS, 'pool, state')})", "{{state}}")]),
        Panel("Turned away for want of room", [Prom(_rate(listed.SHEDS, "layer"), "{{layer}}")], "reqps"),
        Panel("Replicas that ended without leaving", [Prom(f"sum(increase({listed.DEAD.name}[1h]))", "in an hour")]),
    ],
)  # fmt: skip

POOL = Board(
    "stream-gw-pool",
    "stream-gw: pool",
    [
        Panel("Ready", [Prom(f"min by (instance) ({listed.REPLICA_READY.name}{_IN_POOL})", _AGENT)]),
        Panel(
            "Running", [Prom(f"sum by (instance) ({listed.RUNNING_SEQS.name}{_IN_POOL})", _AGENT)],
            about="Streams in flight on each agent.",
        ),
        Panel("Waiting in the engine", [Prom(f"sum by (instance) ({listed.WAITING_SEQS.name}{_IN_POOL})", _AGENT)]),
        Panel(
            "Batch filled",
            [Prom(f"{listed.BATCH_SIZE.name}{_IN_POOL} / {listed.BATCH_SLOTS.name}{_IN_POOL}", _AGENT)], "percentunit",
        ),
        Panel(
            "KV cache in use",
            [Prom(f"{listed.KV_USED_TOKENS.name}{_IN_POOL} / {listed.KV_TOTAL_TOKENS.name}{_IN_POOL}", _AGENT)],
            "percentunit",
        ),
        Panel(
            "KV cache", [
                Prom(f"sum({listed.KV_USED_BYTES.name}{_IN_POOL})", "in use"),
                Prom(f"sum({listed.KV_TOTAL_BYTES.name}{_IN_POOL})", "in all"),
            ], "bytes", only="where STREAM_GW_KV_BYTES_PER_TOKEN is set",
        ),
        Panel(
            "Prompt tokens found in the cache", [
                Prom(
                    _rate(listed.PREFIX_HITS, "pool", _IN_POOL)
                    + " / " + _rate(listed.PREFIX_QUERIES, "pool", _IN_POOL), "{{pool}}",
                ),
            ], "percentunit",
        ),
        Panel("Between tokens", _quantiles(listed.ITL, _IN_POOL), "s"),
        Panel("Time to the first token", _quantiles(listed.TTFT, _IN_POOL), "s"),
        Panel("Wait in the engine", _quantiles(listed.ENGINE_QUEUE, _IN_POOL), "s"),
        Panel("The prompt's computation", _quantiles(listed.PREFILL, _IN_POOL), "s"),
        Panel("Wait before it, 99th percentile", [Prom(f"{listed.QUEUE_P99.name}{_IN_POOL}", _AGENT)], "s"),
        Panel(
            "Queue", [Prom(_max(listed.QUEUE_DEPTH, "pool, priority", _IN_POOL), "{{pool}} {{priority}}")],
        ),
        Panel(
            "Age of the queue",
            [Prom(_max(listed.QUEUE_AGE, "pool, priority", _IN_POOL), "{{pool}} {{priority}}")], "s",
        ),
        Panel("Attempts", [Prom(_rate(listed.ATTEMPTS, "ended", _IN_POOL), "{{ended}}")], "ops"),
        Panel(
            "Breaker", [Prom(f"max by (instance) ({listed.BREAKER.name}{_IN_POOL})", _AGENT)],
            about="0 closed, 1 half open, 2 open.",
        ),
        Panel(
            "GPU busy", [Prom(f"{listed.GPU_UTILIZATION.name}{_IN_POOL}", "{{instance}} {{gpu}}")], "percentunit",
            only="on a host with nvidia-smi",
        ),
        Panel(
            "GPU memory", [Prom(f"{listed.GPU_MEMORY.name}{_IN_POOL}", "{{instance}} {{gpu}}")], "percentunit",
            only="on a host with nvidia-smi",
        ),
    ],
    by_pool=True,
)  # fmt: skip

_HOURS = "hour >= toStartOfHour($__fromTime) AND hour <= $__toTime"
_AT = "at >= $__fromTime AND at <= $__toTime"
_MINUTES = "minute >= toStartOfMinute($__fromTime) AND minute <= $__toTime"

TENANTS = Board(
    "stream-gw-tenants",
    "stream-gw: tenants and cost",
    [
        Panel(
            "Cost", Sql(
                "SELECT hour AS time, tenant, sum(price_micro) / 1e6 AS cost FROM usage_hour "
                f"WHERE {_HOURS} GROUP BY time, tenant ORDER BY time"
            ), "currencyUSD", about="In the currency of the keys file's prices.",
        ),
        Panel(
            "Output tokens", Sql(
                "SELECT hour AS time, tenant, sum(output_tokens) AS tokens FROM usage_hour "
                f"WHERE {_HOURS} GROUP BY time, tenant ORDER BY time"
            ),
        ),
        Panel(
            "Requests", Sql(
                "SELECT hour AS time, tenant, sum(requests) AS requests FROM usage_hour "
                f"WHERE {_HOURS} GROUP BY time, tenant ORDER BY time"
            ),
        ),
        Panel(
            "The bill by tenant and model", Sql(
                "SELECT tenant, model, sum(requests) AS requests, sum(prompt_tokens) AS prompt, "
                "sum(cached_tokens) AS cached, sum(output_tokens) AS output, sum(reasoning_tokens) AS reasoning, "
                f"sum(price_micro) / 1e6 AS cost FROM usage_hour WHERE {_HOURS} "
                "GROUP BY tenant, model ORDER BY cost DESC, output DESC LIMIT 200"
            ), kind="table",
        ),
        Panel(
            "How tenants are served", Sql(
                "SELECT tenant, sum(weight) AS requests, "
                "round(sumIf(weight, ended IN ('failed', 'refused')) / requests, 4) AS failed_share, "
                "round(quantileIf(0.5)(ttft_us, ttft_us > 0) / 1000, 1) AS ttft_p50_ms, "
                "round(quantileIf(0.99)(ttft_us, ttft_us > 0) / 1000, 1) AS ttft_p99_ms "
                f"FROM requests WHERE {_AT} GROUP BY tenant ORDER BY requests DESC LIMIT 200"
            ), kind="table",
        ),
    ],
)  # fmt: skip

_PARTS = (
    "gateway", "admission", "pool_queue", "engine_queue", "prefill", "decode", "fabric", "client_stall", "recovery",
    "residual",
)  # fmt: skip

STREAMS = Board(
    "stream-gw-streams",
    "stream-gw: streams",
    [
        Panel("Streams with a reader", [Prom(f"sum by (instance) ({listed.OPEN_STREAMS.name})", _AGENT)]),
        Panel("WebSockets", [Prom(f"sum by (instance) ({listed.OPEN_SOCKETS.name})", _AGENT)]),
        Panel("Readers that lag", [Prom(f"sum by (instance) ({listed.LAGGING.name})", _AGENT)]),
        Panel("Resumes", [Prom(_rate(listed.RESUMES), "resumes")], "ops"),
        Panel("Readers that took nothing", [Prom(_rate(listed.STALLED), "closed")], "ops"),
        Panel("Cancels", [Prom(_rate(listed.CANCELS, "result"), "{{result}}")], "ops"),
        Panel(
            "Where the time goes", Sql(
                "SELECT toStartOfMinute(at) AS time, "
                + ", ".join(f"avg({part}_us) / 1e6 AS {part}" for part in _PARTS)
                + f" FROM requests WHERE {_AT} AND role = 'created' GROUP BY time ORDER BY time"
            ), "s",
        ),
        Panel(
            "Time to the first token, 99th percentile", Sql(
                "SELECT minute AS time, pool, "
                "arrayElement(quantilesTDigestWeightedIfMerge(0.5, 0.9, 0.95, 0.99)(ttft_q), 4) / 1e6 AS p99 "
                f"FROM requests_minute WHERE {_MINUTES} AND role = 'created' GROUP BY time, pool ORDER BY time"
            ), "s",
        ),
        Panel(
            "The slowest", Sql(
                "SELECT at, stream, tenant, model, replica, ended, wall_us / 1e6 AS wall_s, ttft_us / 1e6 AS ttft_s, "
                "pool_queue_us / 1e6 AS pool_queue_s, engine_queue_us / 1e6 AS engine_queue_s, prefill_us / 1e6 AS "
                "prefill_s, decode_us / 1e6 AS decode_s, client_stall_us / 1e6 AS client_stall_s "
                f"FROM requests WHERE {_AT} ORDER BY ttft_us DESC LIMIT 50"
            ), kind="table",
        ),
    ],
)  # fmt: skip

AUTOSCALING = Board(
    "stream-gw-autoscaling",
    "stream-gw: autoscaling",
    [
        Panel(
            "Replicas in all: needed, wanted, there", [
                Prom(_max(listed.NEEDED, "pool", _IN_POOL), "{{pool}} needed, to take requests"),
                Prom(_max(listed.DESIRED, "pool", _IN_POOL), "{{pool}} wanted"),
                Prom(f"sum by (pool) ({_max(listed.POOL_REPLICAS, 'pool, state', _THERE)})", "{{pool}} there"),
                Prom(_max(listed.MAX_REPLICAS, "pool", _IN_POOL), "{{pool}} at most"),
            ], about="Of declared pools; what is needed, from the controller that leads.",
        ),
        Panel(
            "Replicas by state", [Prom(_max(listed.POOL_REPLICAS, "pool, state", _IN_POOL), "{{pool}} {{state}}")],
        ),
        Panel(
            "Wanted by state", [Prom(_max(listed.WANTED, "pool, state", _IN_POOL), "{{pool}} {{state}}")],
            about="Of declared pools.",
        ),
        Panel(
            "Short, and none comes", [
                Prom(_max(listed.SHORT, "pool", _IN_POOL), "{{pool}}"),
                Prom(_max(listed.COLD_START, "pool", _IN_POOL), "{{pool}}: a cold start"),
            ], "s",
        ),
        Panel(
            "Slots in use", [Prom(_max(listed.UTILISATION, "pool", _IN_POOL), "{{pool}}")], "percentunit",
            about="Of the replicas that take requests.",
        ),
        Panel(
            "Time to the first token, 99th percentile, and its objective", [
                Prom(_max(listed.POOL_TTFT, "pool", _IN_POOL), "{{pool}}"),
                Prom(_max(listed.TTFT_OBJECTIVE, "pool", _IN_POOL), "{{pool}}: objective"),
            ], "s", about="Of the last minute, from placement; 0: too few to tell.",
        ),
        Panel(
            "Slow first tokens, to those that may be",
            [Prom(_max(listed.BURN, "pool, window", _IN_POOL), "{{pool}} {{window}}")],
            about="1: as many as slo_share lets be. Of each pool's own objective.",
        ),
        Panel(
            "Backlog and time to be free", [
                Prom(_max(listed.BACKLOG, "pool", _IN_POOL), "{{pool}}: until all has begun"),
                Prom(_max(listed.TO_FREE, "pool", _IN_POOL), "{{pool}}: until all is done"),
            ], "s",
        ),
        Panel(
            "Refused for the work ahead of them, of new requests",
            [Prom(_max(listed.SHED_LEVEL, "pool, tier", _IN_POOL), "{{pool}} {{tier}}")], "percentunit",
            about="As it would be at this look; what was refused, and what went to adjacent pools, is beside it.",
        ),
        Panel(
            "Refused and given away", [
                Prom(_rate(listed.POOL_SHEDS, "pool, tier", _IN_POOL), "{{pool}} {{tier}} refused"),
                Prom(_rate(listed.POOL_SHIFTS, "pool", _IN_POOL), "{{pool}} to adjacent pools"),
            ], "reqps", only="of pools that are declared, once there was a surge",
        ),
        Panel(
            "Arrivals forecast, to those of now", [Prom(_max(listed.GROWTH, "pool", _IN_POOL), "{{pool}}")],
            about="A cold start from now.",
        ),
        Panel(
            "Age of what was learned from the traces", [Prom(_max(listed.PROFILE_AGE, "pool", _IN_POOL), "{{pool}}")],
            "s", only="where controllers ask stream-gw telemetry",
        ),
        Panel(
            "Decisions", [
                Prom(f"sum by (pool, kind) (increase({listed.DECISIONS.name}{_IN_POOL}[5m]))", "{{pool}} {{kind}}"),
            ], about="In five minutes. Why: stream-gw pools, and the events of kind scale.",
        ),
        Panel("Who leads", [Prom(f"max by (instance) ({listed.LEADS.name})", _AGENT)]),
        Panel(
            "KEDA by gRPC", [
                Prom(_rate(listed.SCALER_CALLS, "call"), "asked: {{call}}"),
                Prom(_rate(listed.SCALER_REFUSALS, "call, code"), "refused: {{call}} {{code}}"),
                Prom(f"sum({listed.SCALER_STREAMS.name})", "streams"),
            ], "ops", only="where STREAM_GW_SCALER_PORT is set",
        ),
        Panel(
            "Demand of what runs and waits", [
                Prom(_max(listed.DEMAND, "pool", _IN_POOL), "{{pool}} wants"),
                Prom(_max(listed.POOL_REPLICAS, "pool", '{pool=~"$pool",state="ready"}'), "{{pool}} has"),
            ], about="Of pools that nobody declares, too.",
        ),
        Panel("What runs", [Prom(_max(listed.POOL_RUNNING, "pool", _IN_POOL), "{{pool}}")]),
        Panel(
            "What waits",
            [Prom(f"sum by (pool) ({_max(listed.QUEUE_DEPTH, 'pool, priority', _IN_POOL)})", "{{pool}}")],
        ),
        Panel("Oldest that waits", [Prom(_max(listed.QUEUE_AGE, "pool", _IN_POOL), "{{pool}}")], "s"),
        Panel(
            "Drained for being stuck", [Prom(f"sum(increase({listed.STUCK.name}[1h]))", "in an hour")], kind="number",
        ),
        Panel(
            "Looks at the pools that failed", [Prom(_rate(listed.LOOK_FAILURES), "a second")], kind="number",
        ),
    ],
    by_pool=True,
)  # fmt: skip

TELEMETRY = Board(
    "stream-gw-telemetry",
    "stream-gw: telemetry's health",
    [
        Panel(
            "Events", [
                Prom(_rate(listed.EVENTS_EMITTED, "kind"), "told: {{kind}}"),
                Prom(_rate(listed.EVENTS_SENT, "kind"), "delivered: {{kind}}"),
            ], "ops",
        ),
        Panel(
            "Events lost", [Prom(_rate(listed.EVENTS_DROPPED, "kind, reason"), "{{kind}} {{reason}}")], "ops",
            only="once an event is lost",
        ),
        Panel("Billing facts lost", [Prom(f"sum({listed.BILLS_DROPPED.name})", "ever")], kind="number"),
        Panel("Waiting in memory", [Prom(f"sum by (instance) ({listed.EVENTS_QUEUE.name})", _AGENT)]),
        Panel(
            "On disk", [
                Prom(f"sum by (instance) ({listed.SPOOL_BYTES.name})", _AGENT),
                Prom(f"sum(rate({listed.EVENTS_SPOOLED.name}[{_RATE}]))", "events a second"),
            ],
        ),
        Panel("Oldest on disk", [Prom(f"max by (instance) ({listed.SPOOL_OLDEST.name})", _AGENT)], "s"),
        Panel("Not delivered", [Prom(f"max by (instance) ({listed.EVENTS_AWAY.name})", _AGENT)]),
        Panel("Room for them taken", [Prom(f"max by (instance) ({listed.EVENTS_ROOM.name})", _AGENT)], "percentunit"),
        Panel("Consumed", [Prom(_rate(listed.CONSUMED, "topic"), "{{topic}}")], "ops"),
        Panel("Behind", [Prom(f"sum by (topic) ({listed.LAG.name})", "{{topic}}")]),
        Panel("Inserting a block", _quantiles(listed.INSERT), "s"),
        Panel("Making a block's rows", _quantiles(listed.BUILD), "s"),
        Panel("Rows of a block", _quantiles(listed.BLOCK_ROWS)),
        Panel("Held in memory", [Prom(f"sum by (instance) ({listed.HELD.name})", _AGENT)], "bytes"),
        Panel("A block waits", [Prom(_max(listed.PENDING, "topic, partition"), "{{topic}} {{partition}}")], "s"),
        Panel(
            "Put aside", [Prom(_rate(listed.POISON, "topic"), "{{topic}}")], "ops",
            only="once a record is no event",
        ),
        Panel(
            "Tries that failed", [Prom(_rate(listed.CONSUME_FAILURES, "code"), "{{code}}")], "ops",
            only="once one has failed",
        ),
        Panel(
            "Records that came again, and offsets that none had", [
                Prom(f"sum({listed.REPEATED.name})", "again"), Prom(f"sum({listed.SKIPPED.name})", "none"),
            ],
        ),
        Panel(
            "Traces as spans", [
                Prom(_rate(listed.SPANS_SENT), "sent"), Prom(_rate(listed.SPANS_DROPPED), "dropped"),
            ], "ops", about="Where STREAM_GW_OTLP_ENDPOINT is set.",
        ),
        Panel("vLLM's metrics that are missing", [Prom(f"max by (instance) ({listed.METRICS_MISSING.name})", _AGENT)]),
        Panel(
            "How far each partition is", Sql(
                "SELECT topic, partition, argMax(next, inserted_at) AS next, max(ingest_state.inserted_at) AS at "
                "FROM ingest_state GROUP BY topic, partition ORDER BY topic, partition"
            ), kind="table",
        ),
    ],
)  # fmt: skip

SLO = Board(
    "stream-gw-slo",
    "stream-gw: objectives",
    [
        panel
        for objective in OBJECTIVES
        for panel in (
            Panel(
                f"{objective.slo}: not as promised",
                [
                    Prom(f'{error_ratio(window)}{{slo="{objective.slo}",pool=~"$pool"}}', f"{{{{pool}}}} {window}")
                    for window in ("5m", "1h", "6h")
                ],
                "percentunit",
                about=f"Promised: {objective.about}, {objective.target * 100:g} % of the time.",
            ),
            Panel(
                f"{objective.slo}: the budget burns",
                [
                    Prom(
                        f'{error_ratio("1h")}{{slo="{objective.slo}",pool=~"$pool"}} / {objective.budget:g}',
                        "{{pool}} 1h",
                    ),
                    Prom(
                        f'{error_ratio("6h")}{{slo="{objective.slo}",pool=~"$pool"}} / {objective.budget:g}',
                        "{{pool}} 6h",
                    ),
                ],
                about="1: as fast as it may. At 14.4 over an hour, and at 6 over six, somebody is called.",
            ),
            Panel(
                f"{objective.slo}: left of the budget",
                [
                    Prom(
                        f'1 - avg_over_time({error_ratio("1h")}{{slo="{objective.slo}",pool=~"$pool"}}[{DAYS}d]) '
                        f"/ {objective.budget:g}",
                        "{{pool}}",
                    )
                ],
                "percentunit",
                "number",
                f"Of {DAYS} days, each hour counted alike.",
            ),
        )
    ],
    by_pool=True,
)

BOARDS = (FLEET, POOL, TENANTS, STREAMS, AUTOSCALING, TELEMETRY, SLO)


def files() -> dict[str, str]:
    """Name → contents."""
    return {f"{board.uid}.json": render(board) for board in BOARDS}
