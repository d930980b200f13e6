"""uvicorn's protocols with what the token path needs: header limits, and a direct line between an open response's
transport and its outlet (bytes out without a task switch, drained and lost connections heard at once).

``docs/adr/0002-direct-transport.md`` has the measurement behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator, Sized
from typing import Any, Protocol

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from stream_fabric.limits import (
    HEAD_S_MAX,
    HEADER_BYTES_MAX,
    LINGER_IDLE_S_MAX,
    LINGER_S_MAX,
    OUTBOX_BYTES_LOW,
    OUTBOX_BYTES_MAX,
    STALL_S_MAX,
    UNREAD_BYTES_MAX,
    URL_BYTES_MAX,
    WS_MESSAGE_BYTES_MAX,
    WS_PROTOCOL_PING_S,
)

CONNECTION = "stream_gw.connection"
"""Where a scope's ``state`` holds its connection."""

_SWEEP_S = 5.0


class ConnectionListener(Protocol):
    """Hears what becomes of a connection while a response or a socket is open."""

    def connection_paused(self) -> None: ...

    def connection_resumed(self) -> None: ...

    def connection_lost(self) -> None: ...


class _Heard(asyncio.Protocol):
    """Tells a listener, beside uvicorn, what becomes of the connection."""

    listener: ConnectionListener | None = None
    transport: asyncio.Transport
    _unsent = 0
    _unmoved_since = 0.0

    def sweep(self, now: float) -> None:
        """Cut a connection that takes nothing of what it was sent, where no listener looks after that: closed, it would
        stay until the last byte is taken."""
        if self.listener is not None and not self.transport.is_closing():
            return
        unsent = self.transport.get_write_buffer_size()
        if not self._unmoved_since or unsent < self._unsent:
            self._unmoved_since = now
        self._unsent = unsent
        if not unsent:
            self._unmoved_since = 0.0
        elif now - self._unmoved_since > STALL_S_MAX:
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


class _Flow(FlowControl):
    """Reads on only when no request ``waits`` for the answer to the one before: else each answer would let another
    256 KiB of requests in, and they take many times that."""

    def __init__(self, transport: asyncio.Transport, waits: Sized) -> None:
        super().__init__(transport)
        self._waits = waits

    def resume_reading(self) -> None:
        if not self._waits:
            super().resume_reading()


class EdgeHttp(_Heard, HttpToolsProtocol):
    """One HTTP connection."""

    _in_head = False
    _head_began = False
    _head_bytes = 0
    _silent_bytes = 0
    """What has come behind a head without the parser's telling of anything: it may be gathering it."""
    _told = False
    _piece: bytes | None = None
    _again: bytes | None = None
    _too_large = False
    _refused = False
    """The connection's last answer is out: what comes is read only to be thrown away."""
    _thrown_away = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        transport.set_write_buffer_limits(OUTBOX_BYTES_MAX, OUTBOX_BYTES_LOW)
        self._head_timer = self.loop.call_later(HEAD_S_MAX, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._throw_away(data)
            return
        self._told = False
        self._again = data
        while self._again is not None:
            self._piece, self._again = self._again, None
            super().data_received(self._piece)
        self._piece = None
        if not self._in_head:
            self._silent_bytes = 0 if self._told else self._silent_bytes + len(data)
            if self._silent_bytes > HEADER_BYTES_MAX and not self.transport.is_closing():
                self._too_large = True
                self.send_400_response("")
            return
        # The parser tells of a header when its line is whole: bound what it gathers until then, too. The piece in which
        # a head began holds the end of the request before it
        if not self._head_began or self.cycle is None:
            self._head_bytes += len(data)
        self._head_began = False
        if self._head_bytes > HEADER_BYTES_MAX + URL_BYTES_MAX and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._told = True
        self._head_timer.cancel()
        self._end_idleness()
        if not self._declines_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._told = True
        if not self._declines_upgrade():
            super().on_message_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._end_idleness()
        self._header_bytes = self._head_bytes = self._thrown_away = 0
        self._in_head = self._head_began = True
        self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_S_MAX, self.transport.abort)
        self.scope["state"][CONNECTION] = self

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > URL_BYTES_MAX:
            self._refuse_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._told = True
        if self._in_head:  # else a trailer, which says nothing of who asks or for what
            super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > HEADER_BYTES_MAX:
            self._refuse_headers()

    def _refuse_headers(self) -> None:
        self._too_large = True
        raise ValueError("headers too large")  # the parser turns it into its own error, which ends the connection

    def send_400_response(self, msg: str) -> None:
        status, code = (431, "headers_too_large") if self._too_large else (400, "invalid_request")
        what = "URL or headers over the limit" if status == 431 else msg
        body = (
            f'{{"error":{{"message":"{what}","type":"invalid_request_error","code":"{code}","param":null,'
            f'"request_id":null,"retriable":false}}}}'
        ).encode()
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
        """Called at every byte that comes. An idle connection's time goes on until a request begins: not a stray line's
        end, nor the rest of a body that nobody reads, ends it."""

    def _end_idleness(self) -> None:
        super()._unset_keepalive_if_required()

    # --- bodies that nobody reads --------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        self._told = True
        if self.cycle is not None and self.cycle.response_started:
            self._throw_away(body)
        else:
            super().on_body(body)

    def skip_body(self) -> None:
        """A response opens, and stays open. Whatever is left of its request's body is thrown away as it comes: unread
        it would stop the reading, and with it the notice of a disconnect."""
        if not self.pipeline and not self.transport.is_closing():
            self.cycle.body = bytearray()
            self.flow.resume_reading()

    def answer_begun(self) -> None:
        """An answer's head is out. If the connection is to end with it while the request's body still comes, it does
        so only when the peer has had time to read the answer."""
        if self.pipeline or self.cycle.keep_alive or not self.cycle.more_body or self.transport.is_closing():
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
        """End a connection whose peer may still be sending: closed over unread input it would be reset, and the answer
        with it."""
        if not self.transport.is_closing():
            self.transport.write_eof()
            self._linger_on(-1, self.loop.time() + LINGER_S_MAX)

    def _linger_on(self, seen: int, until: float) -> None:
        if self._thrown_away == seen or self.loop.time() >= until:
            self.transport.close()
        else:
            self.loop.call_later(LINGER_IDLE_S_MAX, self._linger_on, self._thrown_away, until)

    def _throw_away(self, data: bytes) -> None:
        self._thrown_away += len(data)
        if self._thrown_away > UNREAD_BYTES_MAX:
            self.transport.abort()

    # --- upgrades ------------------------------------------------------------------------------------------

    def _declines_upgrade(self) -> bool:
        parser = self.parser
        return parser.should_upgrade() and parser.get_method() != b"CONNECT" and not self._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """Another protocol is offered, as Java's client offers h2c. The parser takes what follows for that protocol's
        and would lose the body, or read it as a request: so the request is read once more, without the offer."""
        upgrade = sys.exc_info()[1]
        if not isinstance(upgrade, httptools.HttpParserUpgrade) or not self._declines_upgrade():
            return  # CONNECT, which is refused
        assert self._piece is not None
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
        if not socket.handshake_initiated:  # its parser has limits of its own, and answers nothing beyond them
            self.connections.discard(socket)
            self.connections.add(self)
            self.transport.set_protocol(self)
            self.send_400_response("This is not a WebSocket's handshake, or a line of it is too long.")
            return
        # The parser and its protocol hold each other: an open socket need not keep them
        self.parser = self.scope = self.headers = self.cycle = None  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_timer.cancel()
        self._end_idleness()


