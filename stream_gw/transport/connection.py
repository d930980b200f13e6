"""uvicorn's connection protocols, extended for the token path: header limits, and a direct path from an outlet to its
transport (bytes leave without a task switch; the outlet hears at once of a full, drained or lost connection).
Input is parsed in slices, so that no peer's small requests or frames hold the loop.

``docs/adr/0002-direct-transport.md`` has the measurement behind it. The module is one adapter over uvicorn's internals,
so it stays in one piece although it has over 400 lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Protocol, cast

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from stream_fabric.errors import BadRequest, HeadersTooLarge
from stream_fabric.limits import (
    HEAD_S_MAX,
    HEADER_BYTES_MAX,
    LINGER_IDLE_S_MAX,
    LINGER_S_MAX,
    OUTBOX_BYTES_LOW,
    OUTBOX_BYTES_MAX,
    UNREAD_BYTES_MAX,
    URL_BYTES_MAX,
    WS_MESSAGE_BYTES_MAX,
    WS_PROTOCOL_PING_S,
)
from stream_fabric.ports import Clock
from stream_fabric.system_errors import reason
from stream_gw.dialects.anthropic import errors as anthropic_errors
from stream_gw.dialects.errors import error_body
from stream_gw.transport.stall import StallTimer

CONNECTION = "stream_gw.connection"
"""Key of the connection in a scope's ``state``."""
RESPONSE = "stream_gw.response"
"""Key of the response's writer in a scope's ``state``."""

_SWEEP_S = 5.0
_TURN_US = 2000
"""Time for which one connection's input is parsed before others have their turn."""
_FRAGMENT_BYTES = 1024
"""A smaller fragment of a message counts as a message of its own: its work does not depend on its size."""


class ConnectionListener(Protocol):
    """Takes a connection's events while a response or a socket is open."""

    def connection_paused(self) -> None: ...

    def connection_resumed(self) -> None: ...

    def connection_lost(self) -> None: ...


class SocketListener(ConnectionListener, Protocol):
    """Takes a WebSocket's events."""

    def message_grew(self, size: int) -> None:
        """``size`` bytes of the message that is arriving are held; 0: none is incomplete."""

    def frame_arrived(self) -> bool:
        """Count a frame that takes the work of a message and is none. False: the peer has sent too many."""


class _Config(uvicorn.Config):
    """uvicorn's configuration with a clock for its connections."""

    clock: Clock


class _Observed(asyncio.Protocol, ABC):
    """Passes a connection's events to a listener, beside uvicorn, and parses its input in slices.

    A read of 256 KiB can hold 13,000 requests or 43,000 frames, which would hold the loop for most of a second.
    """

    __slots__ = ("_goes_on", "_held", "_stall", "listener")

    slice_bytes: ClassVar[int]
    """Input that is parsed in one piece: as many of the smallest requests or frames take about 5 ms."""
    listener: ConnectionListener | None
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    config: uvicorn.Config
    _stall: StallTimer | None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.listener = self._stall = None
        self._held = b""
        """Input that is not parsed yet. No more is read while there is some."""
        self._goes_on = False
        """Whether the loop has been told to parse what is held."""
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._held or len(data) > self.slice_bytes:
            self._parse_slices(self._held + data)
        else:
            self._parse(data)

    def _parse_slices(self, data: bytes) -> None:
        """Parse input until the connection's turn is over or an earlier request or message must be taken first."""
        monotonic_us = cast(_Config, self.config).clock.monotonic_us
        self._held, at, until = b"", 0, monotonic_us() + _TURN_US
        while at < len(data):
            if at and (self._input_waits() or monotonic_us() >= until):
                self._held = data[at:]
                self._hold()
                return
            self._parse(data[at : at + self.slice_bytes])
            at += self.slice_bytes

    def _hold(self) -> None:
        """Stop reading. Without an earlier request or message that waits, the loop goes on after its other work."""
        if self.transport.is_closing():
            self._held = b""
            return
        self.transport.pause_reading()
        if not self._input_waits():
            self.go_on()

    def go_on(self) -> bool:
        """Have held input parsed in a turn of its own: the caller may be in the middle of an event. False: none is."""
        if self._held and not self._goes_on:
            self._goes_on = True
            self.loop.call_soon(self._parse_held)
        return bool(self._held)

    def _parse_held(self) -> None:
        self._goes_on = False
        if self.transport.is_closing():
            self._held = b""
        elif not self._input_waits():
            self._parse_slices(self._held)
            if not self._held and not self._input_waits() and not self.transport.is_closing():
                self._read_on()

    @abstractmethod
    def _parse(self, data: bytes) -> None:
        """Parse input that is at most as long as a slice, or the rest of a handshake."""

    @abstractmethod
    def _input_waits(self) -> bool:
        """Whether what was parsed must be taken before more is."""

    @abstractmethod
    def _read_on(self) -> None:
        """Read more, as nothing is held."""

    def sweep(self, now: float) -> None:
        """Cut a connection that does not take what it was sent, unless a listener does that.

        Without a listener, a closed connection would stay until its last byte is taken.
        """
        if self.listener is not None and not self.transport.is_closing():
            return
        unsent = self.transport.get_write_buffer_size()
        if not unsent:
            self._stall = None
            return
        self._stall = self._stall or StallTimer()
        if self._stall.is_stalled(unsent, now):
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.listener is not None:
            self.listener.connection_paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.listener is not None:
            self.listener.connection_resumed()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.connection_lost()


