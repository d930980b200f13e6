"""One WebSocket, whatever its protocol: message credit, backpressure, liveness and the closing handshake."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from starlette.types import Send

from stream_fabric.errors import Draining, StreamGwError, TooMany, Unauthenticated
from stream_fabric.events import ReadEnd
from stream_fabric.limits import STALL_S_MAX, WS_AUTH_BYTES_MAX, WS_AUTH_S_MAX, WS_REPLIES_BYTES_MAX
from stream_fabric.stream.ids import TenantId
from stream_gw.auth import Principal
from stream_gw.dialects.errors import error_body
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.transport.connection import EdgeWebSocket
from stream_gw.transport.sweeping import StallTimer

_MESSAGES_PER_S = 200.0
_MESSAGES_BURST = 1000.0
_BAD_MESSAGES_MAX = 10
_CLOSE_S = 5.0
_REASON_BYTES_MAX = 123  # of a control frame, beside the code
STALLED = 4408
"""Close code of a reader that takes too little."""
Headers = Sequence[tuple[bytes, bytes]]
_READ_END: dict[int, ReadEnd] = {STALLED: "stalled", Draining.close_code: "drained"}
"""How a trace names the end of a reader whose socket was closed with this code."""


class Handle(Protocol):
    """The subscription of an outlet to its stream, as far as the socket uses it."""

    @property
    def head(self) -> int:
        """Last seq of the stream that this gateway has heard of."""

    def resume(self) -> None:
        """Continue the delivery, because the socket has drained."""

    def close(self, why: ReadEnd = "left") -> None: ...


class OnSocket(Protocol):
    """An outlet that writes to a socket."""

    full: bool
    handle: Handle | None


class EdgeSocket(ABC):
    """One connection's state. A ``SocketListener``; each protocol has a subclass."""

    __slots__ = (
        "_bad_messages", "_bodies", "_connection", "_credit", "_credited_at", "_has_left", "_incomplete", "_monotonic",
        "_opened_at", "_stall", "_unread_replies", "close_code", "full", "hinted", "name", "principal",
    )  # fmt: skip

    def __init__(self, connection: EdgeWebSocket, name: str, monotonic: Callable[[], float], bodies: BodyBytes) -> None:
        self._connection = connection
        self._bodies = bodies
        self._incomplete = 0
        """Bytes of the message that is arriving, as ``bodies`` counts them."""
        self._monotonic = monotonic
        self.name = name
        self.full = False
        self.principal: Principal | None = None
        self.close_code: int | None = None
        self.hinted = False
        """Whether the client was asked to reconnect elsewhere."""
        self._has_left = False
        self._opened_at = monotonic()
        self._stall: StallTimer | None = None
        self._unread_replies = 0
        """Bytes of replies sent since the socket became full."""
        self._credit = _MESSAGES_BURST
        self._credited_at = self._opened_at
        self._bad_messages = 0
        connection.listener = self

    # --- defined by each protocol ----------------------------------------------------------------------------

    @abstractmethod
    def outlets(self) -> Collection[OnSocket]:
        """Return the outlets that write to this socket."""

    @abstractmethod
    def close_outlets(self) -> None:
        """Unsubscribe from every stream; the streams go on."""

    @abstractmethod
    def ask_to_reconnect(self, after_s: float) -> None:
        """Have the client reconnect elsewhere, from ``after_s`` on, because this gateway drains."""

    @abstractmethod
    def _ping(self, now: float) -> None:
        """Send what the protocol sends to a client that reads; called by the sweep."""

    # --- the client --------------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether the client may still take something: nothing is begun for one that has gone."""
        return self.close_code is None and not self._has_left

    def leave(self) -> None:
        """Take that the client has gone."""
        self._has_left = True
        self.close_outlets()

    # --- out -----------------------------------------------------------------------------------------------

    def send(self, text: bytes) -> None:
        """Send an outlet's message; the hot call."""
        self._connection.send_text(text)

    def reply_text(self, text: bytes) -> None:
        """Send an answer to a client's message. Close a client that sends but does not read its replies."""
        if self.full:
            self._unread_replies += len(text)
            if self._unread_replies > WS_REPLIES_BYTES_MAX:
                self.close(STALLED, "the client does not read its replies; reconnect with the cursor")
                return
            if self._stall is not None:
                self._stall.sent(len(text))
        self.send(text)

    def close(self, code: int, reason: str) -> None:
        """Start the closing handshake; the session then sees the disconnect."""
        connection = self._connection
        if self.close_code is None and not connection.close_sent and not connection.transport.is_closing():
            self.close_code = code
            connection.conn.send_close(code, close_reason(reason))
            connection.transport.write(b"".join(connection.conn.data_to_send()))
            connection.close_sent = True
            connection.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
            # Reading goes on until the peer's answer: a transport closed over unread input resets our close away
            connection.read_on()
            connection.close_timer = asyncio.get_running_loop().call_later(_CLOSE_S, connection.transport.abort)

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

    @property
    def tenant(self) -> TenantId | None:
        return None if self.principal is None else self.principal.tenant

    # --- SocketListener ------------------------------------------------------------------------------------

    def frame_arrived(self) -> bool:
        """Count a control frame or a small fragment like a message; close a socket that sends too many."""
        if self.take_credit():
            return True
        self.close(TooMany.close_code, self.rate_limit)
        return False

    def message_grew(self, size: int) -> None:
        """Count the bytes of a message that is not complete; close a socket whose message has no room."""
        if self.close_code is not None:
            return
        if self.principal is None:
            if size > WS_AUTH_BYTES_MAX:
                self.close(
                    Unauthenticated.close_code, f"the first message is auth, of {WS_AUTH_BYTES_MAX} bytes at most"
                )
            return
        tenant, grown = self.principal.tenant, size - self._incomplete
        try:
            if grown > 0:
                self._bodies.add(tenant, grown)
            else:
                self._bodies.remove(tenant, -grown)
        except StreamGwError as error:
            self.close(error.close_code, error.message)
            return
        self._incomplete = size

    def connection_paused(self) -> None:
        self.full = True
        self._stall = None
        self._unread_replies = 0
        for outlet in self.outlets():
            outlet.full = True

    def connection_resumed(self) -> None:
        self.full = False
        self._stall = None
        for outlet in tuple(self.outlets()):
            if outlet.full and outlet.handle is not None:  # an outlet that is being opened resumes when it is open
                outlet.full = False
                outlet.handle.resume()

    def connection_lost(self) -> None:
        if self.principal is not None:
            self._bodies.remove(self.principal.tenant, self._incomplete)
            self._incomplete = 0
        self.leave()

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
                self.close(STALLED, f"nothing read for {STALL_S_MAX:g} s; reconnect with the cursor")
            return
        self._ping(now)


async def refuse_handshake(send: Send, error: StreamGwError) -> None:
    """Answer a handshake with an error as HTTP has it: no code of a close reaches a client before the handshake."""
    body = error_body(error, None)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "websocket.http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


def close_reason(text: str) -> str:
    """Return the part of a text that fits into the frame that closes a WebSocket. It may repeat what a client sent."""
    return text.encode()[:_REASON_BYTES_MAX].decode(errors="ignore")


def headers_object(headers: Headers) -> dict[str, str]:
    """Return headers as an object of JSON."""
    return {name.decode(): value.decode() for name, value in headers}
