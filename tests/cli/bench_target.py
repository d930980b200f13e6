"""Servers with known times for ``stream-gw bench``, and the command with its JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from stream_gw.cli.bench.command import bench
from stream_gw.cli.commands.bench import add_flags
from tests.agent.engines.upstream import SSE, Handler, play, server

CHAT = "/v1/chat/completions"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":%d}}\n\n'
DONE = b"data: [DONE]\n\n"


def piece(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


async def measured(tmp_path: Path, url: str, *flags: str) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit code and its JSON."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    out = tmp_path / "out.json"
    args = parser.parse_args([url, "--quiet", "--json", str(out), "--html", str(tmp_path / "out.html"), *flags])
    code = await bench(args)
    return code, json.loads(out.read_bytes())


def timed(first_s: float, gap_s: float, pieces: int) -> Handler:
    """Answer with pieces of two tokens each, at these times."""

    async def serve(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        due = loop.time() + first_s
        for number in range(min(pieces, body["max_tokens"])):
            await asyncio.sleep(max(due - loop.time(), 0))
            due += gap_s
            await response.write(piece(f"{number} "))
        await response.write(USAGE % (2 * pieces) + DONE)
        return response

    return serve


def after_probe(answer: Handler) -> Handler:
    """Give this answer to all requests but the first two, which are the probe."""
    asked = 0

    async def serve(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return await (answer if asked > 2 else play(piece("a"), USAGE % 1, DONE))(request)

    return serve


async def third(tmp_path: Path, answer: Handler) -> tuple[int, dict[str, Any]]:
    """Measure one request, which gets this answer."""
    async with server({CHAT: after_probe(answer)}) as url:
        return await measured(tmp_path, url, "--concurrency", "1", "--requests", "1")
