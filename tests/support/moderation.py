"""A moderation endpoint as OpenAI's, over real HTTP. It flags texts that hold a word."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web


class ModerationServer:
    """``trouble``: how it fails: status, nonsense, count, late; empty: it does not. ``delay_s``: an answer's time."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.trouble = ""
        self.delay_s = 0.0
        self.url = ""

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, word: str) -> AsyncIterator[ModerationServer]:
        server = cls(word)
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/moderations", server._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        server.url = f"http://127.0.0.1:{port}/v1/moderations"
        try:
            yield server
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("authorization", ""))
        await asyncio.sleep(self.delay_s)
        results = [
            {"flagged": self.word in text, "categories": {"violence": self.word in text, "other": False}}
            for text in body["input"]
        ]
        match self.trouble:
            case "status":
                return web.json_response({"error": "busy"}, status=429)
            case "nonsense":
                return web.Response(text="{")
            case "count":
                results.append(results[0])
            case "late":
                await asyncio.sleep(1)
        return web.json_response({"id": "modr-1", "model": "omni", "results": results})
