"""The WebSocket transport: many streams on one socket, subprotocol ``tokenstream.v1`` (``docs/protocol.md``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from stream_fabric.errors import BadRequest, Draining, StreamGwError, TooMany, Unauthenticated
from stream_fabric.limits import STREAMS_PER_SOCKET_MAX, WS_OPENING_MAX, WS_PENDING_MAX
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.ids import StreamId, TenantId
from stream_gw.auth import Principal
from stream_gw.dialects.accumulate import snapshot
from stream_gw.dialects.base import Encoder
from stream_gw.dialects.parsers import PARSERS
from stream_gw.observe.trace import ReaderTrace
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.streams.cancel import cancel_json
from stream_gw.streams.create_call import CreateCall
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.off_loop import frames_off_loop, off_loop
from stream_gw.streams.opened import OpenedStream
from stream_gw.streams.steering.items import read_item
from stream_gw.transport.connection import CONNECTION, EdgeWebSocket
from stream_gw.transport.sockets.base import close_reason, refuse_handshake
from stream_gw.transport.sockets.session import SocketSession
from stream_gw.transport.ws_messages import (
    CHANNEL_MAX,
    Auth,
    Cancel,
    ClientMessage,
    Create,
    Input,
    Pong,
    Sub,
    Unsub,
    asker_of,
    decoder,
)
from stream_gw.transport.ws_socket import Channel, Socket

SUBPROTOCOL = "tokenstream.v1"
"""Subprotocol of ``Session``."""
_BEARER = "bearer."
C = TypeVar("C", bound=Channel)


async def serve(
    scope: Scope,
    receive: Receive,
    send: Send,
    gateway: Gateway,
    name: str,
    header_credential: str | None,
    register: Callable[[Socket], Callable[[], None]],
    kind: SocketKind,
) -> None:
    """Accept a socket of the ``kind`` and serve it until it ends. ``register`` adds the socket, and returns the call
    that removes it."""
    await receive()  # websocket.connect
    offered: list[str] = scope["subprotocols"]
    credential = header_credential or next((p.removeprefix(_BEARER) for p in offered if p.startswith(_BEARER)), None)
    principal: Principal | None = None
    if credential is not None:
        try:
            principal = await gateway.authenticate_newly(partial(kind.authenticate, gateway, credential))
        except StreamGwError as error:
            # A browser cannot see a refused handshake's status: accept and close with the code
            await send(
                {"type": "websocket.accept", "subprotocol": kind.subprotocol if kind.subprotocol in offered else None}
            )
            await send({"type": "websocket.close", "code": error.close_code, "reason": close_reason(error.message)})
            return
    if offered and kind.subprotocol not in offered:
        await refuse_handshake(send, BadRequest(f"the subprotocol here is {kind.subprotocol}; offer it, or none"))
        return
    await send({"type": "websocket.accept", "subprotocol": kind.subprotocol if offered else None})
    connection: EdgeWebSocket = scope["state"][CONNECTION]
    connection.trim()
    scope.clear()
    socket = kind.socket(connection, name, asyncio.get_running_loop().time, gateway.bodies)
    unregister = register(socket)
    if principal is not None:
        socket.greet(principal, gateway.public_id)
    session = kind.session(socket, gateway)
    try:
        await session.run(receive)
    finally:
        unregister()
        await session.end()


class CommandSession(SocketSession[Socket]):
    """Carries out commands, which count as bodies while they run."""

    __slots__ = ()

    async def wait_for_answers(self) -> None:
        await self.wait_for_tasks()

    def spawn(
        self,
        work: Coroutine[Any, Any, None],
        tenant: TenantId,
        size: int,
        refuse: Callable[[StreamGwError], None],
    ) -> None:
        """Run the command of a message of ``size`` characters in a task, or refuse it when too many or too large ones
        run."""
        bodies = self.gateway.bodies
        try:
            if len(self.tasks) >= WS_PENDING_MAX:
                raise TooMany(
                    f"{WS_PENDING_MAX} commands of this socket are still running, the limit; wait for their answers"
                )
            bodies.add(tenant, size)
        except StreamGwError as error:
            work.close()
            refuse(error)
            return
        self.start(work).add_done_callback(lambda task: bodies.remove(tenant, size))


class Session(CommandSession):
    """Carries out the messages of ``tokenstream.v1``.

    ``unsub``, ``pong`` and ``auth`` take effect at once. The others run in tasks, so that a cancel never waits for a
    create. Only a few creates and subs run at once: each may fill the connection, and the next must see that.
    Inputs run one after another, in the order of their messages.
    """

    __slots__ = ("_inputs", "_opens", "_snapshots")
    protocol = SUBPROTOCOL
    resume_with = " with the cursor"

    def __init__(self, socket: Socket, gateway: Gateway) -> None:
        super().__init__(socket, gateway)
        # Made when they are first needed: most sockets need few of them
        self._opens: asyncio.Semaphore | None = None
        self._snapshots: asyncio.Lock | None = None
        self._inputs: asyncio.Lock | None = None

    async def take(self, text: str) -> None:
        try:
            message = decoder.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            asker = asker_of(text)
            ch = None if asker.ch in self.socket.channels else asker.ch  # an error would end the channel that is open
            refusal = BadRequest(f"not a message of tokenstream.v1: {str(error)[:200]}")
            self.socket.reply_error(refusal, ch=ch, id=asker.id)
            if not self.socket.take_bad_message():
                self.socket.close(1008, "too many malformed messages")
            return
        await self._handle_message(message, len(text))

    # --- messages ------------------------------------------------------------------------------------------

    async def _handle_message(self, message: ClientMessage, size: int) -> None:
        socket, who = self.socket, self.socket.principal
        if who is None:
            await self._authenticate_first(message)
            return
        who = self.gateway.parts.authenticator.keys.current(who)  # its key may have been changed
        match message:
            case Auth(token):
                await self._renew_principal(who, token)
            case Create(ch) | Sub(ch):
                self._spawn_open(who, message, ch, size)
            case Unsub(ch):
                channel = socket.channels.pop(ch, None)
                if channel is not None:
                    channel.leave()
            case Cancel(id):
                self.spawn(self._cancel(who, message), who.tenant, size, partial(self.socket.reply_error, id=id))
            case Input(id):
                self.spawn(self._input(who, message), who.tenant, size, partial(self.socket.reply_error, id=id))
            case Pong():
                pass

    async def _authenticate_first(self, message: ClientMessage) -> None:
        if not isinstance(message, Auth):
            self.socket.close(Unauthenticated.close_code, "the first message must be auth")
            return
        try:
            self.socket.greet(await self._authenticated(message.token), self.gateway.public_id)
        except StreamGwError as error:
            self.socket.close(error.close_code, error.message)

    async def _authenticated(self, token: str) -> Principal:
        return await self.gateway.authenticate_newly(partial(self.gateway.authenticate_reader, token))

    async def _renew_principal(self, who: Principal, token: str) -> None:
        """Replace the socket's principal by that of a new token, which reaches no less: its channels stay open."""
        try:
            renewed = await self._authenticated(token)
        except StreamGwError as error:
            self.socket.reply_error(error)
            return
        if not renewed.covers(who):
            self.socket.reply_error(
                BadRequest(
                    "a socket stays with its tenant, and with the user and stream of its token; open another one"
                )
            )
            return
        self.socket.principal = renewed

    async def _cancel(self, who: Principal, message: Cancel) -> None:
        try:
            reply = await self.gateway.commands.cancel(who, message.stream)
        except StreamGwError as error:
            self.socket.reply_error(error, id=message.id)
        else:
            self.socket.reply({"t": "ack", "id": message.id, **cancel_json(reply)})

    async def _input(self, who: Principal, message: Input) -> None:
        self._inputs = self._inputs or asyncio.Lock()
        try:
            async with self._inputs:
                raw = bytes(message.item)
                item = await off_loop(len(raw), lambda: read_item(raw))
                result = await self.gateway.inputs.add(who, message.stream, message.id, item)
        except StreamGwError as error:
            self.socket.reply_error(error, id=message.id)
        else:
            self.socket.reply({"t": "ack", "id": message.id, "result": result})

    # --- channels ------------------------------------------------------------------------------------------

    def _spawn_open(self, who: Principal, message: Create | Sub, ch: int, size: int) -> None:
        """Make the channel, and open the stream in a task."""
        try:
            channel = self._new_channel(ch)
        except StreamGwError as error:
            self.socket.reply_error(error, ch=ch)
            return

        def refuse(error: StreamGwError) -> None:
            self.socket.forget(channel)
            self.socket.reply_error(error, ch=ch)

        self.spawn(self._open(who, message, channel), who.tenant, size, refuse)

    def _new_channel(self, ch: int) -> Channel:
        if not 0 <= ch <= CHANNEL_MAX:
            raise BadRequest(f"ch must be 0 to {CHANNEL_MAX}", param="ch")
        if ch in self.socket.channels:
            raise BadRequest(f"channel {ch} is open; unsub it first or use another number", param="ch")
        return add_channel(self.socket, Channel(self.socket, ch))

    async def _open(self, who: Principal, message: Create | Sub, channel: Channel) -> None:
        """Create or subscribe to the stream for the channel; send an error if that fails."""
        socket = self.socket
        trace = ReaderTrace(self.gateway.parts.tracer, socket.name, "ws", message.traceparent)
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
        body = bytes(message.body)
        parser = PARSERS.get(message.dialect, PARSERS["openai.chat"])  # an unknown dialect is refused with the stream
        request = await off_loop(len(body), lambda: parser(body))
        channel.reports_queue = message.queued
        # Readers leave with their socket, so its streams get the longer grace
        call = CreateCall(
            who, request, trace, key=message.key, kept=True, dialect=message.dialect, retried=message.retry > 0
        )
        opened = await self.gateway.streams.create(call)
        if opened is not None:
            await subscribe(channel, opened, message.dialect)

    async def _subscribe(self, who: Principal, message: Sub, channel: Channel, trace: ReaderTrace) -> None:
        reads = self.gateway.reads
        after = Cursor.parse(message.after)
        # A client that has something already gets the rest, not everything again
        if message.mode == "snapshot" and not after.seq:
            self._snapshots = self._snapshots or asyncio.Lock()
            # A snapshot is one piece, however large: a full socket gets none, and one is read at a time
            async with self._snapshots:
                if not self.socket.full:
                    opened = await reads.follow_whole(who, message.stream, trace)
                    await subscribe(channel, opened, message.dialect, whole=True)
                    return
        found = await reads.follow(
            who, message.stream, after, trace, exact=message.mode == "tokens", dialect=message.dialect
        )
        if found is not None:
            await subscribe(channel, found, message.dialect)
            return
        # The reader has everything: repeat only how the stream ended
        page, terminal = await reads.end_of(who, StreamId(message.stream))
        if channel.is_open:
            channel.set_stream(message.stream, None, page.head)
            channel.end_frame = terminal
            channel.open(str(page.epoch), page.head, page.status)
            channel.end(page.status)


