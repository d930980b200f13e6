"""Replicas that pools need, want and have."""

from __future__ import annotations

from dashboards.boards.queries import AGENT, IN_POOL, THERE, highest, rate
from dashboards.build import Board, Panel, Prom
from stream_fabric.process import metric_names as listed

AUTOSCALING = Board(
    "stream-gw-autoscaling",
    "stream-gw: autoscaling",
    [
        Panel(
            "Replicas: needed, wanted, present", [
                Prom(highest(listed.NEEDED, "pool", IN_POOL), "{{pool}} needed, to take requests"),
                Prom(highest(listed.PEAK, "pool", IN_POOL), "{{pool}} that usual peaks need"),
                Prom(highest(listed.DESIRED, "pool", IN_POOL), "{{pool}} wanted"),
                Prom(f"sum by (pool) ({highest(listed.POOL_REPLICAS, 'pool, state', THERE)})", "{{pool}} there"),
                Prom(highest(listed.MAX_REPLICAS, "pool", IN_POOL), "{{pool}} at most"),
            ], about="Declared pools only. The leading controller reports what is needed.",
        ),
        Panel(
            "Replicas by state", [Prom(highest(listed.POOL_REPLICAS, "pool, state", IN_POOL), "{{pool}} {{state}}")],
        ),
        Panel(
            "Wanted replicas by state", [Prom(highest(listed.WANTED, "pool, state", IN_POOL), "{{pool}} {{state}}")],
            about="Declared pools only.",
        ),
        Panel(
            "Time short of replicas", [
                Prom(highest(listed.SHORT, "pool", IN_POOL), "{{pool}}"),
                Prom(highest(listed.COLD_START, "pool", IN_POOL), "{{pool}} cold start"),
            ], "s",
        ),
        Panel(
            "Slots in use", [Prom(highest(listed.UTILISATION, "pool", IN_POOL), "{{pool}}")], "percentunit",
            about="Ready replicas only.",
        ),
        Panel(
            "Time to first token, 99th percentile, and objective", [
                Prom(highest(listed.POOL_TTFT, "pool", IN_POOL), "{{pool}}"),
                Prom(highest(listed.TTFT_OBJECTIVE, "pool", IN_POOL), "{{pool}}: objective"),
            ], "s", about="Last minute, counted from placement. 0: too few requests.",
        ),
        Panel(
            "Burn rate of the pool's TTFT objective",
            [Prom(highest(listed.BURN, "pool, window", IN_POOL), "{{pool}} {{window}}")],
            about="1: the error budget is used at the allowed rate.",
        ),
        Panel(
            "Backlog and time until idle", [
                Prom(highest(listed.BACKLOG, "pool", IN_POOL), "{{pool}} until all but batch have begun"),
                Prom(highest(listed.TO_FREE, "pool", IN_POOL), "{{pool}} until all requests have ended"),
            ], "s",
        ),
        Panel(
            "Share of new requests rejected for overload",
            [Prom(highest(listed.SHED_LEVEL, "pool, tier", IN_POOL), "{{pool}} {{tier}}")], "percentunit",
            about="The share at the last look. The panel of rejections counts what was rejected.",
        ),
        Panel(
            "Rejections and overflow", [
                Prom(rate(listed.POOL_SHEDS, "pool, tier", IN_POOL), "{{pool}} {{tier}} rejected"),
                Prom(rate(listed.POOL_SHIFTS, "pool", IN_POOL), "{{pool}} overflow to adjacent pools"),
                Prom(rate(listed.FALLBACKS, "pool", IN_POOL), "{{pool}} answered by a smaller model"),
            ], "reqps", only="for declared pools, after an overload",
        ),
        Panel(
            "Batch requests at batch hosts", [Prom(rate(listed.BATCH_HOSTED, "pool", IN_POOL), "{{pool}}")],
            "reqps", only="for pools with batch_pools",
        ),
        Panel(
            "Forecast arrivals, relative to now", [Prom(highest(listed.GROWTH, "pool", IN_POOL), "{{pool}}")],
            about="One cold start ahead.",
        ),
        Panel(
            "Age of the traffic model", [Prom(highest(listed.PROFILE_AGE, "pool", IN_POOL), "{{pool}}")],
            "s", only="where controllers query stream-gw telemetry",
        ),
        Panel(
            "Scaling decisions", [
                Prom(f"sum by (pool, kind) (increase({listed.DECISIONS.name}{IN_POOL}[5m]))", "{{pool}} {{kind}}"),
            ], about="Per five minutes. stream-gw pools and the fleet events of kind scale give the reasons.",
        ),
        Panel("Leading controller", [Prom(f"max by (instance) ({listed.LEADS.name})", AGENT)]),
        Panel(
            "KEDA requests over gRPC", [
                Prom(rate(listed.SCALER_CALLS, "call"), "{{call}}"),
                Prom(rate(listed.SCALER_REFUSALS, "call, code"), "refused: {{call}} {{code}}"),
                Prom(f"sum({listed.SCALER_STREAMS.name})", "streams"),
            ], "ops", only="where STREAM_GW_SCALER_PORT is set",
        ),
        Panel(
            "Replicas that running and waiting requests need", [
                Prom(highest(listed.DEMAND, "pool", IN_POOL), "{{pool}} needs"),
                Prom(highest(listed.POOL_REPLICAS, "pool", '{pool=~"$pool",state="ready"}'), "{{pool}} has"),
            ], about="All pools, also those that are not declared.",
        ),
        Panel("Running requests", [Prom(highest(listed.POOL_RUNNING, "pool", IN_POOL), "{{pool}}")]),
        Panel(
            "Waiting requests",
            [Prom(f"sum by (pool) ({highest(listed.QUEUE_DEPTH, 'pool, priority', IN_POOL)})", "{{pool}}")],
        ),
        Panel("Longest wait", [Prom(highest(listed.QUEUE_AGE, "pool", IN_POOL), "{{pool}}")], "s"),
        Panel(
            "Replicas drained as stuck", [Prom(f"sum(increase({listed.STUCK.name}[1h]))", "per hour")], kind="number",
        ),
        Panel(
            "Failed looks at the pools", [Prom(rate(listed.LOOK_FAILURES), "per second")], kind="number",
        ),
    ],
    by_pool=True,
)  # fmt: skip
