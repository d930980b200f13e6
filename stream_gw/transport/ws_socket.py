"""The WebSocket shell: many streams on one socket, subprotocol ``tokenstream.v1`` (``docs/protocol.md``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from stream_fabric.cursor import Cursor
from stream_fabric.errors import (
    BadRequest,
    Draining,
    StreamGwError,
    TooMany,
    Unauthenticated,
)
from stream_fabric.events import ReadEnd
from stream_fabric.frames import End, Status, decode
from stream_fabric.limits import (
    IDEMPOTENCY_KEY_CHARS_MAX,
    STALL_S_MAX,
    STREAMS_PER_SOCKET_MAX,
    WS_APP_PING_S,
    WS_AUTH_S_MAX,
)
from stream_fabric.reader import Gap, Reset
from stream_gw.auth import Principal
from stream_gw.dialects.base import Encoder
from stream_gw.dialects.requests import check_depth
from stream_gw.server import CONNECTION, EdgeWebSocket
from stream_gw.trace import ReaderTrace, Tracer

SUBPROTOCOL = "tokenstream.v1"
_BEARER = "bearer."
_MESSAGES_PER_S = 200.0
_MESSAGES_BURST = 1000.0
_BAD_MESSAGES_MAX = 10
_CLOSE_S = 5.0
_RECONNECT_S = 1.0
_STALLED = 4408
_CLOSED: dict[int, ReadEnd] = {_STALLED: "stalled", Draining.close_code: "drained"}
Mode = Literal["tokens", "coalesce", "snapshot"]


class Auth(msgspec.Struct, tag_field="t", tag="auth"):
    token: str


class Create(msgspec.Struct, tag_field="t", tag="create"):
    ch: int
    body: msgspec.Raw
    dialect: str = "openai.chat"
    key: str | None = None
    mode: Mode = "tokens"
    queued: bool = False
    """Tell where the stream stands while it waits for a replica."""
    traceparent: str | None = None
    """W3C trace context."""


class Sub(msgspec.Struct, tag_field="t", tag="sub"):
    ch: int
    stream: str
    after: str = "1-0"
    dialect: str = "openai.chat"
    mode: Mode = "tokens"
    traceparent: str | None = None


class Unsub(msgspec.Struct, tag_field="t", tag="unsub"):
    ch: int


_Id = Annotated[str, Meta(max_length=IDEMPOTENCY_KEY_CHARS_MAX)]
"""Repeated in the answer, so it has a limit."""


class Cancel(msgspec.Struct, tag_field="t", tag="cancel"):
    id: _Id
    stream: str


class Input(msgspec.Struct, tag_field="t", tag="input"):
    id: _Id
    stream: str
    item: dict[str, Any]


class Pong(msgspec.Struct, tag_field="t", tag="pong"):
    pass


ClientMessage = Auth | Create | Sub | Unsub | Cancel | Input | Pong
_decoder: msgspec.json.Decoder[ClientMessage] = msgspec.json.Decoder(ClientMessage)
_encode = msgspec.json.Encoder().encode


class Handle(Protocol):
    """What a channel holds of its stream."""

    @property
    def head(self) -> int:
        """The stream's last seq, as far as this gateway has heard."""

    def resume(self) -> None: ...

    def close(self, why: ReadEnd = "left") -> None: ...


class Commands(Protocol):
    """What the socket asks of the gateway. Raises StreamGwError."""

    tracer: Tracer

    def authenticate(self, credential: str | None) -> Principal: ...

    async def ws_create(
        self, who: Principal, message: Create, channel: Channel, trace: ReaderTrace
    ) -> Handle | None: ...

    async def ws_subscribe(
        self, who: Principal, message: Sub, channel: Channel, trace: ReaderTrace
    ) -> Handle | None: ...

    async def ws_cancel(self, who: Principal, stream: str) -> dict[str, Any]: ...

    async def ws_input(self, who: Principal, stream: str, input_id: str, item: msgspec.Raw) -> str: ...


