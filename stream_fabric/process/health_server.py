"""HTTP server for health and metrics, for processes that serve nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from stream_fabric.process.addresses import url_of
from stream_fabric.system_errors import reason


@contextlib.asynccontextmanager
async def serve_health(
    host: str, port: int, is_ready: Callable[[], bool], page: Callable[[], Awaitable[tuple[str, bytes]]]
) -> AsyncIterator[str]:
    """Serve ``/healthz`` and ``/metrics`` on ``port`` (0: any free port) within the context; yields the URL.

    ``is_ready`` decides the status of ``/healthz``. ``page`` returns content type and body of the metrics.

    Raises OSError when the port is taken or the address is not this machine's.
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
        yield await listen(runner, host, port, "metrics")
    finally:
        await runner.cleanup()


async def listen(runner: web.AppRunner, host: str, port: int, flags: str) -> str:
    """Listen on the address and return the URL. ``flags`` is how the names of the flags of both begin.

    Raises OSError when the address cannot be bound.
    """
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise OSError(
            f"cannot listen on {host} port {port}: {reason(error)}; choose another --{flags}-port or --{flags}-host"
        ) from None
    return url_of(runner.addresses[0])
