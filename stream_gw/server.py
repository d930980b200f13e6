"""uvicorn's protocols with what the token path needs: header limits, and a direct line between an open response's
transport and its outlet (bytes out without a task switch, drained and lost connections heard at once).

``docs/adr/0002-direct-transport.md`` has the measurement behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Protocol

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

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

CONNECTION = "stream_gw.connection"
"""Where a scope's ``state`` holds its connection."""


class ConnectionListener(Protocol):
    """Hears what becomes of a connection while a response or a socket is open."""

    def connection_paused(self) -> None: ...

    def connection_resumed(self) -> None: ...

    def connection_lost(self) -> None: ...


class _Heard(asyncio.Protocol):
    """Tells a listener, beside uvicorn, what becomes of the connection."""

    listener: ConnectionListener | None = None

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


class EdgeHttp(_Heard, HttpToolsProtocol):
    """One HTTP connection."""

    _in_head = False
    _head_began = False
    _head_bytes = 0
    _too_large = False
    _refused = False
    """The connection's last answer is out: what comes is read only to be thrown away."""
    _thrown_away = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(OUTBOX_BYTES_MAX, OUTBOX_BYTES_LOW)
        self._head_timer = self.loop.call_later(HEAD_S_MAX, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._throw_away(data)
            return
        super().data_received(data)
        if not self._in_head:
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
        self._head_timer.cancel()
        super().on_headers_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
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

    # --- bodies that nobody reads --------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
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

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        # The parser and its protocol hold each other: an open socket need not keep them
        self.parser = self.scope = self.headers = self.cycle = None  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_timer.cancel()


class EdgeWebSocket(_Heard, WebSocketsSansIOProtocol):
    """One WebSocket. ``send_text`` writes a finished text frame straight to the transport."""

    def handle_connect(self, event: Any) -> None:
        self.transport.set_write_buffer_limits(OUTBOX_BYTES_MAX, OUTBOX_BYTES_LOW)
        self.app_state = {**self.app_state, CONNECTION: self}
        super().handle_connect(event)

    def trim(self) -> None:
        """After the handshake, forget what only it needed: an open socket keeps a few hundred bytes less."""
        self.request = self.response = None  # type: ignore[assignment]
        self.scope = {}  # type: ignore[typeddict-item]
        self.app_state = {}

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
