"""Cost of a token with many gateways and replicas: do batches and publishes stay large in a fleet?

    python -m bench.grid [--gateways 8] [--replicas 8]

Streams of every gateway run on every replica, in step as a batching engine makes them, or out of step. The rows differ
in the number of partitions. With a power of two a pool's streams share a few home partitions (docs/adr/0009); with
another number they are spread over all, as they were in earlier releases. CPU is of all gateways, all agents and
Redis, over the tokens made meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

from bench.harness import (
    Cores,
    EngineSource,
    LoadFailed,
    Target,
    build,
    cpu_s,
    load_command,
    start,
    table,
    temporary_folder,
)
from bench.platform import ENVIRONMENT, Platform
from stream_fabric.redis.client import RedisClient

HEAD = ("partitions", "streams lie in", "gateways us", "redis us", "agents us", "scripts/s", "token p50, ms", "p99")
OPEN_S = 3.0


async def scripts_run(redis_url: str) -> int:
    """Return the number of scripts that Redis has run."""
    client = RedisClient(redis_url)
    await client.start()
    info: bytes = await client.execute(0, "INFO", "commandstats")
    await client.close()
    return int(info.decode().partition("cmdstat_evalsha:calls=")[2].partition(",")[0])


def measure(options: argparse.Namespace, partitions: int, folder: Path) -> tuple[object, ...]:
    """Run the fleet once; return a row."""
    usable = frozenset(os.sched_getaffinity(0))
    cores = Cores(usable, usable)
    source = EngineSource(cores, folder)
    platform = Platform(
        cores,
        folder,
        source.port,
        gateways=options.gateways,
        replicas=options.replicas,
        environment={**ENVIRONMENT, "STREAM_GW_PARTITIONS": str(partitions)},
    )
    try:
        tokens = int(options.rate * (options.seconds + 2 * OPEN_S))
        streams = options.streams // options.gateways
        flags = {"streams": streams, "total": streams, "tokens": tokens, "rate": options.rate, "mode": options.mode}
        readers = []
        for url in platform.gateway_urls:
            target = Target("gateway", urlsplit(url).port or 0, {}, key=platform.key)
            command = load_command(target, None, {**flags, "open_every_us": int(OPEN_S / streams * 1e6)})
            readers.append(start(command, cores.rest, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        groups = (platform.gateway_pids, [platform.redis_pid], platform.agent_pids)
        time.sleep(OPEN_S + 0.5)  # all are open
        before, scripts = [cpu_s(*pids) for pids in groups], asyncio.run(scripts_run(platform.redis_url))
        time.sleep(options.seconds)
        after, scripts = [cpu_s(*pids) for pids in groups], asyncio.run(scripts_run(platform.redis_url)) - scripts
        results = []
        for reader in readers:
            out, errors = reader.communicate()
            if reader.returncode:
                raise LoadFailed(errors[-1000:])
            results.append(json.loads(out.splitlines()[-1]))
    finally:
        platform.stop()
        source.stop()
    made = options.rate * streams * options.gateways * options.seconds
    delays = [sum(one["delay_us"][part] for one in results) / len(results) / 1000 for part in (0, 1)]
    return (
        partitions,
        "home partitions" if partitions & (partitions - 1) == 0 else "all partitions",
        *(f"{(b - a) / made * 1e6:.1f}" for a, b in zip(before, after, strict=True)),
        f"{scripts / options.seconds:.0f}",
        *(f"{delay:.1f}" for delay in delays),
    )


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.grid", description=__doc__, formatter_class=raw)
    parser.add_argument("--gateways", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of a stream")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--mode", choices=["step", "phase"], default="step", help="phase: out of step")
    parser.add_argument("--partitions", default="1024,1000,16", help="a row each, separated by commas")
    options = parser.parse_args()
    build()
    rows = []
    for partitions in map(int, options.partitions.split(",")):
        with temporary_folder() as folder:
            rows.append(measure(options, partitions, Path(folder)))
    print(f"{options.gateways} gateways, {options.replicas} replicas, {options.streams} streams, {options.mode}")
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
