"""OpenAI-compatible servers on real sockets: one that the simulator drives, one that plays given bytes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from inference.engines.plugin.stream_gw_steps import ADDRESS, Steps
from inference.engines.sim.engine import SimEngine
from stream_fabric.pool.records import EngineRequest
from stream_fabric.stream.frames import ChoiceEnd, Delta, ErrorInfo, Frame, Open, TerminalStatus, Usage
from stream_fabric.stream.ids import StreamId

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SSE = {"content-type": "text/event-stream"}


class _Spelling:
    """A sink that queues a request's output as chat or completion chunks."""

    def __init__(self, kind: str, counts: bool = False) -> None:
        self.chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._chat = kind == "chat"
        self._counts = counts
        self._made: dict[int, int] = {}
        self._open: dict[int, Open] = {}
        self._tools: dict[int, int] = {}
        self._prompt = (0, 0)
        self._output = 0

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        self.frame(Delta(block, text, tokens))

    def frame(self, frame: Frame) -> None:
        match frame:
            case Open(block=block, choice=choice, kind="tool"):
                self._open[block] = frame
                index = self._tools[block] = sum(self._open[b].choice == choice for b in self._tools)
                call: dict[str, Any] = {"index": index, "id": frame.id, "type": "function"}
                self._delta(choice, tool_calls=[{**call, "function": {"name": frame.name, "arguments": ""}}])
            case Open(block=block, choice=choice):
                self._open[block] = frame
                if self._chat:
                    self._delta(choice, role="assistant", content="")
            case Delta(block=block, text=text, logprobs=logprobs):
                opened = self._open[block]
                self._output += frame.tokens
                self._made[opened.choice] = self._made.get(opened.choice, 0) + frame.tokens
                if opened.kind == "tool":
                    call = {"index": self._tools[block], "function": {"arguments": text}}
                    self._delta(opened.choice, tool_calls=[call])
                elif not self._chat:
                    self._put({"choices": [{"index": opened.choice, "text": text, "finish_reason": None}]})
                elif opened.kind == "reasoning":
                    self._delta(opened.choice, reasoning=text, reasoning_content=text)
                else:
                    self._delta(opened.choice, logprobs and {"content": logprobs}, content=text)
            case ChoiceEnd(choice=choice, finish_reason=reason, detail=detail):
                empty: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
                self._put({"choices": [{"index": choice, **empty, "finish_reason": reason, "stop_reason": detail}]})

    def _delta(self, choice: int, logprobs: Any = None, **delta: Any) -> None:
        self._put({"choices": [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}]})

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        self._prompt = (prompt, cached)

    def computed(self, queue_s: float, prefill_s: float) -> None:
        pass

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        if error is not None:
            self._put({"error": {"message": error.message, "type": error.type, "code": error.code}})
        else:
            prompt, cached = self._prompt
            totals = {"prompt_tokens": prompt, "completion_tokens": self._output}
            self._put({"choices": [], "usage": {**totals, "prompt_tokens_details": {"cached_tokens": cached}}})
            self.chunks.put_nowait(b"data: [DONE]\n\n")
        self.chunks.put_nowait(None)

    def _put(self, chunk: dict[str, Any]) -> None:
        if self._counts and chunk.get("choices"):
            made = self._made.get(chunk["choices"][0]["index"], 0)
            chunk = {**chunk, "usage": {"prompt_tokens": self._prompt[0], "completion_tokens": made}}
        self.chunks.put_nowait(b"data: " + msgspec.json.encode(chunk) + b"\n\n")


async def sim_chunks(engine: SimEngine, kind: Any, name: str, body: bytes) -> AsyncIterator[bytes]:
    """Chunks of a running simulator's answer. Closed before the end, it aborts the request."""
    options = msgspec.json.decode(body)["stream_options"]
    assert options["include_usage"] is True
    spelling = _Spelling(kind, options.get("continuous_usage_stats", False))
    engine.submit(EngineRequest(StreamId(name), kind, "sim-small", msgspec.Raw(body)), spelling)
    try:
        while (chunk := await spelling.chunks.get()) is not None:
            yield chunk
    finally:
        engine.abort(StreamId(name))


KINDS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


