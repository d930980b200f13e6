"""The official SDK's accumulating helper builds our own whole response from our bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.stream.frames import End, Open, coalesce, encode, encode_text
from stream_gw.dialects.accumulate import Accumulator, snapshot
from stream_gw.dialects.facts import StreamFacts
from tests.dialects.fold import fold
from tests.dialects.strategies import STREAM, Stream, streams
from tests.dialects.test_encoders import encoder


class Canned:
    """A client whose server answers with ``body``."""

    def __init__(self) -> None:
        self.body = b""
        self._http = httpx2.Client(transport=httpx2.MockTransport(self._answer))
        self.client = openai.OpenAI(api_key="sk-test", base_url="http://gateway/v1", http_client=self._http)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=self.body)

    def streamed(self, body: bytes, n: int) -> dict[str, Any]:
        self.body = body
        with self.client.chat.completions.stream(
            model="sim-small", messages=[{"role": "user", "content": "hi"}], n=n
        ) as stream:
            for _ in stream:
                pass
            # get_final_completion() refuses an answer that was cut at its length
            return _said(stream.current_completion_snapshot.model_dump())

    def close(self) -> None:
        self.client.close()


@pytest.fixture(scope="module")
def canned() -> Iterator[Canned]:
    made = Canned()
    yield made
    made.close()


def _said(completion: dict[str, Any]) -> dict[str, Any]:
    """A completion without fields that are null, empty, absent or the SDK helper's own."""
    for choice in completion["choices"]:
        choice.pop("stop_reason", None)
        message = choice["message"]
        for name in ("parsed", "annotations", "audio", "function_call"):
            message.pop(name, None)
        for call in message.get("tool_calls") or ():
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        choice["message"] = {name: value for name, value in message.items() if value}
    return {name: value for name, value in _bare(completion).items() if name != "object"}


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        bare = {name: _bare(item) for name, item in value.items()}
        return {name: item for name, item in bare.items() if item not in (None, [], {})}
    return [_bare(item) for item in value] if isinstance(value, list) else value


def whole(stream: Stream) -> dict[str, Any]:
    accumulator = Accumulator(stream.facts)
    for line in stream.lines:
        accumulator.add(line)
    answer = msgspec.json.decode(accumulator.result())
    if not stream.facts.include_usage:
        del answer["usage"]
    return _said(answer)


@given(streams("chat", "completed"))
def test_the_helper_builds_the_same_response(canned: Canned, stream: Stream) -> None:
    assert canned.streamed(encoder(stream).sse(stream.lines, 1, 1), stream.facts.n) == whole(stream)


@given(streams("chat", "completed"))
def test_the_helper_accepts_a_first_event_with_a_retry_time(canned: Canned, stream: Stream) -> None:
    body = b": hb\nretry: 500\n" + encoder(stream).sse(stream.lines, 1, 1)
    assert canned.streamed(body, stream.facts.n) == whole(stream)


@given(streams("chat", "completed"))
def test_the_helper_reads_joined_deltas(canned: Canned, stream: Stream) -> None:
    assert canned.streamed(encoder(stream).sse(coalesce(stream.lines), 1, 1), stream.facts.n) == whole(stream)


@given(streams("chat", "completed"), st.data())
def test_the_helper_reads_on_after_a_snapshot(canned: Canned, stream: Stream, data: st.DataObject) -> None:
    after = data.draw(st.integers(0, len(stream.lines) - 1))
    first = b"".join(b"data: %b\n\n" % chunk for chunk in snapshot(stream.facts, stream.lines[:after]))
    rest = encoder(stream, after).sse(stream.lines[after:], 1, after + 1)
    assert canned.streamed(first + rest, stream.facts.n) == whole(stream)


@given(streams("completions", "completed"))
def test_the_raw_iterator_reads_completions(canned: Canned, stream: Stream) -> None:
    canned.body = encoder(stream).sse(stream.lines, 1, 1)
    read = canned.client.completions.create(model="sim-small", prompt="hi", stream=True)
    dumped = [msgspec.json.encode(chunk.model_dump(exclude_unset=True)) for chunk in read]
    assert fold(dumped) == fold(encoder(stream).chunks(stream.lines))


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_an_end_other_than_completion_raises(canned: Canned, status: Any) -> None:
    stream = Stream(StreamFacts(STREAM, 1, "sim-small"), [])
    lines = [encode(Open(0, 0, "text")), encode_text(0, "half"), encode(End(status))]
    with pytest.raises(openai.APIError) as raised:
        canned.streamed(encoder(stream).sse(lines, 1, 1), 1)
    assert raised.value.code == status