def add_channel(socket: Socket, channel: C) -> C:
    """Add a channel whose stream is about to be opened. Raises TooMany and Draining."""
    if len(socket.channels) >= STREAMS_PER_SOCKET_MAX:
        raise TooMany(f"this socket is at its limit of {STREAMS_PER_SOCKET_MAX} open channels; unsub one first")
    if socket.hinted:
        raise Draining("this gateway is shutting down; reconnect", retry_after_s=1)
    socket.channels[channel.number] = channel
    return channel


async def subscribe(
    channel: Channel, opened: OpenedStream, dialect: str, *, whole: bool = False, encoder: Encoder | None = None
) -> None:
    """Deliver a stream to a channel. Raises StreamGwError.

    ``whole``: first send its frames so far as one snapshot. ``encoder``: one that continues after the reader's
    position; None: one of the dialect is made.
    """
    encoder = encoder or await opened.encoder(dialect)
    if whole:
        lines = list(opened.seen)
        chunks = await frames_off_loop(len(lines), lambda: snapshot(opened.facts, lines, dialect))
        channel.set_stream(opened.id, encoder, 0)
        channel.snapshot(opened.after.seq, chunks)
    else:
        channel.set_stream(opened.id, encoder, opened.after.seq)
    socket = channel.socket
    is_open = channel.is_open
    subscription = opened.subscribe(channel)
    if not is_open:  # the client has unsubscribed, or the socket has gone, while the stream was being opened
        subscription.close(socket.read_end)
        return
    if channel.is_open:  # a short stream has ended already
        channel.handle = subscription
    channel.open(opened.epoch, subscription.head, subscription.local.status, opened.headers)
    if channel.is_open and channel.full and not socket.full:  # the socket drained while the stream was being opened
        channel.full = False
        subscription.resume()


class SocketKind(NamedTuple):
    """Protocol of a socket's messages."""

    subprotocol: str
    authenticate: Callable[[Gateway, str], Principal]
    """Returns the owner of a handshake's credential. Raises StreamGwError."""
    socket: Callable[[EdgeWebSocket, str, Callable[[], float], BodyBytes], Socket]
    session: Callable[[Socket, Gateway], CommandSession]


TOKENSTREAM = SocketKind(SUBPROTOCOL, Gateway.authenticate_reader, Socket, Session)
