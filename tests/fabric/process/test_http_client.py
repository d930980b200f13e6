"""The HTTP client keeps its limits: time, and bytes of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from stream_fabric.process.http_client import HTTP_ERRORS, BodyTooLarge, open_session, read_body, read_start


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async def body(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * 1000, headers={"seen": request.headers.get("authorization", "")})

    gone = asyncio.Event()

    async def silent(_: web.Request) -> web.Response:
        await gone.wait()
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/body", body), web.get("/silent", silent)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield site.name if ":0" not in site.name else f"http://127.0.0.1:{runner.addresses[0][1]}"
    gone.set()
    await runner.cleanup()


async def test_a_body_is_read_up_to_its_limit(url: str) -> None:
    async with open_session(total_s=5.0, headers={"authorization": "Bearer t"}) as session:
        async with session.get(f"{url}/body") as answer:
            assert answer.headers["seen"] == "Bearer t"
            assert await read_body(answer, 1000) == b"x" * 1000
        async with session.get(f"{url}/body") as answer:
            with pytest.raises(BodyTooLarge, match="larger than 999 bytes") as raised:
                await read_body(answer, 999)
            assert isinstance(raised.value, HTTP_ERRORS)
        async with session.get(f"{url}/body") as answer:
            assert await read_start(answer, 10) == b"x" * 10


async def test_a_silent_server_is_waited_for_only_as_long_as_allowed(url: str) -> None:
    async with open_session(total_s=0.05) as session:
        with pytest.raises(HTTP_ERRORS):
            await session.get(f"{url}/silent")