class EdgeWebSocket(_Heard, WebSocketsSansIOProtocol):
    """One WebSocket. ``send_text`` writes a finished text frame straight to the transport."""

    _thrown_away = 0

    def handle_connect(self, event: Any) -> None:
        self.transport.set_write_buffer_limits(OUTBOX_BYTES_MAX, OUTBOX_BYTES_LOW)
        self.app_state = {**self.app_state, CONNECTION: self}
        super().handle_connect(event)

    def trim(self) -> None:
        """After the handshake, forget what only it needed: an open socket keeps a few hundred bytes less."""
        self.request = self.response = None  # type: ignore[assignment]
        self.scope = {}  # type: ignore[typeddict-item]
        self.app_state = {}

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:  # who sends pings and reads no pongs would fill our memory with them
            self.conn.data_to_send()

    def handle_cont(self, event: Any) -> None:
        # One buffer: a list of tiny fragments would take many times their bytes, and one of empty ones has no limit
        (whole,) = self.frames
        joined = whole if isinstance(whole, bytearray) else bytearray(whole)
        joined += event.data
        self.frames = [joined]  # type: ignore[list-item]
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:  # a client's mistake, which uvicorn would log with a traceback
                self.frames = []
                self.conn.send_close(1007, "the message is not UTF-8")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        """What came breaks the protocol or a limit. The peer may still be sending: closed over unread input the
        connection would be reset, and the close with its reason with it."""
        if self.close_sent:
            return
        close = self.conn.close_sent
        assert close is not None
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self._linger_on(-1, self.loop.time() + LINGER_S_MAX)

    def data_received(self, data: bytes) -> None:
        if self.conn.parser_exc is None:
            super().data_received(data)
        else:
            self._thrown_away += len(data)

    def _linger_on(self, seen: int, until: float) -> None:
        if self._thrown_away == seen or self.loop.time() >= until:
            self.transport.close()
        else:
            self.close_timer = self.loop.call_later(LINGER_IDLE_S_MAX, self._linger_on, self._thrown_away, until)

    def keepalive_timeout(self) -> None:
        if not self.writable.is_set():
            # Our ping waits behind what the peer has yet to take; whether it takes anything is the sweep's to see
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


class EdgeServer(uvicorn.Server):
    """uvicorn without its signal handlers: what SIGTERM means is the gateway's to say."""

    async def sweep(self) -> None:
        """Ends to connections that take nothing, whatever they were answered."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            for number, connection in enumerate(tuple(self.server_state.connections)):
                connection.sweep(loop.time())  # type: ignore[union-attr]
                if number % 500 == 499:
                    await asyncio.sleep(0)  # tokens go first

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises OSError when the address is not to be had."""
        try:
            await super().startup(sockets)
        except SystemExit:
            config = self.config
            raise OSError(f"cannot listen on {config.host} port {config.port}; its reason is above") from None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: Any, host: str, port: int) -> EdgeServer:
    return EdgeServer(
        uvicorn.Config(
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
    )
