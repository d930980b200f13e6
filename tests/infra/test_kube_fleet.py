"""A pool of real agents under a production trace, on a real control plane: it grows before its readers notice, shrinks
one idle replica at a time, goes to none and back, and whoever dies of those who scale it, no stream is cut.

One run is recorded, and then looked at from each side. Times are compressed: a replica starts in seconds, and the pool
may be called idle after seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import aiohttp
import msgspec
import pytest

from inference.control.pods import pod_of
from inference.engines.sim.text import Prompt, words
from inference.simulate.traces import Request, TraceAbsent, load, traces_folder
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.stream.ids import ReplicaId
from tests.chaos.readers import figures, share
from tests.infra.cluster import GATEWAYS, Cluster, cluster, deployment, pool
from tests.support.figures import Tell
from tests.support.kube import need_kube
from tests.support.kubelet import Pod
from tests.support.server import wait_for
from tests.support.waiting import eventually

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

BUSY, RARE = "conv", "rare"
OBJECTIVE_S = 2.0
OUTSIDE = 0.01
"""The share of requests that may take longer."""
STEP, STEP_S = 5, 30.0
"""Factor of the step in traffic, and the seconds in which it is reached."""
BEFORE_S = 20.0
GROWN = 7
SHRUNK = 6
PATIENCE_S = 120.0
LEFT_OUT_S = 40.0
"""The trace begins slowly."""
SPEED = 2.0
"""Requests come so many times faster than in the trace, with prompts and answers so many times shorter: as many tokens,
and enough requests that what is more than chance is soon seen."""
POOLS = [
    pool(
        BUSY,
        "itl_ms=50,ttft_ms=100,max_num_seqs=20",
        min=2,
        max=8,
        plan={
            "ttft_objective_s": OBJECTIVE_S,
            "warm_min": 2,
            "warm_share": 0,
            "cold_start_s": 5,
            "low_s": 10,
            "backlog_over_s": 1,
            "utilisation_aimed": 0.5,
        },
    ),
    pool(
        RARE,
        "itl_ms=50,ttft_ms=100,max_num_seqs=20",
        min=0,
        max=2,
        fallbackReplicas=1,
        plan={"warm_share": 0, "cold_start_s": 5, "low_s": 5, "zero_s": 5},
    ),
]


# --- readers -----------------------------------------------------------------------------------------------------


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    delta: Delta
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: dict[str, Any] | None = None


_chunk = msgspec.json.Decoder(Chunk)


class Reader:
    """One request over one SSE connection, which nothing may cut. ``wrong`` says what it saw that it must never see."""

    def __init__(self, model: str, seed: int, prompt_tokens: int, tokens: int) -> None:
        filler = "tok " * max(prompt_tokens - 8, 0)
        self.body = {
            "model": model,
            "messages": [{"role": "user", "content": f"{seed} {filler}"}],
            "seed": seed,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.tokens = tokens
        self.asked_at = self.first_at = 0.0
        self.comments: set[bytes] = set()
        self.text: list[str] = []
        self.finish: list[str] = []
        self.used = 0
        self.cursor = (0, 0)
        self.done = False
        self.wrong = ""

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.asked_at

    async def read(self, session: aiohttp.ClientSession, url: str) -> None:
        self.asked_at = time.monotonic()
        try:
            async with session.post(f"{url}/v1/chat/completions", json=self.body) as answer:
                assert answer.status == 200, (answer.status, await answer.text())
                rest = b""
                async for data in answer.content.iter_any():
                    *events, rest = (rest + data).split(b"\n\n")
                    for event in events:
                        assert not self.done, f"{event!r} after [DONE]"
                        for line in event.split(b"\n"):
                            self._line(line)
            self._check(rest)
        except (AssertionError, aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            self.wrong = f"{type(error).__name__} {error} after {len(self.text)} pieces of {self.body['seed']}"

    def _line(self, line: bytes) -> None:
        if line.startswith(b":"):
            self.comments.add(line)
        elif line.startswith(b"id: "):
            epoch, seq = map(int, line[4:].split(b"-"))
            assert (epoch, seq) > self.cursor, f"{epoch}-{seq} after {self.cursor}"
            self.cursor = epoch, seq
        elif line == b"data: [DONE]":
            self.done = True
        else:
            assert line.startswith(b"data: "), line
            chunk = _chunk.decode(line[6:])
            self.used = (chunk.usage or {}).get("completion_tokens", self.used)
            for choice in chunk.choices:
                if choice.delta.content:
                    self.first_at = self.first_at or time.monotonic()
                    self.text.append(choice.delta.content)
                if choice.finish_reason:
                    self.finish.append(choice.finish_reason)

    def _check(self, rest: bytes) -> None:
        """It is what the simulator says to this prompt, whole, once and in order."""
        assert self.done and not rest, f"the body ended with {rest!r}, without its end"
        said = islice(words(Prompt(self.body), self.body["seed"]), self.tokens)
        assert "".join(self.text) == "".join(said), "other text than the simulator gives"
        assert (self.finish, self.used) == (["length"], self.tokens)


# --- what is asked -----------------------------------------------------------------------------------------------


def requests() -> tuple[str, Sequence[Request]]:
    """The trace's, or, where there is none, as many of such sizes."""
    try:
        trace = load("azure", traces_folder(None))
        return "the Azure conversation trace of 2023", trace.requests
    except TraceAbsent:
        return "made-up requests, for there is no trace", tuple(made_up())


