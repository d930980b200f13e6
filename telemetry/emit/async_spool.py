"""The disk spool as the event loop uses it: its blocking calls run in one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from stream_fabric.ports import Clock
from telemetry.emit.spool import Spool

T = TypeVar("T")


class AsyncSpool:
    def __init__(self, spool: Spool, clock: Clock) -> None:
        self._spool = spool
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "events-spool")
        self.bytes = 0
        """Size after the last call."""
        self.bill_bytes = 0
        """Bytes of billing events after the last call."""
        self._oldest: float | None = None

    @property
    def empty(self) -> bool:
        return self._spool.empty

    @property
    def share_used(self) -> float:
        """Used share of the spool's size limit."""
        return self.bytes / self._spool.bytes_max

    def has_room(self, bill_bytes: int, share: float) -> bool:
        """Return whether the billing events with ``bill_bytes`` more stay below a share of the spool's size limit."""
        return self.bill_bytes + bill_bytes < share * self._spool.bytes_max

    @property
    def oldest_s(self) -> float:
        """Age of the oldest segment in seconds; 0: the spool is empty."""
        return max(0.0, self._clock.now_us() / 1e6 - self._oldest) if self._oldest is not None else 0.0

    async def call(self, work: Callable[[Spool], T]) -> T:
        """Run blocking work on the spool in its thread."""

        def measured() -> tuple[T, int, int, float | None]:
            return work(self._spool), self._spool.bytes, self._spool.bill_bytes, self._spool.oldest()

        found = await asyncio.get_running_loop().run_in_executor(self._thread, measured)
        result, self.bytes, self.bill_bytes, self._oldest = found
        return result

    def shutdown(self) -> None:
        """End the thread after the call that runs."""
        self._thread.shutdown(wait=False)
