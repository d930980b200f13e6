"""uvicorn's HTTP protocol with limits on heads, refusals that reach their client, and a writer for each response."""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
)
from stream_fabric.stream.ids import TenantId
from stream_gw.dialects.anthropic import errors as anthropic_errors
from stream_gw.dialects.errors import error_body
from stream_gw.transport.connection.response import Flow, PlainWriter, ResponseWriter
from stream_gw.transport.connection.turns import CONNECTION, RESPONSE, Config, Connection
from stream_gw.transport.connection.waiting import Event, Pipeline
from stream_gw.transport.connection.websocket import EdgeWebSocket


class EdgeHttp(Connection, HttpToolsProtocol):
    """One HTTP connection."""

    # uvicorn's class fills a dict of 28 entries; from the 31st on Python gives each object a table of its own (1.5 KB)
    __slots__ = (
        "_again", "_discarded", "_head_began", "_head_bytes", "_head_timer", "_header_bytes", "_in_head", "_parsed",
        "_piece", "_refused", "_silent_bytes", "_too_large", "tenant",
    )  # fmt: skip
    slice_bytes = 4096
    flow: Flow

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.tenant: TenantId | None = None
        """Tenant of the last request that was authenticated."""
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
        self.pipeline = Pipeline()  # type: ignore[assignment]
        self.flow = Flow(transport, self)
        transport.set_write_buffer_limits(OUTBOX_BYTES_MAX, OUTBOX_BYTES_LOW)
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_S_MAX, self._end_head)
        config = cast(Config, self.config)
        if len(self.connections) > config.connections_max:
            config.cut += 1
            config.on_cut()
            transport.abort()

    def _end_head(self) -> None:
        """Cut a peer whose head has not come in time, unless nobody reads it because earlier requests come first."""
        if self._input_waits():
            self._head_timer = self.loop.call_later(HEAD_S_MAX, self._end_head)
        else:
            self.transport.abort()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None  # an open stream need not keep it

    @property
    def owner(self) -> TenantId | None:
        return self.tenant

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
        self._cancel_head_timer()
        self._end_idleness()
        if not self._declines_upgrade():
            before = self.cycle
            super().on_headers_complete()
            if self.cycle is not before:  # its task has not run yet
                self.cycle.message_event = Event()  # type: ignore[assignment]
                self.end_keep_alive()
                writer = PlainWriter if self.scope["http_version"] == "1.0" else ResponseWriter
                self.scope["state"][RESPONSE] = self.cycle.transport = writer(self)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        self._parsed = True
        if not self._declines_upgrade():
            super().on_message_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._end_idleness()
        self._header_bytes = self._head_bytes = self._discarded = 0
        self._in_head = self._head_began = True
        self._cancel_head_timer()
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

    def end_keep_alive(self) -> None:
        """Close the connection after the current answer, which says so, if the server drains.

        A client or an L4 load balancer that kept the connection would send its next requests to this gateway, and each
        would be refused. An answer whose head is out can no longer say it.
        """
        if cast(Config, self.config).draining and self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

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
        self.release_unsent()
        # The parser and its protocol hold each other: an open socket need not keep them
        self.parser = self.scope = self.headers = self.cycle = self.flow.connection = None  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_head_timer()
        self._end_idleness()
        self._held = b""
        self.scope = self.cycle = self.flow.connection = None  # type: ignore[assignment] # each leads back here
