"""The official accumulators build of our bytes what the engine said, cut and resumed wherever the network fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, End, ErrorInfo, Frame, Open, Usage, encode
from stream_fabric.stream.ids import derived_id
from stream_gw.dialects import encoder_for
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.ui.encoder import UiEncoder
from stream_gw.dialects.ui.replay import Before
from tests.dialects.fold import fold
from tests.dialects.strategies import STREAM, Stream, streams
from tests.dialects.ui.official import Official

pytestmark = pytest.mark.platform
each_version = pytest.mark.parametrize("version", [6, 7])
EXAMPLES = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def official() -> Iterator[Official]:
    made = Official()
    yield made
    made.close()


def sse(facts: StreamFacts, lines: list[bytes]) -> bytes:
    return b": hb\n" + encoder_for("vercel.ui", facts).sse(lines, 1, 1)


def by_block(stream: Stream) -> list[bytes]:
    """The same frames without interleaving: OpenAI's dialect joins texts of one kind as they come."""
    return [encode(frame) for frame in sorted(stream.frames, key=lambda frame: getattr(frame, "block", _place(frame)))]


def _place(frame: Frame) -> float:
    return float("inf") if isinstance(frame, End) else 1e9 if isinstance(frame, ChoiceEnd) else -1


def said(message: dict[str, Any]) -> dict[str, Any]:
    parts = message["parts"]
    return {
        "content": "".join(part["text"] for part in parts if part["type"] == "text"),
        "reasoning": "".join(part["text"] for part in parts if part["type"] == "reasoning"),
        "calls": [
            (part["type"].removeprefix("tool-"), part["input"]) for part in parts if part["type"].startswith("tool-")
        ],
    }


@each_version
@EXAMPLES
@given(stream=streams("chat", "completed", single=True))
def test_the_message_says_what_the_chat_says(official: Official, version: int, stream: Stream) -> None:
    told = official.ask(version, sse(stream.facts, stream.lines))
    [message] = told["messages"]
    assert told["status"] == "ready" and "error" not in told
    chat = fold(encoder_for("openai.chat", stream.facts).chunks(by_block(stream)))["choices"][0]
    refused = any(isinstance(frame, Open) and frame.kind == "refusal" for frame in stream.frames)
    if not refused:
        assert said(message)["content"] == chat["delta"]["content"]
    else:
        assert len(said(message)["content"]) == len(chat["delta"]["content"]) + len(chat["delta"].get("refusal", ""))
    assert said(message)["reasoning"] == chat["delta"].get("reasoning", "")
    calls = chat["delta"].get("tool_calls", [])
    assert said(message)["calls"] == [
        (call["function"].get("name", ""), msgspec.json.decode(call["function"]["arguments"])) for call in calls
    ]
    assert told["calls"] == [part["toolCallId"] for part in message["parts"] if part["type"].startswith("tool-")] or (
        sorted(told["calls"])
        == sorted(part["toolCallId"] for part in message["parts"] if part["type"].startswith("tool-"))
    ), "each call is run once"
    reason = chat["finish_reason"].replace("_", "-")
    assert told["finishReason"] == ("content-filter" if refused and reason == "stop" else reason)
    assert all(part.get("state", "done") in ("done", "input-available") for part in message["parts"])
    assert message["id"] == derived_id("msg_", STREAM) and message["metadata"]["streamId"] == STREAM
    usage = message["metadata"]["usage"]
    assert usage["totalTokens"] == usage["inputTokens"] + usage["outputTokens"]


@each_version
@settings(max_examples=15, deadline=None)
@given(stream=streams("chat", "completed", single=True))
def test_a_resume_at_any_event_gives_the_same_message(official: Official, version: int, stream: Stream) -> None:
    body = sse(stream.facts, stream.lines)
    whole = official.ask(version, body)["messages"]
    assert official.ask(version, body, how="resumed") == [["ready", whole]]


@each_version
@EXAMPLES
@given(stream=streams("chat", single=True))
def test_every_stream_is_valid_to_the_end(official: Official, version: int, stream: Stream) -> None:
    told = official.ask(version, sse(stream.facts, stream.lines))
    [message] = told["messages"]
    end = stream.frames[-1]
    assert isinstance(end, End)
    finished = any(isinstance(frame, ChoiceEnd) for frame in stream.frames)
    if end.status == "failed":
        assert told["status"] == "error" and told["error"] == "the engine broke"
    elif end.status == "incomplete" and not finished:
        assert told["status"] == "error" and told["error"] == "the stream ended before it was complete"
    else:
        assert told["status"] == "ready"
    assert all(part.get("state") != "streaming" for part in message["parts"])
    if end.status != "completed" and not finished:
        assert not [part for part in message["parts"] if part.get("state") == "output-error"]


