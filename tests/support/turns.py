"""CPU time of a loop's turns and of calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any


async def longest_turn_s(work: Callable[[], Coroutine[Any, Any, object]]) -> float:
    """Return the longest turn of the loop while the work runs, in CPU seconds of its thread.

    The work runs several times, and the best run counts: a collection of garbage can come in any turn.
    """
    found = []
    for _ in range(3):
        task = asyncio.create_task(work())
        longest, before = 0.0, time.thread_time()
        while not task.done():
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
        assert await task, "it has worked"
        found.append(longest)
    return min(found)


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU seconds that the work takes at best."""
    found = []
    for _ in range(3):
        before = time.thread_time()
        work()
        found.append(time.thread_time() - before)
    return min(found)
