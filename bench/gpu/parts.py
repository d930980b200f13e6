"""The parts of ``bench.gpu``. Each returns its figures, and raises Failed when an answer was not whole."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.gpu.replicas import COMMAND, MODEL, Failed, Replica
from bench.gpu.streams import Stream, cancel_stream, read, running, until_each_has, until_running, words_of
from bench.harness import cpu_s, table
from bench.platform import Platform

PATH_LEVELS = (1, 16, 64, 128)
CANCEL_LEVELS = (1, 8, 32, 128)
"""Requests at once."""
WAVES = 3
PROMPT_WORDS = 300
LONG_PROMPT_WORDS = 6000
OUTPUT_TOKENS = 200
CANCELS = 10
ANSWERS = 16
"""Streams that run when a replica dies, and beside long prompts."""


def path(platform: Platform, replica: Replica, folder: Path, repetitions: int, levels: Sequence[int]) -> dict[str, Any]:
    """Both targets in turns. Raises Failed when an answer was not whole."""
    pids = {"gateway": platform.gateway_pids[0], "Redis": platform.redis_pid, **replica.processes}
    found: dict[str, list[dict[str, Any]]] = {}
    for repetition, level, target in itertools.product(range(-1, repetitions), levels, ("direct", "gateway")):
        if repetition < 0 and level != levels[-1]:
            continue  # one level warms both up
        prompts = folder / "prompts.jsonl"
        lines = (
            {"prompt": words_of(f"{repetition} {level} {target} {number}", PROMPT_WORDS), "max_tokens": OUTPUT_TOKENS}
            for number in range(level * WAVES)
        )
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        url = replica.url if target == "direct" else platform.gateway_urls[0]
        command = [str(COMMAND), "bench", url, "--key", platform.key, "--model", MODEL, "--quiet", "--json", "-"]
        command += ["--concurrency", str(level), "--requests", str(level * WAVES), "--duration", "120s"]
        command += ["--prompts", str(prompts), "--exact-length", "--seed", str(repetition + 1)]
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"{target}, {level} at once: {done.stderr[-2000:]}{done.stdout[-2000:]}")
        report = json.loads(done.stdout)
        (stage,) = report["stages"]
        tokens = stage["output_tokens"]
        if stage["completed"] != level * WAVES or tokens != level * WAVES * OUTPUT_TOKENS:
            raise Failed(f"{target}, {level} at once: {stage['completed']} answers with {tokens} tokens")
        row = {
            "ttft_p50_ms": stage["ttft"]["p50_s"] * 1e3,
            "ttft_p99_ms": stage["ttft"]["p99_s"] * 1e3,
            "itl_p50_ms": stage["itl"]["p50_s"] * 1e3,
            "gap_p50_ms": stage["gap"]["p50_s"] * 1e3,
            "gap_p99_ms": stage["gap"]["p99_s"] * 1e3,
            "tokens_per_s": stage["output_tokens_per_s"],
            "client_lag_p99_ms": report["client_lag_p99_s"] * 1e3,
            "cpu_us": {name: (cpu_s(pid) - before[name]) / tokens * 1e6 for name, pid in pids.items()},
        }
        print(f"path, {target}, {level} at once: {json.dumps(row)}", file=sys.stderr, flush=True)
        if repetition >= 0:
            found.setdefault(f"{level} {target}", []).append(row)
    return found


def path_table(found: dict[str, list[dict[str, Any]]]) -> str:
    names = ("ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "tokens_per_s", "client_lag_p99_ms")
    rows = []
    for key, runs in found.items():
        cells = [" / ".join(f"{run[name]:.4g}" for run in runs) for name in names]
        cpu = {name: statistics.median(run["cpu_us"][name] for run in runs) for name in runs[0]["cpu_us"]}
        rows.append((*key.split(), *cells, ", ".join(f"{name} {us:.0f}" for name, us in cpu.items())))
    return table(("at once", "target", *names, "CPU, us a token"), rows)


async def cancel(platform: Platform, replica: Replica, levels: Sequence[int]) -> dict[str, Any]:
    """By number of running streams: milliseconds from a cancel until three things have happened."""
    found: dict[str, Any] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for level in levels:
            tries = [await _one_cancel(session, platform, replica, level) for _ in range(CANCELS)]
            answered, ended, one_less = zip(*tries, strict=True)
            found[str(level)] = {
                "median_ms": statistics.median(one_less) * 1e3,
                "worst_ms": max(one_less) * 1e3,
                "answered_median_ms": statistics.median(answered) * 1e3,
                "ended_at_the_reader_median_ms": statistics.median(ended) * 1e3,
            }
    return found


async def _one_cancel(
    session: aiohttp.ClientSession, platform: Platform, replica: Replica, level: int
) -> tuple[float, float, float]:
    """Seconds until the cancel was answered, until the stream's reader had its end, and until vLLM ran one less."""
    url, key = platform.gateway_urls[0], platform.key
    streams = [Stream() for _ in range(level)]
    ends: list[float] = []
    body = {"prompt": words_of(str(time.time_ns()), 20), "max_tokens": 4000}
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(session, url, key, body, stream)) for stream in streams]
        tasks[0].add_done_callback(lambda _: ends.append(time.monotonic()))
        await until_each_has(streams, 5)
        began = time.monotonic()
        await cancel_stream(session, url, key, streams[0].id)
        answered = time.monotonic()
        await until_running(session, replica.url, level - 1)
        one_less = time.monotonic()
        for stream in streams[1:]:
            await cancel_stream(session, url, key, stream.id)
    await until_running(session, replica.url, 0)
    return answered - began, ends[0] - began, one_less - began


