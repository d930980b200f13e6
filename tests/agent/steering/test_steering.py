"""Inputs of running streams, on a real Redis, with an engine that says what the test tells it to."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import pytest

from inference.agent.agent import Agent
from inference.agent.replica import AgentPolicy, LeasePolicy
from inference.agent.steering import steering
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from stream_fabric.pool.placement import Placed
from stream_fabric.pool.records import Candidate, EngineRequest, Work
from stream_fabric.ports import FrameSink
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery.failover import Failover
from stream_fabric.recovery.lease_reaper import LOST
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.topology import slot_of
from stream_fabric.stream.cursor import BEGINNING, Epoch
from stream_fabric.stream.frames import (
    ChoiceEnd,
    Close,
    Delta,
    End,
    ErrorInfo,
    Frame,
    InputNote,
    Note,
    Open,
    Usage,
    decode,
)
from stream_fabric.stream.ids import StreamId, TenantId, new_stream_id
from stream_fabric.stream.log import InputCode
from tests.support.agents import make_agent
from tests.support.events import Heard
from tests.support.waiting import eventually

ACME = TenantId("acme")
PARTITIONS = Partitions(4)


class Script(SimEngine):
    """An engine whose answers the test speaks: the sink of each request, in order."""

    def __init__(self) -> None:
        super().__init__(SimSettings.parse("itl_ms=5"))
        self.bodies: list[dict[str, object]] = []
        self.sinks: list[FrameSink] = []
        self.aborted: list[StreamId] = []

    def submit(self, request: EngineRequest, sink: FrameSink) -> None:
        self.bodies.append(msgspec.json.decode(request.body))
        self.sinks.append(sink)

    def abort(self, stream: StreamId) -> None:
        self.aborted.append(stream)

    def say(self, *texts: str, prompt: int = 10) -> None:
        """The newest answer begins with these tokens."""
        sink = self.sinks[-1]
        sink.usage(prompt, 2)
        sink.frame(Note("prompt", prompt_tokens=prompt, cached_tokens=2))
        sink.frame(Open(0, 0, "text"))
        for text in texts:
            sink.text(0, text)

    def finish(self, output: int, reason: str = "stop", prompt: int = 10) -> None:
        sink = self.sinks[-1]
        sink.frame(Close(0))
        sink.frame(ChoiceEnd(0, reason))
        sink.end("completed", usage=Usage(prompt, 2, 0, output))

    @property
    def messages(self) -> object:
        return self.bodies[-1]["messages"]


class Desk:
    def __init__(self, client: RedisClient, pool: str, agent: Agent, engine: Script, heard: Heard) -> None:
        self.log = RedisStreamLog(client, PARTITIONS)
        self.pools = RedisPools(client)
        self.client, self.pool, self.agent, self.engine, self.heard = client, pool, agent, engine, heard
        self.sent_us = 0

    async def ask(self, deadline_unix_ms: int = 0, **fields: object) -> StreamId:
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        body = msgspec.json.encode({"messages": [{"role": "user", "content": "Hi"}], **fields})
        request = EngineRequest(stream, "chat", "sim-small", msgspec.Raw(body), deadline_unix_ms)
        work = Work(request, str(Epoch(1, "aa")), ACME, b"{}", None)
        await self.log.create(stream, work.parsed_epoch(), ACME, b"{}", None)
        placed = await self.pools.place(self.pool, work, [Candidate(self.agent.replica, 0)], wait_s=60, jitter=0.0)
        assert isinstance(placed, Placed)
        await eventually(lambda: self.engine.sinks)
        return stream

    async def input(self, stream: StreamId, name: str, text: str = "") -> InputCode:
        item = msgspec.json.encode({"role": "user", "content": text or name})
        self.sent_us = HostClock().now_us()
        return await self.log.input(stream, ACME, name, msgspec.Raw(item), self.sent_us)

    async def frames(self, stream: StreamId) -> list[Frame]:
        page = await self.log.watch(stream, ACME, None, BEGINNING)
        assert page is not None
        return [decode(line) for entry in page.entries for line in entry.frames.split(b"\n")]

    async def hold_end(self, stream: StreamId, name: str) -> None:
        """Let the log refuse the end of the answer, because this input waits, and keep the agent from reading it."""
        with self.no_reads():
            assert await self.input(stream, name) is InputCode.ACCEPTED
            self.engine.finish(4)
            await eventually(lambda: self.agent.running[stream].producer.is_held, "the refused end")

    @contextmanager
    def no_reads(self) -> Iterator[None]:
        """Keep the agent from reading inputs."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.agent.steering, "read_soon", lambda stream: None)
            yield

    async def applied(self, stream: StreamId, *names: str) -> None:
        async def done() -> bool:
            return [note.id for note in notes(await self.frames(stream))] == list(names)

        await eventually(done, f"the notes of {names}")

    async def end(self, stream: StreamId) -> tuple[list[Frame], End]:
        async def ended() -> list[Frame] | None:
            frames = await self.frames(stream)
            return frames if isinstance(frames[-1], End) else None

        frames: list[Frame] = await eventually(ended, "the stream's terminal")
        last = frames[-1]
        assert isinstance(last, End)
        return frames, last


