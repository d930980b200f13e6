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
    Part,
    PriorChoice,
    PriorOutput,
    continuing_requests,
    is_finished,
    prior_output,
)
from inference.agent.continued.parts import JoinedParts
from inference.agent.steering.turns import can_continue
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from stream_fabric.errors import ModelNotFound, StreamGwError, TooMany
from stream_fabric.pool.records import EngineRequest, Loaded
from stream_fabric.ports import FrameSink
from stream_fabric.stream.frames import (
    ChoiceEnd,
    Close,
    Delta,
    ErrorInfo,
    Frame,
    Note,
    Open,
    Usage,
    encode,
    encode_text,
)
from tests.agent.engines.recorder import Recorder, chat, completion
from tests.agent.rest import submit_rest
from tests.support.virtual import run_virtual

TEXT = [Note("started"), Note("prompt", prompt_tokens=7, cached_tokens=3), Open(0, 0, "text")]


def said(text: str, tokens: int, block: int = 0, prompt_tokens: int | None = None) -> PriorOutput:
    """The output so far of a stream with one choice."""
    return PriorOutput((PriorChoice(text, tokens, block),), prompt_tokens, "", 1)


def continuing_body(request: EngineRequest, before: PriorOutput) -> dict[str, Any]:
    (part,) = continuing_requests(request, before)
    assert part.request.stream == request.stream
    body: dict[str, Any] = msgspec.json.decode(part.request.body)
    return body


def lines(*frames: Frame) -> list[bytes]:
    return [encode(frame) for frame in frames]


