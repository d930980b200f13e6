"""The official ``anthropic`` package builds from our bytes what the official ``openai`` package builds from them."""

from __future__ import annotations

from typing import Any

import anthropic
import msgspec
import pytest
from hypothesis import given

from stream_fabric.stream.frames import End, Open, coalesce, encode, encode_text
from stream_gw.dialects import encoder_for
from stream_gw.dialects.facts import StreamFacts
from tests.dialects.anthropic.fold import fold
from tests.dialects.canned import CannedAnthropic, CannedOpenAI, bare, completion_of
from tests.dialects.laws import reader
from tests.dialects.strategies import STREAM, Stream, streams

DIALECT = "anthropic.messages"
whole_singles = streams("chat", "completed", single=True)


@given(whole_singles)
def test_the_helper_builds_the_message(canned_anthropic: CannedAnthropic, stream: Stream) -> None:
    built = canned_anthropic.message(reader(DIALECT, stream).sse(stream.lines, 1, 1))
    assert bare(built.model_dump()) == bare(fold(reader(DIALECT, stream).chunks(stream.lines)))


@given(whole_singles)
def test_the_helper_reads_joined_deltas_and_pings(canned_anthropic: CannedAnthropic, stream: Stream) -> None:
    one = reader(DIALECT, stream)
    body = b": hb\nretry: 500\n"
    for seq, line in enumerate(coalesce(stream.lines), 1):
        body += one.sse([line], 1, seq) + one.heartbeat()
    assert bare(canned_anthropic.message(body).model_dump()) == bare(fold(reader(DIALECT, stream).chunks(stream.lines)))


@given(whole_singles)
def test_a_resume_at_every_frame_gives_the_same_message(canned_anthropic: CannedAnthropic, stream: Stream) -> None:
    lines = stream.lines
    whole = canned_anthropic.message(reader(DIALECT, stream).sse(lines, 1, 1))
    one, before = reader(DIALECT, stream), b""
    for after in range(len(lines)):
        assert (
            canned_anthropic.message(before + reader(DIALECT, stream, after).sse(lines[after:], 1, after + 1)) == whole
        )
        before += one.sse([lines[after]], 1, after + 1)


STOPS = {"stop": ("end_turn", "stop_sequence", "refusal", "tool_use"), "length": ("max_tokens",)}
STOPS |= {"tool_calls": ("tool_use",)}


@given(whole_singles)
def test_both_official_helpers_build_the_same_answer(
    canned_anthropic: CannedAnthropic, canned_openai: CannedOpenAI, stream: Stream
) -> None:
    facts = msgspec.structs.replace(stream.facts, include_usage=True)
    message = canned_anthropic.message(reader(DIALECT, stream).sse(stream.lines, 1, 1))
    completion = completion_of(canned_openai, encoder_for("openai.chat", facts).sse(stream.lines, 1, 1), 1)
    (choice,) = completion["choices"]
    said = choice.get("message", {})
    kinds = {frame.block: frame.kind for frame in stream.frames if isinstance(frame, Open)}
    texts = [block.text for block in message.content if block.type == "text"]
    if set(kinds.values()) & {"refusal"} == set() or set(kinds.values()) & {"text"} == set():
        assert sorted("".join(texts)) == sorted(said.get("content", "") + said.get("refusal", ""))
    calls = [(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"]
    assert calls == [
        (call["id"], call["function"].get("name", ""), msgspec.json.decode(call["function"]["arguments"]))
        for call in said.get("tool_calls", ())
    ]
    assert message.stop_reason in STOPS[choice["finish_reason"]]
    used, usage = message.usage, completion.get("usage", {})
    cached, written = used.cache_read_input_tokens or 0, used.cache_creation_input_tokens or 0
    end = stream.frames[-1]
    assert isinstance(end, End) and end.usage is not None
    assert used.output_tokens == usage.get("completion_tokens", 0) == end.usage.output
    if end.usage.prompt >= cached + written:
        assert used.input_tokens + cached + written == usage.get("prompt_tokens", 0)


@pytest.mark.parametrize("status", ["failed", "cancelled", "incomplete"])
def test_an_end_other_than_completion_raises(canned_anthropic: CannedAnthropic, status: Any) -> None:
    stream = Stream(StreamFacts(STREAM, 1, "sim-small"), [])
    lines = [encode(Open(0, 0, "text")), encode_text(0, "half"), encode(End(status))]
    with pytest.raises(anthropic.APIStatusError) as raised:
        canned_anthropic.message(reader(DIALECT, stream).sse(lines, 1, 1))
    assert raised.value.body["error"]["code"] == status  # type: ignore[index]
