"""The WebSocket of the AI SDK's ``WebSocketChatTransport``: several chats on one socket (``docs/ai-sdk.md``).

Its messages differ from those of ``tokenstream.v1``; connection, limits and liveness are the same.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec
from msgspec import Raw

from stream_fabric.errors import BadRequest, Draining, StreamGwError, Unauthenticated, Unsupported
from stream_fabric.limits import HEADER_BYTES_MAX, WS_OPENING_MAX
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import Status
from stream_fabric.stream.reader import Gap, Reset
from stream_gw.auth import Principal, bearer
from stream_gw.dialects.requests import read_fields
from stream_gw.dialects.ui.encoder import is_cured_by_resume
from stream_gw.dialects.ui.requests import DIALECT, check_chat_id
from stream_gw.observe.trace import ReaderTrace
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.off_loop import off_loop
from stream_gw.transport.sockets.base import Headers
from stream_gw.transport.ui.calls import ChatAnswer, ChatCalls, ChatReader
from stream_gw.transport.ui.messages import Abort, Resume, Send
from stream_gw.transport.ws import CommandSession, SocketKind, add_channel, subscribe
from stream_gw.transport.ws_messages import encode
from stream_gw.transport.ws_socket import Channel, Socket

log = logging.getLogger(__name__)

SUBPROTOCOL = "ai-sdk.chat.v1"
_ABORT_GRACE_S = 1.0
"""Time in which a page that has aborted its resume may resume again, and its answer goes on."""

_decoder: msgspec.json.Decoder[Send | Resume | Abort] = msgspec.json.Decoder(Send | Resume | Abort)


class ChatSocket(Socket):
    """A socket that sends nothing but what ``WebSocketChatTransport`` knows: it ends at any other message."""

    __slots__ = ()

    def greet(self, principal: Principal, gateway: str) -> None:
        self.principal = principal

    def _ping(self, now: float) -> None:
        """Pings of the WebSocket itself suffice."""

    def ask_to_reconnect(self, after_s: float) -> None:
        """Close after ``after_s``: the pages take it for a broken network, and resume elsewhere."""
        self.hinted = True
        reason = "this gateway is shutting down; reconnect"
        asyncio.get_running_loop().call_later(after_s, self.close, Draining.close_code, reason)

    def refuse(self, request: str, error: StreamGwError) -> None:
        """Answer a request with an error."""
        message = {"type": "error", "requestId": request, "errorText": error.message, "code": error.code}
        self.reply(message | {"retriable": error.retriable})


class ChatChannel(Channel):
    """``Outlet`` of one request: the chunks of an answer."""

    __slots__ = ("_head", "_sequence", "chat", "is_aborted", "is_resume", "reader", "request")

    def __init__(self, socket: Socket, number: int, request: str, chat: str, *, is_resume: bool) -> None:
        super().__init__(socket, number)
        self.request = request
        self.chat = chat
        self.is_resume = is_resume
        self.reader: ChatReader | None = None
        """Set once the answer is open."""
        self.is_aborted = False
        self._head = b'{"type":"chunk","requestId":%b,"sequence":' % msgspec.json.encode(request)
        self._sequence = 0

    def send_ok(self, epoch: str, head: int, status: str, headers: Headers = ()) -> None:
        self.socket.reply({"type": "start", "requestId": self.request})

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        assert self.encoder is not None, "set_stream comes before the first frame"
        for chunk in self.encoder.chunks(lines, first):
            self._send_or_hold(b'%b%d,"chunk":%b}' % (self._head, self._sequence, chunk))
            self._sequence += 1
        self.seq = first + len(lines) - 1

    def gap(self, gap: Gap) -> bool:
        return False

    def reset(self, reset: Reset) -> bool:
        return False

    def epoch_changed(self, epoch: str, head: int) -> None:
        """Chunks go on in the same parts."""

    def queued(self, position: int, of: int, warming_s: float | None) -> None:
        """The protocol has no message for it."""

    def end(self, status: Status) -> None:
        self._send_or_hold(encode({"type": "end", "requestId": self.request}))
        self.socket.forget(self)
        if self.reader is not None:
            self.reader.note_end()

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        if is_cured_by_resume(error):
            self.socket.close(error.close_code, error.message)
        else:
            told = {"type": "error", "requestId": self.request, "errorText": error.message, "code": error.code}
            self._send_or_hold(encode(told))
        self.socket.forget(self)


class ChatSession(CommandSession):
    """Carries out the frames of one socket.

    A closed socket leaves its answers running, as a broken network does. ``abort`` stops the answer: a page sends it
    for ``stop()`` alone. Only an aborted resume may be another's begin: ``useChat`` aborts it to resume anew.
    """

    __slots__ = ("_calls", "_next", "_opens")
    protocol = SUBPROTOCOL

    def __init__(self, socket: Socket, gateway: Gateway, calls: ChatCalls) -> None:
        super().__init__(socket, gateway)
        self._calls = calls
        self._next = 0
        self._opens: asyncio.Semaphore | None = None

    async def take(self, text: str) -> None:
        socket = self.socket
        try:
            frame = _decoder.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            # The transport ends the connection at an answer without a request's id, so the close tells why
            socket.close(1008, f"not a frame of {SUBPROTOCOL}: {str(error)[:80]}")
            return
        try:
            headers = {} if isinstance(frame, Abort) else _read_headers(frame.headers)
            who = await self._principal(headers)
        except StreamGwError as error:
            if socket.principal is None:
                socket.close(error.close_code, error.message)
            else:
                self._refuse(frame.request_id, error)
            return
        if isinstance(frame, Abort):
            self._abort(who, frame.request_id)
            return
        try:
            channel = self._new_channel(frame)
        except StreamGwError as error:
            self._refuse(frame.request_id, error)
            return
        self.spawn(self._open(who, frame, headers, channel), who.tenant, len(text), partial(self._give_up, channel))

    async def _principal(self, headers: dict[str, str]) -> Principal:
        """Return the caller: that of the frame's own headers, or else of the socket. Raises StreamGwError."""
        socket = self.socket
        named = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        credential = bearer(named)
        if credential is not None or socket.principal is None:
            who = await self.gateway.authenticate_newly(partial(self.gateway.authenticate, credential))
            if socket.principal is not None and not who.covers(socket.principal):
                raise Unauthenticated("a socket stays with its tenant and its user; open another socket")
            socket.principal = who
            return who
        return self.gateway.parts.authenticator.keys.current(socket.principal)

    # --- channels ------------------------------------------------------------------------------------------

    def _new_channel(self, frame: Send | Resume) -> ChatChannel:
        check_chat_id(frame.id)
        if self._find(frame.request_id) is not None:
            raise BadRequest(f"request {frame.request_id[:64]!r} is running; use another id", param="requestId")
        self._next += 1
        is_resume = isinstance(frame, Resume)
        channel = ChatChannel(self.socket, self._next, frame.request_id, frame.id, is_resume=is_resume)
        return add_channel(self.socket, channel)

    def _find(self, request: str) -> ChatChannel | None:
        found = (channel for channel in self.socket.channels.values() if isinstance(channel, ChatChannel))
        return next((channel for channel in found if channel.request == request), None)

    async def _open(self, who: Principal, frame: Send | Resume, headers: dict[str, str], channel: ChatChannel) -> None:
        """Open the answer for the channel; send an error if that fails."""
        socket = self.socket
        trace = ReaderTrace(self.gateway.parts.tracer, socket.name, "ws", _header(headers, "traceparent"))
        self._opens = self._opens or asyncio.Semaphore(WS_OPENING_MAX)
        try:
            async with self._opens:
                channel.full = socket.full
                answer = await self._answer(who, frame, headers, trace)
                if answer is None:
                    if channel.is_open:
                        socket.forget(channel)
                        socket.reply({"type": "no-active", "requestId": channel.request})
                    return
                channel.reader = answer.reader
                await subscribe(channel, answer.opened, DIALECT, encoder=await answer.encoder())
        except StreamGwError as error:
            self._give_up(channel, error)
            return
        if channel.is_aborted:  # before the answer was there
            await self._stop(channel, answer.reader)

    async def _answer(
        self, who: Principal, frame: Send | Resume, headers: dict[str, str], trace: ReaderTrace
    ) -> ChatAnswer | None:
        more = bytes(frame.body)
        fields = await off_loop(len(more), lambda: read_fields(more))
        if isinstance(frame, Resume):
            if frame.last_sequence is not None:
                raise Unsupported("lastSequence is not supported: an answer is replayed from its first chunk")
            user = fields.get("user")
            return await self._calls.resume(who, None if user is None else _text(user, "user"), frame.id, trace)
        fields |= {"id": Raw(msgspec.json.encode(frame.id)), "messages": frame.messages}
        fields |= {"trigger": frame.trigger, "messageId": frame.message_id}
        body = msgspec.json.encode(fields)
        return await self._calls.begin(who, body, trace, _header(headers, "idempotency-key"))

    def _give_up(self, channel: ChatChannel, error: StreamGwError) -> None:
        """Answer a channel that could not be opened."""
        if channel.is_open:
            self.socket.forget(channel)
            self._refuse(channel.request, error)

    def _refuse(self, request: str, error: StreamGwError) -> None:
        assert isinstance(self.socket, ChatSocket)
        self.socket.refuse(request, error)

    # --- abort ---------------------------------------------------------------------------------------------

    def _abort(self, who: Principal, request: str) -> None:
        """Stop the answer of a request, and send no more of it."""
        channel = self._find(request)
        if channel is None:  # it has ended
            return
        channel.is_aborted = True
        del self.socket.channels[channel.number]
        channel.leave()
        if channel.reader is not None:
            self.spawn(self._stop(channel, channel.reader), who.tenant, 0, partial(_log_unstopped, channel.reader))

    async def _stop(self, channel: ChatChannel, reader: ChatReader) -> None:
        if channel.is_resume:
            await asyncio.sleep(_ABORT_GRACE_S)
            others = self.socket.channels.values()
            if not self.socket.is_live or any(
                isinstance(other, ChatChannel) and other.chat == channel.chat for other in others
            ):
                return
        try:
            await reader.stop()
        except StreamGwError as error:
            _log_unstopped(reader, error)


def _log_unstopped(reader: ChatReader, error: StreamGwError) -> None:
    """Log that an answer goes on although its page has aborted it: the protocol has no answer to an abort."""
    log.warning("answer not stopped: stream=%s error=%s", reader.stream, error.message)


def _read_headers(raw: Raw) -> dict[str, str]:
    """Return the headers of a frame. Raises BadRequest."""
    try:
        if len(bytes(raw)) <= HEADER_BYTES_MAX:
            return msgspec.json.decode(raw, type=dict[str, str])
    except msgspec.MsgspecError as error:
        raise BadRequest(f"headers: {str(error)[:200]}", param="headers") from error
    raise BadRequest(f"the headers of a frame have at most {HEADER_BYTES_MAX} bytes", param="headers")


def _header(headers: dict[str, str], name: str) -> str | None:
    return next((value for each, value in headers.items() if each.lower() == name), None)


def _text(raw: Raw, name: str) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"{name} must be a string", param=name) from error


def chat_socket(calls: ChatCalls) -> SocketKind:
    """Return the kind of the chats' sockets."""
    return SocketKind(SUBPROTOCOL, Gateway.authenticate, ChatSocket, partial(ChatSession, calls=calls))
