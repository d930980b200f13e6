"""Idempotency keys and users' running streams, on real Redis."""

from __future__ import annotations

import asyncio
import os

from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.index import RedisIndex
from stream_fabric.redis_url import RedisUrl
from stream_fabric.stream.ids import StreamId, TenantId, UserId
from tests.support.proxy import Proxy
from tests.support.waiting import eventually


async def test_a_users_list_expires_also_when_who_made_it_was_cancelled(
    redis_url: str, redis_client: RedisClient
) -> None:
    """A client that goes away while its request is being created leaves no key for ever."""
    tenant, user, stream = TenantId("acme"), UserId(os.urandom(4).hex()), StreamId("resp_1")
    async with Proxy.before(RedisUrl.parse(redis_url).addresses[0].port) as proxy:
        client = RedisClient(proxy.url)
        await client.start()
        proxy.delay_s = 0.1
        adding = asyncio.create_task(RedisIndex(client).add_live(tenant, user, stream, 1))
        await eventually(lambda: RedisIndex(redis_client).live(tenant, user))
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        await client.close()
    keys = [key for key in await redis_client.execute(0, "KEYS", "sg:{live:*") if await _holds(redis_client, key)]
    assert len(keys) == 1
    assert await redis_client.execute(0, "PTTL", keys[0]) > 0


async def _holds(client: RedisClient, key: bytes) -> bool:
    return await client.execute(0, "ZRANGE", key, 0, -1) == [b"resp_1"]
