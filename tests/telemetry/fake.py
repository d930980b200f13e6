"""A transport in memory. It keeps the contract of ``test_transports``, with which it is held to the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from telemetry.emit.transport import Record, TransportUnavailable


class MemoryTransport:
    name = "memory"

    def __init__(self) -> None:
        self.arrived: list[Record] = []
        self.batches: list[int] = []
        self.well = asyncio.Event()
        """While it is not set no batch is acknowledged."""
        self.well.set()
        self.failing = False
        self.failed = 0
        self.bytes_max = 1 << 30
        """Largest size of one record, bytes."""
        self.seconds = 0.0
        """Each batch takes so long."""
        self.closed = False

    async def send(self, batch: Sequence[Record]) -> None:
        if self.seconds:
            await asyncio.sleep(self.seconds)
        await self.well.wait()
        if self.failing:
            self.failed += 1
            raise TransportUnavailable("it fails", batch)
        refused = [record for record in batch if len(record.value) > self.bytes_max]
        self.arrived += [record for record in batch if len(record.value) <= self.bytes_max]
        self.batches.append(len(batch))
        if refused:
            raise TransportUnavailable("too large", (), refused)

    async def close(self) -> None:
        self.closed = True

    @property
    def values(self) -> list[bytes]:
        return [record.value for record in self.arrived]
