"""Which streams can be continued, the request for the rest, and that no text is repeated."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.agent.continuation import (
    CannotContinue,
    ContinuingSink,
    PriorOutput,
    can_continue,
    continuing_request,
    limit_reached,
    prior_output,
)
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from stream_fabric.pool.records import EngineRequest
from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, Frame, Note, Open, Usage, encode, encode_text
from tests.agent.engines.recorder import Recorder, chat, completion
from tests.support.virtual import run_virtual

TEXT = [Note("started"), Note("prompt", prompt_tokens=7, cached_tokens=3), Open(0, 0, "text")]


def lines(*frames: Frame) -> list[bytes]:
    return [encode(frame) for frame in frames]


def test_what_was_said() -> None:
    assert prior_output([], 1).empty
    assert prior_output(lines(*TEXT[:2]), 1) == PriorOutput(prompt_tokens=7)
    assert prior_output([*lines(*TEXT), encode_text(0, "Once "), encode_text(0, "more", 3)], 1) == PriorOutput(
        "Once more", 4, 0, 7
    )
    ended = [*TEXT, Delta(0, "x"), Close(0), ChoiceEnd(0, "stop")]
    assert prior_output(lines(*ended), 1).complete
    both = [Open(0, 0, "text"), Delta(0, "x"), Close(0), ChoiceEnd(0, "stop")]
    with pytest.raises(CannotContinue, match="text"):
        prior_output(lines(*both), 2)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([Open(0, 0, "tool", "function", "c", "f"), Delta(0, "{")], "kind tool"),
        ([Open(0, 0, "reasoning", "raw"), Delta(0, "hm"), Close(0), Open(1, 0, "text")], "kind reasoning"),
        ([Open(0, 0, "text"), Delta(0, "x", 1, msgspec.Raw(b"[]"))], "logprobs"),
        ([Open(0, 0, "text"), Delta(0, "x"), Close(0)], "without a finish reason"),
        ([Open(0, 0, "text"), Delta(0, "x"), Open(1, 0, "tool", "function", "c", "f")], "kind tool"),
    ],
)
def test_what_cannot_be_continued_says_why(frames: list[Frame], why: str) -> None:
    with pytest.raises(CannotContinue, match=why):
        prior_output(lines(*frames), 1)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "choice"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "guided"),
        ({"guided_regex": "a+"}, "guided"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "last message"),
    ],
)
def test_a_request_that_cannot_be_continued_says_why(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(CannotContinue, match=why):
        continuing_request(chat(1, **fields), PriorOutput("x", 1, 0))


def test_the_rest_is_asked_for() -> None:
    request = chat(1, max_tokens=10, min_tokens=2, seed=3)
    body = msgspec.json.decode(continuing_request(request, PriorOutput("Once", 4, 0)).body)
    assert body["messages"][-1] == {"role": "assistant", "content": "Once"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert (body["max_tokens"], body["min_tokens"], body["seed"]) == (6, 0, 3)
    body = msgspec.json.decode(continuing_request(completion(1, "A", max_tokens=10), PriorOutput(" b", 4, 0)).body)
    assert (body["prompt"], body["max_tokens"]) == ("A b", 6)
    body = msgspec.json.decode(continuing_request(completion(1, prompt=["A"]), PriorOutput(" b", 4, 0)).body)
    assert body["prompt"] == "A b"
    with pytest.raises(CannotContinue, match="token ids"):
        continuing_request(completion(1, prompt=[[1, 2]]), PriorOutput(" b", 4, 0))
    assert limit_reached(chat(1, max_tokens=4), PriorOutput("Once", 4, 0))
    assert not limit_reached(chat(1, max_tokens=5), PriorOutput("Once", 4, 0))
    assert not limit_reached(chat(1), PriorOutput("Once", 4, 0))


def test_what_may_be_continued_is_known_from_the_request_and_what_has_been_opened() -> None:
    assert can_continue(chat(1), lines(*TEXT))
    assert not can_continue(chat(1, n=2), lines(*TEXT))
    assert not can_continue(chat(1), lines(Open(0, 0, "tool", "function", "c", "f")))


class Log(Recorder):
    """The frames of two producers, checked as one stream."""

    def follow(self, frames: list[Frame]) -> None:
        for frame in frames:
            self.frame(frame)


async def test_a_continuation_that_goes_on_with_a_tool_call_closes_the_text_first() -> None:
    log = Log()
    log.follow([Open(0, 0, "text"), Delta(0, "Let me see")])
    sink = ContinuingSink(log, PriorOutput("Let me see", 3, 0, 5))
    for frame in (
        Note("prompt", prompt_tokens=8),
        Open(0, 0, "tool", "function", "c", "f"),
        Delta(0, "{}"),
        Close(0),
        ChoiceEnd(0, "tool_calls"),
    ):
        sink.frame(frame)
    sink.end("completed", usage=Usage(8, 8, 0, 2))
    assert log.end_usage == Usage(5, 5, 0, 5)
    assert [block.kind for block in log.opens()] == ["text", "tool"]


async def test_a_continuation_with_nothing_to_add_ends_the_text() -> None:
    log = Log()
    log.follow([Open(0, 0, "text"), Delta(0, "All.")])
    sink = ContinuingSink(log, PriorOutput("All.", 1, 0, 5))
    sink.frame(ChoiceEnd(0, "stop"))
    sink.end("completed")
    assert log.status == "completed"


@given(seed=st.integers(0, 1000), cut=st.integers(0, 40), by_max=st.booleans())
def test_a_continued_answer_is_the_undisturbed_one(seed: int, cut: int, by_max: bool) -> None:
    """Whatever the token at which the first producer died."""
    more = {"max_tokens": 40, "seed": seed} if by_max else {"seed": seed, "stop": ["the"]}
    request = chat(1, f"Tell me of {seed}", **more)

    async def run(asked: EngineRequest, wrap: PriorOutput | None, log: Log, kept: list[Frame]) -> None:
        log.follow(kept)
        engine = SimEngine(SimSettings.parse("itl_ms=1,ttft_ms=0,length_min=10,length_max=60"))
        await engine.start()
        engine.submit(asked, log if wrap is None else ContinuingSink(log, wrap))
        await log.ended.wait()
        await engine.close()

    whole = Log()
    run_virtual(run(request, None, whole, []))
    kept: list[Frame] = []
    for frame in whole.frames:  # as far as the first producer came
        if isinstance(frame, Close) or sum(isinstance(f, Delta) for f in kept) >= cut + 1:
            break
        kept.append(frame)
    before = prior_output([encode(frame) for frame in kept], 1)
    log = Log()
    if before.empty:
        return
    if limit_reached(request, before):
        assert len(kept) == len(whole.frames) - 2
        return
    run_virtual(run(continuing_request(request, before), before, log, kept))
    assert log.body() == whole.body()
    if by_max:
        assert log.choice_ends() == whole.choice_ends()
        assert log.tokens() == whole.tokens()
        assert log.end_usage is not None and whole.end_usage is not None
        assert (log.end_usage.prompt, log.end_usage.output) == (whole.end_usage.prompt, whole.end_usage.output)
