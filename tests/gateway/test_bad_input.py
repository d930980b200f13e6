"""Bad input, by mistake or malice: each gets a clear error and costs no other client anything."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stream_fabric.limits import (
    BODY_BYTES_MAX,
    CHOICES_MAX,
    HEAD_S_MAX,
    HEADER_BYTES_MAX,
    JSON_DEPTH_MAX,
    LINGER_IDLE_S_MAX,
    LINGER_S_MAX,
    TOKEN_BODY_BYTES_MAX,
    UNREAD_BYTES_MAX,
    URL_BYTES_MAX,
)
from tests.gateway.processes import Running
from tests.gateway.wire import (
    DONE,
    MODEL,
    Exchange,
    Gate,
    Reply,
    chat,
    events,
    refusal,
)
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"


@pytest.fixture
async def gate(one: Gate) -> AsyncIterator[Gate]:
    """A gateway with a well-behaved stream on it, which must end whole and with its bytes; nothing else may stay."""
    await one.until_open_streams(0)
    async with one.create(chat(40, seed=11)) as exchange:
        stream = exchange.headers["x-stream-id"]
        whole = asyncio.create_task(exchange.rest())
        yield one
        body = await whole
    assert events(body)[-1].data == DONE
    assert (await one.ask("GET", f"/v1/streams/{stream}")).body == body
    await one.until_open_streams(0)


# --- bodies --------------------------------------------------------------------------------------------------


def deep(levels: int) -> bytes:
    return b'{"model":"%b","messages":%b%b}' % (MODEL.encode(), b"[" * (levels - 1), b"]" * (levels - 1))


def without(name: str) -> dict[str, Any]:
    body = chat(1)
    del body[name]
    return body


BODIES: list[tuple[str, Any, int, str]] = [
    ("no body", b"", 400, "invalid_request"),
    ("half an object", b'{"model":', 400, "invalid_request"),
    ("two objects", b"{}{}", 400, "invalid_request"),
    ("a list", b"[]", 400, "invalid_request"),
    ("null", b"null", 400, "invalid_request"),
    ("a number", b"1e999", 400, "invalid_request"),
    ("not json", b"model=sim-small", 400, "invalid_request"),
    ("bad utf-8", b'{"model":"\xff\xfe","messages":[]}', 400, "invalid_request"),
    (
        "bad utf-8 in a field that nobody reads",
        json.dumps(chat(1)).encode()[:-1] + b',"x":"\xff"}',
        400,
        "invalid_request",
    ),
    ("a lone surrogate", json.dumps(chat(1) | {"model": "\ud800"}).encode(), 400, "invalid_request"),
    ("utf-16", json.dumps(chat(1)).encode("utf-16"), 400, "invalid_request"),
    ("no model", without("model"), 400, "invalid_request"),
    ("no messages", without("messages"), 400, "invalid_request"),
    ("empty messages", chat(1, messages=[]), 400, "invalid_request"),
    ("messages of a wrong type", chat(1, messages="hello"), 400, "invalid_request"),
    ("a model of a wrong type", chat(1, model=7), 400, "invalid_request"),
    ("stream of a wrong type", chat(1, stream="yes"), 400, "invalid_request"),
    ("tokens of a wrong type", chat(1, max_tokens="many"), 400, "invalid_request"),
    ("no tokens", chat(1, max_tokens=0), 400, "invalid_request"),
    ("tokens without end", chat(1, max_tokens=10**30), 400, "invalid_request"),
    ("too many choices", chat(1, n=CHOICES_MAX + 1), 400, "invalid_request"),
    ("no choices", chat(1, n=0), 400, "invalid_request"),
    ("a temperature out of range", chat(1, temperature=9), 400, "invalid_request"),
    ("a user of a wrong type", chat(1, user={"id": 1}), 400, "invalid_request"),
    ("a user too long", chat(1, user="u" * 129), 400, "invalid_request"),
    ("on_disconnect in other words", chat(1, on_disconnect="never"), 400, "invalid_request"),
    ("on_disconnect without end", chat(1, on_disconnect="cancel_after=inf"), 400, "invalid_request"),
    ("on_disconnect not a number", chat(1, on_disconnect="cancel_after=nan"), 400, "invalid_request"),
    ("on_disconnect before", chat(1, on_disconnect="cancel_after=-1"), 400, "invalid_request"),
    ("a model that is not served", chat(1, model="no-such-model"), 404, "model_not_found"),
    ("a level too deep", deep(JSON_DEPTH_MAX + 1), 400, "json_too_deep"),
    ("very deep", deep(100_000), 400, "json_too_deep"),
    ("very deep and never closed", b'{"model":' + b"[" * 100_000, 400, "json_too_deep"),
]


@pytest.mark.parametrize(("body", "status", "code"), [case[1:] for case in BODIES], ids=[case[0] for case in BODIES])
async def test_a_body_that_cannot_be_served(gate: Gate, body: Any, status: int, code: str) -> None:
    refusal(await gate.ask("POST", CHAT, body), status, code)


async def test_the_deepest_body_that_is_taken(gate: Gate) -> None:
    error = refusal(await gate.ask("POST", CHAT, deep(JSON_DEPTH_MAX)), 400, "invalid_request")
    assert error["param"] == "messages", "it was read as far as its content"


async def test_the_wrong_field_is_named(gate: Gate) -> None:
    for body, name in (
        (without("model"), "model"),
        (chat(1, n="two"), "n"),
        (chat(1, temperature="hot"), "temperature"),
    ):
        error = refusal(await gate.ask("POST", CHAT, body), 400, "invalid_request")
        assert error["param"] == name
        assert name in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": MODEL}),
        ("/v1/completions", {"model": MODEL, "prompt": {"text": "x"}}),
        ("/v1/tokens", {"scopes": ["everything"]}),
        ("/v1/tokens", {"expires_in_s": 0}),
        ("/v1/tokens", {"lifetime": 5}),
        ("/v1/tokens", b"["),
        ("/v1/tokens", b"[" * 10_000),
    ],
)
async def test_other_bodies_that_cannot_be_served(gate: Gate, path: str, body: Any) -> None:
    reply = await gate.ask("POST", path, body)
    assert reply.status == 400
    refusal(reply, 400, reply.json["error"]["code"])


@pytest.mark.parametrize(
    ("body", "code"),
    [
        *(
            (body, "invalid_request")
            for body in ({"id": "i"}, {"item": "x"}, {"id": 5, "item": "x"}, {"id": "", "item": "x"})
        ),
        ({"id": "i", "item": []}, "invalid_request"),
        *(
            ({"id": "i", "item": item}, "invalid_input")
            for item in (
                "", {}, {"role": "assistant", "content": "x"}, {"role": "user"}, {"role": "user", "content": []},
                {"role": "user", "content": [{"type": "text"}]}, {"type": "function_call_output", "output": "x"},
            )
        ),
    ],
)  # fmt: skip
async def test_an_input_that_is_none(gate: Gate, body: Any, code: str) -> None:
    stream = await gate.background(2000)
    refusal(await gate.ask("POST", f"/v1/streams/{stream}/input", body), 400, code)
    await gate.cancel(stream)


@pytest.mark.parametrize("path", [CHAT, "/v1/tokens"])
async def test_a_compressed_body_is_refused_as_such(gate: Gate, path: str) -> None:
    reply = await gate.ask("POST", path, gzip.compress(json.dumps(chat(1)).encode()), {"content-encoding": "GZIP"})
    assert "compressed with gzip" in refusal(reply, 400, "unsupported")["message"]
    plain = {**chat(1), "stream": False}
    assert (await gate.ask("POST", CHAT, plain, {"content-encoding": "identity"})).status == 200


async def test_a_body_too_large_is_refused_by_its_length_alone(gate: Gate) -> None:
    async with gate.connection() as exchange:
        await exchange.send(gate.request("POST", CHAT, b"{", {"content-length": str(BODY_BYTES_MAX + 1)}))
        reply = await exchange.answer()
        refusal(reply, 413, "body_too_large")
        assert str(BODY_BYTES_MAX) in reply.json["error"]["message"]
        assert await exchange.closed() == b""


async def test_a_body_too_large_is_refused_when_it_has_grown_so(gate: Gate) -> None:
    async with gate.connection() as exchange:
        await exchange.send(gate.request("POST", CHAT, None, {"content-length": "", "transfer-encoding": "chunked"}))
        answer = asyncio.create_task(exchange.answer())
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        sent = 0
        with suppress(ConnectionError):
            while not answer.done() and sent < 4 * BODY_BYTES_MAX:
                await exchange.send(piece)
                await asyncio.sleep(0)  # to send does not wait while the kernel takes it, and the answer is read here
                sent += 0x10000
        refusal(await answer, 413, "body_too_large")
        assert sent < 4 * BODY_BYTES_MAX, "it is not read to its end"


async def test_a_request_for_a_token_has_a_small_body(gate: Gate) -> None:
    """Its body is decoded and signed on the event loop: one of 8 MiB took 3.5 s."""
    large = {"models": ["m" * 1000] * 20}
    error = refusal(await gate.ask("POST", "/v1/tokens", large), 413, "body_too_large")
    assert str(TOKEN_BODY_BYTES_MAX) in error["message"]
    for many in ({"scopes": ["read"] * 1000}, {"models": [""] * 4000}):
        refusal(await gate.ask("POST", "/v1/tokens", many), 400, "invalid_request")
    token = (await gate.ask("POST", "/v1/tokens", {})).json["token"]
    holder = Gate(gate.url, gate.pid, token)
    refusal(await holder.ask("POST", "/v1/tokens", large), 403, "forbidden")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_sender_of_20_mib_reads_why_it_was_refused(gate: Gate, chunked: bool) -> None:
    """It sends all before it reads, as most clients do, and slowly: a reset on the way would fail ``send``."""
    piece, count = b" " * (128 << 10), 160
    length = {"content-length": "", "transfer-encoding": "chunked"} if chunked else {"content-length": str(20 << 20)}
    async with gate.connection() as exchange:
        await exchange.send(gate.request("POST", CHAT, None, length))
        for _ in range(count):
            await exchange.send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await asyncio.sleep(0.015)
        reply = await exchange.answer()
        refusal(reply, 413, "body_too_large")
        assert reply.headers["connection"] == "close"
        assert await exchange.closed() == b""


async def test_any_last_answer_is_read_by_who_is_still_sending(gate: Gate) -> None:
    """One refused for another reason, whose connection ends with its answer."""
    headers = {"authorization": "Bearer sk-wrong", "connection": "close", "content-length": str(4 << 20)}
    async with gate.connection() as exchange:
        await exchange.send(gate.request("POST", CHAT, None, headers))
        for _ in range(64):
            await exchange.send(b" " * 0x10000)
            await asyncio.sleep(0.005)
        refusal(await exchange.answer(), 401, "invalid_api_key")
        assert await exchange.closed() == b""


def held(gate: Gate, exchange: Exchange) -> bool:
    """Whether the gateway's process still has its end of the connection (of an orphan the inode is 0)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = (gate.port, exchange.local_port)
    return any(tuple(int(row[at].split(":")[1], 16) for at in (1, 2)) == ends and row[9] != "0" for row in rows)


