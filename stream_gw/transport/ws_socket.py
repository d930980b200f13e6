"""One WebSocket and its channels: what goes out, backpressure and liveness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from stream_fabric.errors import Draining, StreamGwError, Unauthenticated
from stream_fabric.events import ReadEnd
from stream_fabric.limits import STALL_S_MAX, WS_APP_PING_S, WS_AUTH_S_MAX, WS_REPLIES_BYTES_MAX
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import End, Status, decode
from stream_fabric.stream.reader import Gap, Reset
from stream_gw.auth import Principal
from stream_gw.dialects.base import Encoder
from stream_gw.transport.connection import EdgeWebSocket
from stream_gw.transport.stall import StallTimer
from stream_gw.transport.ws_messages import encode

_MESSAGES_PER_S = 200.0
_MESSAGES_BURST = 1000.0
_BAD_MESSAGES_MAX = 10
_CLOSE_S = 5.0
_RECONNECT_S = 1.0
_STALLED = 4408
_READ_END: dict[int, ReadEnd] = {_STALLED: "stalled", Draining.close_code: "drained"}
"""How a trace names the end of a reader whose socket was closed with this code."""


class Handle(Protocol):
    """The channel's subscription to a stream, as far as the channel uses it."""

    @property
    def head(self) -> int:
        """Last seq of the stream that this gateway has heard of."""

    def resume(self) -> None:
        """Continue the delivery, because the socket has drained."""

    def close(self, why: ReadEnd = "left") -> None: ...


class Channel:
    """``Outlet`` of one stream on a socket."""

    __slots__ = (
        "_early",
        "encoder",
        "end_frame",
        "full",
        "handle",
        "number",
        "reports_queue",
        "seq",
        "socket",
        "stream",
    )

    def __init__(self, socket: Socket, number: int) -> None:
        self.socket = socket
        self.number = number
        self.reports_queue = False
        self.full = socket.full
        self.stream = ""
        self.seq = 0
        self.encoder: Encoder | None = None
        self.handle: Handle | None = None
        self.end_frame = b""
        self._early: list[bytes] | None = []
        """Messages that came before ``ok`` was sent; None: it was sent."""

    @property
    def is_open(self) -> bool:
        """False once the client has unsubscribed, the stream has ended, or the socket has gone."""
        return self.socket.channels.get(self.number) is self

    def set_stream(self, stream: str, encoder: Encoder | None, seq: int) -> None:
        """Set the stream, its encoder and the seq that it continues from; called before any frame."""
        self.stream, self.encoder, self.seq = stream, encoder, seq

    def open(self, epoch: str, head: int, status: str) -> None:
        """Send ``ok`` and the messages that came before it."""
        early, self._early = self._early, None
        self.send_ok(epoch, head, status)
        for text in early or ():
            self.socket.send(text)

    def leave(self, why: ReadEnd = "left") -> None:
        """End the subscription and let it go: each would keep the other until the cycle collector finds them."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.close(why)

    def _send_or_hold(self, text: bytes) -> None:
        """Send a message, or keep it until ``ok`` was sent."""
        if self._early is not None:
            self._early.append(text)
        else:
            self.socket.send(text)

    def send_ok(self, epoch: str, head: int, status: str) -> None:
        self.socket.reply(
            {"t": "ok", "ch": self.number, "stream": self.stream, "epoch": epoch, "head": head, "status": status}
        )

    def snapshot(self, seq: int, chunks: list[bytes]) -> None:
        """Send all frames up to ``seq`` as accumulated chunks."""
        self._send_or_hold(
            b'{"t":"d","ch":%d,"a":%d,"s":%d,"f":[%b]}' % (self.number, self.seq, seq, b",".join(chunks))
        )
        self.seq = seq

    # --- Outlet --------------------------------------------------------------------------------------------

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        encoder = self.encoder
        assert encoder is not None, "set_stream comes before the first frame"
        last = first + len(lines) - 1
        if lines[-1].startswith(b'{"k":"end"'):
            self.end_frame = lines[-1]
        chunks = encoder.chunks(lines)
        if last - 1 == self.seq:
            text = b'{"t":"d","ch":%d,"s":%d,"f":[%b]}' % (self.number, last, b",".join(chunks))
        else:
            text = b'{"t":"d","ch":%d,"a":%d,"s":%d,"f":[%b]}' % (self.number, self.seq, last, b",".join(chunks))
        self.seq = last
        if self._early is not None:
            self._early.append(text)
        else:
            self.socket.send(text)

    def _is_positional(self) -> bool:
        """Whether the dialect's chunks only make sense after all chunks before them."""
        return self.encoder is not None and self.encoder.needs_history

    def gap(self, gap: Gap) -> bool:
        if self._is_positional():
            return False
        self._send_or_hold(encode({"t": "gap", "ch": self.number, "from": gap.start, "to": gap.stop}))
        self.seq = gap.stop
        return True

    def reset(self, reset: Reset) -> bool:
        if self._is_positional():
            return False
        self._send_or_hold(encode({"t": "reset", "ch": self.number, "epoch": str(reset.epoch), "to": reset.to}))
        self.seq = reset.to
        return True

    def epoch_changed(self, epoch: str, head: int) -> None:
        if self._early is None:
            self.send_ok(epoch, head, "live")

    def queued(self, position: int, of: int, warming_s: float | None) -> None:
        if self.reports_queue and not self.socket.full:
            message = {"t": "queued", "ch": self.number, "position": position, "of": of}
            if warming_s is not None:
                message["warming_s"] = round(warming_s)
            self._send_or_hold(encode(message))

    def end(self, status: Status) -> None:
        message: dict[str, Any] = {"t": "end", "ch": self.number, "s": self.seq, "status": status}
        end = decode(self.end_frame) if self.end_frame else None
        if isinstance(end, End):
            message["usage"] = end.usage
            if end.error is not None:
                message["error"] = end.error
        self._send_or_hold(encode(message))
        self.socket.forget(self)

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        resume_at = {"stream": self.stream, "cursor": str(cursor)}
        self._send_or_hold(encode(self.socket.error_message(error, ch=self.number) | resume_at))
        self.socket.forget(self)


