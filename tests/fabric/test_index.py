"""Idempotency keys and users' running streams, on real Redis."""

from __future__ import annotations

import asyncio
import os

import pytest

from stream_fabric.redis import index as index_module
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


async def test_a_key_that_a_repeat_has_found_outlives_the_stream_that_the_repeat_creates(
    redis_client: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the first stream may be gone: then the repeat creates it anew, and another repeat must find it."""
    index, tenant, key = RedisIndex(redis_client), TenantId("acme"), os.urandom(4).hex()
    first, second = StreamId("resp_1"), StreamId("resp_2")
    with monkeypatch.context() as short:
        short.setattr(index_module, "LIVE_TTL_S", 10)
        assert not await index.is_claimed(tenant, key)
        assert await index.claim(tenant, key, first, "print") == (first, "print")
        assert await index.is_claimed(tenant, key)
    assert await index.claim(tenant, key, second, "print") == (first, "print")
    times = [await redis_client.execute(0, "PTTL", key) for key in await redis_client.execute(0, "KEYS", "sg:{idem:*")]
    assert max(times) > 3_590_000 and not any(0 < left <= 10_000 for left in times)


async def _holds(client: RedisClient, key: bytes) -> bool:
    return await client.execute(0, "ZRANGE", key, 0, -1) == [b"resp_1"]
