"""Kafka away for minutes while requests come: what they notice of it, and whether every bill arrives afterwards.

    python -m bench.outage [--down 300]

Two gateways and two agents on the simulator tell their events to a real Kafka and have a spool. Requests come at a
steady rate, whatever becomes of those before, well under what the machine can do. Kafka is stopped for ``--down``
seconds and comes back, and after a rest it is frozen (SIGSTOP) for as long: connections are then neither refused nor
answered. Latencies of each outage are compared with those of the rests before and after it, in windows of ten
seconds: the median window's quantile, as a ratio. *Noise* is how far the two rests differ among themselves; a machine
that others use cannot show less than that. While Kafka starts again its JVM takes the processors of a small machine, so
that time is told apart. After all, the topic is read from its beginning and every stream's bill is held against what
Redis has settled.

Exit code 1: a request failed, a bill is missing or there twice or of another amount, an event was dropped, the spool
was not emptied, or a ratio is over ``--bound`` and over the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit
from urllib.request import urlopen

import msgspec
import uvloop
from aiokafka import AIOKafkaConsumer

from bench.harness import Cores, cpu_s, describe, table, temporary_folder
from bench.platform import PARTITIONS, Platform
from stream_fabric.events import AttemptTrace, decode_event
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.streams import RedisStreamLog, check_partitions
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import StreamId, TenantId
from tests.support.kafka import KafkaServer
from tests.telemetry.load import make_topics

TOPIC = "ev"
TENANT = TenantId("dev")
WINDOW_S = 10.0
ANSWER_S = 60.0
"""After so long without its end an answer has failed."""
DRAIN_S = 120.0
_SAMPLE_S = 0.5
_CONTENT = re.compile(rb'"content":"(?!")')
_STREAM = re.compile(rb"\r\nx-stream-id: (\S+)", re.IGNORECASE)


@dataclass(frozen=True)
class Plan:
    kinds: Sequence[str] = ("stopped", "frozen")
    down_s: float = 300.0
    rest_s: float = 60.0
    """Before, between and after the outages."""
    rate: float = 30.0
    """Requests a second."""
    tokens: int = 30
    sim: str = "itl_ms=20,ttft_ms=40"
    window_s: float = WINDOW_S
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the platform's processes, in addition to those for Kafka and the spool."""
    spool: bool = True


# --- requests ------------------------------------------------------------------------------------------------


