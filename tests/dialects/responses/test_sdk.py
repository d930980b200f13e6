"""The official ``openai`` package builds from our bytes the response of the log, and what other dialects build."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.stream.frames import End, Open, coalesce_from, encode, encode_text
from stream_gw.dialects import encoder_for
from stream_gw.dialects.facts import StreamFacts
from tests.dialects.canned import CannedAnthropic, CannedOpenAI, bare, completion_of
from tests.dialects.laws import reader
from tests.dialects.responses.fold import fold
from tests.dialects.strategies import STREAM, Stream, streams


def has_own_ids(stream: Stream) -> bool:
    """Whether no two calls have the same id: Python's helper knows calls by it, and refuses such a response."""
    ids = [frame.id for frame in stream.frames if isinstance(frame, Open) and frame.id is not None]
    return len(ids) == len(set(ids))


DIALECT = "openai.responses"
whole_singles = streams("chat", "completed", single=True).filter(has_own_ids)


@given(whole_singles)
def test_the_helper_builds_the_response(canned_openai: CannedOpenAI, stream: Stream) -> None:
    built = canned_openai.response(reader(DIALECT, stream).sse(stream.lines, 1, 1))
    assert bare(built.to_dict()) == bare(fold(reader(DIALECT, stream).chunks(stream.lines)))


@given(whole_singles)
def test_the_helper_reads_joined_deltas_comments_and_the_other_profile(
    canned_openai: CannedOpenAI, stream: Stream
) -> None:
    one = reader(DIALECT, stream)
    body = b": hb\nretry: 500\n" + one.opening()
    for seq, line in coalesce_from(1, stream.lines):
        body += one.sse([line], 1, seq) + one.heartbeat()
    whole = fold(reader(DIALECT, stream).chunks(stream.lines))
    assert bare(canned_openai.response(body).to_dict()) == bare(whole)
    if not any(isinstance(frame, Open) and frame.kind == "reasoning" for frame in stream.frames):
        other = encoder_for("open.responses", stream.facts).sse(stream.lines, 1, 1)
        assert bare(canned_openai.response(other).to_dict()) == bare(whole)


@given(whole_singles)
def test_a_resume_at_every_frame_gives_the_same_response(canned_openai: CannedOpenAI, stream: Stream) -> None:
    lines = stream.lines
    whole = canned_openai.response(reader(DIALECT, stream).sse(lines, 1, 1))
    one, before = reader(DIALECT, stream), b""
    for after in range(len(lines)):
        assert canned_openai.response(before + reader(DIALECT, stream, after).sse(lines[after:], 1, after + 1)) == whole
        before += one.sse([lines[after]], 1, after + 1)


FINISHES = {"stop": {("completed", None)}, "tool_calls": {("completed", None)}}
FINISHES |= {"length": {("incomplete", "max_output_tokens")}}
STOPS = {"end_turn": "stop", "stop_sequence": "stop", "refusal": "stop", "max_tokens": "length"}


@given(whole_singles)
def test_three_official_helpers_build_the_same_answer(
    canned_openai: CannedOpenAI, canned_anthropic: CannedAnthropic, stream: Stream
) -> None:
    facts = msgspec.structs.replace(stream.facts, include_usage=True)
    response = canned_openai.response(reader(DIALECT, stream).sse(stream.lines, 1, 1))
    completion = completion_of(canned_openai, encoder_for("openai.chat", facts).sse(stream.lines, 1, 1), 1)
    message = canned_anthropic.message(encoder_for("anthropic.messages", facts).sse(stream.lines, 1, 1))
    (choice,) = completion["choices"]
    said = choice.get("message", {})
    parts = [part for item in response.output if item.type == "message" for part in item.content]
    content = "".join(part.text for part in parts if part.type == "output_text")
    refusal = "".join(part.refusal for part in parts if part.type == "refusal")
    assert sorted(content) == sorted(said.get("content", "")), "blocks that interleave are in another order in a chat"
    assert sorted(refusal) == sorted(said.get("refusal", ""))
    texts = [block.text for block in message.content if block.type == "text"]
    assert texts == [part.refusal if part.type == "refusal" else part.text for part in parts]
    calls = [(item.call_id, item.name, item.arguments) for item in response.output if item.type == "function_call"]
    assert calls == [
        (call["id"], call["function"].get("name", ""), call["function"]["arguments"])
        for call in said.get("tool_calls", ())
    ]
    uses = [(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"]
    assert uses == [(id_, name, msgspec.json.decode(arguments)) for id_, name, arguments in calls]
    why = response.incomplete_details and response.incomplete_details.reason
    assert (response.status, why) in FINISHES[choice["finish_reason"]]
    assert (STOPS.get(str(message.stop_reason)) == "length") == (response.status == "incomplete")
    end, usage, used = stream.frames[-1], completion.get("usage", {}), response.usage
    assert isinstance(end, End) and end.usage is not None and used is not None
    assert used.output_tokens == usage.get("completion_tokens", 0) == message.usage.output_tokens == end.usage.output
    assert used.input_tokens == usage.get("prompt_tokens", 0) and used.total_tokens == usage.get("total_tokens", 0)


@given(whole_singles, st.data())
def test_the_helper_filters_a_full_replay_by_number(
    canned_openai: CannedOpenAI, stream: Stream, data: st.DataObject
) -> None:
    """Python's helper never sends its cursor: it reads a response again from the beginning."""
    canned_openai.body = reader(DIALECT, stream).sse(stream.lines, 1, 1)
    count = len(reader(DIALECT, stream).chunks(stream.lines))
    number = data.draw(st.integers(0, count - 2))
    with canned_openai.client.responses.stream(response_id=STREAM, starting_after=number) as events:
        told = [event.sequence_number for event in events]
    assert told == list(range(number + 1, count))


@pytest.mark.parametrize("dialect", ["openai.responses", "open.responses"])
@pytest.mark.parametrize("status", ["failed", "incomplete"])
def test_an_end_with_an_error_raises(canned_openai: CannedOpenAI, status: Any, dialect: str) -> None:
    lines = [encode(Open(0, 0, "text")), encode_text(0, "half"), encode(End(status))]
    with pytest.raises(openai.APIError) as raised:
        canned_openai.response(encoder_for(dialect, StreamFacts(STREAM, 1, "sim-small")).sse(lines, 1, 1))
    assert raised.value.code == status


def test_a_cancelled_response_is_incomplete(canned_openai: CannedOpenAI) -> None:
    lines = [encode(Open(0, 0, "text")), encode_text(0, "half"), encode(End("cancelled"))]
    response = canned_openai.response(
        encoder_for("openai.responses", StreamFacts(STREAM, 1, "sim-small")).sse(lines, 1, 1)
    )
    assert response.status == "cancelled" and response.output_text == "half"
    assert response.incomplete_details is None
