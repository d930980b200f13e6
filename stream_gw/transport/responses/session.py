"""The WebSocket mode of the Responses API: carries out the events that a client sends (``docs/protocol.md``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from starlette.types import Receive, Scope, Send

from stream_fabric.errors import BadRequest, Draining, StreamGwError
from stream_gw.auth import Principal, bearer
from stream_gw.dialects.errors import error_body
from stream_gw.dialects.responses.client_events import Steer, read_envelope, read_steer
from stream_gw.dialects.responses.errors import is_open, open_error_body
from stream_gw.dialects.responses.requests import OPEN, OPENAI
from stream_gw.observe.trace import ReaderTrace
from stream_gw.streams.gateway import Gateway
from stream_gw.transport.connection import CONNECTION, EdgeWebSocket
from stream_gw.transport.http import JSON
from stream_gw.transport.responses.answering import TurnAnswers
from stream_gw.transport.responses.errors import error_event
from stream_gw.transport.responses.socket import ResponsesSocket
from stream_gw.transport.responses.steering import SocketSteering
from stream_gw.transport.responses.turn import Turn
from stream_gw.transport.sockets.base import EdgeSocket
from stream_gw.transport.sockets.session import SocketSession

PATHS = ("/v1/responses", "/v1/open/responses")


async def serve(
    scope: Scope,
    receive: Receive,
    send: Send,
    gateway: Gateway,
    name: str,
    register: Callable[[EdgeSocket], Callable[[], None]],
    on_answered: Callable[[str, str, ReaderTrace | None, StreamGwError | None], None],
) -> None:
    """Accept a socket and serve it until it ends. ``register`` adds the socket, and returns the call that removes it.

    ``on_answered`` gets the path, the socket's name, the trace and the error of each request that has ended.
    """
    await receive()  # websocket.connect
    path, headers = scope["path"], dict(scope["headers"])
    is_open_profile = is_open(path, headers)
    try:
        who = await gateway.authenticate_newly(partial(gateway.authenticate, bearer(scope["headers"])))
        if gateway.readiness.draining:
            raise Draining("this gateway is shutting down; connect again, another gateway will answer", retry_after_s=1)
    except StreamGwError as error:
        on_answered(path, name, None, error)
        await _refuse(send, error, name, is_open_profile=is_open_profile)
        return
    await send({"type": "websocket.accept", "subprotocol": None, "headers": [(b"x-request-id", name.encode())]})
    connection: EdgeWebSocket = scope["state"][CONNECTION]
    connection.trim()
    scope.clear()
    now = asyncio.get_running_loop().time
    socket = ResponsesSocket(connection, name, now, gateway.bodies, gateway.histories, who, is_open=is_open_profile)
    unregister = register(socket)
    session = ResponsesSession(socket, gateway, lambda trace, error: on_answered(path, name, trace, error))
    try:
        await session.run(receive)
    finally:
        unregister()
        await session.end()
        socket.recent.clear()


async def _refuse(send: Send, error: StreamGwError, name: str, *, is_open_profile: bool) -> None:
    """Answer the handshake with an error: clients of this API are programs, which see the status."""
    body = (open_error_body if is_open_profile else error_body)(error, name)
    headers = [JSON, (b"x-request-id", name.encode()), (b"content-length", b"%d" % len(body)), *error.headers]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    await send({"type": "websocket.http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


class ResponsesSession(SocketSession[ResponsesSocket]):
    """Carries out the events of one socket: each ``response.create`` in a task of its own, when its lane is free.

    Events that wait count as bodies until their stream is created.
    """

    __slots__ = ("_answers", "_on_answered", "_steering")
    protocol = "the Responses API"

    def __init__(
        self,
        socket: ResponsesSocket,
        gateway: Gateway,
        on_answered: Callable[[ReaderTrace | None, StreamGwError | None], None],
    ) -> None:
        super().__init__(socket, gateway)
        self._on_answered = on_answered
        self._steering = SocketSteering(socket, gateway)
        self._answers = TurnAnswers(socket, gateway, self._steering, OPEN if socket.is_open_profile else OPENAI)

    @property
    def _who(self) -> Principal:
        """The caller as its key is now."""
        return self.gateway.parts.authenticator.keys.current(self.socket.principal)

    # --- events --------------------------------------------------------------------------------------------

    async def take(self, text: str) -> None:
        message, lane = text.encode(), None
        try:
            envelope = read_envelope(message)
        except StreamGwError as error:
            self._refuse(error, lane)
            if not self.socket.take_bad_message():
                self.socket.close(1008, "too many malformed messages")
            return
        try:
            lane = envelope.lane
            match envelope.type:
                case "response.create":
                    self._queue(lane, message)
                case "response.steer":
                    self._steer(read_steer(message))
                case other:
                    known = "response.create or response.steer"
                    raise BadRequest(f"type must be {known}, got {other[:64]!r}", param="type")
        except StreamGwError as error:
            self._refuse(error, lane)

    def _steer(self, event: Steer) -> None:
        """Take input for a response that runs, and cut the response."""
        target = self._steering.receive(self._who, event)
        if target is not None:
            self.start(self._steering.cut(self._who, target))

    def _refuse(self, error: StreamGwError, lane: str | None) -> None:
        socket = self.socket
        socket.reply_text(error_event(error, lane, socket.name, is_open=socket.is_open_profile))
        self._on_answered(None, error)

    # --- turns ---------------------------------------------------------------------------------------------

    def _queue(self, lane: str | None, message: bytes) -> None:
        """Queue a request in its lane. Raises StreamGwError."""
        socket = self.socket
        if socket.hinted:
            raise Draining("this gateway is shutting down; reconnect", retry_after_s=1)
        bodies, tenant = self.gateway.bodies, socket.principal.tenant
        bodies.add(tenant, len(message))
        try:
            socket.lanes.add(lane, Turn(socket, lane, message))
        except StreamGwError:
            bodies.remove(tenant, len(message))
            raise
        self._start()

    def _start(self) -> None:
        """Start the turns whose lane is free."""
        for turn in self.socket.lanes.startable():
            self.start(self._answer(turn))

    async def _answer(self, turn: Turn) -> None:
        """Answer one request, then let the next one of its lane run."""
        try:
            error = await self._answers.answer(self._who, turn)
            successor = self._steering.follow(turn)
            if successor is not None:
                self.socket.lanes.add_next(turn.lane, successor)
        finally:
            self.socket.lanes.finish(turn.lane)
        self._on_answered(turn.trace, error)
        if self.socket.is_live:
            self._start()
            self.socket.close_if_leaving()
