"""One tenant floods: what the others notice, and how soon its own requests are refused.

    python -m bench.flood [--seconds 20] [--rounds 3]

Two tenants with the same plan share one gateway, one agent with a simulated engine, and Redis. The quiet tenant sends
requests at a steady rate, within its limit. In every second phase the other one sends 20 times as many, of which its
limit admits a twentieth. Phases alternate, so that a slow minute of the machine costs both alike. Exit code 1: the
quiet tenant's p99 time to the first token rose by more than 20 % and 5 ms, one of its requests failed, or a refusal
took more than 5 ms at the median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from bench.harness import Cores, describe, pin, start, stop, table, temporary_folder
from bench.platform import PARTITIONS, READY_S, Platform
from stream_gw.auth import key_digest

QUIET, FLOODER = "sk-bench-quiet", "sk-bench-flooder"
RATE_PER_S, TIMES, TOKENS = 10, 20, 8
BODY = json.dumps(
    {"model": "sim-small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS, "stream": True}
)
SIM = ["--sim", "itl_ms=5,ttft_ms=30,max_num_seqs=64"]
RISE_MAX, RISE_MS, REFUSAL_MS = 1.2, 5.0, 5.0


def _keys() -> str:
    tenants = "".join(
        f'[[tenant]]\nid = "{name}"\nplan = "p"\n[[tenant.key]]\nsha256 = "{key_digest(key)}"\n'
        for name, key in (("quiet", QUIET), ("flooder", FLOODER))
    )
    # Room for the steady rate in each minute, and none for a burst above it
    return f"[plan.p]\ntenant = {{ requests_per_min = {RATE_PER_S * 60} }}\n{tenants}"


class Results:
    """Milliseconds of one tenant's requests in one kind of phase."""

    def __init__(self) -> None:
        self.first: list[float] = []
        """To the first token, of admitted requests."""
        self.refused: list[float] = []
        self.failed = 0


async def _ask(client: aiohttp.ClientSession, key: str, results: Results) -> None:
    began = time.perf_counter()
    try:
        async with client.post(
            "/v1/chat/completions", data=BODY, headers={"authorization": f"Bearer {key}"}
        ) as response:
            if response.status == 429:
                results.refused.append((time.perf_counter() - began) * 1e3)
                return
            if response.status != 200:
                results.failed += 1
                return
            first = 0.0
            async for line in response.content:
                if not first and b'"content"' in line:
                    first = (time.perf_counter() - began) * 1e3
            results.first.append(first)
    except aiohttp.ClientError:
        results.failed += 1


async def _send(client: aiohttp.ClientSession, key: str, rate_per_s: float, seconds: float, results: Results) -> None:
    """Send requests at a steady rate, whether or not the ones before were answered."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(rate_per_s * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate_per_s - loop.time()))
            tasks.create_task(_ask(client, key, results))


async def _measure(url: str, seconds: float, rounds: int) -> tuple[Results, Results, Results]:
    """Return the quiet tenant's results alone and beside the flood, and the flooder's."""
    alone, beside, flooder = Results(), Results(), Results()
    async with (
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as quiet,
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as other,
    ):
        await _send(quiet, QUIET, RATE_PER_S, 3, Results())
        await _send(other, FLOODER, RATE_PER_S * TIMES, 3, Results())  # its bucket is empty from here on
        for _ in range(rounds):
            await _send(quiet, QUIET, RATE_PER_S * 0.8, seconds, alone)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_send(quiet, QUIET, RATE_PER_S * 0.8, seconds, beside))
                tasks.create_task(_send(other, FLOODER, RATE_PER_S * TIMES, seconds, flooder))
    return alone, beside, flooder


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.flood", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of phases")
    args = parser.parse_args(argv)
    cores = Cores.pick()
    with temporary_folder() as name, ExitStack() as stack:
        folder = Path(name)
        platform = Platform(cores, folder, 0, engine=SIM)
        stack.callback(platform.stop)
        (folder / "keys.toml").write_text(_keys())
        env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": str(PARTITIONS),
               "STREAM_GW_KEYS_FILE": str(folder / "keys.toml"), "STREAM_GW_EVENTS": "redis"}  # fmt: skip
        command = [str(Path(sys.executable).parent / "stream-gw"), "gateway", "--port", "0", "--json"]
        log = stack.enter_context((folder / "gateway.log").open("w"))
        gateway = start(command, cores.gateway, stdout=subprocess.PIPE, stderr=log, env={**os.environ, **env})
        stack.callback(stop, gateway)
        assert gateway.stdout is not None
        if not select.select([gateway.stdout], [], [], READY_S)[0]:
            raise SystemExit(f"the gateway said nothing within {READY_S:g} s")
        url = json.loads(gateway.stdout.readline())["url"]
        pin(gateway.pid, cores.gateway)
        alone, beside, flooder = asyncio.run(_measure(url, args.seconds, args.rounds))
    print("; ".join(f"{name} {value}" for name, value in describe().items()))
    flood = f"flood: {RATE_PER_S * TIMES} requests/s, limit {RATE_PER_S}"
    print(f"{args.rounds} pairs of phases of {args.seconds:g} s; {flood}\n")
    rows = [
        (who, len(got.first), len(got.refused), got.failed,
         *(f"{_percentile(values, share):.1f}" for values in (got.first, got.refused) for share in (0.5, 0.99)))
        for who, got in (("quiet, alone", alone), ("quiet, beside the flood", beside), ("flooder", flooder))
    ]  # fmt: skip
    head = ("tenant", "served", "refused", "failed", "TTFT p50, ms", "p99", "refusal p50, ms", "p99")
    print(table(head, rows))
    rise = _percentile(beside.first, 0.99) / max(_percentile(alone.first, 0.99), 0.001)
    more_ms = _percentile(beside.first, 0.99) - _percentile(alone.first, 0.99)
    print(f"\np99 of the quiet tenant beside the flood: {rise:.2f} x ({more_ms:+.1f} ms)")
    bad = alone.failed + beside.failed + len(alone.refused) + len(beside.refused)
    kept = rise <= RISE_MAX or more_ms <= RISE_MS
    return 0 if kept and not bad and statistics.median(flooder.refused) <= REFUSAL_MS else 1


if __name__ == "__main__":
    sys.exit(main())
