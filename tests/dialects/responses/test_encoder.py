"""Laws of the encoding: it depends neither on a reader's start nor on the batching of frames, and keeps the grammar."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.errors import BadRequest, CursorInvalid, Unsupported
from stream_fabric.stream.frames import (
    ChoiceEnd,
    Close,
    Delta,
    End,
    Frame,
    Open,
    coalesce,
    coalesce_from,
    encode,
)
from stream_gw.dialects import encoder_for
from stream_gw.dialects.accumulate import snapshot
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.responses.encoder import ResponsesEncoder
from stream_gw.dialects.responses.whole import DIALECTS, ResponseCollector, encoder_after, frames_before, response_of
from tests.dialects.laws import texts_by_block
from tests.dialects.responses.fold import events, fold
from tests.dialects.responses.specification import check_event, check_response
from tests.dialects.strategies import STREAM, Stream, raw, streams

singles = streams(single=True)
whole_singles = streams(status="completed", single=True)
dialects = st.sampled_from(DIALECTS)


def encoder(stream: Stream, after: int = 0, dialect: str = "openai.responses") -> ResponsesEncoder:
    made = encoder_for(dialect, stream.facts)
    assert isinstance(made, ResponsesEncoder)
    for line in stream.lines[:after]:
        made.observe(line)
    return made


@given(singles, dialects)
def test_the_opening_comes_before_the_first_frame_with_the_same_bytes(stream: Stream, dialect: str) -> None:
    early = encoder(stream, 0, dialect)
    first = early.opening()
    assert first and not early.opening()
    assert first + early.sse(stream.lines, 1, 1) == encoder(stream, 0, dialect).sse(stream.lines, 1, 1)
    assert not encoder(stream, 1, dialect).opening()


@given(singles, dialects)
def test_a_reader_after_any_number_gets_the_events_above_it(stream: Stream, dialect: str) -> None:
    lines = stream.lines
    whole = encoder(stream, 0, dialect).sse(lines, 1, 1)
    told = [data for data, _ in events(whole)]
    for number in range(-1, len(told)):
        after = frames_before(stream.facts, dialect, lines, number)
        one = encoder_after(stream.facts, dialect, lines[:after], number)
        rest = one.opening() + one.sse(lines[after:], 1, after + 1)
        assert [data for data, _ in events(rest)] == told[number + 1 :] and whole.endswith(rest)
    with pytest.raises(CursorInvalid):
        frames_before(stream.facts, dialect, lines, len(told))
    assert frames_before(stream.facts, dialect, [], 0) == 0, "its first event comes before any frame"


@given(singles, dialects)
def test_chunks_and_events_are_the_same_json(stream: Stream, dialect: str) -> None:
    body = encoder(stream, 0, dialect).sse(stream.lines, 1, 1)
    assert [data for data, _ in events(body)] == encoder(stream, 0, dialect).chunks(stream.lines)
    assert body.endswith(b"data: [DONE]\n\n") == (dialect == "open.responses")


@given(singles, dialects)
def test_the_events_add_up_to_the_response_and_end_with_it(stream: Stream, dialect: str) -> None:
    final = fold(encoder(stream, 0, dialect).chunks(stream.lines))
    assert final == msgspec.json.decode(response_of(stream.facts, dialect, stream.lines))
    collector = ResponseCollector(stream.facts, dialect)
    for line in stream.lines:
        collector.add(line)
    assert final == msgspec.json.decode(collector.result())
    assert collector.has_all_reasons == any(isinstance(frame, ChoiceEnd) for frame in stream.frames)


@given(singles, dialects)
def test_joined_deltas_encode_to_the_same_response(stream: Stream, dialect: str) -> None:
    one, told = encoder(stream, 0, dialect), []
    for seq, line in coalesce_from(1, stream.lines):
        told += one.chunks([line], seq)
    exact = encoder(stream, 0, dialect).chunks(stream.lines)
    assert fold(told, has_gaps=True) == fold(exact)
    for chunk in told:
        if b".delta" not in chunk.partition(b",")[0]:
            assert chunk in exact, "an event has the same number for every reader"
    joined = encoder(stream, 0, dialect)
    sse = b"".join(joined.sse([line], 1, seq) for seq, line in coalesce_from(1, stream.lines))
    assert [data for data, _ in events(sse)] == told
    assert len(coalesce(stream.lines)) <= len(stream.lines)


@given(singles, dialects, st.data())
def test_a_snapshot_equals_all_events_before_it(stream: Stream, dialect: str, data: st.DataObject) -> None:
    after = data.draw(st.integers(0, len(stream.lines) - 1))
    first = snapshot(stream.facts, stream.lines[:after], dialect)
    rest = encoder(stream, after, dialect).chunks(stream.lines[after:])
    assert fold(first + rest, has_gaps=True) == fold(encoder(stream, 0, dialect).chunks(stream.lines))


@given(singles)
def test_a_response_in_progress_shows_what_was_said(stream: Stream) -> None:
    for after in range(len(stream.lines)):
        one = encoder(stream, after)
        now = msgspec.json.decode(one.response())
        assert now["status"] == ("in_progress" if after else "queued")
        check_response(now)
        texts: dict[int, str] = {}
        for frame in stream.frames[:after]:
            if isinstance(frame, Open) and frame.kind in ("text", "refusal"):
                texts[frame.block] = ""
            elif isinstance(frame, Delta) and frame.block in texts:
                texts[frame.block] += frame.text
        said = [item["content"][0] for item in now["output"] if item["type"] == "message"]
        assert [part.get("text", part.get("refusal")) for part in said] == list(texts.values())


@given(whole_singles, dialects)
def test_nothing_that_the_dialect_expresses_is_lost(stream: Stream, dialect: str) -> None:
    told: list[str] = []
    for item in fold(encoder(stream, 0, dialect).chunks(stream.lines))["output"]:
        if item["type"] == "function_call":
            told.append(item["arguments"])
        elif parts := item.get("content") or item["summary"]:
            told += [part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts]
    assert told == texts_by_block(stream)


@given(singles)
def test_open_responses_keep_the_closed_schema(stream: Stream) -> None:
    for chunk in encoder(stream, 0, "open.responses").chunks(stream.lines):
        check_event(msgspec.json.decode(chunk))


@given(singles)
def test_both_profiles_differ_in_raw_reasoning_and_errors_alone(stream: Stream) -> None:
    if any(isinstance(frame, Open) and frame.form == "custom" for frame in stream.frames):
        return
    ours = [msgspec.json.decode(chunk) for chunk in encoder(stream).chunks(stream.lines)]
    theirs = [msgspec.json.decode(chunk) for chunk in encoder(stream, 0, "open.responses").chunks(stream.lines)]
    for own, other in zip(ours, theirs, strict=True):
        if own["type"] == "error":
            assert other["type"] == "error" and set(other["error"]) == {"type", "code", "message", "param"}
        elif own["type"].startswith("response.reasoning_text."):
            assert other == own | {"type": own["type"].replace("_text", "")}
        elif own.get("response", {}).get("status") == "cancelled":
            assert other["response"] == own["response"] | {"status": "incomplete"}
        else:
            assert own == other


@pytest.mark.parametrize(
    ("reason", "status", "why"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("budget", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
    ],
)
def test_how_a_response_ends(reason: str, status: str, why: str | None) -> None:
    cut: Any = "completed" if status == "completed" or reason == "length" else "incomplete"
    frames: list[Frame] = [Open(0, 0, "text"), Delta(0, "half"), Close(0), ChoiceEnd(0, reason), End(cut)]
    final = fold(encoder(Stream(StreamFacts(STREAM, 1, "m"), frames)).chunks([encode(frame) for frame in frames]))
    assert final["status"] == status and final["output"][0]["status"] == status
    assert final["incomplete_details"] == (why and {"reason": why})


def test_logprobs_are_in_the_deltas_and_in_the_item() -> None:
    one = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    frames: list[Frame] = [
        Open(0, 0, "text"), Delta(0, "a", 1, raw([one])), Delta(0, "", 0, raw([])), Close(0), ChoiceEnd(0, "stop"),
        End("completed"),
    ]  # fmt: skip
    facts = StreamFacts(STREAM, 1, "m", logprobs=True, dialect="openai.responses")
    final = fold(encoder(Stream(facts, frames)).chunks([encode(frame) for frame in frames]))
    assert final["output"][0]["content"][0]["logprobs"] == [one]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_a_response_cannot_express_is_refused(dialect: str) -> None:
    for facts in (
        StreamFacts(STREAM, 1, "m", n=2),
        StreamFacts(STREAM, 1, "m", "completions", logprobs=True),
        StreamFacts(STREAM, 1, "m", "embeddings"),
    ):
        with pytest.raises(Unsupported):
            encoder_for(dialect, facts)
    with pytest.raises(BadRequest):
        encoder_for("closed.responses", StreamFacts(STREAM, 1, "m"))


@given(st.lists(st.sampled_from(['"', "\\", "\\\\", '\\"', "\n", "a", "ü", " "])))
def test_quotes_and_backslashes_of_any_order_are_kept(texts: list[str]) -> None:
    frames = [Open(0, 0, "text"), *(Delta(0, text) for text in texts), Close(0), ChoiceEnd(0, "stop"), End("completed")]
    stream = Stream(StreamFacts(STREAM, 1, "m"), frames)
    (item,) = msgspec.json.decode(encoder(stream).chunks(stream.lines, 1)[-1])["response"]["output"]
    assert item["content"][0]["text"] == "".join(texts)


def test_the_end_of_a_long_answer_holds_nobody_up() -> None:
    """The gateway's loop stood still for 0.4 s per MB of answer, and longer with escapes."""
    frames = [Open(0, 0, "text"), *[Delta(0, " word")] * 600_000, Close(0), ChoiceEnd(0, "stop"), End("completed")]
    lines = Stream(StreamFacts(STREAM, 1, "m"), frames).lines
    made = encoder(Stream(StreamFacts(STREAM, 1, "m"), []))
    made.chunks(lines[:-3], 1)
    began = time.process_time()
    made.chunks(lines[-3:], len(lines) - 2)
    assert time.process_time() - began < 0.5
