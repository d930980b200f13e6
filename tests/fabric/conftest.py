"""The log and the pools that contract suites run on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from stream_fabric.redis.client import RedisClient
from tests.fabric.test_log_contract import Fabric, MemoryFabric, RedisFabric
from tests.fabric.test_pools import Pool


@pytest.fixture(params=["redis", "cluster"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    client = RedisClient(request.getfixturevalue("redis_url" if request.param == "redis" else "redis_cluster_url"))
    await client.start()
    yield Pool(client)
    await client.close()


@pytest.fixture(params=["memory", "redis", "redis-publish", "cluster", "cluster-publish"])
async def fabric(request: pytest.FixtureRequest) -> AsyncIterator[Fabric]:
    if request.param == "memory":
        yield MemoryFabric()
        return
    kind, _, publish = request.param.partition("-")
    client = RedisClient(request.getfixturevalue("redis_url" if kind == "redis" else "redis_cluster_url"))
    await client.start()
    if publish:
        client.publish, client.publish_is_counted = "PUBLISH", kind == "redis"
    fabric = RedisFabric(client)
    yield fabric
    for stop in fabric.stop:
        await stop()
    await client.close()