class Socket:
    """One connection's state: its channels, its message credit, its liveness. A ``ConnectionListener``."""

    __slots__ = (
        "_bad_messages", "_connection", "_credit", "_credited_at", "_monotonic", "_opened_at", "_pinged_at", "_stall",
        "_unread_replies", "channels", "close_code", "full", "hinted", "name", "principal",
    )  # fmt: skip

    def __init__(self, connection: EdgeWebSocket, name: str, monotonic: Callable[[], float]) -> None:
        self._connection = connection
        self._monotonic = monotonic
        self.name = name
        self.full = False
        self.channels: dict[int, Channel] = {}
        """Channels that are open or being opened."""
        self.principal: Principal | None = None
        self.close_code: int | None = None
        self.hinted = False
        """Whether the client was asked to reconnect elsewhere."""
        self._opened_at = monotonic()
        self._pinged_at = self._opened_at
        self._stall: StallTimer | None = None
        self._unread_replies = 0
        """Bytes of replies sent since the socket became full."""
        self._credit = _MESSAGES_BURST
        self._credited_at = self._opened_at
        self._bad_messages = 0
        connection.listener = self

    # --- out -----------------------------------------------------------------------------------------------

    def send(self, text: bytes) -> None:
        """Send a channel's message; the hot call."""
        self._connection.send_text(text)

    def reply(self, message: dict[str, Any]) -> None:
        """Send an answer to a client's message. Close a client that sends but does not read its replies."""
        text = encode(message)
        if self.full:
            self._unread_replies += len(text)
            if self._unread_replies > WS_REPLIES_BYTES_MAX:
                self.close(_STALLED, "the client does not read its replies; reconnect with the cursor")
                return
            if self._stall is not None:
                self._stall.sent(len(text))
        self.send(text)

    def error_message(self, error: StreamGwError, *, ch: int | None = None, id: str | None = None) -> dict[str, Any]:
        """Make an ``error`` message for a channel (``ch``), a request (``id``) or the socket."""
        message: dict[str, Any] = {
            "t": "error",
            "code": error.code,
            "message": error.message,
            "retriable": error.retriable,
        }
        if ch is not None:
            message["ch"] = ch
        if id is not None:
            message["id"] = id
        if error.retry_after_s is not None:
            message["retry_after_s"] = error.retry_after_s
        message["request_id"] = self.name
        return message

    def reply_error(self, error: StreamGwError, *, ch: int | None = None, id: str | None = None) -> None:
        self.reply(self.error_message(error, ch=ch, id=id))

    def greet(self, principal: Principal) -> None:
        """Set the authenticated caller and send ``hi``."""
        self.principal = principal
        self.reply({"t": "hi", "conn": self.name, "ping_ms": int(WS_APP_PING_S * 1000)})

    def forget(self, channel: Channel) -> None:
        """Remove a channel that has ended."""
        channel.handle = None
        if channel.is_open:
            del self.channels[channel.number]

    def close(self, code: int, reason: str) -> None:
        """Start the closing handshake; ``Session.run`` then sees the disconnect."""
        connection = self._connection
        if self.close_code is None and not connection.close_sent and not connection.transport.is_closing():
            self.close_code = code
            connection.conn.send_close(code, reason[:120])
            connection.transport.write(b"".join(connection.conn.data_to_send()))
            connection.close_sent = True
            connection.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
            # Reading goes on until the peer's answer: a transport closed over unread input resets our close away
            if connection.read_paused:
                connection.read_paused = False
                connection.transport.resume_reading()
            connection.close_timer = asyncio.get_running_loop().call_later(_CLOSE_S, connection.transport.abort)

    def ask_to_reconnect(self, after_s: float) -> None:
        """Ask the client to reconnect after ``after_s``, because this gateway drains; close a little later."""
        self.hinted = True
        self.reply({"t": "reconnect", "after_ms": int(after_s * 1000)})
        reason = "this gateway is shutting down; reconnect"
        asyncio.get_running_loop().call_later(after_s + _RECONNECT_S, self.close, Draining.close_code, reason)

    # --- in ------------------------------------------------------------------------------------------------

    def take_credit(self) -> bool:
        """Count one message. False: the client has sent more than its rate allows."""
        now = self._monotonic()
        self._credit = min(_MESSAGES_BURST, self._credit + (now - self._credited_at) * _MESSAGES_PER_S)
        self._credited_at = now
        self._credit -= 1
        return self._credit >= 0

    @property
    def rate_limit(self) -> str:
        """Close reason for a client that sends too many messages."""
        return f"more than {_MESSAGES_PER_S:g} messages per second"

    def take_bad_message(self) -> bool:
        """Count one malformed message. False: the client has used up its allowance."""
        self._bad_messages += 1
        return self._bad_messages < _BAD_MESSAGES_MAX

    # --- ConnectionListener --------------------------------------------------------------------------------

    def connection_paused(self) -> None:
        self.full = True
        self._stall = None
        self._unread_replies = 0
        for channel in self.channels.values():
            channel.full = True

    def connection_resumed(self) -> None:
        self.full = False
        self._stall = None
        for channel in tuple(self.channels.values()):
            if channel.full and channel.handle is not None:  # a channel that is being opened resumes when it is open
                channel.full = False
                channel.handle.resume()

    def connection_lost(self) -> None:
        self.close_channels()

    def close_channels(self) -> None:
        """Unsubscribe from every stream; the streams go on."""
        channels, self.channels = self.channels, {}
        for channel in channels.values():
            channel.leave(self.read_end)

    @property
    def read_end(self) -> ReadEnd:
        """Value with which traces record the end of this socket's readers."""
        return _READ_END.get(self.close_code or 0, "left")

    # --- the sweep -----------------------------------------------------------------------------------------

    def sweep(self, now: float, unix_now: float) -> None:
        """Send pings; close a socket that is silent, stalled, or whose token has expired."""
        transport = self._connection.transport
        if transport.is_closing() or self.close_code is not None:
            return
        if self.principal is None:
            if now - self._opened_at > WS_AUTH_S_MAX:
                self.close(Unauthenticated.close_code, f"no auth message within {WS_AUTH_S_MAX:g} s")
            return
        if self.principal.expires_at is not None and self.principal.expires_at <= unix_now:
            self.close(Unauthenticated.close_code, "the capability token has expired; get a new one")
            return
        if self.full:
            self._stall = self._stall or StallTimer()
            if self._stall.is_stalled(transport.get_write_buffer_size(), now):
                self.close(_STALLED, f"nothing read for {STALL_S_MAX:g} s; reconnect with the cursor")
            return
        if now - self._pinged_at >= WS_APP_PING_S:
            self._pinged_at = now
            self.reply(
                {"t": "ping", "head": {str(c.number): c.handle.head for c in self.channels.values() if c.handle}}
            )
