"""The Redis Stream that carries events where there is no Kafka.

It is bounded: events that do not fit are refused, and no event is deleted before a consumer has taken it. Offsets only
grow, also after Redis lost its data; they have gaps. One consumer reads after its offset and trims what it committed.
"""

from __future__ import annotations

from collections.abc import Sequence

from stream_fabric.limits import EVENTS_REDIS_BYTES_MAX
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.scripts import script
from stream_fabric.redis.topology import slot_of
from stream_fabric.redis.wire import Arg

_SLOT = slot_of("events")
_MARK_MS = 600_000
"""Time for which a writer's last batch is recognized; far longer than a batch is retried."""


class RedisEvents:
    """One Redis Stream of events. ``part`` names another one than the main stream, such as ``dlq``."""

    def __init__(self, client: RedisClient, part: str = "", bytes_max: int = EVENTS_REDIS_BYTES_MAX) -> None:
        self._client = client
        self._key = "sg:{events}" + (f":{part}" if part else "")
        self._bytes_max = bytes_max

    async def append(self, writer: str, number: int, records: Sequence[tuple[bytes, bool]]) -> list[int]:
        """Append records, each with True if it must not be dropped; a quarter of the bytes is reserved for those.

        Returns the indexes of records that did not fit. ``number`` is the number of the writer's batch; a repeated
        batch gets the same answer. Raises FabricUnavailable if the outcome is unknown.
        """
        return (await self.append_after(writer, number, records))[0]

    async def append_after(
        self, writer: str, number: int, records: Sequence[tuple[bytes, bool]]
    ) -> tuple[list[int], int]:
        """``append``, and also return the number of the writer's last batch before this one that Redis has; 0: none."""
        args: list[Arg] = [number, _MARK_MS, self._bytes_max * 3 // 4, self._bytes_max]
        for record, kept in records:
            args += (int(kept), record)
        keys = [self._key, f"{self._key}:head", f"{self._key}:w:{writer}"]
        refused, earlier = await script("events_append")(self._client, _SLOT, keys, args)
        return [int(position) for position in refused.split()], int(earlier or 0)

    async def read(self, after: int, count: int) -> list[tuple[int, bytes]]:
        """Read up to ``count`` (offset, record) pairs after an offset, oldest first. ``after`` 0: from the oldest."""
        entries = await self._client.execute(_SLOT, "XRANGE", self._key, f"{after + 1}-0", "+", "COUNT", count)
        return [(int(entry.partition(b"-")[0]), fields[1]) for entry, fields in entries]

    async def trim(self, upto: int) -> None:
        """Delete all records with offsets up to ``upto``, inclusive."""
        await self._client.execute(_SLOT, "XTRIM", self._key, "MINID", "=", f"{upto + 1}-0")

    async def drop(self, offsets: Sequence[int]) -> None:
        """Delete the records with these offsets."""
        await self._client.execute(_SLOT, "XDEL", self._key, *(f"{offset}-0" for offset in offsets))

    async def count(self) -> int:
        """Read the number of records that the stream holds."""
        return int(await self._client.execute(_SLOT, "XLEN", self._key))

    async def head(self) -> int:
        """Read the offset of the newest record ever appended; 0: there was none."""
        held = await self._client.execute(_SLOT, "GET", f"{self._key}:head")
        return int(held.split()[0]) if held else 0
