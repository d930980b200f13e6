"""What a gateway believes of the pools, when they change under a request."""

from __future__ import annotations

import pytest

from stream_fabric.errors import NoReplica
from stream_fabric.ids import ReplicaId
from stream_fabric.ports import EngineLoad
from stream_fabric.redis.pool import RedisPools, ReplicaInfo
from stream_gw.directory import Directory


class Pools(RedisPools):
    """One pool, until it is lost."""

    def __init__(self) -> None:
        self.names = ["p"]

    async def pools(self) -> list[str]:
        return self.names

    async def replicas(self, pool: str) -> list[ReplicaInfo]:
        return [ReplicaInfo(ReplicaId("r"), pool, "sim", ("m",), "ready", EngineLoad(0, 0, 1))]

    async def prefix(self, pool: str, replica: ReplicaId) -> bytes:
        return b""


async def test_a_pool_that_is_lost_after_it_was_found_has_no_replica() -> None:
    pools = Pools()
    directory = Directory(pools)
    pool = await directory.pool_of("m")
    assert directory.candidates(pool, "m", [])
    pools.names = []
    await directory.refresh()
    with pytest.raises(NoReplica):
        directory.estimates(pool)
    with pytest.raises(NoReplica):
        directory.candidates(pool, "m", [])