def test_what_was_said() -> None:
    assert prior_output([], 1).empty
    assert prior_output(lines(*TEXT[:2]), 1) == PriorOutput((PriorChoice(),), 7)
    once_more = PriorChoice("Once more", 4, 0, pieces=((4, 3), (5, 1)))
    told = [*lines(*TEXT), encode_text(0, "Once "), encode_text(0, "more", 3)]
    assert prior_output(told, 1) == PriorOutput((once_more,), 7, "", 1)
    ended = [*TEXT, Delta(0, "x"), Close(0), ChoiceEnd(0, "stop")]
    assert prior_output(lines(*ended), 1) == PriorOutput((PriorChoice("x", 1, -1, True, ((1, 1),)),), 7, "stop", 1)
    beside = [Open(0, 1, "text"), Delta(0, "x"), Open(1, 0, "text"), Delta(1, "y", 2), Close(0), ChoiceEnd(1, "stop")]
    both = prior_output(lines(*beside), 3)
    first, second = PriorChoice("y", 2, 1, pieces=((1, 2),)), PriorChoice("x", 1, -1, True, ((1, 1),))
    assert both.choices == (first, second, PriorChoice())
    assert (both.tokens, both.next_block, both.open_blocks, both.empty) == (3, 2, {0: 1}, False)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([Open(0, 0, "tool", "function", "c", "f"), Delta(0, "{")], "kind tool"),
        ([Open(0, 0, "reasoning", "raw"), Delta(0, "hm"), Close(0), Open(1, 0, "text")], "kind reasoning"),
        ([Open(0, 0, "text"), Delta(0, "x"), Close(0)], "without a finish reason"),
        ([Open(0, 0, "text"), Delta(0, "x"), Open(1, 0, "tool", "function", "c", "f")], "kind tool"),
        ([Open(0, 0, "text"), Delta(0, "x"), Close(0), Note("started")], "without a finish reason"),
    ],
)
def test_what_cannot_be_continued_says_why(frames: list[Frame], why: str) -> None:
    with pytest.raises(CannotContinue, match=why):
        prior_output(lines(*frames), 1)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "not counted"),
        ({"response_format": {"type": "json_object"}}, "guided"),
        ({"guided_regex": "a+"}, "guided"),
        ({"ebnf": 'root ::= "a"+'}, "guided"),
        ({"json_schema": '{"type":"object"}'}, "guided"),
        ({"include_reasoning": False}, "reasoning was left out"),
        ({"truncate_prompt_tokens": 9, "truncation_side": "right"}, "truncated on the right"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "last message"),
    ],
)
def test_a_request_that_cannot_be_continued_says_why(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(CannotContinue, match=why):
        continuing_requests(chat(1, **fields), said("x", 1))


def test_an_answer_that_the_client_has_begun_goes_on_in_the_same_message() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    (part,) = continuing_requests(chat(1, messages=messages, continue_final_message=True), said(" yes", 1))
    body = msgspec.json.decode(part.request.body)
    assert body["messages"] == [messages[0], {"role": "assistant", "content": "Well, yes"}]
    assert (body["continue_final_message"], part.request.own_chars) == (True, 4)


def test_each_prompt_is_continued_from_its_own_tokens() -> None:
    request = completion(1, ["A", "B", "C", "D"], max_tokens=10, min_tokens=3)
    choices = (PriorChoice("a", 1, 0), PriorChoice("b", 4, -1, True), PriorChoice(), PriorChoice("d" * 10, 10, 1))
    before = PriorOutput(choices, 12, "stop", 3)
    parts = continuing_requests(request, before)
    bodies = [msgspec.json.decode(part.request.body) for part in parts]
    assert [part.choice for part in parts] == [0, 2]
    assert [(body["prompt"], body["max_tokens"], body["min_tokens"]) for body in bodies] == [("Aa", 9, 2), ("C", 10, 3)]
    assert [part.request.own_chars for part in parts] == [1, 0]
    names = {part.request.stream for part in parts}
    assert len(names) == 2 and request.stream not in names
    assert continuing_requests(request, before) == parts, "the same names every time"
    with pytest.raises(CannotContinue, match="before its prompts were counted"):
        continuing_requests(request, msgspec.structs.replace(before, prompt_tokens=None))
    with pytest.raises(CannotContinue, match="token ids"):
        continuing_requests(completion(1, prompt=[[1], [2]]), PriorOutput((PriorChoice("a", 1, 0),) * 2, 12, "", 1))
    assert can_continue(request, lines(Open(0, 3, "text"), Open(1, 0, "text")), Loaded())


def test_each_choice_of_a_prompt_is_continued_by_itself() -> None:
    """With the seed that vLLM gives it; one that has not begun is asked for as it was."""
    choices = (PriorChoice("a", 1, 0), PriorChoice("b", 4, -1, True), PriorChoice())
    before = PriorOutput(choices, 12, "stop", 2)
    parts = continuing_requests(chat(1, "Hi", n=3, seed=7), before)
    first, last = (msgspec.json.decode(part.request.body) for part in parts)
    assert [part.choice for part in parts] == [0, 2]
    assert (first["seed"], last["seed"], "n" in first, "n" in last) == (7, 9, False, False)
    assert first["messages"][-1] == {"role": "assistant", "content": "a"} and first["continue_final_message"]
    assert last["messages"][-1]["role"] == "user" and "continue_final_message" not in last
    assert "seed" not in msgspec.json.decode(continuing_requests(chat(1, n=3), before)[1].request.body)
    four = PriorOutput((PriorChoice("a", 1, 0),) * 4, 12, "", 1)
    parts = continuing_requests(completion(1, ["A", "B"], n=2), four)
    assert [msgspec.json.decode(part.request.body)["prompt"] for part in parts] == ["Aa", "Aa", "Ba", "Ba"]
    with pytest.raises(CannotContinue, match="not counted"):
        continuing_requests(chat(1, n=3), msgspec.structs.replace(before, prompt_tokens=None))


async def test_text_offsets_go_on_where_the_text_was_cut() -> None:
    log = Log()
    log.follow([Open(0, 0, "text"), Delta(0, "Once", 1)])
    sink = ContinuingSink(log, said("Once", 1))
    sink.frame(Open(0, 0, "text"))
    older = {"tokens": [" a", "n"], "token_logprobs": [-1, -2], "top_logprobs": None, "text_offset": [0, 2]}
    for each in (older, {**older, "text_offset": None}, [{"token": "x"}]):
        sink.frame(Delta(0, " an", 2, msgspec.Raw(msgspec.json.encode(each))))
    told = [msgspec.json.decode(delta.logprobs) for delta in log.deltas() if delta.logprobs is not None]
    assert told == [{**older, "text_offset": [4, 6]}, {**older, "text_offset": None}, [{"token": "x"}]]


def test_the_rest_is_asked_for() -> None:
    request = chat(1, max_tokens=10, min_tokens=2, seed=3)
    body = continuing_body(request, said("Once", 4))
    assert body["messages"][-1] == {"role": "assistant", "content": "Once"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert (body["max_tokens"], body["min_tokens"], body["seed"]) == (6, 0, 3)
    body = continuing_body(completion(1, "A", max_tokens=10), said(" b", 4))
    assert (body["prompt"], body["max_tokens"]) == ("A b", 6)
    body = continuing_body(completion(1, prompt=["A"]), said(" b", 4))
    assert body["prompt"] == "A b"
    for prompt in ([[1, 2]], [1, 2], None):
        with pytest.raises(CannotContinue, match="token ids"):
            continuing_requests(completion(1, prompt=prompt), said(" b", 4))
    for keep, asked in ((10, 14), (-1, -1), (0, 0), (None, None)):
        body = continuing_body(chat(1, truncate_prompt_tokens=keep), said("Once", 4))
        assert body["truncate_prompt_tokens"] == asked, "the text takes no place from what the client keeps"
    assert is_finished(chat(1, max_tokens=4), PriorChoice("Once", 4, 0))
    assert not is_finished(chat(1, max_tokens=5), PriorChoice("Once", 4, 0))
    assert not is_finished(chat(1), PriorChoice("Once", 4, 0))
    assert is_finished(chat(1), PriorChoice("Once", 4, -1, True))


def test_what_may_be_continued_is_known_from_the_request_and_what_has_been_opened() -> None:
    assert can_continue(chat(1), lines(*TEXT), Loaded())
    assert can_continue(chat(1, n=2, logprobs=True), lines(*TEXT), Loaded())
    closing = Loaded(continues_chats=False)
    assert not can_continue(chat(1), lines(*TEXT), closing) and can_continue(completion(1), lines(*TEXT), closing)
    assert not can_continue(chat(1, n=2), lines(*TEXT[2:]), Loaded()), "its prompt was not counted"
    assert not can_continue(chat(1), lines(Open(0, 0, "tool", "function", "c", "f")), Loaded())
    assert not can_continue(chat(1, min_tokens="5"), lines(*TEXT), Loaded()), (
        "vLLM takes it for 5, and gateways let it pass"
    )


class Log(Recorder):
    """The frames of two producers, checked as one stream."""

    def follow(self, frames: list[Frame]) -> None:
        for frame in frames:
            self.frame(frame)

    def logprobs(self) -> dict[int, list[Any]]:
        """Logprobs of the tokens of each choice."""
        choice_of = {opened.block: opened.choice for opened in self.opens()}
        found: dict[int, list[Any]] = {choice: [] for choice in choice_of.values()}
        for delta in self.deltas():
            found[choice_of[delta.block]] += msgspec.json.decode(delta.logprobs or b"[]")
        return found


async def test_a_continuation_that_goes_on_with_a_tool_call_closes_the_text_first() -> None:
    log = Log()
    log.follow([Open(0, 0, "text"), Delta(0, "Let me see")])
    sink = ContinuingSink(log, said("Let me see", 3, 0, 5))
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
    sink = ContinuingSink(log, said("All.", 1, 0, 5))
    sink.frame(ChoiceEnd(0, "stop"))
    sink.end("completed")
    assert log.status == "completed"


async def test_a_choice_that_has_ended_is_not_ended_again() -> None:
    """Moderation that flags a continued stream ends every choice that it has not seen end."""
    log = Log()
    log.follow([Open(0, 0, "text"), Delta(0, "a"), Open(1, 1, "text"), Close(0), ChoiceEnd(0, "stop")])
    before = PriorOutput((PriorChoice("a", 1, -1, True), PriorChoice("", 0, 1)), 5, "stop", 2)
    sink = ContinuingSink(log, before)
    for choice in range(2):
        sink.frame(ChoiceEnd(choice, "content_filter"))
    sink.end("incomplete")
    assert {number: end.finish_reason for number, end in log.choice_ends().items()} == {0: "stop", 1: "content_filter"}


async def test_the_first_failure_of_a_part_ends_all() -> None:
    log, aborted = Log(), list[bool]()
    parts = [Part(number, completion(number, "A")) for number in range(3)]
    one, two, three = JoinedParts(log, parts, lambda: aborted.append(True)).sinks
    one.frame(Open(0, 0, "text"))
    one.text(0, "x")
    one.frame(Close(0))
    one.frame(ChoiceEnd(0, "stop"))
    one.end("completed", usage=Usage(1, output=1))
    assert not log.ended.is_set() and not aborted
    error = ErrorInfo("engine_lost", "gone")
    two.end("failed", error)
    three.end("failed", error)
    assert (log.status, log.error, aborted) == ("failed", error, [True])


def undisturbed(request: EngineRequest, settings: str) -> Log:
    whole = Log()
    run_virtual(_run([Part(0, request)], whole, whole, [], settings))
    return whole


async def _run(parts: list[Part], sink: FrameSink, log: Log, kept: list[Frame], settings: str) -> None:
    log.follow(kept)
    engine = SimEngine(SimSettings.parse(settings))
    await engine.start()
    joined = JoinedParts(sink, parts, lambda: None)
    for part, each in zip(parts, [sink] if sink is log else joined.sinks, strict=True):
        submit_rest(engine, part, each)
    await log.ended.wait()
    await engine.close()


@given(
    seed=st.integers(0, 1000),
    cut=st.integers(1, 80),
    shape=st.sampled_from([(1, 3), (3, 1), (2, 2)]),
    more=st.fixed_dictionaries({}, optional={"stop": st.just(["the", "."]), "logprobs": st.integers(0, 2)}),
    is_chat=st.booleans(),
)
def test_continued_choices_are_the_undisturbed_ones(
    seed: int, cut: int, shape: tuple[int, int], more: dict[str, Any], is_chat: bool
) -> None:
    """Whatever the token at which the first producer died: each choice has its text, finish reason, tokens and
    logprobs."""
    settings = "itl_ms=1,ttft_ms=0,length_min=10,length_max=30"
    prompts, n = shape
    more |= {"max_tokens": 25, "n": n} | {"seed": seed}
    stop, count = "stop" in more, prompts * n
    if is_chat and prompts == 1:
        top = {"logprobs": True, "top_logprobs": more["logprobs"]} if "logprobs" in more else {}
        request = chat(1, f"Tell me of {seed}", **more | top)
    else:
        request = completion(1, [f"{name} {seed}" for name in "abc"[:prompts]], **more)
    whole = undisturbed(request, settings)
    kept: list[Frame] = []
    for frame in whole.frames:
        if isinstance(frame, Delta) and sum(isinstance(f, Delta) for f in kept) >= cut:
            break
        kept.append(frame)
    before = prior_output([encode(frame) for frame in kept], count)
    if all(is_finished(request, choice) for choice in before.choices):
        return
    for number, choice in enumerate(before.choices):
        if not choice.ended and is_finished(request, choice):
            kept += [Close(choice.block), ChoiceEnd(number, "length")]
    log = Log()
    run_virtual(_run(continuing_requests(request, before), ContinuingSink(log, before), log, kept, settings))
    assert [log.body(choice=number) for number in range(count)] == [
        whole.body(choice=number) for number in range(count)
    ]
    if not stop:  # a token whose end was held back is made again
        assert log.logprobs() == whole.logprobs()
    assert log.choice_ends() == whole.choice_ends()
    assert log.end_usage is not None and whole.end_usage is not None
    assert log.end_usage.prompt == whole.end_usage.prompt
    if not stop:
        assert log.end_usage.output == whole.end_usage.output == log.tokens()


@given(
    seed=st.integers(0, 1000),
    cut=st.integers(0, 40),
    tokens=st.sampled_from([None, 40, 8192]),  # the last only bounds the answer
    begun=st.booleans(),
)
def test_a_continued_answer_is_the_undisturbed_one(seed: int, cut: int, tokens: int | None, begun: bool) -> None:
    """Whatever the token at which the first producer died, and where the client has begun the answer."""
    more: dict[str, Any] = {"max_tokens": tokens, "seed": seed} if tokens else {"seed": seed, "stop": ["the"]}
    if begun:
        question = {"role": "user", "content": f"Tell me of {seed}"}
        more |= {"messages": [question, {"role": "assistant", "content": "Well,"}], "continue_final_message": True}
    request = chat(1, f"Tell me of {seed}", **more)

    async def run(asked: Part, wrap: PriorOutput | None, log: Log, kept: list[Frame]) -> None:
        log.follow(kept)
        engine = SimEngine(SimSettings.parse("itl_ms=1,ttft_ms=0,length_min=10,length_max=60"))
        await engine.start()
        submit_rest(engine, asked, log if wrap is None else ContinuingSink(log, wrap))
        await log.ended.wait()
        await engine.close()

    whole = Log()
    run_virtual(run(Part(0, request), None, whole, []))
    kept: list[Frame] = []
    for frame in whole.frames:  # as far as the first producer came
        if isinstance(frame, Close) or sum(isinstance(f, Delta) for f in kept) >= cut + 1:
            break
        kept.append(frame)
    before = prior_output([encode(frame) for frame in kept], 1)
    log = Log()
    if before.empty:
        return
    if is_finished(request, before.choices[0]):
        assert len(kept) == len(whole.frames) - 2
        return
    (part,) = continuing_requests(request, before)
    run_virtual(run(part, before, log, kept))
    assert log.body() == whole.body()
    if tokens:
        assert log.choice_ends() == whole.choice_ends()
    if tokens == 40:  # one whose end alone is missing needs a token for it
        assert log.tokens() == whole.tokens()
        assert log.end_usage is not None and whole.end_usage is not None
        assert (log.end_usage.prompt, log.end_usage.output) == (whole.end_usage.prompt, whole.end_usage.output)


@pytest.mark.parametrize("error", [TooMany("its queue is full"), ModelNotFound("it has no such adapter")])
def test_what_an_engine_lacks_another_one_may_have(error: StreamGwError) -> None:
    sink = Recorder()
    ContinuingSink(sink, said("Once", 1)).end("failed", ErrorInfo.of(error))
    assert sink.error == ErrorInfo.of(error)
