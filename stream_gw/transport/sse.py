"""The SSE shell: one stream on one HTTP response; and what every response of events has in common."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from stream_fabric.cursor import Cursor
from stream_fabric.errors import StreamGwError
from stream_fabric.frames import Status
from stream_fabric.limits import SSE_RETRY_MS_MAX, SSE_RETRY_MS_MIN, STALL_S_MAX
from stream_fabric.reader import Gap, Reset
from stream_gw.dialects.base import Encoder
from stream_gw.dialects.errors import error_body
from stream_gw.server import EdgeHttp

_HEARTBEAT = b": hb\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
]


class SseBody:
    """One HTTP response of events: its heartbeats, and what becomes of its connection."""

    __slots__ = ("_buffered", "_connection", "_early", "_silent", "_stalled_since", "_write", "done", "full", "stalled")

    def __init__(self, connection: EdgeHttp) -> None:
        self._connection = connection
        self.full = connection.flow.write_paused  # by an answer before, which nobody reads
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """True: the body is whole and may be ended; False: the reader has gone."""
        self.stalled = False
        # Until the headers are out, events wait here
        self._early: list[bytes] | None = []
        self._write: Callable[[bytes], Any] = connection.transport.write
        self._silent = False
        self._buffered = 0
        self._stalled_since = 0.0
        connection.listener = self
        if connection.transport.is_closing():  # the reader left while its stream was being found
            self.connection_lost()

    def open(self, *, retry: bool) -> None:
        """The headers are out: write the first heartbeat and what came meanwhile. ``retry``: tell an EventSource when
        to come back. The line belongs to the first event: alone it would be an event without data to some clients."""
        early, self._early = self._early, None
        line = b"retry: %d\n" % random.randint(SSE_RETRY_MS_MIN, SSE_RETRY_MS_MAX) if retry else b""
        self._write(chunk(_HEARTBEAT + line + b"".join(early or ())))

    def drained(self) -> None:
        """The socket takes more again."""

    def _put(self, data: bytes) -> None:
        if self._early is not None:
            self._early.append(data)
        elif not self._connection.transport.is_closing():
            self._write(chunk(data))

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(True)

    # --- ConnectionListener --------------------------------------------------------------------------------

    def connection_paused(self) -> None:
        self.full = True
        self._stalled_since = 0.0

    def connection_resumed(self) -> None:
        if self.full:
            self.full = False
            self.drained()

    def connection_lost(self) -> None:
        # A closed transport raises; the subscription ends a moment later
        self._write = _swallow
        self.full = False
        if not self.done.done():
            self.done.set_result(False)

    # --- the sweep, every few seconds ----------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """A heartbeat after a silent interval; an end to a reader that takes nothing."""
        transport = self._connection.transport
        if transport.is_closing():
            return
        if not self.full:
            if self.done.done() or self._early is not None:
                return
            if self._silent:
                self._write(chunk(_HEARTBEAT))
            self._silent = True
            return
        buffered = transport.get_write_buffer_size()
        if not self._stalled_since or buffered < self._buffered:
            self._stalled_since = now
        self._buffered = buffered
        if now - self._stalled_since > STALL_S_MAX:
            self.stalled = True
            transport.abort()


class SseOutlet(SseBody):
    """Writes a stream's events as HTTP chunks."""

    __slots__ = ("_request_id", "encoder", "resume")

    def __init__(self, connection: EdgeHttp, encoder: Encoder, request_id: str) -> None:
        self.encoder = encoder
        self._request_id = request_id
        self.resume: Callable[[], None] = _nothing
        super().__init__(connection)

    def drained(self) -> None:
        self.resume()

    # --- Outlet --------------------------------------------------------------------------------------------

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        data = self.encoder.sse(lines, epoch, first)
        if data:
            self._silent = False
            if self._early is not None:
                self._early.append(data)
            else:
                self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def gap(self, gap: Gap) -> bool:
        return False  # an SSE client of a plain dialect cannot be told; the error event names the cursor

    def reset(self, reset: Reset) -> bool:
        return False

    def rise(self, epoch: str, head: int) -> None:
        pass  # the id lines carry the epoch

    def waits(self, position: int, of: int, warming_s: float | None) -> None:
        if self._early is None and not self.full and not self._connection.transport.is_closing():
            self._silent = False
            warming = b"" if warming_s is None else b", warming up, about %d s" % warming_s
            self._write(chunk(b": queued %d of %d%b\n" % (position, of, warming)))

    def end(self, status: Status) -> None:
        self._end()

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        body = error_body(error, self._request_id, stream_id=self.encoder.facts.stream, cursor=cursor)
        self._put(b"data: " + body + b"\n\n")
        self._end()


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _nothing() -> None:
    pass


def _swallow(data: bytes) -> None:
    pass
