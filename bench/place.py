"""Placements per second of one Redis core, and whether a million placements leak memory.

    python -m bench.place [--parts speed,life,memory] [--placements 1000000]

speed: 64 connections that do nothing but place, as fast as they are answered, then at half that rate. life: requests
at a steady rate, read from the inboxes, reported when they begin and when they end, leases renewed each second. memory:
a gateway's directory and agents' ledgers around a million placements, with new prefixes to the end.
Exit code 1: Redis or the gateway's process grew by more than the bound, or a call was answered wrongly.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import hashlib
import json
import math
import random
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import hiredis
import msgspec
import uvloop

from bench.fabric import cpu_us
from bench.harness import Cores, Figure, LoadFailed, describe, free_port, memory, start, stop, table, wait_port
from stream_fabric.limits import LEASE_RENEW_S, LEASE_TTL_S
from stream_fabric.pool.lease_changes import BlockChange, encode_summary
from stream_fabric.pool.overload import OverloadTerms
from stream_fabric.pool.placement import Placed, Queued, Refused
from stream_fabric.pool.prefix import PrefixLedger
from stream_fabric.pool.records import Candidate, EngineLoad, EngineRequest, ReplicaInfo, Work
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.inbox import RedisInbox
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.scripts import script
from stream_fabric.redis.wire import Arg
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId
from stream_gw.routing.directory import Directory

POOL = "bench"
MODEL = "m"
CALLERS = 64
BLOCKS = 16
DECLARED = OverloadTerms(1e9, 1e9)
"""As of a declared pool, with marks that no backlog here reaches."""
GROWTH_MAX = 0.10
_libc = ctypes.CDLL(None)
_MARK = StreamId("resp_" + "f" * 32)
_FOREVER_S = 3600.0
_SETTLE_S = 8.0
"""Redis gives an idle connection's buffers back within some seconds."""
_IDLE_S = 3.0
"""Duration of the measurement of lease renewals alone."""
_SOON_S = 0.02
"""As the agent's: what begins and ends within so long is reported together."""
_READY_S = 20.0
_PAUSE_AT = 256
"""Waiting in the queue: the gateway of the memory run lets the agents catch up."""


def stream_name(number: int) -> StreamId:
    return StreamId(f"resp_{number:032x}")


def prefix_of(number: int) -> bytes:
    """The block hashes of one prompt, like no other's."""
    return hashlib.blake2b(number.to_bytes(8, "big"), digest_size=4 * BLOCKS).digest()


def work_of(stream: StreamId, prefix: int, session: str) -> Work:
    messages = [{"role": "user", "content": "What flows to the sea? " * 40}]
    body = msgspec.Raw(msgspec.json.encode({"messages": messages, "max_tokens": 256}))
    return Work(
        EngineRequest(stream, "chat", MODEL, body),
        "1.aabbccdd",
        TenantId(f"tenant-{prefix % 16}"),
        b'{"dialect":"openai.chat","created":1700000000,"model":"m"}',
        2.0,
        session=session,
        prompt_tokens=2000,
        output_tokens=256,
        prefix=prefix_of(prefix),
    )


def info_of(replica: ReplicaId, running: int, room: int, version: int = 0) -> ReplicaInfo:
    return ReplicaInfo(
        replica,
        POOL,
        "bench",
        (MODEL,),
        "ready",
        EngineLoad(running, 0, 64),
        room=room,
        prefill_ms=running * 1.5,
        decode_ms=running * 20.0,
        prefill_per_s=8000.0,
        decode_per_s=2000.0,
        prefix_version=version,
        generation=1,
    )


def names(count: int) -> list[ReplicaId]:
    return [ReplicaId(f"replica-{number:03}-6b0183aad81fa1") for number in range(count)]


# --- Redis -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def redis_on(cores: Cores) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    command += ["--slowlog-max-len", "0"]  # it keeps the arguments of 128 calls; a busy machine makes some slow
    process = start(command, cores.gateway, stdout=subprocess.DEVNULL)
    try:
        wait_port(port)
        yield f"redis://127.0.0.1:{port}/0", process
    finally:
        stop(process)


