"""An agent between a real Redis and an engine that fails: nobody is left without a terminal."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from inference.agent.agent import Agent, AgentPolicy, new_replica_id
from inference.agent.engines.sim.engine import SimEngine
from inference.agent.engines.sim.settings import SimSettings
from inference.agent.lease import LeasePolicy
from stream_fabric.cursor import BEGINNING, Cursor, Epoch
from stream_fabric.errors import EngineFailed, EngineLost
from stream_fabric.frames import End, decode
from stream_fabric.ids import StreamId, TenantId, new_stream_id
from stream_fabric.ports import EngineRequest, FrameSink
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.pool import Candidate, Placed, RedisPools, Work
from stream_fabric.redis.streams import RedisStreamLog
from tests.support.waiting import eventually

ACME = TenantId("acme")
PARTITIONS = Partitions(4)


class Fragile(SimEngine):
    """A simulator that can be broken as a whole, fails at requests of model ``poison`` and never answers ``mute``."""

    def break_down(self) -> None:
        self.replica.step = None  # type: ignore[assignment,method-assign]
        self._work.set()

    def submit(self, request: EngineRequest, sink: FrameSink) -> None:
        if request.model == "poison":
            raise RuntimeError("never seen such a request")
        if request.model == "mute":
            return
        super().submit(request, sink)


class Bench:
    def __init__(self, client: RedisClient, pool: str, agent: Agent, engine: Fragile) -> None:
        self.log = RedisStreamLog(client, PARTITIONS)
        self.pools = RedisPools(client)
        self.pool = pool
        self.agent = agent
        self.engine = engine

    async def ask(self, *, model: str = "sim-small", max_tokens: int = 100_000) -> StreamId:
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        body = msgspec.json.encode({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": max_tokens})
        request = EngineRequest(stream, "chat", model, msgspec.Raw(body))
        work = Work(request, str(Epoch(1, "aa")), ACME, b"{}", None)
        await self.log.create(stream, work.parsed_epoch(), ACME, b"{}", None)
        assert isinstance(
            await self.pools.place(self.pool, work, [Candidate(self.agent.replica, 0)], wait_s=60, jitter=0.0), Placed
        )
        return stream

    async def head(self, stream: StreamId) -> int:
        page = await self.log.watch(stream, ACME, None, BEGINNING)
        assert page is not None
        return page.head

    async def end(self, stream: StreamId) -> End:
        async def ended() -> End | None:
            page = await self.log.watch(stream, ACME, None, BEGINNING)
            assert page is not None
            if page.status == "live":
                return None
            last = await self.log.watch(stream, ACME, None, Cursor(1, page.head - 1))
            assert last is not None
            frame = decode(last.entries[-1].frames.split(b"\n")[-1])
            assert isinstance(frame, End)
            return frame

        found: End = await eventually(ended, "the stream's terminal", 5)
        return found


@asynccontextmanager
async def running(redis_url: str, sim: str = "itl_ms=5,ttft_ms=0") -> AsyncIterator[tuple[Bench, asyncio.Task[None]]]:
    engine = Fragile(SimSettings.parse(sim))
    models = tuple(await engine.start())
    client = RedisClient(redis_url)
    await client.start()
    pool = f"pool-{os.urandom(4).hex()}"
    agent = Agent(
        AgentPolicy(LeasePolicy(pool, "sim", models, True, 3.0, 4.0), 1.0, 2.0),
        new_replica_id("r"),
        engine,
        client,
        PARTITIONS,
    )
    task = asyncio.create_task(agent.run())
    try:
        await asyncio.wait_for(agent.ready.wait(), 10)
        yield Bench(client, pool, agent, engine), task
    finally:
        agent.drain()
        await asyncio.wait([task])
        await client.close()


async def test_invariant_6_an_engine_that_fails_as_a_whole_leaves_no_stream_without_a_terminal(redis_url: str) -> None:
    async with running(redis_url) as (bench, task):
        streams = [await bench.ask() for _ in range(5)]
        for stream in streams:
            await eventually(lambda stream=stream: _above(bench, stream, 3), "tokens")
        bench.engine.break_down()
        for stream in streams:
            end = await bench.end(stream)
            assert end.status == "failed"
            assert end.error is not None
            assert (end.error.code, end.error.retriable) == (EngineLost.code, True)
            assert end.usage is not None
            assert end.usage.output > 0
        # The replica leaves its pool, and the process says why
        with pytest.raises(EngineLost, match="the engine failed"):
            await asyncio.wait_for(asyncio.shield(task), 5)
        assert await bench.pools.replicas(bench.pool) == []


async def test_a_request_that_the_engine_chokes_on_ends_alone(redis_url: str) -> None:
    async with running(redis_url) as (bench, task):
        other = await bench.ask(max_tokens=100)
        end = await bench.end(await bench.ask(model="poison"))
        assert end.error is not None
        assert (end.status, end.error.code, end.error.retriable) == ("failed", EngineFailed.code, False)
        assert (await bench.end(other)).status == "completed"
        assert (await bench.end(await bench.ask(max_tokens=3))).status == "completed"
        assert not task.done()


async def test_a_replica_of_which_no_first_token_comes_tells_how_long_it_stands_still(redis_url: str) -> None:
    async with running(redis_url) as (bench, _):
        await bench.end(await bench.ask(max_tokens=3))
        (info,) = await bench.pools.replicas(bench.pool)
        assert info.queue_p99_ms < 500
        began = time.monotonic()
        stream = await bench.ask(model="mute")

        async def told() -> bool:
            (info,) = await bench.pools.replicas(bench.pool)
            return 1000 < info.queue_p99_ms <= (time.monotonic() - began) * 1000

        await eventually(told, "how long it stands still")
        await bench.log.cancel(stream, ACME)

        async def told_no_more() -> bool:
            (info,) = await bench.pools.replicas(bench.pool)
            return info.queue_p99_ms < 500

        await eventually(told_no_more, "that nobody waits")


async def _above(bench: Bench, stream: StreamId, seq: int) -> bool:
    return await bench.head(stream) > seq
