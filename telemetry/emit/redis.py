"""Events by the platform's own Redis."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence

from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import EVENTS_SCRIPT_MAX, RECONNECT_S_MAX
from stream_fabric.redis.events import RedisEvents
from stream_fabric.redis.wire import ReplyError
from telemetry.transport import Record, TransportUnavailable

_ONE_MAX = EVENTS_SCRIPT_MAX * 1024


class RedisTransport:
    """``Transport`` to the stream that ``RedisEvents`` bounds. What finds no room there is unsent."""

    name = "redis"

    def __init__(self, events: RedisEvents) -> None:
        self._events = events
        self._writer = secrets.token_hex(8)
        self._number = 0

    async def send(self, batch: Sequence[Record]) -> None:
        done, unsent = 0, list[Record]()
        for part in _parts(batch):
            self._number += 1
            try:
                positions = await self._append(part)
            except ReplyError as error:
                unsent += batch[done:]
                raise TransportUnavailable(f"Redis takes no events: {error}", unsent) from error
            unsent += [part[position] for position in positions]
            done += len(part)
        if unsent:
            raise TransportUnavailable(
                "Redis holds as many as it may (STREAM_GW_EVENTS_REDIS_BYTES_MAX); does stream-gw telemetry run?",
                unsent,
            )

    async def _append(self, part: Sequence[Record]) -> list[int]:
        records = [(record.value, record.kept) for record in part]
        while True:
            try:
                return await self._events.append(self._writer, self._number, records)
            except FabricUnavailable:
                # Whether it is in is unknown; the same number again tells
                await asyncio.sleep(RECONNECT_S_MAX * random.uniform(0.5, 1))

    async def close(self) -> None: ...


def _parts(batch: Sequence[Record]) -> list[Sequence[Record]]:
    """Small enough that no other caller of Redis waits long for a script."""
    parts, begin, size = list[Sequence[Record]](), 0, 0
    for position, record in enumerate(batch):
        if position > begin and (size + len(record.value) > _ONE_MAX or position - begin == EVENTS_SCRIPT_MAX):
            parts.append(batch[begin:position])
            begin, size = position, 0
        size += len(record.value)
    return [*parts, batch[begin:]] if batch else []
