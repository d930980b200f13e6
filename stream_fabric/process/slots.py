"""A limit on reads that run at once, which reads of a silent shard of Redis do not use up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

SLOT_S = 0.1
"""Time after which a read no longer counts: reads of a silent shard must not hold the others back."""

T = TypeVar("T")


class Slots:
    """Begins at most ``count`` reads within ``SLOT_S``; a read that takes longer goes on without a slot."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def read(self, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Wait for a slot, read, and return the result. A cancelled call cancels its read."""
        async with self._free:
            reading = asyncio.create_task(read())
            try:
                await asyncio.wait({reading}, timeout=SLOT_S)
            except asyncio.CancelledError:
                reading.cancel()
                raise
        return await reading