async def test_a_refused_sender_is_not_heard_for_ever(two: Gate) -> None:
    await two.until_open_streams(0)
    head = two.request("POST", CHAT, b"{", {"content-length": str(BODY_BYTES_MAX + 1)})
    async with two.connection() as exchange:
        asked = time.monotonic()
        await exchange.send(head)
        refusal(await exchange.answer(), 413, "body_too_large")
        # This process may have stood still meanwhile
        assert held(two, exchange) or time.monotonic() - asked > LINGER_IDLE_S_MAX, "it may go on sending"
        # Neither sends nor closes
        await eventually(lambda: not held(two, exchange), "the connection to be let go", LINGER_S_MAX - 5)
    async with two.connection() as exchange:
        await exchange.send(head)
        sent, paused_s, at = 0, 0.0, time.monotonic()
        with pytest.raises(ConnectionError):
            while sent < 2 * UNREAD_BYTES_MAX:
                await exchange.send(b" " * 0x10000)
                sent += 0x10000
                paused_s, at = max(paused_s, time.monotonic() - at), time.monotonic()
        assert sent > UNREAD_BYTES_MAX or max(paused_s, time.monotonic() - at) > LINGER_IDLE_S_MAX


async def test_a_large_body_is_read(gate: Gate) -> None:
    body = json.dumps(chat(2, model="no-such-model", metadata="x" * (BODY_BYTES_MAX - 1000))).encode()
    refusal(await gate.ask("POST", CHAT, body), 404, "model_not_found")