def answer(*frames: Frame, message_id: str = "") -> tuple[StreamFacts, list[bytes]]:
    facts = StreamFacts(STREAM, 1763712000, "sim-small", dialect="vercel.ui", encoder=3, message_id=message_id)
    return facts, [encode(frame) for frame in frames]


@each_version
def test_a_call_that_was_cut_is_an_error_and_is_not_run(official: Official, version: int) -> None:
    frames = [Open(0, 0, "tool", id="c1", name="weather"), Delta(0, '{"city":"Os'), ChoiceEnd(0, "length")]
    told = official.ask(version, sse(*answer(*frames, End("completed", Usage()))))
    [call] = [part for part in told["messages"][0]["parts"] if part["type"] == "tool-weather"]
    assert call["state"] == "output-error" and told["calls"] == []
    assert call.get("rawInput", call.get("input")) == '{"city":"Os', "the versions keep it in different fields"


@each_version
def test_a_custom_tool_has_its_text_and_an_empty_input_is_an_object(official: Official, version: int) -> None:
    frames = [
        Open(0, 0, "tool", "custom", "c1", "shell"), Delta(0, 'echo "a\\b"\n'), Close(0),
        Open(1, 0, "tool", id="c1", name="now"), Close(1), ChoiceEnd(0, "tool_calls"),
    ]  # fmt: skip
    told = official.ask(version, sse(*answer(*frames, End("completed", Usage()))))
    calls = [part for part in told["messages"][0]["parts"] if part["type"].startswith("tool-")]
    assert [call["input"] for call in calls] == ['echo "a\\b"\n', {}]
    assert calls[0]["toolCallId"] == "c1" != calls[1]["toolCallId"], "an engine may repeat its ids"


@each_version
def test_a_signature_is_kept_with_the_reasoning(official: Official, version: int) -> None:
    frames = [Open(0, 0, "reasoning"), Delta(0, "so"), Close(0, "c2ln"), ChoiceEnd(0, "stop")]
    told = official.ask(version, sse(*answer(*frames, End("completed", Usage()))))
    [part] = [part for part in told["messages"][0]["parts"] if part["type"] == "reasoning"]
    assert part["providerMetadata"] == {"streamGw": {"signature": "c2ln"}}


@each_version
def test_an_error_and_a_failed_engine_are_told(official: Official, version: int) -> None:
    frames = [Open(0, 0, "text"), Delta(0, "half"), End("failed", error=ErrorInfo("engine_error", "it broke"))]
    told = official.ask(version, sse(*answer(*frames)), how="read")
    assert told["errors"] == ["Error: it broke"] and said(told["message"])["content"] == "half"


CALLED: dict[str, Any] = {
    "id": "a1", "role": "assistant", "metadata": {"kept": 1},
    "parts": [
        {"type": "step-start"},
        {"type": "reasoning", "id": "before-1", "text": "thinking", "state": "done"},
        {"type": "text", "text": "Let me look.", "state": "done"},
        {"type": "tool-weather", "toolCallId": "c0", "state": "output-available", "input": {"a": [1]}, "output": {}},
        {"type": "dynamic-tool", "toolName": "d", "toolCallId": "c1", "state": "output-error", "input": 1,
         "errorText": "no"},
        {"type": "data-note", "id": "n", "data": {"x": 1}},
    ],
}  # fmt: skip


@each_version
def test_a_message_that_goes_on_is_rebuilt_from_its_beginning(official: Official, version: int) -> None:
    """After a tool's result the stream holds the next step alone, and a resume empties the message first."""
    facts, lines = answer(
        Open(0, 0, "text"), Delta(0, "It is "), Delta(0, "sunny."), Close(0), ChoiceEnd(0, "stop"),
        End("completed", Usage()), message_id="a1",
    )  # fmt: skip
    body = sse(facts, lines)
    whole = official.ask(version, body, before=[CALLED])
    [message] = whole["messages"]
    assert [part["type"] for part in message["parts"]][-3:] == ["data-note", "step-start", "text"]
    again = encoder_for("vercel.ui", facts)
    assert isinstance(again, UiEncoder)
    again.replay(Before.of(msgspec.json.encode(CALLED)))
    replay = again.sse(lines, 1, 1).decode()
    found = official.ask(version, body, replay=replay, before=[CALLED], how="resumed")
    assert found == [["ready", [message]]]
    rebuilt = official.ask(version, replay.encode())
    assert rebuilt["messages"] == [message] and rebuilt["calls"] == [], "no tool runs twice"
