"""HTTP handlers of chats: ask, resume, stop."""

from __future__ import annotations

from starlette.types import Send

from stream_gw.auth import Principal, bearer
from stream_gw.dialects.ui.encoder import UiEncoder
from stream_gw.dialects.ui.requests import DIALECT, check_chat_id
from stream_gw.observe.metrics import Metrics
from stream_gw.streams.cancel import cancel_json
from stream_gw.streams.gateway import Gateway
from stream_gw.transport import sse
from stream_gw.transport.http import Request
from stream_gw.transport.pages import no_path
from stream_gw.transport.sse import SseOutlet
from stream_gw.transport.stream_routes import OpenStreamResponse, StreamRoutes
from stream_gw.transport.ui.calls import ChatAnswer, ChatCalls, ChatReader

_NO_STORE = [(b"cache-control", b"no-store")]


class OpenChatResponse:
    """A response that delivers an answer of a chat; an ``OpenResponse``."""

    __slots__ = ("_reader", "_response")

    def __init__(self, response: OpenStreamResponse, reader: ChatReader) -> None:
        self._response = response
        self._reader = reader

    @property
    def outlet(self) -> SseOutlet:
        return self._response.outlet

    def close(self) -> None:
        outlet = self.outlet
        self._response.close()
        encoder = outlet.encoder
        is_whole = outlet.done.done() and not outlet.done.cancelled() and outlet.done.result()
        if is_whole and isinstance(encoder, UiEncoder) and encoder.has_ended:
            self._reader.note_end()


class UiRoutes:
    def __init__(self, gateway: Gateway, streams: StreamRoutes, metrics: Metrics) -> None:
        self._gateway = gateway
        self._streams = streams
        self._metrics = metrics
        self.calls = ChatCalls(gateway, metrics)

    async def create(self, request: Request, send: Send) -> OpenChatResponse | None:
        who = self._authenticate(request)
        body = await request.body(who.tenant)
        trace = request.trace(self._gateway.parts.tracer, "sse")
        with self._gateway.bodies.adding(who.tenant) as count:
            count(len(body))  # it is parsed
            answer = await self.calls.begin(who, body, trace, request.header(b"idempotency-key"))
        if answer is None:
            await request.answer(204)
            return None
        return await self._deliver(request, send, answer)

    async def resume(self, request: Request, send: Send) -> OpenChatResponse | None:
        """Replay the chat's newest stream from its beginning, and follow it; 204 when there is nothing to resume."""
        who, chat, user = self._authenticate(request), self._chat_id(request), request.query.get("user")
        if request.scope["method"] == "HEAD":
            if await self.calls.chats.find(who, user, chat) is None:
                await request.answer(204, headers=_NO_STORE)
                return None
            headers = [*sse.HEADERS, *UiEncoder.headers]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return None
        answer = await self.calls.resume(who, user, chat, request.trace(self._gateway.parts.tracer, "sse"))
        if answer is None:
            await request.answer(204, headers=_NO_STORE)
            return None
        return await self._deliver(request, send, answer)

    async def stop(self, request: Request, send: Send) -> None:
        who, chat = self._authenticate(request), self._chat_id(request)
        found = await self.calls.chats.stop(who, request.query.get("user"), chat, request.query.get("stream"))
        if found is None:
            await request.json(200, {"stream": None, "result": "none", "at": None, "status": None})
            return
        stream, reply = found
        self._metrics.cancels.labels(reply.result).inc()
        await request.json(200, {"stream": stream, **cancel_json(reply)})

    async def _deliver(self, request: Request, send: Send, answer: ChatAnswer) -> OpenChatResponse | None:
        response = await self._streams.deliver(
            request, send, answer.reader.who, answer.opened, DIALECT, await answer.encoder()
        )
        return None if response is None else OpenChatResponse(response, answer.reader)

    # --- the request ---------------------------------------------------------------------------------------

    def _authenticate(self, request: Request) -> Principal:
        return request.from_caller(self._gateway.authenticate(bearer(request.scope["headers"])))

    @staticmethod
    def _chat_id(request: Request) -> str:
        chat: str = request.path_params["id"]
        if not chat:
            raise no_path(request.scope)
        check_chat_id(chat)
        return chat