# --- requests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", CHAT),
        ("PUT", CHAT),
        ("DELETE", "/v1/models"),
        ("POST", "/v1/models"),
        ("POST", "/v1/streams/resp_1"),
        ("GET", "/v1/streams/resp_1/cancel"),
        ("PATCH", "/v1/streams"),
        ("OPTIONS", CHAT),
        ("POST", "/healthz"),
    ],
)
async def test_a_wrong_method(gate: Gate, method: str, path: str) -> None:
    refusal(await gate.ask(method, path), 405, "method_not_allowed")


@pytest.mark.parametrize(
    "path",
    [
        "/v2",
        "/v1",
        "/v1/",
        "/v1/chat",
        "/v1/streams/a/b",
        "/v1/streams//info",
        "/%00",
        "/..%2f..%2fetc/passwd",
        "//",
        "/a%0Ab",
    ],
)
async def test_an_unknown_path(gate: Gate, path: str) -> None:
    for method in ("GET", "POST"):
        refusal(await gate.ask(method, path), 404, "not_found")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/api/v1/embeddings", "/v1/embeddings"),
        ("/models/sim-small", "/v1/models/sim-small"),
        ("/responses", "/v1/responses"),
        ("/conversations", "/v1/conversations"),
        ("/messages", "/v1/messages"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
    ],
)
async def test_a_base_url_without_v1_is_answered_with_the_right_one(one: Gate, path: str, meant: str) -> None:
    error = refusal(await one.ask("POST", path, chat(1)), 404, "not_found")
    assert f"did you mean {meant}?" in error["message"] and "base URL" in error["message"]
    assert ("one /v1 too many" in error["message"]) == path.startswith("/v1/v1/")


