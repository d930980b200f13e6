"""Streams that died in what no server continues: what is repeated and compared, and that nothing comes twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.agent.continuation import CannotContinue, PriorOutput
from inference.agent.continued.repeated import PriorAnswer, RepeatingSink, can_repeat, read_prior
from inference.agent.running import RunningStream
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from stream_fabric.limits import REPEATED_TOKENS_MAX
from stream_fabric.pool.records import EngineRequest, Loaded
from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, End, Frame, Open, Usage, decode, encode
from stream_fabric.stream.ids import StreamId
from tests.agent.engines.recorder import Recorder, chat, completion
from tests.agent.rest import running
from tests.support.virtual import run_virtual

PARAMETERS = {"type": "object", "properties": {name: {"type": "string"} for name in "abcdef"}}
TOOLS = [{"type": "function", "function": {"name": "plan", "parameters": PARAMETERS}}]
CALL: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
THOUGHT: dict[str, Any] = {"reasoning_effort": "low", "max_tokens": 40}
REPLY: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "plan", "schema": PARAMETERS}}
}
SCORED: dict[str, Any] = REPLY | {"logprobs": True, "top_logprobs": 1}
IDS: dict[str, Any] = {"prompt": [3, 1, 4], "max_tokens": 80}


class Aborts(SimEngine):
    """An engine that only hears of aborts."""

    def __init__(self) -> None:
        super().__init__(SimSettings())
        self.names: list[StreamId] = []

    def abort(self, stream: StreamId) -> None:
        self.names.append(stream)


def frames_of(stream: RunningStream) -> list[Frame]:
    append = stream.producer.append_to_send(1 << 20, 1 << 30)
    return [] if append is None else [decode(line) for line in append.frames.split(b"\n")]


async def answer(request: EngineRequest, sink: Any, is_over: Callable[[], bool]) -> None:
    """Run the request on a simulator to its end."""
    engine = SimEngine(SimSettings.parse("itl_ms=1,ttft_ms=0"))
    await engine.start()
    engine.submit(request, sink)
    while not is_over():
        await asyncio.sleep(0.01)
    await engine.close()


def undisturbed(request: EngineRequest) -> Recorder:
    sink = Recorder(choices=request.choices)
    run_virtual(answer(request, sink, sink.ended.is_set))
    return sink


def lines(frames: list[Frame]) -> list[bytes]:
    return [encode(frame) for frame in frames]


def repeat(
    request: EngineRequest, kept: list[Frame], again: EngineRequest
) -> tuple[list[Frame], RunningStream, Aborts]:
    """Return the frames that the next producer adds to ``kept``, with an engine that answers ``again``."""
    before = read_prior(request, lines(kept), Loaded())
    assert isinstance(before, PriorAnswer)
    stream, engine = running(request, len(kept)), Aborts()
    stream.take_over(Usage(before.prompt_tokens or 0, output=before.tokens), before.left_open, before.ended)
    run_virtual(answer(again, RepeatingSink(stream, before, engine), lambda: stream.closed))
    return frames_of(stream), stream, engine


@pytest.mark.parametrize(
    ("make", "asked"),
    [
        *((chat, CALL), (chat, THOUGHT), (chat, REPLY), (completion, IDS), (completion, REPLY)),
        *((chat, SCORED), (chat, CALL | {"n": 3}), (chat, SCORED | {"n": 2})),
    ],
    ids=["call", "thought", "guided reply", "token ids", "guided completion", "logprobs", "three calls", "two replies"],
)
@given(cut=st.integers(0, 60), seed=st.integers(0, 50))
def test_a_repeated_answer_is_the_undisturbed_one(
    cut: int, seed: int, make: Callable[..., EngineRequest], asked: dict[str, Any]
) -> None:
    """Whatever the frame at which the first producer died."""
    request = make(1, seed=seed, **asked)
    expected = undisturbed(request)
    kept: list[Frame] = expected.frames[: min(cut + 3, len(expected.frames) - 1)]
    added, stream, engine = repeat(request, kept, request)
    assert not engine.names
    *added, end = added
    assert kept + added == expected.frames
    assert isinstance(end, End) and end.status == "completed" and end.usage is not None
    assert expected.end_usage is not None and end.usage.output == expected.end_usage.output
    assert stream.tokens == expected.tokens()


def test_a_call_keeps_the_id_that_its_readers_have() -> None:
    request = chat(1, seed=1, **CALL)
    kept = undisturbed(request).frames[:5]
    again = msgspec.structs.replace(request, stream=StreamId("resp_" + "f" * 32))  # another server's random ids
    added, _, engine = repeat(request, kept, again)
    assert not engine.names and not [frame for frame in added if isinstance(frame, Open)]


@pytest.mark.parametrize("other", [THOUGHT, THOUGHT | {"seed": 2}, {"max_tokens": 40}], ids=["kind", "text", "block"])
def test_another_output_ends_the_stream(other: dict[str, Any]) -> None:
    request = chat(1, **({"seed": 1} | (CALL if other is THOUGHT else THOUGHT)))
    kept = undisturbed(request).frames[:9]
    added, stream, engine = repeat(request, kept, chat(1, **({"seed": 1} | other)))
    (end,) = added
    assert isinstance(end, End) and end.error is not None and end.error.code == "replica_lost" and end.error.retriable
    assert set(engine.names) == {request.stream} and stream.closed


def test_text_that_is_cut_otherwise_is_compared_too() -> None:
    stream, engine = running(chat(1, seed=1), 2), Aborts()
    begin: list[Frame] = [Open(0, 0, "reasoning", "raw"), Delta(0, "abc"), Delta(0, "def")]
    before = read_prior(chat(1, seed=1), lines(begin), Loaded())
    assert isinstance(before, PriorAnswer)
    stream.take_over(Usage(5, output=2), before.left_open)
    sink = RepeatingSink(stream, before, engine)
    sink.frame(Open(0, 0, "reasoning", "raw"))
    for text in ("ab", "cd", "efgh", "i"):
        sink.text(0, text)
    for frame in (Close(0), Open(1, 0, "text"), Delta(1, "j"), Close(1), ChoiceEnd(0, "stop")):
        sink.frame(frame)
    sink.end("completed")
    texts = [(frame.block, frame.text, frame.tokens) for frame in frames_of(stream) if isinstance(frame, Delta)]
    assert texts == [(0, "gh", 1), (0, "i", 1), (1, "j", 1)] and not engine.names


@pytest.mark.parametrize("older", [False, True])
def test_logprobs_of_what_the_log_has_are_dropped(older: bool) -> None:
    def scored(text: str) -> msgspec.Raw:
        names = {"tokens": list(text), "token_logprobs": [-1.0] * len(text), "top_logprobs": None}
        items: Any = names if older else [{"token": token, "logprob": -1.0} for token in text]
        return msgspec.Raw(msgspec.json.encode(items))

    request = chat(1, seed=1, logprobs=True, **REPLY)
    stream, engine = running(request, 2), Aborts()
    before = read_prior(request, lines([Open(0, 0, "text"), Delta(0, "ab", 2, scored("ab"))]), Loaded())
    assert isinstance(before, PriorAnswer)
    stream.take_over(Usage(5, output=2), before.left_open)
    sink = RepeatingSink(stream, before, engine)
    sink.frame(Open(0, 0, "text"))
    for text in ("a", "bcd", "e"):
        sink.frame(Delta(0, text, len(text), scored(text)))
    found = [(frame.text, frame.tokens, frame.logprobs) for frame in frames_of(stream) if isinstance(frame, Delta)]
    assert found == [("cd", 2, scored("cd")), ("e", 1, scored("e"))] and not engine.names


def test_a_choice_that_ended_says_no_more() -> None:
    request = chat(1, seed=1, n=2, **REPLY)
    ended: list[Frame] = [Open(0, 1, "text"), Delta(0, "x"), Close(0), ChoiceEnd(1, "stop"), Open(1, 0, "text")]
    before = read_prior(request, lines(ended), Loaded())
    assert isinstance(before, PriorAnswer) and before.end is None and before.ended == [1]
    stream, engine = running(request, len(ended)), Aborts()
    stream.take_over(Usage(5, output=1), before.left_open, before.ended)
    sink = RepeatingSink(stream, before, engine)
    again: list[Frame] = [Open(0, 0, "text"), Delta(0, "y"), Open(1, 1, "text"), Delta(1, "x"), Close(1)]
    for frame in [*again, ChoiceEnd(1, "stop"), Close(0), ChoiceEnd(0, "stop")]:
        sink.frame(frame)
    assert frames_of(stream) == [Delta(1, "y"), Close(1), ChoiceEnd(0, "stop")] and not engine.names
    sink.frame(Open(2, 1, "text"))
    assert set(engine.names) == {request.stream} and stream.closed


def test_what_is_repeated() -> None:
    assert can_repeat(chat(1, temperature=0), 10) and can_repeat(chat(1, seed=0), REPEATED_TOKENS_MAX)
    assert can_repeat(completion(1, ["a", "b"], temperature=0, logprobs=0), 10)
    for no in (
        chat(1),
        chat(1, temperature=0.1),
        chat(1, seed=True),
        msgspec.structs.replace(chat(1, seed=1), kind="embeddings"),
    ):
        assert not can_repeat(no, 10)
    assert not can_repeat(chat(1, seed=1), REPEATED_TOKENS_MAX + 1)
    call: list[Frame] = [Open(0, 0, "tool", "function", "c", "f"), Delta(0, "{}")]
    with pytest.raises(CannotContinue, match="kind tool"):
        read_prior(chat(1), lines(call), Loaded())
    reply: list[Frame] = [Open(0, 0, "text"), Delta(0, "{")]
    with pytest.raises(CannotContinue, match="guided"):
        read_prior(chat(1, **REPLY), lines(reply), Loaded())
    assert isinstance(read_prior(chat(1, max_tokens=1, **REPLY), lines(reply), Loaded()), PriorOutput), (
        "it has all its tokens"
    )
    ended = read_prior(chat(1), lines([*call, Close(0), ChoiceEnd(0, "tool_calls")]), Loaded())
    assert isinstance(ended, PriorAnswer) and ended.end is not None, "only its terminal is missing"


def test_a_chat_whose_template_ends_the_answer_is_repeated() -> None:
    """A continuation would be another answer after the first one."""
    begun, closing = lines([Open(0, 0, "text"), Delta(0, "Once")]), Loaded(continues_chats=False)
    assert isinstance(read_prior(chat(1, seed=1), begun, closing), PriorAnswer)
    assert isinstance(read_prior(completion(1, seed=1), begun, closing), PriorOutput)
    assert isinstance(read_prior(chat(1), [], closing), PriorOutput), "it begins anew"
    assert isinstance(read_prior(chat(1, max_tokens=1), begun, closing), PriorOutput), "it has all its tokens"
    with pytest.raises(CannotContinue, match="chat template"):
        read_prior(chat(1), begun, closing)
