"""Anthropic's Messages API beside OpenAI's: one stream in both dialects, over SSE and WebSockets, and its errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stream_fabric.limits import BODY_BYTES_MAX, HEADER_BYTES_MAX
from tests.dialects.anthropic.fold import fold
from tests.dialects.fold import named_events as events
from tests.gateway.wire import MODEL, Gate, after_heartbeat, chat, text_of_chunks

DIALECT = "anthropic.messages"
VERSION = {"anthropic-version": "2026-10-21"}


def message(tokens: int = 30, seed: int = 1, **more: Any) -> dict[str, Any]:
    """The body of a streamed message that is the same as ``chat``."""
    body = chat(tokens, seed)
    kept = {name: value for name, value in body.items() if name != "stream_options"}
    return {**kept, **more}


def text_of(found: dict[str, Any]) -> str:
    return "".join(block["text"] for block in found["content"] if block["type"] == "text")


def data_of(body: bytes) -> list[bytes]:
    return [data for data, _ in events(body.replace(b": hb\n", b""))]


async def whole_text(gate: Gate, tokens: int, seed: int) -> str:
    reply = await gate.ask("POST", "/v1/chat/completions", {**chat(tokens, seed), "stream": False})
    return reply.json["choices"][0]["message"]["content"]  # type: ignore[no-any-return]


async def test_a_chat_is_followed_as_a_message_and_back(one: Gate, two: Gate) -> None:
    made = await one.ask("POST", "/v1/chat/completions", chat(30, 11))
    told = await two.ask("GET", f"/v1/streams/{made.headers['x-stream-id']}?dialect={DIALECT}")
    found = fold(data_of(told.body))
    assert text_of(found) == await whole_text(one, 30, 11) and found["usage"]["output_tokens"] == 30
    back = await one.ask("POST", "/v1/messages", message(30, 11))
    own = await two.ask("GET", f"/v1/streams/{back.headers['x-stream-id']}")
    assert data_of(own.body) == data_of(back.body), "its own dialect needs no name, and is byte-identical"
    other = await two.ask("GET", f"/v1/streams/{back.headers['x-stream-id']}?dialect=openai.chat")
    lines = [line for line in other.body.decode().splitlines() if line.startswith("data: {")]
    assert text_of_chunks([json.loads(line[6:]) for line in lines]) == text_of(found)


async def test_a_text_completion_is_followed_in_every_dialect(one: Gate) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 12, "seed": 2}
    whole = (await one.ask("POST", "/v1/completions", body)).json["choices"][0]["text"]
    made = await one.ask("POST", "/v1/completions", {**body, "stream": True})
    path = f"/v1/streams/{made.headers['x-stream-id']}?dialect="
    assert text_of(fold(data_of((await one.ask("GET", path + DIALECT)).body))) == whole
    chunks = (await one.ask("GET", path + "openai.chat")).body.decode().splitlines()
    assert text_of_chunks([json.loads(line[6:]) for line in chunks if line.startswith("data: {")]) == whole


async def test_what_a_message_cannot_express_is_said(one: Gate) -> None:
    made = await one.ask("POST", "/v1/chat/completions", chat(4, 1, n=2))
    path = f"/v1/streams/{made.headers['x-stream-id']}?dialect={DIALECT}"
    refused = await one.ask("GET", path, headers=VERSION)
    assert refused.status == 400 and refused.json["type"] == "error"
    assert refused.json["error"]["code"] == "unsupported" and "2 choices" in refused.json["error"]["message"]
    assert (await one.ask("GET", path)).json["error"]["type"] == "invalid_request_error"
    assert (await one.ask("HEAD", path)).status == 400


async def test_over_a_websocket_from_any_cursor_and_as_a_snapshot(one: Gate, two: Gate) -> None:
    async with two.socket() as ws:
        await ws.send("create", ch=1, dialect=DIALECT, body=message(40, 12))
        await ws.until_ended(1)
        stream, seen = ws.track(1).ok[0]["stream"], ws.track(1).data
        chunks = [json.dumps(chunk).encode() for each in seen for chunk in each["f"]]
        found = fold(chunks)
        assert text_of(found) == await whole_text(one, 40, 12)
        for ch, after in enumerate((each["s"] for each in seen[:-1:7]), 2):
            await ws.send("sub", ch=ch, stream=stream, after=f"1-{after}", dialect=DIALECT)
            await ws.until_ended(ch)
            before = [json.dumps(chunk).encode() for each in seen if each["s"] <= after for chunk in each["f"]]
            rest = [json.dumps(chunk).encode() for each in ws.track(ch).data for chunk in each["f"]]
            assert before + rest == chunks
        await ws.send("sub", ch=90, stream=stream, dialect=DIALECT, mode="snapshot")
        await ws.until_ended(90)
        told = [json.dumps(chunk).encode() for each in ws.track(90).data for chunk in each["f"]]
        assert fold(told) == found and len(told) < len(chunks)


async def test_a_conversation_through_the_other_dialect_finds_its_prefix(one: Gate) -> None:
    said = [
        {"role": "user", "content": "A long question about rivers. " * 300},
        {"role": "assistant", "content": "A long answer. " * 100},
        {"role": "user", "content": "And then?"},
    ]
    system = "You know rivers. " * 100
    body = {"model": MODEL, "messages": [{"role": "system", "content": system}, *said], "max_tokens": 4}
    first = (await one.ask("POST", "/v1/chat/completions", body)).json["usage"]
    second = await one.ask(
        "POST", "/v1/messages", {"model": MODEL, "messages": said, "system": system, "max_tokens": 4}
    )
    cached = second.json["usage"]["cache_read_input_tokens"]
    assert cached > first["prompt_tokens"] * 0.9
    placed = await one.ask("GET", f"/v1/streams/{second.headers['x-stream-id']}/placement")
    (placement,) = placed.json["placements"]
    assert placement["reason"] == "prefix", "the gateway knew which replica has it"


async def test_a_prompt_alone_warms_the_cache_and_makes_no_answer(one: Gate) -> None:
    for streamed in (False, True):
        said = [{"role": "user", "content": f"A long question about lakes, {streamed}. " * 300}]
        body = {"model": MODEL, "messages": said, "max_tokens": 0, "thinking": {"type": "adaptive"}, "stream": streamed}
        warmed = await one.ask("POST", "/v1/messages", body)
        message = warmed.json if not streamed else fold([data for data, _ in events(after_heartbeat(warmed.body))])
        assert (warmed.status, message["content"], message["stop_reason"]) == (200, [], "max_tokens"), warmed
        assert message["usage"]["output_tokens"] == 1, "what the engine made, and the bill has"
        asked = await one.ask("POST", "/v1/messages", body | {"max_tokens": 4, "stream": False})
        prompt = message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
        assert asked.json["usage"]["cache_read_input_tokens"] > prompt * 0.9


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_errors_have_the_dialects_shape_before_the_body_is_read(one: Gate, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {one.key}\r\ncontent-length: {BODY_BYTES_MAX + 1}\r\n\r\n"
    async with one.connection() as exchange:
        await exchange.send(head.encode())
        await exchange.head()
        body = json.loads(await exchange.rest())
    assert exchange.status == 413 and body["error"]["type"] == "request_too_large"
    assert body["request_id"] == exchange.headers["request-id"] == exchange.headers["x-request-id"]
    nobody = await one.ask("POST", path, b"{", headers={"authorization": "Bearer sk-nobody"})
    assert nobody.status == 401 and nobody.json["error"]["type"] == "authentication_error"
    wrong = await one.ask("GET", path)
    assert wrong.status == 405 and wrong.json["type"] == "error"


async def test_a_refusal_that_the_parser_sends_has_the_dialects_shape(one: Gate) -> None:
    """431 and a malformed 400 are answered before there is a request."""
    large = "x" * HEADER_BYTES_MAX
    heads = {
        f"POST /v1/messages HTTP/1.1\r\nx-large: {large}\r\n\r\n": 431,
        f"GET /v1/models HTTP/1.1\r\nanthropic-version: 2026-10-21\r\nx-large: {large}\r\n\r\n": 431,
        f"GET /v1/messages/?q={large} HTTP/1.1\r\n\r\n": 431,
        "POST /v1/messages HTTP/1.1\r\nx y: z\r\n\r\n": 400,
    }
    for head, status in heads.items():
        async with one.connection() as exchange:
            await exchange.send(head.encode())
            reply = await exchange.answer()
        assert (reply.status, reply.json["type"]) == (status, "error"), head[:60]
        assert reply.json["error"]["type"] == "invalid_request_error"
    async with one.connection() as exchange:
        await exchange.send(f"GET /v1/models HTTP/1.1\r\nx-large: {large}\r\n\r\n".encode())
        assert "type" not in (await exchange.answer()).json
    unknown = await one.ask("POST", "/v1/messages/nothing", message(3))
    assert unknown.status == 404 and unknown.json["error"]["type"] == "not_found_error"


async def test_other_paths_keep_their_shape_unless_the_header_asks(one: Gate) -> None:
    assert "type" not in (await one.ask("GET", "/v1/nothing")).json
    assert (await one.ask("GET", "/v1/nothing", headers=VERSION)).json["error"]["type"] == "not_found_error"
    assert (await one.ask("GET", "/v1/models")).json["object"] == "list"
    found = (await one.ask("GET", "/v1/models", headers=VERSION)).json
    assert found["has_more"] is False and MODEL in [model["id"] for model in found["data"]]


async def test_a_count_of_tokens_is_not_followed(one: Gate) -> None:
    reply = await one.ask("POST", "/v1/messages/count_tokens", {"model": MODEL, "messages": message()["messages"]})
    assert set(reply.json) == {"input_tokens"}
    refused = await one.ask("GET", f"/v1/streams/{reply.headers['x-stream-id']}")
    assert refused.status == 400 and "/v1/messages/count_tokens" in refused.json["error"]["message"]
