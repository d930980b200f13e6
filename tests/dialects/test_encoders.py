"""Laws of every encoding: it depends neither on a reader's start nor on the batching of frames."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, End, Open, coalesce, decode, encode
from stream_fabric.stream.ids import StreamId
from stream_gw.dialects import DIALECTS, encoder_for
from stream_gw.dialects.accumulate import Accumulator, snapshot
from stream_gw.dialects.base import Encoder, ends_cleanly
from stream_gw.dialects.facts import StreamFacts
from tests.dialects.fold import events, fold, folded_answer
from tests.dialects.strategies import Stream, streams


def encoder(stream: Stream, after: int = 0) -> Encoder:
    made = encoder_for(f"openai.{stream.facts.kind}", stream.facts)
    for line in stream.structure(after):
        made.observe(line)
    return made


def placeless(body: bytes) -> bytes:
    """Without text offsets, which a reader from the middle does not get."""
    return re.sub(rb'"text_offset":(\[[0-9,]*\]|null)', b'"text_offset":?', body)


def shown_all(stream: Stream, after: int) -> Encoder:
    made = encoder_for(f"openai.{stream.facts.kind}", stream.facts)
    for line in stream.lines[:after]:
        made.observe(line)
    return made


def accumulated(stream: Stream, lines: list[bytes]) -> dict[str, Any]:
    accumulator = Accumulator(stream.facts)
    for line in lines:
        accumulator.add(line)
    return folded_answer(accumulator.result())


@given(streams())
def test_a_reader_from_the_middle_gets_the_tail_of_the_whole(stream: Stream) -> None:
    lines = stream.lines
    one = encoder(stream)
    parts = [one.sse([line], 2, seq) for seq, line in enumerate(lines, 1)]
    bodies = [encoder(stream, seq).chunks([line]) for seq, line in enumerate(lines)]
    assert encoder(stream).sse(lines, 2, 1) == b"".join(parts)
    for after in range(len(lines)):
        assert placeless(encoder(stream, after).sse(lines[after:], 2, after + 1)) == placeless(b"".join(parts[after:]))
        tail = [placeless(body) for some in bodies[after:] for body in some]
        assert [placeless(body) for body in encoder(stream, after).chunks(lines[after:])] == tail


@given(streams())
def test_observing_every_frame_is_observing_the_structure(stream: Stream) -> None:
    lines = stream.lines
    for after in range(len(lines)):
        from_all = shown_all(stream, after).sse(lines[after:], 1, after + 1)
        assert placeless(from_all) == placeless(encoder(stream, after).sse(lines[after:], 1, after + 1))


@given(streams("completions"))
def test_a_reader_that_observed_the_text_knows_every_offset(stream: Stream) -> None:
    lines = stream.lines
    one = encoder(stream)
    parts = [one.sse([line], 1, seq) for seq, line in enumerate(lines, 1)]
    for after in range(len(lines)):
        if not after or any(isinstance(frame, Delta) for frame in stream.frames[:after]):
            assert shown_all(stream, after).sse(lines[after:], 1, after + 1) == b"".join(parts[after:])


@given(streams())
def test_only_the_last_event_of_a_frame_carries_its_cursor(stream: Stream) -> None:
    lines = stream.lines
    one = encoder(stream)
    for seq, line in enumerate(lines, 1):
        ids = [id_ for _, id_ in events(one.sse([line], 3, seq))]
        assert ids[:-1] == [None] * (len(ids) - 1)
        assert ids[-1:] in ([], [b"3-%d" % seq])


@given(streams())
def test_chunks_and_events_are_the_same_json(stream: Stream) -> None:
    data = [data for data, _ in events(encoder(stream).sse(stream.lines, 1, 1))]
    chunks = encoder(stream).chunks(stream.lines)
    end = stream.frames[-1]
    assert isinstance(end, End)
    finished = {frame.choice for frame in stream.frames if isinstance(frame, ChoiceEnd)}
    if ends_cleanly(end, len(finished) >= stream.facts.n):
        assert data == [*chunks, b"[DONE]"]
        return
    assert data[:-1] == chunks[:-1]
    error = msgspec.json.decode(data[-1])
    assert error["error"].pop("cursor") == f"1-{len(stream.lines)}"
    assert error == msgspec.json.decode(chunks[-1])


@given(streams(status="completed"))
def test_the_chunks_add_up_to_the_whole_response(stream: Stream) -> None:
    whole = accumulated(stream, stream.lines)
    streamed = fold(encoder(stream).chunks(stream.lines))
    if not stream.facts.include_usage:
        assert streamed["usage"] is None
        del streamed["usage"], whole["usage"]
    assert streamed == whole


@given(streams(status="completed"))
def test_joined_deltas_encode_to_the_same_text(stream: Stream) -> None:
    joined = coalesce(stream.lines)
    assert len(joined) <= len(stream.lines)
    assert fold(encoder(stream).chunks(joined)) == fold(encoder(stream).chunks(stream.lines))
    assert accumulated(stream, joined) == accumulated(stream, stream.lines)


@given(streams(status="completed"), st.data())
def test_a_snapshot_equals_all_chunks_before_it(stream: Stream, data: st.DataObject) -> None:
    after = data.draw(st.integers(0, len(stream.lines) - 1))
    lines = stream.lines
    first = snapshot(stream.facts, lines[:after])
    assert len(first) <= 1
    whole = fold(encoder(stream).chunks(lines))
    caught_up = fold(first + encoder(stream, after).chunks(lines[after:]))
    if stream.facts.kind == "completions":
        for choice in (*whole["choices"], *caught_up["choices"]):
            if choice["logprobs"]:
                del choice["logprobs"]["text_offset"]
    assert caught_up == whole
    if stream.facts.kind == "chat":  # nothing said, nothing stands for it; in completions an empty text may
        assert bool(first) == bool(encoder(stream).chunks(lines[:after]))


@given(streams())
def test_frames_are_lines_and_back(stream: Stream) -> None:
    for line in stream.lines:
        assert encode(decode(line)) == line
        assert not set(b"\n\r\x1e\x1f") & set(line)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_many_calls_take_no_quadratic_time(dialect: str) -> None:
    """Each reader of an answer with 10,000 calls held its gateway up for 16 s."""
    kind: Any = {"openai.embeddings": "embeddings", "openai.completions": "completions"}.get(dialect, "chat")
    facts = StreamFacts(StreamId("resp_" + "0" * 32), 1, "m", kind, dialect="" if "openai.c" in dialect else dialect)
    made = encoder_for(dialect, facts)
    began = time.process_time()
    for block in range(10_000):
        for frame in (Open(block, 0, "tool", "function", f"c{block}", "f"), Delta(block, "{}"), Close(block)):
            made.chunks([encode(frame)], 3 * block + 1)
    assert time.process_time() - began < 4
