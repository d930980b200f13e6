"""A pool whose last replica dies is lost; one that was taken down is not. On real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

import pytest

from stream_fabric.pool.placement import ReplicaState
from stream_fabric.pool.records import EngineLoad, ReplicaInfo
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery.lease_reaper import LeaseReaper
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import RedisStreamLog, check_partitions
from stream_fabric.stream.ids import ReplicaId
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

SHORT_S, LONG_S = 0.2, 60.0


class Lost:
    """Pools, and those that a reaper tells to be lost."""

    def __init__(self, pools: RedisPools) -> None:
        self.pools = pools
        self.told: set[str] = set()

    def receive(self, pools: Collection[str]) -> None:
        self.told = set(pools)

    async def renew(self, cell: str, name: str, ttl_s: float, state: ReplicaState = "ready") -> None:
        info = ReplicaInfo(ReplicaId(name), cell, "sim", ("m",), state, EngineLoad(0, 0, 4), True, 4)
        await self.pools.report(info, ttl_s=ttl_s, running={})

    async def until_gone(self, cell: str, *names: str) -> None:
        async def gone() -> bool:
            leases = (await self.pools.changes(cell, 0, "")).changed
            return not {name for name, _ in leases} & set(names)

        await eventually(gone, f"the reaper to retire {names}")


@pytest.fixture
async def lost(redis_server: RedisServer) -> AsyncIterator[Lost]:
    client = RedisClient(redis_server.url)
    await client.start()
    lost = Lost(RedisPools(client))
    log = RedisStreamLog(client, await check_partitions(client, 4))
    reaper = LeaseReaper(lost.pools, log, HostClock(), HostRandom(), None, lost.receive)
    running = asyncio.create_task(reaper.run())
    yield lost
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await client.close()


async def test_a_pool_is_lost_when_its_last_replica_dies_and_until_one_joins(lost: Lost) -> None:
    for name in ("a", "b"):
        await lost.renew("lost", name, SHORT_S)
    await lost.until_gone("lost", "a", "b")
    assert lost.told == {"lost"}
    await lost.renew("lost", "c", LONG_S)
    await eventually(lambda: not lost.told, "the pool to have a replica again")
    await lost.pools.retire("lost", ReplicaId("c"), leaving=True)
    await lost.renew("marker", "d", SHORT_S)
    await eventually(lambda: lost.told == {"marker"}, "another pool alone")


@pytest.mark.parametrize(
    ("dies", "others"),
    [
        ("ready", {"taken": ("ready", LONG_S)}),
        ("ready", {"taken": ("warming", LONG_S)}),
        ("ready", {"taken~1": ("ready", LONG_S)}),
        ("draining", {}),
        ("warming", {}),
    ],
)
async def test_a_pool_with_other_replicas_or_one_that_is_taken_down_is_not_lost(
    lost: Lost, dies: ReplicaState, others: dict[str, tuple[ReplicaState, float]]
) -> None:
    cell = "taken~0" if "taken~1" in others else "taken"
    for other, (state, ttl_s) in others.items():
        await lost.renew(other, "stays", ttl_s, state)
    await lost.renew(cell, "dies", SHORT_S, dies)
    await lost.until_gone(cell, "dies")
    assert not lost.told
    for other in others:
        await lost.pools.retire(other, ReplicaId("stays"), leaving=True)


async def test_a_pool_is_lost_although_another_replica_drains(lost: Lost) -> None:
    await lost.renew("drains", "leaves", LONG_S, "draining")
    await lost.renew("drains", "dies", SHORT_S)
    await eventually(lambda: lost.told == {"drains"}, "the pool to be lost")
    await lost.renew("later", "dies", SHORT_S)  # the pools are listed many times until then
    await eventually(lambda: lost.told == {"drains", "later"}, "both pools to be lost")
    await lost.pools.retire("drains", ReplicaId("leaves"), leaving=True)
