"""A gateway in one process that speaks docs/protocol.md, with deterministic answers and faults on demand.

What it answers is the prompt's own business: ``say:<text>`` is echoed, anything else is counted words.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

STATIC = Path(__file__).parents[2] / "stream_gw" / "static"
KEY = "sk-test"
DRAINING: dict[str, Any] = {"code": "draining", "message": "reconnect", "retriable": True, "retry_after_s": 20}
SPENT: dict[str, Any] = {
    "code": "budget_exceeded",
    "message": "resets later",
    "retriable": True,
    "retry_after_s": 30 * 86_400,
}
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TERMINAL = {"completed", "cancelled", "failed", "incomplete"}


@dataclass
class Faults:
    """Counts are used up: a count of 2 hits twice."""

    cut_before_ok: int = 0
    cut_after_sub: int = 0
    cut_after_frames: list[int] = field(default_factory=list)  # of each next socket
    drop_acks: int = 0
    duplicate: bool = False
    skip: set[int] = field(default_factory=set)  # seqs that are left out, once each
    silent: bool = False  # accepts everything and says nothing
    close_new_with: list[int] = field(default_factory=list)  # codes for the next sockets
    refuse_create: list[dict[str, Any]] = field(default_factory=list)
    refuse_subs: list[dict[str, Any]] = field(default_factory=list)
    refuse_requests: list[dict[str, Any]] = field(default_factory=list)
    ping_ms: int = 15_000
    drains: bool = False  # asks each new socket to reconnect at once
    place_s: float = 0.0  # after each place
    places: list[dict[str, Any]] = field(default_factory=list)  # told to each create that asks for its place
    novelties: bool = False  # messages of types that today's clients do not know


@dataclass(eq=False)
class FakeStream:
    id: str
    model: str
    created: int
    texts: list[str]
    body: str
    frames: list[list[dict[str, Any]]] = field(default_factory=list)
    epoch: int = 1
    status: str = "live"
    error: dict[str, Any] | None = None
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    reads: int = 0
    steers: list[tuple[str, str]] = field(default_factory=list)
    steered: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def head(self) -> int:
        return len(self.frames) + (self.status in TERMINAL)

    def grow(self) -> None:
        self.grown.set()
        self.grown = asyncio.Event()

    def end(self, status: str, error: dict[str, Any] | None = None) -> None:
        if self.status == "live":
            self.status, self.error = status, error
            self.grow()

    def chunk(self, text: str, finish: str | None = None) -> dict[str, Any]:
        return {
            "id": self.id.replace("resp_", "chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": "sim",
            "choices": [
                {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": finish},
            ],
        }


class Socket:
    """One client's connection."""

    def __init__(self, gateway: FakeGateway, request: web.Request, ws: web.WebSocketResponse) -> None:
        self.gateway, self.request, self.ws = gateway, request, ws
        self.channels: dict[int, asyncio.Task[None]] = {}
        self.frames_left = gateway.faults.cut_after_frames.pop(0) if gateway.faults.cut_after_frames else None

    async def send(self, message: dict[str, Any]) -> None:
        if self.gateway.faults.silent or self.ws.closed:
            return
        await self.ws.send_str(json.dumps(message, separators=(",", ":")))

    def cut(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()

    async def receive(self, message: dict[str, Any]) -> None:
        faults, gateway = self.gateway.faults, self.gateway
        gateway.received.append(message)
        match message["t"]:
            case "create":
                await self.create(message)
            case "sub":
                if faults.cut_after_sub:
                    faults.cut_after_sub -= 1
                    self.cut()
                    return
                if faults.refuse_subs:
                    await self.send({"t": "error", "ch": message["ch"], **faults.refuse_subs.pop(0)})
                    return
                stream = gateway.streams.get(message["stream"])
                if stream is None:
                    await self.error("not_found", "no such stream", ch=message["ch"])
                    return
                self.follow(message["ch"], stream, int(message["after"].split("-")[1]), message["mode"])
            case "unsub":
                if task := self.channels.pop(message["ch"], None):
                    task.cancel()
            case "cancel" | "input":
                if faults.drop_acks:
                    faults.drop_acks -= 1
                    self.cut()
                    return
                if faults.refuse_requests:
                    await self.send({"t": "error", "id": message["id"], **faults.refuse_requests.pop(0)})
                    return
                if message["stream"] not in gateway.streams:
                    await self.error("not_found", "no such stream", id=message["id"])
                    return
                answer = gateway.cancel(message["stream"]) if message["t"] == "cancel" else gateway.take_input(message)
                await self.send({"t": "ack", "id": message["id"], **answer})

    async def create(self, message: dict[str, Any]) -> None:
        if self.gateway.faults.refuse_create:
            await self.send({"t": "error", "ch": message["ch"], **self.gateway.faults.refuse_create.pop(0)})
            return
        stream = self.gateway.create(message["body"], message["key"])
        if stream is None:
            await self.error("idempotency_mismatch", "same key, another body", ch=message["ch"])
        elif self.gateway.faults.cut_before_ok:
            self.gateway.faults.cut_before_ok -= 1
            self.cut()
        else:
            places = self.gateway.faults.places if message.get("queued") else []
            self.follow(message["ch"], stream, 0, message["mode"], places)

    async def error(self, code: str, message: str, **where: Any) -> None:
        await self.send({"t": "error", **where, "code": code, "message": message, "retriable": False})

    def follow(self, ch: int, stream: FakeStream, after: int, mode: str, places: Sequence[dict[str, Any]] = ()) -> None:
        self.channels[ch] = asyncio.create_task(self.deliver(ch, stream, after, mode, places))

    async def deliver(
        self, ch: int, stream: FakeStream, after: int, mode: str, places: Sequence[dict[str, Any]]
    ) -> None:
        stream.reads += 1
        epoch = f"{stream.epoch}.aa"
        await self.send(
            {"t": "ok", "ch": ch, "stream": stream.id, "epoch": epoch, "head": stream.head, "status": stream.status}
        )
        for place in places:
            await self.send({"t": "queued", "ch": ch, **place})
            await asyncio.sleep(self.gateway.faults.place_s)
        if self.gateway.faults.novelties:
            await self.send({"t": "novelty", "ch": ch, "s": 7, "f": {"x": [1]}})
            await self.send({"t": "weather", "sunny": True})
        sent = after
        if mode != "tokens" and len(stream.frames) - sent > 1:
            text, inputs = "", []
            for (chunk,) in stream.frames[sent:]:
                text += chunk["choices"][0]["delta"]["content"]
                inputs += [chunk["input"] | {"at": len(text)}] if "input" in chunk else []
            chunk = stream.chunk(text) | ({"inputs": inputs} if inputs else {})
            await self.send({"t": "d", "ch": ch, "a": sent, "s": len(stream.frames), "f": [chunk]})
            sent = len(stream.frames)
        while True:
            grown = stream.grown
            while sent < len(stream.frames):
                sent += 1
                await self.frame(ch, sent, stream.frames[sent - 1])
            if stream.status in TERMINAL:
                break
            await grown.wait()
        self.channels.pop(ch, None)
        end: dict[str, Any] = {"t": "end", "ch": ch, "s": sent + 1, "status": stream.status}
        end["usage"] = {"prompt": 1, "cached": 0, "written": 0, "output": sent, "reasoning": 0}
        await self.send(end | ({"error": stream.error} if stream.error else {}))

    async def frame(self, ch: int, seq: int, chunks: list[dict[str, Any]]) -> None:
        faults = self.gateway.faults
        if seq in faults.skip:
            faults.skip.discard(seq)
            return
        for _ in range(1 + faults.duplicate):
            await self.send({"t": "d", "ch": ch, "s": seq, "f": chunks})
            if "input" in chunks[0]:
                await self.send({"t": "steered", "ch": ch, "s": seq, **chunks[0]["input"]})
        if self.frames_left is not None:
            self.frames_left -= 1
            if self.frames_left <= 0:
                self.cut()
                await asyncio.sleep(3600)  # cancelled with the socket: nothing may follow the cut


class FakeGateway:
    def __init__(self) -> None:
        self.url = ""
        self.faults = Faults()
        self.token_delay_s = 0.005
        self.hold_at: int | None = None  # frames a stream makes before it waits for release()
        self.streams: dict[str, FakeStream] = {}
        self.by_key: dict[str, FakeStream] = {}
        self.received: list[dict[str, Any]] = []
        self.inputs: dict[str, Any] = {}
        self.refuse_inputs = ""
        """Reason why streams refuse inputs; empty: they take them."""
        self.tokens: set[str] = {KEY}
        self.minted = 0
        self.http_cancels = 0
        self.sockets: set[Socket] = set()
        self.auth_s = 10.0
        """Time for which a socket without a header waits for its token."""
        self.greeted = 0
        """Sockets that got ``hi``."""
        self.model = "sim-7b"
        self.name = "gw_1"
        self.modalities: list[str] | None = None
        self.link_tokens: list[dict[str, Any]] = []  # bodies of requests for tokens of one stream
        self.finish, self.ends = "stop", "completed"
        self.stop_reason: str | None = None
        self._ids = itertools.count(1)
        self._released = asyncio.Event()
        self._producers: set[asyncio.Task[None]] = set()

    # Streams

    def create(self, body: dict[str, Any], key: str) -> FakeStream | None:
        text = json.dumps(body, sort_keys=True)
        if stream := self.by_key.get(key):
            return stream if stream.body == text else None
        prompt = body["messages"][-1]["content"]
        if not isinstance(prompt, str):
            prompt = next((part["text"] for part in prompt if part["type"] == "text"), "")
        texts = _texts(prompt, body.get("max_tokens", 40))
        stream = FakeStream(f"resp_{next(self._ids):032x}", body["model"], 1_700_000_000, texts, text)
        self.streams[stream.id] = self.by_key[key] = stream
        producer = asyncio.create_task(self._produce(stream))
        self._producers.add(producer)
        producer.add_done_callback(self._producers.discard)
        return stream

    async def _produce(self, stream: FakeStream) -> None:
        texts = list(stream.texts)
        while texts or stream.steers:
            if self.hold_at is not None and len(stream.frames) >= self.hold_at and not stream.steers:
                held = [asyncio.ensure_future(event.wait()) for event in (self._released, stream.steered)]
                await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
                for each in held:
                    each.cancel()
                stream.steered.clear()
            await asyncio.sleep(self.token_delay_s)
            if stream.status != "live":
                return
            if stream.steers:
                texts = self._steer(stream, texts)
                continue
            text = texts.pop(0)
            is_last = not texts
            chunk = stream.chunk(text, self.finish if is_last else None)
            if is_last and self.stop_reason:
                chunk["choices"][0]["stop_reason"] = self.stop_reason
            stream.frames.append([chunk])
            stream.grow()
        stream.end(self.ends)

    def _steer(self, stream: FakeStream, texts: list[str]) -> list[str]:
        """Apply an input: return the texts of the answer after it. ``hold_at`` moves by its frame."""
        id, item = stream.steers.pop(0)
        result = {"result": "refused", "reason": self.refuse_inputs} if self.refuse_inputs else {"result": "applied"}
        stream.frames.append([stream.chunk("") | {"input": {"id": id, **result}}])
        stream.grow()
        return texts if self.refuse_inputs else _texts(item, 40)

    def release(self) -> None:
        self.hold_at = None
        self._released.set()

    def cancel(self, id: str) -> dict[str, Any]:
        stream = self.streams[id]
        result = {"live": "accepted", "cancelled": "already"}.get(stream.status, "terminal")
        at = f"{stream.epoch}-{len(stream.frames)}"
        stream.end("cancelled")
        return {"result": result, "at": at, "status": stream.status}

    def take_input(self, message: dict[str, Any]) -> dict[str, Any]:
        known = message["id"] in self.inputs
        stream = self.streams[message["stream"]]
        if not known and stream.status != "live":
            return {"result": "terminal"}
        self.inputs[message["id"]] = message["item"]
        if not known and isinstance(message["item"], str):
            stream.steers.append((message["id"], message["item"]))
            stream.steered.set()
        return {"result": "duplicate" if known else "accepted"}

    # Faults

    def cut_all(self) -> None:
        for socket in list(self.sockets):
            socket.cut()

    async def hint_all(self, after_ms: int) -> None:
        for socket in list(self.sockets):
            with contextlib.suppress(ConnectionResetError):  # its client leaves just now
                await socket.send({"t": "reconnect", "after_ms": after_ms})

    async def say_all(self, message: dict[str, Any]) -> None:
        """To every open channel; its number is filled in."""
        for socket in list(self.sockets):
            for ch in list(socket.channels):
                await socket.send(message | {"ch": ch})

    async def ping_all(self) -> None:
        for socket in list(self.sockets):
            heads = {str(ch): max(stream.head for stream in self.streams.values()) for ch in socket.channels}
            await socket.send({"t": "ping", "head": heads})

    def sent_by_client(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.received if message["t"] == kind]

    # HTTP

    def _authorized(self, request: web.Request) -> bool:
        return request.headers.get("Authorization", "").removeprefix("Bearer ") in self.tokens

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse(protocols=["tokenstream.v1"], max_msg_size=8 << 20)
        await ws.prepare(request)
        if self.faults.close_new_with:
            await ws.close(code=self.faults.close_new_with.pop(0))
            return ws
        if not self._authorized(request):
            auth: dict[str, Any] = {}
            if "Authorization" not in request.headers:
                with contextlib.suppress(TimeoutError):
                    first = await ws.receive(self.auth_s)
                    auth = json.loads(first.data) if first.type is WSMsgType.TEXT else {}
            if auth.get("token") not in self.tokens:
                await ws.close(code=4401)
                return ws
        socket = Socket(self, request, ws)
        self.sockets.add(socket)
        try:
            await socket.send({"t": "hi", "conn": "c1", "gateway": self.name, "ping_ms": self.faults.ping_ms})
            self.greeted += 1
            if self.faults.drains:
                await socket.send({"t": "reconnect", "after_ms": 0})
            async for message in ws:
                if message.type is WSMsgType.TEXT:
                    await socket.receive(json.loads(message.data))
        finally:
            self.sockets.discard(socket)
            for task in socket.channels.values():
                task.cancel()
        return ws

    async def _mint(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return _error(401, "invalid_api_key", "This API key is unknown.")
        asked = await request.json()
        if "stream" in asked:
            self.link_tokens.append(asked)
            token = f"cap_link{len(self.link_tokens)}"
        else:
            self.minted += 1
            token = f"cap_{self.minted}"
        self.tokens.add(token)
        return web.json_response({"token": token, "expires_at": 4_000_000_000})

    async def _models(self, request: web.Request) -> web.Response:
        if not self._authorized(request):
            return _error(401, "invalid_api_key", "The token is unknown.")
        model: dict[str, Any] = {"id": self.model, "object": "model"}
        if self.modalities is not None:
            model["input_modalities"] = self.modalities
        return web.json_response({"object": "list", "data": [model]})

    async def _cancel(self, request: web.Request) -> web.Response:
        self.http_cancels += 1
        if request.match_info["id"] not in self.streams:
            return _error(404, "not_found", "no such stream")
        return web.json_response(self.cancel(request.match_info["id"]))

    async def _page(self, request: web.Request) -> web.FileResponse:
        return web.FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": CSP})

    async def _watch_page(self, request: web.Request) -> web.FileResponse:
        return web.FileResponse(STATIC / "watch.html", headers={"Content-Security-Policy": CSP})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/stream", self._socket)
        app.router.add_post("/v1/tokens", self._mint)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/streams/{id}/cancel", self._cancel)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/", self._page)
        app.router.add_get("/watch", self._watch_page)
        app.router.add_static("/static/", STATIC, follow_symlinks=True)
        return app

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeGateway]:
        runner = web.AppRunner(self._app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.cut_all()
            for producer in list(self._producers):
                producer.cancel()
            await runner.cleanup()


def _texts(prompt: str, words: int) -> list[str]:
    answer = prompt.removeprefix("say:") if prompt.startswith("say:") else ""
    return re.findall(r"\s*\S+|\s+$", answer or " ".join(f"word{n}" for n in range(1, words + 1)))


def _error(status: int, code: str, message: str) -> web.Response:
    error = {"message": message, "type": "error", "code": code, "retriable": False, "request_id": "req_1"}
    return web.json_response({"error": error}, status=status)
