"""Placement records on their way to the fabric. Only operators read them, so they leave in batches."""

from __future__ import annotations

import asyncio

from stream_fabric.ports import StreamLog
from stream_fabric.stream.ids import StreamId
from stream_gw.delivery.hub import Hub

_GATHER_S = 0.05
_BATCH_MAX = 200


class PlacementRecords:
    """The records of one gateway that have not left yet."""

    def __init__(self, log: StreamLog, hub: Hub) -> None:
        self._log = log
        self._hub = hub
        self._held: list[tuple[StreamId, bytes]] = []

    def add(self, stream: StreamId, record: bytes) -> None:
        self._held.append((stream, record))
        if len(self._held) == 1:
            self._hub.spawn(self._send_soon(self._held))
        elif len(self._held) == _BATCH_MAX:
            self._held = []

    async def send(self) -> None:
        """Send what is held: somebody reads it now. Raises FabricError."""
        await self._send(self._held)

    async def _send_soon(self, batch: list[tuple[StreamId, bytes]]) -> None:
        await asyncio.sleep(_GATHER_S)
        await self._send(batch)

    async def _send(self, batch: list[tuple[StreamId, bytes]]) -> None:
        """Send a batch, unless that has begun."""
        if self._held is batch:
            self._held = []
        records = batch.copy()
        batch.clear()
        if records:
            await self._log.put_placements(records)