@contextlib.contextmanager
def child(cores: Cores, *flags: object) -> Iterator[subprocess.Popen[str]]:
    """A process of this module's, once it is ready."""
    command = [sys.executable, "-m", "bench.place", *map(str, flags)]
    process = start(command, cores.rest, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit(f"{flags[1]} did not start")
        yield process
    finally:
        stop(process)


class Recorder(RedisClient):
    """A client that keeps the command of a call, so that its bytes can be sent again at little cost."""

    def __init__(self) -> None:
        super().__init__("redis://never-connected")
        self.args: Sequence[Arg] = ()

    async def _request(self, slot: int, args: Sequence[Arg], timeout_s: float | None) -> Any:
        self.args = args
        return [0, b"", b"load", b""]


async def packed_places(candidates: Sequence[ReplicaId], variants: int = 64) -> list[bytes]:
    """The bytes of ``place`` calls, as ``RedisPools`` makes them, for a stream that is to be replaced."""
    recorder = Recorder()
    out = []
    for number in range(variants):
        chance = random.Random(number)
        asked = [Candidate(replica, chance.choice((0, 0, 0, 500, 1900))) for replica in candidates]
        work = work_of(_MARK, number, f"session-{number}")
        await RedisPools(recorder).place(POOL, work, asked, wait_s=60, jitter=chance.random(), terms=DECLARED)
        out.append(hiredis.pack_command(tuple(recorder.args)))
    return out


# --- callers that cost next to nothing ---------------------------------------------------------------------------


class Caller(asyncio.Protocol):
    """One connection; its replies come in order."""

    def __init__(self, on_reply: Callable[[Caller, float], None], done: asyncio.Future[None]) -> None:
        self._on_reply = on_reply
        self._done = done
        self._sent: deque[float] = deque()
        self._reader = hiredis.Reader()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def call(self, data: bytes) -> None:
        self._sent.append(time.perf_counter())
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            if not isinstance(reply, list) or reply[0] != 0:
                if not self._done.done():
                    self._done.set_exception(LoadFailed(f"not placed: {reply}"))
                return
            self._on_reply(self, now - self._sent.popleft())


@dataclass
class Run:
    """``calls`` placements, from 64 connections."""

    templates: list[bytes]
    calls: int
    first: int
    """Number of its first stream."""
    sent: int = 0
    latencies: list[float] = field(default_factory=list)

    def packed(self) -> bytes:
        template = self.templates[self.sent % len(self.templates)]
        name = stream_name(self.first + self.sent)
        self.sent += 1
        return template.replace(_MARK.encode(), name.encode())

    async def saturate(self, port: int) -> None:
        """Each connection's next call leaves with the answer to its last."""

        def next_call(caller: Caller) -> None:
            if self.sent < self.calls:
                caller.call(self.packed())

        async with self._callers(port, next_call) as (callers, _):
            for caller in callers:
                next_call(caller)

    async def pace(self, port: int, per_s: float) -> None:
        """Calls leave when their time has come, answered or not."""
        chance = random.Random(self.first)
        async with self._callers(port, lambda caller: None) as (callers, done):
            due = time.perf_counter()
            while self.sent < self.calls and not done.done():
                while due <= time.perf_counter() and self.sent < self.calls:
                    callers[self.sent % CALLERS].call(self.packed())
                    due += chance.expovariate(per_s)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))

    @contextlib.asynccontextmanager
    async def _callers(
        self, port: int, then: Callable[[Caller], None]
    ) -> AsyncIterator[tuple[list[Caller], asyncio.Future[None]]]:
        """Connections; the block's end waits for all answers. Raises LoadFailed when one is wrong."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def answered(caller: Caller, took_s: float) -> None:
            self.latencies.append(took_s)
            if len(self.latencies) == self.calls:
                done.set_result(None)
            then(caller)

        made = [await loop.create_connection(lambda: Caller(answered, done), "127.0.0.1", port) for _ in range(CALLERS)]
        callers = [caller for _, caller in made]
        yield callers, done
        await done
        for caller in callers:
            caller.transport.close()


def milliseconds(latencies: Sequence[float], share: float) -> float:
    return sorted(latencies)[math.ceil(len(latencies) * share) - 1] * 1000


def medians(rows: Sequence[Sequence[float]], digits: Sequence[int]) -> list[str]:
    """Median and range of each column over the repetitions."""
    return [Figure(tuple(column)).spell(d) for column, d in zip(zip(*rows, strict=True), digits, strict=True)]


async def fill(url: str, replicas: Sequence[ReplicaId]) -> None:
    """Replicas that always have room, of a server that knows the script."""
    client = RedisClient(url)
    await client.start()
    await client.execute(0, "SCRIPT", "LOAD", script("place").source)
    pools = RedisPools(client)
    for replica in replicas:
        await pools.report(info_of(replica, 3, 1 << 31), ttl_s=_FOREVER_S, running={})
    await client.close()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


def placed_alone(count: int, calls: int, cores: Cores) -> list[float]:
    with redis_on(cores) as (url, process):
        replicas, port = names(count), port_of(url)
        templates = asyncio.run(packed_places(replicas))
        uvloop.run(fill(url, replicas))
        uvloop.run(Run(templates, calls // 10, 1 << 40).saturate(port))
        full = Run(templates, calls, 1)
        before, began = cpu_us(process.pid), time.perf_counter()
        uvloop.run(full.saturate(port))
        took_s, cost_us = time.perf_counter() - began, cpu_us(process.pid) - before
        half = Run(templates, calls // 2, 1 << 41)
        uvloop.run(half.pace(port, calls / took_s / 2))
    latencies = [milliseconds(run.latencies, share) for run in (full, half) for share in (0.5, 0.99)]
    return [calls / took_s, cost_us / 1e4 / took_s, cost_us / calls, calls / cost_us * 1e6, *latencies]


def speed(args: argparse.Namespace, cores: Cores) -> str:
    head = ("candidates", "calls/s", "Redis busy %", "Redis us/call", "calls/s of a whole core")
    at_half = ("p50 ms", "p99 ms", "p50 ms at half", "p99 ms at half")
    rows = []
    for count in args.candidates:
        seen = [placed_alone(count, args.calls, cores) for _ in range(args.repetitions)]
        rows.append([count, *medians(seen, (0, 0, 1, 0, 2, 2, 2, 2))])
    return table((*head, *at_half), rows)


# --- agents without engines --------------------------------------------------------------------------------------


class BareAgent:
    """An agent's reports to its pool without an engine: every stream starts at once and ends after its life."""

    def __init__(self, url: str, replica: ReplicaId, life_s: float, room: int) -> None:
        self._client = RedisClient(url)
        self._pools = RedisPools(self._client)
        self._inbox = RedisInbox(self._client, POOL, replica)
        self._replica = replica
        self._life_s = life_s
        self._room = room
        self._running: dict[StreamId, str] = {}
        self._unsaid: dict[StreamId, None] = {}
        self._changed = asyncio.Event()
        self._ledger = PrefixLedger()
        self._published = 0

    async def start(self) -> None:
        await self._client.start()
        await self._report(renew=True)

    async def run(self) -> None:
        await asyncio.gather(self._read(), self._renew(), self._say())

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        done: list[tuple[str, StreamId]] = []
        while True:
            entries = await self._inbox.read(1.0, done)
            done = [(entry.entry, entry.stream) for entry in entries]
            for _, stream, work, *_ in entries:
                assert work is not None
                self._ledger.touch(array("I", work.prefix))
                self._running[stream] = work.session
                loop.call_later(self._life_s, self._end, stream)
            if entries:
                self._changed.set()

    def _end(self, stream: StreamId) -> None:
        del self._running[stream]
        self._unsaid[stream] = None
        self._changed.set()

    async def _say(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(_SOON_S)
            self._changed.clear()
            await self._report(renew=False)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_RENEW_S)
            version = self._ledger.version
            if version != self._published:
                changes = self._ledger.take_changes()
                if changes is None or not self._published:
                    summary = encode_summary(version, self._ledger.summary())
                    await self._pools.put_prefix(POOL, self._replica, summary)
                change = BlockChange(self._published, version, *(changes or ()), has_summary=not self._published)
                await self._pools.put_block_change(POOL, self._replica, change)
                self._published = version
            await self._report(renew=True)

    async def _report(self, *, renew: bool) -> None:
        ended = list(self._unsaid)
        info = info_of(self._replica, len(self._running), self._room, self._published)
        running = dict(self._running) if renew else None
        await self._pools.report(info, ttl_s=LEASE_TTL_S if renew else None, ended=ended, running=running)
        for stream in ended:
            self._unsaid.pop(stream, None)


