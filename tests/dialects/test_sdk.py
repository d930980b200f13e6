"""The official SDK's accumulating helper builds our own whole response from our bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.stream.frames import End, Open, coalesce, encode, encode_text
from stream_gw.dialects.accumulate import Accumulator, snapshot
from stream_gw.dialects.facts import StreamFacts
from tests.dialects.canned import CannedOpenAI, completion_of, said_alone
from tests.dialects.fold import fold
from tests.dialects.strategies import STREAM, Stream, streams
from tests.dialects.test_encoders import encoder


def whole(stream: Stream) -> dict[str, Any]:
    accumulator = Accumulator(stream.facts)
    for line in stream.lines:
        accumulator.add(line)
    answer = msgspec.json.decode(accumulator.result())
    if not stream.facts.include_usage:
        del answer["usage"]
    return said_alone(answer)


@given(streams("chat", "completed"))
def test_the_helper_builds_the_same_response(canned_openai: CannedOpenAI, stream: Stream) -> None:
    assert completion_of(canned_openai, encoder(stream).sse(stream.lines, 1, 1), stream.facts.n) == whole(stream)


@given(streams("chat", "completed"))
def test_the_helper_accepts_a_first_event_with_a_retry_time(canned_openai: CannedOpenAI, stream: Stream) -> None:
    body = b": hb\nretry: 500\n" + encoder(stream).sse(stream.lines, 1, 1)
    assert completion_of(canned_openai, body, stream.facts.n) == whole(stream)


@given(streams("chat", "completed"))
def test_the_helper_reads_joined_deltas(canned_openai: CannedOpenAI, stream: Stream) -> None:
    assert completion_of(canned_openai, encoder(stream).sse(coalesce(stream.lines), 1, 1), stream.facts.n) == whole(
        stream
    )


@given(streams("chat", "completed"), st.data())
def test_the_helper_reads_on_after_a_snapshot(canned_openai: CannedOpenAI, stream: Stream, data: st.DataObject) -> None:
    after = data.draw(st.integers(0, len(stream.lines) - 1))
    first = b"".join(b"data: %b\n\n" % chunk for chunk in snapshot(stream.facts, stream.lines[:after]))
    rest = encoder(stream, after).sse(stream.lines[after:], 1, after + 1)
    assert completion_of(canned_openai, first + rest, stream.facts.n) == whole(stream)


@given(streams("completions", "completed"))
def test_the_raw_iterator_reads_completions(canned_openai: CannedOpenAI, stream: Stream) -> None:
    canned_openai.body = encoder(stream).sse(stream.lines, 1, 1)
    read = canned_openai.client.completions.create(model="sim-small", prompt="hi", stream=True)
    dumped = [msgspec.json.encode(chunk.model_dump(exclude_unset=True)) for chunk in read]
    assert fold(dumped) == fold(encoder(stream).chunks(stream.lines))


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_an_end_other_than_completion_raises(canned_openai: CannedOpenAI, status: Any) -> None:
    stream = Stream(StreamFacts(STREAM, 1, "sim-small"), [])
    lines = [encode(Open(0, 0, "text")), encode_text(0, "half"), encode(End(status))]
    with pytest.raises(openai.APIError) as raised:
        completion_of(canned_openai, encoder(stream).sse(lines, 1, 1), 1)
    assert raised.value.code == status