def made_up() -> Iterator[Request]:
    chance, at_s = random.Random(1), 0.0
    for number in range(5000):
        at_s += chance.expovariate(5.0)
        prompt, output = chance.lognormvariate(6.7, 0.9), chance.lognormvariate(5.3, 0.7)
        yield Request(number, at_s, min(int(prompt), 4000), min(max(int(output), 10), 500), (), "")


class Load:
    """Requests as the trace has them: at first one in five of them, and within half a minute of the step all."""

    def __init__(self, gates: Callable[[], Sequence[str]], session: aiohttp.ClientSession) -> None:
        self._gates = gates
        self._session = session
        self.source, self._requests = requests()
        self.readers: list[Reader] = []
        self.late_s: list[float] = []
        self.step_at: float | None = None
        self.over = False

    @property
    def share(self) -> float:
        """Share of the trace's requests that are sent."""
        if self.step_at is None:
            return 1 / STEP
        return min(1 / STEP + (1 - 1 / STEP) * (time.monotonic() - self.step_at) / STEP_S, 1.0)

    async def run(self) -> None:
        began, turn, due_share = time.monotonic(), itertools.count(), 0.0
        async with asyncio.TaskGroup() as tasks:
            for request in self._requests:
                if request.at_s < LEFT_OUT_S:
                    continue
                due = began + (request.at_s - LEFT_OUT_S) / SPEED
                await asyncio.sleep(due - time.monotonic())
                if self.over:
                    break
                due_share += self.share
                if due_share < 1:
                    continue
                due_share -= 1
                self.late_s.append(time.monotonic() - due)
                gates = self._gates()
                prompt, output = (max(int(size / SPEED), 1) for size in (request.prompt_tokens, request.output_tokens))
                reader = Reader(BUSY, request.number, prompt, output)
                self.readers.append(reader)
                tasks.create_task(reader.read(self._session, gates[next(turn) % len(gates)]))


# --- what is recorded --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    at: float
    replicas: dict[str, int]
    """Desired replicas of each Deployment."""
    ready: dict[str, int]
    plans: dict[str, PoolPlan]


@dataclass
class Record:
    """One run."""

    cluster: Cluster
    load: Load = field(init=False)
    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    """Where the Service leads to now."""
    marks: dict[str, float] = field(default_factory=dict)
    """When what happened that the test did."""
    rare: list[Reader] = field(default_factory=list)
    pods: list[Pod] = field(default_factory=list)
    """Agents of the busy pool, all that there have been."""

    def mark(self, what: str) -> None:
        self.marks[what] = time.monotonic()

    @property
    def last(self) -> Sample:
        return self.samples[-1]

    def between(self, first: str, last: str) -> list[Sample]:
        return [one for one in self.samples if self.marks[first] <= one.at <= self.marks[last]]

    def asked(self, first: str, last: str) -> list[Reader]:
        """Readers whose requests were sent between the two moments."""
        return [one for one in self.load.readers if self.marks[first] <= one.asked_at < self.marks[last]]

    def plans(self, pool: str) -> list[tuple[float, PoolPlan]]:
        return [(one.at, one.plans[pool]) for one in self.samples if pool in one.plans]

    def reasons(self, pool: str) -> list[tuple[float, str]]:
        """(seconds since the start, reason) of each change of the plan."""
        found = [(at - self.began, plan.reason) for at, plan in self.plans(pool)]
        return [found[0], *(new for old, new in pairwise(found) if new[1] != old[1])]

    async def watch(self, control: RedisControl) -> None:
        while True:
            await self.look(control)
            await asyncio.sleep(0.3)

    async def look(self, control: RedisControl) -> None:
        replicas, gates = await asyncio.to_thread(lambda: (self.cluster.replicas(), self.cluster.gates()))
        self.urls = [gate.url for gate in gates]
        ready = {pool: sum(pod.ready for pod in self.cluster.agents(pool)) for pool in (BUSY, RARE)}
        self.samples.append(Sample(time.monotonic(), replicas, ready, await control.plans()))


