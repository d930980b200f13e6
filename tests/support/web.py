"""An HTTP server in the test's own process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable

from aiohttp import web

from stream_fabric.process.addresses import url_of


@contextlib.asynccontextmanager
async def served(routes: Iterable[web.RouteDef]) -> AsyncIterator[str]:
    """Serve the routes on a free port; yield the URL."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield url_of(runner.addresses[0])
    finally:
        await runner.cleanup()
