"""Transport of events through the platform's own Redis."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from stream_fabric.errors import FabricError, FabricUnavailable
from stream_fabric.limits import EVENTS_SCRIPT_MAX, RECONNECT_S_MAX
from stream_fabric.ports import Random
from stream_fabric.redis.events import RedisEvents
from telemetry.emit.transport import Record, TransportUnavailable

log = logging.getLogger(__name__)

_ONE_MAX = EVENTS_SCRIPT_MAX * 1024
_RECENT_S = 10.0
"""Seconds before the last batch whose billing events are kept in memory: a failover of Redis may lose them."""
_RECENT_BYTES_MAX = 8 << 20
_MARKED_S = 300.0
"""Time without a batch after which Redis may have forgotten the last one without a loss."""


class _Taken(NamedTuple):
    """A batch that Redis has taken."""

    number: int
    at_s: float
    """Time of the reply, on the loop's clock."""
    billing: Sequence[Record]
    size: int
    """Bytes of ``billing``."""


class RedisTransport:
    """``Transport`` to the bounded Redis Stream of events. Records that find no room there are unsent.

    Redis acknowledges a batch before its replica has it. The reply to a batch tells which one Redis had before, so
    billing events that a failover has lost are sent again.
    """

    name = "redis"

    def __init__(self, events: RedisEvents, random: Random) -> None:
        self._events = events
        self._random = random
        self._writer = random.token_hex(8)
        self._number = 0
        self._recent: deque[_Taken] = deque()
        """The newest batches, oldest first."""
        self._recent_bytes = 0
        self._lost: list[Record] = []
        """Billing events that Redis has lost, until they are sent again."""

    async def send(self, batch: Sequence[Record]) -> None:
        done, unsent = 0, list[Record]()
        for part in _split(batch):
            try:
                positions = await self._append(part)
            except FabricError as error:
                unsent += batch[done:]
                raise TransportUnavailable(f"Redis refuses events: {error}", unsent) from error
            unsent += [part[position] for position in positions]
            done += len(part)
        if self._lost:
            await self._send_lost()
        if unsent:
            raise TransportUnavailable(
                "the Redis Stream of events is full (STREAM_GW_EVENTS_REDIS_BYTES_MAX); check that stream-gw telemetry "
                "runs",
                unsent,
            )

    async def _send_lost(self) -> None:
        """Send lost events again. What finds no room is sent with a later batch."""
        lost, self._lost = self._lost, []
        for part in _split(lost):
            try:
                positions = await self._append(part)
            except FabricError:
                positions = list(range(len(part)))
            self._lost += [part[position] for position in positions]

    async def _append(self, part: Sequence[Record]) -> list[int]:
        """Append records and return the positions of those without room. Repeats until Redis answers."""
        self._number += 1
        records = [(record.value, record.kept) for record in part]
        while True:
            try:
                positions, earlier = await self._events.append_after(self._writer, self._number, records)
                break
            except FabricUnavailable:
                # The append may have arrived; a repeat under the same number changes nothing
                await asyncio.sleep(RECONNECT_S_MAX * self._random.uniform(0.5, 1))
        now_s = asyncio.get_running_loop().time()
        if self._recent and now_s - self._recent[-1].at_s < _MARKED_S:
            lost = [record for taken in self._recent if taken.number > earlier for record in taken.billing]
            if lost:
                log.warning("billing events that Redis has lost are sent again: events=%d", len(lost))
                self._lost += lost
        if len(positions) < len(part):
            refused = set(positions)
            self._remember(now_s, [each for at, each in enumerate(part) if each.kept and at not in refused])
        return positions

    def _remember(self, now_s: float, billing: Sequence[Record]) -> None:
        """Keep the billing events of the batch that Redis has just taken, and drop old ones."""
        self._recent.append(_Taken(self._number, now_s, billing, sum(record.size for record in billing)))
        self._recent_bytes += self._recent[-1].size
        while self._recent[0].at_s < now_s - _RECENT_S or self._recent_bytes > _RECENT_BYTES_MAX:
            self._recent_bytes -= self._recent.popleft().size

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
