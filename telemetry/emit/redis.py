"""Transport of events through the platform's own Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from stream_fabric.errors import FabricError, FabricUnavailable
from stream_fabric.limits import EVENTS_SCRIPT_MAX, RECONNECT_S_MAX
from stream_fabric.ports import Random
from stream_fabric.redis.events import RedisEvents
from telemetry.emit.transport import Record, TransportUnavailable

_ONE_MAX = EVENTS_SCRIPT_MAX * 1024


class RedisTransport:
    """``Transport`` to the bounded Redis Stream of events. Records that find no room there are unsent."""

    name = "redis"

    def __init__(self, events: RedisEvents, random: Random) -> None:
        self._events = events
        self._random = random
        self._writer = random.token_hex(8)
        self._number = 0

    async def send(self, batch: Sequence[Record]) -> None:
        done, unsent = 0, list[Record]()
        for part in _split(batch):
            self._number += 1
            try:
                positions = await self._append(part)
            except FabricError as error:
                unsent += batch[done:]
                raise TransportUnavailable(f"Redis refuses events: {error}", unsent) from error
            unsent += [part[position] for position in positions]
            done += len(part)
        if unsent:
            raise TransportUnavailable(
                "the Redis Stream of events is full (STREAM_GW_EVENTS_REDIS_BYTES_MAX); check that stream-gw telemetry "
                "runs",
                unsent,
            )

    async def _append(self, part: Sequence[Record]) -> list[int]:
        """Append records and return the positions of those without room. Repeats until Redis answers."""
        records = [(record.value, record.kept) for record in part]
        while True:
            try:
                return await self._events.append(self._writer, self._number, records)
            except FabricUnavailable:
                # The append may have arrived; a repeat under the same number changes nothing
                await asyncio.sleep(RECONNECT_S_MAX * self._random.uniform(0.5, 1))

    async def close(self) -> None: ...


def _split(batch: Sequence[Record]) -> list[Sequence[Record]]:
    """Split a batch so that no script blocks Redis for long."""
    parts, begin, size = list[Sequence[Record]](), 0, 0
    for position, record in enumerate(batch):
        if position > begin and (size + len(record.value) > _ONE_MAX or position - begin == EVENTS_SCRIPT_MAX):
            parts.append(batch[begin:position])
            begin, size = position, 0
        size += len(record.value)
    return [*parts, batch[begin:]] if batch else []