def notes(frames: list[Frame]) -> list[InputNote]:
    return [
        msgspec.json.decode(frame.body, type=InputNote)
        for frame in frames
        if isinstance(frame, Note) and frame.kind == "input" and frame.body is not None
    ]


def said(frames: list[Frame]) -> list[str]:
    """The text of each answer."""
    found = [""]
    for frame in frames:
        if isinstance(frame, Delta):
            found[-1] += frame.text
        elif isinstance(frame, Note) and frame.kind == "input" and b"applied" in bytes(frame.body or b""):
            found.append("")
    return found


@asynccontextmanager
async def desk(redis_url: str, pool: str = "") -> AsyncIterator[Desk]:
    engine = Script()
    client = RedisClient(redis_url)
    await client.start()
    pool = pool or f"pool-{os.urandom(4).hex()}"
    lease = LeasePolicy(pool, "sim", tuple(await engine.start()), True, 3.0, 4.0)
    heard = Heard()
    agent = make_agent(AgentPolicy(lease, 1.0, 0.2), engine, client, PARTITIONS, heard)
    task = asyncio.create_task(agent.run())
    try:
        await asyncio.wait_for(agent.ready.wait(), 10)
        yield Desk(client, pool, agent, engine, heard)
    finally:
        agent.drain()
        agent.end_grace_period()
        await asyncio.wait([task])
        await client.close()


async def test_an_input_cuts_the_answer_and_the_next_one_takes_it_into_account(redis_url: str) -> None:
    async with desk(redis_url) as d:
        stream = await d.ask(max_tokens=50)
        d.engine.say("Red ", "green ")
        assert await d.input(stream, "k1", "In French!") is InputCode.ACCEPTED
        await eventually(lambda: len(d.engine.sinks) == 2)
        assert d.engine.aborted == [stream]
        assert d.engine.messages == [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Red green "},
            {"role": "user", "content": "In French!"},
        ]
        assert d.engine.bodies[1]["max_tokens"] == 50, "a limit holds for each answer"
        d.engine.say("Rouge ", "vert", prompt=20)
        d.engine.finish(3, prompt=20)
        frames, end = await d.end(stream)
        assert said(frames) == ["Red green ", "Rouge vert"]
        assert notes(frames) == [InputNote("k1", "applied")]
        opened = [(f.block, f.kind) for f in frames if isinstance(f, Open)]
        assert opened == [(0, "text"), (1, "text")] and frames.count(Close(0)) == frames.count(Close(1)) == 1
        assert (end.status, end.usage) == ("completed", Usage(30, 4, 0, 5)), "both prompts and outputs count"
        assert end.timing is not None and end.timing.steer_us > 0
        (attempt,) = await eventually(lambda: d.heard.attempts, "the attempt's event")
        (times,) = attempt.inputs
        assert (times.at_us, times.result) == (d.sent_us, "applied") and attempt.steer_us == end.timing.steer_us
        assert times.waited_us > 0 and 0 < times.answered_us <= attempt.steer_us
        assert await d.input(stream, "k1", "In French!") is InputCode.DUPLICATE
        assert await d.input(stream, "k2") is InputCode.TERMINAL


