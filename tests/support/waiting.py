"""Waiting without luck: poll with a deadline."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

PATIENCE_S = 10.0
"""How long to wait where a test does not say it."""


async def eventually(condition: Callable[[], Any], what: str = "", timeout_s: float | None = None) -> Any:
    """Poll a condition, plain or async, until it gives something true; return that."""
    loop = asyncio.get_running_loop()
    timeout_s = PATIENCE_S if timeout_s is None else timeout_s
    deadline = loop.time() + timeout_s
    while True:
        seen = condition()
        if inspect.isawaitable(seen):
            seen = await seen
        if seen:
            return seen
        if loop.time() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what or condition}; last saw {seen!r}")
        await asyncio.sleep(0.005)
