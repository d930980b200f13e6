"""The agent's HTTP server: liveness, and metrics of the agent and of a simulated engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from inference.agent.agent import Agent
from inference.agent.observe.gpus import open_nvml, watched_gpus
from inference.agent.observe.metrics import AgentMetrics
from inference.engines.sim.engine import SimEngine
from stream_fabric.ports import Engine
from stream_fabric.process.health_server import serve_health


@contextlib.asynccontextmanager
async def health_server(
    agent: Agent, engine: Engine, host: str, port: int, metrics: AgentMetrics
) -> AsyncIterator[str]:
    """Serve ``/healthz`` and ``/metrics`` on ``port``; -1: serve nothing.

    Yields the URL, empty when nothing is served. Raises OSError when the port is taken.
    """
    if port < 0:
        yield ""
        return
    async with watched_gpus(_no_gpus if isinstance(engine, SimEngine) else open_nvml) as gpus:

        async def page() -> tuple[str, bytes]:
            found = await metrics.scraped(agent, gpus())
            engines = engine.metrics.render() if isinstance(engine, SimEngine) else b""
            return found.content_type, found.body + engines

        async with serve_health(host, port, agent.ready.is_set, page) as url:
            yield url


def _no_gpus() -> None:
    """Return no reader: a simulated engine computes on no GPU."""
