"""Frames of kinds that a newer release has added: they are passed over and counted, by decoder and encoders."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inference.agent.continuation import prior_output
from stream_fabric.stream.frames import (
    Check,
    ChoiceEnd,
    Close,
    End,
    Frame,
    Open,
    Unknown,
    Usage,
    decode,
    encode,
    encode_text,
    passed_over,
)
from stream_fabric.stream.ids import StreamId
from stream_gw.delivery.collected import _collector
from stream_gw.dialects import DIALECTS, encoder_for
from stream_gw.dialects.accumulate import snapshot
from stream_gw.dialects.facts import StreamFacts

STREAM = StreamId("resp_0193b2c4d5e670008a1b2c3d4e5f6071")
NEWER = [
    b'{"k":"citation","block":0,"url":"https://example.org"}',
    b'{"k":"note","kind":"weather","body":{"sunny":true}}',
]
OPENED = b'{"k":"open","block":7,"choice":0,"kind":"hologram","depth":3}'
REFORMED = b'{"k":"open","block":8,"choice":0,"kind":"tool","form":"telepathic","name":"f"}'
OLD = [encode(Open(0, 0, "text")), encode_text(0, "Once"), encode(Close(0)), encode(ChoiceEnd(0, "stop"))]
END = encode(End("completed", Usage(3, output=1)))


def counted(line: bytes) -> tuple[Frame, int]:
    before = passed_over.count
    return decode(line), passed_over.count - before


@pytest.mark.parametrize("line", NEWER)
def test_an_unknown_kind_is_passed_over_and_counted(line: bytes) -> None:
    assert counted(line) == (Unknown(), 1)


@pytest.mark.parametrize(("line", "block"), [(OPENED, 7), (REFORMED, 8)])
def test_a_block_of_an_unknown_kind_opens_as_one_that_no_dialect_expresses(line: bytes, block: int) -> None:
    assert counted(line) == (Open(block, 0, "unknown"), 1)


@pytest.mark.parametrize(
    "line", [b'{"k":"open","block":"x"}', b'{"k":"close"}', b'{"k":"note","kind":7}', b'{"x":1}', b"{", b'{"k":"end"}']
)
def test_a_broken_frame_is_still_an_error(line: bytes) -> None:
    before = passed_over.count
    with pytest.raises(msgspec.MsgspecError):
        decode(line)
    assert passed_over.count == before


def test_an_unknown_field_is_passed_over_without_a_count() -> None:
    line = b'{"k":"choice-end","choice":0,"finish_reason":"stop","mood":"good"}'
    assert counted(line) == (ChoiceEnd(0, "stop"), 0)


class _OldChoiceEnd(msgspec.Struct, tag_field="k", tag="choice-end"):
    """As the release before checks decodes it."""

    choice: int
    finish_reason: str


def test_a_release_before_checks_passes_over_their_field() -> None:
    line = encode(ChoiceEnd(0, "stop", check=Check("invalid", "/a", "wrong", 1)))
    assert msgspec.json.decode(line, type=_OldChoiceEnd) == _OldChoiceEnd(0, "stop")


def with_news(lines: list[bytes]) -> list[bytes]:
    """The lines with newer frames between them, and two blocks of newer kinds with text."""
    first, *rest = lines
    out = [NEWER[0], first, OPENED, REFORMED, b'7"from the future"', b'8:3"more of it"', encode(Close(7))]
    for line in rest:
        out += [line, *NEWER]
    return out


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_encodes_the_rest_as_if_they_were_not_there(dialect: str) -> None:
    facts = StreamFacts(STREAM, 1, "m", "completions" if dialect == "openai.completions" else "chat")
    plain, mixed = encoder_for(dialect, facts), encoder_for(dialect, facts)
    bare = [chunk for line in (*OLD, END) for chunk in plain.encode(line)]
    before = passed_over.count
    assert [chunk for line in (*with_news(OLD), END) for chunk in mixed.encode(line)] == bare
    assert passed_over.count > before
    late = encoder_for(dialect, facts)
    for line in with_news(OLD):
        late.observe(line)
    assert late.encode(END) == bare[len(bare) - len(late.encode(END)) :]
    assert snapshot(facts, with_news(OLD), dialect) == snapshot(facts, OLD, dialect)
    sse = encoder_for(dialect, facts)
    assert b"future" not in sse.sse([*with_news(OLD), END], 1, 1)


@pytest.mark.parametrize("dialect", ["", "anthropic.messages"])
def test_a_whole_answer_leaves_them_out(dialect: str) -> None:
    facts = StreamFacts(STREAM, 1, "m", dialect=dialect)
    answers: list[Any] = []
    for lines in (OLD, with_news(OLD)):
        collected = _collector(facts)
        for line in (*lines, END):
            collected.add(line)
        answers.append(collected.result())
    assert answers[0] == answers[1]


def test_an_agent_goes_on_with_a_stream_that_has_them() -> None:
    begun = [OLD[0], NEWER[0], OLD[1], NEWER[1]]
    assert prior_output(begun, 1) == prior_output(OLD[:2], 1)
