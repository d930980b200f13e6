"""Connection to the usage that Redis settled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stream_fabric.errors import FabricUnavailable
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.streams import RedisStreamLog, held_partitions


@asynccontextmanager
async def open_settled(redis_url: str) -> AsyncIterator[RedisStreamLog]:
    """Connect to the settled usage in Redis. Raises FabricUnavailable."""
    client = RedisClient(redis_url)
    try:
        await client.start()
        partitions = await held_partitions(client)
        if partitions is None:
            raise FabricUnavailable("this Redis was never used by stream-gw; set the platform's with --redis-url")
        yield RedisStreamLog(client, partitions)
    finally:
        await client.close()
