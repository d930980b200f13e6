"""HTTP handlers of responses: create, read, replay, cancel, delete."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Send

from stream_fabric.errors import NotFound
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.ids import StreamId
from stream_gw.auth import Principal
from stream_gw.delivery.outlet import HeldOutlet
from stream_gw.dialects import encoder_class
from stream_gw.dialects.facts import StreamFacts, StreamMeta
from stream_gw.dialects.requests import CreateRequest
from stream_gw.dialects.responses.bodies import ReadResponseQuery
from stream_gw.dialects.responses.errors import is_open
from stream_gw.dialects.responses.requests import OPEN, OPENAI, Asked, read_asked
from stream_gw.dialects.responses.resource import settings_of
from stream_gw.dialects.responses.whole import DIALECTS, encoder_after, encoder_of, frames_before, response_of
from stream_gw.observe.metrics import Metrics
from stream_gw.responses import ResponseNotFound
from stream_gw.streams.context.asides import Asides
from stream_gw.streams.context.fit import fitted
from stream_gw.streams.create_call import CreateCall, OnNamed
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.off_loop import frames_off_loop, off_loop
from stream_gw.streams.opened import OpenedStream
from stream_gw.streams.stored_responses import (
    StoredRequest,
    check_early,
    delete_stored,
    failures_traced,
    read_stored,
    with_history,
)
from stream_gw.transport import sse
from stream_gw.transport.connection import CONNECTION, EdgeHttp
from stream_gw.transport.endpoint import Handler
from stream_gw.transport.http import JSON, Request, query_as
from stream_gw.transport.stream_routes import OpenStreamResponse, StreamRoutes
from stream_gw.transport.whole_response import WholeResponse


class ResponseRoutes:
    """Responses are streams: their ids are the streams', and their truth is the log."""

    def __init__(self, gateway: Gateway, streams: StreamRoutes, metrics: Metrics) -> None:
        self._gateway = gateway
        self._streams = streams
        self._metrics = metrics

    def handlers(self) -> dict[str, dict[str, Handler]]:
        """Return the handlers by path and method, for both profiles."""
        made: dict[str, dict[str, Handler]] = {"/v1/responses/input_tokens": {"post": self.count}}
        for base in ("/v1/responses", "/v1/open/responses"):
            made[base] = {"post": self.create}
            made[base + "/{id}"] = {"get": self.read, "delete": self.delete}
            made[base + "/{id}/cancel"] = {"post": self.cancel}
        return made

    # --- create --------------------------------------------------------------------------------------------

    async def create(self, request: Request, send: Send) -> OpenStreamResponse | None:
        who = self._streams.authenticate(request)
        dialect = _profile(request)
        asked = await request.parsed(who.tenant, read_asked)
        with self._gateway.bodies.adding(who.tenant) as count:
            parsed, stored = await self._prepared(request, who, asked, dialect, count)
            del asked
            if parsed.stream:
                return await self._streams.create_streamed(request, send, who, parsed, stored)
            if parsed.background:
                await self._create_background(request, who, parsed, stored)
                return None
            opened = await self._streams.open_whole(request, who, parsed, stored)
            del parsed, stored
        await self._streams.answer_whole(request, who, opened)
        return None

    async def _prepared(
        self, request: Request, who: Principal, asked: Asked, dialect: str, count: Callable[[int], None]
    ) -> tuple[CreateRequest, StoredRequest | None]:
        """Return the request with what it builds on, and what stores it; None: it is not stored."""
        store = self._gateway.parts.responses
        with failures_traced(who, dialect, lambda: request.trace(self._gateway.parts.tracer, "whole")):
            await check_early(self._gateway, who, asked, request.header(b"idempotency-key"))
            prepared = await with_history(store, who, asked, count)
        asides = Asides(self._gateway, who, request.id, lambda opened: _outlet(request, opened))
        parsed = await fitted(self._gateway, who, prepared, dialect, asides)
        if store is None or not asked.store:
            return parsed, None
        return parsed, StoredRequest(store, who, prepared.asked, prepared.history.last_seq)

    async def count(self, request: Request, send: Send) -> None:
        """Answer with the number of tokens that the prompt of a response would have."""
        who = self._streams.authenticate(request)
        asked, own_bytes = await request.parsed(who.tenant, lambda body: (read_asked(body), len(body)))
        await check_early(self._gateway, who, asked, request.header(b"idempotency-key"))
        with self._gateway.bodies.adding(who.tenant) as count:
            prepared = await with_history(self._gateway.parts.responses, who, asked, count)
            history, size = prepared.history, own_bytes + prepared.history.size
            counting = await off_loop(size, lambda: prepared.expanded.count(history))
            opened = await self._streams.open_whole(request, who, counting)
        await self._streams.answer_whole(request, who, opened)

    async def _create_background(
        self, request: Request, who: Principal, parsed: CreateRequest, on_named: OnNamed | None = None
    ) -> None:
        """Create the stream, and answer at once; it runs without a reader."""
        trace = request.trace(self._gateway.parts.tracer, "whole")
        key = request.header(b"idempotency-key")
        call = CreateCall(who, parsed, trace, key=key, retried=request.is_retry, on_named=on_named)
        opened = await self._gateway.streams.create(call)
        if opened is None:  # an Idempotency-Key attached to a stream that has ended without a frame
            await request.answer(204)
            return
        if opened.attached:
            body = await self._whole(who, opened.id, parsed.own_dialect)
        else:
            opened.subscribe(HeldOutlet()).close()
            body = encoder_of(opened.facts, parsed.own_dialect).response()
        await request.answer(200, body, [JSON, (b"x-stream-id", opened.id.encode()), *opened.headers])

    # --- responses that exist ------------------------------------------------------------------------------

    async def read(self, request: Request, send: Send) -> OpenStreamResponse | None:
        who, stream = self._streams.reader(request), request.path_params["id"]
        who.require_any_stream()  # a response repeats its request, which is more than its stream
        who.require("read")
        await self._gateway.count_stored(who)
        query = query_as(request, ReadResponseQuery)
        if not query.stream or request.scope["method"] == "HEAD":
            await request.answer(200, await self._whole(who, stream, _profile(request)), [JSON])
            return None
        return await self._replay(
            request, send, who, stream, -1 if query.starting_after is None else query.starting_after
        )

    async def _replay(
        self, request: Request, send: Send, who: Principal, stream: str, number: int
    ) -> OpenStreamResponse | None:
        """Deliver the events after a number, or after the cursor of an EventSource that connects again."""
        meta = await self._meta(who, stream)
        dialect = _dialect_of(meta.facts, _profile(request))
        trace, last_event_id = request.trace(self._gateway.parts.tracer, "sse"), request.header(b"last-event-id")
        if number >= 0 or last_event_id:
            self._metrics.resumes.inc()
        if last_event_id:  # newer than the number: that stands in a URL, which does not change
            after = Cursor.parse(last_event_id)
            resumed = await self._gateway.reads.follow(who, stream, after, trace, exact=True, dialect=dialect)
            return await self._streams.deliver(request, send, who, resumed, dialect)

        def place(facts: StreamFacts, lines: list[bytes]) -> int:
            return frames_before(facts, dialect, lines, number)

        opened = await self._gateway.reads.follow_from(who, stream, place, trace)
        if opened is None:  # the client has all of it
            await request.answer(200, b"", sse.HEADERS)
            return None
        encoder = await frames_off_loop(
            len(opened.seen), lambda: encoder_after(opened.facts, dialect, opened.seen, number)
        )
        return await self._streams.deliver(request, send, who, opened, dialect, encoder)

    async def cancel(self, request: Request, send: Send) -> None:
        who, stream = self._streams.authenticate(request), request.path_params["id"]
        who.require("cancel")
        try:
            await self._meta(who, stream)  # a response that does not exist is 404, not a cancel that comes early
        except ResponseNotFound:
            await request.answer(200, await self._stored(who, stream), [JSON])
            return
        reply = await self._gateway.commands.cancel(who, stream)
        self._metrics.cancels.labels(reply.result).inc()
        await request.answer(200, await self._whole(who, stream, _profile(request)), [JSON])

    async def delete(self, request: Request, send: Send) -> None:
        """Delete the response with its log. A running one is cancelled first."""
        who, stream = self._streams.authenticate(request), request.path_params["id"]
        who.require("cancel")
        store, log = self._gateway.parts.responses, self._gateway.parts.log
        try:
            await self._meta(who, stream)
        except ResponseNotFound:
            if not await delete_stored(store, who, stream):
                raise
        else:
            await self._gateway.commands.cancel(who, stream)
            await delete_stored(store, who, stream)
            await log.delete(StreamId(stream), who.tenant)
        await request.json(200, {"id": stream, "object": "response", "deleted": True})

    async def _whole(self, who: Principal, stream: str, profile: str) -> bytes:
        """Return the response as it is now: from its log or, later, from the store. Raises ResponseNotFound."""
        try:
            await self._meta(who, stream)
            meta, frames = await self._gateway.reads.read_frames(who, stream)
        except NotFound:
            return await self._stored(who, stream)
        dialect = _dialect_of(meta.facts, profile)
        lines = [line for _, line in frames]
        return await frames_off_loop(len(lines), lambda: response_of(meta.facts, dialect, lines))

    async def _stored(self, who: Principal, response: str) -> bytes:
        """Return a response whose log is gone. Raises ResponseNotFound."""
        found = await read_stored(self._gateway.parts.responses, who, response)
        if found is None:
            raise ResponseNotFound(response)
        return found

    async def _meta(self, who: Principal, stream: str) -> StreamMeta:
        """Return what is known of a stream that the caller may read as a response.

        Raises ResponseNotFound, also for a response that was not stored, and Unsupported.
        """
        try:
            _, meta = await self._gateway.reads.read_head(who, stream)
        except NotFound:
            raise ResponseNotFound(stream) from None
        encoder_class(OPENAI, meta.facts)
        if settings_of(meta.facts).get("store") is False:
            raise ResponseNotFound(stream)
        return meta


def _outlet(request: Request, opened: OpenedStream) -> WholeResponse:
    """Make the outlet of a request of the gateway's own, which ends when the client leaves."""
    connection: EdgeHttp = request.scope["state"][CONNECTION]
    connection.skip_body()
    return WholeResponse(connection, opened.id, opened.facts)


def _profile(request: Request) -> str:
    """Return the dialect that the request's path or header asks for."""
    return OPEN if is_open(request.scope["path"], request.headers) else OPENAI


def _dialect_of(facts: StreamFacts, profile: str) -> str:
    """Return the dialect in which a stream is replayed: its own, where it is one of the two and no profile is asked."""
    return facts.own_dialect if profile == OPENAI and facts.own_dialect in DIALECTS else profile