# --- the run -----------------------------------------------------------------------------------------------------


class Run:
    """Drives the platform through the scenario, step by step."""

    def __init__(self, cluster: Cluster, record: Record, control: RedisControl, session: aiohttp.ClientSession) -> None:
        self.cluster, self.record, self.control, self.session = cluster, record, control, session
        self.load = record.load = Load(lambda: record.urls, session)

    async def until(self, what: str, condition: Callable[[Sample], Any]) -> None:
        await eventually(lambda: condition(self.record.last), f"{what}; plans {self.record.last.plans}", PATIENCE_S)

    async def all(self) -> None:
        await self.until(
            "four ready, and none of the rare pool",
            lambda now: now.ready == {BUSY: 4, RARE: 0} and now.plans[BUSY].resting is None,
        )
        loading = asyncio.create_task(self.load.run())
        try:
            self.record.mark("load begins")
            await asyncio.gather(self.from_none(), asyncio.sleep(BEFORE_S))
            await self.up()
            await self.kills()
            await self.down()
        finally:
            self.load.over = True
            await loading
        self.record.mark("load ended")
        await self.until("none of the rare pool", lambda now: now.replicas[RARE] == 0)
        self.record.mark("none again")

    async def from_none(self) -> None:
        await self.until("none of the rare pool", lambda now: now.replicas[RARE] == 0 and RARE in now.plans)
        await self.ask_rare(1)

    async def ask_rare(self, seed: int) -> None:
        reader = Reader(RARE, seed, 100, 100)
        self.record.rare.append(reader)
        await reader.read(self.session, self.record.urls[0])

    async def up(self) -> None:
        self.record.mark("step")
        self.load.step_at = time.monotonic()
        grown = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.keep_rare(grown))
            try:
                await self.until(f"{GROWN} replicas", lambda now: now.ready[BUSY] >= GROWN)
            finally:
                grown.set()
        self.record.mark("grown")

    async def keep_rare(self, over: asyncio.Event) -> None:
        """Ask the rare pool so often that it does not go to none, however long the busy pool takes to grow."""
        while not over.is_set():
            await self.ask_rare(len(self.record.rare) + 1)
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 30)

    async def kills(self) -> None:
        # Without Prometheus a pool that has none would get its fallback
        await self.ask_rare(len(self.record.rare) + 1)
        await self._without("keda-operator", self._for_some_looks)
        await self._without("prometheus", self._fallback)
        await self.leader_dies("the leader")

    async def _without(self, process: str, meanwhile: Callable[[], Awaitable[None]]) -> None:
        self.record.mark(f"{process} killed")
        await asyncio.to_thread(self.cluster.kube.kill, process)
        await meanwhile()
        await asyncio.to_thread(self.cluster.kube.again, process)
        self.record.mark(f"{process} is back")

    async def _for_some_looks(self) -> None:
        await asyncio.sleep(10)  # five of the autoscaler's looks, which find no figure

    async def _fallback(self) -> None:
        def in_fallback() -> bool:
            said = self.cluster.ask(f"apis/keda.sh/v1alpha1 scaledobjects/{deployment(BUSY)}")["status"]["conditions"]
            return any(one["type"] == "Fallback" and one["status"] == "True" for one in said)

        await eventually(lambda: asyncio.to_thread(in_fallback), "KEDA to fall back", PATIENCE_S)
        await asyncio.sleep(3)  # and the autoscaler to act on it

    async def leader_dies(self, what: str) -> None:
        before = await self.control.leader()
        pid = int(before.rsplit("-", 2)[1])
        (pod,) = [pod for pod in self.cluster.kubelet.pods("controller") if pod.pid == pid]
        self.record.mark(f"{what} killed")
        self.cluster.kubelet.kill(pod)

        async def another() -> bool:
            return await self.control.leader() not in ("", before)

        await eventually(another, "another leader", PATIENCE_S)
        self.record.mark(f"{what} followed")

    async def down(self) -> None:
        self.load.step_at = None
        self.record.mark("step over")
        await self.until("one that is to go", lambda now: now.plans[BUSY].victims)
        await self.leader_dies("the leader in the middle")
        await self.until(f"{SHRUNK} replicas", lambda now: now.replicas[BUSY] <= SHRUNK)
        await self.until("the pods to be gone", lambda now: len(self.cluster.agents(BUSY)) <= SHRUNK)
        self.record.mark("shrunk")


