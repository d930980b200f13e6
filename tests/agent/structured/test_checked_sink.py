"""Sinks between engine and stream: what waits for its check, and what a repair does to the stream and its usage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from inference.agent.observe.attempt_timing import AttemptTiming
from inference.agent.running import RunningStream, StreamOwner
from inference.agent.steering.layers import is_droppable
from inference.agent.structured.checked_sink import ReplyChecks
from inference.agent.structured.worker import Replies
from stream_fabric.pool.records import EngineRequest, Work
from stream_fabric.ports import Clock, FrameSink
from stream_fabric.process.host import HostClock
from stream_fabric.stream.frames import (
    SCHEMA_MISMATCH,
    Check,
    ChoiceEnd,
    Close,
    Delta,
    End,
    ErrorInfo,
    Frame,
    Note,
    Open,
    Usage,
    decode,
)
from stream_fabric.stream.ids import TenantId
from tests.agent.engines.recorder import chat
from tests.support.events import SetClock

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 5}}, "required": ["n"]}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
GOOD, BAD = '{"n":7}', '{"n":1}'


class InProcess:
    """The worker's checks without its process. ``gate``: they wait until it is set."""

    def __init__(self) -> None:
        self.results: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._replies = Replies()

    def on_result(self, result: str) -> None:
        self.results.append(result)

    async def check(self, schema: bytes, reply: str, tenant: str) -> Check:
        await self.gate.wait()
        return self._replies.check(schema, reply.encode())


class Owner:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_first_token(self, stream: RunningStream) -> None:
        self.calls.append("on_first_token")
        stream.first_at = 1.0

    def __getattr__(self, name: str) -> Any:
        def call(*args: object) -> bool | None:
            self.calls.append(name)
            return False if name == "on_failure" else None  # compiled callers check the type

        return call


