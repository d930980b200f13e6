"""How a response's bytes leave, and when its connection reads on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.http.flow_control import FlowControl

from stream_gw.transport.connection.waiting import Event

if TYPE_CHECKING:
    from stream_gw.transport.connection.http import EdgeHttp


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
