"""What can be continued, how the rest is asked for, and that nothing is spelled twice."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.agent.continuation import CannotContinue, ContinuingSink, Said, continued, may_continue, said, spent
from inference.agent.engines.sim.engine import SimEngine
from inference.agent.engines.sim.settings import SimSettings
from stream_fabric.frames import ChoiceEnd, Close, Delta, Frame, Note, Open, Usage, encode, encode_text
from stream_fabric.ports import EngineRequest
from tests.agent.engines.recorder import Recorder, chat, completion
from tests.agent.engines.virtual import run_virtual

TEXT = [Note("started"), Note("prompt", prompt_tokens=7, cached_tokens=3), Open(0, 0, "text")]


def lines(*frames: Frame) -> list[bytes]:
    return [encode(frame) for frame in frames]


def test_what_was_said() -> None:
    assert said([], 1).nothing
    assert said(lines(*TEXT[:2]), 1) == Said(prompt_tokens=7)
    assert said([*lines(*TEXT), encode_text(0, "Once "), encode_text(0, "more", 3)], 1) == Said("Once more", 4, 0, 7)
    ended = [*TEXT, Delta(0, "x"), Close(0), ChoiceEnd(0, "stop")]
    assert said(lines(*ended), 1).complete
    both = [Open(0, 0, "text"), Delta(0, "x"), Close(0), ChoiceEnd(0, "stop")]
    with pytest.raises(CannotContinue, match="text"):
        said(lines(*both), 2)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([Open(0, 0, "tool", "function", "c", "f"), Delta(0, "{")], "kind tool"),
        ([Open(0, 0, "reasoning", "raw"), Delta(0, "hm"), Close(0), Open(1, 0, "text")], "kind reasoning"),
        ([Open(0, 0, "text"), Delta(0, "x", 1, msgspec.Raw(b"[]"))], "logprobs"),
        ([Open(0, 0, "text"), Delta(0, "x"), Close(0)], "not why"),
        ([Open(0, 0, "text"), Delta(0, "x"), Open(1, 0, "tool", "function", "c", "f")], "kind tool"),
    ],
)
def test_what_cannot_be_continued_says_why(frames: list[Frame], why: str) -> None:
    with pytest.raises(CannotContinue, match=why):
        said(lines(*frames), 1)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "choice"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "guided"),
        ({"guided_regex": "a+"}, "guided"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "continues a message"),
    ],
)
def test_a_request_that_cannot_be_continued_says_why(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(CannotContinue, match=why):
        continued(chat(1, **fields), Said("x", 1, 0))


def test_the_rest_is_asked_for() -> None:
    body = msgspec.json.decode(continued(chat(1, max_tokens=10, min_tokens=2, seed=3), Said("Once", 4, 0)).body)
    assert body["messages"][-1] == {"role": "assistant", "content": "Once"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert (body["max_tokens"], body["min_tokens"], body["seed"]) == (6, 0, 3)
    body = msgspec.json.decode(continued(completion(1, "A", max_tokens=10), Said(" b", 4, 0)).body)
    assert (body["prompt"], body["max_tokens"]) == ("A b", 6)
    body = msgspec.json.decode(continued(completion(1, prompt=["A"]), Said(" b", 4, 0)).body)
    assert body["prompt"] == "A b"
    with pytest.raises(CannotContinue, match="token ids"):
        continued(completion(1, prompt=[[1, 2]]), Said(" b", 4, 0))
    assert spent(chat(1, max_tokens=4), Said("Once", 4, 0))
    assert not spent(chat(1, max_tokens=5), Said("Once", 4, 0))
    assert not spent(chat(1), Said("Once", 4, 0))


def test_what_may_be_continued_is_known_from_the_request_and_what_has_been_opened() -> None:
    assert may_continue(chat(1), lines(*TEXT))
    assert not may_continue(chat(1, n=2), lines(*TEXT))
    assert not may_continue(chat(1), lines(Open(0, 0, "tool", "function", "c", "f")))


class Log(Recorder):
    """What two producers wrote, checked by the law of frames as one stream."""

    def follow(self, frames: list[Frame]) -> None:
        for frame in frames:
            self.frame(frame)


async def test_a_continuation_that_goes_on_with_a_tool_call_closes_the_text_first() -> None:
    log = Log()
    log.follow([Open(0, 0, "text"), Delta(0, "Let me see")])
    sink = ContinuingSink(log, Said("Let me see", 3, 0, 5))
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
    sink = ContinuingSink(log, Said("All.", 1, 0, 5))
    sink.frame(ChoiceEnd(0, "stop"))
    sink.end("completed")
    assert log.status == "completed"


@given(seed=st.integers(0, 1000), cut=st.integers(0, 40), by_max=st.booleans())
def test_a_continued_answer_is_the_undisturbed_one(seed: int, cut: int, by_max: bool) -> None:
    """Whatever the token at which the first producer died."""
    more = {"max_tokens": 40, "seed": seed} if by_max else {"seed": seed, "stop": ["the"]}
    request = chat(1, f"Tell me of {seed}", **more)

    async def run(asked: EngineRequest, wrap: Said | None, log: Log, kept: list[Frame]) -> None:
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
    before = said([encode(frame) for frame in kept], 1)
    log = Log()
    if before.nothing:
        return
    if spent(request, before):
        assert len(kept) == len(whole.frames) - 2
        return
    run_virtual(run(continued(request, before), before, log, kept))
    assert log.body() == whole.body()
    if by_max:
        assert log.choice_ends() == whole.choice_ends()
        assert log.tokens() == whole.tokens()
        assert log.end_usage is not None and whole.end_usage is not None
        assert (log.end_usage.prompt, log.end_usage.output) == (whole.end_usage.prompt, whole.end_usage.output)