class Channel:
    """``Outlet`` of one stream on a socket."""

    __slots__ = ("_early", "encoder", "end_frame", "full", "handle", "number", "seq", "socket", "stream", "tells_queue")

    def __init__(self, socket: Socket, number: int) -> None:
        self.socket = socket
        self.number = number
        self.tells_queue = False
        self.full = socket.full
        self.stream = ""
        self.seq = 0
        self.encoder: Encoder | None = None
        self.handle: Handle | None = None
        self.end_frame = b""
        # Until ok is out, messages wait here
        self._early: list[bytes] | None = []

    def carry(self, stream: str, encoder: Encoder, seq: int) -> None:
        """Before any frame: what the channel carries, and the seq it continues from."""
        self.stream, self.encoder, self.seq = stream, encoder, seq

    def open(self, epoch: str, head: int, status: str) -> None:
        """Send ok and what came meanwhile."""
        early, self._early = self._early, None
        self.ok(epoch, head, status)
        for text in early or ():
            self.socket.send(text)

    def _send(self, text: bytes) -> None:
        if self._early is not None:
            self._early.append(text)
        else:
            self.socket.send(text)

    def ok(self, epoch: str, head: int, status: str) -> None:
        self.socket.put(
            {"t": "ok", "ch": self.number, "stream": self.stream, "epoch": epoch, "head": head, "status": status}
        )

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        encoder = self.encoder
        assert encoder is not None
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

    def snapshot(self, seq: int, chunks: list[bytes]) -> None:
        """What came before, as accumulated chunks."""
        self._send(b'{"t":"d","ch":%d,"a":%d,"s":%d,"f":[%b]}' % (self.number, self.seq, seq, b",".join(chunks)))
        self.seq = seq

    def gap(self, gap: Gap) -> bool:
        self._send(_encode({"t": "gap", "ch": self.number, "from": gap.start, "to": gap.stop}))
        self.seq = gap.stop
        return True

    def reset(self, reset: Reset) -> bool:
        self._send(_encode({"t": "reset", "ch": self.number, "epoch": str(reset.epoch), "to": reset.to}))
        self.seq = reset.to
        return True

    def rise(self, epoch: str, head: int) -> None:
        if self._early is None:
            self.ok(epoch, head, "live")

    def waits(self, position: int, of: int, warming_s: float | None) -> None:
        if self.tells_queue:
            message = {"t": "queued", "ch": self.number, "position": position, "of": of}
            if warming_s is not None:
                message["warming_s"] = round(warming_s)
            self._send(_encode(message))

    def end(self, status: Status) -> None:
        message: dict[str, Any] = {"t": "end", "ch": self.number, "s": self.seq, "status": status}
        if self.end_frame:
            end = decode(self.end_frame)
            assert isinstance(end, End)
            message["usage"] = end.usage
            if end.error is not None:
                message["error"] = end.error
        self._send(_encode(message))
        self.socket.forget(self)

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        self._send(_encode(self.socket.error(error, ch=self.number)))
        self.socket.forget(self)


