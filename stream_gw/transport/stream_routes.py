"""HTTP handlers of streams: create, follow, describe, cancel, input, list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from starlette.types import Send

from stream_fabric.errors import BadRequest, StreamGwError, Unauthenticated
from stream_fabric.limits import INPUT_BYTES_MAX, INPUT_CONTAINERS_MAX
from stream_fabric.stream.cursor import BEGINNING, Cursor
from stream_gw.auth import Principal, bearer, cookie_of
from stream_gw.delivery.local_stream import Subscription
from stream_gw.dialects import encoder_class
from stream_gw.dialects.base import Encoder
from stream_gw.dialects.parsers import Parser
from stream_gw.dialects.requests import CreateRequest
from stream_gw.observe.metrics import Metrics
from stream_gw.streams.cancel import cancel_json
from stream_gw.streams.create_call import CreateCall, OnNamed
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.opened import OpenedStream
from stream_gw.transport import sse
from stream_gw.transport.connection import CONNECTION, RESPONSE, EdgeHttp, ResponseWriter
from stream_gw.transport.endpoint import Answering, Handler
from stream_gw.transport.http import JSON, Request, parse
from stream_gw.transport.reference.answers import InputBody
from stream_gw.transport.sse import SseOutlet
from stream_gw.transport.sweeping import batches
from stream_gw.transport.whole_response import WholeResponse

_REFUSAL_S = 0.5
"""Time that the head of a new stream's response waits for the first event.

