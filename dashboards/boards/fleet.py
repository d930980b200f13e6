"""The whole platform on one page."""

from __future__ import annotations

from dashboards.boards.queries import highest, quantiles, rate
from dashboards.build import Board, Panel, Prom
from stream_fabric.process import metric_names as listed

FLEET = Board(
    "stream-gw-fleet",
    "stream-gw: fleet",
    [
        Panel("Requests", [Prom(rate(listed.REQUESTS, "status"), "{{status}}")], "reqps"),
        Panel("Readers by outcome", [Prom(rate(listed.READS, "ended"), "{{ended}}")], "ops"),
        Panel(
            "Failed readers by cause", [Prom(rate(listed.READS, "fault"), "{{fault}}")], "ops",
            about="Readers by the side at fault. none: the reader got everything.",
        ),
        Panel("Time to first token", quantiles(listed.TTFT), "s"),
        Panel("Time between tokens", quantiles(listed.ITL), "s"),
        Panel("Request duration", quantiles(listed.REQUEST_DURATION), "s"),
        Panel("Output tokens sent to readers", [Prom(rate(listed.TOKENS_STREAMED, "pool"), "{{pool}}")], "ops"),
        Panel("Output tokens generated", [Prom(rate(listed.TOKENS_GENERATED, "pool"), "{{pool}}")], "ops"),
        Panel("Prompt tokens", [Prom(rate(listed.TOKENS_PROMPT, "pool"), "{{pool}}")], "ops"),
        Panel("Replicas", [Prom(f"sum by (state) ({highest(listed.POOL_REPLICAS, 'pool, state')})", "{{state}}")]),
        Panel("Requests rejected, replicas full", [Prom(rate(listed.SHEDS, "layer"), "{{layer}}")], "reqps"),
        Panel(
            "Requests refused by a plan's limit",
            [Prom(rate(listed.LIMITED, "subject, limit"), "{{subject}} {{limit}}")], "reqps",
            about="By what the limit applies to, and the kind of limit. No sign of overload.",
            only="after the first refusal",
        ),
        Panel("Replicas whose lease expired", [Prom(f"sum(increase({listed.DEAD.name}[1h]))", "per hour")]),
    ],
)  # fmt: skip
