"""The Redis Stream that carries events where there is no Kafka.

It is bounded: what does not fit is refused, and nothing is thrown away that no consumer has taken. An event's offset
only grows, also after Redis lost everything; it has gaps. One consumer reads after its offset, and trims what it has
committed.
"""

from __future__ import annotations

from collections.abc import Sequence

from stream_fabric.limits import EVENTS_REDIS_BYTES_MAX
from stream_fabric.redis.client import RedisClient, slot_of
from stream_fabric.redis.scripts import script
from stream_fabric.redis.wire import Arg

_SLOT = slot_of("events")
_MARK_MS = 600_000
"""A writer's last batch is known for so long: far longer than it is sent again."""


class RedisEvents:
    """``part``: another stream beside it, such as ``dlq``."""

    def __init__(self, client: RedisClient, part: str = "", bytes_max: int = EVENTS_REDIS_BYTES_MAX) -> None:
        self._client = client
        self._key = "sg:{events}" + (f":{part}" if part else "")
        self._bytes_max = bytes_max

    async def append(self, writer: str, number: int, records: Sequence[tuple[bytes, bool]]) -> list[int]:
        """Append records, each with whether it must not be dropped: a quarter of the bound is kept for those.

        Returns the positions of those that did not fit. The same writer's same number again is answered as it was the
        first time. Raises FabricUnavailable: whether they are in is unknown.
        """
        args: list[Arg] = [number, _MARK_MS, self._bytes_max * 3 // 4, self._bytes_max]
        for record, kept in records:
            args += (int(kept), record)
        keys = [self._key, f"{self._key}:head", f"{self._key}:w:{writer}"]
        refused: bytes = await script("tell")(self._client, _SLOT, keys, args)
        return [int(position) for position in refused.split()]

    async def read(self, after: int, count: int) -> list[tuple[int, bytes]]:
        """Up to so many records after an offset, oldest first, each with its offset. 0: from the oldest."""
        entries = await self._client.execute(_SLOT, "XRANGE", self._key, f"{after + 1}-0", "+", "COUNT", count)
        return [(int(entry.partition(b"-")[0]), fields[1]) for entry, fields in entries]

    async def trim(self, upto: int) -> None:
        """Forget what has an offset up to this one."""
        await self._client.execute(_SLOT, "XTRIM", self._key, "MINID", "=", f"{upto + 1}-0")

    async def drop(self, offsets: Sequence[int]) -> None:
        """Forget these."""
        await self._client.execute(_SLOT, "XDEL", self._key, *(f"{offset}-0" for offset in offsets))

    async def head(self) -> int:
        """The newest record's offset; 0: there was none."""
        held = await self._client.execute(_SLOT, "GET", f"{self._key}:head")
        return int(held.split()[0]) if held else 0
