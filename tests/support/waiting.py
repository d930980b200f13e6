"""Waiting without luck: poll with a deadline."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

PATIENCE_S = 30.0
"""Default deadline of ``eventually``. A passing test never waits for it, so it has room for a busy machine."""
_PAUSE_S = 0.005
_PAUSE_S_MAX, _ASKING_PAUSE_S_MAX = 0.05, 0.25
"""Longest pauses between two looks. A look that asks a server costs CPU, which what is waited for needs."""


async def eventually(condition: Callable[[], Any], what: str = "", timeout_s: float | None = None) -> Any:
    """Poll a condition, plain or async, until it gives something true; return that."""
    loop = asyncio.get_running_loop()
    timeout_s = PATIENCE_S if timeout_s is None else timeout_s
    deadline = loop.time() + timeout_s
    pause_s, pause_s_max = _PAUSE_S, _PAUSE_S_MAX
    while True:
        seen = condition()
        if inspect.isawaitable(seen):
            seen, pause_s_max = await seen, _ASKING_PAUSE_S_MAX
        if seen:
            return seen
        if loop.time() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what or condition}; last saw {seen!r}")
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 1.3, pause_s_max)