async def test_a_model_needs_an_id(one: Gate) -> None:
    refusal(await one.ask("GET", "/v1/models/"), 404, "not_found")


@pytest.mark.parametrize("path", ["/static/nothing.js", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/"])
async def test_a_file_that_is_not_there(gate: Gate, path: str) -> None:
    refusal(await gate.ask("GET", path), 404, "not_found")


@pytest.mark.parametrize("path", ["/", "/watch", "/ops", "/static/client.js"])
@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT"])
async def test_a_page_takes_get_and_head_alone(gate: Gate, method: str, path: str) -> None:
    reply = await gate.ask(method, path)
    refusal(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "GET, HEAD"


async def test_a_wrong_method_is_answered_with_those_that_are_allowed(gate: Gate) -> None:
    for path, allowed in ((CHAT, "POST"), ("/v1/cookie", "POST, DELETE"), ("/v1/models", "GET, HEAD")):
        assert (await gate.ask("PATCH", path)).headers["allow"] == allowed


async def test_a_method_that_files_do_not_have(gate: Gate) -> None:
    refusal(await gate.ask("POST", "/static/index.html"), 405, "method_not_allowed")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer sk-wrong"},
        {"authorization": "Basic c2stZGV2"},
        {"authorization": "sk-dev"},
        {"authorization": "Bearer cap_e30.e30"},
        {"authorization": "Bearer cap_\xff.\xff"},
        {"authorization": "Bearer " + "x" * 20_000},
        {"authorization": "", "x-api-key": "sk-wrong"},
    ],
    ids=lambda headers: str(headers)[:60],
)
async def test_a_wrong_key(gate: Gate, headers: dict[str, str]) -> None:
    unknown = "resp_" + "0" * 32
    for method, path, body in (
        ("POST", CHAT, chat(1)),
        ("GET", "/v1/models", None),
        ("GET", f"/v1/streams/{unknown}", None),
        ("GET", f"/v1/streams/{unknown}/info", None),
        ("POST", f"/v1/streams/{unknown}/cancel", None),
        ("GET", "/v1/streams?user=u", None),
        ("POST", "/v1/tokens", {}),
    ):
        reply = await gate.ask(method, path, body, headers)
        refusal(reply, 401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.headers["x-should-retry"] == "false", "Claude Code sends a 401 ten times more, for three minutes"
        assert "sk-wrong" not in reply.body.decode()


@pytest.mark.parametrize(
    "query", ["&".join(f"a{k}=1" for k in range(60)), "after=1-0;mode=x&mode=magic", "user=%ff%fe", "after=%00"]
)
async def test_a_wrong_query(gate: Gate, query: str) -> None:
    stream, _ = await gate.finished(1)
    reply = await gate.ask("GET", f"/v1/streams/{stream}?{query}")
    if query.startswith("user"):
        assert reply.status == 200, "what a call does not know it ignores"
    else:
        refusal(reply, 400, reply.json["error"]["code"])


async def raw(gate: Gate, data: bytes) -> tuple[Reply, Exchange]:
    async with gate.connection() as exchange:
        await exchange.send(data)
        return await exchange.answer(), exchange


async def test_headers_too_large(gate: Gate) -> None:
    for headers in ({"x-large": "x" * HEADER_BYTES_MAX}, {f"x-{k}": "y" * 100 for k in range(HEADER_BYTES_MAX // 100)}):
        reply, _ = await raw(gate, gate.request("GET", "/v1/models", None, headers))
        refusal(reply, 431, "headers_too_large")
        assert reply.headers["connection"] == "close"
    assert (await gate.ask("GET", "/v1/models", headers={"x-large": "x" * (HEADER_BYTES_MAX // 2)})).status == 200


async def test_headers_that_never_end(gate: Gate) -> None:
    for start in (b"GET /v1/models HTTP/1.1\r\nx-large: ", b"GET /v1/models HTTP/1.1\r\nx-"):
        async with gate.connection() as exchange:
            await exchange.send(start)
            answer = asyncio.create_task(exchange.answer())
            with suppress(ConnectionError):
                for _ in range(64):
                    if answer.done():
                        break
                    await exchange.send(b"x" * 4096)
                    await asyncio.sleep(0)
            refusal(await answer, 431, "headers_too_large")


async def test_a_url_too_long(gate: Gate) -> None:
    reply, _ = await raw(gate, gate.request("GET", "/v1/streams?user=" + "u" * URL_BYTES_MAX))
    refusal(reply, 431, "headers_too_large")
    reply, _ = await raw(gate, b"GET /" + b"u" * URL_BYTES_MAX)  # and never ends
    refusal(reply, 431, "headers_too_large")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"HELLO\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: a\r\nbad name : x\r\n\r\n",
        b"POST /v1/tokens HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}{}{}",
        b"POST /v1/tokens HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/tokens HTTP/1.1\r\nhost: a\r\ncontent-length: five\r\n\r\n",
        b"POST /v1/tokens HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=lambda data: repr(data)[:50],
)
async def test_what_is_not_http(gate: Gate, data: bytes) -> None:
    async with gate.connection() as exchange:
        await exchange.send(data)
        refusal(await exchange.answer(), 400, "invalid_request")
        assert await exchange.closed() == b""


async def test_chunks_that_are_none(gate: Gate) -> None:
    async with gate.connection() as exchange:
        head = gate.request("POST", CHAT, None, {"content-length": "", "transfer-encoding": "chunked"})
        await exchange.send(head + b"zz\r\n")
        refusal(await exchange.answer(), 400, "invalid_request")


async def test_a_large_bad_chunk_behind_a_refusal_is_answered_once(platform: Running, one: Gate) -> None:
    headers = {"content-length": "", "transfer-encoding": "chunked", "authorization": ""}
    async with one.connection() as exchange:
        await exchange.send(one.request("POST", CHAT, None, headers))
        refusal(await exchange.answer(), 401, "invalid_api_key")
        await exchange.send(b"zz\r\n" + b"x" * (2 * HEADER_BYTES_MAX))
        refusal(await exchange.answer(), 400, "invalid_request")
        assert await exchange.closed() == b""
    assert "write_eof" not in platform.process.log


async def test_a_content_length_that_is_too_small(gate: Gate) -> None:
    body = json.dumps(chat(1)).encode()
    async with gate.connection() as exchange:
        await exchange.send(gate.request("POST", CHAT, body, {"content-length": "10"}))
        refusal(await exchange.answer(), 400, "invalid_request")


async def test_a_content_length_that_is_too_large_then_a_close(gate: Gate) -> None:
    body = json.dumps(chat(1)).encode()
    async with gate.connection() as exchange:
        await exchange.send(gate.request("POST", CHAT, body, {"content-length": str(len(body) + 10)}))
        await exchange.silence(0.2)
        exchange.half_close()
        assert await exchange.closed() == b""


async def test_half_a_request_then_a_close(gate: Gate) -> None:
    whole = gate.request("POST", CHAT, chat(1000))
    for part in (1, 10, len(whole) // 2, len(whole) - 1):
        async with gate.connection() as exchange:
            await exchange.send(whole[:part])
    await gate.until_open_streams(1, 5)  # the well-behaved one


async def test_a_request_byte_by_byte(gate: Gate) -> None:
    async with gate.connection() as exchange:
        for byte in gate.request("POST", CHAT, chat(3)):
            await exchange.send(bytes([byte]))
            await asyncio.sleep(0)
        await exchange.head()
        assert exchange.status == 200
        assert events(await exchange.rest())[-1].data == DONE


# --- HEAD, pipelines, keep-alive -----------------------------------------------------------------------------


async def test_head_has_no_body(gate: Gate) -> None:
    stream, _ = await gate.finished(3)
    live = await gate.background(2000)
    async with gate.connection() as exchange:
        for path, status in (
            ("/healthz", 200),
            ("/v1/models", 200),
            (f"/v1/streams/{stream}", 200),
            (f"/v1/streams/{live}", 200),
            (f"/v1/streams/{stream}/info", 200),
            ("/v1/nothing", 404),
        ):
            await exchange.send(gate.request("HEAD", path))
            await exchange.head()  # fails where a body of the answer before were in the way
            assert exchange.status == status, path
    await gate.cancel(live)


async def test_pipelined_requests_are_answered_in_order(gate: Gate) -> None:
    async with gate.connection() as exchange:
        await exchange.send(
            gate.request("POST", CHAT, chat(10))
            + gate.request("GET", "/v1/nothing")
            + gate.request("POST", CHAT, chat(2) | {"stream": False})
            + gate.request("GET", "/healthz")
        )
        await exchange.head()
        assert exchange.headers["content-type"].startswith("text/event-stream")
        assert events(await exchange.rest())[-1].data == DONE
        refusal(await exchange.answer(), 404, "not_found")
        assert (await exchange.answer()).json["object"] == "chat.completion"
        assert (await exchange.answer()).body == b"ok\n"


async def test_a_connection_serves_one_stream_after_another(gate: Gate) -> None:
    async with gate.connection() as exchange:
        for seed in range(3):
            await exchange.send(gate.request("POST", CHAT, chat(5, seed=seed)))
            await exchange.head()
            assert events(await exchange.rest())[-1].data == DONE


async def test_a_pipelining_reader_that_leaves_is_noticed(gate: Gate) -> None:
    async with gate.connection() as exchange:
        await exchange.send(gate.request("POST", CHAT, chat(6000, on_disconnect="cancel_after=0")))
        await exchange.head()
        stream = exchange.headers["x-stream-id"]
        await exchange.send(gate.request("GET", "/healthz") * 3)
        await exchange.events(2)
    await gate.until_status(stream, "cancelled")


async def test_garbage_behind_an_open_stream_ends_that_connection_alone(gate: Gate) -> None:
    async with gate.connection() as exchange:
        await exchange.send(gate.request("POST", CHAT, chat(6000, on_disconnect="cancel_after=0")))
        await exchange.head()
        stream = exchange.headers["x-stream-id"]
        await exchange.events(2)
        await exchange.send(b"\x00\x01garbage\r\n\r\n")
        await exchange.closed()
    await gate.until_status(stream, "cancelled")


async def test_http_1_0_gets_its_answer_and_a_close(gate: Gate) -> None:
    async with gate.connection() as exchange:
        await exchange.send(b"GET /healthz HTTP/1.0\r\n\r\n")
        await exchange.head()
        assert exchange.status == 200
        assert (await exchange.closed()).endswith(b"ok\n")


async def test_http_1_0_gets_events_without_chunks(gate: Gate) -> None:
    """A client of HTTP/1.0, such as ApacheBench, would take the chunks' sizes for text."""
    request = gate.request("POST", CHAT, chat(20)).replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)
    async with gate.connection() as exchange:
        await exchange.send(request)
        await exchange.head()
        assert exchange.status == 200
        assert exchange.headers["connection"] == "close"
        assert "transfer-encoding" not in exchange.headers
        told = await exchange.closed()
    again = await gate.ask("GET", f"/v1/streams/{exchange.headers['x-stream-id']}")
    assert told == again.body


async def test_many_bad_requests_at_once_leave_nothing(gate: Gate, platform: Running) -> None:
    async def one_of_them(k: int) -> int:
        _, body, status, _ = BODIES[k % len(BODIES)]
        reply = await gate.ask("POST", CHAT, body)
        assert reply.status == status
        return reply.status

    before = gate.resident_bytes()
    await asyncio.gather(*(one_of_them(k) for k in range(200)))
    assert gate.resident_bytes() - before < 64 << 20
    assert (await gate.ask("GET", "/readyz")).status == 200


@pytest.mark.chaos
async def test_a_head_that_never_ends_is_cut(one: Gate) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(one.url.rpartition(":")[2]))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(HEAD_S_MAX + 10):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
    assert asyncio.get_running_loop().time() - began > HEAD_S_MAX - 1
    writer.close()
