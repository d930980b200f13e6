"""One path of the HTTP API: chooses the handler, answers errors, and keeps a response of events open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from starlette.types import Receive, Scope, Send

from stream_fabric.errors import StreamGwError
from stream_fabric.limits import SSE_RETRY_MS_MAX, SSE_RETRY_MS_MIN
from stream_fabric.ports import Clock, Random
from stream_gw.auth import UnknownKey
from stream_gw.observe.access import AccessLog
from stream_gw.observe.metrics import Metrics
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.transport.cors import CorsPolicy
from stream_gw.transport.http import ClientGone, Request, WrongMethod
from stream_gw.transport.sse import SseBody


class OpenResponse(Protocol):
    """A response whose body stays open until ``outlet.done``."""

    @property
    def outlet(self) -> SseBody: ...

    def close(self) -> None:
        """Release what the response holds: its body has ended, or its reader has gone."""


Handler = Callable[[Request, Send], Awaitable[OpenResponse | None]]
"""Answers the request (None), or begins a response that stays open."""


class Answering:
    """State that a gateway's endpoints share, such as the number of requests that are being answered."""

    def __init__(
        self,
        clock: Clock,
        random: Random,
        metrics: Metrics,
        access: AccessLog,
        cors: CorsPolicy,
        bodies: BodyBytes,
        catch_up: Callable[[], Awaitable[bool]],
    ) -> None:
        """``catch_up``: as of ``Authenticator``."""
        self._clock = clock
        self._random = random
        self.metrics = metrics
        self.access = access
        self._bodies = bodies
        self.cors = cors
        self.catch_up = catch_up
        self.count = 0
        """Requests whose answer is not complete."""

    def request(self, scope: Scope, receive: Receive, send: Send) -> Request:
        return Request(scope, receive, send, self._clock, self._random, self._bodies)

    def retry_ms(self, request: Request) -> int | None:
        """Milliseconds after which an EventSource should reconnect, spread over an interval; None for other clients."""
        if b"text/event-stream" not in request.headers.get(b"accept", b""):
            return None
        return int(self._random.uniform(SSE_RETRY_MS_MIN, SSE_RETRY_MS_MAX))


class Endpoint:
    """An ASGI endpoint that answers errors in one place. ``handlers``: method → handler."""

    def __init__(self, answering: Answering, path: str, handlers: Mapping[str, Handler]) -> None:
        self._answering = answering
        self._path = path
        self._handlers = handlers
        self._methods = [*handlers, "HEAD"] if "GET" in handlers else [*handlers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = self._answering
        if _is_api(scope):
            send = answering.cors.sender(scope, send)
        request = answering.request(scope, receive, send)
        status = 200
        answering.count += 1
        try:
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            handler = self._handlers.get(method)
            if handler is None:
                if await self._answer_preflight(request):
                    return
                request.check_upgrade()
                raise WrongMethod(scope["method"], self._path, self._methods)
            try:
                opened = await handler(request, send)
            except UnknownKey:  # handlers authenticate before all else
                if not await answering.catch_up():
                    raise
                opened = await handler(request, send)
            if opened is not None:
                # An open stream keeps no more than it needs, and waits in this frame alone
                request.forget()
                del request, handler, receive
                try:
                    if await opened.outlet.done:
                        await send({"type": "http.response.body", "body": b"", "more_body": False})
                finally:
                    opened.close()
        except StreamGwError as error:
            status = request.status_of(error)
            answering.access.receive_refused(request.id, self._path, request.traced, error)
            await request.refuse(error)
        except ClientGone:
            status = 499
        finally:
            answering.count -= 1
            answering.metrics.requests(self._path, str(status)).inc()

    async def _answer_preflight(self, request: Request) -> bool:
        """Answer a browser's preflight of an allowed origin. False: the request is none."""
        if request.scope["method"] != "OPTIONS" or not _is_api(request.scope):
            return False
        headers = self._answering.cors.preflight(request.headers, self._methods)
        if headers is not None:
            await request.answer(204, headers=headers)
        return headers is not None


def _is_api(scope: Scope) -> bool:
    """Whether pages of other origins may call the path, also where nothing is served: they should read that error."""
    path: str = scope["path"]
    return path.startswith("/v1/")
