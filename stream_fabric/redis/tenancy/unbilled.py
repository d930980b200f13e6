"""Fenced streams that have no bill yet, in Redis: a sorted set in each partition's slot."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from stream_fabric.accounts.ports import Unbilled
from stream_fabric.limits import BILL_LATE_S, BILLS_LATE_MAX
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.scripts import script
from stream_fabric.redis.wire import Arg
from stream_fabric.stream.ids import StreamId, partition_of


class RedisUnbilled(Unbilled):
    """``Unbilled`` in Redis."""

    def __init__(self, client: RedisClient, partitions: Partitions) -> None:
        self._client = client
        self._partitions = partitions

    async def late(self, partition: int) -> list[tuple[StreamId, int]]:
        key = _key(partition)
        args: list[Arg] = [int(BILL_LATE_S * 1000), BILLS_LATE_MAX]
        found = await script("bills_late")(self._client, self._partitions.slots[partition], [key, f"{key}:claim"], args)
        return [(StreamId(name.decode()), int(at)) for name, at in zip(found[::2], found[1::2], strict=True)]

    async def remove(self, streams: Sequence[StreamId]) -> None:
        by_partition: dict[int, list[StreamId]] = {}
        for stream in streams:
            by_partition.setdefault(partition_of(stream, self._partitions.count), []).append(stream)
        slots = self._partitions.slots
        await asyncio.gather(
            *(self._client.execute(slots[k], "ZREM", _key(k), *names) for k, names in by_partition.items())
        )


def _key(partition: int) -> str:
    return f"sg:{{p{partition}}}:unbilled"