def sim_handlers(engine: SimEngine) -> dict[str, Handler]:
    """Serve a running simulator; a closed connection aborts its request."""

    def handler(kind: Any) -> Handler:
        async def serve(request: web.Request) -> web.StreamResponse:
            chunks = sim_chunks(engine, kind, request.headers["x-request-id"], await request.read())
            response = web.StreamResponse(headers=SSE)
            async with contextlib.aclosing(chunks):
                await response.prepare(request)
                async for chunk in chunks:
                    await response.write(chunk)
            return response

        return serve

    return {path: handler(kind) for path, kind in KINDS.items()}


@contextlib.asynccontextmanager
async def sim_plugin(engine: SimEngine, path: str) -> AsyncIterator[None]:
    """vLLM's plug-in in front of a running simulator, connected to the step socket at this path as soon as it is."""

    async def application(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        """As Starlette: a disconnect cancels the answer."""
        if scope["type"] != "http":
            return
        body = (await receive())["body"]
        answer = asyncio.create_task(respond(scope, body, send))
        gone = asyncio.create_task(receive())
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)

    async def respond(scope: dict[str, Any], body: bytes, send: Any) -> None:
        name = dict(scope["headers"])[b"x-request-id"].decode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        async with contextlib.aclosing(sim_chunks(engine, KINDS[scope["path"]], name, body)) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS, path)
        steps = Steps(application)
        await steps({"type": "lifespan"}, None, None)
    yield
    assert steps._connecting is not None
    steps._connecting.cancel()


def sim_metrics(engine: SimEngine) -> Handler:
    """A running simulator's load under vLLM's names."""

    async def metrics(request: web.Request) -> web.StreamResponse:
        load = engine.load()
        levels = {"awake": 0, "weights_offloaded": 1, "discard_all": 2}
        return web.Response(
            text=f"vllm:num_requests_running {load.running}.0\nvllm:num_requests_waiting {load.waiting}.0\n"
            + "".join(
                f'vllm:engine_sleep_state{{engine="0",sleep_state="{name}"}} {float(load.asleep == level)}\n'
                for name, level in levels.items()
            )
        )

    return metrics


class SleepDoors:
    """A running simulator's sleep at the addresses of vLLM's development mode. ``fails``: a path that answers 500."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self.heard: list[str] = []
        self.fails = ""

    @property
    def posts(self) -> dict[str, Handler]:
        return {"/sleep": self._sleep, "/wake_up": self._wake, "/collective_rpc": self._rpc}

    @property
    def gets(self) -> dict[str, Handler]:
        return {"/is_sleeping": self._is_sleeping, "/metrics": sim_metrics(self._engine)}

    def _hear(self, request: web.Request, what: str = "") -> None:
        self.heard.append(what or request.path_qs)
        if self.fails and self.heard[-1].startswith(self.fails):
            raise web.HTTPInternalServerError(text="out of memory")

    async def _sleep(self, request: web.Request) -> web.StreamResponse:
        self._hear(request)
        await self._engine.sleep(1 if request.query["level"] == "1" else 2)
        return web.json_response({"status": "sleeping"})

    async def _wake(self, request: web.Request) -> web.StreamResponse:
        self._hear(request)
        if request.query.get("tags") != "weights":
            await self._engine.wake()
        return web.json_response({"status": "awake"})

    async def _rpc(self, request: web.Request) -> web.StreamResponse:
        self._hear(request, (await request.json())["method"])
        return web.json_response({"results": [None]})

    async def _is_sleeping(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"is_sleeping": bool(self._engine.load().asleep)})


def play(*parts: bytes, status: int = 200, cut: bool = False, seen: list[Any] | None = None) -> Handler:
    """Answer with these bytes, each written by itself. ``cut``: drop the connection without an HTTP end."""

    async def serve(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if seen is not None:
            seen.append((dict(request.headers), msgspec.json.decode(body)))
        response = web.StreamResponse(status=status, headers=SSE)
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return serve


async def _models(request: web.Request) -> web.StreamResponse:
    return web.json_response({"object": "list", "data": [{"id": "sim-small"}, {"id": "other"}]})


@contextlib.asynccontextmanager
async def server(
    posts: dict[str, Handler], gets: dict[str, Handler] | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Yield the base URL of a server with these routes and a list of models."""
    app = web.Application(client_max_size=1 << 24)
    for path, handler in posts.items():
        app.router.add_post(path, handler)
    for path, handler in {"/v1/models": _models, **(gets or {})}.items():
        app.router.add_get(path, handler)
    # A handler learns of a closed connection by its cancellation
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"{'https' if tls else 'http'}://{host}:{port}"
    finally:
        await runner.cleanup()