class Stage:
    """One stream, its sink, and an engine that is played by hand."""

    def __init__(self, tasks: asyncio.TaskGroup, repairs: int = 0, clock: Clock | None = None, **fields: Any) -> None:
        self.asked: list[EngineRequest] = []
        self.checker = InProcess()
        self.owner = Owner()
        request = chat(1, **{**FORM, **fields})
        work = Work(request, "1.aa", TenantId("t"), b"", None, repairs=repairs)
        timing = AttemptTiming(clock or HostClock(), 0, 0)
        owner = cast(StreamOwner, self.owner)
        self.stream = RunningStream(work, 0, lambda stream, urgency: None, owner, 0.0, timing)
        checks = ReplyChecks(self.checker, self._submit, tasks)
        self.sink: FrameSink = checks.sink_for(self.stream, request, self.stream)
        assert self.sink is not self.stream

    def _submit(self, stream: RunningStream, request: EngineRequest, sink: FrameSink) -> None:
        assert (stream, sink) == (self.stream, self.sink)
        self.asked.append(request)

    @property
    def frames(self) -> list[Frame]:
        return [decode(line) for line in self.stream.producer._frames]

    @property
    def ends(self) -> list[ChoiceEnd]:
        return [frame for frame in self.frames if isinstance(frame, ChoiceEnd)]

    def say(self, text: str, choice: int = 0, block: int = 0, reason: str = "stop") -> None:
        """One choice, a token for two characters."""
        self.sink.frame(Open(block, choice, "text"))
        for at in range(0, len(text), 2):
            self.sink.text(block, text[at : at + 2])
        self.sink.frame(Close(block))
        self.sink.frame(ChoiceEnd(choice, reason))

    def reply(self, text: str, prompt: int = 10) -> None:
        self.sink.usage(prompt)
        self.say(text)
        self.sink.end("completed", usage=Usage(prompt, output=len(text) // 2 + 1))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def staged(play: Callable[[asyncio.TaskGroup], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            await play(tasks)

    asyncio.run(main())


def test_text_goes_on_at_once_and_the_end_of_a_choice_waits() -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        stage = Stage(tasks)
        stage.checker.gate.clear()
        stage.reply(BAD)
        await settled()
        kinds = [type(frame) for frame in stage.frames]
        assert kinds == [Open, *[Delta] * 4, Close] and not stage.stream.closed
        stage.checker.gate.set()
        await settled()
        assert stage.ends == [ChoiceEnd(0, "stop", check=Check("invalid", "/n", "1 is less than the minimum of 5"))]
        end = stage.frames[-1]
        assert isinstance(end, End) and end.status == "completed" and end.usage == Usage(10, output=4)
        assert stage.stream.error_code == SCHEMA_MISMATCH
        assert stage.checker.results == ["invalid"]

    staged(play)


def test_each_choice_has_its_own_result() -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        stage = Stage(tasks, n=4)
        stage.say(GOOD, 0, 0)
        stage.say(BAD, 1, 1)
        stage.say('{"n":', 2, 2, "length")
        stage.sink.frame(Open(3, 3, "tool", "function", "c", "f"))
        stage.sink.text(3, "{}")
        stage.sink.frame(Close(3))
        stage.sink.frame(ChoiceEnd(3, "stop"))
        stage.sink.end("completed")
        await settled()
        results = {end.choice: end.check and end.check.result for end in stage.ends}
        assert results == {0: "valid", 1: "invalid", 2: None, 3: None}, "a cut reply and a tool call are not checked"
        assert isinstance(stage.frames[-1], End)

    staged(play)


def test_thoughts_are_no_part_of_the_reply() -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        stage = Stage(tasks)
        stage.sink.frame(Open(0, 0, "reasoning", "raw"))
        stage.sink.text(0, "hm")
        stage.sink.frame(Close(0))
        stage.say(GOOD, block=1)
        stage.sink.end("completed")
        await settled()
        assert [end.check for end in stage.ends] == [Check("valid")]

    staged(play)


@pytest.mark.parametrize("repairs", [0, 1])
def test_a_cancel_while_it_is_checked_leaves_nothing_behind(repairs: int) -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        stage = Stage(tasks, repairs)
        stage.checker.gate.clear()
        stage.reply(BAD)
        await settled()
        stage.stream.closed = True
        before = stage.frames
        stage.checker.gate.set()
        await settled()
        assert stage.frames == before and not stage.asked

    staged(play)


@pytest.mark.parametrize("repairs", [0, 1])
def test_an_input_while_it_is_checked_leaves_no_end_behind(repairs: int) -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        stage = Stage(tasks, repairs)
        stage.checker.gate.clear()
        stage.reply(BAD)
        await settled()
        assert is_droppable(stage.sink)
        stage.sink.drop()
        before = stage.frames
        stage.checker.gate.set()
        await settled()
        assert stage.frames == before and not stage.asked and not stage.ends and not stage.stream.closed

    staged(play)


def test_a_repaired_reply_replaces_the_one_before_and_is_billed_with_it() -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        stage = Stage(tasks, 2)
        stage.reply(BAD)
        assert stage.frames == [], "nothing is told before the check"
        assert stage.owner.calls.count("on_first_token") == 1, "but the replica counts as decoding"
        await settled()
        (asked,) = stage.asked
        said = msgspec.json.decode(asked.body)["messages"]
        assert said[-2] == {"role": "assistant", "content": BAD} and "less than the minimum" in said[-1]["content"]
        stage.reply(GOOD, 25)
        await settled()
        deltas = [frame for frame in stage.frames if isinstance(frame, Delta)]
        assert "".join(delta.text for delta in deltas) == GOOD
        assert [end.check for end in stage.ends] == [Check("valid", repairs=1)]
        end = stage.frames[-1]
        assert isinstance(end, End) and end.usage == Usage(35, output=8)
        assert stage.stream.tokens == 8 == sum(delta.tokens for delta in deltas), "the log counts what is billed"
        assert stage.checker.results == ["repair", "repaired"] and not stage.stream.error_code

    staged(play)


def test_the_time_of_check_and_repairs_is_no_time_of_decoding() -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        clock = SetClock()
        stage = Stage(tasks, 1, clock)
        clock.at_us += 50_000
        stage.sink.frame(Open(0, 0, "text"))
        for at in range(0, len(BAD), 2):
            stage.sink.text(0, BAD[at : at + 2])
            clock.at_us += 10_000
        stage.sink.frame(ChoiceEnd(0, "stop"))
        stage.sink.end("completed", usage=Usage(10, output=len(BAD) // 2))
        made = stage.stream.timing.generated
        clock.at_us += 3_000_000
        await settled()
        stage.reply(GOOD, 25)
        clock.at_us += 4_000
        await settled()
        timing = stage.stream.timing
        told = timing.summary()
        decoded = (len(BAD) + 1) // 2 * 10_000
        assert (told.queue_us + told.prefill_us, told.decode_us, told.check_us) == (50_000, decoded, 3_004_000)
        assert timing.repairs == 1 and timing.generated == made + (len(GOOD) + 1) // 2
        assert sum(timing.sketch()) == (len(BAD) + 1) // 2 - 1, "gaps of the first reply; the release is none"

    staged(play)


def test_the_end_of_a_stream_that_waits_for_its_check_is_no_time_of_decoding() -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        clock = SetClock()
        stage = Stage(tasks, 0, clock)
        stage.reply(GOOD)
        clock.at_us += 7_000
        await settled()
        assert stage.stream.timing.summary().check_us == 7_000

    staged(play)


def test_repairs_end_and_the_last_reply_is_told_as_it_is() -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        stage = Stage(tasks, 2)
        for number in range(3):
            assert len(stage.asked) == number
            stage.reply(BAD)
            await settled()
        assert len(stage.asked) == 2
        (check,) = (end.check for end in stage.ends)
        assert check is not None and (check.result, check.repairs) == ("invalid", 2)
        end = stage.frames[-1]
        assert isinstance(end, End) and end.usage == Usage(30, output=12)
        assert stage.checker.results == ["repair", "repair", "invalid"] and stage.stream.error_code == SCHEMA_MISMATCH

    staged(play)


def test_a_repair_that_fails_leaves_the_reply_before() -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        stage = Stage(tasks, 1)
        stage.reply(BAD)
        await settled()
        stage.sink.usage(30)
        stage.sink.frame(Open(0, 0, "text"))
        stage.sink.text(0, "{", 1)
        stage.sink.end("failed", ErrorInfo("engine_error", "gone"))
        await settled()
        deltas = [frame for frame in stage.frames if isinstance(frame, Delta)]
        assert "".join(delta.text for delta in deltas) == BAD
        end = stage.frames[-1]
        assert isinstance(end, End) and end.status == "completed"
        assert end.usage == Usage(10, output=5), "its prompt was not computed to an end"

    staged(play)


def test_a_first_reply_that_fails_is_the_stream_s_failure() -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        stage = Stage(tasks, 1)
        stage.sink.usage(10)
        stage.sink.frame(Open(0, 0, "text"))
        stage.sink.text(0, "{", 1)
        stage.sink.end("failed", ErrorInfo("engine_lost", "gone"))
        await settled()
        assert "on_failure" in stage.owner.calls
        (end,) = stage.frames
        assert isinstance(end, End) and end.status == "failed"
        assert end.usage == Usage(10), "with a part of it said, no other replica could begin again"

    staged(play)


def test_a_cut_reply_is_not_repaired() -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        stage = Stage(tasks, 1)
        stage.say('{"n":', reason="length")
        stage.sink.end("completed")
        await settled()
        assert not stage.asked and [end.check for end in stage.ends] == [None]

    staged(play)


def test_notes_pass() -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        stage = Stage(tasks)
        stage.sink.frame(Note("prompt", prompt_tokens=3))
        assert stage.frames == [Note("prompt", prompt_tokens=3)]

    staged(play)


def test_without_a_checker_or_a_schema_nothing_stands_between() -> None:
    async def play(tasks: asyncio.TaskGroup) -> None:
        stage = Stage(tasks)
        for checker, request in ((None, chat(1, **FORM)), (stage.checker, chat(2))):
            checks = ReplyChecks(checker, stage._submit, tasks)
            assert checks.sink_for(stage.stream, request, stage.stream) is stage.stream

    staged(play)
