"""What a gateway believes of the pools, when they change under a request."""

from __future__ import annotations

import pytest

from stream_fabric.errors import ModelNotFound, NoReplica
from stream_fabric.ids import ReplicaId
from stream_fabric.plans import PoolPlan, Usual, route
from stream_fabric.ports import EngineLoad
from stream_fabric.redis.pool import RedisPools, ReplicaInfo
from stream_gw.directory import Directory


class Pools(RedisPools):
    """One pool, until it is lost."""

    def __init__(self) -> None:
        self.names = ["p"]
        self.planned: dict[str, PoolPlan] = {}

    async def plans(self) -> dict[str, PoolPlan]:
        return self.planned

    async def pools(self) -> list[str]:
        return self.names

    async def replicas(self, pool: str) -> list[ReplicaInfo]:
        return [ReplicaInfo(ReplicaId("r"), pool, "sim", ("m",), "ready", EngineLoad(0, 0, 1))]

    async def prefix(self, pool: str, replica: ReplicaId) -> bytes:
        return b""


async def test_a_pool_that_is_lost_after_it_was_found_has_no_replica() -> None:
    pools = Pools()
    directory = Directory(pools, pools.plans)
    pool = await directory.pool_of("m")
    assert directory.candidates(pool, "m", [])
    pools.names = []
    await directory.refresh()
    with pytest.raises(NoReplica):
        directory.estimates(pool)
    with pytest.raises(NoReplica):
        directory.candidates(pool, "m", [])


async def test_a_declared_pool_is_served_while_it_has_no_replica() -> None:
    pools = Pools()
    pools.names = []
    pools.planned = {"p": PoolPlan(0, 0, 0, models=("m", "lora"), cold_start_s=300)}
    directory = Directory(pools, pools.plans)
    assert await directory.pool_of("lora") == "p"
    assert directory.candidates("p", "m", []) == [] and directory.estimates("p").output_tokens == 256
    assert directory.warming("p") == pools.planned["p"]
    assert {model: served.pool for model, served in directory.models().items()} == {"m": "p", "lora": "p"}
    pools.planned = {"p": PoolPlan(1, 0, 1, models=("m",), usual=Usual(8, 1000, 100, 99, 3))}
    pools.names = ["p"]
    await directory.refresh()
    assert directory.warming("p") is None, "one is ready"
    with pytest.raises(ModelNotFound):
        await directory.pool_of("other")
    pools.names = []
    await directory.refresh()
    assert directory.estimates("p") == (3, 99), "as it was when it had one"


async def test_how_long_an_answer_gets_is_told_by_its_route_where_that_is_known() -> None:
    pools = Pools()
    chat, code = (route("m", f"openai.{kind}", "standard") for kind in ("chat", "completions"))
    plan = PoolPlan(1, 0, 1, models=("m",), usual=Usual(8, 1000, 100, 99, 3), outputs={chat: 800.0})
    pools.planned = {"p": plan}
    directory = Directory(pools, pools.plans)
    for names, known in ((["p"], (4, 256)), ([], (3, 99))):
        pools.names = names
        await directory.refresh()
        assert directory.estimates("p", chat) == (known[0], 800)
        assert directory.estimates("p", code) == directory.estimates("p") == known, "as of all the pool's"
