"""Clients for tests that see bytes: HTTP/1.1 on a bare socket, SSE events checked line by line, tokenstream.v1."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from tests.gateway.reference.socket_schema import assert_fits
from tests.support.waiting import eventually

MODEL = "sim-small"
HEARTBEAT = b": hb\n"
DONE = "[DONE]"
ANSWER_S = 20.0
_LONG = {"ignore_eos": True}  # an answer has as many tokens as were asked for


def chat(tokens: int = 30, seed: int = 1, **more: Any) -> dict[str, Any]:
    """The body of a streamed chat completion."""
    messages = [{"role": "user", "content": "Tell me of rivers."}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "seed": seed, "stream": True, **_LONG, **more}


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def connected(gate: Gate, receive_buffer: int) -> socket.socket:
    """A connection for which the kernel holds so few bytes that a reader who does not read is felt."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    # Segments of an Ethernet, not of the loopback: the server's kernel sizes its buffer by them
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1448)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (gate.host, gate.port))
    return sock


class Exchange:
    """One connection, and the answers that come on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}
        self.raw_headers: list[tuple[str, str]] = []
        self.pause_s = 0.0
        """After each KiB of a body: a reader that is slow."""
        self._ended = False
        """The chunked body that is read has had its last chunk."""

    @classmethod
    async def connect(cls, gate: Gate, receive_buffer: int | None = None) -> Exchange:
        """``receive_buffer``: bytes that the kernel may hold for us."""
        if receive_buffer is None:
            return cls(*await asyncio.open_connection(gate.host, gate.port))
        return cls(*await asyncio.open_connection(sock=await connected(gate, receive_buffer), limit=1024))

    @property
    def local_port(self) -> int:
        port: int = self._writer.get_extra_info("sockname")[1]
        return port

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def half_close(self) -> None:
        self._writer.write_eof()

    async def head(self) -> None:
        """Read the status and the headers of the next answer."""
        block = await self._within(self._reader.readuntil(b"\r\n\r\n"))
        status, *lines = block.decode("latin-1").split("\r\n")
        self.status = int(status.split()[1])
        self.raw_headers = [
            (name.lower(), value) for name, _, value in (line.partition(": ") for line in lines if line)
        ]
        self.headers = dict(self.raw_headers)
        self._ended = False

    async def piece(self, within_s: float = ANSWER_S) -> bytes:
        """The next piece of a chunked body; empty at its end, however often it is asked for."""
        if self._ended:
            return b""
        size = int(await self._within(self._reader.readuntil(b"\r\n"), within_s), 16)
        data = b""
        while len(data) < size + 2:
            data += await self._within(self._reader.readexactly(min(1024, size + 2 - len(data))), within_s)
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
        assert data.endswith(b"\r\n")
        self._ended = not size
        return data[:-2]

    async def rest(self, within_s: float = ANSWER_S) -> bytes:
        """The body, or what is left of it."""
        if "content-length" in self.headers:
            return await self._within(self._reader.readexactly(int(self.headers["content-length"])), within_s)
        if self.headers.get("transfer-encoding") != "chunked":
            return b""
        parts = []
        async with asyncio.timeout(within_s):
            while part := await self.piece(within_s):
                parts.append(part)
        return b"".join(parts)

    async def answer(self) -> Reply:
        await self.head()
        return Reply(self.status, self.headers, await self.rest())

    async def events(self, count: int) -> list[Event]:
        """Read on until so many events have come."""
        data = b""
        while len(found := whole_events(data)) < count:
            part = await self.piece()
            assert part, f"the body ended after {len(found)} of {count} events"
            data += part
        return found

    async def bytes(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        return await self._within(self._reader.readexactly(count))

    async def silence(self, for_s: float) -> None:
        """Nothing comes."""
        with pytest.raises(TimeoutError):
            await self._within(self._reader.read(1), for_s)

    async def closed(self, within_s: float = ANSWER_S) -> bytes:
        """All bytes until the server closes the connection."""
        try:
            return await self._within(self._reader.read(-1), within_s)
        except ConnectionResetError:
            return b""

    async def _within(self, work: Any, within_s: float = ANSWER_S) -> bytes:
        async with asyncio.timeout(within_s):
            data: bytes = await work
            return data

    def abort(self) -> None:
        self._writer.transport.abort()


@dataclass(frozen=True)
class Gate:
    """One gateway, and the key to ask it with."""

    url: str
    pid: int
    key: str

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
        """``body``: bytes as they are, anything else as JSON. ``headers`` replace ours of the same name."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = {"host": f"{self.host}:{self.port}", "authorization": f"Bearer {self.key}"}
        if data or method in ("POST", "PUT"):
            all_headers |= {"content-type": "application/json", "content-length": str(len(data))}
        all_headers |= headers or {}
        lines = [
            f"{method} {path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in all_headers.items() if value),
            "",
            "",
        ]
        return "\r\n".join(lines).encode("latin-1") + data

    @asynccontextmanager
    async def connection(self, receive_buffer: int | None = None) -> AsyncIterator[Exchange]:
        exchange = await Exchange.connect(self, receive_buffer)
        try:
            yield exchange
        finally:
            exchange.abort()
            await asyncio.sleep(0)

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[Exchange]:
        """An exchange whose headers have come."""
        async with self.connection() as exchange:
            await exchange.send(self.request(method, path, body, headers))
            await exchange.head()
            yield exchange

    async def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """A whole exchange."""
        async with self.open(method, path, body, headers) as exchange:
            return Reply(exchange.status, exchange.headers, b"" if method == "HEAD" else await exchange.rest())

    def create(self, body: Any, headers: dict[str, str] | None = None) -> Any:
        """A chat completion, as ``open``."""
        return self.open("POST", "/v1/chat/completions", body, headers)

    async def background(self, tokens: int, **more: Any) -> str:
        """A stream that nobody reads."""
        async with self.create(chat(tokens, background=True, **more)) as exchange:
            assert exchange.status == 200
            return exchange.headers["x-stream-id"]

    async def finished(self, tokens: int, **more: Any) -> tuple[str, bytes]:
        """A stream that has ended, and its body."""
        async with self.create(chat(tokens, **more)) as exchange:
            return exchange.headers["x-stream-id"], await exchange.rest()

    async def info(self, stream: str) -> dict[str, Any]:
        reply = await self.ask("GET", f"/v1/streams/{stream}/info")
        assert reply.status == 200, reply
        found: dict[str, Any] = reply.json
        return found

    async def until_status(self, stream: str, status: str, within_s: float = 10.0) -> dict[str, Any]:
        async def seen() -> dict[str, Any] | None:
            info = await self.info(stream)
            assert info["status"] in ("live", status), f"{stream} is not {status} and will never be: {info}"
            return info if info["status"] == status else None

        found: dict[str, Any] = await eventually(seen, f"{stream} to be {status}", within_s)
        return found

    async def cancel(self, stream: str) -> dict[str, Any]:
        reply = await self.ask("POST", f"/v1/streams/{stream}/cancel")
        assert reply.status == 200, reply
        found: dict[str, Any] = reply.json
        return found

    async def gauge(self, name: str) -> float:
        reply = await self.ask("GET", "/metrics")
        found = re.search(rf"^\w*{name} ([0-9.e+-]+)$", reply.body.decode(), re.MULTILINE)
        assert found, f"no metric {name}"
        return float(found[1])

    async def open_streams(self) -> int:
        return int(await self.gauge("open_streams"))

    async def until_open_streams(self, count: int, within_s: float = 10.0) -> None:
        async def reached() -> bool:
            return await self.open_streams() == count

        await eventually(reached, f"{count} open streams", within_s)

    def resident_bytes(self) -> int:
        with open(f"/proc/{self.pid}/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))

    def socket(self, headers: dict[str, str] | None = None, subprotocols: Sequence[str] = (), **options: Any) -> Any:
        """A WebSocket; authorized by header unless ``headers`` are given."""
        if headers is None:
            headers = {"Authorization": f"Bearer {self.key}"}
        return Tokenstream.open(self, headers, subprotocols, **options)


@dataclass(frozen=True)
class Event:
    """One SSE event. ``end``: where it ends in the body."""

    data: str
    id: str | None
    end: int

    @property
    def json(self) -> Any:
        return json.loads(self.data)


def whole_events(body: bytes) -> list[Event]:
    """Every whole event of a body, each checked to the letter: heartbeats, one data line, at most one id line."""
    found = []
    at = 0
    while (stop := body.find(b"\n\n", at)) >= 0:
        lines = body[at:stop].split(b"\n")
        while lines[0] == b": hb" or lines[0].startswith(b": queued "):
            lines.pop(0)
        data = [line for line in lines if line.startswith(b"data: ")]
        ids = [line for line in lines if line.startswith(b"id: ")]
        assert len(data) == 1 and len(ids) <= 1 and len(lines) == len(data) + len(ids), lines
        at = stop + 2
        found.append(Event(data[0][6:].decode(), ids[0][4:].decode() if ids else None, at))
    return found


def events(body: bytes) -> list[Event]:
    """The events of a whole body."""
    found = whole_events(body)
    left = body[found[-1].end if found else 0 :]
    assert left.replace(HEARTBEAT, b"") == b"", left
    return found


def text(found: Sequence[Event]) -> str:
    return text_of_chunks(event.json for event in found if event.data != DONE)


def text_of_chunks(chunks: Any) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices") or ())


def tokens_of_chunks(chunks: Any) -> int:
    """Number of tokens in uncoalesced chunks: one per chunk with text."""
    return sum(bool(text_of_chunks([chunk])) for chunk in chunks)


def after_heartbeat(body: bytes) -> bytes:
    """A body without what says that it has begun."""
    assert body.startswith(HEARTBEAT)
    return body.removeprefix(HEARTBEAT)


def refusal(reply: Reply, status: int, code: str) -> dict[str, Any]:
    """The error of an answer, checked for its shape."""
    assert reply.status == status, reply
    assert reply.headers["content-type"] == "application/json"
    error: dict[str, Any] = reply.json["error"]
    assert set(reply.json) == {"error"}
    assert set(error) >= {"message", "type", "code", "param", "request_id", "retriable"}, error
    assert error["code"] == code, error
    assert error["message"] and isinstance(error["type"], str) and isinstance(error["retriable"], bool)
    if status in (429, 503):
        assert int(reply.headers["retry-after"]) >= 1
    if "x-request-id" in reply.headers:
        assert error["request_id"] == reply.headers["x-request-id"]
    return error


@dataclass
class Track:
    """Messages of one channel."""

    ok: list[dict[str, Any]] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return text_of_chunks(chunk for message in self.data for chunk in message["f"])


def dense(track: Track, after: int = 0) -> None:
    """Every message continues exactly where the one before ended, as a client would check."""
    seq = after
    for message in track.data:
        assert message.get("a", message["s"] - 1) == seq, track.data
        assert message["s"] > seq
        seq = message["s"]
    assert track.end is not None
    assert track.end["s"] in (seq, seq + 1)


class Tokenstream:
    """One socket of tokenstream.v1. Every message is kept, by channel and in order."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.tracks: dict[int, Track] = {}
        self.others: list[dict[str, Any]] = []

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        gate: Gate,
        headers: dict[str, str],
        subprotocols: Sequence[str],
        receive_buffer: int | None = None,
        **options: Any,
    ) -> AsyncIterator[Tokenstream]:
        if receive_buffer is not None:
            options["sock"] = await connected(gate, receive_buffer)
        async with connect(
            f"ws://{gate.host}:{gate.port}/v1/stream",
            additional_headers=headers,
            subprotocols=[Subprotocol(name) for name in subprotocols] or None,
            proxy=None,
            max_size=None,
            **{"ping_interval": None, "close_timeout": 2, **options},
        ) as connection:
            yield cls(connection)

    async def send(self, t: str, **fields: Any) -> None:
        await self.connection.send(json.dumps({"t": t, **fields}))

    async def create(self, ch: int, body: Any, **fields: Any) -> None:
        await self.send("create", ch=ch, dialect="openai.chat", body=body, **fields)

    async def sub(self, ch: int, stream: str, after: str = "1-0", mode: str = "tokens") -> None:
        await self.send("sub", ch=ch, stream=stream, after=after, dialect="openai.chat", mode=mode)

    def track(self, ch: int) -> Track:
        return self.tracks.setdefault(ch, Track())

    async def receive(self, within_s: float = ANSWER_S) -> dict[str, Any]:
        """The next message; it is sorted in as well."""
        async with asyncio.timeout(within_s):
            raw = await self.connection.recv()
        assert isinstance(raw, str), "the server sends text frames only"
        message: dict[str, Any] = json.loads(raw)
        assert_fits(message)
        if "ch" not in message:
            self.others.append(message)
            return message
        track = self.track(message["ch"])
        match message["t"]:
            case "ok":
                track.ok.append(message)
            case "d":
                track.data.append(message)
            case "end":
                track.end = message
            case "error":
                track.errors.append(message)
        return message

    async def until(self, what: Callable[[dict[str, Any]], bool], within_s: float = ANSWER_S) -> dict[str, Any]:
        """Read on until such a message comes; return it."""
        async with asyncio.timeout(within_s):
            while True:
                message = await self.receive()
                if what(message):
                    return message

    async def until_t(self, t: str, **fields: Any) -> dict[str, Any]:
        return await self.until(lambda m: m["t"] == t and all(m.get(name) == value for name, value in fields.items()))

    async def until_ended(self, *channels: int, within_s: float = ANSWER_S) -> None:
        async with asyncio.timeout(within_s):
            while not all(self.track(ch).end for ch in channels):
                await self.receive()

    async def close_code(self, within_s: float = ANSWER_S) -> int | None:
        """Read on until the server closes; the code."""
        with suppress(ConnectionClosed):
            async with asyncio.timeout(within_s):
                while True:
                    await self.receive(within_s)
        return self.connection.close_code