async def test_an_input_at_the_natural_end_takes_the_end_back(redis_url: str) -> None:
    async with desk(redis_url) as d:
        stream = await d.ask()
        d.engine.say("All of it.")
        await eventually(lambda: _has(d, stream, "All of it."))
        await d.hold_end(stream, "k1")
        d.agent.steering.read_soon(d.agent.running[stream])
        await eventually(lambda: len(d.engine.sinks) == 2)
        d.engine.say("And more.")
        d.engine.finish(2)
        frames, end = await d.end(stream)
        assert said(frames) == ["All of it.", "And more."]
        assert sum(isinstance(frame, ChoiceEnd) for frame in frames) == 1
        assert end.usage == Usage(20, 4, 0, 6), "of the first answer the engine's own count"


@pytest.mark.parametrize("leaves", ["yields", "is handed over"])
async def test_a_stream_that_leaves_the_replica_takes_no_end_back_there(redis_url: str, leaves: str) -> None:
    async with desk(redis_url) as one, desk(redis_url, one.pool) as two:
        stream = await one.ask()
        one.engine.say("All of it.")
        await eventually(lambda: _has(one, stream, "All of it."))
        await one.hold_end(stream, "k1")
        running, handover = one.agent.running[stream], one.agent._handover
        if leaves == "yields":
            handover.yield_stream(running)
        else:
            running.closed = False  # between the end of the choice and that of the stream
            handover.hand_over(running, LOST)
        one.agent.steering.apply(running, await one.log.inputs(stream), running.producer.told)
        await eventually(lambda: len(one.engine.sinks) + len(two.engine.sinks) == 2)
        assert running.closed
        there = two if two.engine.sinks else one
        there.engine.say("And more.")
        there.engine.finish(2)
        frames, _ = await there.end(stream)
        assert said(frames) == ["All of it.", "And more."]


async def test_an_end_that_is_no_success_is_not_taken_back(redis_url: str) -> None:
    async with desk(redis_url) as d:
        stream = await d.ask()
        d.engine.say("All of it.")
        await eventually(lambda: _has(d, stream, "All of it."))
        with d.no_reads():
            assert await d.input(stream, "k1") is InputCode.ACCEPTED
            d.engine.sinks[0].frame(ChoiceEnd(0, "stop"))
            d.engine.sinks[0].end("failed", ErrorInfo("refused", "no", http_status=400))
            await eventually(lambda: d.agent.running[stream].producer.is_held, "the refused end")
        d.agent.steering.read_soon(d.agent.running[stream])
        frames, end = await d.end(stream)
        assert end.status == "failed" and notes(frames) == [] and len(d.engine.sinks) == 1


