"""Cost of limits for a short streamed request: CPU of each process, and time to the first token.

    python -m bench.limits [--rounds 5] [--streams 2000]

Two gateways share one core, one agent and one Redis. One serves a tenant without a plan, the other a tenant with limits
of its requests, tokens and streams, for itself, its key and each model. They are measured in turn, so that a slow hour
of the machine costs both alike. Exit code 1: a stream was not whole, or a request was refused.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.harness import (
    Cores,
    EngineSource,
    LoadFailed,
    Target,
    build,
    describe,
    load,
    start,
    stop,
    table,
    temporary_folder,
)
from bench.platform import PARTITIONS, READY_S, Platform
from stream_gw.auth import key_digest

KEY = "sk-bench-limits"
TOKENS = 8
LIMITS = "{ requests_per_min = 1000000000, tokens_per_min = 1000000000, streams = 1000000 }"
WITHOUT = f'[[tenant]]\nid = "bench"\n[[tenant.key]]\nsha256 = "{key_digest(KEY)}"\n'
WITH = WITHOUT.replace("[[tenant.key]]", 'plan = "p"\n[[tenant.key]]') + (
    f'[plan.p]\ntenant = {LIMITS}\nkey = {LIMITS}\nmodel."*" = {LIMITS}\n'
)


class Gateway:
    """One more gateway of a platform, with a keys file of its own."""

    def __init__(self, name: str, keys: str, platform: Platform, cores: Cores, folder: Path) -> None:
        file = folder / f"{name}.toml"
        file.write_text(keys)
        env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": str(PARTITIONS),
               "STREAM_GW_KEYS_FILE": str(file), "STREAM_GW_EVENTS": "redis"}  # fmt: skip
        command = [str(Path(sys.executable).parent / "stream-gw"), "gateway", "--port", "0", "--json"]
        self.process = start(
            command, cores.gateway, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **env}
        )
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], READY_S)[0]:
            raise SystemExit(f"gateway {name} said nothing within {READY_S:g} s")
        port = urlsplit(json.loads(self.process.stdout.readline())["url"]).port
        assert port is not None
        watch = platform.watch() | {"gateway": self.process.pid}
        self.target = Target(name, port, watch, "sse", KEY)


def measure(gateway: Gateway, source: EngineSource, cores: Cores, streams: int) -> dict[str, float]:
    """CPU milliseconds a request of each process, and the time to the first token in milliseconds."""
    result: dict[str, Any] = load(
        gateway.target, source, cores, mode="backlog", streams=8, total=streams, tokens=TOKENS,
        per_connection=100_000, open_every_us=500,
    )  # fmt: skip
    figures = {name: result["cpu"][name]["ns"] / 1e6 / result["completed"] for name in gateway.target.watch}
    return figures | {f"TTFT {part}": us / 1e3 for part, us in zip(("p50", "p99"), result["ttft_us"], strict=True)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.limits", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved pairs")
    parser.add_argument("--streams", type=int, default=2000, help="requests of each measurement")
    args = parser.parse_args(argv)
    build()
    cores = Cores.pick()
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    with temporary_folder() as name, ExitStack() as stack:
        folder = Path(name)
        source = EngineSource(cores, folder)
        stack.callback(source.stop)
        platform = Platform(cores, folder, source.port, steps=source.steps)
        stack.callback(platform.stop)
        gateways = []
        for who, keys in (("without", WITHOUT), ("with", WITH)):
            gateways.append(Gateway(who, keys, platform, cores, folder))
            stack.callback(stop, gateways[-1].process)
        try:
            for gateway in gateways:  # the first streams load code and tables
                measure(gateway, source, cores, 200)
            for _ in range(args.rounds):
                without, limited = (measure(gateway, source, cores, args.streams) for gateway in gateways)
                pairs.append((without, limited))
        except LoadFailed as error:
            print(f"FAILED: {error}")
            return 1
    print("; ".join(f"{name} {value}" for name, value in describe().items()))
    print(
        f"{args.rounds} interleaved pairs of {args.streams} requests of {TOKENS} tokens; medians; range of the pairs\n"
    )
    rows = []
    for what in pairs[0][0]:
        before = statistics.median(pair[0][what] for pair in pairs)
        more = sorted(pair[1][what] - pair[0][what] for pair in pairs)
        middle = statistics.median(more)
        rows.append(
            (what, f"{before:.3f}", f"{before + middle:.3f}", f"{middle:+.3f}", f"{more[0]:+.3f} … {more[-1]:+.3f}")
        )
    print(table(("ms", "without limits", "with limits", "more", "range"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