An engine refuses a request within milliseconds, and SDKs choose their exception, and whether to retry, by the status.
"""


class OpenStreamResponse:
    """A response that delivers a stream; an ``OpenResponse``."""

    __slots__ = ("_routes", "_subscription", "outlet")

    def __init__(self, routes: StreamRoutes, outlet: SseOutlet, subscription: Subscription) -> None:
        self._routes = routes
        self.outlet = outlet
        self._subscription = subscription

    def close(self) -> None:
        self._routes.outlets.discard(self.outlet)
        self._routes.forget(self._subscription)
        self._subscription.close("stalled" if self.outlet.stalled else "left")
        self.outlet.close()
        if self.outlet.stalled:
            self._routes.metrics.stalled.inc()


class StreamRoutes:
    def __init__(self, gateway: Gateway, answering: Answering, metrics: Metrics) -> None:
        self._gateway = gateway
        self._answering = answering
        self.metrics = metrics
        self.outlets: set[SseOutlet] = set()
        """Open responses."""
        self._readers: dict[Subscription, Principal] = {}
        """Callers that read a stream, of open and of whole responses."""

    async def end_unauthorized(self, reason_to_end: Callable[[Principal], StreamGwError | None]) -> None:
        """End the responses of callers that are not valid any more; their clients get the dialect's error."""
        async for batch in batches(self._readers.items()):
            for sub, who in batch:
                error = reason_to_end(who)
                if error is not None and sub in self._readers:
                    sub.local.fail(sub, error)

    def readers(self) -> Iterable[Principal]:
        """Return the callers that read a stream."""
        return tuple(self._readers.values())

    def authenticate(self, request: Request) -> Principal:
        """Return the caller. Raises Unauthenticated."""
        return request.from_caller(self._gateway.authenticate(bearer(request.scope["headers"])))

    def reader(self, request: Request) -> Principal:
        """Return the caller that reads a stream.

        Without an authorization header, the cookie of a browser's EventSource counts.
        """
        headers = request.headers
        token = cookie_of(request.scope["headers"])
        if token is None or b"authorization" in headers or b"x-api-key" in headers:
            return request.from_caller(self._gateway.authenticate_reader(bearer(request.scope["headers"])))
        if headers.get(b"sec-fetch-site") == b"cross-site":
            raise Unauthenticated("the cookie is not accepted from a page of another site")
        return request.from_caller(self._gateway.authenticate_cookie(token))

    def forget(self, subscription: Subscription) -> None:
        """Forget the caller of a response that has ended."""
        self._readers.pop(subscription, None)

    # --- create --------------------------------------------------------------------------------------------

    def creator(self, parser: Parser) -> Handler:
        """Make the handler of a path whose bodies ``parser`` reads."""

        async def create(request: Request, send: Send) -> OpenStreamResponse | None:
            who = self.authenticate(request)
            parsed = await request.parsed(who.tenant, parser)
            if parsed.stream:
                return await self.create_streamed(request, send, who, parsed)
            await self.answer_whole(request, who, await self.open_whole(request, who, parsed))
            return None

        return create

    async def create_streamed(
        self, request: Request, send: Send, who: Principal, parsed: CreateRequest, on_named: OnNamed | None = None
    ) -> OpenStreamResponse | None:
        """Create the stream, and deliver its events."""
        last_event_id = request.header(b"last-event-id")
        call = CreateCall(
            who,
            parsed,
            request.trace(self._gateway.parts.tracer, "sse"),
            key=request.header(b"idempotency-key"),
            after=Cursor.parse(last_event_id) if last_event_id else None,
            dialect=parsed.own_dialect,
            retried=request.is_retry,
            on_named=on_named,
        )
        opened = await self._gateway.streams.create(call)
        wait_s = 0.0 if parsed.background or call.after is not None else _REFUSAL_S
        return await self.deliver(request, send, who, opened, call.dialect, refusal_s=wait_s)

    async def open_whole(
        self, request: Request, who: Principal, parsed: CreateRequest, on_named: OnNamed | None = None
    ) -> OpenedStream | None:
        """Create the stream of a request that ``answer_whole`` answers."""
        connection: EdgeHttp = request.scope["state"][CONNECTION]
        trace = request.trace(self._gateway.parts.tracer, "whole")
        # An unread large body pauses reading, and a client that leaves would go unnoticed
        connection.skip_body()
        key = request.header(b"idempotency-key")
        call = CreateCall(who, parsed, trace, key=key, retried=request.is_retry, on_named=on_named)
        return await self._gateway.streams.create(call)

    async def answer_whole(self, request: Request, who: Principal, opened: OpenedStream | None) -> None:
        """Answer with all of a stream; None: it has ended without a frame."""
        if opened is None:
            await request.answer(204)
            return
        connection: EdgeHttp = request.scope["state"][CONNECTION]
        outlet = WholeResponse(connection, opened.id, opened.facts)
        subscription = opened.subscribe(outlet)
        self._readers[subscription] = who
        try:
            body, error, cursor, checked = await outlet.done
        finally:
            self.forget(subscription)
            subscription.close()
        if body is not None:
            headers = [JSON, (b"x-stream-id", opened.id.encode()), *opened.headers]
            if checked:
                headers.append((b"x-structured-output", checked.encode()))
            await request.answer(200, body, headers)
        elif error is not None and cursor is None:
            raise error
        elif error is not None:
            self._answering.access.receive_refused(request.id, request.scope["path"], request.traced, error)
            await request.refuse(error, stream=opened.id, cursor=cursor)

    async def deliver(
        self,
        request: Request,
        send: Send,
        who: Principal,
        opened: OpenedStream | None,
        dialect: str | None,
        encoder: Encoder | None = None,
        refusal_s: float = 0.0,
    ) -> OpenStreamResponse | None:
        """Send the headers and the first heartbeat; the outlet then writes the stream's events.

        ``encoder``: one that continues after the reader's position; None: one of the dialect is made. ``refusal_s``:
        the time that the headers wait for the first event. Raises the error of a stream that fails within it, without
        output.
        """
        if opened is None:
            await request.answer(204)
            return None
        connection: EdgeHttp = request.scope["state"][CONNECTION]
        writer: ResponseWriter = request.scope["state"][RESPONSE]
        outlet = SseOutlet(writer, encoder or await opened.encoder(dialect), request.id)
        subscription = opened.subscribe(outlet)
        outlet.resume = subscription.resume
        self.outlets.add(outlet)
        self._readers[subscription] = who
        response = OpenStreamResponse(self, outlet, subscription)
        try:
            if refusal_s and not opened.queued:  # one that waits is told its place at once
                connection.skip_body()  # a client that leaves would go unnoticed behind an unread large body
                refusal = await outlet.refusal(refusal_s)
                if refusal is not None:
                    raise refusal
            writer.join_head()
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [
                        *sse.HEADERS,
                        *outlet.encoder.headers,
                        *request.id_headers(),
                        (b"x-stream-id", opened.id.encode()),
                        (b"x-stream-epoch", opened.epoch.encode()),
                        (b"link", b'</v1/streams/%b>; rel="resume"' % opened.id.encode()),
                        *opened.headers,
                    ],
                }
            )
            connection.skip_body()
            outlet.open(self._answering.retry_ms(request))
        except BaseException:
            response.close()
            raise
        return response

    # --- streams that exist --------------------------------------------------------------------------------

    async def follow(self, request: Request, send: Send) -> OpenStreamResponse | None:
        who, stream = self.reader(request), request.path_params["id"]
        dialect = request.query.get("dialect")
        if request.scope["method"] == "HEAD":
            _, meta = await self._gateway.reads.read_head(who, stream)
            encoder_class(dialect or meta.facts.own_dialect, meta.facts)  # raises if GET could not follow it
            await send({"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return None
        after = Cursor.parse(request.header(b"last-event-id") or request.query.get("after") or str(BEGINNING))
        mode = request.query.get("mode", "tokens")
        if mode not in ("tokens", "coalesce"):
            raise BadRequest(f"mode is tokens or coalesce over SSE, got {mode[:64]!r}", param="mode")
        if after.seq:
            self.metrics.resumes.inc()
        trace = request.trace(self._gateway.parts.tracer, "sse")
        opened = await self._gateway.reads.follow(who, stream, after, trace, exact=mode == "tokens", dialect=dialect)
        return await self.deliver(request, send, who, opened, dialect)

    async def info(self, request: Request, send: Send) -> None:
        who = self.authenticate(request)
        await request.json(200, await self._gateway.reads.describe(who, request.path_params["id"]))

    async def placement(self, request: Request, send: Send) -> None:
        who = self.authenticate(request)
        await request.json(200, await self._gateway.reads.placement(who, request.path_params["id"]))

    async def cancel(self, request: Request, send: Send) -> None:
        who = self.authenticate(request)
        reply = await self._gateway.commands.cancel(who, request.path_params["id"])
        self.metrics.cancels.labels(reply.result).inc()
        await request.json(200, cancel_json(reply))

    async def end_links(self, request: Request, send: Send) -> None:
        who = self.authenticate(request)
        await self._gateway.links.end(who, request.path_params["id"])
        await request.answer(204)

    async def input(self, request: Request, send: Send) -> None:
        who = self.authenticate(request)
        read = partial(parse, type_=InputBody, containers_max=INPUT_CONTAINERS_MAX)
        asked = await request.parsed(who.tenant, read, INPUT_BYTES_MAX)
        result = await self._gateway.inputs.add(who, request.path_params["id"], asked.id, asked.item)
        await request.json(202 if result != "terminal" else 409, {"result": result})

    async def running(self, request: Request, send: Send) -> None:
        who = self.authenticate(request)
        user = request.query.get("user") or who.user
        if not user:
            raise BadRequest("name the user whose streams to list: /v1/streams?user=<user>", param="user")
        await request.json(200, {"object": "list", "data": await self._gateway.reads.running(who, user)})
