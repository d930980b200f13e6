"""Streams, readers, and where their time goes."""

from __future__ import annotations

from dashboards.boards.queries import AGENT, quantile, rate
from dashboards.build import Board, Panel, Prom, Sql
from stream_fabric.process import metric_names as listed

_AT = "at >= $__fromTime AND at <= $__toTime"
_MINUTES = "minute >= toStartOfMinute($__fromTime) AND minute <= $__toTime"
_PARTS = (
    "gateway", "admission", "pool_queue", "engine_queue", "prefill", "decode", "fabric", "client_stall", "recovery",
    "check", "steer", "residual",
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
            "Replies checked against their JSON schema",
            [Prom(rate(listed.STRUCTURED_REPLIES, "result"), "{{result}}")], "ops",
            about="invalid: the answer does not fit. unchecked: the check took too long, or the schema has no use.",
            only="after the first check",
        ),
        Panel(
            "Replies made again for their JSON schema", [Prom(rate(listed.STRUCTURED_REPAIRS), "repairs")], "ops",
            about="Each costs the engine a further reply.", only="after the first repair",
        ),
        Panel(
            "Replies that do not fit their JSON schema",
            [Prom(
                f'sum by (pool) (rate({listed.STRUCTURED_REPLIES.name}{{result="invalid"}}[5m])) / '
                f"sum by (pool) (rate({listed.STRUCTURED_REPLIES.name}[5m]))", "{{pool}}",
            )], "percentunit", about="After all repairs.", only="after the first check",
        ),
        Panel(
            "Inputs of running streams, by result", [Prom(rate(listed.INPUTS, "result"), "{{result}}")], "ops",
            about="At the gateways. terminal: the answer had ended. Others are codes of errors.",
        ),
        Panel(
            "Inputs that replicas applied or refused", [Prom(rate(listed.INPUTS_ANSWERED, "result"), "{{result}}")],
            "ops", about="refused: the answer takes none, for example because it calls a tool.",
        ),
        Panel(
            "Time from an input to the next answer",
            [Prom(quantile(listed.INPUT_WAIT, 0.99), "p99 until applied"),
             Prom(quantile(listed.STEERED_FIRST_TOKEN, 0.5), "p50 from there to the first token"),
             Prom(quantile(listed.STEERED_FIRST_TOKEN, 0.99), "p99 from there to the first token")], "s",
            about="The second part holds the abort and the prefill, which finds most of its prompt cached.",
            only="once an input came",
        ),
        Panel(
            "Stored responses", [Prom(rate(listed.RESPONSES_STORED, "outcome"), "{{outcome}}")], "ops",
            about="saved: in the database. deferred: the database refused, and it is tried again.",
            only="once a response was stored",
        ),
        Panel(
            "Stored responses that wait for the database", [Prom(f"max({listed.RESPONSES_UNSAVED.name})", "responses")],
            about="Redis keeps each for a day.",
        ),
        Panel(
            "Readers with an error of the platform, by dialect",
            [Prom(rate(listed.READS_BY_DIALECT, "dialect", '{fault="platform"}'), "{{dialect}}")], "ops",
            only="while requests fail",
        ),
        Panel(
            "Readers with an error of the client, by dialect",
            [Prom(rate(listed.READS_BY_DIALECT, "dialect", '{fault="client"}'), "{{dialect}}")], "ops",
            about="A rise in one dialect often is a new release of its SDK.",
        ),
        Panel(
            "Frames of a newer release, passed over", [Prom(rate(listed.FRAMES_PASSED_OVER), "frames")], "ops",
            about="Above 0 only while two releases run side by side.",
        ),
        Panel(
            "Mean time by phase", Sql(
                "SELECT toStartOfMinute(at) AS time, "
                + ", ".join(f"sum({part}_us * weight) / sum(weight) / 1e6 AS {part}" for part in _PARTS)
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