class Socket:
    """One connection's state: its channels, its credit of messages, its liveness."""

    __slots__ = (
        "_bad_messages", "_buffered", "_connection", "_credit", "_credited_at", "_monotonic", "_opened_at",
        "_pinged_at", "_stalled_since", "channels", "close_code", "full", "hinted", "name", "principal",
    )  # fmt: skip

    def __init__(self, connection: EdgeWebSocket, name: str, monotonic: Callable[[], float]) -> None:
        self._connection = connection
        self._monotonic = monotonic
        self.name = name
        self.full = False
        self.channels: dict[int, Channel] = {}
        self.principal: Principal | None = None
        self.close_code: int | None = None
        self.hinted = False
        self._opened_at = monotonic()
        self._pinged_at = self._opened_at
        self._buffered = 0
        self._stalled_since = 0.0
        self._credit = _MESSAGES_BURST
        self._credited_at = self._opened_at
        self._bad_messages = 0
        connection.listener = self

    # --- out -----------------------------------------------------------------------------------------------

    def send(self, text: bytes) -> None:
        self._connection.send_text(text)

    def put(self, message: dict[str, Any]) -> None:
        self.send(_encode(message))

    def error(self, error: StreamGwError, *, ch: int | None = None, id: str | None = None) -> dict[str, Any]:
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

    def put_error(self, error: StreamGwError, *, ch: int | None = None, id: str | None = None) -> None:
        self.put(self.error(error, ch=ch, id=id))

    def forget(self, channel: Channel) -> None:
        if self.channels.get(channel.number) is channel:
            del self.channels[channel.number]

    def close(self, code: int, reason: str) -> None:
        """Begin the closing handshake; the receiving side sees the disconnect."""
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

    def send_on(self, after_s: float) -> None:
        """This gateway drains: ask the client to come back elsewhere, and close once it should have."""
        self.hinted = True
        self.put({"t": "reconnect", "after_ms": int(after_s * 1000)})
        reason = "this gateway drains; reconnect elsewhere"
        asyncio.get_running_loop().call_later(after_s + _RECONNECT_S, self.close, Draining.close_code, reason)

    # --- in ------------------------------------------------------------------------------------------------

    def take_credit(self) -> bool:
        now = self._monotonic()
        self._credit = min(_MESSAGES_BURST, self._credit + (now - self._credited_at) * _MESSAGES_PER_S)
        self._credited_at = now
        self._credit -= 1
        return self._credit >= 0

    def bad_message(self) -> bool:
        """Whether the peer may go on after one more message that is none."""
        self._bad_messages += 1
        return self._bad_messages < _BAD_MESSAGES_MAX

    # --- ConnectionListener --------------------------------------------------------------------------------

    def connection_paused(self) -> None:
        self.full = True
        self._stalled_since = 0.0
        for channel in self.channels.values():
            channel.full = True

    def connection_resumed(self) -> None:
        self.full = False
        for channel in tuple(self.channels.values()):
            if channel.full and channel.handle is not None:  # one that is being opened is resumed when it is
                channel.full = False
                channel.handle.resume()

    def connection_lost(self) -> None:
        self.close_channels()

    def close_channels(self) -> None:
        channels, self.channels = self.channels, {}
        why = _CLOSED.get(self.close_code or 0, "left")
        for channel in channels.values():
            if channel.handle is not None:
                channel.handle.close(why)

    # --- the sweep -----------------------------------------------------------------------------------------

    def sweep(self, now: float, unix_now: float) -> None:
        """Pings, and ends to sockets that are silent, stalled or whose token ran out."""
        transport = self._connection.transport
        if transport.is_closing() or self.close_code is not None:
            return
        if self.principal is None:
            if now - self._opened_at > WS_AUTH_S_MAX:
                self.close(Unauthenticated.close_code, f"no auth message within {WS_AUTH_S_MAX:g} s")
            return
        if self.principal.expires_at is not None and self.principal.expires_at <= unix_now:
            self.close(Unauthenticated.close_code, "the capability token has expired")
            return
        if self.full:
            buffered = transport.get_write_buffer_size()
            if not self._stalled_since or buffered < self._buffered:
                self._stalled_since = now
            self._buffered = buffered
            if now - self._stalled_since > STALL_S_MAX:
                self.close(_STALLED, "stalled reader; come back with the cursor")
            return
        if now - self._pinged_at >= WS_APP_PING_S:
            self._pinged_at = now
            self.put({"t": "ping", "head": {str(c.number): c.handle.head for c in self.channels.values() if c.handle}})


async def serve(
    scope: Scope,
    receive: Receive,
    send: Send,
    commands: Commands,
    name: str,
    header_credential: str | None,
    register: Callable[[Socket], Callable[[], None]],
    monotonic: Callable[[], float],
) -> None:
    """Accept a socket and obey it until it ends."""
    await receive()  # websocket.connect
    offered: list[str] = scope["subprotocols"]
    credential = header_credential or next((p.removeprefix(_BEARER) for p in offered if p.startswith(_BEARER)), None)
    principal: Principal | None = None
    if credential is not None:
        try:
            principal = commands.authenticate(credential)
        except Unauthenticated as error:
            # A browser cannot see a refused handshake's status: accept and close with the code
            await send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL if SUBPROTOCOL in offered else None})
            await send({"type": "websocket.close", "code": error.close_code, "reason": error.message[:120]})
            return
    if offered and SUBPROTOCOL not in offered:
        await send({"type": "websocket.close", "code": 1008, "reason": f"the subprotocol is {SUBPROTOCOL}"})
        return
    await send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL if offered else None})
    connection: EdgeWebSocket = scope["state"][CONNECTION]
    connection.trim()
    scope.clear()
    socket = Socket(connection, name, monotonic)
    unregister = register(socket)
    if principal is not None:
        _greet(socket, principal)
    try:
        await _obey(socket, receive, commands)
    finally:
        unregister()
        socket.close_channels()


