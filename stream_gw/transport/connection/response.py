"""How a response's bytes leave, and when its connection reads on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from uvicorn.protocols.http.flow_control import FlowControl

from stream_gw.transport.connection.waiting import Event

if TYPE_CHECKING:
    from stream_gw.transport.connection.http import EdgeHttp

_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
"""End of the head that uvicorn writes for a body without a length."""


class ResponseWriter:
    """uvicorn's transport of one response. It joins what uvicorn writes in pieces, each of which would be a packet."""

    __slots__ = ("_ended", "_head", "connection")

    def __init__(self, connection: EdgeHttp) -> None:
        self.connection = connection
        self._head: bytes | None = None
        """The head that waits for the body's first bytes; empty: it is the next write; None: nothing waits."""
        self._ended = False

    def join_head(self) -> None:
        """Keep the head, which is the next write, until the body's first bytes are there."""
        self._head = b""

    def chunk_writer(self) -> Callable[[bytes], object]:
        """Return the shortest way for chunks of a body whose head is out."""
        return self.connection.transport.write

    def write(self, data: bytes) -> None:
        head = self._head
        if head == b"":
            self._head = data
        elif not self._ended:
            self._head = None
            self.connection.transport.write(data if head is None else head + data)

    def end(self, chunk: bytes) -> None:
        """Write a chunked body's last chunk together with its end. What uvicorn then writes as the end is dropped."""
        self.write(chunk + b"0\r\n\r\n")
        self._ended = True

    def is_closing(self) -> bool:
        """Return whether the connection is closing: uvicorn asks before it writes ``100 Continue``."""
        return self.connection.transport.is_closing()

    def close(self) -> None:
        self.connection.transport.close()


class PlainWriter(ResponseWriter):
    """Writer of a response to HTTP/1.0, which has no chunks: joins their content. The connection's end ends the body.

    uvicorn closes the connection after each such response.
    """

    __slots__ = ("_is_chunked",)

    def __init__(self, connection: EdgeHttp) -> None:
        super().__init__(connection)
        self._is_chunked: bool | None = None
        """Whether the body comes in chunks; None: the head is not written yet."""

    def chunk_writer(self) -> Callable[[bytes], object]:
        return self.write

    def write(self, data: bytes) -> None:
        if self._is_chunked:
            data = _joined(data)
        elif self._is_chunked is None and not data.startswith(b"HTTP/1.1 100 "):
            head = data.removesuffix(_CHUNKED)
            self._is_chunked = head != data
            data = head + b"\r\n" if self._is_chunked else data
        super().write(data)


def _joined(chunks: bytes) -> bytes:
    """Return the content of whole chunks."""
    parts: list[bytes] = []
    at = 0
    while at < len(chunks):
        begin = chunks.index(b"\r\n", at) + 2
        size = int(chunks[at : begin - 2], 16)
        parts.append(chunks[begin : begin + size])
        at = begin + size + 2
    return b"".join(parts)


class Flow(FlowControl):
    """Resumes reading only when no pipelined request waits for the answer before it, and no input is held.

    Else each answer would let in another 256 KiB of requests, which take many times that in memory.
    """

    def __init__(self, transport: asyncio.Transport, connection: EdgeHttp) -> None:
        self._transport = transport
        self.read_paused = self.write_paused = False
        self._is_writable_event = Event(is_set=True)  # type: ignore[assignment]
        self.connection: EdgeHttp | None = connection

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            super().pause_reading()

    def resume_reading(self) -> None:
        connection = self.connection
        if connection is None or connection.pipeline or self._transport.is_closing():
            return
        if not connection.go_on():
            super().resume_reading()
