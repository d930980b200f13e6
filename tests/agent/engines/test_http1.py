"""The HTTP client of a model server, against servers that send given bytes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from inference.engines.upstream.http1 import Answer, AnswerBroken, HttpClient
from tests.support.tls import Authority
from tests.support.waiting import eventually

Serve = Callable[[int, bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Answers one request: number of its connection, request, connection."""

BODY = b"".join(b"data: %d\n\n" % number for number in range(50))
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x;name=value\r\n%b\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:300], BODY[300:]))
    + b"0\r\nX-Trailer: yes\r\n\r\n"
)
SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
CONTINUED = b"HTTP/1.1 100 Continue\r\nx-no: 1\r\n\r\n" + CHUNKED
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\n\r\n" + BODY


class Server:
    def __init__(self) -> None:
        self.url = ""
        self.connections = 0
        self.asked: list[int] = []
        """Number of the connection of each request."""
        self.closed = 0


@asynccontextmanager
async def serving(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    told = Server()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = told.connections = told.connections + 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                body = await reader.readexactly(size)
                told.asked.append(number)
                await serve(number, head + body, reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        told.closed += 1

    listener = await asyncio.start_server(run, "127.0.0.1", 0, ssl=tls)
    host, port = listener.sockets[0].getsockname()
    told.url = f"{'https' if tls else 'http'}://{host}:{port}"
    async with listener:
        yield told
        await eventually(lambda: told.closed == told.connections, "the end of every connection")


@asynccontextmanager
async def client_of(
    url: str, *, connect_s: float = 2.0, silence_s: float = 20.0, idle_s: float = 5.0, connections_max: int = 10
) -> AsyncIterator[HttpClient]:
    client = HttpClient(
        url,
        {"authorization": "Bearer k"},
        connect_s=connect_s,
        silence_s=silence_s,
        idle_s=idle_s,
        connections_max=connections_max,
    )
    yield client
    client.close()


def sending(*parts: bytes, close: bool = False) -> Serve:
    async def serve(number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return serve


async def ask(client: HttpClient, body: bytes = b"{}") -> bytes:
    with closing(await client.post("/v1/x", {"x-request-id": "r"}, body)) as answer:
        return await answer.read_start(1 << 20)


@pytest.mark.parametrize("whole", [CHUNKED, SIZED, CONTINUED, UNTIL_CLOSED], ids=["chunked", "sized", "1xx", "closed"])
async def test_an_answer_is_the_same_wherever_its_bytes_are_cut(whole: bytes) -> None:
    draw = random.Random(7)
    for _ in range(20):
        cuts = [0, *sorted(draw.sample(range(1, len(whole)), draw.randrange(1, 12))), len(whole)]
        parts = [whole[a:b] for a, b in itertools.pairwise(cuts)]
        async with serving(sending(*parts, close=whole is UNTIL_CLOSED)) as server, client_of(server.url) as client:
            with closing(await client.post("/v1/x", {}, b"{}")) as answer:
                assert answer.status == 200
                assert ("content-type" in answer.headers) == (b"event-stream" in whole)
                assert "x-no" not in answer.headers
                assert await answer.read_start(1 << 20) == BODY


async def test_the_request_goes_up_as_it_was_given() -> None:
    seen: list[bytes] = []

    async def serve(number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(SIZED)

    async with serving(serve) as server, client_of(server.url + "/base/") as client:
        assert await ask(client, b'{"a":1}') == BODY
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert body == b'{"a":1}'
    assert head.split(b"\r\n") == [
        b"POST /base/v1/x HTTP/1.1",
        b"host: " + server.url.removeprefix("http://").encode(),
        b"accept-encoding: identity",
        b"authorization: Bearer k",
        b"x-request-id: r",
        b"content-length: 7",
    ]
    with pytest.raises(ValueError, match="line break"):
        await client.post("/v1/x", {"x-request-id": "r\r\nx-admin: 1"}, b"")


async def test_a_piece_reaches_its_reader_without_a_turn_of_the_loop_between() -> None:
    """The reader is called by the transport itself: once a token, no task wakes up."""
    turns: list[str] = []
    go = asyncio.Event()

    async def serve(number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED[:300])
        await go.wait()
        writer.write(CHUNKED[300:])

    async with serving(serve) as server, client_of(server.url) as client:
        with closing(await client.post("/v1/x", {}, b"{}")) as answer:

            def receive(piece: bytes) -> bool:
                task = asyncio.current_task()
                turns.append(task.get_name() if task is not None else "the loop")
                go.set()
                return False

            await answer.deliver(receive)
    assert turns[-1] == "the loop"


@pytest.mark.parametrize("whole", [CHUNKED, SIZED])
@pytest.mark.parametrize("at", [40, 150, -3])
async def test_an_answer_that_breaks_off_is_no_whole_one(whole: bytes, at: int) -> None:
    async with serving(sending(whole[:at], close=True)) as server, client_of(server.url) as client:
        with pytest.raises(AnswerBroken, match="closed the connection"):
            await ask(client)
        assert server.asked == [1], "a new connection that closes is no old one that expired"


@pytest.mark.parametrize("sent", [b"", SIZED[:100]])
async def test_a_silent_server_fails_the_request(sent: bytes) -> None:
    async with serving(sending(sent)) as server, client_of(server.url, silence_s=0.2) as client:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"sent nothing for 0\.2 s"):
            await ask(client)
        assert 0.2 <= time.monotonic() - began < 5
        await eventually(lambda: server.closed)


async def test_a_server_that_sends_slowly_is_not_silent() -> None:
    async def serve(number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(8):
            writer.write(SIZED[at * 70 : (at + 1) * 70] if at < 7 else SIZED[490:])
            await asyncio.sleep(0.1)

    async with serving(serve) as server, client_of(server.url, silence_s=0.5) as client:
        assert await ask(client) == BODY


async def test_a_connection_is_used_again() -> None:
    async with serving(sending(CHUNKED)) as server, client_of(server.url) as client:
        for _ in range(3):
            assert await ask(client) == BODY
        assert server.asked == [1, 1, 1]
        first, second = await asyncio.gather(ask(client), ask(client))
        assert first == second == BODY
        assert sorted(server.asked) == [1, 1, 1, 1, 2]


async def test_a_connection_that_was_idle_for_too_long_is_not_used_again() -> None:
    async with serving(sending(CHUNKED)) as server, client_of(server.url, idle_s=0.05) as client:
        await ask(client)
        await asyncio.sleep(0.1)
        await ask(client)
        assert server.asked == [1, 2]
        await eventually(lambda: server.closed == 1)


@pytest.mark.parametrize("rest", [True, False])
async def test_a_reader_that_has_enough_does_not_wait_for_the_rest(rest: bool) -> None:
    """The rest is passed over, so that the connection serves again; without a rest it is closed."""
    ended = asyncio.Event()

    async def serve(number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED[:-30])
        await ended.wait()
        if rest:
            writer.write(CHUNKED[-30:])

    async with serving(serve) as server, client_of(server.url) as client:
        with closing(await client.post("/v1/x", {}, b"{}")) as answer:
            assert await answer.read_start(10) == BODY[:10]
        ended.set()
        if rest:
            await eventually(lambda: client._idle)
            assert await ask(client) == BODY
            assert server.asked == [1, 1]
        else:
            await eventually(lambda: server.closed == 1)
            assert not client._open


async def test_a_body_that_is_left_closes_its_connection() -> None:
    async with serving(sending(CHUNKED[:-30])) as server, client_of(server.url) as client:
        (await client.post("/v1/x", {}, b"{}")).close()
        await eventually(lambda: server.closed == 1)
        reading = asyncio.create_task(ask(client))
        await eventually(lambda: len(server.asked) == 2)
        reading.cancel()
        await eventually(lambda: server.closed == 2)
        assert not client._open


@pytest.mark.parametrize("closes", [1, 2])
async def test_a_connection_that_closes_when_it_is_used_again_costs_no_request(closes: int) -> None:
    async def serve(number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if 1 < len(server.asked) <= 1 + closes:
            writer.close()
        else:
            writer.write(SIZED)

    async with serving(serve) as server, client_of(server.url) as client:
        await ask(client)
        if closes == 1:
            assert await ask(client) == BODY
        else:
            with pytest.raises(AnswerBroken):
                await ask(client)
        assert server.asked == [1, 1, 2]


async def test_a_connection_that_closes_after_an_answer_without_body_costs_no_request() -> None:
    """Such an answer has no length either, but does not end with its connection."""

    async def serve(number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.asked) == 2:
            writer.close()
        else:
            writer.write(SIZED if number == 2 else b"HTTP/1.1 204 No Content\r\n\r\n")

    async with serving(serve) as server, client_of(server.url) as client, asyncio.timeout(5):
        assert await ask(client) == b""
        assert await ask(client) == BODY
        assert server.asked == [1, 1, 2]


async def test_an_answer_that_breaks_off_on_an_old_connection_is_not_asked_for_again() -> None:
    async def serve(number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SIZED if len(server.asked) == 1 else b"HTTP/1.1 200")
        if len(server.asked) > 1:
            writer.close()

    async with serving(serve) as server, client_of(server.url) as client:
        await ask(client)
        with pytest.raises(AnswerBroken):
            await ask(client)
        assert server.asked == [1, 1]


async def test_what_the_reader_raises_is_raised_and_closes_the_connection() -> None:
    def receive(piece: bytes) -> bool:
        raise KeyError("mine")

    async with serving(sending(SIZED[:200])) as server, client_of(server.url) as client:
        with closing(await client.post("/v1/x", {}, b"{}")) as answer, pytest.raises(KeyError, match="mine"):
            await answer.deliver(receive)
        await eventually(lambda: server.closed == 1)


async def test_what_the_reader_raises_later_is_raised_too() -> None:
    go = asyncio.Event()

    async def serve(number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SIZED[:60])
        await go.wait()
        writer.write(SIZED[60:])

    def receive(piece: bytes) -> bool:
        raise KeyError("mine")

    async with serving(serve) as server, client_of(server.url) as client:
        with closing(await client.post("/v1/x", {}, b"{}")) as answer:
            answer._held.clear()
            go.set()
            with pytest.raises(KeyError, match="mine"):
                await answer.deliver(receive)
        await eventually(lambda: server.closed == 1)


@pytest.mark.parametrize(
    "sent",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 16) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\nx",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
    ids=["no http", "head", "chunk", "gzip", "upgrade"],
)
async def test_what_is_no_answer_fails_the_request(sent: bytes) -> None:
    async with serving(sending(sent)) as server, client_of(server.url) as client:
        with pytest.raises(AnswerBroken):
            await ask(client)
        await eventually(lambda: server.closed == 1)


@pytest.mark.parametrize("together", [True, False])
async def test_an_answer_to_nothing_is_not_the_next_request_s(together: bool) -> None:
    async def serve(number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SIZED)
        if number == 1 and not together:
            await eventually(lambda: client._idle)
        if number == 1:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")

    async with serving(serve) as server, client_of(server.url) as client:
        with contextlib.suppress(AnswerBroken):
            assert await ask(client) == BODY
        await eventually(lambda: server.closed == 1)
        assert await ask(client) == BODY
        assert server.asked == [1, 2]


async def test_connections_are_bounded() -> None:
    async with (
        serving(sending(CHUNKED[:-30])) as server,
        client_of(server.url, connections_max=1, connect_s=0.1) as client,
    ):
        for _ in range(3):
            answer = await client.post("/v1/x", {}, b"{}")
            with pytest.raises(TimeoutError, match="in use"):
                await client.post("/v1/x", {}, b"{}")
            answer.close()
        silent = client_of(server.url.replace("http://127.0.0.1", "http://127.0.0.2"), connections_max=1)
        async with silent as refused:
            for _ in range(3):
                with pytest.raises(OSError, match=r"refused|Connect"):
                    await refused.post("/v1/x", {}, b"{}")


async def test_an_answer_that_is_whole_early_leaves_its_connection_to_the_next() -> None:
    """The first one's reader comes late, when the second one already uses the connection."""
    go = asyncio.Event()

    async def serve(number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SIZED[:200])
        if len(server.asked) > 1:
            await go.wait()
        writer.write(SIZED[200:])

    async with serving(serve) as server, client_of(server.url) as client:
        first: Answer = await client.post("/v1/x", {}, b"{}")
        await eventually(lambda: client._idle)
        second = asyncio.create_task(ask(client))
        await eventually(lambda: len(server.asked) == 2)
        await eventually(lambda: (shared := first._way._answer) is not None and shared.status, "its head")
        with closing(first):
            assert await first.read_start(10) == BODY[:10]
        go.set()
        assert await second == BODY
        assert server.asked == [1, 1]


async def test_a_closed_client_fails_what_is_being_read() -> None:
    async with serving(sending(CHUNKED[:-30])) as server, client_of(server.url) as client:
        reading = asyncio.create_task(ask(client))
        await eventually(lambda: server.asked)
        client.close()
        with pytest.raises(AnswerBroken, match="client is closed"):
            await reading
        await eventually(lambda: server.closed == 1)


async def test_tls_checks_the_server_s_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(authority.server.cert, authority.server.key)
    async with serving(sending(CHUNKED), context) as server:
        async with client_of(server.url) as stranger:
            with pytest.raises(ssl.SSLCertVerificationError):
                await ask(stranger)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        async with client_of(server.url) as client:
            assert await ask(client) == BODY
            assert await ask(client) == BODY
        assert server.asked == [1, 1]
