"""Server-sent events: one stream on one HTTP response, and the parts that every response of events shares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from stream_fabric.errors import StreamGwError, from_info
from stream_fabric.native import chunk
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import End, Note, Status, decode, is_end
from stream_fabric.stream.reader import Gap, Reset
from stream_gw.dialects.base import HEARTBEAT, Encoder
from stream_gw.transport.connection import ResponseWriter
from stream_gw.transport.sweeping import StallTimer

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
]


_BRACE: Final = 0x7B


class SseBody:
    """The body of one HTTP response of events: heartbeats, backpressure, and the end of its connection."""

    __slots__ = ("_early", "_response", "_silent", "_stall", "_write", "done", "full", "stalled")

    def __init__(self, response: ResponseWriter) -> None:
        self._response, connection = response, response.connection
        self.full = connection.flow.write_paused  # an earlier answer on this connection may be unread
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """True: the body is complete and may be ended. False: the reader has gone."""
        self.stalled = False
        self._early: list[bytes] | None = []
        """Events that came before the headers were sent; None: the headers are out."""
        self._write: Callable[[bytes], Any] = response.chunk_writer()
        self._silent = False
        self._stall: StallTimer | None = None
        connection.listener = self
        if connection.transport.is_closing():  # the reader left while its stream was being opened
            self.connection_lost()

    def open(self, retry_ms: int | None) -> None:
        """Write the first heartbeat and the early events, with the headers before them.

        ``retry_ms`` tells an EventSource when to reconnect. Its line belongs to the first event: alone it would be an
        event without data to some clients.
        """
        early, self._early = self._early, None
        retry = b"" if retry_ms is None else b"retry: %d\n" % retry_ms
        if not self._is_closing():
            write = self._response.end if self.done.done() else self._response.write
            write(chunk(HEARTBEAT + retry + b"".join(early or ())))

    def drained(self) -> None:
        """Receive that the connection takes data again; subclasses continue their delivery."""

    def _put(self, data: bytes) -> None:
        """Write an event, or keep it until the headers were sent."""
        if self._early is not None:
            self._early.append(data)
        elif not self._is_closing():
            self._write(chunk(data))

    def _is_closing(self) -> bool:
        return self._response.connection.transport.is_closing()

    def _heartbeat(self) -> bytes:
        """Return what shows a silent reader that the response lives."""
        return HEARTBEAT

    def _end(self, last: bytes = b"") -> None:
        """Write the last event, and the body's end with it."""
        if self.done.done():
            return
        self.done.set_result(True)
        if self._early is not None:
            self._early.append(last)
        elif not self._is_closing():
            self._response.end(chunk(last) if last else b"")

    # --- ConnectionListener --------------------------------------------------------------------------------

    def connection_paused(self) -> None:
        self.full = True
        self._stall = None

    def connection_resumed(self) -> None:
        self._stall = None
        if self.full:
            self.full = False
            self.drained()

    def connection_lost(self) -> None:
        # A closed transport raises at a write; the subscription ends a moment later
        self._write = _discard
        self.full = False
        if not self.done.done():
            self.done.set_result(False)

    # --- the sweep, every few seconds ----------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Send a heartbeat after a silent interval; cut a reader that takes nothing."""
        transport = self._response.connection.transport
        if transport.is_closing():
            return
        if not self.full:
            if self.done.done() or self._early is not None:
                return
            if self._silent:
                self._write(chunk(self._heartbeat()))
            self._silent = True
            return
        self._stall = self._stall or StallTimer()
        if self._stall.is_stalled(transport.get_write_buffer_size(), now):
            self.stalled = True
            transport.abort()


class SseOutlet(SseBody):
    """``Outlet`` that writes a stream's events as HTTP chunks."""

    __slots__ = ("_begun", "_first", "_last", "_refusal", "_request_id", "encoder", "resume")

    def __init__(self, response: ResponseWriter, encoder: Encoder, request_id: str) -> None:
        self.encoder = encoder
        self._last = b""
        """Events with the terminal frame: they leave with the body's end."""
        self._request_id = request_id
        self.resume: Callable[[], None] = _nothing
        self._begun = False
        """True once an event of a frame came."""
        self._first: asyncio.Future[StreamGwError | None] | None = None
        """Waits for the first event, the end, or the reader's leaving; None: nobody waits."""
        self._refusal: StreamGwError | None = None
        super().__init__(response)
        opening = encoder.opening()
        if opening:
            self._put(opening)

    def refusal(self, within_s: float) -> asyncio.Future[StreamGwError | None]:
        """Await the stream's first event, at most ``within_s`` seconds, before ``open``.

        The result is the error of a stream that failed without an event before: it can be the response itself.
        """
        loop = asyncio.get_running_loop()
        self._first = first = loop.create_future()
        if self._begun or self.done.done():
            self._stop_waiting()
        else:
            timer = loop.call_later(within_s, self._stop_waiting)
            first.add_done_callback(lambda _: timer.cancel())
        return first

    def _stop_waiting(self) -> None:
        first, self._first = self._first, None
        if first is not None and not first.done():
            first.set_result(self._refusal)

    def drained(self) -> None:
        self.resume()

    def _heartbeat(self) -> bytes:
        return self.encoder.heartbeat()

    def close(self) -> None:
        """Let the subscription go: each would keep the other until the cycle collector finds them."""
        self.resume = _nothing

    # --- Outlet --------------------------------------------------------------------------------------------

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        data = self.encoder.sse(lines, epoch, first)
        if data:
            self._silent = False
            if lines[-1][0] == _BRACE and is_end(lines[-1]):
                if self._early is not None and not self._begun:
                    self._refusal = _failure(lines)
                self._last = data
            elif self._early is not None:
                self._early.append(data)
                self._begun = True
                self._stop_waiting()
            else:
                self._write(chunk(data))

    def gap(self, gap: Gap) -> bool:
        return False  # a client of a plain dialect cannot be told; the error event names the cursor

    def reset(self, reset: Reset) -> bool:
        return False

    def epoch_changed(self, epoch: str, head: int) -> None:
        pass  # the id lines carry the epoch

    def queued(self, position: int, of: int, warming_s: float | None) -> None:
        if self._early is None and not self.full and not self._is_closing():
            self._silent = False
            warming = b"" if warming_s is None else b", warming up, about %d s" % warming_s
            self._write(chunk(b": queued %d of %d%b\n" % (position, of, warming)))

    def end(self, status: Status) -> None:
        self._end(self._last)
        self._stop_waiting()

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        event = self.encoder.failure(error, self._request_id, cursor)
        if not event:  # the dialect's clients resume after a broken connection alone
            self._response.connection.transport.abort()
            return
        self._end(self._last + event)
        self._stop_waiting()

    # --- ConnectionListener --------------------------------------------------------------------------------

    def connection_lost(self) -> None:
        super().connection_lost()
        self._stop_waiting()


def _failure(lines: list[bytes]) -> StreamGwError | None:
    """Return the error of a stream whose frames are ``lines``; None: it has output, or ended without an error."""
    end = decode(lines[-1])
    if not isinstance(end, End) or end.error is None:
        return None
    if not all(isinstance(decode(line), Note) for line in lines[:-1]):
        return None
    return from_info(end.error)


def _nothing() -> None:
    pass


def _discard(data: bytes) -> None:
    pass
