"""Laws of the encoding: it depends neither on a reader's start nor on the batching of frames, and keeps the grammar."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, End, Frame, Open, coalesce, encode
from stream_gw.dialects import encoder_for
from stream_gw.dialects.accumulate import snapshot
from stream_gw.dialects.anthropic.whole import MessageCollector
from stream_gw.dialects.base import ends_cleanly
from stream_gw.dialects.facts import StreamFacts
from tests.dialects.anthropic.fold import fold
from tests.dialects.fold import named_events as events
from tests.dialects.laws import reader, texts_by_block
from tests.dialects.strategies import Stream, streams

DIALECT = "anthropic.messages"
singles = streams(single=True)
whole_singles = streams(status="completed", single=True)


def collected(stream: Stream, lines: list[bytes]) -> dict[str, Any]:
    collector = MessageCollector(stream.facts)
    for line in lines:
        collector.add(line)
    return msgspec.json.decode(collector.result())  # type: ignore[no-any-return]


@given(singles)
def test_chunks_and_events_are_the_same_json(stream: Stream) -> None:
    data = [data for data, _ in events(reader(DIALECT, stream).sse(stream.lines, 1, 1))]
    chunks = reader(DIALECT, stream).chunks(stream.lines)
    end = stream.frames[-1]
    assert isinstance(end, End)
    if ends_cleanly(end, any(isinstance(frame, ChoiceEnd) for frame in stream.frames)):
        assert data == chunks
        return
    assert data[:-1] == chunks[:-1]
    error = msgspec.json.decode(data[-1])
    assert error["type"] == "error" and error["error"].pop("cursor") == f"1-{len(stream.lines)}"
    assert error == msgspec.json.decode(chunks[-1])


@given(whole_singles)
def test_the_events_add_up_to_the_whole_message(stream: Stream) -> None:
    assert fold(reader(DIALECT, stream).chunks(stream.lines)) == collected(stream, stream.lines)


@given(whole_singles)
def test_joined_deltas_encode_to_the_same_message(stream: Stream) -> None:
    joined = coalesce(stream.lines)
    assert fold(reader(DIALECT, stream).chunks(joined)) == fold(reader(DIALECT, stream).chunks(stream.lines))
    assert collected(stream, joined) == collected(stream, stream.lines)


@given(whole_singles, st.data())
def test_a_snapshot_equals_all_events_before_it(stream: Stream, data: st.DataObject) -> None:
    after = data.draw(st.integers(0, len(stream.lines) - 1))
    first = snapshot(stream.facts, stream.lines[:after], DIALECT)
    rest = reader(DIALECT, stream, after).chunks(stream.lines[after:])
    assert fold(first + rest) == fold(reader(DIALECT, stream).chunks(stream.lines))


@given(whole_singles)
def test_nothing_that_the_dialect_expresses_is_lost(stream: Stream) -> None:
    """All text of texts, refusals, thoughts and calls is in the events, block by block in the order of opening."""
    told: dict[int, str] = {}
    for event in map(msgspec.json.decode, reader(DIALECT, stream).chunks(stream.lines)):
        if event["type"] == "content_block_start" and event["content_block"]["type"] != "redacted_thinking":
            told[event["index"]] = ""
        elif event["type"] == "content_block_delta" and event["delta"]["type"] != "signature_delta":
            told[event["index"]] += next(value for name, value in event["delta"].items() if name != "type")
    assert list(told.values()) == texts_by_block(stream)


@given(singles)
def test_a_text_leaves_with_its_frame_unless_another_block_is_open(stream: Stream) -> None:
    one, open_blocks, alone = reader(DIALECT, stream), set[int](), True
    for line, frame in zip(stream.lines, stream.frames, strict=True):
        chunks = one.chunks([line])
        if isinstance(frame, Open):
            open_blocks.add(frame.block)
            alone = len(open_blocks) == 1  # else a call may have ended early, for the block that waits
        elif isinstance(frame, Delta) and alone and open_blocks == {frame.block}:
            kind = next(f for f in stream.frames if isinstance(f, Open) and f.block == frame.block)
            assert bool(chunks) == (kind.kind != "item" and kind.form not in ("server", "redacted"))
        elif not isinstance(frame, Delta):
            open_blocks.discard(getattr(frame, "block", -1))


@given(st.recursive(st.text('ab{}[]"\\\\'), lambda each: st.lists(each) | st.dictionaries(st.text('}"\\\\'), each)))
def test_a_call_ends_with_the_last_bracket_of_its_arguments(value: object) -> None:
    """Whatever its strings hold, and however the engine cuts it."""
    arguments = msgspec.json.encode({"a": value}).decode()
    encoder = encoder_for(DIALECT, StreamFacts("s", 0, "m", dialect=DIALECT))
    encoder.chunks([encode(Open(0, 0, "tool", "function", "a", "f")), encode(Open(1, 0, "tool", "function", "b", "g"))])
    for number, character in enumerate(arguments, 1):
        types = [msgspec.json.decode(chunk)["type"] for chunk in encoder.chunks([encode(Delta(0, character))])]
        assert ("content_block_stop" in types) == (number == len(arguments))


def test_a_pair_of_surrogates_may_be_cut_within_arguments() -> None:
    encoder = encoder_for(DIALECT, StreamFacts("s", 0, "m", dialect=DIALECT))
    encoder.chunks([encode(Open(0, 0, "tool", "function", "a", "f")), encode(Open(1, 0, "tool", "function", "b", "g"))])
    first, second = encode(Delta(0, '{"a":"X')), encode(Delta(0, 'X"}'))
    encoder.chunks([first.replace(b"X", rb"\ud83d")])
    chunks = encoder.chunks([second.replace(b"X", rb"\ude00")])
    assert b'"content_block_stop"' in b"".join(chunks), "half a pair is no JSON of its own, so nothing is decoded here"


def test_arguments_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded at each bracket, 200 KB beside another call took a reader 20 s."""
    decoded: list[str] = []
    monkeypatch.setattr("stream_gw.dialects.anthropic.encoder.decode_text", decoded.append)
    encoder = encoder_for(DIALECT, StreamFacts("s", 0, "m", dialect=DIALECT))
    encoder.chunks([encode(Open(0, 0, "tool", "function", "a", "f")), encode(Open(1, 0, "tool", "function", "b", "g"))])
    for text in ('{"a":[{}', ",{}", ",{}", "]}"):
        encoder.chunks([encode(Delta(0, text))])
    assert decoded == ['{"a":[{},{},{}]}']


@pytest.mark.parametrize(("reason", "stop"), [("budget", "max_tokens"), ("content_filter", "refusal")])
def test_an_answer_that_a_budget_or_moderation_has_cut_ends_as_a_message(reason: str, stop: str) -> None:
    facts = StreamFacts("s", 0, "m", dialect=DIALECT)
    frames: list[Frame] = [Open(0, 0, "text"), Delta(0, "half"), Close(0), ChoiceEnd(0, reason), End("incomplete")]
    stream = Stream(facts, frames)
    types = [msgspec.json.decode(chunk)["type"] for chunk in reader(DIALECT, stream).chunks(stream.lines)]
    assert types[-2:] == ["message_delta", "message_stop"]
    assert collected(stream, stream.lines)["stop_reason"] == stop
