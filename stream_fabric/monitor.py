"""The small HTTP surface of a process that has no other: liveness and metrics, on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web


@contextlib.asynccontextmanager
async def served(
    port: int, is_ready: Callable[[], bool], page: Callable[[], Awaitable[tuple[str, bytes]]]
) -> AsyncIterator[str]:
    """Serve ``/healthz`` and ``/metrics`` on ``port``; 0: any free one. Gives the URL. ``page``: content type and body.

    Raises OSError when the port is taken.
    """

    async def healthz(request: web.Request) -> web.Response:
        ready = is_ready()
        return web.Response(
            text="ok\n" if ready else "starting\n", status=200 if ready else 503, content_type="text/plain"
        )

    async def metrics(request: web.Request) -> web.Response:
        content_type, body = await page()
        return web.Response(body=body, headers={"content-type": content_type})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
