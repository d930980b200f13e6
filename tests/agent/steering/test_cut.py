"""A stream whose answer an input cuts: what is counted, and what it may still have. No I/O."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from inference.agent.budgets.allowance import Allowance
from inference.agent.handover import _can_yield
from inference.agent.observe.attempt_timing import AttemptTiming
from inference.agent.running import CurrentAnswer, RunningStream
from inference.agent.steering.turns import Answer, Turn
from stream_fabric.pool.records import Loaded, Work
from stream_fabric.process.host import HostClock
from stream_fabric.stream.frames import (
    ChoiceEnd,
    Delta,
    Frame,
    InputNote,
    Note,
    Open,
    Usage,
    encode,
    encode_text,
)
from stream_fabric.stream.ids import TenantId
from stream_fabric.stream.log import AppendCode, AppendReply
from tests.agent.engines.recorder import chat
from tests.agent.owner import Owner


def running(base: int = 0) -> tuple[RunningStream, Owner]:
    owner = Owner()
    work = Work(chat(1, seed=1), "2.bb" if base else "1.aa", TenantId("t"), b"{}", None, base=base)
    return RunningStream(work, 0, lambda *_: None, owner, 0.0, AttemptTiming(HostClock(), 0, 0)), owner


def note(result: InputNote) -> Note:
    return Note("input", body=msgspec.Raw(msgspec.json.encode(result)))


def test_tokens_are_timed_after_a_cut_during_the_check_of_a_reply() -> None:
    stream, _ = running()
    stream.timing.receive_tokens(1)
    stream.timing.receive_reply_end()
    stream.begin_answer((), [note(InputNote("k", "applied"))], 1)
    stream.text(0, "a")
    assert stream.timing.generated == 2


def test_only_the_first_prompt_tells_the_bytes_of_a_token() -> None:
    """The others are not that of the request, and come as a sum."""
    stream, owner = running()
    stream.usage(10)
    stream.begin_answer((), [note(InputNote("k", "applied"))], 1)
    stream.answer = CurrentAnswer((Turn("", "k"),))
    stream.usage(30)
    assert owner.prompts == [10] and stream.producer.usage.prompt == 30


@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.booleans(), st.integers(0, 12))))
def test_what_was_said_is_the_text_of_the_frames(pieces: list[tuple[str, bool, int]]) -> None:
    lines = [encode(Open(block, 0, "reasoning" if block % 3 == 0 else "text")) for block in range(13)]
    lines += [
        encode(Delta(block, text, 2, msgspec.Raw(b"[]"))) if probs else encode_text(block, text, 2)
        for text, probs, block in pieces
    ]
    answer = Answer.of(lines)
    assert answer.said == "".join(text for text, _, block in pieces if block % 3)
    assert (answer.tokens, answer.next_block) == (2 * len(pieces), 13)


def test_a_refused_input_does_not_wait() -> None:
    stream, _ = running()
    stream.producer.receive_inputs(1)
    stream.frame(note(InputNote("k", "refused", "waits_for_tools")))
    append = stream.producer.append_to_send(10, 1000)
    assert append is not None and append.inputs == 1


def test_the_next_producer_of_a_steered_stream_asks_ahead_too() -> None:
    stream, owner = running(3)
    stream.limit(Allowance(granted=100, prompt=1000, limit=100, choices=1))
    stream.take_over(Usage(10, output=90), before=90)
    stream.text(0, "a")
    assert owner.questions == [(190, 0)], "its limit holds for each answer"


def test_a_grant_that_comes_while_the_end_is_refused_counts() -> None:
    stream, owner = running()
    stream.limit(Allowance(granted=100, prompt=1000, limit=1000, choices=1))
    stream.frame(Open(0, 0, "text"))
    for _ in range(2):
        stream.text(0, "a", 25)
    stream.text(0, "a", 0)
    (question,) = owner.questions
    stream.frame(ChoiceEnd(0, "stop"))
    stream.end("completed")
    stream.producer.append_to_send(10, 1000)
    stream.producer.receive_reply(AppendReply(AppendCode.INPUTS, 0, inputs=1))
    stream.receive_grant(question, 300)
    stream.begin_answer((), [note(InputNote("k", "applied"))], 1)
    for _ in range(3):
        stream.text(1, "b", 100)
    assert owner.questions[1:], "it asks for more than 300"
    stream.receive_grant(owner.questions[1], 1000)
    assert stream.tokens == 350


def test_a_repeated_stream_yields_no_more() -> None:
    """Another repetition may be too long, and then the stream would fail."""
    stream, _ = running(3)
    earlier: list[Frame] = [Note("started"), Open(0, 0, "reasoning", "raw"), Delta(0, "So")]
    stream.answer = CurrentAnswer(start=3, earlier=tuple(encode(frame) for frame in earlier))
    assert _can_yield(stream, Loaded()), "it has made nothing yet"
    stream.text(0, " be it")
    assert not _can_yield(stream, Loaded())
