"""Hostile connections: upgrades, trailers, pipelines, fragments, pings, peers that do not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from stream_fabric.errors import StreamGwError
from stream_fabric.limits import HEADER_BYTES_MAX, WS_MESSAGE_BYTES_MAX
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.stream.ids import TenantId
from stream_gw.auth import Principal
from stream_gw.client import GatewayError, StreamGateway
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.transport import sweeping
from stream_gw.transport.connection import CONNECTION, EdgeHttp, EdgeServer, EdgeWebSocket, make_server
from stream_gw.transport.connection.unsent import UnsentBytes
from stream_gw.transport.http import Request
from tests.gateway.processes import Running
from tests.gateway.wire import Exchange, Gate, chat, refusal
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"
CHUNKED = {"content-length": "", "transfer-encoding": "chunked"}
HANDSHAKE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    "sec-websocket-version": "13",
}
H2C = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAARAAAAAAAIAAAAA"}
MIB = 1 << 20


async def growth(gate: Gate, work: Awaitable[object], after_s: float = 0.5) -> int:
    """By how many bytes the gateway grows at most while the work is done, and a moment longer."""
    before = gate.resident_bytes()
    most = 0
    task = asyncio.ensure_future(work)
    until: float | None = None
    while until is None or asyncio.get_running_loop().time() < until:
        most = max(most, gate.resident_bytes() - before)
        await asyncio.sleep(0.01)
        if task.done() and until is None:
            until = asyncio.get_running_loop().time() + after_s
    await task
    return most


async def flood(exchange: Exchange, piece: bytes, times: int) -> None:
    """Send until all is out or the peer takes no more."""
    with suppress(ConnectionError, TimeoutError):
        for _ in range(times):
            async with asyncio.timeout(1):
                await exchange.send(piece)


# --- upgrades ------------------------------------------------------------------------------------------------


async def test_an_upgrade_behind_an_open_stream_ends_that_connection_alone(
    platform: Running, one: Gate, two: Gate
) -> None:
    """Else two protocols would write to one connection, and nobody would hear that its reader has left."""
    async with one.connection() as exchange:
        await exchange.send(one.request("POST", CHAT, chat(6000, on_disconnect="cancel_after=0")))
        await exchange.head()
        stream = exchange.headers["x-stream-id"]
        await exchange.events(2)
        await exchange.send(one.request("GET", "/v1/stream", None, HANDSHAKE))
        assert b"101 Switching" not in await exchange.closed()
    await two.until_status(stream, "cancelled")
    await one.until_open_streams(0)


@pytest.mark.parametrize("path", ["/v1/other", "/", CHAT, "/static/client.js"])
async def test_a_socket_is_refused_where_there_is_none(one: Gate, path: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with connect(f"ws://{one.host}:{one.port}{path}", proxy=None):
            pass
    assert refused.value.response.status_code == 404
    assert "the paths are /v1/stream" in json.loads(refused.value.response.body)["error"]["message"]


async def test_our_client_tells_a_wrong_address(one: Gate) -> None:
    async with StreamGateway(f"{one.url}/api", token=one.key) as gateway:
        with pytest.raises(GatewayError, match="no WebSocket at '/api/v1/stream'") as caught:
            await gateway.create(chat()).ready()
    assert caught.value.code == "address_refused"


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/v1/stream", {"cookie": "a=" + "x" * 9000}),
        ("GET", "/v1/stream?x=" + "x" * 8170, {}),
        ("GET", "/v1/stream", {f"x-{k}": "y" for k in range(200)}),
    ],
    ids=["a long header", "a long URL", "many headers"],
)
async def test_a_handshake_that_is_none_is_answered(one: Gate, method: str, path: str, headers: dict[str, str]) -> None:
    async with one.connection() as exchange:
        await exchange.send(one.request(method, path, None, HANDSHAKE | headers))
        refusal(await exchange.answer(), 400, "invalid_request")
        assert await exchange.closed() == b""


async def test_another_protocol_that_is_offered_is_not_taken(one: Gate) -> None:
    async with one.connection() as exchange:
        for seed in range(2):
            await exchange.send(one.request("POST", CHAT, chat(3, seed=seed) | {"stream": False}, H2C))
            assert (await exchange.answer()).json["object"] == "chat.completion"
            await exchange.send(one.request("GET", "/healthz", None, H2C))
            assert (await exchange.answer()).body == b"ok\n"


@pytest.mark.parametrize("connection", ["Upgrade", "Upgrade\r\nconnection: keep-alive"])
async def test_the_body_of_such_a_request_is_no_request(one: Gate, connection: str) -> None:
    hidden = one.request("GET", "/v1/models")
    headers = {"connection": connection, "upgrade": "h2c", "content-length": str(len(hidden))}
    async with one.connection() as exchange:
        await exchange.send(one.request("POST", CHAT, None, headers))
        await exchange.silence(0.1)  # so that the body comes by itself
        await exchange.send(hidden)
        refusal(await exchange.answer(), 400, "invalid_request")
        await exchange.send(one.request("GET", "/healthz"))
        assert (await exchange.answer()).body == b"ok\n", "nothing is answered in between"


async def test_many_offers_in_one_piece(one: Gate) -> None:
    async with one.connection() as exchange:
        await exchange.send(one.request("GET", "/healthz", None, H2C) * 300)
        for _ in range(300):
            assert (await exchange.answer()).body == b"ok\n"


# --- bodies that wait to be asked for -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_body_that_waits_for_100_continue_is_asked_for(one: Gate, stream: bool) -> None:
    """curl waits for it before it sends a body of more than 1 MiB, and .NET where it is switched on."""
    request = one.request("POST", CHAT, chat(3, stream=stream), {"expect": "100-continue"})
    head, _, body = request.partition(b"\r\n\r\n")
    async with one.connection() as exchange:
        await exchange.send(head + b"\r\n\r\n")
        await exchange.head()
        assert (exchange.status, exchange.headers) == (100, {})
        await exchange.send(body)
        assert (await exchange.answer()).status == 200
        await exchange.send(one.request("GET", "/healthz"))
        assert (await exchange.answer()).body == b"ok\n"


async def test_a_body_that_is_refused_is_not_asked_for(one: Gate) -> None:
    headers = {"expect": "100-continue", "authorization": "Bearer sk-wrong", "content-length": "2"}
    async with one.connection() as exchange:
        await exchange.send(one.request("POST", CHAT, None, headers))
        refusal(await exchange.answer(), 401, "invalid_api_key")


# --- trailers ------------------------------------------------------------------------------------------------


async def test_a_trailer_is_no_header(one: Gate) -> None:
    async with one.connection() as exchange:
        head = one.request("POST", "/v1/tokens", None, CHUNKED | {"authorization": ""})
        await exchange.send(head + b"2\r\n{}\r\n0\r\nauthorization: Bearer " + one.key.encode() + b"\r\n\r\n")
        refusal(await exchange.answer(), 401, "invalid_api_key")


@pytest.mark.parametrize("end", [b"0\r\nx-a: ", b"0\r\nx-", b"5;a="], ids=["trailer", "its name", "extension"])
async def test_what_never_ends_behind_a_body_costs_nothing(one: Gate, end: bytes) -> None:
    async with one.connection() as exchange:
        await exchange.send(one.request("POST", CHAT, None, CHUNKED) + b"2\r\n{}\r\n" + end)
        assert await growth(one, flood(exchange, b"a" * HEADER_BYTES_MAX, 1024)) < 8 * MIB
        with suppress(ConnectionError):
            await exchange.closed()


# --- many at once --------------------------------------------------------------------------------------------


async def test_a_flood_of_pipelined_requests_is_read_as_it_is_answered(one: Gate) -> None:
    async with one.connection() as exchange:
        reading = asyncio.create_task(exchange.closed(60))
        pipeline = flood(exchange, b"GET /healthz HTTP/1.1\r\n\r\n" * 16_000, 10)
        assert await growth(one, pipeline) < 64 * MIB
        reading.cancel()


@asynccontextmanager
async def shaken_hands(
    gate: Gate, receive_buffer: int | None = None, *, signed_in: bool = False
) -> AsyncIterator[Exchange]:
    """A WebSocket to send any bytes. Without ``signed_in`` nobody has authenticated."""
    headers = HANDSHAKE if signed_in else HANDSHAKE | {"authorization": ""}
    async with gate.connection(receive_buffer) as exchange:
        await exchange.send(gate.request("GET", "/v1/stream", None, headers))
        await exchange.head()
        assert exchange.status == 101
        yield exchange


def frame(first: int, payload: bytes = b"") -> bytes:
    """A masked frame of at most 125 bytes."""
    return bytes([first, 0x80 | len(payload), 0, 0, 0, 0]) + payload


async def test_who_sends_pings_and_reads_no_pongs_costs_nothing(one: Gate) -> None:
    async with shaken_hands(one, receive_buffer=4096) as exchange:
        pings = flood(exchange, frame(0x89, b"p" * 125) * 500, 800)  # 50 MiB
        assert await growth(one, pings) < 16 * MIB


async def test_a_ping_is_answered(one: Gate) -> None:
    async with one.socket() as socket:
        pong = await socket.connection.ping()
        receiving = asyncio.create_task(socket.connection.recv())
        async with asyncio.timeout(5):
            await pong
        receiving.cancel()


async def test_fragments_cost_their_bytes(one: Gate) -> None:
    async with shaken_hands(one, signed_in=True) as exchange:
        await exchange.bytes((await exchange.bytes(2))[1])  # hi
        await exchange.send(frame(0x01, b"{"))

        async def small() -> None:
            fragment = bytes([0, 0x80 | 126, 4, 0, 0, 0, 0, 0]) + b" " * 1024
            for _ in range(50):
                await exchange.send(fragment * 100)  # 5 MB of text
            await exchange.send(frame(0x89))  # its answer says that all has been read
            assert await exchange.bytes(2) == frame(0x8A)[:1] + b"\0"

        assert await growth(one, small(), after_s=0) < 24 * MIB


@pytest.mark.parametrize("flooding", [frame(0x89), frame(0x8A), frame(0x00, b" ")], ids=["pings", "pongs", "fragments"])
async def test_too_many_frames_that_are_no_messages_close_4429(one: Gate, flooding: bytes) -> None:
    async with shaken_hands(one) as exchange:
        await exchange.send(frame(0x01, b"{"))
        await flood(exchange, flooding * 2000, 20)
        read = (await exchange.closed()).replace(frame(0x8A)[:1] + b"\0", b"")  # pongs
        assert read[2:4] == (4429).to_bytes(2, "big") and b"messages per second" in read


async def test_frames_behind_a_close_are_not_parsed_for_ever(one: Gate) -> None:
    """A client that has sent too many messages is told so, whatever else it sends."""
    async with shaken_hands(one, signed_in=True) as exchange:
        await exchange.bytes((await exchange.bytes(2))[1])  # hi
        await flood(exchange, frame(0x81, b'{"t":"pong"}') * 1000, 100)
        assert (4429).to_bytes(2, "big") in await exchange.closed()


async def test_a_message_in_fragments_is_one(one: Gate) -> None:
    async with one.socket() as socket:
        await socket.connection.send(['{"t":"can', "", 'cel","id":"ü', '1","stream":"x"}'])
        assert (await socket.until_t("error"))["id"] == "ü1"


async def test_a_message_that_is_not_utf_8_closes_1007(one: Gate) -> None:
    async with shaken_hands(one) as exchange:
        await exchange.send(frame(0x81, b"\xff\xfe"))
        assert (await exchange.closed()).startswith(b"\x88\x1a\x03\xef")


async def test_a_message_too_large_in_fragments_closes_1009(one: Gate) -> None:
    async with one.socket(write_limit=1 << 30) as socket:
        with suppress(ConnectionClosed):
            await socket.connection.send(["x" * MIB] * (WS_MESSAGE_BYTES_MAX // MIB + 1))
        assert await socket.close_code() == 1009


# --- peers that take nothing, on a server of the test's own --------------------------------------------------

App = Callable[[Any, Any, Any], Awaitable[None]]


class Ticking(HostClock):
    """A clock on which each look takes a millisecond."""

    looks = 0

    def monotonic_us(self) -> int:
        self.looks += 1
        return self.looks * 1000


@asynccontextmanager
async def serving(app: App, clock: HostClock | None = None, **config: Any) -> AsyncIterator[EdgeServer]:
    server = make_server(app, clock or HostClock(), "127.0.0.1", 0)
    for name, value in config.items():
        setattr(server.config, name, value)
    task = asyncio.create_task(server.serve())
    sweep = asyncio.create_task(server.sweep())
    await eventually(lambda: server.started or task.done(), "the server to start")
    try:
        yield server
    finally:
        sweep.cancel()
        server.should_exit = True
        await task


def gate_of(server: EdgeServer) -> Gate:
    return Gate(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", 0, "")


async def large(scope: Any, receive: Any, send: Any) -> None:
    body = b"x" * (8 * MIB)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\ngarbage\r\n\r\n",
    ],
    ids=["kept alive", "closed", "pipelined", "then garbage"],
)
async def test_a_peer_that_takes_nothing_of_an_answer_is_cut(monkeypatch: pytest.MonkeyPatch, request_: bytes) -> None:
    monkeypatch.setattr(sweeping, "STALL_S_MAX", 0.3)
    monkeypatch.setattr("stream_gw.transport.connection.server.SWEEP_EVERY_S", 0.05)
    async with serving(large, timeout_keep_alive=0.1) as server, gate_of(server).connection(4096) as exchange:
        await exchange.send(request_)
        await eventually(lambda: server.server_state.connections, "the connection")
        await eventually(lambda: not server.server_state.connections, "the connection to be cut", 5)


class Quiet:
    """A listener that cuts nothing."""

    def connection_paused(self) -> None: ...

    def connection_resumed(self) -> None: ...

    def connection_lost(self) -> None: ...


async def test_time_in_which_a_listener_watches_does_not_count_for_the_next_answer() -> None:
    """Such as a long stream between two large answers that take their time."""
    async with serving(large) as server, gate_of(server).connection(4096) as exchange:
        await exchange.send(b"GET / HTTP/1.1\r\n\r\n")
        await eventually(lambda: server.server_state.connections, "the connection")
        (connection,) = cast(set[EdgeHttp], server.server_state.connections)
        await eventually(connection.transport.get_write_buffer_size, "an answer that waits")
        connection.sweep(100.0)
        await exchange.answer()
        connection.listener = Quiet()
        connection.sweep(105.0)
        connection.listener = None
        connection.transport.write(b"x" * (9 * MIB))
        connection.sweep(200.0)
        assert not connection.transport.is_closing()
        connection.sweep(200.0 + sweeping.STALL_S_MAX + 1)
        assert connection.transport.is_closing()


async def test_a_peer_that_takes_little_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "STALL_S_MAX", 0.5)
    monkeypatch.setattr("stream_gw.transport.connection.server.SWEEP_EVERY_S", 0.05)
    async with serving(large, timeout_keep_alive=0.1) as server, gate_of(server).connection(65536) as exchange:
        await exchange.send(b"GET / HTTP/1.1\r\n\r\n")
        await exchange.head()
        taken = 0
        while taken < 8 * MIB:
            taken += len(await exchange.bytes(256 << 10))
            await asyncio.sleep(0.1)


async def answering(scope: Any, receive: Any, send: Any) -> None:
    """Answer the tenant of the path with 8 MiB, as handlers do or, below ``/stream``, as a stream does."""
    request = Request(scope, receive, send, HostClock(), HostRandom(), BodyBytes())
    tenant, _, way = scope["path"][1:].partition("/")
    request.from_caller(Principal(TenantId(tenant), frozenset()))
    if way == "stream":
        await large(scope, receive, send)
        return
    try:
        await request.answer(200, b"x" * (8 * MIB))
    except StreamGwError as error:
        await request.refuse(error)


async def test_a_tenant_whose_clients_do_not_read_gets_no_further_large_answers() -> None:
    """80 connections that read nothing of 7 MiB took 640 MB of a gateway, and more took more."""
    unsent = UnsentBytes(40 * MIB, 10 * MIB)
    async with serving(answering, unsent=unsent) as server, AsyncExitStack() as stack:
        gate = gate_of(server)

        async def ask(path: str) -> Exchange:
            exchange = await stack.enter_async_context(gate.connection(4096))
            await exchange.send(b"GET %b HTTP/1.1\r\n\r\n" % path.encode())
            return exchange

        unread = [await ask("/a"), await ask("/a/stream")]
        await eventually(lambda: unsent.total > 12 * MIB, "two answers that wait")
        refusal(await (await ask("/a")).answer(), 429, "too_many")
        cut = await ask("/a/stream")
        assert len(await cut.closed()) < 8 * MIB
        assert (await (await ask("/b")).answer()).status == 200, "another tenant is served"
        for exchange in unread:
            assert (await exchange.answer()).status == 200, "what waits is not cut"
        await eventually(lambda: unsent.total == 0, "nothing to be counted any more")
        assert (await (await ask("/a")).answer()).status == 200
        gone = await ask("/a")
        await eventually(lambda: unsent.total > 0, "an answer that waits")
        gone.abort()
        await eventually(lambda: unsent.total == 0, "nothing to be counted for a client that has gone")


async def test_no_tenants_fill_a_gateway_together() -> None:
    unsent = UnsentBytes(20 * MIB, 10 * MIB)
    async with serving(answering, unsent=unsent) as server, AsyncExitStack() as stack:
        for tenant in (b"a", b"b", b"c"):
            exchange = await stack.enter_async_context(gate_of(server).connection(4096))
            await exchange.send(b"GET /%b HTTP/1.1\r\n\r\n" % tenant)
        await eventually(lambda: unsent.total > 20 * MIB, "three answers that wait")
        exchange = await stack.enter_async_context(gate_of(server).connection())
        await exchange.send(b"GET /d HTTP/1.1\r\n\r\n")
        refusal(await exchange.answer(), 503, "gateway_full")


async def test_an_idle_connection_is_closed_in_time_whatever_trickles_in() -> None:
    async def small(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    for head, trickle in (
        (b"GET / HTTP/1.1\r\n\r\n", b"\r\n"),
        (b"POST / HTTP/1.1\r\ncontent-length: 1000\r\n\r\n", b"x"),
    ):
        async with serving(small, timeout_keep_alive=0.5) as server, gate_of(server).connection() as exchange:
            await exchange.send(head)
            await exchange.head()
            with pytest.raises(ConnectionError):
                async with asyncio.timeout(5):
                    while True:
                        await exchange.send(trickle)
                        await asyncio.sleep(0.05)


async def test_a_request_that_began_before_the_idle_time_was_over_is_served() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await asyncio.sleep(1)
        await send({"type": "http.response.body", "body": b"ok"})

    async with serving(slow, timeout_keep_alive=0.5) as server, gate_of(server).connection() as exchange:
        # The second's head comes half before, half after the first has been answered
        await exchange.send(b"GET / HTTP/1.1\r\n\r\nGET / HT")
        assert (await exchange.answer()).body == b"ok"
        await exchange.send(b"TP/1.1\r\n\r\n")
        assert (await exchange.answer()).body == b"ok"


async def test_a_socket_whose_pong_waits_behind_what_it_has_not_taken_is_not_cut_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[EdgeWebSocket] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        connection: EdgeWebSocket = scope["state"][CONNECTION]
        opened.append(connection)
        connection.send_text(b"x" * (8 * MIB))
        while (await receive())["type"] != "websocket.disconnect":
            pass

    monkeypatch.setattr(sweeping, "STALL_S_MAX", 60)
    async with serving(app, ws_ping_interval=0.1, ws_ping_timeout=0.1) as server:
        gate = gate_of(server)
        async with shaken_hands(gate, 65536) as exchange:
            pings = []
            sent = EdgeWebSocket.send_keepalive_ping

            def count(self: EdgeWebSocket) -> None:
                pings.append(self)
                sent(self)

            monkeypatch.setattr(EdgeWebSocket, "send_keepalive_ping", count)
            await eventually(lambda: len(pings) > 5, "pings that nobody answers")
            assert not opened[0].close_sent
            exchange.abort()
            await eventually(lambda: not server.server_state.connections, "the socket to be forgotten")


# --- turns ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def most_a_turn(monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> AsyncIterator[list[int]]:
    """Calls of a method in each turn of the loop."""
    counts, called = [0], getattr(kind, method)

    def count(self: Any, *args: Any) -> Any:
        counts[-1] += 1
        return called(self, *args)

    async def turns() -> None:
        while True:
            counts.append(0)
            await asyncio.sleep(0)

    monkeypatch.setattr(kind, method, count)
    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(turns())
        yield counts
        counting.cancel()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request with its body, or the messages of a socket with their number once one is ``end``."""
    received: list[Any] = []
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] != "websocket.disconnect":
            received.append(message["text"])
            if received[-1] == "end":
                await send({"type": "websocket.send", "text": f"{len(received)} {len(set(received))}"})
        return
    more = True
    while more:
        part = await receive()
        received.append(bytes(part["body"]))
        more = part["more_body"]
    body = b"".join(received)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def test_requests_of_one_read_are_parsed_in_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are answered, and none is lost where a slice ends in its head."""
    bodies = [b"%d" % number for number in range(5000)]
    pipeline = b"".join(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body) for body in bodies)
    async with (
        most_a_turn(monkeypatch, EdgeHttp, "on_headers_complete") as counts,
        serving(echo, Ticking()) as server,
        gate_of(server).connection() as exchange,
    ):
        sending = asyncio.create_task(exchange.send(pipeline))
        answers = [await exchange.answer() for _ in bodies]
        await sending
    assert [answer.body for answer in answers] == bodies
    assert sum(counts) == 5000 and max(counts) < 250


async def test_tiny_chunks_of_one_read_are_parsed_in_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        most_a_turn(monkeypatch, EdgeHttp, "on_body") as counts,
        serving(echo, Ticking()) as server,
        gate_of(server).connection() as exchange,
    ):
        await exchange.send(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        await exchange.send(b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")
        assert (await exchange.answer()).body == b"x" * 100_000
    assert sum(counts) == 100_000 and max(counts) < 2500


@pytest.mark.parametrize("opcode", [0x81, 0x89], ids=["messages", "pings"])
async def test_frames_of_one_read_are_parsed_in_many_turns(monkeypatch: pytest.MonkeyPatch, opcode: int) -> None:
    frames = b"".join(frame(opcode, b"%d" % number) for number in range(20_000)) + frame(0x81, b"end")
    method = "handle_text" if opcode == 0x81 else "handle_ping"
    async with (
        most_a_turn(monkeypatch, EdgeWebSocket, method) as counts,
        serving(echo, Ticking()) as server,
        shaken_hands(gate_of(server)) as exchange,
    ):
        sending = asyncio.create_task(exchange.send(frames))
        for number in range(20_000 if opcode == 0x89 else 0):
            assert await exchange.bytes(2 + len(b"%d" % number)) == frame(0x8A)[:1] + bytes([len(b"%d" % number)]) + (
                b"%d" % number
            )
        await sending
        expected = b"20001 20001" if opcode == 0x81 else b"1 1"
        assert (await exchange.bytes(2 + len(expected)))[2:] == expected
    assert sum(counts) >= 20_000 and max(counts) < 800


# --- what an idle connection takes ---------------------------------------------------------------------------


async def hold(scope: Any, receive: Any, send: Any) -> None:
    """Open a stream or a socket, and wait until its peer leaves."""
    await receive()
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
    await receive()


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_a_connection_has_no_table_of_attributes_of_its_own(kind: str) -> None:
    """Up to 30 entries, objects of a class share their dict's keys; with more each takes a table of 1.5 KB."""
    async with serving(hold) as server:
        gate = gate_of(server)
        if kind == "http":
            async with gate.connection() as exchange:
                await exchange.send(b"GET / HTTP/1.1\r\n\r\n")
                await exchange.head()
                (connection,) = server.server_state.connections
                assert len(vars(connection)) <= 30
        else:
            async with connect(gate.url.replace("http", "ws")):
                (connection,) = server.server_state.connections
                assert len(vars(connection)) <= 30


async def test_a_sweep_over_many_connections_lets_other_work_go_first() -> None:
    items, turns, seen = set(range(1200)), 0, 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    async for batch in sweeping.batches(items):
        items.clear()  # connections may end meanwhile
        seen += len(batch)
    task.cancel()
    assert (seen, turns) == (1200, 3)
