"""One WebSocket of ``tokenstream.v1`` and its channels: what goes out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from stream_fabric.errors import Draining, StreamGwError
from stream_fabric.events import ReadEnd
from stream_fabric.limits import WS_APP_PING_S
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import INPUT_PREFIX, End, Note, Status, decode
from stream_fabric.stream.reader import Gap, Reset
from stream_gw.auth import Principal
from stream_gw.dialects.base import Encoder, check_json
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.transport.connection import EdgeWebSocket
from stream_gw.transport.sockets.base import EdgeSocket, Handle, Headers, headers_object
from stream_gw.transport.ws_messages import encode

_RECONNECT_S = 1.0
_STRUCTURE = ord("{")
"""First byte of every frame that is no plain text."""


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

    def open(self, epoch: str, head: int, status: str, headers: Headers = ()) -> None:
        """Send ``ok`` and the messages that came before it. ``headers``: what an HTTP answer would tell in its
        headers."""
        early, self._early = self._early, None
        self.send_ok(epoch, head, status, headers)
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

    def send_ok(self, epoch: str, head: int, status: str, headers: Headers = ()) -> None:
        message: dict[str, Any] = {
            "t": "ok",
            "ch": self.number,
            "stream": self.stream,
            "epoch": epoch,
            "head": head,
            "status": status,
        }
        if headers:
            message["headers"] = headers_object(headers)
        self.socket.reply(message)

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
        chunks = encoder.chunks(lines, first)
        if last - 1 == self.seq:
            text = b'{"t":"d","ch":%d,"s":%d,"f":[%b]}' % (self.number, last, b",".join(chunks))
        else:
            text = b'{"t":"d","ch":%d,"a":%d,"s":%d,"f":[%b]}' % (self.number, self.seq, last, b",".join(chunks))
        self.seq = last
        if self._early is not None:
            self._early.append(text)
        else:
            self.socket.send(text)
        if len(lines) > 1 or lines[0][0] == _STRUCTURE:
            self._tell_inputs(first, lines)

    def _tell_inputs(self, first: int, lines: list[bytes]) -> None:
        """Tell what became of inputs, whether the dialect's chunks say it or not."""
        for seq, line in enumerate(lines, first):
            if line.startswith(INPUT_PREFIX) and isinstance(note := decode(line), Note) and note.body is not None:
                body = bytes(note.body)
                self._send_or_hold(b'{"t":"steered","ch":%d,"s":%d,%b' % (self.number, seq, body[1:]))

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
        if self.encoder is not None and self.encoder.checks:
            checks = self.encoder.checks
            message["structured_output"] = [{"choice": choice, **check_json(check)} for choice, check in checks]
        self._send_or_hold(encode(message))
        self.socket.forget(self)

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        resume_at = {"stream": self.stream, "cursor": str(cursor)}
        self._send_or_hold(encode(self.socket.error_message(error, ch=self.number) | resume_at))
        self.socket.forget(self)


class Socket(EdgeSocket):
    """One connection of ``tokenstream.v1`` and its channels."""

    __slots__ = ("_pinged_at", "channels")

    def __init__(self, connection: EdgeWebSocket, name: str, monotonic: Callable[[], float], bodies: BodyBytes) -> None:
        super().__init__(connection, name, monotonic, bodies)
        self.channels: dict[int, Channel] = {}
        """Channels that are open or being opened."""
        self._pinged_at = self._opened_at

    def outlets(self) -> Collection[Channel]:
        return self.channels.values()

    def reply(self, message: dict[str, Any]) -> None:
        """Send an answer to a client's message. Close a client that sends but does not read its replies."""
        self.reply_text(encode(message))

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
        if error.headers:
            message["headers"] = headers_object(error.headers)
        message["request_id"] = self.name
        return message

    def reply_error(self, error: StreamGwError, *, ch: int | None = None, id: str | None = None) -> None:
        self.reply(self.error_message(error, ch=ch, id=id))

    def greet(self, principal: Principal, gateway: str) -> None:
        """Set the authenticated caller and send ``hi``. ``gateway``: tells this gateway from others."""
        self.principal = principal
        self.reply({"t": "hi", "conn": self.name, "gateway": gateway, "ping_ms": int(WS_APP_PING_S * 1000)})

    def forget(self, channel: Channel) -> None:
        """Remove a channel that has ended."""
        channel.handle = None
        if channel.is_open:
            del self.channels[channel.number]

    def ask_to_reconnect(self, after_s: float) -> None:
        """Ask the client to reconnect after ``after_s``, because this gateway drains; close a little later."""
        self.hinted = True
        self.reply({"t": "reconnect", "after_ms": int(after_s * 1000)})
        reason = "this gateway is shutting down; reconnect"
        asyncio.get_running_loop().call_later(after_s + _RECONNECT_S, self.close, Draining.close_code, reason)

    def close_outlets(self) -> None:
        channels, self.channels = self.channels, {}
        for channel in channels.values():
            channel.leave(self.read_end)

    def _ping(self, now: float) -> None:
        if now - self._pinged_at >= WS_APP_PING_S:
            self._pinged_at = now
            self.reply(
                {"t": "ping", "head": {str(c.number): c.handle.head for c in self.channels.values() if c.handle}}
            )
