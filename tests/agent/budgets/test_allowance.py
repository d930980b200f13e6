"""A stream's allowance: whatever the engine and the account do, frames keep their order and the grant is kept."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.agent.budgets.allowance import ASK_AHEAD, NO_BUDGET, Allowance
from inference.agent.observe.attempt_timing import AttemptTiming
from inference.agent.running import RunningStream
from stream_fabric.accounts.budgets import CHUNK_MIN
from stream_fabric.limits import STREAM_BYTES_MAX
from stream_fabric.pool.records import EngineRequest, Work
from stream_fabric.process.host import HostClock
from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, End, Open, Usage, decode, encode_text
from stream_fabric.stream.ids import StreamId, TenantId
from tests.agent.owner import Owner


def running(grant: int = 300, limit: int = 1 << 31, choices: int = 1, prompt: int = 20) -> tuple[RunningStream, Owner]:
    owner, name = Owner(), StreamId("resp_1")
    work = Work(EngineRequest(name, "chat", "m", msgspec.Raw(b"{}")), "1.aa", TenantId("t"), b"", None, grant=grant)
    stream = RunningStream(work, 0, lambda *_: None, owner, 0.0, AttemptTiming(HostClock(), 0, 0))
    if grant:
        stream.limit(Allowance(grant, prompt, limit, choices))
    return stream, owner


def frames(stream: RunningStream) -> list[Any]:
    producer = stream.producer
    append = producer.append_to_send(1 << 20, 1 << 30)
    return [] if append is None else [decode(line) for line in append.frames.split(b"\n")]


def test_a_stream_without_a_budget_asks_nothing() -> None:
    stream, owner = running(0)
    for _ in range(10_000):
        stream.text(0, "a")
    assert stream.tokens == 10_000 and not owner.questions and stream._ask_at == NO_BUDGET


def test_it_asks_ahead_and_holds_nothing_while_the_reply_comes_in_time() -> None:
    stream, owner = running()
    stream.frame(Open(0, 0, "text"))
    for _ in range(300 - ASK_AHEAD):
        stream.text(0, "a")
    assert not owner.questions
    stream.text(0, "a")
    stream.text(0, "a")
    assert owner.questions == [(300 - ASK_AHEAD + 1 + ASK_AHEAD + CHUNK_MIN, 0)]
    stream.receive_grant(owner.questions[0], owner.questions[0][0])
    for _ in range(200):
        stream.text(0, "a")
    assert stream.tokens == 300 - ASK_AHEAD + 202 and len(owner.questions) == 1


def test_a_denied_stream_ends_at_its_grant_with_everything_closed() -> None:
    stream, owner = running(choices=2)
    for block in range(2):
        stream.frame(Open(block, block, "text"))
    for number in range(299):
        stream.text(number % 2, "a")
    stream.receive_grant(owner.questions[0], 300)
    stream.text(1, "ab", 2)  # crosses the grant: it is dropped whole
    assert len(owner.questions) == 2 and stream.tokens == 299
    stream.text(0, "a")
    stream.receive_grant(owner.questions[1], 300)
    *_, first, second, third, fourth, end = frames(stream)
    assert [first, second] == [Close(0), Close(1)]
    assert [third, fourth] == [ChoiceEnd(0, "budget"), ChoiceEnd(1, "budget")]
    assert isinstance(end, End) and end.status == "incomplete" and end.error is None
    assert end.usage is not None and end.usage.output == 299
    assert stream.closed and owner.aborted and stream.finish_reason == "budget"


def test_a_choice_that_has_ended_ends_once() -> None:
    stream, owner = running(300, choices=2)
    stream.frame(Open(0, 0, "text"))
    stream.frame(Close(0))
    stream.frame(ChoiceEnd(0, "stop"))
    stream.frame(Open(1, 1, "text"))
    for _ in range(301):
        stream.text(1, "a")
    for question in [*owner.questions]:
        stream.receive_grant(question, 300)
    for question in owner.questions[1:]:
        stream.receive_grant(question, 300)
    ends = [frame for frame in frames(stream) if isinstance(frame, ChoiceEnd)]
    assert ends == [ChoiceEnd(0, "stop"), ChoiceEnd(1, "budget")]


def test_the_end_waits_for_the_frames_before_it() -> None:
    stream, owner = running(10)
    stream.frame(Open(0, 0, "text"))
    for _ in range(12):
        stream.text(0, "a")
    stream.frame(Close(0))
    stream.frame(ChoiceEnd(0, "stop"))
    stream.end("completed", usage=Usage(5, 0, 0, 12))
    assert stream.tokens == 10 and not stream.closed
    while owner.questions and not stream.closed:
        question = owner.questions.pop(0)
        stream.receive_grant(question, question[0])
    end = frames(stream)[-1]
    assert end.status == "completed" and end.usage.output == 12 and not owner.aborted


def test_a_prompt_longer_than_estimated_is_asked_for_before_any_output() -> None:
    stream, owner = running(300, prompt=20)
    stream.usage(90)
    stream.frame(Open(0, 0, "text"))
    stream.text(0, "a")
    assert owner.questions and owner.questions[0][1] == 90 and stream.tokens == 0
    stream.receive_grant(owner.questions[0], 230)
    assert stream.tokens == 1
    stream.usage(90)
    assert len(owner.questions) == 1


def test_a_prompt_without_room_ends_the_stream_without_output() -> None:
    stream, owner = running(300, prompt=20)
    stream.usage(900)
    stream.frame(Open(0, 0, "text"))
    stream.text(0, "a")
    stream.receive_grant(owner.questions[0], 0)
    while len(owner.questions) > 1 and not stream.closed:
        stream.receive_grant(owner.questions.pop(), 0)
    assert stream.closed and stream.tokens == 0
    assert frames(stream)[-1].usage.output == 0


def test_a_continued_stream_beyond_its_first_grant_asks_at_once() -> None:
    stream, owner = running(300)
    stream.take_over(Usage(10, output=800), [3])
    stream.text(3, "a")
    assert stream.tokens == 800 and owner.questions[0][0] >= 801
    stream.receive_grant(owner.questions[0], 1000)
    assert stream.tokens == 801
    stream.receive_grant((1000, 0), 1000)
    assert stream.tokens == 801


def test_what_is_held_is_bounded() -> None:
    stream, owner = running(1)
    stream.frame(Open(0, 0, "text"))
    stream.text(0, "a")
    chunk = "a" * 10_000
    for _ in range(STREAM_BYTES_MAX // len(chunk) + 2):
        stream.text(0, chunk)
    assert stream.closed and owner.aborted and stream.error_code == "stream_too_large"


EVENTS = st.lists(
    st.tuples(st.sampled_from(["text", "frame", "reply", "reply", "prompt"]), st.integers(0, 40)), max_size=200
)


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.integers(1, 200), st.integers(0, 900))
def test_any_order_of_output_and_replies(events: list[tuple[str, int]], grant: int, budget: int) -> None:
    """Appended frames are the beginning of what the engine made, and never more than the account granted."""
    stream, owner = running(grant, choices=1)
    stream.frame(Open(0, 0, "text"))
    made: list[tuple[str, int]] = []
    allowed, answered = grant, 0
    for what, number in events:
        if what in ("text", "frame"):
            piece = f"{len(made)} "
            made.append((piece, number % 5))
            if what == "text":
                stream.text(0, piece, number % 5)
            else:
                stream.frame(Delta(0, piece, number % 5, None))
        elif what == "prompt":
            stream.usage(10)
        elif answered < len(owner.questions):
            question = owner.questions[answered]
            answered += 1
            granted = max(allowed, min(question[0], budget))
            allowed = max(allowed, granted)
            stream.receive_grant(question, granted)
        assert stream.tokens <= allowed
    appended = [(f.text, f.tokens) for f in frames(stream) if isinstance(f, Delta)]
    assert appended == made[: len(appended)]
    assert sum(tokens for _, tokens in appended) == stream.tokens <= allowed
    while answered < len(owner.questions) and not stream.closed:
        question = owner.questions[answered]
        answered += 1
        stream.receive_grant(question, max(allowed, min(question[0], budget)))
    if not stream.closed:
        stream.end("completed")
        while answered < len(owner.questions) and not stream.closed:
            question = owner.questions[answered]
            answered += 1
            stream.receive_grant(question, max(allowed, min(question[0], budget)))
        assert stream.closed, "no stream waits for ever"
    assert sum(tokens for _, tokens in made) <= max(allowed, budget) or stream.producer.status == "incomplete"


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_short_form_keeps_its_tokens(tokens: int) -> None:
    stream, owner = running(5)
    stream.frame(Open(0, 0, "text"))
    for _ in range(5):
        stream.text(0, "a")
    stream.text(0, "b", 1)
    stream.text(0, "c", tokens)
    while owner.questions:
        question = owner.questions.pop(0)
        stream.receive_grant(question, question[0])
    assert stream.producer.last_frame == encode_text(0, "c", tokens)


def test_an_input_drops_what_waits_and_the_next_answer_may_be_as_long() -> None:
    allowance = Allowance(granted=100, prompt=50, limit=120, choices=1)
    allowance.observe(Open(0, 0, "text"))
    assert allowance.hold(Delta(0, "x", 30), 90, 1), "it is beyond the grant"
    question = allowance.question(90)
    assert question is not None
    allowance.begin_answer(90)
    assert not allowance.holds_all and allowance.held_bytes == 0
    allowance.receive_reply(question, 120)
    assert allowance.release(90) is None, "what waited was not said"
    allowance.finish_release()
    assert not allowance.denied
    asked = allowance.question(118)
    assert asked is not None and asked[0] > 120, "the limit of the request holds for each answer"
    assert allowance.closing_frames() == [ChoiceEnd(0, "budget")], "the blocks of the cut answer are closed"
    # The prompt of the next answer counts beside the first one: it waits until the budgets have room for both
    allowance.receive_reply(asked, asked[0])
    allowance.receive_prompt(110)
    assert allowance.holds_all
    prompts = allowance.question(118)
    assert prompts is not None and prompts[1] == 110


def test_a_long_text_is_split_in_linear_memory() -> None:
    """A text of 7 MiB took 750 MiB and nearly two seconds."""
    stream, _ = running(grant=0)
    stream.frame(Open(0, 0, "text"))
    tracemalloc.start()
    stream.text(0, "x" * 7_000_000, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40_000_000
    frames = [decode(line) for line in stream.producer.frames_after(1)]
    assert "".join(frame.text for frame in frames if isinstance(frame, Delta)) == "x" * 7_000_000
    assert [frame.tokens for frame in frames if isinstance(frame, Delta) and frame.tokens] == [3]