class _Event:
    """An ``asyncio.Event`` of 48 bytes; it takes 760, even where nobody ever waits for it."""

    __slots__ = ("_event", "_is_set")

    def __init__(self, *, is_set: bool = False) -> None:
        self._is_set = is_set
        self._event: asyncio.Event | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self._event is not None:
            self._event.set()

    def clear(self) -> None:
        self._is_set = False
        if self._event is not None:
            self._event.clear()

    async def wait(self) -> Literal[True]:
        if not self._is_set:
            self._event = self._event or asyncio.Event()
            await self._event.wait()
        return True


class _Messages:
    """An unbounded ``asyncio.Queue`` with one reader; one of asyncio takes 2.9 KB. uvicorn bounds it by not reading."""

    __slots__ = ("_arrived", "_held")

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._arrived = _Event()

    def empty(self) -> bool:
        return not self._held

    def put_nowait(self, message: Any) -> None:
        self._held.append(message)
        self._arrived.set()

    async def get(self) -> Any:
        while not self._held:
            self._arrived.clear()
            await self._arrived.wait()
        return self._held.pop(0)


class _Pipeline(list[Any]):
    """The ``deque`` of uvicorn's waiting requests, without the 600 bytes that an empty one takes."""

    __slots__ = ()

    def appendleft(self, request: Any) -> None:
        self.insert(0, request)


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


class _Flow(FlowControl):
    """Resumes reading only when no pipelined request waits for the answer before it, and no input is held.

    Else each answer would let in another 256 KiB of requests, which take many times that in memory.
    """

    def __init__(self, transport: asyncio.Transport, connection: EdgeHttp) -> None:
        self._transport = transport
        self.read_paused = self.write_paused = False
        self._is_writable_event = _Event(is_set=True)  # type: ignore[assignment]
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


