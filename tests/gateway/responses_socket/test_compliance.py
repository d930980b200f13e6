"""Checks of the Open Responses specification's compliance tests, on ``/v1/open``, with requests of our own.

The names are those of the official runner's 17 tests, so that a difference is found by its name.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import pytest

from tests.dialects.responses.fold import TERMINAL, events, fold
from tests.dialects.responses.specification import check_event, check_item, check_response
from tests.gateway.responses_socket.wire import OPEN, ResponsesWire, code_of, opened
from tests.gateway.wire import MODEL, Gate

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather at a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


def said(role: str, text: Any, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text, **more}


def red_square() -> str:
    """A PNG of 4 x 4 red pixels as a data URL."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"\xff\0\0" * 4 for _ in range(4))
    header = struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


async def whole(gate: Gate, **body: Any) -> dict[str, Any]:
    """A response over HTTP that completes with output, checked against the specification."""
    reply = await gate.ask("POST", OPEN, {"model": MODEL, **body})
    assert reply.status == 200, reply
    check_response(reply.json)
    assert reply.json["output"] and reply.json["status"] == "completed"
    return reply.json  # type: ignore[no-any-return]


async def turn(ws: ResponsesWire, **body: Any) -> dict[str, Any]:
    """One turn on a socket: each event fits the union; returns the last one."""
    await ws.send({"type": "response.create", "model": MODEL, "store": False, **body})
    while True:
        event = await ws.receive()
        if event["type"] != "error":
            check_event(event)
        if event["type"] in (*TERMINAL, "error"):
            return event


def completed(event: dict[str, Any]) -> dict[str, Any]:
    assert event["type"] == "response.completed", event
    return event["response"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "input_"),
    [
        ("basic-response", [said("user", "Greet me.")]),
        ("system-prompt", [said("system", "Speak like a sailor."), said("user", "Greet me.")]),
        ("multi-turn", [said("user", "I am Ada."), said("assistant", "Hello Ada."), said("user", "Who am I?")]),
        ("assistant-phase", [
            said("assistant", "I look it up.", phase="commentary"),
            said("assistant", "It is five.", phase="final_answer"),
            said("user", "Repeat the number."),
        ]),
        ("image-input", [said("user", [
            {"type": "input_text", "text": "Which colour?"},
            {"type": "input_image", "image_url": red_square()},
        ])]),
    ],
)  # fmt: skip
async def test_whole_responses(one: Gate, name: str, input_: list[dict[str, Any]]) -> None:
    await whole(one, input=input_)


def test_response_output_phase_schema() -> None:
    """The checker takes items with a phase: the test of the runner sends no request either."""
    for phase in ("commentary", "final_answer"):
        part = {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
        check_item({"id": "msg_1", "status": "completed", **said("assistant", [part], phase=phase)})


async def test_streaming_response(one: Gate) -> None:
    reply = await one.ask("POST", OPEN, {"model": MODEL, "input": [said("user", "Count to four.")], "stream": True})
    assert reply.body.endswith(b"data: [DONE]\n\n")
    data = [each for each, _ in events(reply.body.replace(b": hb\n", b""))]
    for each in data:
        check_event(json.loads(each))
    assert fold(data)["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calling(one: Gate, stream: bool) -> None:
    body = {"model": MODEL, "input": [said("user", "Weather in Rome?")], "tools": [WEATHER], "stream": stream}
    reply = await one.ask("POST", OPEN, body)
    if not stream:
        check_response(reply.json)
        assert any(item["type"] == "function_call" for item in reply.json["output"])
        return
    told = [json.loads(each) for each, _ in events(reply.body.replace(b": hb\n", b""))]
    for event in told:
        check_event(event)
    types = [event["type"] for event in told]
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= set(types)
    for name in ("added", "done"):
        items = [event["item"]["type"] for event in told if event["type"] == f"response.output_item.{name}"]
        assert "function_call" in items


async def test_function_call_roundtrip(one: Gate) -> None:
    """This and the next two are tests of another version of the runner."""
    ask = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}}
    first = await whole(one, input="How warm is Rome?", **ask)
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    given = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"celsius": 21}'}
    turns = [said("user", "How warm is Rome?"), call, given]
    second = await whole(one, input=turns, tools=[WEATHER], tool_choice="none")
    assert [item["type"] for item in second["output"]] == ["message"]


