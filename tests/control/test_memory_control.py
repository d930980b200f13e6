"""The controllers' ports in memory and in Redis: the same cases on both."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import pytest

from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import COMMAND_TIMEOUT_S
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import EngineLoad, EngineRequest, ReplicaInfo, Work
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.pools import RedisPools
from stream_fabric.stream.ids import ReplicaId, TenantId, new_stream_id
from tests.support.memory_control import MemoryControl, MemoryPools, MemoryRedis
from tests.support.virtual import on_virtual_time
from tests.support.waiting import eventually

TTL_S = 0.2
ONE = ReplicaId("one")


class Ports(NamedTuple):
    control: Any
    pools: Any


@pytest.fixture(params=["memory", "redis"])
async def ports(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Ports]:
    if request.param == "memory":
        redis = MemoryRedis()
        yield Ports(MemoryControl(redis), MemoryPools(redis))
        return
    client = RedisClient(redis_url)
    await client.start()
    await client.execute(0, "DEL", "sg:{control}:leader", "sg:{control}:plans", "sg:{control}:profiles")
    yield Ports(RedisControl(client), RedisPools(client))
    await client.close()


@pytest.fixture
def pool() -> str:
    return f"pool-{os.urandom(4).hex()}"


def info(pool: str, **changes: Any) -> ReplicaInfo:
    return msgspec.structs.replace(ReplicaInfo(ONE, pool, "sim", ("m",), "ready", EngineLoad(0, 0, 1)), **changes)


async def test_one_controller_leads_until_it_leaves_or_its_lease_ends(ports: Ports) -> None:
    control = ports.control
    term = await control.lead("a", 60)
    assert term > 0 and await control.leader() == "a"
    assert await control.lead("b", 60) == 0, "another leads"
    assert await control.lead("a", TTL_S) == term, "a renewal is the same term"

    async def taken() -> int:
        return int(await control.lead("b", 60))

    assert await eventually(taken, "the lease to end") == term + 1
    await control.leave("a")
    assert await control.leader() == "b", "only the leader can leave"
    await control.leave("b")
    assert await control.leader() == "" and await control.lead("a", 60) == term + 2
    await control.leave("a")


async def test_a_plan_is_written_only_in_the_leaders_term(ports: Ports, pool: str) -> None:
    control, plan = ports.control, PoolPlan(1, 0, 1, reason="why")
    term = await control.lead("a", 60)
    assert not await control.write_plan("a", term + 1, pool, plan)
    assert not await control.write_plan("b", term, pool, plan)
    assert (await control.plans()).get(pool) is None
    assert await control.write_plan("a", term, pool, plan)
    assert (await control.plans())[pool] == plan
    assert await control.write_plan("a", term, pool, None)
    assert pool not in await control.plans()
    await control.leave("a")
    assert not await control.write_plan("a", term, pool, plan)


async def test_traffic_models_are_kept_and_holds_end_by_themselves(ports: Ports, pool: str) -> None:
    control = ports.control
    assert await control.learned(pool) is None
    await control.put_learned(pool, b"record")
    assert await control.learned(pool) == b"record"
    assert await control.held_s(pool) == 0
    await control.hold(pool, 60)
    assert 59 < await control.held_s(pool) <= 60
    await control.hold(pool, 0)
    assert await control.held_s(pool) == 0
    await control.hold(pool, TTL_S)

    async def over() -> bool:
        return bool(await control.held_s(pool) == 0)

    await eventually(over, "the hold to end")


async def test_replicas_are_listed_while_their_lease_lives_and_hear_the_requested_state(
    ports: Ports, pool: str
) -> None:
    pools = ports.pools
    report = await pools.report(info(pool), ttl_s=60, running={})
    assert report.desired == "" and await pools.replicas(pool) == [info(pool)]
    assert pool in await pools.pools()
    assert await pools.request_state(pool, ONE, "warm", "controller")
    assert not await pools.request_state(pool, ONE, "warm", "controller"), "requested already"
    report = await pools.report(info(pool, state="warm"), ttl_s=60, running={})
    assert report.desired == "warm" and (await pools.replicas(pool))[0].state == "warm"
    assert await pools.request_state(pool, ONE, "draining")
    assert not await pools.request_state(pool, ONE, "ready"), "draining is final"
    assert (await pools.report(info(pool), ttl_s=TTL_S, running={})).desired == "draining"

    async def gone() -> bool:
        return not await pools.replicas(pool)

    await eventually(gone, "the lease to end")


async def test_queues_and_demand_are_counted(ports: Ports, pool: str) -> None:
    pools = ports.pools
    assert await pools.demand_totals(pool) == (0, 0, 0)
    assert [queue.depth for queue in await pools.tier_queues(pool)] == [0, 0, 0, 0]
    assert await pools.overload_totals(pool) == ((0, 0, 0, 0), 0, (0, 0, 0, 0), 0)
    for tier, tokens in ((1, 30), (2, 50)):
        stream = new_stream_id(0, os.urandom(10))
        request = EngineRequest(stream, "chat", "m", msgspec.Raw(b"{}"))
        work = Work(request, "1.aa", TenantId("t"), b"", None, tier, prompt_tokens=tokens, output_tokens=2 * tokens)
        await pools.place(pool, work, [], wait_s=60, jitter=0.5)
    assert await pools.demand_totals(pool) == (2, 80, 160)
    queues = await pools.tier_queues(pool)
    assert [(one.depth, one.prompt_tokens, one.output_tokens) for one in queues] == [
        (0, 0, 0),
        (1, 30, 60),
        (1, 50, 100),
        (0, 0, 0),
    ]
    assert pool in await pools.pools(), "a pool whose requests wait is listed without a replica"


@on_virtual_time
async def test_an_unreachable_redis_is_an_error_after_the_commands_time() -> None:
    redis, loop = MemoryRedis(), asyncio.get_running_loop()
    redis.reachable.clear()
    began = loop.time()
    with pytest.raises(FabricUnavailable):
        await MemoryControl(redis).plans()
    assert loop.time() - began == pytest.approx(COMMAND_TIMEOUT_S)