class EdgeHttp(_Observed, HttpToolsProtocol):
    """One HTTP connection."""

    # uvicorn's class fills a dict of 28 entries; from the 31st on Python gives each object a table of its own (1.5 KB)
    __slots__ = (
        "_again", "_discarded", "_head_began", "_head_bytes", "_head_timer", "_header_bytes", "_in_head", "_parsed",
        "_piece", "_refused", "_silent_bytes", "_too_large",
    )  # fmt: skip
    slice_bytes = 4096
    flow: _Flow

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._in_head = self._head_began = self._too_large = False
        self.url = b""
        self.headers = []
        self._head_bytes = self._header_bytes = 0
        self._silent_bytes = 0
        """Bytes received after a head without a parser event: the parser may be gathering them."""
        self._parsed = False
        """Whether the current piece has produced a parser event."""
        self._piece: bytes | None = None
        self._again: bytes | None = None
        self._refused = False
        """The connection's last answer was sent: further input is read and discarded."""
        self._discarded = 0
        """Bytes discarded."""
        super().connection_made(transport)
        self.pipeline = _Pipeline()  # type: ignore[assignment]
        self.flow = _Flow(transport, self)
        transport.set_write_buffer_limits(OUTBOX_BYTES_MAX, OUTBOX_BYTES_LOW)
        self._head_timer = self.loop.call_later(HEAD_S_MAX, self._end_head)

    def _end_head(self) -> None:
        """Cut a peer whose head has not come in time, unless nobody reads it because earlier requests come first."""
        if self._input_waits():
            self._head_timer = self.loop.call_later(HEAD_S_MAX, self._end_head)
        else:
            self.transport.abort()

    def _input_waits(self) -> bool:
        return bool(self.pipeline)

    def _read_on(self) -> None:
        self.flow.read_paused = True  # the hold has paused it
        if self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT:  # else the request's reader resumes
            self.flow.resume_reading()

    def _parse(self, data: bytes) -> None:
        if self.parser is None:  # a socket has taken over: its peer must not send before the handshake is answered
            return
        if self._refused:
            self._discard(data)
            return
        self._parsed = False
        self._again = data
        while self._again is not None:
            self._piece, self._again = self._again, None
            HttpToolsProtocol.data_received(self, self._piece)
        self._piece = None
        if self._refused:  # the parser has met an error, which was answered
            return
        if not self._in_head:
            self._silent_bytes = 0 if self._parsed else self._silent_bytes + len(data)
            if self._silent_bytes > HEADER_BYTES_MAX and not self.transport.is_closing():
                self._too_large = True
                self.send_400_response("")
            return
        # The parser reports a header when its line is complete: bound what it gathers until then. The piece in which
        # a head began also holds the end of the request before it
        if not self._head_began or self.cycle is None:
            self._head_bytes += len(data)
        self._head_began = False
        if self._head_bytes > HEADER_BYTES_MAX + URL_BYTES_MAX and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._parsed = True
        self._head_timer.cancel()
        self._end_idleness()
        if not self._declines_upgrade():
            before = self.cycle
            super().on_headers_complete()
            if self.cycle is not before:  # its task has not run yet
                self.cycle.message_event = _Event()  # type: ignore[assignment]
                self.scope["state"][RESPONSE] = self.cycle.transport = ResponseWriter(self)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        self._parsed = True
        if not self._declines_upgrade():
            super().on_message_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._end_idleness()
        self._header_bytes = self._head_bytes = self._discarded = 0
        self._in_head = self._head_began = True
        self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_S_MAX, self._end_head)
        self.scope["state"][CONNECTION] = self

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > URL_BYTES_MAX:
            self._refuse_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parsed = True
        if self._in_head:  # else a trailer, which carries neither credentials nor parameters
            super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > HEADER_BYTES_MAX:
            self._refuse_headers()

    def _refuse_headers(self) -> None:
        self._too_large = True
        raise ValueError("headers too large")  # the parser turns it into its own error, which ends the connection

    def send_400_response(self, msg: str) -> None:
        """Refuse input that is no valid request, then end the connection."""
        too_large = "the URL or the headers are over their limit"
        error = HeadersTooLarge(too_large) if self._too_large else BadRequest(msg)
        path = self.url.partition(b"?")[0].decode("latin-1")
        shape = anthropic_errors.error_body if anthropic_errors.is_anthropic(path, dict(self.headers)) else error_body
        status, body = error.http_status, shape(error, None)
        reason = b"Request Header Fields Too Large" if status == 431 else b"Bad Request"
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status, reason, len(body), body)
        )
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:  # an earlier request is still being answered
            self.transport.close()
            return
        self._linger()

    # --- idle connections ----------------------------------------------------------------------------------

    def _unset_keepalive_if_required(self) -> None:
        """Do nothing: uvicorn calls this for every received byte, but here the idle timer runs until a request begins.

        Neither a stray line end nor the rest of an unread body stops the timer.
        """

    def _end_idleness(self) -> None:
        """Stop the idle timer."""
        super()._unset_keepalive_if_required()

    # --- unread bodies -------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        self._parsed = True
        if self.cycle is not None and self.cycle.response_started:
            self._discard(body)
        else:
            super().on_body(body)

    def skip_body(self) -> None:
        """Discard the rest of the request's body while its response stays open.

        An unread body would pause reading, and a disconnect would go unnoticed.
        """
        if not self.pipeline and not self.transport.is_closing():
            self.cycle.body = bytearray()
            self.flow.resume_reading()

    def answer_begun(self) -> None:
        """Prepare for an answer that ends before the request's body has arrived.

        The peer then gets time to read the answer before the connection is closed.
        """
        if self.transport.is_closing() or self.pipeline or self.cycle.keep_alive or not self.cycle.more_body:
            return
        self.cycle.keep_alive = self._refused = True  # else uvicorn closes at the answer's end
        self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self.listener = None  # an idle connection need not keep what it has served
        if self._refused:
            self._linger()
        else:
            super().on_response_complete()

    def _linger(self) -> None:
        """End a connection whose peer may still be sending.

        A close over unread input would reset the connection, and the answer would be lost.
        """
        if not self.transport.is_closing():
            self.transport.write_eof()
            self._linger_on(-1, self.loop.time() + LINGER_S_MAX)

    def _linger_on(self, seen: int, until: float) -> None:
        """Close the connection once the peer sends no more, at the latest at ``until`` (loop time)."""
        if self._discarded == seen or self.loop.time() >= until:
            self.transport.close()
        else:
            self.loop.call_later(LINGER_IDLE_S_MAX, self._linger_on, self._discarded, until)

    def _discard(self, data: bytes) -> None:
        """Count unread input that is dropped, and cut a peer that sends too much of it."""
        self._discarded += len(data)
        if self._discarded > UNREAD_BYTES_MAX:
            self.transport.abort()

    # --- upgrades ------------------------------------------------------------------------------------------

    def _declines_upgrade(self) -> bool:
        """Whether the request offers another protocol that is not supported here."""
        parser = self.parser
        return parser.should_upgrade() and parser.get_method() != b"CONNECT" and not self._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """Parse a request once more without its offer of another protocol, such as the h2c of Java's client.

        The parser would take the body for that protocol's data and lose it, or read it as a request.
        """
        upgrade = sys.exc_info()[1]
        if not isinstance(upgrade, httptools.HttpParserUpgrade) or not self._declines_upgrade():
            return  # CONNECT, which is refused
        if self._piece is None:
            return
        head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._again = b"".join(head) + b"\r\n" + self._piece[upgrade.args[0] :]

    def handle_websocket_upgrade(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.send_400_response("An upgrade cannot follow a request that is still being answered.")
            return
        super().handle_websocket_upgrade()
        socket: EdgeWebSocket = self.transport.get_protocol()  # type: ignore[assignment]
        if not socket.handshake_initiated:  # its parser has its own limits, and does not answer beyond them
            self.connections.discard(socket)
            self.connections.add(self)
            self.transport.set_protocol(self)
            self.send_400_response("This is not a WebSocket's handshake, or a line of it is too long.")
            return
        # The parser and its protocol hold each other: an open socket need not keep them
        self.parser = self.scope = self.headers = self.cycle = self.flow.connection = None  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_timer.cancel()
        self._end_idleness()
        self._held = b""
        self.scope = self.cycle = self.flow.connection = None  # type: ignore[assignment] # each leads back here


class EdgeWebSocket(_Observed, WebSocketsSansIOProtocol):
    """One WebSocket. ``send_text`` writes a finished text frame straight to the transport."""

    # Half of uvicorn's attributes are slots here, so that its dict stays below 31 entries (see EdgeHttp)
    __slots__ = (
        "_discarded", "_incomplete", "_is_deaf", "close_timeout", "close_timer", "curr_msg_data_type", "frames",
        "initial_response", "last_ping_rtt", "pending_ping_payload", "ping_interval", "ping_sent_at", "ping_timeout",
        "ping_timer", "pong_timer", "request", "response",
    )  # fmt: skip

    slice_bytes = 2048
    listener: SocketListener | None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._discarded = self._incomplete = 0
        self._is_deaf = False
        """Whether input is discarded, because the peer has sent too many frames."""
        self.queue = _Messages()  # type: ignore[assignment]
        self.writable = _Event(is_set=True)  # type: ignore[assignment]
        super().connection_made(transport)

    def handle_connect(self, event: Any) -> None:
        self.transport.set_write_buffer_limits(OUTBOX_BYTES_MAX, OUTBOX_BYTES_LOW)
        self.app_state = {**self.app_state, CONNECTION: self}
        super().handle_connect(event)

    def trim(self) -> None:
        """Release what only the handshake needed: a few hundred bytes per open socket."""
        self.request = self.response = None  # type: ignore[assignment]
        self.scope = {}  # type: ignore[typeddict-item]
        self.app_state = {}

    def handle_ping(self) -> None:
        self._count_frame()
        if self.writable.is_set() and not self.close_sent:
            super().handle_ping()
        else:  # a client that sends pings and reads no pongs would fill the buffer
            self.conn.data_to_send()

    def handle_pong(self, event: Any) -> None:
        self._count_frame()
        super().handle_pong(event)

    def _count_frame(self) -> None:
        """Count a frame against the peer's messages; once it has sent too many, discard the rest."""
        if self._is_deaf or (self.listener.frame_arrived() if self.listener is not None else not self.close_sent):
            return
        self._is_deaf = True
        if self.close_timer is not None:
            self.close_timer.cancel()
        self._linger_on(-1, self.loop.time() + LINGER_S_MAX)

    def handle_cont(self, event: Any) -> None:
        if not event.fin and len(event.data) < _FRAGMENT_BYTES:
            self._count_frame()
        # One buffer: a list of tiny fragments would take many times their bytes, and one of empty ones has no limit
        (whole,) = self.frames
        joined = whole if isinstance(whole, bytearray) else bytearray(whole)
        joined += event.data
        self.frames = [joined]  # type: ignore[list-item]
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        if self.close_sent:
            self._count_frame()
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:  # a client's error, which uvicorn would log with a traceback
                self.frames = []
                self.conn.send_close(1007, "the message is not UTF-8")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        """Close after input that breaks the protocol or a limit.

        A close over unread input would reset the connection, and the close reason would be lost.
        """
        close = self.conn.close_sent
        if self.close_sent or close is None:
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.read_on()
        self._linger_on(-1, self.loop.time() + LINGER_S_MAX)

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.queue.empty():
            self.read_on()
        return message

    def read_on(self) -> None:
        """Read more: no message waits, or the rest is read up to the peer's answer to a close."""
        if self.read_paused:
            self.read_paused = False
            if not self.go_on():
                self._read_on()

    def _read_on(self) -> None:
        self.transport.resume_reading()

    def _input_waits(self) -> bool:
        return self.read_paused

    def data_received(self, data: bytes) -> None:
        if self.handshake_initiated:
            super().data_received(data)
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        if self._is_deaf or self.conn.parser_exc is not None:
            self._discarded += len(data)
            return
        WebSocketsSansIOProtocol.data_received(self, data)
        incomplete = len(self.conn.reader.buffer) + (len(self.frames[0]) if self.frames else 0)
        if incomplete != self._incomplete and self.listener is not None:
            self._incomplete = incomplete
            self.listener.message_grew(incomplete)

    def _linger_on(self, seen: int, until: float) -> None:
        """Close the connection once the peer sends no more, at the latest at ``until`` (loop time)."""
        if self._discarded == seen or self.loop.time() >= until:
            self.transport.close()
        else:
            self.close_timer = self.loop.call_later(LINGER_IDLE_S_MAX, self._linger_on, self._discarded, until)

    def keepalive_timeout(self) -> None:
        if not self.writable.is_set():
            # The ping waits behind data that the peer has not taken yet; the sweep detects a peer that takes nothing
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()

    def send_text(self, payload: bytes) -> None:
        if self.close_sent or self.disconnected:
            return
        size = len(payload)
        if size < 126:
            self.transport.write(b"\x81%c%b" % (size, payload))
        elif size < 65536:
            self.transport.write(b"\x81\x7e%b%b" % (size.to_bytes(2, "big"), payload))
        else:
            self.transport.write(b"\x81\x7f%b%b" % (size.to_bytes(8, "big"), payload))


def _is_no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


class EdgeServer(uvicorn.Server):
    """uvicorn without its signal handlers: the gateway handles SIGTERM."""

    async def sweep(self) -> None:
        """Cut connections every few seconds that do not take what they were sent."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            for number, connection in enumerate(tuple(self.server_state.connections)):
                connection.sweep(loop.time())  # type: ignore[union-attr]
                if number % 500 == 499:
                    await asyncio.sleep(0)  # tokens go first

    def abort(self) -> None:
        """Cut all connections, whatever they have not taken yet."""
        for connection in tuple(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the address. Raises OSError when the address cannot be bound."""
        log = logging.getLogger("uvicorn.error")
        log.addFilter(_is_no_error)  # the error is raised, and need not be logged too
        try:
            await super().startup(sockets)
        except SystemExit as ended:
            where = f"{self.config.host} port {self.config.port}"
            why = reason(ended.__context__ or ended)
            raise OSError(f"cannot listen on {where}: {why}; choose another --port or --host") from None
        finally:
            log.removeFilter(_is_no_error)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: Any, clock: Clock, host: str, port: int) -> EdgeServer:
    config = _Config(
        app,
        host=host,
        port=port,
        http=EdgeHttp,
        ws=EdgeWebSocket,
        loop="none",
        interface="asgi3",
        proxy_headers=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,  # longer than a load balancer's idle limit, so that it closes first
        timeout_graceful_shutdown=5,
        ws_max_size=WS_MESSAGE_BYTES_MAX,
        ws_ping_interval=WS_PROTOCOL_PING_S,
        ws_ping_timeout=WS_PROTOCOL_PING_S,
        ws_per_message_deflate=False,
    )
    config.clock = clock
    return EdgeServer(config)
