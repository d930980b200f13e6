"""The gateway's HTTP surface: routes, bodies in, answers out. What they mean is ``gateway.Gateway``'s."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.routing import Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from stream_fabric.cursor import BEGINNING, Cursor
from stream_fabric.errors import (
    BadRequest,
    Forbidden,
    IdempotencyMismatch,
    MethodNotAllowed,
    NotFound,
    StreamGwError,
    Unauthenticated,
)
from stream_fabric.ids import StreamId
from stream_gw import sse, ws
from stream_gw.access import AccessLog
from stream_gw.admin import Traces, check_operator
from stream_gw.auth import Principal, TokenRequest, bearer, cookie_cleared, cookie_of, cookie_set
from stream_gw.collect import CollectOutlet
from stream_gw.dialects import encoder_for
from stream_gw.dialects.embeddings import parse_embeddings
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.requests import CreateRequest, parse_create
from stream_gw.dialects.rerank import parse_rerank
from stream_gw.gateway import Gateway, NewStream, PastTheEnd, cancel_json, describe, prepared
from stream_gw.http import JSON, ClientGone, Request, parse
from stream_gw.hub import Subscription
from stream_gw.metrics import Metrics
from stream_gw.ops import Itself, Ops, Viewer
from stream_gw.recent import Recent
from stream_gw.server import CONNECTION, EdgeHttp
from stream_gw.sse import SseOutlet

_SWEEP_S = 5.0
_NO_STORE = [(b"cache-control", b"no-store")]
_CONTENT_SECURITY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self' ws: wss:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Open:
    """A response that stays open: what is left to do when its ``outlet`` is done."""

    __slots__ = ("_edge", "outlet", "subscription")

    def __init__(self, edge: Edge, outlet: SseOutlet, subscription: Subscription) -> None:
        self._edge = edge
        self.outlet = outlet
        self.subscription = subscription

    def close(self) -> None:
        self._edge.outlets.discard(self.outlet)
        self.subscription.close("stalled" if self.outlet.stalled else "left")
        if self.outlet.stalled:
            self._edge.metrics.stalled.inc()


class Watched:
    """As ``Open``, of one who watches the operations page."""

    __slots__ = ("_edge", "outlet")

    def __init__(self, edge: Edge, outlet: Viewer) -> None:
        self._edge = edge
        self.outlet = outlet

    def close(self) -> None:
        self._edge.ops.leave(self.outlet)
        if self.outlet.stalled:
            self._edge.metrics.stalled.inc()


Handler = Callable[[Request, Send], Awaitable[Open | Watched | None]]
Parser = Callable[[bytes], CreateRequest]


class Edge:
    """The routes of one gateway."""

    def __init__(
        self,
        gateway: Gateway,
        metrics: Metrics | None = None,
        access: AccessLog | None = None,
        recent: Recent | None = None,
    ) -> None:
        self.gateway = gateway
        self.access = access or AccessLog(0)
        settings = gateway.settings
        self.traces = Traces(settings.telemetry_url, settings.telemetry_token.get_secret_value())
        self.metrics = metrics or Metrics()
        self.outlets: set[SseOutlet] = set()
        self.sockets: set[ws.Socket] = set()
        now = time.monotonic
        here = (recent or Recent(now)).told
        self.ops = Ops(gateway.pools, gateway.directory, self.traces, self._itself, here, now)
        self.answering = 0
        """Requests whose answer is not whole."""
        self._swept_lagging = 0
        """Readers that kept only a cursor when the last sweep came by."""
        self.app = self._routes()

    @property
    def busy(self) -> bool:
        """Whether a reader is being served, or is about to be."""
        return bool(self.answering or self.sockets)

    def _routes(self) -> ASGIApp:
        def endpoint(path: str, handlers: dict[str, Any]) -> _Endpoint:
            return _Endpoint(self, path, {k.upper(): v for k, v in handlers.items()})

        def route(path: str, **handlers: Any) -> Route:
            return Route(path, endpoint(path, handlers))

        static = files("stream_gw") / "static"
        # Starlette's router without its middleware: errors are answered in _Endpoint, and each layer would cost every
        # open stream a frame
        direct: dict[str, ASGIApp] = {
            "/v1/chat/completions": endpoint(
                "/v1/chat/completions", {"post": self._creator(partial(parse_create, kind="chat"))}
            ),
            "/v1/completions": endpoint(
                "/v1/completions", {"post": self._creator(partial(parse_create, kind="completions"))}
            ),
            "/v1/embeddings": endpoint("/v1/embeddings", {"post": self._creator(parse_embeddings)}),
            "/v1/rerank": endpoint("/v1/rerank", {"post": self._creator(parse_rerank)}),
        }
        socket = _Socket(self)
        router = Router(
            routes=[
                route("/v1/models", get=self._models),
                route("/v1/tokens", post=self._tokens),
                route("/v1/cookie", post=self._set_cookie, delete=self._clear_cookie),
                route("/v1/streams", get=self._running),
                route("/v1/streams/{id}", get=self._follow),
                route("/v1/streams/{id}/info", get=self._info),
                route("/v1/streams/{id}/placement", get=self._placement),
                route("/v1/streams/{id}/cancel", post=self._cancel),
                route("/v1/streams/{id}/input", post=self._input),
                route("/v1/admin/traces{rest:path}", get=self._traces),
                route("/v1/admin/ops", get=self._ops),
                route("/healthz", get=self._healthz),
                route("/readyz", get=self._readyz),
                route("/metrics", get=self._metrics),
                Mount("/static", _Secured(StaticFiles(directory=str(static)))),
                Route("/", _Secured(_Page(str(static / "index.html")))),
                Route("/ops", _Secured(_Page(str(static / "ops.html")))),
                route("/{rest:path}", get=_unknown, post=_unknown, put=_unknown, delete=_unknown),
            ]
        )

        def app(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            # Where streams stay open, the endpoint's coroutine is returned itself: a frame less for each
            if scope["type"] == "websocket":
                return (socket if scope["path"] == "/v1/stream" else _no_socket)(scope, receive, send)
            return direct.get(scope["path"], router)(scope, receive, send)

        return app

    def _who(self, request: Request) -> Principal:
        return self.gateway.authenticate(bearer(request.scope["headers"]))

    def _reader(self, request: Request) -> Principal:
        """Who reads a stream: as ``_who``, or without such a header by the cookie of a browser's EventSource."""
        headers = request.headers
        if b"authorization" in headers or b"x-api-key" in headers:
            return self._who(request)
        token = cookie_of(request.scope["headers"])
        if token is None:
            return self._who(request)
        if headers.get(b"sec-fetch-site") == b"cross-site":
            raise Unauthenticated("the cookie is not taken from a page of another site")
        return self.gateway.authenticator.authenticate_cookie(token, time.time())

    # --- create --------------------------------------------------------------------------------------------

    def _creator(self, parser: Parser) -> Handler:
        async def create(request: Request, send: Send) -> Open | None:
            try:
                outlet = await self._create(request, parser)
            except PastTheEnd:
                await request.answer(204)
                return None
            if not isinstance(outlet, CollectOutlet):
                return await self._stream(request, outlet[0], outlet[1], send)
            await self._answer_collected(request, outlet)
            return None

        return create

    async def _create(self, request: Request, parser: Parser) -> CollectOutlet | tuple[SseOutlet, NewStream]:
        who = self._who(request)
        parsed = parser(await request.body())
        key = request.header(b"idempotency-key")
        connection: EdgeHttp = request.scope["state"][CONNECTION]
        trace = request.trace(self.gateway.tracer, "sse" if parsed.stream else "whole")
        if not parsed.stream:
            connection.skip_body()  # a large one has paused the reading, and a client that leaves would not be noticed
            collected: list[CollectOutlet] = []

            def collect(stream: StreamId, facts: StreamFacts, structure: tuple[bytes, ...]) -> CollectOutlet:
                if facts.kind != parsed.kind:
                    raise IdempotencyMismatch(f"this Idempotency-Key was used for {facts.kind}; take a new key")
                collected.append(CollectOutlet(connection, stream, facts))
                return collected[-1]

            new = await self.gateway.create(
                who, parsed, key=key, kept=False, after=None, trace=trace, make_outlet=collect
            )
            outlet = collected[-1]
            outlet.close = new.subscription.close
            return outlet
        last_event_id = request.header(b"last-event-id")
        after = Cursor.parse(last_event_id) if last_event_id else None
        made: list[SseOutlet] = []
        dialect = f"openai.{parsed.kind}"
        new = await self.gateway.create(
            who,
            parsed,
            key=key,
            kept=False,
            after=after,
            trace=trace,
            make_outlet=self._sse_maker(request, dialect, made),
        )
        return made[-1], new

    def _sse_maker(self, request: Request, dialect: str | None, made: list[SseOutlet]) -> Any:
        request_id = request.id

        def make(stream: StreamId, facts: StreamFacts, structure: tuple[bytes, ...]) -> SseOutlet:
            encoder = prepared(dialect or f"openai.{facts.kind}", facts, structure)
            made.append(SseOutlet(request.scope["state"][CONNECTION], encoder, request_id))
            return made[-1]

        return make

    async def _stream(self, request: Request, outlet: SseOutlet, new: NewStream, send: Send) -> Open:
        """Send the headers and the first heartbeat; the tokens come by themselves."""
        subscription = new.subscription
        outlet.resume = subscription.resume
        if not outlet.full:  # it may have drained while the stream was being found
            subscription.resume()
        self.outlets.add(outlet)
        connection: EdgeHttp = request.scope["state"][CONNECTION]

        opened = Open(self, outlet, subscription)
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [
                        *sse.HEADERS,
                        (b"x-request-id", request.id.encode()),
                        (b"x-stream-id", new.id.encode()),
                        (b"x-stream-epoch", new.epoch.encode()),
                        (b"link", b'</v1/streams/%b>; rel="resume"' % new.id.encode()),
                    ],
                }
            )
            connection.skip_body()
            outlet.open(retry=b"text/event-stream" in request.headers.get(b"accept", b""))
        except BaseException:
            opened.close()
            raise
        return opened

    async def _answer_collected(self, request: Request, outlet: CollectOutlet) -> None:
        try:
            body, error = await outlet.done
        finally:
            outlet.close()
        headers = [JSON, (b"x-stream-id", outlet.stream.encode())]
        if body is not None:
            await request.answer(200, body, headers)
        elif error is not None:
            raise error

    # --- streams -------------------------------------------------------------------------------------------

    async def _follow(self, request: Request, send: Send) -> Open | None:
        if request.scope["method"] == "HEAD":
            _, meta = await self.gateway.look(self._reader(request), request.path_params["id"])
            encoder_for(f"openai.{meta.facts.kind}", meta.facts)  # or it cannot be followed
            await send({"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return None
        made: list[SseOutlet] = []
        new = await self._followed(request, made)
        if new is not None:
            return await self._stream(request, made[-1], new, send)
        await request.answer(204)
        return None

    async def _followed(self, request: Request, made: list[SseOutlet]) -> NewStream | None:
        who = self._reader(request)
        after = Cursor.parse(request.header(b"last-event-id") or request.query.get("after") or str(BEGINNING))
        mode = request.query.get("mode", "tokens")
        if mode not in ("tokens", "coalesce"):
            raise BadRequest(f"mode is tokens or coalesce over SSE, got {mode[:64]!r}", param="mode")
        if after.seq:
            self.metrics.resumes.inc()
        make = self._sse_maker(request, request.query.get("dialect"), made)
        trace = request.trace(self.gateway.tracer, "sse")
        try:
            return await self.gateway.follow(who, request.path_params["id"], after, trace, make, exact=mode == "tokens")
        except PastTheEnd:
            return None

    async def _info(self, request: Request, send: Send) -> None:
        who = self._who(request)
        page, meta = await self.gateway.look(who, request.path_params["id"])
        await request.json(200, describe(StreamId(request.path_params["id"]), page, meta))

    async def _placement(self, request: Request, send: Send) -> None:
        who = self._who(request)
        await request.json(200, await self.gateway.placement(who, request.path_params["id"]))

    async def _cancel(self, request: Request, send: Send) -> None:
        who = self._who(request)
        reply = await self.gateway.cancel(who, request.path_params["id"])
        self.metrics.cancels.labels(reply.result).inc()
        await request.json(200, cancel_json(reply))

    async def _input(self, request: Request, send: Send) -> None:
        class Body(msgspec.Struct):
            id: str
            item: dict[str, Any]

        who = self._who(request)
        body = parse(await request.body(), Body)
        item = msgspec.Raw(msgspec.json.encode(body.item))
        result = await self.gateway.input(who, request.path_params["id"], body.id, item)
        await request.json(202 if result != "terminal" else 409, {"result": result})

    async def _running(self, request: Request, send: Send) -> None:
        who = self._who(request)
        user = request.query.get("user") or who.user
        if not user:
            raise BadRequest("name the user whose streams to list: /v1/streams?user=…", param="user")
        await request.json(200, {"object": "list", "data": await self.gateway.running(who, user)})

    # --- the rest ------------------------------------------------------------------------------------------

    async def _models(self, request: Request, send: Send) -> None:
        who = self._who(request)
        data = [
            {"id": model, "object": "model", "created": 0, "owned_by": served.pool, "simulated": served.simulated}
            for model, served in sorted(self.gateway.directory.models().items())
            if who.models is None or model in who.models
        ]
        await request.json(200, {"object": "list", "data": data})

    async def _tokens(self, request: Request, send: Send) -> None:
        who = self._who(request)
        if not self.gateway.settings.token_secret.get_secret_value():
            raise Forbidden("this fleet mints no tokens; its operator must set STREAM_GW_TOKEN_SECRET")
        asked = parse(await request.body() or b"{}", TokenRequest)
        token, expires_at = self.gateway.authenticator.mint(who, asked, time.time())
        await request.json(200, {"token": token, "expires_at": expires_at, "scopes": asked.scopes})

    async def _set_cookie(self, request: Request, send: Send) -> None:
        token = bearer(request.scope["headers"])
        who = self._who(request)
        await request.answer(204, headers=[*_NO_STORE, cookie_set(who, token or "", time.time(), request.headers)])

    async def _clear_cookie(self, request: Request, send: Send) -> None:
        await request.answer(204, headers=[*_NO_STORE, cookie_cleared(request.headers)])

    async def _traces(self, request: Request, send: Send) -> None:
        who = self._who(request)
        rest, query = request.path_params["rest"], request.scope["query_string"]
        status, body = await self.traces.get(who, rest, query)
        await request.answer(status, body, [JSON, *_NO_STORE])

    async def _ops(self, request: Request, send: Send) -> Watched | None:
        who = self._who(request)
        check_operator(who)
        self.ops.check()
        start = {"type": "http.response.start", "status": 200}
        if request.scope["method"] == "HEAD":
            await send({**start, "headers": sse.HEADERS})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return None
        connection: EdgeHttp = request.scope["state"][CONNECTION]
        watched = Watched(self, Viewer(connection, who, request.id))
        self.ops.watch(watched.outlet)
        try:
            await send({**start, "headers": [*sse.HEADERS, (b"x-request-id", request.id.encode())]})
            connection.skip_body()
            watched.outlet.open(retry=b"text/event-stream" in request.headers.get(b"accept", b""))
        except BaseException:
            watched.close()
            raise
        return watched

    def _itself(self, viewers: int) -> Itself:
        gateway = self.gateway
        return Itself(
            gateway.name,
            gateway.settings.region,
            len(gateway.hub.local),
            len(self.sockets),
            self._swept_lagging,
            viewers,
        )

    async def _healthz(self, request: Request, send: Send) -> None:
        await request.answer(200, b"ok\n", [(b"content-type", b"text/plain")])

    async def _readyz(self, request: Request, send: Send) -> None:
        ready, word = await self.gateway.ready()
        await request.answer(200 if ready else 503, word.encode() + b"\n", [(b"content-type", b"text/plain")])

    async def _metrics(self, request: Request, send: Send) -> None:
        self.metrics.open_streams.set(len(self.gateway.hub.local))
        self.metrics.open_sockets.set(len(self.sockets))
        self.metrics.lagging.set(sum(o.full for o in self.outlets) + sum(s.full for s in self.sockets))
        page = await self.metrics.scraped(request.header(b"accept") or "")
        await request.answer(200, page.body, [(b"content-type", page.content_type.encode())])

    # --- upkeep --------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Heartbeats, pings, and ends to readers that take nothing."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            lagging = 0
            for number, outlet in enumerate(tuple(self.outlets)):
                outlet.sweep(loop.time())
                lagging += outlet.full
                if number % 500 == 499:
                    await asyncio.sleep(0)  # tokens go first
            for viewer in tuple(self.ops.viewers):
                viewer.sweep(loop.time())
            for number, socket in enumerate(tuple(self.sockets)):
                socket.sweep(loop.time(), time.time())
                lagging += socket.full
                if number % 500 == 499:
                    await asyncio.sleep(0)
            self._swept_lagging = lagging


class _Endpoint:
    """An ASGI endpoint that answers errors in one place."""

    def __init__(self, edge: Edge, path: str, handlers: dict[str, Handler]) -> None:
        self._edge = edge
        self._path = path
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        status = 200
        self._edge.answering += 1
        try:
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            handler = self._handlers.get(method)
            if handler is None:
                raise MethodNotAllowed(f"{scope['method']} is not for {self._path}; {', '.join(self._handlers)} is")
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
            status = error.http_status
            self._edge.access.receive_refused(request.id, self._path, request.traced, error)
            await request.refuse(error)
        except ClientGone:
            status = 499
        finally:
            self._edge.answering -= 1
            self._edge.metrics.requests.labels(self._path, str(status)).inc()


class _Socket:
    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        edge = self._edge

        def register(socket: ws.Socket) -> Callable[[], None]:
            edge.sockets.add(socket)
            if edge.gateway.draining:  # the load balancer has not noticed yet; after the hi
                loop.call_soon(socket.send_on, 0.0)
            return lambda: edge.sockets.discard(socket)

        loop = asyncio.get_running_loop()
        name = "conn_" + secrets.token_hex(8)
        credential = bearer(scope["headers"])
        await ws.serve(scope, receive, send, edge.gateway, name, credential, register, loop.time)


class _Secured:
    """Static answers with the headers a browser should have."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def secured(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", _CONTENT_SECURITY),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"cache-control", b"no-cache"),
                ]
            await send(message)

        try:
            await self._app(scope, receive, secured)
        except HTTPException as error:  # how Starlette's files refuse
            wrong_method = MethodNotAllowed(f"{scope['method']} is not for files; GET is")
            refused = wrong_method if error.status_code == 405 else _no_path(scope)
            await Request(scope, receive, secured).refuse(refused)


class _Page:
    def __init__(self, path: str) -> None:
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await asyncio.to_thread(_read, self._path)
        await Request(scope, receive, send).answer(200, body, [(b"content-type", b"text/html; charset=utf-8")])


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


async def _no_socket(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.close", "code": 1008, "reason": "the WebSocket is at /v1/stream"})


async def _unknown(request: Request, send: Send) -> None:
    raise _no_path(request.scope)


def _no_path(scope: Scope) -> NotFound:
    return NotFound(f"no such path {scope['path'][:200]!r}; docs/protocol.md lists them")
