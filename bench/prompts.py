"""The cost of a long prompt: time to the first token, CPU of each process, and the tokens of others meanwhile.

    python -m bench.prompts [--sizes 1 40 400 1000] [--requests 30]

The prompts are conversations as coding agents send them with each request: tools, and messages and calls of tools whose
texts are code. nginx and a direct connection are measured in the same run. Meanwhile is then measured by 50 streams of
50 tokens a second, while such prompts come at --rate. Exit code 1: an answer was not whole.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.harness import (
    Cores,
    EngineSource,
    LoadFailed,
    Nginx,
    Target,
    build,
    describe,
    load,
    table,
    temporary_folder,
)
from bench.platform import Platform

TOKENS = 8
NEIGHBOURS = 50
OWN_STREAM = 60_000
"""Number of the prompts' streams in the engine; the neighbours have the first ones."""
WAIT_S = 30.0
_WORDS = (
    "return", "import", "self.value =", "def read(", '"name"', "for each in", "class Part:\n    ", "{'a': 1}", "[x, y]",
    "the", "of", "naïve", "# why", "\n", "\t", "0x1f", "await", "None", "if not",
)  # fmt: skip


def code(size: int, draw: random.Random) -> str:
    """A text of ``size`` characters that no other text of a run shares a beginning with."""
    words: list[str] = []
    while sum(map(len, words)) < size:
        words += [f"{draw.choice(_WORDS)} {draw.randrange(1000)}" for _ in range(20)]
    return " ".join(words)[:size]


def conversation(size: int, draw: random.Random) -> list[dict[str, Any]]:
    """Messages of ``size`` characters in all: calls of a tool and their results of 3,000 characters each."""
    made: list[dict[str, Any]] = [
        {"role": "user", "content": f"bench mode=backlog stream={OWN_STREAM} " + code(min(size, 1000), draw)}
    ]
    for turn in range(size // 6000):
        call = {"name": "write", "arguments": json.dumps({"path": f"/a/{turn}.py", "text": code(3000, draw)})}
        made.append({"role": "assistant", "tool_calls": [{"id": f"c{turn}", "type": "function", "function": call}]})
        made.append({"role": "tool", "tool_call_id": f"c{turn}", "content": code(3000, draw)})
    return made


TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name} a file", "parameters": {"type": "object"}}}
    for name in ("read", "write", "find", "run")
]


class Client:
    """One connection that sends one request after the other."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=WAIT_S)
        self._sent = 0

    def ask(self, messages: list[dict[str, Any]]) -> float:
        """Send a request; seconds to its first token. Raises LoadFailed for an answer that is not whole."""
        self._sent += 1
        asked = {"model": self._target.model, "stream": True, "max_tokens": TOKENS, "tools": TOOLS}
        asked["messages"] = [*messages, {"role": "user", "content": f"and {self._sent}?"}]
        body = json.dumps(asked, ensure_ascii=False).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._target.key}"}
        began = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", body, headers)
        answer = self._connection.getresponse()
        first, read = 0.0, b""
        while piece := answer.read1(1 << 16):
            read += piece
            if not first and b" t0@" in read:
                first = time.perf_counter() - began
        if answer.status != 200 or b"[DONE]" not in read or f" t{TOKENS - 1}@".encode() not in read:
            raise LoadFailed(f"{self._target.name}: {answer.status} {read[-200:]!r}")
        return first


def cpu_ms(watch: Mapping[str, int]) -> dict[str, float]:
    """CPU milliseconds of each process so far."""
    used = {}
    for name, pid in watch.items():
        tasks = Path(f"/proc/{pid}/task")
        used[name] = sum(int((tasks / task / "schedstat").read_text().split()[0]) for task in os.listdir(tasks)) / 1e6
    return used


def more(watch: Mapping[str, int], work: Callable[[], None]) -> dict[str, float]:
    """CPU milliseconds of each process for the work, without what it takes as long while idle."""
    idle = cpu_ms(watch)
    time.sleep(2)
    began, before = time.perf_counter(), cpu_ms(watch)
    work()
    took_s, after = time.perf_counter() - began, cpu_ms(watch)
    return {name: after[name] - before[name] - (before[name] - idle[name]) / 2 * took_s for name in watch}


def one_by_one(target: Target, messages: list[dict[str, Any]], requests: int) -> dict[str, float]:
    """Time to the first token and CPU of requests that follow one another, in milliseconds a request."""
    client, firsts = Client(target), []
    client.ask(messages)

    def work() -> None:
        firsts.extend(client.ask(messages) * 1000 for _ in range(requests))

    used = {name: ms / requests for name, ms in more(target.watch, work).items()}
    firsts.sort()
    return used | {"p50": statistics.median(firsts), "p99": firsts[int(0.99 * len(firsts))]}


def beside(
    target: Target, source: EngineSource, cores: Cores, messages: list[dict[str, Any]] | None, rate: float
) -> tuple[float, float]:
    """Delay of the neighbours' tokens, p50 and p99 in milliseconds, while prompts come; None: while none come."""
    ended = threading.Event()
    failures: list[LoadFailed] = []

    def send() -> None:
        assert messages is not None
        client, due = Client(target), time.perf_counter()
        while not ended.wait(max(0.0, due - time.perf_counter())) and not failures:
            due = max(due + 1 / rate, time.perf_counter() - 1)
            try:
                client.ask(messages)
            except LoadFailed as error:
                failures.append(error)

    sender = threading.Thread(target=send)
    if messages is not None:
        sender.start()
    try:
        result = load(target, source, cores, mode="phase", streams=NEIGHBOURS, rate=50, seconds=5, settle=1)
    finally:
        ended.set()
        if messages is not None:
            sender.join()
    if failures:
        raise failures[0]
    return result["delay_us"][0] / 1e3, result["delay_us"][1] / 1e3


