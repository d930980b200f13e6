"""A stand-in for the ``vllm`` command, to test how it is kept: it boots, answers, dies and leaves orphans at will.

``command(folder)`` makes an executable that takes the place of vLLM's Python. The folder holds how it behaves
(``mode``) and what it did (``calls``: one line of JSON a start). This folder's suite holds the real one to the same.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
TOOTHLESS = json.dumps({"error": {"message": "no tokens today", "code": 500}}).encode()
EMBEDDED = json.dumps({"object": "list", "data": [], "usage": {"prompt_tokens": 1}}).encode()


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def command(folder: Path, mode: str = "ok") -> str:
    set_mode(folder, mode)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nFAKE_VLLM={folder} exec {sys.executable} {__file__} "$@"\n')
    script.chmod(0o755)
    return str(script)


def set_mode(folder: Path, mode: str) -> None:
    """``ok``; ``old``: knows fewer flags; ``closed``: cannot import the plug-in; ``die`` at the start; ``hang`` before
    it is healthy; ``deaf`` to SIGTERM; ``toothless``: no tokens; ``pooling``: a model that embeds; woken, ``drowsy``
    refuses, ``fatal`` dies, ``comatose`` never answers."""
    (folder / "mode").write_text(mode)


def calls(folder: Path) -> list[dict[str, Any]]:
    path = folder / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def logprobs(folder: Path) -> list[int | None]:
    """Number of logprobs that each request for tokens wished; None: none."""
    path = folder / "logprobs"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def health(folder: Path) -> int:
    """How often somebody asked how it is."""
    path = folder / "health"
    return path.stat().st_size if path.exists() else 0


def kill(folder: Path) -> None:
    """The newest."""
    os.kill(calls(folder)[-1]["pid"], signal.SIGKILL)


def pids(folder: Path) -> list[int]:
    """Every process that was started, engines included."""
    return [pid for call in calls(folder) for pid in (call["pid"], call["engine"])]


def main() -> None:
    folder = Path(os.environ["FAKE_VLLM"])
    mode = (folder / "mode").read_text()
    # As vLLM's engine: a process that does not end with the server
    engine = subprocess.Popen(
        [sys.executable, "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    )
    about = {"pid": os.getpid(), "engine": engine.pid, "argv": sys.argv[1:], "env": dict(os.environ)}
    about["agent_listens"] = os.path.exists(os.environ.get("STREAM_GW_STEPS", ""))
    with open(folder / "calls", "a") as file:
        file.write(json.dumps(about) + "\n")
    print("(APIServer pid=1) WARNING 11-21 10:00:00 [fake.py:1] this is no model", flush=True)
    if mode == "die":
        print("ValueError: the model's mouth is too small", file=sys.stderr, flush=True)
        os._exit(3)
    if mode == "old" and "--enable-per-request-metrics" in sys.argv:
        print("vllm serve: error: unrecognized arguments: --enable-per-request-metrics", file=sys.stderr, flush=True)
        os._exit(2)
    if mode == "closed" and "--middleware" in sys.argv:
        print("ModuleNotFoundError: No module named 'stream_gw_steps'", file=sys.stderr, flush=True)
        os._exit(1)
    if mode == "rigid" and "--scheduler-cls" in sys.argv:
        print("ModuleNotFoundError: No module named 'stream_gw_scheduler'", file=sys.stderr, flush=True)
        os._exit(1)
    if "--scheduler-cls" in sys.argv and mode != "whole":
        Path(os.environ["STREAM_GW_BUDGET"]).touch()
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "hang":
        time.sleep(600)
    asyncio.run(serve(folder, mode))


async def serve(folder: Path, mode: str) -> None:
    from aiohttp import web

    asked = 0
    mindless = False
    asleep = 0

    async def health(request: web.Request) -> web.Response:
        with open(folder / "health", "a") as file:
            file.write(".")
        return web.Response(status=503 if mindless else 200)

    async def models(request: web.Request) -> web.Response:
        after = sys.argv[sys.argv.index("--lora-modules") + 1 :] if "--lora-modules" in sys.argv else []
        adapters = [word.partition("=")[0] for word in takewhile(lambda word: not word.startswith("-"), after)]
        return web.json_response({"data": [{"id": "fake"}, *({"id": name, "parent": "fake"} for name in adapters)]})

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            text=f'vllm:num_requests_running{{engine="0"}} 0.0\nvllm:prefix_cache_queries_total {asked}\n'
        )

    async def chunks(body: dict[str, Any]) -> AsyncIterator[bytes]:
        """``max_tokens`` chunks, one each 5 ms. ``go deaf`` stops the whole server, ``go mad`` its engine."""
        nonlocal asked, mindless
        asked += 10
        with open(folder / "logprobs", "a") as file:
            file.write(json.dumps(body.get("logprobs")) + "\n")
        if body.get("prompt") == "go deaf":
            time.sleep(600)
        mindless = body.get("prompt") == "go mad"
        for number in range(body["max_tokens"]):
            yield event({"choices": [{"index": 0, "text": f"{number} "}]})
            await asyncio.sleep(0.005)
        yield event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if "--enable-per-request-metrics" in sys.argv:
            own = {"queue_time_ms": 250.0, "time_to_first_token_ms": 30.0, "generation_time_ms": 10.0}
            usage = {"prompt_tokens": 1, "completion_tokens": number + 1}
            yield event({"choices": [], "usage": usage, "metrics": own})
        yield b"data: [DONE]\n\n"

    async def generate(request: web.Request) -> web.StreamResponse:
        if mode == "toothless":
            return web.Response(status=500, body=TOOTHLESS)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        async for chunk in chunks(await request.json()):
            await response.write(chunk)
        return response

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what the plug-in asks for, as the application behind vLLM's middlewares."""
        if scope["type"] != "http":
            return
        known = scope["path"] == ("/v1/embeddings" if mode == "pooling" else "/v1/completions")
        status = 404 if not known else 500 if mode == "toothless" else 200
        kind = b"text/event-stream" if status == 200 and mode != "pooling" else b"application/json"
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        if status == 200 and mode != "pooling":
            async for chunk in chunks(json.loads((await receive())["body"])):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        body = {200: EMBEDDED if mode == "pooling" else b"", 404: b"{}", 500: TOOTHLESS}[status]
        await send({"type": "http.response.body", "body": body})

    async def sleep(request: web.Request) -> web.Response:
        nonlocal asleep
        asleep = int(request.query["level"])
        return web.json_response({})

    async def wake(request: web.Request) -> web.Response:
        nonlocal asleep
        match (folder / "mode").read_text():
            case "drowsy":
                return web.Response(status=500, text="no memory")
            case "fatal":
                os._exit(4)
            case "comatose":
                await asyncio.sleep(600)
        if request.query.get("tags") != "weights":
            asleep = 0
        return web.json_response({})

    async def is_sleeping(request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": bool(asleep)})

    async def rpc(request: web.Request) -> web.Response:
        return web.json_response({"results": [None]})

    async def embed(request: web.Request) -> web.Response:
        return web.Response(body=EMBEDDED, content_type="application/json")

    app = web.Application()
    if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
        app.add_routes([web.post("/sleep", sleep), web.post("/wake_up", wake), web.post("/collective_rpc", rpc)])
        app.add_routes([web.get("/is_sleeping", is_sleeping)])
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/v1/models", models),
            web.get("/metrics", metrics),
            web.post("/v1/embeddings", embed) if mode == "pooling" else web.post("/v1/completions", generate),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    if "--middleware" in sys.argv:
        module, _, name = sys.argv[-1].rpartition(".")
        await getattr(importlib.import_module(module), name)(application)({"type": "lifespan"}, None, None)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
