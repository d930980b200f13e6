"""Deadlines count on the fabric's clock, whatever the host's own clock says."""

from __future__ import annotations

import asyncio
import time

import pytest

from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.clock import FabricClock
from stream_fabric.stream.ids import created_ms
from tests.gateway.in_process import SETTINGS, Reading, in_process
from tests.support.waiting import eventually


class SkewedHostClock(HostClock):
    """A host whose wall clock is wrong by ``skew_s``."""

    def __init__(self, skew_s: float) -> None:
        self._skew_us = int(skew_s * 1e6)

    @property
    def offset_us(self) -> int:
        return super().offset_us + self._skew_us

    def now_us(self) -> int:
        return super().now_us() + self._skew_us


@pytest.mark.parametrize("skew_s", [-30.0, 30.0])
async def test_a_skewed_host_neither_shortens_nor_extends_a_deadline(redis_client: RedisClient, skew_s: float) -> None:
    clock = FabricClock(redis_client, SkewedHostClock(skew_s), HostRandom())
    reading = asyncio.create_task(clock.run())
    await eventually(lambda: abs(clock.now_us() / 1e6 - time.time()) < 5, "the fabric's clock")
    async with in_process(redis_client, clock) as world:
        began = time.time()
        opened = await world.gateway.streams.create(world.call(deadline_s=10))
        assert opened is not None
        subscription = opened.subscribe(Reading())
        work = await world.pools.work(world.model, opened.id)
        assert work is not None
        assert abs(work.request.deadline_unix_ms / 1000 - (began + 10)) < 5
        assert abs(created_ms(opened.id) / 1000 - began) < 5
        assert abs(opened.facts.created - began) < 5
        subscription.close()
    reading.cancel()


@pytest.mark.parametrize(("setting_s", "kept_s"), [(5.0, 60.0), (300.0, 300.0), (3600.0, 3000.0)])
async def test_a_stream_that_loses_its_replica_may_wait_as_long_as_a_new_request(
    redis_client: RedisClient, setting_s: float, kept_s: float
) -> None:
    """At least as long as by default: it has begun. At most as long as Redis keeps a stream that waits."""
    async with in_process(redis_client, settings=SETTINGS.model_copy(update={"queue_wait_s": setting_s})) as world:
        opened = await world.gateway.streams.create(world.call())
        assert opened is not None
        subscription = opened.subscribe(Reading())
        work = await world.pools.work(world.model, opened.id)
        assert work is not None and work.wait_s == kept_s
        subscription.close()