def measure(args: argparse.Namespace, cores: Cores, stack: ExitStack, folder: Path) -> list[list[str]]:
    source = EngineSource(cores, folder)
    stack.callback(source.stop)
    server = Nginx(cores, folder, source.port)
    stack.callback(server.stop)
    platform = Platform(cores, folder, source.port, command=args.platform, steps=source.steps)
    stack.callback(platform.stop)
    ours, direct = platform.target("sse"), Target("direct", source.port, {})
    load(ours, source, cores, mode="backlog", streams=8, total=400, tokens=TOKENS, per_connection=100_000)
    os.sched_setaffinity(0, cores.rest)
    alone = beside(ours, source, cores, None, args.rate)
    rows = [["none"] + ["-"] * 6 + [f"{alone[0]:.1f} / {alone[1]:.1f}"]]
    for size in args.sizes:
        print(f"  prompts of {size:g} kB", file=sys.stderr)
        messages = conversation(int(size * 1000), random.Random(size))
        mine, plain, proxied = (
            one_by_one(target, messages, args.requests) for target in (ours, direct, server.target())
        )
        others = beside(ours, source, cores, messages, args.rate)
        rows.append(
            [f"{size:g}", f"{plain['p50']:.1f}"]
            + [f"{mine['p50'] - plain['p50']:.1f} / {mine['p99'] - plain['p50']:.1f}"]
            + [f"{each:.2f}" for each in (mine["gateway"], mine["agent"], mine["redis"], proxied["gateway"])]
            + [f"{others[0]:.1f} / {others[1]:.1f}"]
        )  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prompts", description=__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 40, 400, 1000], metavar="KB", help="of prompts")
    parser.add_argument("--requests", type=int, default=30, help="of each measurement")
    parser.add_argument("--rate", type=float, default=5.0, help="prompts a second beside other streams")
    parser.add_argument("--platform", metavar="COMMAND", help="starts the platform instead of `stream-gw up`")
    args = parser.parse_args(argv)
    build()
    cores, conditions = Cores.pick(), describe()
    with temporary_folder() as name, ExitStack() as stack:
        try:
            rows = measure(args, cores, stack, Path(name))
        except LoadFailed as error:
            print(f"FAILED: {error}")
            return 1
    print("; ".join(f"{name} {value}" for name, value in conditions.items()))
    head = ("kB", "TTFT direct, ms", "TTFT added p50 / p99", "gateway, ms", "agent, ms", "Redis, ms", "nginx, ms",
            f"delay of {NEIGHBOURS} others p50 / p99")  # fmt: skip
    print(table(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
