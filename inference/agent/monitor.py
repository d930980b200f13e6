"""An agent's own small HTTP surface, on loopback: liveness, and metrics of itself and of a simulated engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from inference.agent.agent import Agent
from inference.agent.engines.sim.engine import SimEngine
from stream_fabric.ports import Engine

_TEXT = "text/plain"
_HEADERS = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}


@contextlib.asynccontextmanager
async def monitor(agent: Agent, engine: Engine, port: int, registry: CollectorRegistry) -> AsyncIterator[None]:
    """Serve ``/healthz`` and ``/metrics`` on ``port``; 0: nothing. Raises OSError when the port is taken."""
    if not port:
        yield
        return

    async def healthz(request: web.Request) -> web.Response:
        ready = agent.ready.is_set()
        return web.Response(text="ok\n" if ready else "starting\n", status=200 if ready else 503, content_type=_TEXT)

    async def metrics(request: web.Request) -> web.Response:
        load = engine.load()
        own = (
            "# HELP running_seqs Streams in flight on this agent.\n# TYPE running_seqs gauge\n"
            f"running_seqs {len(agent.running)}\n"
            "# HELP waiting_seqs Of them, those that wait in the engine.\n# TYPE waiting_seqs gauge\n"
            f"waiting_seqs {load.waiting}\n"
        )
        engines = engine.metrics.render() if isinstance(engine, SimEngine) else ""
        return web.Response(body=(own + engines).encode() + generate_latest(registry), headers=_HEADERS)

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield
    finally:
        await runner.cleanup()
