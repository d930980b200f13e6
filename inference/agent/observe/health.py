"""An agent's own small HTTP surface: liveness, and metrics of itself and of a simulated engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from inference.agent.agent import Agent
from inference.agent.engines.sim.engine import SimEngine
from inference.agent.gpus import watched
from inference.agent.metrics import AgentMetrics
from stream_fabric.monitor import served
from stream_fabric.ports import Engine


@contextlib.asynccontextmanager
async def monitor(agent: Agent, engine: Engine, host: str, port: int, metrics: AgentMetrics) -> AsyncIterator[str]:
    """Serve ``/healthz`` and ``/metrics`` on ``port``; -1: nothing. Gives the URL. Raises OSError when the port is
    taken."""
    if port < 0:
        yield ""
        return
    async with watched() as gpus:

        async def page() -> tuple[str, bytes]:
            found = await metrics.scraped(agent, gpus())
            engines = engine.metrics.render() if isinstance(engine, SimEngine) else ""
            return found.content_type, found.body + engines.encode()

        async with served(host, port, agent.ready.is_set, page) as url:
            yield url
