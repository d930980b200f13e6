"""Health probes of a vLLM server, at its start and while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import aiohttp

from inference.engines.child import Child
from inference.engines.openai import OpenAIEngine
from inference.engines.warm_up import warm_up
from stream_fabric.process.http_client import HTTP_ERRORS, open_session

_BOOT_PROBE_EVERY_S = 0.05
_HEALTH_EVERY_S = 1.0
_PROBE_S = 5.0


async def until_ready(http: OpenAIEngine, url: str, *, with_logprobs: bool) -> Sequence[str]:
    """Wait for the server and then for the warm-up's token. Returns the models it serves."""
    async with open_session(total_s=_PROBE_S) as session:
        while await health(session, url) != 200:  # noqa: ASYNC110
            await asyncio.sleep(_BOOT_PROBE_EVERY_S)
    models = await http.start()
    await warm_up(http.submit, http.abort, models[0], with_logprobs=with_logprobs)
    return models


async def health(session: aiohttp.ClientSession, url: str) -> int | None:
    """HTTP status of the health endpoint; None: no answer."""
    try:
        async with session.get(f"{url}/health") as response:
            return response.status
    except HTTP_ERRORS:
        return None


async def until_lost(child: Child, unfit: Callable[[], str], silent_s: float) -> str:
    """Wait until vLLM can no longer serve, and return the reason.

    ``unfit`` returns the engine's own reason to end this process, or empty. ``silent_s``: longest silence of vLLM.
    """
    loop = asyncio.get_running_loop()
    answered_at = loop.time()
    async with open_session(total_s=_PROBE_S) as session:
        while not (await asyncio.wait([child.ended], timeout=_HEALTH_EVERY_S))[0]:
            if reason := unfit():
                return reason
            status = await health(session, child.url)
            if status == 503:  # the HTTP server outlives the engine by seconds, and serves nothing
                return "vLLM's engine died"
            if status is not None:
                answered_at = loop.time()
            elif loop.time() - answered_at > silent_s:
                return f"vLLM answered nothing for {silent_s:g} s"
    return f"vLLM ended with exit code {child.ended.result()}"
