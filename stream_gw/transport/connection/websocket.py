"""uvicorn's WebSocket protocol with limits on frames and fragments, and a direct path for finished ones."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from stream_fabric.limits import LINGER_IDLE_S_MAX, LINGER_S_MAX, OUTBOX_BYTES_LOW, OUTBOX_BYTES_MAX
from stream_fabric.stream.ids import TenantId
from stream_gw.transport.connection.turns import CONNECTION, Connection, SocketListener
from stream_gw.transport.connection.waiting import Event, Messages

_FRAGMENT_BYTES = 1024
"""A smaller fragment of a message counts as a message of its own: its work does not depend on its size."""


class EdgeWebSocket(Connection, WebSocketsSansIOProtocol):
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
        self.queue = Messages()  # type: ignore[assignment]
        self.writable = Event(is_set=True)  # type: ignore[assignment]
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
        if self.queue.empty():  # not before: what comes behind an auth message is for who has been authenticated
            self.read_on()
        return await self.queue.get()

    def read_on(self) -> None:
        """Read more: no message waits, or the rest is read up to the peer's answer to a close."""
        if self.read_paused:
            self.read_paused = False
            if not self.go_on():
                self._read_on()

    def _read_on(self) -> None:
        self.transport.resume_reading()

    @property
    def owner(self) -> TenantId | None:
        return None if self.listener is None else self.listener.tenant

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
