"""Streams, readers, and where their time goes."""

from __future__ import annotations

from dashboards.boards.queries import AGENT, rate
from dashboards.build import Board, Panel, Prom, Sql
from stream_fabric.process import metric_names as listed

_AT = "at >= $__fromTime AND at <= $__toTime"
_MINUTES = "minute >= toStartOfMinute($__fromTime) AND minute <= $__toTime"
_PARTS = (
    "gateway", "admission", "pool_queue", "engine_queue", "prefill", "decode", "fabric", "client_stall", "recovery",
    "residual",
)  # fmt: skip

STREAMS = Board(
    "stream-gw-streams",
    "stream-gw: streams",
    [
        Panel("Open streams", [Prom(f"sum by (instance) ({listed.OPEN_STREAMS.name})", AGENT)]),
        Panel("Open WebSockets", [Prom(f"sum by (instance) ({listed.OPEN_SOCKETS.name})", AGENT)]),
        Panel("Readers behind their stream", [Prom(f"sum by (instance) ({listed.LAGGING.name})", AGENT)]),
        Panel("Resumes", [Prom(rate(listed.RESUMES), "resumes")], "ops"),
        Panel("Readers closed because they did not read", [Prom(rate(listed.STALLED), "closed")], "ops"),
        Panel("Cancellations", [Prom(rate(listed.CANCELS, "result"), "{{result}}")], "ops"),
        Panel(
            "Mean time by phase", Sql(
                "SELECT toStartOfMinute(at) AS time, "
                + ", ".join(f"avg({part}_us) / 1e6 AS {part}" for part in _PARTS)
                + f" FROM requests WHERE {_AT} AND role = 'created' GROUP BY time ORDER BY time"
            ), "s",
        ),
        Panel(
            "Time to first token, 99th percentile", Sql(
                "SELECT minute AS time, pool, "
                "arrayElement(quantilesTDigestWeightedIfMerge(0.5, 0.9, 0.95, 0.99)(ttft_q), 4) / 1e6 AS p99 "
                f"FROM requests_minute WHERE {_MINUTES} AND role = 'created' GROUP BY time, pool ORDER BY time"
            ), "s",
        ),
        Panel(
            "Requests with the longest time to first token", Sql(
                "SELECT at, stream, tenant, model, replica, ended, wall_us / 1e6 AS wall_s, ttft_us / 1e6 AS ttft_s, "
                "pool_queue_us / 1e6 AS pool_queue_s, engine_queue_us / 1e6 AS engine_queue_s, prefill_us / 1e6 AS "
                "prefill_s, decode_us / 1e6 AS decode_s, client_stall_us / 1e6 AS client_stall_s "
                f"FROM requests WHERE {_AT} ORDER BY ttft_us DESC LIMIT 50"
            ), kind="table",
        ),
    ],
)  # fmt: skip