def _greet(socket: Socket, principal: Principal) -> None:
    socket.principal = principal
    socket.put({"t": "hi", "conn": socket.name, "ping_ms": int(WS_APP_PING_S * 1000)})


async def _obey(socket: Socket, receive: Receive, commands: Commands) -> None:
    while True:
        event = await receive()
        if event["type"] == "websocket.disconnect":
            return
        if socket.close_code is not None:
            continue
        text = event.get("text")
        if text is None:
            socket.close(1008, "binary frames are not part of tokenstream.v1; send JSON text")
            continue
        if not socket.take_credit():
            socket.close(TooMany.close_code, f"more than {_MESSAGES_PER_S:g} messages a second")
            continue
        try:
            message = _decoder.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            socket.put_error(BadRequest(f"not a message of tokenstream.v1: {str(error)[:200]}"))
            if not socket.bad_message():
                socket.close(1008, "too many malformed messages")
            continue
        await _obey_one(socket, message, commands)


async def _obey_one(socket: Socket, message: ClientMessage, commands: Commands) -> None:
    who = socket.principal
    if who is None:
        if not isinstance(message, Auth):
            socket.close(Unauthenticated.close_code, "the first message must be auth")
            return
        try:
            _greet(socket, commands.authenticate(message.token))
        except Unauthenticated as error:
            socket.close(error.close_code, error.message)
        return
    try:
        match message:
            case Auth(token):
                renewed = commands.authenticate(token)
                if renewed.tenant != who.tenant:
                    raise BadRequest("a socket stays with its tenant; open another one")
                socket.principal = renewed
            case Create(ch):
                trace = ReaderTrace(commands.tracer, socket.name, "ws", message.traceparent)
                await _open(socket, ch, lambda channel: commands.ws_create(who, message, channel, trace))
            case Sub(ch):
                trace = ReaderTrace(commands.tracer, socket.name, "ws", message.traceparent)
                await _open(socket, ch, lambda channel: commands.ws_subscribe(who, message, channel, trace))
            case Unsub(ch):
                channel = socket.channels.pop(ch, None)
                if channel is not None and channel.handle is not None:
                    channel.handle.close()
            case Cancel(id, stream):
                socket.put({"t": "ack", "id": id, **await commands.ws_cancel(who, stream)})
            case Input(id, stream, item):
                raw = _encode(item)
                check_depth(raw)
                result = await commands.ws_input(who, stream, id, msgspec.Raw(raw))
                socket.put({"t": "ack", "id": id, "result": result})
            case Pong():
                pass
    except StreamGwError as error:
        socket.put_error(error, id=getattr(message, "id", None))


async def _open(socket: Socket, ch: int, start: Callable[[Channel], Awaitable[Handle | None]]) -> None:
    try:
        if not 0 <= ch < 1 << 31:
            raise BadRequest(f"ch must be 0 to {(1 << 31) - 1}", param="ch")
        if ch in socket.channels:
            raise BadRequest(f"channel {ch} is open; unsub it first or take another number", param="ch")
        if len(socket.channels) >= STREAMS_PER_SOCKET_MAX:
            raise TooMany(f"{STREAMS_PER_SOCKET_MAX} channels are open on this socket, the most one may have")
        if socket.hinted:
            raise Draining("this gateway is going away; reconnect", retry_after_s=1)
        channel = Channel(socket, ch)
        socket.channels[ch] = channel
        try:
            channel.handle = await start(channel)
        except BaseException:
            socket.forget(channel)
            raise
        if channel.handle is None:
            return
        if socket.channels.get(ch) is not channel:  # the stream has ended, or the socket has gone meanwhile
            channel.handle.close(_CLOSED.get(socket.close_code or 0, "left"))
        elif channel.full and not socket.full:  # it drained while the stream was being opened
            channel.full = False
            channel.handle.resume()
    except StreamGwError as error:
        socket.put_error(error, ch=ch)
