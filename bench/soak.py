"""Half an hour of load with churn: is every process as small, and every reader served as well, as at the beginning?

    python -m bench.soak [--minutes 30] [--rate 20]

Two gateways, two simulated replicas, telemetry and Redis serve ``stream-gw bench`` with cuts, resumes, cancels and slow
readers. A third gateway is replaced each minute by SIGTERM while WebSocket clients read through it; they go on at the
first.
Each minute prints the memory of every process, Redis's keys and the latencies. Exit code 1: a process grew, keys are
left that do not expire, a latency of the last minute is above the first one's by more than the bound, or an answer was
not whole.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import Cores, below, cpu_s, describe, free_port, memory, table, temporary_folder
from bench.platform import PARTITIONS, Platform
from stream_fabric.limits import LIVE_TTL_S, RETENTION_S
from stream_fabric.redis.client import RedisClient
from stream_gw.client import GatewayError, StreamGateway

SIM = "itl_ms=20,ttft_ms=50,max_num_seqs=256"
WARM_UP_MINUTES = RETENTION_S // 60
"""Minutes after which memory counts as settled: the first streams have expired, and caches of fixed size are full.

A full cache still jumps once by 2 to 3 MiB: Python doubles the table of a dict that lives by deletes and inserts.
"""
GROWTH_MAX = 0.05
GROWTH_MIB = 3.0
LATENCY_RATIO_MAX = 1.10
LATENCY_MS = 1.0
CHURN_TOKENS = 150
SLOWEST_S = 900
"""A slow reader takes four pieces a second: time for the longest answer of the load."""
_KEPT_MS = (LIVE_TTL_S + RETENTION_S + 5) * 1000


@dataclass
class Minute:
    """Readings at the end of one minute."""

    rss_mib: dict[str, float]
    cpu_share: dict[str, float]
    """CPU time of each process in this minute, of one core. ``others``: telemetry, controller and what starts them."""
    keys: int
    redis_mib: float
    churned: int


@dataclass
class Churn:
    """Streams read through a gateway that is replaced again and again."""

    whole: int = 0
    faults: list[str] = field(default_factory=list)
    replaced: int = 0


def cpu_of_all(pids: dict[str, int], platform: int, load: int) -> dict[str, float]:
    """Return the CPU seconds of each process so far, of the load generator, and of all others of the platform."""
    seconds = {name: cpu_s(pid) for name, pid in pids.items()}
    others = sum(cpu_s(pid) for pid in (platform, *below(platform)) if pid not in pids.values())
    return {**seconds, "others": others, "load": cpu_s(load)}


async def read_streams(urls: Sequence[str], key: str, model: str, churn: Churn) -> None:
    """Read one stream after the other, each again from its beginning, until cancelled."""
    body = {"model": model, "messages": [{"role": "user", "content": "Count."}], "max_tokens": CHURN_TOKENS}
    async with StreamGateway(urls, token=key) as gateway:
        while True:
            try:
                async with asyncio.timeout(120):
                    stream = gateway.create({**body, "ignore_eos": True})
                    text = "".join([piece async for piece in stream.text()])
                    assert stream.id is not None
                    again = "".join([piece async for piece in gateway.subscribe(stream.id).text()])
            except (GatewayError, OSError, TimeoutError) as error:  # the soak goes on and tells at its end
                churn.faults.append(repr(error))
                await asyncio.sleep(1)
                continue
            if text == again and stream.status == "completed":
                churn.whole += 1
            else:
                churn.faults.append(f"{stream.id}: {len(text)} characters, {len(again)} in the replay, {stream.status}")


@contextlib.asynccontextmanager
async def gateway_on(port: int, platform: Platform) -> AsyncIterator[asyncio.subprocess.Process]:
    env = {"STREAM_GW_EVENTS": "redis", "STREAM_GW_PARTITIONS": str(PARTITIONS), "STREAM_GW_DEV_KEY": platform.key}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stream_gw.cli", "gateway", "--json", "--port", str(port),
        env={**os.environ, **env, "STREAM_GW_REDIS_URL": platform.redis_url},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readline(), 30)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def replace_each_minute(port: int, platform: Platform, every_s: float, churn: Churn) -> None:
    while True:
        async with gateway_on(port, platform) as process:
            await asyncio.sleep(every_s)
            process.send_signal(signal.SIGTERM)
            code = await asyncio.wait_for(process.wait(), 120)
            if code:
                churn.faults.append(f"the replaced gateway ended with {code}")
            churn.replaced += 1


async def keys_that_stay(client: RedisClient) -> set[str]:
    """Return the keys that do not expire within the longest life of a stream; accounts and events are kept longer."""
    cursor, found = "0", set()
    while True:
        reply = await client.execute(0, "SCAN", cursor, "COUNT", 1000)
        ttls = await asyncio.gather(*(client.execute(0, "PTTL", key) for key in reply[1]))
        # -1: it has no expiry; -2: it has expired since the scan
        long = {key.decode() for key, ttl in zip(reply[1], ttls, strict=True) if ttl == -1 or ttl > _KEPT_MS}
        found |= {key for key in long if not key.startswith("sg:{events}") and ":usage:" not in key}
        cursor = reply[0]
        if cursor in ("0", b"0"):
            return found


async def soak(options: argparse.Namespace, platform: Platform, folder: Path) -> tuple[list[Minute], Churn, set[str]]:
    client = RedisClient(platform.redis_url)
    await client.start()
    pids = {f"gateway{n}": pid for n, pid in enumerate(platform.gateway_pids)}
    pids |= {f"agent{n}": pid for n, pid in enumerate(platform.agent_pids)} | {"redis": platform.redis_pid}
    model = options.model
    churn, minutes, port = Churn(), [], free_port()
    command = [sys.executable, "-m", "stream_gw.cli", "bench", *platform.gateway_urls, "--key", platform.key]
    command += ["--model", model, "--rate", str(options.rate), "--duration", f"{options.minutes * options.minute_s:g}s"]
    command += ["--cut", "0.1", "--cancel", "0.1", "--slow", "0.02", "--quiet", "--json", str(folder / "bench.json")]
    command += ["--timeout", f"{SLOWEST_S}s"]
    tasks = [asyncio.create_task(replace_each_minute(port, platform, options.minute_s, churn))]
    urls = [f"http://127.0.0.1:{port}", platform.gateway_urls[0]]
    before_keys = await keys_that_stay(client)
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError):
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                break
            await asyncio.sleep(0.1)
    load = await asyncio.create_subprocess_exec(*command)
    tasks += [asyncio.create_task(read_streams(urls, platform.key, model, churn)) for _ in range(options.sockets)]
    for number in range(options.minutes):
        before = cpu_of_all(pids, platform.pid, load.pid)
        await asyncio.sleep(options.minute_s)
        info = (await client.execute(0, "INFO", "memory")).decode()
        after = cpu_of_all(pids, platform.pid, load.pid)
        minute = Minute(
            {name: memory(pid).rss_kib / 1024 for name, pid in pids.items()},
            {name: (seconds - before[name]) / options.minute_s for name, seconds in after.items()},
            await client.execute(0, "DBSIZE"),
            int(info.partition("used_memory:")[2].split()[0]) / 2**20,
            churn.whole,
        )
        minutes.append(minute)
        sizes = " ".join(f"{name} {mib:.0f}" for name, mib in minute.rss_mib.items())
        busy = " ".join(f"{name} {share:.2f}" for name, share in minute.cpu_share.items())
        total = sum(minute.cpu_share.values())
        print(f"{number + 1:3} MiB: {sizes}; keys {minute.keys}; churn {churn.whole}", flush=True)
        print(f"    cores {total:.2f}: {busy}", flush=True)
    await load.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(10)  # idempotency keys and streams of the last second are settled
    left = await keys_that_stay(client) - before_keys
    await client.close()
    return minutes, churn, left


def latencies(report: dict[str, Any], from_s: float, to_s: float) -> dict[str, float]:
    """Return the p99s in ms of what happened in a part of the run."""
    ttfts = sorted(
        one["ttft_s"]
        for one in report["requests"]
        if one["ttft_s"] is not None and from_s <= one["began_s"] < to_s and not any(one["disturbance"].values())
    )
    gaps = [one["gap_p99_s"] for one in report["bins"] if from_s <= one["at_s"] < to_s and one["gap_p99_s"] is not None]
    return {"TTFT p99": ttfts[int(0.99 * (len(ttfts) - 1))] * 1000, "gap p99": statistics.median(gaps) * 1000}


def faults_of(
    minutes: Sequence[Minute], churn: Churn, left: set[str], report: dict[str, Any], minute_s: float
) -> tuple[list[str], dict[str, tuple[float, float]]]:
    """Return what the soak has found wrong, and the latencies of the first and last minute."""
    faults = [*churn.faults, *(f"key left: {key}" for key in sorted(left)[:10])]
    first, last = minutes[min(WARM_UP_MINUTES, len(minutes) // 2)], minutes[-1]
    for name, mib in first.rss_mib.items():
        if name != "redis" and last.rss_mib[name] - mib > max(GROWTH_MIB, GROWTH_MAX * mib):
            faults.append(f"{name} grew from {mib:.1f} to {last.rss_mib[name]:.1f} MiB")
    failed = [one for one in report["requests"] if one["status"] == "failed" or one["is_exact"] is False]
    faults += [
        f"{one['stream'] or 'a request'} of second {one['began_s']:.0f}: {one['error'] or 'not exact'}"
        for one in failed[:10]
    ]
    ends = len(minutes) * minute_s
    early, late = latencies(report, minute_s, 2 * minute_s), latencies(report, ends - 2 * minute_s, ends - minute_s)
    for name, ms in early.items():
        if late[name] > LATENCY_RATIO_MAX * ms and late[name] - ms > LATENCY_MS:
            faults.append(f"{name} rose from {ms:.1f} to {late[name]:.1f} ms")
    return faults, {name: (ms, late[name]) for name, ms in early.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--minute-s", type=float, default=60.0, help="seconds of a minute; less for a quick look")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second of stream-gw bench")
    parser.add_argument("--sockets", type=int, default=8, help="WebSocket clients on the gateway that is replaced")
    parser.add_argument("--model", default="sim-small")
    parser.add_argument("--json", help="write everything to this file")
    options = parser.parse_args()
    usable = frozenset(os.sched_getaffinity(0))
    with temporary_folder() as folder:
        platform = Platform(
            Cores(usable, usable),
            Path(folder),
            0,
            gateways=2,
            replicas=2,
            engine=["--sim", SIM, "--state-folder", "fresh"],
            telemetry=True,
        )
        try:
            minutes, churn, left = asyncio.run(soak(options, platform, Path(folder)))
        finally:
            platform.stop()
        report = json.loads((Path(folder) / "bench.json").read_text())
        told = [line for line in platform.log.splitlines() if '"level": "info"' not in line]
    faults, compared = faults_of(minutes, churn, left, report, options.minute_s)
    done = report["disturbances"]
    print(
        table(
            ["latency, ms", "second minute", "last but one"],
            [[n, f"{a:.1f}", f"{b:.1f}"] for n, (a, b) in compared.items()],
        )
    )
    print(
        f"{len(report['requests'])} requests, {done['exact']} of {done['cut']} cuts resumed exactly, "
        f"{done['exact_cancels']} of {done['cancelled']} cancels exact; {churn.whole} streams over a gateway that was "
        f"replaced {churn.replaced} times"
    )
    if options.json:
        record = {"machine": describe(), "minutes": [vars(one) for one in minutes], "latencies": compared}
        Path(options.json).write_text(json.dumps(record | {"faults": faults}, indent=1))
    for fault in faults:
        print(f"FAULT: {fault}")
    if faults:
        print("\n".join(["the platform's last warnings:", *told[-20:]]))
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