# --- sleep ---------------------------------------------------------------------------------------------------


def memory_mib() -> int:
    """In use on the first GPU. Raises Failed where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0])
    except (OSError, subprocess.CalledProcessError) as error:
        raise Failed(f"the GPU's memory is not known: {error}") from error


def post(url: str, body: dict[str, Any] | None = None) -> float:
    """Return how long the answer took, in seconds."""
    began = time.monotonic()
    data = json.dumps(body).encode() if body is not None else b""
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(asked, timeout=300) as response:
        response.read()
    return time.monotonic() - began


def sleep(replica: Replica) -> dict[str, Any]:
    one_token = {"model": MODEL, "prompt": "import", "max_tokens": 1}
    found: dict[str, Any] = {}
    for repetition, level in itertools.product(range(2), (1, 2)):
        awake = memory_mib()
        asleep_s = post(f"{replica.url}/sleep?level={level}")
        asleep = memory_mib()
        wake_s = post(f"{replica.url}/wake_up")
        if level == 2:
            wake_s += post(f"{replica.url}/collective_rpc", {"method": "reload_weights"})
        wake_s += post(f"{replica.url}/v1/completions", one_token)
        found[f"level {level}, {repetition + 1}"] = {
            "asleep_s": asleep_s,
            "wake_and_a_token_s": wake_s,
            "awake_mib": awake,
            "asleep_mib": asleep,
        }
    return found


# --- two replicas --------------------------------------------------------------------------------------------


async def objective(replica: Replica) -> dict[str, float]:
    """Gaps of running answers while three long prompts are computed, one after the other."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        # The first run teaches what a prompt token costs
        _, *runs = [await _gaps_beside_prompts(session, replica) for _ in range(3)]
    gaps = sorted(gap for found, _ in runs for gap in found)
    return {
        "gap_p50_ms": gaps[len(gaps) // 2] * 1e3,
        "gap_p90_ms": gaps[len(gaps) * 9 // 10] * 1e3,
        "gap_max_ms": gaps[-1] * 1e3,
        "prompts_s": sum(took_s for _, took_s in runs),
        "tokens": len(gaps),
    }


async def _gaps_beside_prompts(session: aiohttp.ClientSession, replica: Replica) -> tuple[list[float], float]:
    """Gaps of the answers, and how long the prompts took, in seconds."""
    streams = [Stream() for _ in range(ANSWERS)]
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, stream in enumerate(streams):
            body = {"prompt": words_of(f"{time.time_ns()} {number}", 50), "max_tokens": 4000}
            tasks.append(group.create_task(read(session, replica.url, "", body, stream)))
        await until_each_has(streams, 20)
        began = time.monotonic()
        for number in range(3):
            long = {"prompt": words_of(f"long {time.time_ns()} {number}", LONG_PROMPT_WORDS), "max_tokens": 1}
            await read(session, replica.url, "", long, Stream())
        ended = time.monotonic()
        for task in tasks:
            task.cancel()
    await until_running(session, replica.url, 0)
    return [gap for stream in streams for gap in stream.gaps_s(began, ended)], ended - began


async def death(platform: Platform, first: Replica, second: Replica) -> dict[str, Any]:
    """Streams on two replicas; vLLM of the first is killed. All must get all of their tokens.

    As many streams as the first ran were silent the longest: these are taken for its own.
    """
    url, tokens = platform.gateway_urls[0], 1500
    streams = [Stream() for _ in range(2 * ANSWERS)]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        for number, stream in enumerate(streams):
            body = {"prompt": words_of(f"{time.time_ns()} {number}", 200), "max_tokens": tokens, "temperature": 0}
            group.create_task(read(session, url, platform.key, body, stream))
        await until_each_has(streams, 50)
        on_first, on_second = await running(session, first.url), await running(session, second.url)
        killed = time.monotonic()
        os.kill(first.server, signal.SIGKILL)
    wrong = [s for s in streams if s.error or s.finish != "length" or s.usage.get("completion_tokens") != tokens]
    if wrong:
        raise Failed(f"{len(wrong)} of {len(streams)} streams are not whole; one: {wrong[0]}"[:2000])
    silent = sorted(max(stream.gaps_s(killed, math.inf), default=0.0) for stream in streams)
    return {
        "streams_on_the_killed": on_first,
        "streams_on_the_other": on_second,
        "silence_of_the_killed_s": {"median": statistics.median(silent[on_second:] or silent), "worst": silent[-1]},
        "silence_of_the_other_s": {"worst": silent[:on_second][-1] if on_second else 0.0},
    }