async def test_a_failure_at_an_input_ends_the_stream(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end that the log has refused is still the best one."""

    def broken(*args: object) -> None:
        raise RuntimeError("planted")

    async with desk(redis_url) as d:
        stream = await d.ask()
        d.engine.say("All of it.")
        await eventually(lambda: _has(d, stream, "All of it."))
        await d.hold_end(stream, "k1")
        monkeypatch.setattr(steering, "refusal", broken)
        d.agent.steering.read_soon(d.agent.running[stream])
        frames, end = await d.end(stream)
        assert said(frames) == ["All of it."] and end.status == "completed"


async def test_a_deadline_that_passes_while_an_end_is_refused_holds(redis_url: str) -> None:
    async with desk(redis_url) as d:
        stream = await d.ask(deadline_unix_ms=int(time.time() * 1000) + 400)
        d.engine.say("All of it.")
        await eventually(lambda: _has(d, stream, "All of it."))
        await d.hold_end(stream, "k1")
        running = d.agent.running[stream]
        assert running.deadline is not None
        await asyncio.sleep(running.deadline.when() - asyncio.get_running_loop().time() + 0.01)
        d.agent.steering.read_soon(running)
        _, end = await d.end(stream)
        assert end.error is not None and end.error.code == "deadline_exceeded"


async def test_inputs_that_redis_has_lost_hold_no_end_up(redis_url: str) -> None:
    async with desk(redis_url) as d:
        stream = await d.ask()
        d.engine.say("All of it.")
        await eventually(lambda: _has(d, stream, "All of it."))
        await d.hold_end(stream, "k1")
        k = d.log.partition(stream)
        await d.client.execute(slot_of(f"p{k}"), "DEL", f"sg:{{p{k}}}:{stream}:i")
        d.agent.steering.read_soon(d.agent.running[stream])
        frames, end = await d.end(stream)
        assert said(frames) == ["All of it."] and end.status == "completed"


async def test_inputs_at_once_are_one_turn_and_their_bound_holds(redis_url: str) -> None:
    async with desk(redis_url) as d:
        stream = await d.ask()
        d.engine.say("One")
        await eventually(lambda: _has(d, stream, "One"))
        codes = await asyncio.gather(*(d.input(stream, f"k{n}") for n in range(3)))
        assert codes == [InputCode.ACCEPTED] * 3
        await d.applied(stream, "k0", "k1", "k2")
        messages = d.engine.messages
        assert isinstance(messages, list)
        assert "\n\n".join(m["content"] for m in messages[2:]) == "k0\n\nk1\n\nk2"
        d.engine.say("Two")
        d.engine.finish(1)
        frames, _ = await d.end(stream)
        assert "".join(said(frames)) == "OneTwo"


async def test_a_stream_that_has_not_begun_takes_its_input_into_its_first_answer(redis_url: str) -> None:
    async with desk(redis_url) as d:
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        body = msgspec.json.encode({"messages": [{"role": "user", "content": "Hi"}]})
        work = Work(EngineRequest(stream, "chat", "sim-small", msgspec.Raw(body)), "1.aa", ACME, b"{}", None)
        await d.log.create(stream, work.parsed_epoch(), ACME, b"{}", None)
        assert await d.input(stream, "k1", "In French!") is InputCode.ACCEPTED  # it waits in the queue
        await d.pools.place(d.pool, work, [Candidate(d.agent.replica, 0)], wait_s=60, jitter=0.0)
        await d.applied(stream, "k1")
        assert d.engine.messages == [{"role": "user", "content": "Hi\n\nIn French!"}]
        d.engine.say("Bonjour")
        d.engine.finish(1)
        frames, end = await d.end(stream)
        assert said(frames) == ["", "Bonjour"] and end.usage == Usage(10, 2, 0, 1)


async def test_a_cancel_after_an_input_is_exact(redis_url: str) -> None:
    async with desk(redis_url) as d:
        stream = await d.ask()
        d.engine.say("One")
        await eventually(lambda: _has(d, stream, "One"))
        _, reply = await asyncio.gather(d.input(stream, "k1"), d.log.cancel(stream, ACME))
        assert reply.result == "accepted" and reply.at is not None
        await eventually(lambda: stream not in d.agent.running)
        frames, end = await d.end(stream)
        assert end.status == "cancelled" and len(frames) == reply.at.seq + 1
        assert d.engine.aborted, "whatever came first, nothing runs on"


@pytest.mark.parametrize(
    ("opened", "why"),
    [(Open(0, 0, "tool", "function", "c", "f"), "waits_for_tools"), (Open(0, 0, "item"), "no_text")],
)
async def test_an_answer_that_takes_no_input_goes_on(redis_url: str, opened: Open, why: str) -> None:
    async with desk(redis_url) as d:
        stream = await d.ask()
        d.engine.sinks[0].frame(opened)
        assert await d.input(stream, "k1") is InputCode.ACCEPTED
        await d.applied(stream, "k1")
        d.engine.sinks[0].text(0, "{}")
        d.engine.finish(1, "tool_calls")
        frames, end = await d.end(stream)
        assert notes(frames) == [InputNote("k1", "refused", why)]
        (attempt,) = await eventually(lambda: d.heard.attempts, "the attempt's event")
        assert [(times.result, times.reason) for times in attempt.inputs] == [("refused", why)]
        assert not d.engine.aborted and end.status == "completed"


async def test_only_chats_with_one_choice_take_inputs(redis_url: str) -> None:
    async with desk(redis_url) as d:
        stream = await d.ask(n=2)
        assert await d.input(stream, "k1") is InputCode.ACCEPTED
        await d.applied(stream, "k1")
        assert notes(await d.frames(stream)) == [InputNote("k1", "refused", "several_choices")]
        assert len(d.engine.sinks) == 1


async def test_the_engines_failure_at_the_next_answer_ends_the_stream(redis_url: str) -> None:
    async with desk(redis_url) as d:
        stream = await d.ask()
        d.engine.say("One")
        await d.input(stream, "k1")
        await d.applied(stream, "k1")
        d.engine.sinks[-1].end("failed", ErrorInfo("context_length_exceeded", "too long", http_status=400))
        frames, end = await d.end(stream)
        assert end.error is not None and end.error.code == "context_length_exceeded"
        assert said(frames) == ["One", ""] and end.usage == Usage(10, 2, 0, 1)


@pytest.mark.parametrize("applied", [True, False], ids=["after the commit", "before the commit"])
async def test_another_replica_goes_on_with_the_inputs(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, applied: bool
) -> None:
    async with desk(redis_url) as one, desk(redis_url, one.pool) as two:
        stream = await one.ask()
        one.engine.say("One ", "two ")
        await eventually(lambda: _has(one, stream, "One two "))
        if not applied:  # it dies between the input and its note
            monkeypatch.setattr(one.agent.steering, "read_soon", lambda stream: None)
        assert await one.input(stream, "k1", "Again") is InputCode.ACCEPTED
        if applied:
            await one.applied(stream, "k1")
            one.engine.say("Uno ", prompt=20)
            await eventually(lambda: _has(one, stream, "Uno "))
        failover = Failover(one.pools, one.log, HostClock(), HostRandom())
        await failover.rescue(one.pool, one.agent.replica, stream, LOST)
        await eventually(lambda: two.engine.sinks, "the takeover")
        one.engine.sinks[-1].text(0, "a zombie's word")
        expected = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "One two "},
            {"role": "user", "content": "Again"},
        ]
        if applied:
            assert two.engine.messages == [*expected, {"role": "assistant", "content": "Uno "}]
            assert two.engine.bodies[-1]["continue_final_message"] is True
        else:
            assert two.engine.messages == expected
        two.engine.say("dos", prompt=22 if applied else 20)
        two.engine.finish(1, prompt=22 if applied else 20)
        frames, end = await two.end(stream)
        assert said(frames) == ["One two ", "Uno dos" if applied else "dos"]
        assert notes(frames) == [InputNote("k1", "applied")]
        assert end.usage == Usage(30, 4, 0, 4 if applied else 3)


async def test_the_next_replica_refuses_an_input_that_waits(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk(redis_url) as one, desk(redis_url, one.pool) as two:
        stream = await one.ask(seed=1)
        begin = Open(0, 0, "tool", "function", "c", "f")
        one.engine.sinks[0].frame(begin)
        await eventually(lambda: one.agent.running[stream].producer.acked == 2)
        monkeypatch.setattr(one.agent.steering, "read_soon", lambda stream: None)
        assert await one.input(stream, "k1") is InputCode.ACCEPTED
        await Failover(one.pools, one.log, HostClock(), HostRandom()).rescue(one.pool, one.agent.replica, stream, LOST)
        await eventually(lambda: two.engine.sinks, "the repetition")
        two.engine.sinks[0].frame(begin)
        two.engine.sinks[0].text(0, "{}")
        two.engine.finish(1, "tool_calls")
        frames, end = await two.end(stream)
        assert end.status == "completed" and notes(frames) == [InputNote("k1", "refused", "waits_for_tools")]


async def _has(d: Desk, stream: StreamId, text: str) -> bool:
    return "".join(said(await d.frames(stream))).endswith(text)
