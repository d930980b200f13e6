"""The gateway's ASGI app: its routes, and the upkeep of open connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from stream_fabric.errors import Draining, NotFound, StreamGwError
from stream_fabric.limits import SWEEP_EVERY_S
from stream_fabric.stream.frames import passed_over
from stream_fabric.stream.ids import StreamId
from stream_gw.admin.feed import Ops
from stream_gw.admin.records import GatewayStats
from stream_gw.admin.traces import Traces
from stream_gw.admin.usage import Usage
from stream_gw.auth import Principal, Revoked, bearer
from stream_gw.dialects.parsers import PATHS
from stream_gw.observe.access import AccessLog
from stream_gw.observe.local_stats import LocalStatsWindow
from stream_gw.observe.metrics import Metrics
from stream_gw.observe.trace import ReaderTrace
from stream_gw.streams.gateway import Gateway
from stream_gw.transport import ws
from stream_gw.transport.cors import CorsPolicy
from stream_gw.transport.endpoint import Answering, Endpoint, Handler
from stream_gw.transport.pages import Site, SiteApp
from stream_gw.transport.reference.served import ReferenceRoutes
from stream_gw.transport.reference.unserved import unserved
from stream_gw.transport.responses import ResponseRoutes, session
from stream_gw.transport.service_routes import ServiceRoutes
from stream_gw.transport.sockets import EdgeSocket
from stream_gw.transport.sockets.base import refuse_handshake
from stream_gw.transport.stored import StoredRoutes
from stream_gw.transport.stream_routes import StreamRoutes
from stream_gw.transport.sweeping import batches
from stream_gw.transport.tenancy_routes import TenancyRoutes
from stream_gw.transport.ui import UiRoutes, chat_socket

if TYPE_CHECKING:
    from stream_gw.tenancy import Tenancy

_METHODS = ("get", "post", "put", "patch", "delete")


class Edge:
    """The HTTP and WebSocket side of one gateway."""

    def __init__(
        self,
        gateway: Gateway,
        metrics: Metrics,
        access: AccessLog,
        recent: LocalStatsWindow,
        tenancy: Tenancy | None = None,
    ) -> None:
        """``tenancy`` None: no database of tenants is configured."""
        self._gateway = gateway
        self._metrics = metrics
        parts = gateway.parts
        cors = CorsPolicy(parts.settings.cors_origins)
        self._answering = Answering(
            parts.clock, parts.random, metrics, access, cors, gateway.bodies, parts.authenticator.catch_up
        )
        traces = Traces(parts.settings.telemetry_url, parts.settings.telemetry_token.get_secret_value())
        usage = Usage(
            parts.settings.telemetry_url, parts.settings.telemetry_token.get_secret_value(), parts.authenticator.keys
        )
        self.sockets: set[EdgeSocket] = set()
        self._sockets: dict[str, ASGIApp] = {
            "/v1/stream": self._serve_stream,
            "/v1/ui/chat": self._serve_chats,
            **dict.fromkeys(session.PATHS, self._serve_responses),
        }
        """WebSockets by path."""
        self.ops = Ops(parts.pools, parts.directory, traces, self._gateway_stats, recent.stats, parts.clock)
        self._streams = StreamRoutes(gateway, self._answering, metrics)
        self._ui = UiRoutes(gateway, self._streams, metrics)
        self._chats = chat_socket(self._ui.calls)
        self._responses = ResponseRoutes(gateway, self._streams, metrics)
        self._services = ServiceRoutes(gateway, self._answering, metrics, self.ops, traces, usage, self._update_gauges)
        self._tenants = TenancyRoutes(gateway, tenancy)
        self._stored = StoredRoutes(gateway)
        self._reference = ReferenceRoutes()
        self._swept_lagging = 0
        """Readers with a full connection at the last sweep."""
        self.paths: dict[str, tuple[str, ...]] = {}
        """Methods of every path that is routed, but HEAD; filled by ``_routes``."""
        self.app = self._routes()

    @property
    def busy(self) -> bool:
        """Whether a reader is being served or a request is being answered."""
        return bool(self._answering.count or self.sockets)

    # --- routes --------------------------------------------------------------------------------------------

    def _routes(self) -> ASGIApp:
        streams, services = self._streams, self._services
        # Starlette's router without its middleware: Endpoint answers errors, and each layer would cost every open
        # stream a frame
        direct: dict[str, ASGIApp] = {
            path: self._endpoint(path, post=streams.creator(parser)) for path, parser in PATHS.items()
        }
        direct["/v1/ui/chat"] = self._endpoint("/v1/ui/chat", post=self._ui.create)
        router = Router(
            routes=[
                self._route("/v1/models", get=services.models),
                self._route("/v1/models/{id:path}", get=services.model),
                self._route("/v1/tokens", post=services.tokens),
                self._route("/v1/limits", get=services.limits),
                self._route("/v1/usage", get=services.usage),
                self._route("/v1/admin/usage", get=services.admin_usage),
                self._route("/v1/cookie", post=services.set_cookie, delete=services.clear_cookie),
                self._route("/v1/streams", get=streams.running),
                self._route("/v1/streams/{id}", get=streams.follow),
                self._route("/v1/streams/{id}/info", get=streams.info),
                self._route("/v1/streams/{id}/placement", get=streams.placement),
                self._route("/v1/streams/{id}/cancel", post=streams.cancel),
                self._route("/v1/streams/{id}/links", delete=streams.end_links),
                self._route("/v1/streams/{id}/input", post=streams.input),
                self._route("/v1/ui/chat/{id:path}/stream", get=self._ui.resume),
                self._route("/v1/ui/chat/{id:path}", delete=self._ui.stop),
                self._route("/v1/admin/traces{rest:path}", get=services.traces),
                self._route("/v1/admin/ops", get=services.ops),
                *(self._route(path, **handlers) for path, handlers in self._stored.handlers().items()),
                *(self._route(path, **handlers) for path, handlers in self._responses.handlers().items()),
                *(self._route(path, **handlers) for path, handlers in self._tenants.handlers().items()),
                self._route("/openapi.json", get=self._reference.document),
                self._route("/asyncapi.json", get=self._reference.asyncapi),
                self._route("/healthz", get=services.healthz),
                self._route("/readyz", get=services.readyz),
                self._route("/metrics", get=services.metrics),
                *self._page_routes(),
            ],
            # No route for every path: the pattern of one does not match a line break
            default=self._endpoint("/{rest:path}", **dict.fromkeys(_METHODS, services.unknown_path)),
            redirect_slashes=False,
        )

        def app(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            # Returns the coroutine of an endpoint whose streams stay open: one frame less for each
            if scope["type"] == "websocket":
                return self._sockets.get(scope["path"], _refuse_socket)(scope, receive, send)
            return direct.get(scope["path"], router)(scope, receive, send)

        return app

    def _endpoint(self, path: str, **handlers: Handler) -> Endpoint:
        self.paths[path] = tuple(handlers)
        return Endpoint(self._answering, path, {method.upper(): handler for method, handler in handlers.items()})

    def _route(self, path: str, **handlers: Handler) -> Route:
        return Route(path, self._endpoint(path, **handlers))

    def _page_routes(self) -> list[Route]:
        site, make_request = Site(Path(str(files("stream_gw") / "static"))), self._answering.request

        def page(path: str, name: str, head: str | None = None) -> Route:
            self.paths[path] = ("get",)
            return Route(path, SiteApp(site, make_request, site.page(name, head)))

        self.paths["/static"] = ("get",)
        return [
            Route("/static/{path:path}", SiteApp(site, make_request)),
            page("/", "index.html"),
            page("/ops", "ops.html", "head.html"),
            page("/docs", "docs.html", "head.html"),
            page("/watch", "watch.html"),
        ]

    # --- sockets -------------------------------------------------------------------------------------------

    def _serve_stream(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._serve_channels(scope, receive, send, ws.TOKENSTREAM)

    def _serve_chats(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._serve_channels(scope, receive, send, self._chats)

    def _serve_channels(self, scope: Scope, receive: Receive, send: Send, kind: ws.SocketKind) -> Awaitable[None]:
        name, credential = self._connection_name(), bearer(scope["headers"])
        return ws.serve(scope, receive, send, self._gateway, name, credential, self._register_socket, kind)

    def _serve_responses(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        name, register = self._connection_name(), self._register_socket
        return session.serve(scope, receive, send, self._gateway, name, register, self._receive_answered)

    def _connection_name(self) -> str:
        return "conn_" + self._gateway.parts.random.token_hex(8)

    def _receive_answered(self, path: str, name: str, trace: ReaderTrace | None, error: StreamGwError | None) -> None:
        """Count and log a request of a Responses socket."""
        self._metrics.requests(path, str(200 if error is None else error.http_status)).inc()
        if error is not None:
            self._answering.access.receive_refused(name, path, trace, error)

    def _register_socket(self, socket: EdgeSocket) -> Callable[[], None]:
        """Add a socket to those that are swept and drained; return the call that removes it."""
        self.sockets.add(socket)
        if self._gateway.readiness.draining:  # the load balancer has not noticed yet; sent after hi
            asyncio.get_running_loop().call_soon(socket.ask_to_reconnect, 0.0)
        return lambda: self.sockets.discard(socket)

    # --- upkeep --------------------------------------------------------------------------------------------

    def _gateway_stats(self, viewers: int) -> GatewayStats:
        """Return this gateway's own figures for the operations feed."""
        parts = self._gateway.parts
        streams = len(parts.hub.local)
        return GatewayStats(parts.name, parts.settings.region, streams, len(self.sockets), self._swept_lagging, viewers)

    def _update_gauges(self) -> None:
        """Set the gauges of open streams, open sockets and lagging readers."""
        self._metrics.open_streams.set(len(self._gateway.parts.hub.local))
        self._metrics.open_sockets.set(len(self.sockets))
        self._metrics.receive_passed_over(passed_over.count)
        self._metrics.lagging.set(sum(o.full for o in self._streams.outlets) + sum(s.full for s in self.sockets))

    async def sweep(self) -> None:
        """Send heartbeats and pings every few seconds, and end connections that take nothing."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            await self._sweep_once(asyncio.get_running_loop())
            await self.end_unauthorized()  # keys that have expired

    async def _sweep_once(self, loop: asyncio.AbstractEventLoop) -> None:
        lagging = 0
        async for outlets in batches(self._streams.outlets):
            for outlet in outlets:
                outlet.sweep(loop.time())
                lagging += outlet.full
        self.ops.sample_loads()
        for viewer in tuple(self.ops.viewers):
            viewer.sweep(loop.time())
        async for sockets in batches(self.sockets):
            for socket in sockets:
                socket.sweep(loop.time(), self._gateway.parts.unix_s())
                lagging += socket.full
        self._swept_lagging = lagging

    def receive_revoked(self, revoked: list[Revoked]) -> None:
        """End what revoked keys have open, and cancel what they run unless the plan lets it finish."""
        for each in revoked:
            if not each.finish:
                self._gateway.commands.end_revoked(each)
        self._gateway.parts.hub.spawn(self.end_unauthorized())

    async def end_unauthorized(self) -> None:
        """End the connections of callers whose API key or user may no longer call."""
        parts = self._gateway.parts
        await self._end_readers(lambda who: parts.authenticator.reason_to_end(who, parts.unix_s()))

    async def end_recalled_links(self) -> None:
        """End the connections of those who watch by a link that the stream's owner has ended, until cancelled."""

        def readers() -> Iterable[Principal]:
            yield from self._streams.readers()
            yield from (socket.principal for socket in self.sockets if socket.principal is not None)

        await self._gateway.links.run(readers, self._end_readers)

    async def _end_readers(self, reason_to_end: Callable[[Principal], StreamGwError | None]) -> None:
        await self._streams.end_unauthorized(reason_to_end)
        async for sockets in batches(self.sockets):
            for socket in sockets:
                if socket.principal is not None and (error := reason_to_end(socket.principal)) is not None:
                    socket.close(error.close_code, error.message)
        for viewer in tuple(self.ops.viewers):
            if (error := reason_to_end(viewer.who)) is not None:
                viewer.fail(error)

    # --- drain ---------------------------------------------------------------------------------------------

    async def drain(self, delay_s: float, drain_s: float, spread_s: float) -> None:
        """Take no new work after ``delay_s``. Let readers reconnect elsewhere, spread over ``spread_s``; wait
        ``drain_s`` for the rest.

        Plain streams run to their end meanwhile. ``end_readers`` ends those that outlast it.
        """
        gateway, loop = self._gateway, asyncio.get_running_loop()
        gateway.readiness.leaving = True
        await asyncio.sleep(delay_s)
        gateway.readiness.draining = True
        deadline = loop.time() + drain_s
        self.ops.drain()
        for socket in tuple(self.sockets):
            # Each at its own moment, so that the other gateways see no burst of connections
            socket.ask_to_reconnect(gateway.parts.random.uniform(0, min(spread_s, drain_s / 2)))
        while loop.time() < deadline and self.busy:  # noqa: ASYNC110  # readers come and go; this is a process's end
            await asyncio.sleep(0.05)

    def end_readers(self) -> None:
        """Tell all that still read where to go on, and end them."""
        for local in tuple(self._gateway.parts.hub.local.values()):
            for sub in tuple(local.subs):
                local.fail(sub, _draining_error(local.id))
        for socket in tuple(self.sockets):
            socket.close(Draining.close_code, "this gateway is shutting down; reconnect")


def _draining_error(stream: StreamId) -> Draining:
    """Make the error of a reader that the end of the drain cuts off."""
    return Draining(f"this gateway is shutting down; continue with GET /v1/streams/{stream}?after=<cursor>")


async def _refuse_socket(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse the handshake of a WebSocket whose path has none."""
    await receive()
    missing = unserved(scope["path"]) or NotFound(
        f"no WebSocket at {scope['path'][:200]!r}; the paths are /v1/stream, /v1/responses and /v1/ui/chat"
    )
    await refuse_handshake(send, missing)
