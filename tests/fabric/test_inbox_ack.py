"""Acknowledgement of an inbox's entries, together with the next read."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from stream_fabric.errors import FabricError
from stream_fabric.pool.records import Candidate, EngineLoad, EngineRequest, ReplicaInfo, Work
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.inbox import RedisInbox
from stream_fabric.redis.pools import RedisPools, pool_prefix, pool_slot
from stream_fabric.redis.topology import Single
from stream_fabric.redis_url import RedisUrl
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId, new_stream_id
from tests.support.proxy import Proxy
from tests.support.redis import RedisServer


class Box:
    """A pool with one replica and its inbox."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.pool, self.replica = f"pool-{os.urandom(4).hex()}", ReplicaId("r")
        self.pools = RedisPools(client)
        self.inbox = RedisInbox(client, self.pool, self.replica)

    async def fill(self, count: int) -> list[StreamId]:
        info = ReplicaInfo(self.replica, self.pool, "sim", ("m",), "ready", EngineLoad(0, 0, 50), room=50)
        await self.pools.report(info, ttl_s=60, running={})
        streams = [new_stream_id(time.time_ns() // 1_000_000, os.urandom(10)) for _ in range(count)]
        for stream in streams:
            work = Work(EngineRequest(stream, "chat", "m", msgspec.Raw(b"{}")), "1.aa", TenantId("t"), b"", None)
            await self.pools.place(self.pool, work, [Candidate(self.replica, 0)], wait_s=1, jitter=0.0)
        return streams

    async def left(self) -> tuple[int, int]:
        """Entries of the inbox, and streams that count as unread."""
        slot, prefix = pool_slot(self.pool), f"{pool_prefix(self.pool)}{self.replica}:"
        entries = await self.client.execute(slot, "XRANGE", prefix + "inbox", "-", "+")
        return len(entries), len(await self.client.execute(slot, "SMEMBERS", prefix + "unread"))


@pytest.fixture
async def box(redis_url: str) -> AsyncIterator[Box]:
    client = RedisClient(redis_url)
    await client.start()
    made = Box(client)
    yield made
    made.inbox.close()
    await client.close()


async def test_a_read_acknowledges_what_the_last_one_gave(box: Box) -> None:
    streams = await box.fill(3)
    got = (await box.inbox.read(0.1)).arrivals
    assert [arrival.stream for arrival in got] == streams and await box.left() == (3, 3)
    assert (await box.inbox.read(0.001, [(one.entry, one.stream) for one in got[:2]])).arrivals == got[2:]
    assert await box.left() == (1, 1)
    assert (await box.inbox.read(0.001, [(one.entry, one.stream) for one in got])).arrivals == [], "again is harmless"
    assert await box.left() == (0, 0)


async def test_a_read_follows_the_primary_while_the_former_one_still_answers(
    box: Box, redis_server: RedisServer
) -> None:
    assert not (await box.inbox.read(0.001)).arrivals
    box.client.topology = Single(RedisUrl.parse(redis_server.url))  # as after another command's refresh
    streams = await box.fill(1)
    assert [arrival.stream for arrival in (await box.inbox.read(0.1)).arrivals] == streams


async def test_a_server_that_forgot_its_scripts_is_sent_this_one(redis_server: RedisServer) -> None:
    client = RedisClient(redis_server.url)
    await client.start()
    box = Box(client)
    await box.fill(2)
    got = (await box.inbox.read(0.1)).arrivals
    redis_server("SCRIPT", "FLUSH")
    assert (await box.inbox.read(0.001, [(one.entry, one.stream) for one in got])).arrivals == []  # none twice
    assert await box.left() == (0, 0)
    box.inbox.close()
    await client.close()


async def test_what_a_lost_connection_did_not_acknowledge_is_acknowledged_with_the_next_read(redis_url: str) -> None:
    async with Proxy.before(RedisUrl.parse(redis_url).addresses[0].port) as proxy:
        client = RedisClient(proxy.url, timeout_s=1.0)
        await client.start()
        box = Box(client)
        await box.fill(2)
        got = (await box.inbox.read(0.1)).arrivals
        done = [(one.entry, one.stream) for one in got]
        proxy.refuse = True
        proxy.cut_all()
        with pytest.raises(FabricError):
            await box.inbox.read(0.001, done)
        proxy.refuse = False
        assert (await box.inbox.read(0.001, done)).arrivals == []
        assert await box.left() == (0, 0)
        box.inbox.close()
        await client.close()