@asynccontextmanager
async def running(cluster: Cluster, record: Record) -> AsyncIterator[Run]:
    client = RedisClient(cluster.redis_url)
    await client.start()
    control = RedisControl(client)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=PATIENCE_S)
    headers = {"authorization": f"Bearer {cluster.key}"}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        await record.look(control)
        watching = asyncio.create_task(record.watch(control))
        try:
            yield Run(cluster, record, control, session)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await client.close()


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    need_kube()
    with cluster(tmp_path_factory.mktemp("chart"), POOLS) as started:
        record = Record(started)

        async def run() -> None:
            async with running(started, record) as scene:
                await scene.all()

        asyncio.run(run())
        agents = [*started.kubelet.past, *started.kubelet.pods()]
        record.pods = [pod for pod in agents if pod.labels.get("stream-gw/pool") == BUSY]
        yield record


def left(pod: Pod) -> float:
    """When it was told to leave, on the monotonic clock; 0: it was not."""
    return next((at for at, what in pod.told if what.endswith("to leave")), 0.0)


def its_pod(replica: ReplicaId | None) -> str:
    return "" if replica is None else pod_of(replica)


def test_every_stream_came_whole_and_once(record: Record, tell: Tell) -> None:
    load = record.load
    readers = [*load.readers, *record.rare]
    assert not [reader.wrong for reader in readers if reader.wrong]
    assert len(readers) > 150 and sum(reader.tokens for reader in readers) > 20_000
    tell(
        f"{len(readers)} streams whole of {len(readers)}, {sum(reader.tokens for reader in readers)} tokens; requests: "
        f"{load.source}; asked late by {figures(load.late_s)}"
    )


def test_the_pool_grew_before_its_readers_noticed(record: Record, tell: Tell) -> None:
    for first, last in pairwise(("load begins", "step", "grown", "step over", "load ended")):
        asked = record.asked(first, last)
        counts = [one.ready[BUSY] for one in record.between(first, last)]
        tell(f"{first} to {last}: {counts[0]} to {counts[-1]} ready, TTFT {figures([one.ttft_s for one in asked])}")
    asked = record.asked("step", "step over")
    outside = [one for one in asked if one.ttft_s > OBJECTIVE_S]
    tell(f"{len(outside)} of {len(asked)} first tokens came after more than {OBJECTIVE_S:g} s")
    assert len(outside) <= OUTSIDE * len(asked), sorted(round(one.ttft_s, 2) for one in outside)
    for at, reason in record.reasons(BUSY):
        tell(f"{at:.0f} s: {reason}")


def test_the_pool_shrank_by_idle_replicas_that_had_been_chosen(record: Record, tell: Tell) -> None:
    changes = [record.samples[0], *(new for old, new in pairwise(record.samples) if new.replicas != old.replicas)]
    tell(f"replicas: {', '.join(f'{one.at - record.began:.0f} s {one.replicas[BUSY]}' for one in changes)}")
    # Others were on their way when the record ended
    gone = [pod for pod in record.pods if left(pod) and any(what.startswith("ended") for _, what in pod.told)]
    assert len(gone) >= GROWN - SHRUNK
    for pod in gone:
        at = left(pod)
        assert at > record.marks["step over"], f"{pod.name} left under load"
        rested = [when for when, plan in record.plans(BUSY) if when < at and its_pod(plan.resting) == pod.name]
        chosen = [when for when, plan in record.plans(BUSY) if when < at and pod.name in map(its_pod, plan.victims)]
        assert rested and chosen and rested[-1] < chosen[-1], f"{pod.name} was told to go before it had rested"
        # It had nothing to finish, and was given all its grace to do it
        happened = [what for told, what in pod.told if told >= at]
        assert happened[:3] == ["has 90 s to leave", "SIGTERM", "ended with 0"], happened
        took_s = pod.told[-1][0] - at
        assert took_s < 20, f"{pod.name} took {took_s:.1f} s"
        tell(f"{pod.name}: rested {at - rested[-1]:.1f} s before it left, gone {took_s:.1f} s later")