async def agents(url: str, count: int, life_s: float, room: int) -> None:
    """A process of many; ends with its stdin."""
    fleet = [BareAgent(url, replica, life_s, room) for replica in names(count)]
    for agent in fleet:
        await agent.start()
    tasks = [asyncio.create_task(agent.run()) for agent in fleet]
    print("ready", flush=True)
    await asyncio.gather(*tasks)


def lived(count: int, args: argparse.Namespace, cores: Cores) -> list[float]:
    with redis_on(cores) as (url, process):
        port = port_of(url)
        templates = asyncio.run(packed_places(names(count)))
        uvloop.run(fill(url, []))
        with child(cores, "--role", "agents", "--url", url, "--replicas", count, "--life", args.life):
            uvloop.run(Run(templates, int(args.rate * 2), 1 << 40).pace(port, args.rate))
            time.sleep(args.life + 1)
            before = cpu_us(process.pid)
            time.sleep(_IDLE_S)
            idle_us = (cpu_us(process.pid) - before) / _IDLE_S
            run = Run(templates, int(args.rate * args.seconds), 1)
            before, began = cpu_us(process.pid), time.perf_counter()
            uvloop.run(run.pace(port, args.rate))
            took_s, cost_us = time.perf_counter() - began, cpu_us(process.pid) - before
    each_us = (cost_us - idle_us * took_s) / run.calls
    latencies = [milliseconds(run.latencies, share) for share in (0.5, 0.99)]
    rate = run.calls / took_s
    return [rate, cost_us / 1e4 / took_s, idle_us / 1e4, each_us, (1e6 - idle_us) / each_us, *latencies]


