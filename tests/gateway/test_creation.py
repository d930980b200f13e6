"""Creation of a stream when one of its calls fails, or when its caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from stream_fabric.errors import FabricError
from stream_fabric.pool.home import home_partition
from stream_fabric.process.host import HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.stream.ids import StreamId, new_stream_id
from stream_gw.streams.create import CreateCall
from tests.gateway.in_process import TENANT, InProcess, Reading, in_process
from tests.support.waiting import eventually

SLOW_S = 0.6


@pytest.fixture
async def world(redis_client: RedisClient) -> AsyncIterator[InProcess]:
    async with in_process(redis_client) as made:
        yield made


async def is_free(world: InProcess, key: str) -> bool:
    other = new_stream_id(1, HostRandom().token_bytes(10))
    bound, _ = await world.index.claim(TENANT, key, other, "another body")
    if bound == other:
        await world.index.release(TENANT, key, other)
    return bound == other


async def assert_withdrawn_before_its_key_is_free(world: InProcess, call: CreateCall) -> None:
    assert call.trace.facts is not None and call.key is not None
    stream: StreamId = call.trace.facts.stream
    key = call.key

    async def free() -> bool:
        return await is_free(world, key)

    await eventually(free, "the key to be free")
    settled = await world.log.settled(stream)
    assert settled is not None, "the create landed"
    assert settled[0] == "failed", "and was withdrawn after it had"
    assert not world.gateway.parts.hub.local


async def test_a_create_that_lands_late_is_withdrawn_before_its_key_is_free(world: InProcess) -> None:
    world.log_link.delay_s = SLOW_S
    world.pools_link.refuse = True
    world.pools_link.cut_all()
    call = world.call(key=HostRandom().token_hex(8))
    with pytest.raises(FabricError):
        await world.gateway.streams.create(call)
    await assert_withdrawn_before_its_key_is_free(world, call)


async def test_a_creation_that_is_cancelled_is_withdrawn_before_its_key_is_free(world: InProcess) -> None:
    world.log_link.delay_s = SLOW_S
    call = world.call(key=HostRandom().token_hex(8))
    creation = asyncio.create_task(world.gateway.streams.create(call))
    await eventually(lambda: call.trace.placing, "its calls to be sent")
    await asyncio.sleep(0)
    creation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creation
    await assert_withdrawn_before_its_key_is_free(world, call)


async def test_the_streams_of_a_pool_share_its_home_partitions(world: InProcess) -> None:
    """Two of the four, however many streams: a replica's batches stay large."""
    made = set()
    for number in range(24):
        opened = await world.gateway.streams.create(world.call(seed=number))
        assert opened is not None
        made.add(world.log.partition(opened.id))
    assert made == {home_partition(world.model, 1, 4, draw) for draw in range(2)}


async def test_a_stream_that_was_created_is_delivered_to_the_outlet_that_subscribes(world: InProcess) -> None:
    """The frames that come between creation and subscription are not lost."""
    opened = await world.gateway.streams.create(world.call())
    assert opened is not None and not opened.attached
    local = world.gateway.parts.hub.local[opened.id.encode()]
    local.receive(opened.epoch.encode(), 1, 1, b'{"k":"open","block":0,"kind":"text"}')
    local.receive(opened.epoch.encode(), 2, 3, b'0" a"\n0" b"')
    outlet = Reading()
    subscription = opened.subscribe(outlet)
    assert outlet.lines == [b'{"k":"open","block":0,"kind":"text"}', b'0" a"', b'0" b"']
    local.receive(opened.epoch.encode(), 4, 4, b'0" c"')
    assert outlet.lines[-1] == b'0" c"'
    subscription.close()
