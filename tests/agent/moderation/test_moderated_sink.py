"""Output that waits for moderation, and what the replica measures of itself meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from inference.agent.moderation.moderated_sink import AnswerModeration
from inference.agent.observe.attempt_timing import AttemptTiming
from inference.agent.running import RunningStream
from inference.agent.structured.checked_sink import ReplyChecks
from stream_fabric.moderation.moderator import Moderator
from stream_fabric.ports import FrameSink
from stream_fabric.stream.frames import ChoiceEnd, Close, End, Open, Usage, decode
from tests.agent.engines.recorder import chat
from tests.agent.structured.test_checked_sink import FORM, InProcess
from tests.agent.test_load_tracker import AT_FIRST_PER_S, PROMPT, Tracked
from tests.support.events import SetClock
from tests.support.virtual import on_virtual_time

TTFT_S, GAP_S, CHECK_S, TOKENS = 0.125, 0.0625, 1.5, 80
"""Parts of a second that floats add up exactly."""


class LoopClock(SetClock):
    def now_us(self) -> int:
        return self.monotonic_us()

    def monotonic_us(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e6)


class SlowEndpoint:
    timeout_s = 5.0

    async def flagged(self, texts: list[str]) -> str | None:
        await asyncio.sleep(CHECK_S)
        return None


class Owner:
    """Passes first tokens on, as an agent's requests do."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked

    def on_first_token(self, stream: RunningStream) -> None:
        self._tracked.load.receive_first_token(stream)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: False


async def answered(tasks: asyncio.TaskGroup, repairs: int) -> tuple[Tracked, RunningStream]:
    """A replica whose engine has made a whole answer, and the stream once all of it was checked."""
    tracked = Tracked(slots=1)
    stream = tracked.start("s")
    stream.work = msgspec.structs.replace(stream.work, request=chat(1, **FORM), moderated=True, repairs=repairs)
    owner: Any = Owner(tracked)
    stream.owner, stream.timing = owner, AttemptTiming(LoopClock(), 0, 0)
    endpoint: Any = SlowEndpoint()
    moderator = Moderator(None, endpoint, lambda outcome, seconds: None, SetClock(), fail_open=False)
    engine: Any = None
    sink: FrameSink | None = AnswerModeration(moderator, engine, tasks, 200).sink_for(stream, stream, None)
    assert sink is not None
    if repairs:
        checker: Any = InProcess()
        sink = ReplyChecks(checker, lambda *asked: None, tasks).sink_for(stream, stream.work.request, sink)
    await asyncio.sleep(TTFT_S)
    sink.frame(Open(0, 0, "text"))
    sink.text(0, '{"n":7')
    for text in (*["     "] * (TOKENS - 2), "}"):
        await asyncio.sleep(GAP_S)
        sink.text(0, text)
    sink.frame(Close(0))
    sink.frame(ChoiceEnd(0, "stop"))
    sink.end("completed", usage=Usage(PROMPT, 0, 0, TOKENS))
    async with asyncio.timeout(60):
        while not stream.closed:
            await asyncio.sleep(GAP_S)
    return tracked, stream


@pytest.mark.parametrize("repairs", [0, 1])
@on_virtual_time
async def test_the_wait_for_moderation_is_no_time_of_the_engine(repairs: int) -> None:
    """It was: a replica whose tenants are moderated looked stuck, and slow to read prompts."""
    async with asyncio.TaskGroup() as tasks:
        tracked, stream = await answered(tasks, repairs)
    tracked.load.tick()
    assert tracked.per_s >= AT_FIRST_PER_S and tracked.load.meter.queue_p99_ms <= TTFT_S * 1000
    timing, told = stream.timing, stream.timing.summary()
    assert told.queue_us + told.prefill_us == TTFT_S * 1e6
    assert told.decode_us == (TOKENS - 1) * GAP_S * 1e6
    assert CHECK_S * 1e6 <= told.check_us <= 3 * CHECK_S * 1e6
    assert (timing.generated, sum(timing.sketch()), timing.itl_max_us) == (TOKENS, TOKENS - 1, GAP_S * 1e6)
    end = decode(stream.producer._frames[-1])
    assert isinstance(end, End) and end.usage is not None and end.usage.output >= TOKENS
