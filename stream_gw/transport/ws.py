"""The WebSocket transport: many streams on one socket, subprotocol ``tokenstream.v1`` (``docs/protocol.md``)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import msgspec
from starlette.types import Receive, Scope, Send

from stream_fabric.errors import BadRequest, Draining, StreamGwError, TooMany, Unauthenticated, UserSuspended
from stream_fabric.limits import STREAMS_PER_SOCKET_MAX, WS_OPENING_MAX, WS_PENDING_MAX
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.ids import StreamId
from stream_gw.auth import Principal
from stream_gw.dialects.accumulate import snapshot
from stream_gw.dialects.requests import check_depth, parse_create
from stream_gw.observe.trace import ReaderTrace
from stream_gw.streams.cancel import cancel_json
from stream_gw.streams.create_call import CreateCall
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.off_loop import off_loop
from stream_gw.streams.opened import OpenedStream
from stream_gw.transport.connection import CONNECTION, EdgeWebSocket
from stream_gw.transport.ws_messages import (
    Auth,
    Cancel,
    ClientMessage,
    Create,
    Input,
    Pong,
    Sub,
    Unsub,
    decoder,
    encode,
)
from stream_gw.transport.ws_socket import Channel, Socket

log = logging.getLogger(__name__)

SUBPROTOCOL = "tokenstream.v1"
_BEARER = "bearer."
_CHANNEL_MAX = (1 << 31) - 1
_INTERNAL_ERROR = 1011


async def serve(
    scope: Scope,
    receive: Receive,
    send: Send,
    gateway: Gateway,
    name: str,
    header_credential: str | None,
    register: Callable[[Socket], Callable[[], None]],
) -> None:
    """Accept a socket and serve it until it ends. ``register`` adds the socket, and returns the call that removes
    it."""
    await receive()  # websocket.connect
    offered: list[str] = scope["subprotocols"]
    credential = header_credential or next((p.removeprefix(_BEARER) for p in offered if p.startswith(_BEARER)), None)
    principal: Principal | None = None
    if credential is not None:
        try:
            principal = gateway.authenticate(credential)
        except (Unauthenticated, UserSuspended) as error:
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
    socket = Socket(connection, name, asyncio.get_running_loop().time)
    unregister = register(socket)
    if principal is not None:
        socket.greet(principal)
    session = Session(socket, gateway)
    try:
        await session.run(receive)
    finally:
        unregister()
        socket.close_channels()
        await session.wait_for_commands()


class Session:
    """Carries out the messages of one socket.

    ``unsub``, ``pong`` and ``auth`` take effect at once. The others run in tasks, so that a cancel never waits for a
    create. Only a few creates and subs run at once: each may fill the connection, and the next must see that.
    Inputs run one after another, in the order of their messages.
    """

    __slots__ = ("_gateway", "_inputs", "_opens", "_snapshots", "_socket", "_tasks")

    def __init__(self, socket: Socket, gateway: Gateway) -> None:
        self._socket = socket
        self._gateway = gateway
        self._tasks: set[asyncio.Task[None]] = set()
        # Made when they are first needed: most sockets need few of them
        self._opens: asyncio.Semaphore | None = None
        self._snapshots: asyncio.Lock | None = None
        self._inputs: asyncio.Lock | None = None

    async def run(self, receive: Receive) -> None:
        """Handle messages until the socket disconnects."""
        socket = self._socket
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
                await self.wait_for_commands()  # the messages before get their answers
                socket.close(TooMany.close_code, socket.rate_limit)
                continue
            try:
                message = decoder.decode(text)
            except (msgspec.MsgspecError, RecursionError) as error:
                socket.reply_error(BadRequest(f"not a message of tokenstream.v1: {str(error)[:200]}"))
                if not socket.take_bad_message():
                    socket.close(1008, "too many malformed messages")
                continue
            self._handle_message(message)

    async def wait_for_commands(self) -> None:
        """Wait for the running commands: a stream whose create was sent is created, and kept for its grace period."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    # --- messages ------------------------------------------------------------------------------------------

    def _handle_message(self, message: ClientMessage) -> None:
        socket, who = self._socket, self._socket.principal
        if who is None:
            self._authenticate_first(message)
            return
        who = self._gateway.parts.authenticator.keys.current(who)  # its key may have been changed
        match message:
            case Auth(token):
                self._renew_principal(who, token)
            case Create(ch) | Sub(ch):
                self._spawn_open(who, message, ch)
            case Unsub(ch):
                channel = socket.channels.pop(ch, None)
                if channel is not None:
                    channel.leave()
            case Cancel(id):
                self._spawn(self._cancel(who, message), id)
            case Input(id):
                self._spawn(self._input(who, message), id)
            case Pong():
                pass

    def _authenticate_first(self, message: ClientMessage) -> None:
        if not isinstance(message, Auth):
            self._socket.close(Unauthenticated.close_code, "the first message must be auth")
            return
        try:
            self._socket.greet(self._gateway.authenticate(message.token))
        except (Unauthenticated, UserSuspended) as error:
            self._socket.close(error.close_code, error.message)

    def _renew_principal(self, who: Principal, token: str) -> None:
        """Replace the socket's principal by that of a new token of the same tenant."""
        try:
            renewed = self._gateway.authenticate(token)
        except (Unauthenticated, UserSuspended) as error:
            self._socket.reply_error(error)
            return
        if renewed.tenant != who.tenant:
            self._socket.reply_error(BadRequest("a socket stays with its tenant; open another socket"))
            return
        self._socket.principal = renewed

    def _spawn(self, work: Coroutine[Any, Any, None], id: str | None = None) -> None:
        """Run a command in a task, or refuse it when too many run. ``id``: the request id for the error."""
        if len(self._tasks) >= WS_PENDING_MAX:
            work.close()
            self._socket.reply_error(_too_many_commands(), id=id)
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish_command)

    def _finish_command(self, task: asyncio.Task[None]) -> None:
        """Forget a finished command; close the socket after an unexpected error."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("websocket command failed: socket=%s", self._socket.name, exc_info=error)
            self._socket.close(_INTERNAL_ERROR, "internal error of the gateway; reconnect with the cursor")

    async def _cancel(self, who: Principal, message: Cancel) -> None:
        try:
            reply = await self._gateway.commands.cancel(who, message.stream)
        except StreamGwError as error:
            self._socket.reply_error(error, id=message.id)
        else:
            self._socket.reply({"t": "ack", "id": message.id, **cancel_json(reply)})

    async def _input(self, who: Principal, message: Input) -> None:
        self._inputs = self._inputs or asyncio.Lock()
        try:
            async with self._inputs:
                raw = encode(message.item)
                check_depth(raw)
                result = await self._gateway.commands.input(who, message.stream, message.id, msgspec.Raw(raw))
        except StreamGwError as error:
            self._socket.reply_error(error, id=message.id)
        else:
            self._socket.reply({"t": "ack", "id": message.id, "result": result})

    # --- channels ------------------------------------------------------------------------------------------

    def _spawn_open(self, who: Principal, message: Create | Sub, ch: int) -> None:
        """Make the channel, and open the stream in a task."""
        try:
            channel = self._new_channel(ch)
        except StreamGwError as error:
            self._socket.reply_error(error, ch=ch)
            return
        self._spawn(self._open(who, message, channel))

    def _new_channel(self, ch: int) -> Channel:
        socket = self._socket
        if not 0 <= ch <= _CHANNEL_MAX:
            raise BadRequest(f"ch must be 0 to {_CHANNEL_MAX}", param="ch")
        if ch in socket.channels:
            raise BadRequest(f"channel {ch} is open; unsub it first or use another number", param="ch")
        if len(socket.channels) >= STREAMS_PER_SOCKET_MAX:
            raise TooMany(f"this socket is at its limit of {STREAMS_PER_SOCKET_MAX} open channels; unsub one first")
        if len(self._tasks) >= WS_PENDING_MAX:
            raise _too_many_commands()
        if socket.hinted:
            raise Draining("this gateway is shutting down; reconnect", retry_after_s=1)
        channel = socket.channels[ch] = Channel(socket, ch)
        return channel

    async def _open(self, who: Principal, message: Create | Sub, channel: Channel) -> None:
        """Create or subscribe to the stream for the channel; send an error if that fails."""
        socket = self._socket
        trace = ReaderTrace(self._gateway.parts.tracer, socket.name, "ws", message.traceparent)
        self._opens = self._opens or asyncio.Semaphore(WS_OPENING_MAX)
        try:
            async with self._opens:
                if not channel.is_open:  # unsubscribed while it waited
                    return
                channel.full = socket.full
                if isinstance(message, Create):
                    await self._create(who, message, channel, trace)
                else:
                    await self._subscribe(who, message, channel, trace)
        except StreamGwError as error:
            if channel.is_open:
                socket.forget(channel)
                socket.reply_error(error, ch=channel.number)

    async def _create(self, who: Principal, message: Create, channel: Channel, trace: ReaderTrace) -> None:
        kind: Literal["chat", "completions"] = "completions" if message.dialect == "openai.completions" else "chat"
        body = bytes(message.body)
        request = await off_loop(len(body), lambda: parse_create(body, kind))
        channel.reports_queue = message.queued
        # Readers leave with their socket, so its streams get the longer grace
        call = CreateCall(who, request, trace, key=message.key, kept=True, dialect=message.dialect)
        opened = await self._gateway.streams.create(call)
        if opened is not None:
            subscribe(channel, opened, message.dialect)

    async def _subscribe(self, who: Principal, message: Sub, channel: Channel, trace: ReaderTrace) -> None:
        reads = self._gateway.reads
        after = Cursor.parse(message.after)
        # A client that has something already gets the rest, not everything again
        if message.mode == "snapshot" and not after.seq:
            self._snapshots = self._snapshots or asyncio.Lock()
            # A snapshot is one piece, however large: a full socket gets none, and one is read at a time
            async with self._snapshots:
                if not self._socket.full:
                    opened = await reads.follow_whole(who, message.stream, trace)
                    subscribe(channel, opened, message.dialect, whole=True)
                    return
        found = await reads.follow(who, message.stream, after, trace, exact=message.mode == "tokens")
        if found is not None:
            subscribe(channel, found, message.dialect)
            return
        # The reader has everything: repeat only how the stream ended
        page, terminal = await reads.end_of(who, StreamId(message.stream))
        if channel.is_open:
            channel.set_stream(message.stream, None, page.head)
            channel.end_frame = terminal
            channel.open(str(page.epoch), page.head, page.status)
            channel.end(page.status)


def subscribe(channel: Channel, opened: OpenedStream, dialect: str, *, whole: bool = False) -> None:
    """Deliver a stream to a channel. ``whole``: first send its frames so far as one snapshot. Raises StreamGwError."""
    if whole:
        channel.set_stream(opened.id, opened.encoder(dialect), 0)
        channel.snapshot(opened.after.seq, snapshot(opened.facts, list(opened.seen)))
    else:
        channel.set_stream(opened.id, opened.encoder(dialect), opened.after.seq)
    socket = channel.socket
    is_open = channel.is_open
    subscription = opened.subscribe(channel)
    if not is_open:  # the client has unsubscribed, or the socket has gone, while the stream was being opened
        subscription.close(socket.read_end)
        return
    if channel.is_open:  # a short stream has ended already
        channel.handle = subscription
    channel.open(opened.epoch, subscription.head, subscription.local.status)
    if channel.is_open and channel.full and not socket.full:  # the socket drained while the stream was being opened
        channel.full = False
        subscription.resume()


def _too_many_commands() -> TooMany:
    return TooMany(f"{WS_PENDING_MAX} commands of this socket are still running, the limit; wait for their answers")
