"""Replays a production trace through two gateways and checks every stream: whole, once, in order.

    python -m bench.trace --trace FILE.csv

The file has the columns TIMESTAMP, ContextTokens, GeneratedTokens (the Azure LLM inference traces do). It is looked for
as azure_conv_2023.csv in $STREAM_GW_TRACES, else in ../shared/traces beside the repository. Requests arrive as in
the trace, some times faster, with prompts and answers of its sizes; half read by SSE, half by WebSocket, on both
gateways in turn. One reader in ten is cut at a random token and goes on at the other gateway from its cursor.

Exit code 1: a stream was not whole, or a request failed. Latencies are for the record: on a small machine this Python
reader is part of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import os
import random
import re
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import aiohttp
import msgspec

from bench.harness import Cores, EngineSource, build, describe, table, temporary_folder
from bench.platform import Platform

NAME = "azure_conv_2023.csv"
TOKEN = re.compile(r" t(\d+)@([0-9a-f]+)")
BYTES_PER_TOKEN = 4
TIMEOUT_S = 120.0
CLIENT = "bench-reader"


class Wrong(Exception):
    """A reader saw something that it must never see."""


@dataclass(frozen=True)
class Request:
    number: int
    at_s: float
    prompt_tokens: int
    tokens: int


@dataclass
class Totals:
    ttft_s: list[float] = field(default_factory=list)
    delay_s: list[float] = field(default_factory=list)
    resume_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


# --- what the stream says ------------------------------------------------------------------------------------


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    delta: Delta
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    error: msgspec.Raw | None = None


class Message(msgspec.Struct):
    t: str
    stream: str = ""
    epoch: str = ""
    s: int = 0
    a: int = -1
    f: list[Chunk] = []
    status: str = ""


_chunk = msgspec.json.Decoder(Chunk)
_message = msgspec.json.Decoder(Message)


class Reader:
    """One stream as its reader knows it, across connections."""

    def __init__(self, request: Request, totals: Totals) -> None:
        self.request = request
        self.totals = totals
        self.stream = ""
        self.epoch = 1
        self.seq = 0
        self.tokens = 0
        self.finished = False
        self.ended = False
        self.asked_at = 0.0
        self.resumed_at = 0.0
        self.cut_at: int | None = None
        """Cut when so many tokens came."""

    @property
    def cursor(self) -> str:
        return f"{self.epoch}-{self.seq}"

    @property
    def cut_now(self) -> bool:
        return self.cut_at is not None and self.tokens >= self.cut_at

    def take(self, chunk: Chunk) -> None:
        if chunk.error is not None:
            raise Wrong(f"an error after {self.tokens} tokens: {bytes(chunk.error).decode()}")
        for choice in chunk.choices:
            if choice.delta.content:
                self._text(choice.delta.content)
            if choice.finish_reason:
                self.finished = True

    def _text(self, text: str) -> None:
        now = time.monotonic()
        at = 0
        for match in TOKEN.finditer(text):
            if match.start() != at:
                break
            at = match.end()
            if int(match[1]) != self.tokens:
                raise Wrong(f"token {match[1]} where {self.tokens} was due")
            if self.tokens == 0:
                self.totals.ttft_s.append(now - self.asked_at)
            if self.resumed_at:
                self.totals.resume_s.append(now - self.resumed_at)
                self.resumed_at = 0.0
            else:
                self.totals.delay_s.append(now - int(match[2], 16) / 1e6)
            self.tokens += 1
        if at != len(text):
            raise Wrong(f"strange text after {self.tokens} tokens: {text!r}")

    def end(self) -> None:
        if not self.finished:
            raise Wrong("ended without a finish reason")
        if self.tokens != self.request.tokens:
            raise Wrong(f"ended with {self.tokens} tokens of {self.request.tokens}")
        self.ended = True


def body_of(request: Request, rate: float) -> dict[str, object]:
    order = f"bench mode=phase rate={rate:g} stream={request.number}; "
    filler = " tok" * max(0, request.prompt_tokens - len(order) // BYTES_PER_TOKEN)
    return {
        "model": "bench",
        "stream": True,
        "max_tokens": request.tokens,
        "messages": [{"role": "user", "content": order + filler}],
    }


# --- the two ways to read ------------------------------------------------------------------------------------


async def read_sse(session: aiohttp.ClientSession, url: str, reader: Reader, body: dict[str, object] | None) -> None:
    """Create the stream or, without a body, go on from the cursor; until its end or the cut."""
    if body is not None:
        response = await session.post(f"{url}/v1/chat/completions", json=body)
    else:
        query = {"after": reader.cursor, "dialect": "openai.chat"}
        response = await session.get(f"{url}/v1/streams/{reader.stream}", params=query)
    try:
        if response.status != 200:
            raise Wrong(f"answered {response.status}: {(await response.text())[:300]}")
        reader.stream = response.headers["X-Stream-Id"]
        rest = b""
        async for data in response.content.iter_any():
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                _sse_event(reader, event)
                if reader.cut_now:
                    return
        if rest.strip() or not reader.ended:
            raise Wrong(f"the body ended after {reader.tokens} tokens without [DONE]")
    finally:
        response.close()


def _sse_event(reader: Reader, event: bytes) -> None:
    for line in event.split(b"\n"):
        if line.startswith(b"data: "):
            if reader.ended:
                raise Wrong("data after [DONE]")
            if line == b"data: [DONE]":
                reader.end()
            else:
                reader.take(_chunk.decode(line[6:]))
        elif line.startswith(b"id: "):
            epoch, seq = map(int, line[4:].split(b"-"))
            if (epoch, seq) < (reader.epoch, reader.seq):
                raise Wrong(f"the cursor went back from {reader.cursor} to {line[4:].decode()}")
            reader.epoch, reader.seq = epoch, seq
        elif line and not line.startswith(b":"):
            raise Wrong(f"a strange line: {line[:200]!r}")


async def read_ws(session: aiohttp.ClientSession, url: str, reader: Reader, body: dict[str, object] | None) -> None:
    async with session.ws_connect(f"{url}/v1/stream", protocols=("tokenstream.v1",), max_msg_size=0) as socket:
        async for frame in socket:
            if frame.type is not aiohttp.WSMsgType.TEXT:
                break
            message = _message.decode(frame.data)
            match message.t:
                case "hi" if body is not None:
                    reader.asked_at = time.monotonic()
                    await socket.send_json({"t": "create", "ch": 1, "dialect": "openai.chat", "body": body})
                case "hi":
                    order = {"t": "sub", "ch": 1, "stream": reader.stream, "after": reader.cursor}
                    await socket.send_json({**order, "dialect": "openai.chat", "mode": "tokens"})
                case "ok":
                    reader.stream, reader.epoch = message.stream, int(message.epoch.partition(".")[0])
                case "ping":
                    await socket.send_json({"t": "pong"})
                case "d":
                    after = message.s - 1 if message.a < 0 else message.a
                    if after != reader.seq:
                        raise Wrong(f"frames after {after} where {reader.seq} was due")
                    for chunk in message.f:
                        reader.take(chunk)
                    reader.seq = message.s
                    if reader.cut_now:
                        return
                case "end" if message.status == "completed":
                    reader.end()
                    return
                case _:
                    raise Wrong(f"a message that should not come: {frame.data[:300]}")
        raise Wrong(f"the socket closed with {socket.close_code} after {reader.tokens} tokens")


# --- replay --------------------------------------------------------------------------------------------------


async def serve_one(
    session: aiohttp.ClientSession, urls: list[str], request: Request, args: argparse.Namespace, totals: Totals
) -> None:
    # Its own generator: a request is cut at the same token in every run, whatever the others do
    choice = random.Random(f"{args.seed}/{request.number}")
    reader = Reader(request, totals)
    kind, read = (("sse", read_sse), ("ws", read_ws))[request.number % 2]
    here = request.number // 2 % len(urls)
    if request.tokens > 1 and choice.random() < args.cut_share:
        reader.cut_at = choice.randrange(1, request.tokens)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader.asked_at = time.monotonic()
            await read(session, urls[here], reader, body_of(request, args.rate))
            if not reader.ended:
                totals.counts[f"{kind} cut"] += 1
                reader.cut_at = None
                reader.resumed_at = time.monotonic()
                await read(session, urls[(here + 1) % len(urls)], reader, None)
        totals.counts[f"{kind} whole"] += 1
        totals.counts["tokens"] += reader.tokens
    except (Wrong, aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
        totals.counts["wrong"] += 1
        where = f"request {request.number} ({kind}, stream {reader.stream or 'none'}, at {reader.cursor})"
        totals.wrong.append(f"{where}: {type(error).__name__} {error}")


async def replay(requests: list[Request], running: Platform, args: argparse.Namespace) -> tuple[Totals, float]:
    totals = Totals()
    headers = {"Authorization": f"Bearer {running.key}", "User-Agent": CLIENT}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    started = time.monotonic()
    async with (
        aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for request in requests:
            due = started + request.at_s / args.speed
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            totals.late_s.append(time.monotonic() - due)
            tasks.create_task(serve_one(session, running.gateway_urls, request, args, totals))
    return totals, time.monotonic() - started


# --- command -------------------------------------------------------------------------------------------------


def find_trace(given: Path | None) -> Path:
    folder = os.environ.get("STREAM_GW_TRACES")
    beside = Path(__file__).resolve().parents[2] / "shared" / "traces"
    path = given or (Path(folder) if folder else beside) / NAME
    if not path.is_file():
        raise SystemExit(
            f"no trace at {path}; give one with --trace FILE or a folder with {NAME} in STREAM_GW_TRACES "
            "(github.com/Azure/AzurePublicDataset publishes it as AzureLLMInferenceTrace_conv)"
        )
    return path


def read_trace(path: Path, count: int) -> list[Request]:
    requests: list[Request] = []
    first: datetime | None = None
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            if number == count:
                break
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # the trace has seven digits of a second
            first = first or at
            requests.append(
                Request(number, (at - first).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            )
    return requests


def spread(values: list[float]) -> tuple[str, str]:
    if not values:
        return "-", "-"
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2] * 1e3:.1f}", f"{ordered[len(ordered) * 99 // 100] * 1e3:.1f}"


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.trace", description=__doc__, formatter_class=raw)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--speed", type=float, default=10.0, help="how many times faster requests arrive")
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second of a stream")
    parser.add_argument("--cut-share", type=float, default=0.1)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1, help="chooses who is cut, and where")
    parser.add_argument("--platform", metavar="COMMAND", help="starts the platform instead of `stream-gw up`")
    args = parser.parse_args(argv)
    path = find_trace(args.trace)
    requests = read_trace(path, args.requests)
    build()
    facts = describe()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    cores = Cores.pick()
    everything = Cores(cores.gateway | cores.rest, cores.gateway | cores.rest)  # nothing is pinned: no CPU is compared
    with temporary_folder() as name, contextlib.ExitStack() as stack:
        source = EngineSource(everything, Path(name))
        stack.callback(source.stop)
        running = Platform(
            everything, Path(name), source.port, gateways=2, replicas=args.replicas, command=args.platform
        )
        stack.callback(running.stop)
        totals, seconds = asyncio.run(replay(requests, running, args))
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    print(
        f"{path.name}: {len(requests)} requests at {args.speed:g} x, 2 gateways, {args.replicas} replicas, "
        f"{args.rate:g} tokens/s a stream; {seconds:.1f} s; one run\n"
    )
    counts = totals.counts
    print(table(("what", "count"), [(what, counts[what]) for what in sorted(counts)]))
    print()
    rows = [
        ("TTFT, from the request", *spread(totals.ttft_s)),
        ("first token after a cut, from the resume", *spread(totals.resume_s)),
        ("token delay, from the engine's write", *spread(totals.delay_s)),
        ("this reader's lateness in asking", *spread(totals.late_s)),
    ]
    print(table(("latency, ms", "p50", "p99"), rows))
    for line in totals.wrong[:20]:
        print(f"WRONG: {line}")
    whole = counts["sse whole"] + counts["ws whole"]
    if whole != len(requests):
        print(f"\n{len(requests) - whole} of {len(requests)} streams were not whole")
        return 1
    print("\nEvery stream came whole, once, in order")
    return 0


if __name__ == "__main__":
    sys.exit(main())
