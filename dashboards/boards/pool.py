"""One pool: its replicas, engines and queue."""

from __future__ import annotations

from dashboards.boards.queries import AGENT, IN_POOL, highest, quantiles, rate
from dashboards.build import Board, Panel, Prom
from stream_fabric.process import metric_names as listed

POOL = Board(
    "stream-gw-pool",
    "stream-gw: pool",
    [
        Panel("Replica ready", [Prom(f"min by (instance) ({listed.REPLICA_READY.name}{IN_POOL})", AGENT)]),
        Panel(
            "Running streams", [Prom(f"sum by (instance) ({listed.RUNNING_SEQS.name}{IN_POOL})", AGENT)],
            about="Streams in flight on each agent.",
        ),
        Panel("Waiting in the engine", [Prom(f"sum by (instance) ({listed.WAITING_SEQS.name}{IN_POOL})", AGENT)]),
        Panel(
            "Batch slots in use",
            [Prom(f"{listed.BATCH_SIZE.name}{IN_POOL} / {listed.BATCH_SLOTS.name}{IN_POOL}", AGENT)], "percentunit",
        ),
        Panel(
            "KV cache in use",
            [Prom(f"{listed.KV_USED_TOKENS.name}{IN_POOL} / {listed.KV_TOTAL_TOKENS.name}{IN_POOL}", AGENT)],
            "percentunit",
        ),
        Panel(
            "KV cache size", [
                Prom(f"sum({listed.KV_USED_BYTES.name}{IN_POOL})", "in use"),
                Prom(f"sum({listed.KV_TOTAL_BYTES.name}{IN_POOL})", "total"),
            ], "bytes", only="where STREAM_GW_KV_BYTES_PER_TOKEN is set",
        ),
        Panel(
            "KV cache hit rate", [
                Prom(
                    rate(listed.PREFIX_HITS, "pool", IN_POOL)
                    + " / " + rate(listed.PREFIX_QUERIES, "pool", IN_POOL), "{{pool}}",
                ),
            ], "percentunit",
        ),
        Panel("Time between tokens", quantiles(listed.ITL, IN_POOL), "s"),
        Panel("Time to first token", quantiles(listed.TTFT, IN_POOL), "s"),
        Panel("Engine queue time", quantiles(listed.ENGINE_QUEUE, IN_POOL), "s"),
        Panel("Prefill time", quantiles(listed.PREFILL, IN_POOL), "s"),
        Panel("Engine queue time, 99th percentile", [Prom(f"{listed.QUEUE_P99.name}{IN_POOL}", AGENT)], "s"),
        Panel(
            "Queue length", [Prom(highest(listed.QUEUE_DEPTH, "pool, priority", IN_POOL), "{{pool}} {{priority}}")],
        ),
        Panel(
            "Longest wait in the queue",
            [Prom(highest(listed.QUEUE_AGE, "pool, priority", IN_POOL), "{{pool}} {{priority}}")], "s",
        ),
        Panel("Attempts by outcome", [Prom(rate(listed.ATTEMPTS, "ended", IN_POOL), "{{ended}}")], "ops"),
        Panel(
            "Circuit breaker", [Prom(f"max by (instance) ({listed.BREAKER.name}{IN_POOL})", AGENT)],
            about="0 closed, 1 half open, 2 open.",
        ),
        Panel(
            "GPU utilisation", [Prom(f"{listed.GPU_UTILIZATION.name}{IN_POOL}", "{{instance}} {{gpu}}")], "percentunit",
            only="on a host with NVIDIA's driver",
        ),
        Panel(
            "GPU memory", [Prom(f"{listed.GPU_MEMORY.name}{IN_POOL}", "{{instance}} {{gpu}}")], "percentunit",
            only="on a host with NVIDIA's driver",
        ),
    ],
    by_pool=True,
)  # fmt: skip
