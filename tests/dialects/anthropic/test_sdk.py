"""The official ``anthropic`` package builds from our bytes what the official ``openai`` package builds from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import msgspec
import pytest
from anthropic.types import Message
from hypothesis import given

from stream_fabric.stream.frames import End, Open, coalesce, encode, encode_text
from stream_gw.dialects import encoder_for
from stream_gw.dialects.facts import StreamFacts
from tests.dialects.anthropic.fold import fold
from tests.dialects.anthropic.test_encoder import encoder
from tests.dialects.strategies import STREAM, Stream, streams
from tests.dialects.test_sdk import Canned as CannedChat

whole_singles = streams("chat", "completed", single=True)


class Canned:
    """A client whose server answers with ``body``."""

    def __init__(self) -> None:
        self.body = b""
        self._http = httpx2.Client(transport=httpx2.MockTransport(self._answer))
        self.client = anthropic.Anthropic(api_key="sk-test", base_url="http://gateway", http_client=self._http)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=self.body)

    def streamed(self, body: bytes) -> Message:
        self.body = body
        with self.client.messages.stream(
            model="sim-small", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            return stream.get_final_message()

    def close(self) -> None:
        self.client.close()


@pytest.fixture(scope="module")
def canned() -> Iterator[Canned]:
    made = Canned()
    yield made
    made.close()


@pytest.fixture(scope="module")
def chat() -> Iterator[CannedChat]:
    made = CannedChat()
    yield made
    made.close()


def bare(value: Any) -> Any:
    """Without null fields, and without those that the helper adds."""
    if isinstance(value, dict):
        return {name: bare(item) for name, item in value.items() if item is not None and name != "parsed_output"}
    return [bare(item) for item in value] if isinstance(value, list) else value


@given(whole_singles)
def test_the_helper_builds_the_message(canned: Canned, stream: Stream) -> None:
    built = canned.streamed(encoder(stream).sse(stream.lines, 1, 1))
    assert bare(built.model_dump()) == bare(fold(encoder(stream).chunks(stream.lines)))


@given(whole_singles)
def test_the_helper_reads_joined_deltas_and_pings(canned: Canned, stream: Stream) -> None:
    one = encoder(stream)
    body = b": hb\nretry: 500\n"
    for seq, line in enumerate(coalesce(stream.lines), 1):
        body += one.sse([line], 1, seq) + one.heartbeat()
    assert bare(canned.streamed(body).model_dump()) == bare(fold(encoder(stream).chunks(stream.lines)))


@given(whole_singles)
def test_a_resume_at_every_frame_gives_the_same_message(canned: Canned, stream: Stream) -> None:
    lines = stream.lines
    whole = canned.streamed(encoder(stream).sse(lines, 1, 1))
    one, before = encoder(stream), b""
    for after in range(len(lines)):
        assert canned.streamed(before + encoder(stream, after).sse(lines[after:], 1, after + 1)) == whole
        before += one.sse([lines[after]], 1, after + 1)


STOPS = {"stop": ("end_turn", "stop_sequence", "refusal", "tool_use"), "length": ("max_tokens",)}
STOPS |= {"tool_calls": ("tool_use",)}


@given(whole_singles)
def test_both_official_helpers_build_the_same_answer(canned: Canned, chat: CannedChat, stream: Stream) -> None:
    facts = msgspec.structs.replace(stream.facts, include_usage=True)
    message = canned.streamed(encoder(stream).sse(stream.lines, 1, 1))
    completion = chat.streamed(encoder_for("openai.chat", facts).sse(stream.lines, 1, 1), 1)
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
def test_an_end_other_than_completion_raises(canned: Canned, status: Any) -> None:
    stream = Stream(StreamFacts(STREAM, 1, "sim-small"), [])
    lines = [encode(Open(0, 0, "text")), encode_text(0, "half"), encode(End(status))]
    with pytest.raises(anthropic.APIStatusError) as raised:
        canned.streamed(encoder(stream).sse(lines, 1, 1))
    assert raised.value.body["error"]["code"] == status  # type: ignore[index]