@pytest.mark.parametrize(
    ("killed", "back"),
    [
        ("keda-operator killed", "keda-operator is back"),
        ("prometheus killed", "prometheus is back"),
        ("the leader killed", "the leader followed"),
    ],
)
def test_whoever_dies_takes_nothing_with_it(record: Record, tell: Tell, killed: str, back: str) -> None:
    meanwhile = record.between(killed, back)
    counts = [one.replicas[BUSY] for one in meanwhile]
    assert len(counts) > 3 and counts == sorted(counts) and counts[0] >= GROWN
    assert min(one.ready[BUSY] for one in meanwhile) >= GROWN
    # Streams begin as ever
    asked = record.asked(killed, back)
    assert asked and share([one.ttft_s for one in asked], 0.9) < OBJECTIVE_S
    took_s = record.marks[back] - record.marks[killed]
    tell(
        f"{back} after {took_s:.1f} s, {counts[0]} to {counts[-1]} replicas; TTFT {figures([r.ttft_s for r in asked])}"
    )


def test_another_leader_goes_on_with_what_was_chosen(record: Record) -> None:
    """It was killed when it had chosen who goes, or while that one went."""
    # One that was chosen before the load came stayed: the load needed it
    over, at = record.marks["step over"], record.marks["the leader in the middle killed"]
    chosen = {its_pod(name) for when, plan in record.plans(BUSY) if over < when <= at for name in plan.victims}
    gone = sorted((pod for pod in record.pods if left(pod)), key=left)
    assert chosen and chosen == {pod.name for pod in gone[: len(chosen)]}
    for what in ("the leader", "the leader in the middle"):
        assert record.marks[f"{what} followed"] - record.marks[f"{what} killed"] < 10


def test_the_rare_pool_went_to_none_and_who_came_waited_for_the_first(record: Record, tell: Tell) -> None:
    changes = [next(some) for _, some in itertools.groupby(record.samples, lambda one: one.replicas[RARE])]
    story = sorted(
        [
            *((one.at - record.began, f"{one.replicas[RARE]} replicas") for one in changes),
            *((at - record.began, what) for what, at in record.marks.items()),
            *((reader.asked_at - record.began, "a request") for reader in record.rare),
            *record.reasons(RARE),
        ]
    )
    assert [one.replicas[RARE] for one in changes] == [1, 0, 1, 0], story
    reader, *later = record.rare
    warming = [comment for comment in reader.comments if b"warming up" in comment]
    assert warming and all(comment.startswith(b": queued 1 of 1, ") for comment in warming)
    assert not [comment for each in later for comment in each.comments if b"warming up" in comment]
    tell(f"the first token after {reader.ttft_s:.1f} s; the client was told {min(warming).decode()!r}")
    for at, reason in record.reasons(RARE):
        tell(f"{at:.0f} s: {reason}")


def test_only_what_the_test_killed_was_started_again(record: Record) -> None:
    restarts = {pod.name: pod.restarts for pod in [*record.cluster.kubelet.past, *record.cluster.kubelet.pods()]}
    killed = [pod for pod in record.cluster.kubelet.pods("controller") if pod.restarts]
    assert sum(restarts.values()) == 2 == sum(pod.restarts for pod in killed)


def test_a_gateway_that_answers_no_more_gets_no_requests(record: Record) -> None:
    """And the Service leads to it again once it does."""
    running = record.cluster
    silent = running.kubelet.pods("gateway")[0]
    os.kill(silent.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: len(running.gates()) == GATEWAYS - 1, "the Service to leave it out", 60, every_s=0.3)
        assert silent.url("http") not in [gate.url for gate in running.gates()]
    finally:
        os.kill(silent.pid, signal.SIGCONT)
    wait_for(lambda: len(running.gates()) == GATEWAYS, "the Service to lead to it again", 60, every_s=0.3)
    assert silent.restarts == 0


def test_a_replica_that_dies_is_started_again_in_its_pod(record: Record) -> None:
    running = record.cluster
    pod = running.agents(BUSY)[0]
    running.kubelet.kill(pod)

    def again() -> bool:
        found = running.ask(f"api/v1 pods/{pod.name}")["status"]
        (container,) = found["containerStatuses"]
        return bool(container["restartCount"] == 1 and container["ready"])

    wait_for(again, "it to be ready again", 60, every_s=0.3)
