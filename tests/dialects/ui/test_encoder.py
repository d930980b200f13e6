"""Laws of the encoding: it depends neither on a reader's start nor on the batching of frames."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, End, Open, coalesce
from stream_gw.dialects.accumulate import snapshot
from stream_gw.dialects.facts import StreamFacts
from tests.dialects.fold import events
from tests.dialects.laws import reader
from tests.dialects.strategies import STREAM, Stream, streams

DIALECT = "vercel.ui"
singles = streams(single=True)
whole_singles = streams(status="completed", single=True)


def joined(chunks: list[bytes]) -> list[dict[str, Any]]:
    """The chunks with adjacent deltas of one part as one."""
    made: list[dict[str, Any]] = []
    for chunk in map(msgspec.json.decode, chunks):
        text = next((name for name in ("delta", "inputTextDelta") if name in chunk), "")
        if text and made and {**made[-1], text: ""} == {**chunk, text: ""}:
            made[-1][text] += chunk[text]
        elif not text or chunk[text]:
            made.append(chunk)
    return made


@given(singles)
def test_chunks_and_events_are_the_same_json(stream: Stream) -> None:
    data = [data for data, _ in events(reader(DIALECT, stream).sse(stream.lines, 1, 1))]
    assert data == [*reader(DIALECT, stream).chunks(stream.lines), b"[DONE]"]


@given(whole_singles)
def test_joined_deltas_encode_to_the_same_parts(stream: Stream) -> None:
    lines = stream.lines
    assert joined(reader(DIALECT, stream).chunks(coalesce(lines))) == joined(reader(DIALECT, stream).chunks(lines))


@given(whole_singles, st.data())
def test_a_snapshot_equals_all_chunks_before_it(stream: Stream, data: st.DataObject) -> None:
    after = data.draw(st.integers(0, len(stream.lines) - 1))
    first = snapshot(stream.facts, stream.lines[:after], DIALECT)
    rest = reader(DIALECT, stream, after).chunks(stream.lines[after:])
    assert joined(first + rest) == joined(reader(DIALECT, stream).chunks(stream.lines))


@given(singles)
def test_every_part_begins_before_its_text_and_ends_before_the_step(stream: Stream) -> None:
    begun, ended = set[str](), set[str]()
    chunks = [msgspec.json.decode(chunk) for chunk in reader(DIALECT, stream).chunks(stream.lines)]
    assert [chunk["type"] for chunk in chunks[:2]] == ["start", "start-step"]
    for chunk in chunks:
        kind, _, what = chunk["type"].rpartition("-")
        if kind in ("text", "reasoning"):
            assert (what == "start") == (chunk["id"] not in begun) and chunk["id"] not in ended
            (ended if what == "end" else begun).add(chunk["id"])
    assert begun == ended
    assert (chunks[-1]["type"] == "finish") == (chunks[-2]["type"] == "finish-step")


def test_another_producer_goes_on_with_an_open_part() -> None:
    frames = [Open(0, 0, "text"), Delta(0, "a"), Open(0, 0, "text"), Delta(0, "b"), Close(0), ChoiceEnd(0, "stop")]
    stream = Stream(StreamFacts(STREAM, 1, "m"), [*frames, End("completed")])
    types = [msgspec.json.decode(chunk)["type"] for chunk in reader(DIALECT, stream).chunks(stream.lines)]
    assert types == [
        "start",
        "start-step",
        "text-start",
        "text-delta",
        "text-delta",
        "text-end",
        "finish-step",
        "finish",
    ]


@pytest.mark.parametrize(
    ("reason", "told"),
    [("budget", "length"), ("content_filter", "content-filter"), ("function_call", "tool-calls"), ("pause", "other")],
)
def test_a_finish_reason_is_a_word_of_the_sdk(reason: str, told: str) -> None:
    status: Any = "incomplete" if reason == "budget" else "completed"
    stream = Stream(StreamFacts(STREAM, 1, "m"), [Open(0, 0, "text"), ChoiceEnd(0, reason), End(status)])
    finish = msgspec.json.decode(reader(DIALECT, stream).chunks(stream.lines)[-1])
    assert finish["finishReason"] == told
    assert finish["messageMetadata"].get("stopReason") == ("budget" if reason == "budget" else None)
