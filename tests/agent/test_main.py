"""The agent process's start and end."""

from __future__ import annotations

import asyncio
import os
import signal

from inference.agent.main import serve
from inference.agent.settings import AgentSettings
from tests.support.proxy import Proxy
from tests.support.redis import RedisServer
from tests.support.waiting import eventually


async def test_invariant_9_a_signal_that_comes_while_redis_is_being_reached_ends_the_process(
    redis_server: RedisServer,
) -> None:
    """Its engine runs already, and it does not serve yet."""
    async with Proxy.before(redis_server.port) as proxy:
        proxy.pause()
        serving = asyncio.create_task(serve(AgentSettings(redis_url=proxy.url), lambda replica, url: None))
        await eventually(lambda: proxy.accepted, "the engine to be up, and Redis to be asked")
        os.kill(os.getpid(), signal.SIGTERM)
        proxy.resume()
        try:
            await asyncio.wait_for(asyncio.shield(serving), 5)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
