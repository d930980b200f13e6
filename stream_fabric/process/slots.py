"""A limit on reads that run at once, which reads of a silent shard of Redis do not use up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

SLOT_S = 0.1
"""Time after which a read no longer counts: reads of a silent shard must not hold the others back."""

T = TypeVar("T")
Read = Callable[[], Coroutine[Any, Any, T]]


class Slots:
    """Begins at most ``count`` reads within ``SLOT_S``; a read that takes longer goes on without a slot."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def read(self, read: Read[T]) -> T:
        """Wait for a slot, read, and return the result. A cancelled call cancels its read."""
        await self._free.acquire()
        return await self._begun(asyncio.create_task(read()))

    async def begin(self, tasks: asyncio.TaskGroup, read: Read[T]) -> asyncio.Task[T]:
        """Wait for a slot, and begin the read as a task of the group. The read has no task before."""
        await self._free.acquire()
        return self._begun(tasks.create_task(read()))

    def _begun(self, reading: asyncio.Task[T]) -> asyncio.Task[T]:
        """Free the slot once the read has ended, at the latest after ``SLOT_S``."""
        is_held = True

        def free(*_: object) -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                timer.cancel()
                self._free.release()

        timer = asyncio.get_running_loop().call_later(SLOT_S, free)
        reading.add_done_callback(free)
        return reading
