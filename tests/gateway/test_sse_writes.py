"""How many writes, and so packets, a response takes: its head leaves with its first bytes, its end with its last."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stream_fabric.errors import StreamLost
from stream_fabric.native import chunk
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import ChoiceEnd, End, Open, encode, encode_text
from stream_fabric.stream.ids import new_stream_id
from stream_gw.dialects import encoder_for
from stream_gw.dialects.facts import StreamFacts
from stream_gw.transport.connection import CONNECTION, RESPONSE, EdgeHttp, ResponseWriter
from stream_gw.transport.sse import SseOutlet
from tests.gateway.test_connections import gate_of, serving

FACTS = StreamFacts(new_stream_id(1_700_000_000_000, bytes(10)), 1_700_000_000, "tiny")
OPENING = [encode(Open(0, 0, "text")), encode_text(0, "a")]
ENDING = [encode_text(0, "b"), encode(ChoiceEnd(0, "stop")), encode(End("completed"))]
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Recorder:
    """A connection's transport that notes each write."""

    def __init__(self, transport: Any = None) -> None:
        self._transport = transport
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)
        if self._transport is not None:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection:
    """As much of a connection as an outlet uses."""

    class flow:  # noqa: N801
        write_paused = False

    def __init__(self) -> None:
        self.transport = Recorder()
        self.listener: Any = None


def outlet_of(connection: Connection) -> SseOutlet:
    """An outlet whose response has sent its head."""
    writer = ResponseWriter(connection)  # type: ignore[arg-type]
    writer.join_head()
    writer.write(HEAD)
    assert not connection.transport.written
    return SseOutlet(writer, encoder_for("openai.chat", FACTS), "req_1")


def events(*runs: list[bytes]) -> bytes:
    """The events of one stream's frames, from the first on."""
    encoder, first, out = encoder_for("openai.chat", FACTS), 1, b""
    for run in runs:
        out, first = out + encoder.sse(run, 1, first), first + len(run)
    return out


async def test_the_head_leaves_with_what_has_come_before_it() -> None:
    connection = Connection()
    outlet = outlet_of(connection)
    outlet.write(1, 1, OPENING)
    outlet.open(None)
    assert connection.transport.written == [HEAD + chunk(b": hb\n" + events(OPENING))]


async def test_the_last_events_leave_with_the_bodys_end() -> None:
    connection = Connection()
    outlet = outlet_of(connection)
    outlet.open(None)
    outlet.write(1, 1, OPENING)
    first = [HEAD + chunk(b": hb\n"), chunk(events(OPENING))]
    assert connection.transport.written == first, "a token leaves at once"
    outlet.write(1, 3, ENDING)
    outlet.end("completed")
    last = events(OPENING, ENDING).removeprefix(events(OPENING))
    assert connection.transport.written == [*first, chunk(last) + b"0\r\n\r\n"]
    assert outlet.done.result()


async def test_a_whole_answer_that_came_before_its_head_is_one_write() -> None:
    connection = Connection()
    outlet = outlet_of(connection)
    outlet.write(1, 1, [*OPENING, *ENDING])
    outlet.end("completed")
    outlet.open(None)
    whole = chunk(b": hb\n" + events([*OPENING, *ENDING])) + b"0\r\n\r\n"
    assert connection.transport.written == [HEAD + whole]


@pytest.mark.parametrize("opened", [True, False])
async def test_an_error_after_the_terminal_frame_follows_it(opened: bool) -> None:
    connection = Connection()
    outlet = outlet_of(connection)
    if opened:
        outlet.open(None)
    outlet.write(1, 1, [*OPENING, *ENDING])
    outlet.fail(StreamLost("the end of the stream is lost"), Cursor(1, 2))
    if not opened:
        outlet.open(None)
    before, after = connection.transport.written[-1].split(b"the end of the stream is lost")
    assert events([*OPENING, *ENDING]) in before
    assert after.endswith(b"\n\n\r\n0\r\n\r\n")
    assert outlet.done.result()


async def test_a_reader_that_left_gets_no_end() -> None:
    connection = Connection()
    outlet = outlet_of(connection)
    outlet.open(None)
    outlet.write(1, 1, OPENING)
    written = list(connection.transport.written)
    connection.listener.connection_lost()
    outlet.write(1, 3, ENDING)
    outlet.end("completed")
    assert connection.transport.written == written
    assert not outlet.done.result()


@pytest.mark.parametrize(
    ("method", "status", "headers", "pieces", "writes"),
    [
        ("GET", 200, [(b"content-length", b"2")], [b"ab"], 1),
        ("GET", 200, [], [b"ab", b""], 2),
        ("GET", 200, [(b"content-length", b"2"), (b"connection", b"close")], [b"ab"], 1),
        ("HEAD", 200, [(b"content-length", b"2")], [b"ab"], 1),
        ("HEAD", 200, [(b"content-length", b"2"), (b"connection", b"close")], [b"ab"], 1),
        ("GET", 204, [], [b""], 1),
    ],
    ids=["length", "chunked", "closed", "head", "head closed", "no content"],
)
async def test_a_head_leaves_with_the_first_bytes(
    method: str, status: int, headers: list[tuple[bytes, bytes]], pieces: list[bytes], writes: int
) -> None:
    recorders = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        connection: EdgeHttp = scope["state"][CONNECTION]
        connection.transport = recorder = Recorder(connection.transport)  # type: ignore[assignment]
        recorders.append(recorder)
        if method != "HEAD":
            scope["state"][RESPONSE].join_head()
        await send({"type": "http.response.start", "status": status, "headers": headers})
        assert bool(recorder.written) == (method == "HEAD")
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": piece is not pieces[-1]})

    async with serving(app) as server, gate_of(server).connection() as exchange:
        await exchange.send(f"{method} / HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        async with asyncio.timeout(10):
            head = await exchange._reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
            if method == "GET" and status == 200:
                assert b"ab" in await exchange._reader.readuntil(b"b")
    (recorder,) = recorders
    assert len(recorder.written) == writes
    assert recorder.written[0].startswith(head)


async def test_a_handler_that_fails_after_its_head_sends_nothing() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"][RESPONSE].join_head()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        raise ValueError

    async with serving(app) as server, gate_of(server).connection() as exchange:
        await exchange.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(10):
            assert await exchange._reader.read() == b"", "the connection is closed"