async def test_previous_response_id(one: Gate) -> None:
    first = await whole(one, input="The word is quartz.")
    second = await whole(one, input="Which word?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


async def test_file_input(one: Gate) -> None:
    """The simulator reads no PDF: what it gets is the part as a chat has it."""
    data = "data:application/pdf;base64," + base64.b64encode(b"%PDF-1.4\n%%EOF").decode()
    file = {"type": "input_file", "filename": "title.pdf", "file_data": data}
    await whole(one, input=[said("user", [{"type": "input_text", "text": "The title?"}, file])])


async def test_compact_response_and_compact_missing_model(one: Gate, fast: str) -> None:
    input_ = [said("user", "We sail on Monday."), said("assistant", "Noted: Monday.")]
    made = await one.ask("POST", f"{OPEN}/compact", {"model": fast, "prompt_cache_key": "k", "input": input_})
    assert made.status == 200 and made.json["object"] == "response.compaction" and made.json["id"]
    assert "compaction" in [item["type"] for item in made.json["output"]]
    assert isinstance(made.json["created_at"], int) and made.json["usage"]["total_tokens"] > 0
    refused = await one.ask("POST", f"{OPEN}/compact", {"input": input_})
    assert refused.status == 400 and refused.json["error"]["type"] == "invalid_request"


async def test_websocket_response_and_sequential_responses(one: Gate) -> None:
    async with opened(one, OPEN) as ws:
        completed(await turn(ws, input=[said("user", "Count to three.")]))
    async with opened(one, OPEN) as ws:
        ids = {completed(await turn(ws, input=text))["id"] for text in ("Say one.", "Say two.")}
    assert len(ids) == 2


async def test_websocket_continuation_and_recovery_on_another_socket(one: Gate) -> None:
    async with opened(one, OPEN) as ws:
        first = completed(await turn(ws, input="The word is cobalt."))
        second = completed(await turn(ws, input="Which word?", previous_response_id=first["id"]))
        assert second["previous_response_id"] == first["id"]
    async with opened(one, OPEN) as ws:
        lost = await turn(ws, input="Go on.", previous_response_id=second["id"])
        assert code_of(lost) == (404, "previous_response_not_found")
        completed(await turn(ws, input=[said("user", "Start again.")]))


async def test_websocket_previous_response_not_found(one: Gate) -> None:
    async with opened(one, OPEN) as ws:
        missing = await turn(ws, input="Go on.", previous_response_id="resp_that_never_was_1764")
        assert code_of(missing) == (404, "previous_response_not_found")


async def test_websocket_failed_continuation_evicts_cache(one: Gate) -> None:
    stray = [{"type": "function_call_output", "call_id": "call_that_never_was", "output": "Nothing called it."}]
    async with opened(one, OPEN) as ws:
        parent = completed(await turn(ws, input="The word is ember."))["id"]
        failed = await turn(ws, input=stray, previous_response_id=parent)
        assert failed["type"] == "error" and failed["status"] == 400
        stale = await turn(ws, input="Go on.", previous_response_id=parent)
        assert code_of(stale) == (404, "previous_response_not_found")


async def test_websocket_compact_new_chain(one: Gate, fast: str) -> None:
    input_ = [said("user", [{"type": "input_text", "text": "The word is slate."}]), said("user", "Compress this.")]
    window = (await one.ask("POST", f"{OPEN}/compact", {"model": fast, "input": input_})).json["output"]
    async with opened(one, OPEN) as ws:
        response = completed(await turn(ws, input=[*window, said("user", "Go on.")], tools=[]))
        assert response["previous_response_id"] is None