def life(args: argparse.Namespace, cores: Cores) -> str:
    head = ("replicas", "requests/s", "Redis busy %", "idle %", "Redis us/request", "requests/s of a whole core")
    rows = []
    for count in args.candidates:
        seen = [lived(count, args, cores) for _ in range(args.repetitions)]
        rows.append([count, *medians(seen, (0, 0, 1, 0, 0, 2, 2))])
    return table((*head, "place p50 ms", "place p99 ms"), rows)


# --- memory ------------------------------------------------------------------------------------------------------


async def gateway(url: str, placements: int, prefixes: int, replicas: int) -> None:
    """A gateway's state around placement, under 64 callers. Reports quiet at a fifth and at the end."""
    own = RedisClient(url)
    await own.start()
    watching = RedisPools(own)
    directory = Directory(watching, RedisControl(own).plans)
    refreshing = asyncio.create_task(directory.run())
    counts = {"placed": 0, "queued": 0, "refused": 0}
    numbers = iter(range(placements))
    limit = 0

    async def call(mine: RedisPools) -> None:
        while counts["placed"] + counts["queued"] < limit:
            number = next(numbers, None)
            if number is None:
                return
            prefix = number * prefixes // placements
            session = f"session-{number % 1000}" if number % 2 else ""
            work = work_of(stream_name(number), prefix, session)
            hashes = array("I", work.prefix)
            pool = await directory.pool_of(MODEL)
            while True:
                found = directory.candidates(pool, MODEL, hashes)
                outcome = await mine.place(pool, work, found, wait_s=_FOREVER_S, jitter=random.random())
                match outcome:
                    case Placed():
                        counts["placed"] += 1
                        directory.sent(outcome.replica, hashes)
                    case Queued():
                        counts["queued"] += 1
                        if outcome.position > _PAUSE_AT:
                            await asyncio.sleep(_SOON_S)
                    case Refused():
                        counts["refused"] += 1
                        await asyncio.sleep(_SOON_S)
                        continue
                break

    async with asyncio.timeout(_READY_S):
        while len(await watching.replicas(POOL)) < replicas:
            await asyncio.sleep(0.05)
    print("ready", flush=True)
    for share in (0.2, 1.0):
        limit = int(placements * share)
        clients = [RedisClient(url) for _ in range(4)]
        for client in clients:
            await client.start()
        await asyncio.gather(*(call(RedisPools(clients[number % len(clients)])) for number in range(CALLERS)))
        for client in clients:  # what Redis keeps for a connection depends on how long ago it was used
            await client.close()
        async with asyncio.timeout(_FOREVER_S):
            while (await watching.queue_positions(POOL, []))[0] or any(
                [await watching.in_flight(POOL, info.replica) for info in await watching.replicas(POOL)]
            ):
                await asyncio.sleep(0.1)
        await asyncio.sleep(_SETTLE_S / 4)  # the directory has read its last views
        gc.collect()
        _libc.malloc_trim(0)  # what is held counts, not what was once held for a moment
        print(json.dumps({**counts, "blocks": sys.getallocatedblocks()}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    refreshing.cancel()


async def used_memory(url: str) -> int:
    """The least of some readings."""
    client = RedisClient(url)
    await client.start()
    least = 1 << 62
    for _ in range(10):
        await asyncio.sleep(_SETTLE_S / 10)
        reply = (await client.execute(0, "INFO", "memory")).decode()
        least = min(least, int(reply.partition("used_memory:")[2].split()[0]))
    await client.close()
    return least


async def keys(url: str) -> int:
    client = RedisClient(url)
    await client.start()
    count = int(await client.execute(0, "DBSIZE"))
    await client.close()
    return count


def flat(args: argparse.Namespace, cores: Cores) -> tuple[str, bool]:
    replicas = args.candidates[0]
    seen: list[tuple[dict[str, int], int, int, int]] = []
    with contextlib.ExitStack() as stack:
        url, _ = stack.enter_context(redis_on(cores))
        flags = ("--url", url, "--replicas", replicas)
        stack.enter_context(child(cores, "--role", "agents", *flags, "--life", 0.02, "--room", 256))
        sizes = ("--placements", args.placements, "--prefixes", args.prefixes)
        process = stack.enter_context(child(cores, "--role", "gateway", *flags, *sizes))
        assert process.stdout is not None and process.stdin is not None
        began = time.perf_counter()
        for _ in range(2):
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the gateway's side ended early")
            used = asyncio.run(used_memory(url))
            seen.append((json.loads(line), used, memory(process.pid).rss_kib * 1024, asyncio.run(keys(url))))
            if len(seen) < 2:
                process.stdin.write("\n")
                process.stdin.flush()
        took_s = time.perf_counter() - began
    rows = [
        (
            counts["placed"] + counts["queued"],
            counts["queued"],
            f"{used / 2**20:.2f}",
            f"{rss / 2**20:.2f}",
            counts["blocks"],
            in_redis,
        )
        for counts, used, rss, in_redis in seen
    ]
    head = (
        "placements",
        "of them queued",
        "Redis used_memory MiB",
        "gateway RSS MiB",
        "its live blocks",
        "keys in Redis",
    )
    held = [(used, rss, counts["blocks"]) for counts, used, rss, _ in seen]
    growths = [after / before - 1 for before, after in zip(*held, strict=True)]
    fine = max(growths) <= args.growth_max
    verdict = (
        f"Growth from a fifth to the end: Redis x{1 + growths[0]:.3f}, gateway x{1 + growths[1]:.3f}, "
        f"its live blocks x{1 + growths[2]:.3f} (bound: x{1 + args.growth_max:.2f}): {'ok' if fine else 'EXCEEDED'}"
    )
    about = f"{replicas} replicas, {args.prefixes} prefixes of {BLOCKS} blocks, {args.placements / took_s:.0f} a second"
    return f"{about}\n\n{table(head, rows)}\n\n{verdict}", fine


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.place", description=__doc__, formatter_class=raw)
    parser.add_argument("--parts", default="speed,life,memory")
    parser.add_argument("--candidates", default="8,32,64", help="replicas that a call names; memory has the first")
    parser.add_argument("--calls", type=int, default=50_000, help="speed: of each number of candidates")
    parser.add_argument("--rate", type=float, default=1000.0, help="life: requests a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="life: of each number of replicas")
    parser.add_argument("--repetitions", type=int, default=3, help="of speed and life; the table has median and range")
    parser.add_argument("--life", type=float, default=1.0, help="life: seconds from a request to its end")
    parser.add_argument("--placements", type=int, default=1_000_000, help="memory: how many")
    parser.add_argument("--prefixes", type=int, default=100_000, help="memory: how many are different")
    parser.add_argument("--growth-max", type=float, default=GROWTH_MAX)
    parser.add_argument("--role", choices=("agents", "gateway"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--replicas", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--room", type=int, default=1 << 20, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.candidates = [int(word) for word in args.candidates.split(",")]
    args.parts = args.parts.split(",")
    if not set(args.parts) <= {"speed", "life", "memory"}:
        parser.error("--parts: any of speed,life,memory")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    if args.role == "agents":
        uvloop.run(agents(args.url, args.replicas, args.life, args.room))
        return 0
    if args.role == "gateway":
        uvloop.run(gateway(args.url, args.placements, args.prefixes, args.replicas))
        return 0
    cores = Cores.pick()
    repeated = f"median and range of {args.repetitions}"
    print("; ".join(f"{name} {value}" for name, value in describe().items()))
    if "speed" in args.parts:
        print(f"\nplace alone: {CALLERS} connections, {args.calls} calls; {repeated}\n")
        print(speed(args, cores), flush=True)
    if "life" in args.parts:
        print(f"\nplace, inboxes, reports of beginnings and ends, renewals; streams of {args.life:g} s; {repeated}\n")
        print(life(args, cores), flush=True)
    fine = True
    if "memory" in args.parts:
        text, fine = flat(args, cores)
        print(f"\nmemory: {text}", flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