class Answer(asyncio.Protocol):
    """One request on a connection of its own. It takes down when tokens came and understands nothing else meanwhile,
    so that what it measures is not itself."""

    def __init__(self, request: bytes, tokens: int) -> None:
        self._request = request
        self._tokens = tokens
        self._transport: asyncio.WriteTransport | None = None
        self._data = bytearray()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.came_at: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._data += data
        if _CONTENT.search(data):
            self.came_at.append(now)
        if b"data: [DONE]" in data and not self.over.done():
            self.over.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(ConnectionError(f"the connection ended after {len(self.came_at)} tokens: {error}"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def check(self) -> str:
        """The stream's id. Raises ValueError for an answer that is not whole."""
        head, _, body = bytes(self._data).partition(b"\r\n\r\n")
        found, stream = len(_CONTENT.findall(body)), _STREAM.search(head)
        if not head.startswith(b"HTTP/1.1 200 ") or stream is None:
            raise ValueError(f"answered {head[:80]!r} {body[:300]!r}")
        if found != self._tokens or b'"error"' in body:
            raise ValueError(f"{found} tokens of {self._tokens}: ...{body[-300:]!r}")
        return stream[1].decode()


@dataclass
class Load:
    """Requests at a steady rate, to the gateways in turn, and what came of them. Moments are monotonic seconds."""

    urls: Sequence[str]
    key: str
    plan: Plan
    ttft: list[tuple[float, float]] = field(default_factory=list)
    """When it was asked, and how long it took."""
    whole: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    """How much later than it should a request was sent: this program's own delay."""
    streams: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        began, number = time.monotonic(), 0
        async with asyncio.TaskGroup() as tasks:
            while not stop.is_set():
                due = began + number / self.plan.rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self.late.append(time.monotonic() - due)
                tasks.create_task(self._one(number))
                number += 1

    async def _one(self, number: int) -> None:
        tokens = self.plan.tokens
        where = urlsplit(self.urls[number % len(self.urls)])
        body = msgspec.json.encode(
            {
                "model": "sim-small",
                "messages": [{"role": "user", "content": f"Question {number} of rivers."}],
                "max_tokens": tokens,
                "seed": number,
                "stream": True,
                "ignore_eos": True,
            }
        )
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {where.netloc}\r\nauthorization: Bearer {self.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        answer = Answer(head.encode() + body, tokens)
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.get_running_loop().create_connection(lambda: answer, where.hostname, where.port)
                await answer.over
            ended_at = time.monotonic()
            self.streams.append(answer.check())
        except (OSError, TimeoutError, ValueError) as error:
            self.failed.append(f"request {number}: {type(error).__name__} {error}")
            return
        finally:
            answer.close()
        came = answer.came_at
        self.ttft.append((asked_at, came[0] - asked_at))
        self.whole.append((asked_at, ended_at - asked_at))
        self.gaps += [(after, after - before) for before, after in pairwise(came)]


# --- what the processes do meanwhile -------------------------------------------------------------------------


def rss_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


def spool_bytes(folder: Path) -> int:
    """Total size of the spool's segments."""
    total = 0
    for path in folder.glob("*/*-*.*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@dataclass(frozen=True)
class Sample:
    at: float
    spool: int
    rss: int
    """Resident memory of all gateways, bytes."""
    processor_s: float
    """CPU seconds of all gateways and agents."""


class Counters:
    """The counters of telemetry of all processes, by the pages where they tell them."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls

    async def read(self) -> Counter[str]:
        """Sums over processes and labels; of drops also by kind and reason."""
        sums: Counter[str] = Counter()
        for page in await asyncio.gather(*(asyncio.to_thread(_page, url) for url in self._urls)):
            for name, labels, value in re.findall(r"^(events_\w+)(\{[^}]*\})? (\S+)$", page, re.MULTILINE):
                sums[name] += round(float(value))
                if name == "events_dropped_total":
                    sums[name + labels] += round(float(value))
        return sums

    async def quiet(self, within_s: float) -> Counter[str]:
        """Once everything that was told has arrived or been dropped. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while True:
                seen = await self.read()
                settled = seen["events_emitted_total"] == seen["events_sent_total"] + seen["events_dropped_total"]
                if settled and not seen["events_spool_bytes"]:
                    return seen
                await asyncio.sleep(0.2)


def _page(url: str) -> str:
    with urlopen(url + "/metrics", timeout=10) as answer:
        return str(answer.read().decode())


# --- accounts ------------------------------------------------------------------------------------------------


@dataclass
class Accounts:
    """Bills in the topic compared with the usage that Redis settled."""

    bills: int = 0
    missing: list[str] = field(default_factory=list)
    """Settled, and no bill came."""
    twice: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    """Bills whose amount differs from the settled usage."""
    events: int = 0
    doubled: int = 0
    """Events of any kind that came more than once."""
    settled_output: int = 0
    """By the hour's sums."""
    billed_output: int = 0

    @property
    def exact(self) -> bool:
        wrong = self.missing or self.twice or self.other or self.doubled
        return not wrong and self.settled_output == self.billed_output

    def __str__(self) -> str:
        return (
            f"{self.bills} bills, {len(self.missing)} missing, {len(self.twice)} twice, {len(self.other)} of another "
            f"amount; output tokens billed {self.billed_output}, settled {self.settled_output}; {self.events} events, "
            f"{self.doubled} of them doubled"
        )


async def read_topic(servers: str, topic: str = TOPIC) -> list[bytes]:
    """All that lies in a topic."""
    # Without a group it has every partition
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=servers, enable_auto_commit=False)
    await consumer.start()
    try:
        partitions = sorted(consumer.assignment())
        begins = await consumer.beginning_offsets(partitions)
        ends = await consumer.end_offsets(partitions)
        for partition, begin in begins.items():
            consumer.seek(partition, begin)
        values: list[bytes] = []
        while len(values) < sum(ends.values()) - sum(begins.values()):
            for got in (await consumer.getmany(timeout_ms=200)).values():
                values += [record.value for record in got]
        return values
    finally:
        await consumer.stop()


class Settlements:
    """Usage that Redis settled for each stream. Redis keeps a stream for minutes, so it is read during the outage."""

    def __init__(self, log: RedisStreamLog) -> None:
        self._log = log
        self._asked = 0
        self.of: dict[str, Usage] = {}
        self._hours = {int(time.time() // 3600)}

    async def ask(self, streams: Sequence[str]) -> None:
        new, self._asked = streams[self._asked :], len(streams)
        self._hours.add(int(time.time() // 3600))
        for begin in range(0, len(new), 100):
            some = new[begin : begin + 100]
            for stream, found in zip(
                some, await asyncio.gather(*(self._log.settled(StreamId(one)) for one in some)), strict=True
            ):
                assert found is not None and found[0] == "completed", (stream, found)
                self.of[stream] = found[1]

    async def output(self) -> int:
        """All that the tenant's streams were settled with."""
        hours = [await self._log.usage(TENANT, hour) for hour in sorted(self._hours)]
        return sum(used.output for totals in hours for _, used in totals.values())


def compare(values: Iterable[bytes], settlements: Settlements, settled_output: int) -> Accounts:
    accounts = Accounts(settled_output=settled_output)
    ids: Counter[str] = Counter()
    bills: dict[str, list[AttemptTrace]] = {}
    for value in values:
        event = decode_event(value)
        ids[event.id + type(event).__name__] += 1
        if isinstance(event, AttemptTrace) and event.billed:
            bills.setdefault(event.stream, []).append(event)
            accounts.billed_output += event.output_tokens
    accounts.events = ids.total()
    accounts.doubled = sum(count - 1 for count in ids.values())
    accounts.bills = len(bills)
    for stream, used in settlements.of.items():
        told = bills.get(stream, [])
        if not told:
            accounts.missing.append(stream)
        elif len(told) > 1:
            accounts.twice.append(stream)
        elif (told[0].prompt_tokens, told[0].cached_tokens, told[0].output_tokens) != (
            used.prompt,
            used.cached,
            used.output,
        ):
            accounts.other.append(stream)
    return accounts


# --- an outage after another ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outage:
    kind: str
    begun_at: float
    """Monotonic moments: Kafka is taken away, given back, answers again, and all that waited has arrived."""
    ended_at: float
    back_at: float
    drained_at: float

    @property
    def drained_s(self) -> float:
        return self.drained_at - self.back_at


@dataclass
class Told:
    """Measured figures."""

    plan: Plan
    load: Load
    outages: list[Outage]
    samples: list[Sample]
    counters: Counter[str]
    accounts: Accounts
    log: str
    began_at: float
    ended_at: float

    def within(self, values: Sequence[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
        return [(at, value) for at, value in values if begin <= at < end]

    def rests(self, outage: Outage) -> tuple[tuple[float, float], tuple[float, float]]:
        """Before and after it, without what the one before has left behind."""
        number = self.outages.index(outage)
        before = self.outages[number - 1].drained_at if number else self.began_at
        after = self.outages[number + 1].begun_at if number + 1 < len(self.outages) else self.ended_at
        return (before, outage.begun_at), (outage.drained_at, after)

    def most(self, read: Callable[[Sample], int], begin: float, end: float) -> int:
        return max((read(sample) for sample in self.samples if begin <= sample.at <= end), default=0)

    def processor_share(self, begin: float, end: float) -> float:
        """Cores that gateways and agents took."""
        inside = [sample for sample in self.samples if begin <= sample.at <= end]
        if len(inside) < 2:
            return 0.0
        return (inside[-1].processor_s - inside[0].processor_s) / (inside[-1].at - inside[0].at)

    @property
    def dropped(self) -> int:
        return self.counters["events_dropped_total"]


@asynccontextmanager
async def _accounts(url: str) -> AsyncIterator[Settlements]:
    client = RedisClient(url)
    await client.start()
    try:
        yield Settlements(RedisStreamLog(client, await check_partitions(client, PARTITIONS)))
    finally:
        await client.close()


async def outages(plan: Plan, folder: Path) -> Told:
    """Everything is started in ``folder``, and ended."""
    with contextlib.ExitStack() as stack:
        kafka = stack.enter_context(KafkaServer())
        await make_topics(kafka.servers, TOPIC)
        spool = folder / "spool"
        usable = frozenset(os.sched_getaffinity(0))
        environment = {
            "STREAM_GW_PARTITIONS": str(PARTITIONS),
            "STREAM_GW_EVENTS": "kafka",
            "STREAM_GW_KAFKA_SERVERS": kafka.servers,
            "STREAM_GW_EVENTS_TOPIC": TOPIC,
            "STREAM_GW_EVENTS_SPOOL": str(spool) if plan.spool else "",
            **plan.environment,
        }
        command = f"{sys.executable} -m stream_gw.cli.main up --no-telemetry --no-database"
        everywhere = Cores(usable, usable)  # nothing is pinned: what is compared is one thing with itself
        engine = ["--engine", "sim", "--sim", plan.sim]
        running = Platform(
            everywhere, folder, 0, gateways=2, replicas=2, command=command, environment=environment, engine=engine
        )
        stack.callback(running.stop)
        async with _accounts(running.redis_url) as settlements:
            told = await _measured(plan, kafka, running, spool, settlements)
        told.log = running.log
        return told


async def _measured(plan: Plan, kafka: KafkaServer, running: Platform, spool: Path, settlements: Settlements) -> Told:
    load = Load(running.gateway_urls, running.key, plan)
    counters = Counters(running.metrics_urls)
    samples: list[Sample] = []
    pids = [*running.gateway_pids, *running.agent_pids]

    async def sample() -> None:
        while True:
            await settlements.ask(load.streams)
            rss = sum(map(rss_bytes, running.gateway_pids))
            samples.append(Sample(time.monotonic(), spool_bytes(spool), rss, cpu_s(*pids)))
            await asyncio.sleep(_SAMPLE_S)

    found: list[Outage] = []
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        loading = tasks.create_task(load.run(stop))
        sampling = tasks.create_task(sample())
        await asyncio.sleep(min(5.0, plan.rest_s))  # what is loaded once is loaded then
        began_at = time.monotonic()
        await asyncio.sleep(plan.rest_s)
        for kind in plan.kinds:
            found.append(await _outage(kind, plan, kafka, counters))
            await asyncio.sleep(plan.rest_s)
        ended_at = time.monotonic()
        stop.set()
        await loading
        sampling.cancel()
    seen = await counters.quiet(DRAIN_S)
    await settlements.ask(load.streams)
    accounts = compare(await read_topic(kafka.servers), settlements, await settlements.output())
    return Told(plan, load, found, samples, seen, accounts, "", began_at, ended_at)


async def _outage(kind: str, plan: Plan, kafka: KafkaServer, counters: Counters) -> Outage:
    begin, end = {"stopped": (kafka.stop, kafka.start), "frozen": (kafka.freeze, kafka.thaw)}[kind]
    begun_at = time.monotonic()
    await asyncio.to_thread(begin)
    await asyncio.sleep(max(0.0, begun_at + plan.down_s - time.monotonic()))
    ended_at = time.monotonic()
    await asyncio.to_thread(end)
    back_at = time.monotonic()
    async with asyncio.timeout(DRAIN_S):
        while True:
            seen = await counters.read()
            if not seen["events_spool_bytes"] and not seen["events_transport_away"]:
                break
            await asyncio.sleep(0.2)
    return Outage(kind, begun_at, ended_at, back_at, time.monotonic())


# --- figures -------------------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def windows(values: Sequence[tuple[float, float]], begin: float, end: float, width_s: float) -> list[list[float]]:
    """Values by the window that they fall into, whole windows only."""
    count = max(1, int((end - begin) / width_s))
    found: list[list[float]] = [[] for _ in range(count)]
    for at, value in values:
        number = int((at - begin) / width_s)
        if 0 <= number < count:
            found[number].append(value)
    return [window for window in found if window]


@dataclass(frozen=True)
class Compared:
    what: str
    share: float
    rest: float
    """Seconds: the median window's quantile, before and after."""
    down: float
    back: float
    noise: float
    """The rests' own ratio, the larger over the smaller."""

    @property
    def ratio(self) -> float:
        return self.down / self.rest


def compared(told: Told, outage: Outage) -> list[Compared]:
    found = []
    width_s = told.plan.window_s
    before, after = told.rests(outage)
    for what, values in (("TTFT", told.load.ttft), ("gap", told.load.gaps), ("whole answer", told.load.whole)):
        spans = [windows(values, *span, width_s) for span in (before, after, (outage.begun_at, outage.ended_at))]
        back = [value for at, value in values if outage.ended_at <= at < outage.drained_at]
        for share in (0.5, 0.9, 0.99):
            first, last, down = (
                [quantile(window, share) for window in span] for span in spans
            )  # fmt: skip
            halves = [statistics.median(half) for half in (first, last) if half]
            found.append(
                Compared(
                    what,
                    share,
                    statistics.median(first + last),
                    statistics.median(down),
                    quantile(back, share) if back else float("nan"),
                    max(halves) / min(halves),
                )
            )
    return found


def report(told: Told, outage: Outage) -> str:
    rows = []
    for one in compared(told, outage):
        rows.append(
            (
                f"{one.what} p{one.share * 100:g}",
                f"{one.rest * 1e3:.2f}",
                f"{one.down * 1e3:.2f}",
                f"{one.ratio:.3f}",
                f"{one.noise:.3f}",
                f"{one.back * 1e3:.2f}",
            )
        )
    before, after = told.rests(outage)
    down = outage.begun_at, outage.ended_at
    shares = [told.processor_share(*span) for span in (before, down, after)]
    rss = [told.most(lambda sample: sample.rss, *span) / 2**20 for span in (before, down, after)]
    high = told.most(lambda sample: sample.spool, outage.begun_at, outage.drained_at)
    lines = [
        f"Kafka {outage.kind} for {outage.ended_at - outage.begun_at:.0f} s",
        table(("what", "rest ms", "down ms", "ratio", "noise", "while it came back ms"), rows),
        f"answering again {outage.back_at - outage.ended_at:.1f} s after it was given back; all that waited had "
        f"arrived {outage.drained_s:.1f} s later; spool {high / 1e6:.1f} MB at most",
        "gateways and agents took {:.3f}, {:.3f}, {:.3f} cores before, while and after".format(*shares),
        "the gateways together {:.1f}, {:.1f}, {:.1f} MiB at most before, while and after".format(*rss),
    ]
    return "\n".join(lines)


def wrong(told: Told, bound: float) -> list[str]:
    """Violations of the benchmark's conditions."""
    found = [f"{len(told.load.failed)} requests failed, as {told.load.failed[0]}"] if told.load.failed else []
    if not told.accounts.exact:
        found.append(f"accounts differ: {told.accounts}")
    if told.dropped:
        found.append(f"events were dropped: {dict(told.counters)}")
    for outage in told.outages:
        for one in compared(told, outage):
            if one.ratio > max(bound, one.noise):
                found.append(
                    f"{one.what} p{one.share * 100:g} is {one.ratio:.3f} of its usual while Kafka is {outage.kind}"
                )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.outage", description=__doc__, formatter_class=raw)
    parser.add_argument("--down", type=float, default=300.0, help="seconds of each outage (default 300)")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds before, between and after (default 60)")
    parser.add_argument("--rate", type=float, default=30.0, help="requests a second (default 30)")
    parser.add_argument("--tokens", type=int, default=30, help="of each answer (default 30)")
    parser.add_argument("--kinds", default="stopped,frozen", help="outages, in order (default stopped,frozen)")
    parser.add_argument("--bound", type=float, default=1.05, help="a latency's ratio at most (default 1.05)")
    args = parser.parse_args(argv)
    plan = Plan(args.kinds.split(","), args.down, args.rest, args.rate, args.tokens)
    print("; ".join(f"{name} {value}" for name, value in describe().items()))
    with temporary_folder() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        told = runner.run(outages(plan, Path(folder)))
    late = told.load.late
    print(
        f"{len(told.load.streams)} requests whole, {len(told.load.failed)} failed, at {plan.rate:g}/s of {plan.tokens} "
        f"tokens; the generator itself was late by {quantile(late, 0.5) * 1e3:.2f} ms at p50, "
        f"{quantile(late, 0.99) * 1e3:.2f} ms at p99\n"
    )
    for outage in told.outages:
        print(report(told, outage), end="\n\n")
    spooled, dropped = told.counters["events_spooled_total"], told.dropped
    print(f"{told.accounts}; {spooled} events went by the spool, {dropped} were dropped")
    faults = wrong(told, args.bound)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
