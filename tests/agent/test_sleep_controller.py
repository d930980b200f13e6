"""A replica that sleeps, on a real Redis: who wants it, what it says of itself, and that nothing is begun there."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

import msgspec
import pytest

from inference.agent.observe.metrics import AgentMetrics
from stream_fabric.errors import EngineFailed, EngineLost
from stream_fabric.pool.lease_changes import decode_summary
from stream_fabric.pool.placement import Queued
from stream_fabric.pool.records import Arrival, Candidate, DesiredState, EngineRequest, ReplicaInfo, Work
from stream_fabric.ports import SleepLevel
from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.ids import StreamId, new_stream_id
from tests.agent.test_agent import ACME, Bench, running
from tests.support.waiting import eventually

SIM = "itl_ms=5,ttft_ms=0,sleep_ms=30,wake_ms=30,reload_ms=100"


async def info(bench: Bench) -> ReplicaInfo:
    (found,) = await bench.pools.replicas(bench.pool)
    return found


async def want(bench: Bench, wish: DesiredState) -> None:
    await bench.pools.request_state(bench.pool, bench.agent.replica, wish, "controller")


async def until(bench: Bench, state: str, level: int | None = None) -> ReplicaInfo:
    async def is_so() -> ReplicaInfo | None:
        found = await info(bench)
        return found if found.state == state and level in (None, found.load.asleep) else None

    told: ReplicaInfo = await eventually(is_so, f"the lease to say {state}")
    return told


def states(bench: Bench) -> list[str]:
    return [event.state for event in bench.heard.fleet if event.what == "lease"]


async def queued(bench: Bench) -> StreamId:
    """A request that comes while nobody is ready."""
    stream, work = new_work()
    await bench.log.create(stream, work.parsed_epoch(), ACME, b"{}", None)
    candidates = [Candidate(bench.agent.replica, 0)]
    assert isinstance(await bench.pools.place(bench.pool, work, candidates, wait_s=60, jitter=0.0), Queued)
    return stream


def new_work() -> tuple[StreamId, Work]:
    stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
    body = msgspec.Raw(b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":5}')
    return stream, Work(EngineRequest(stream, "chat", "sim-small", body), str(Epoch(1, "aa")), ACME, b"{}", None)


@pytest.mark.parametrize("wish", ["sleeping:1", "sleeping:2"])
async def test_it_sleeps_when_it_is_wanted_to_and_is_ready_again_at_once(redis_url: str, wish: DesiredState) -> None:
    async with running(redis_url, SIM) as (bench, _):
        prefix = os.urandom(40)
        await bench.end(await bench.ask(max_tokens=3, prefix=prefix))
        await eventually(lambda: bench.agent.lease.info().prefix_blocks == 10)
        await want(bench, "warm")
        assert (await until(bench, "warm")).prefix_blocks
        await want(bench, wish)
        asleep = await until(bench, "sleeping", int(wish[-1]))
        await eventually(lambda: bench.agent.lease.info().prefix_blocks == 0, "what it held of prompts to be gone")
        assert not asleep.load.ready

        async def forgotten() -> bool:
            return (
                decode_summary(await bench.pools.prefix(bench.pool, bench.agent.replica))[1] == b""
                and not (await info(bench)).prefix_blocks
            )

        await eventually(forgotten, "the pool to know it")
        waiting = await queued(bench)
        began = time.monotonic()
        await want(bench, "ready")
        ready = await until(bench, "ready")
        assert time.monotonic() - began < 5
        assert ready.wake_s >= (0.13 if wish == "sleeping:2" else 0.03)
        assert (await bench.end(waiting)).status == "completed"
        shown = [state for state in states(bench) if state != "warming"]  # for as long as it takes
        assert shown == ["ready", "warm", "sleeping", "ready"]
        woken = [event for event in bench.heard.fleet if "wake_s" in event.figures]
        assert len(woken) == 1 and woken[0].figures["wake_s"] == round(ready.wake_s, 3)


async def test_a_stream_that_runs_keeps_it_awake_until_its_end(redis_url: str) -> None:
    async with running(redis_url, SIM) as (bench, _):
        stream = await bench.ask(max_tokens=300)
        await eventually(lambda: bench.agent.running)
        await want(bench, "sleeping:1")
        await until(bench, "warm")
        bench.agent.status.sleep_check.set()
        end = await bench.end(stream)
        assert (end.status, end.usage and end.usage.output) == ("completed", 300)
        await until(bench, "sleeping", 1)


async def test_what_is_on_its_way_keeps_it_awake(redis_url: str) -> None:
    """A request that was placed before the pool heard, and that the agent has not read."""
    async with running(redis_url, SIM) as (bench, _):
        read, gate = bench.agent._inbox.read, asyncio.Event()

        async def late(block_s: float, done: Sequence[tuple[str, StreamId]]) -> list[Arrival]:
            await gate.wait()
            return await read(block_s, done)

        bench.agent._inbox.read = late  # type: ignore[method-assign]
        # The read that is under way takes one: the next one lies there
        first, second = await bench.ask(max_tokens=3), await bench.ask(max_tokens=3)
        await bench.end(first)
        await want(bench, "sleeping:1")
        await until(bench, "warm")
        for _ in range(3):
            assert not await bench.agent.lease.has_no_requests()
        assert (await info(bench)).load.asleep == 0
        gate.set()
        assert (await bench.end(second)).status == "completed"
        await until(bench, "sleeping", 1)


async def test_what_comes_all_the_same_goes_elsewhere(redis_url: str) -> None:
    """A failover of Redis can turn its knowledge back, and a request is placed at a replica that sleeps."""
    async with running(redis_url, SIM) as (bench, _):
        stream, work = new_work()
        await bench.log.create(stream, work.parsed_epoch(), ACME, b"{}", None)
        await bench.place(work)
        await bench.end(stream)
        await want(bench, "sleeping:1")
        await until(bench, "sleeping", 1)
        other, other_work = new_work()
        await bench.log.create(other, other_work.parsed_epoch(), ACME, b"{}", None)
        bench.agent._requests._start(Arrival("0-1", other, other_work, 0, 0))
        await eventually(lambda: not bench.agent.running)
        assert ("submit", other) not in bench.engine.told
        assert (await info(bench)).state == "sleeping"


@pytest.mark.parametrize("changes", [(None,), (None, 1)], ids=["ready", "ready, and asleep again"])
async def test_a_request_for_a_state_during_the_check_for_streams_counts(
    redis_url: str, changes: tuple[SleepLevel | None]
) -> None:
    """The replica was ready for a moment: something may be on its way again."""
    async with running(redis_url, "sleep_ms=0") as (bench, _):
        agent, engine = bench.agent, bench.engine
        looked: list[bool] = []

        async def has_no_requests() -> bool:
            looked.append(engine.load().ready)
            if len(looked) == 1:
                for level in changes:
                    agent.status.request_sleep(level)
            return True

        agent.lease.has_no_requests = has_no_requests  # type: ignore[method-assign]
        agent.status.request_sleep(1)
        await eventually(lambda: looked)
        await eventually(
            lambda: len(looked) == 2 and engine.load().asleep if changes[-1] else agent.status.asleep is None
        )
        assert looked == [True] * len(changes)


async def test_a_promotion_while_it_falls_asleep_wakes_it_once_it_sleeps(redis_url: str) -> None:
    async with running(redis_url, "itl_ms=5,ttft_ms=0,sleep_ms=400,wake_ms=30") as (bench, _):
        await want(bench, "sleeping:1")
        await eventually(lambda: bench.agent.state == "sleeping")
        await want(bench, "ready")
        waiting = await queued(bench)
        assert bench.agent.state != "ready"
        await until(bench, "ready")
        assert (await bench.end(waiting)).status == "completed"
        assert "ready" not in states(bench)[1:-1]


async def test_a_wish_that_changes_while_it_wakes_is_followed(redis_url: str) -> None:
    async with running(redis_url, "itl_ms=5,ttft_ms=0,sleep_ms=20,wake_ms=300") as (bench, _):
        await want(bench, "sleeping:1")
        await until(bench, "sleeping", 1)
        await want(bench, "ready")
        await eventually(lambda: bench.agent.state == "warming")
        await want(bench, "sleeping:1")
        await until(bench, "sleeping", 1)
        await eventually(lambda: bench.agent.status.wake_s, "the wake that was under way")
        await until(bench, "sleeping", 1)
        await want(bench, "warm")
        assert (await until(bench, "warm")).load.asleep == 0


async def test_an_engine_that_cannot_stays_warm_and_it_is_told_once(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(redis_url, SIM + ",sleep_levels=0", lease_renew_s=0.05) as (bench, _):
        await want(bench, "sleeping:1")
        await eventually(lambda: bench.agent.status.sleep_refused)
        told = await until(bench, "warm")
        await eventually(lambda: bench.agent.lease.info().sleepless)

        async def shown() -> str:
            return (await info(bench)).sleepless

        assert "sleep_levels" in await eventually(shown)
        assert told.load.asleep == 0
        asked = bench.engine.slept
        for _ in range(5):
            bench.agent.status.sleep_check.set()
            await bench.agent.lease.renew()
        assert bench.engine.slept == asked == 1
        assert caplog.text.count("the replica stays warm") == 1
        await want(bench, "ready")
        await until(bench, "ready")


async def test_an_engine_that_fails_to_fall_asleep_is_warm_again(redis_url: str) -> None:
    async with running(redis_url, SIM) as (bench, task):
        bench.engine.sleep_error = EngineFailed("no memory on the host")
        await want(bench, "sleeping:2")
        await eventually(lambda: bench.agent.status.sleep_refused == "no memory on the host")
        await want(bench, "ready")
        await until(bench, "ready")
        assert (await bench.end(await bench.ask(max_tokens=3))).status == "completed"
        assert not task.done()


async def test_a_replica_whose_engine_does_not_wake_ends_and_says_why(redis_url: str) -> None:
    async with running(redis_url, SIM) as (bench, task):
        await want(bench, "sleeping:1")
        await until(bench, "sleeping", 1)
        bench.engine.wake_error = EngineFailed("the model server did not wake within 300 s")
        waiting = await queued(bench)
        await want(bench, "ready")
        with pytest.raises(EngineLost, match="did not wake within 300 s"):
            await asyncio.wait_for(asyncio.shield(task), 5)
        assert await bench.pools.replicas(bench.pool) == []
        assert ("submit", waiting) not in bench.engine.told
        assert states(bench)[-1] == "gone" and states(bench).count("ready") == 1


async def test_a_replica_whose_engine_is_started_again_is_not_ready_before_it_serves(redis_url: str) -> None:
    async with running(redis_url, SIM) as (bench, task):
        await want(bench, "sleeping:1")
        await until(bench, "sleeping", 1)
        bench.engine.wake_error = EngineLost("it did not wake; it is started again")
        await want(bench, "ready")
        await until(bench, "warming", 0)
        waiting = await queued(bench)
        assert not task.done()
        bench.engine.start_again()
        await until(bench, "ready")
        assert (await bench.end(waiting)).status == "completed"


async def test_an_engine_that_was_started_again_in_its_sleep_sleeps_again(redis_url: str) -> None:
    async with running(redis_url, SIM, lease_renew_s=0.05) as (bench, _):
        await want(bench, "sleeping:1")
        await until(bench, "sleeping", 1)
        bench.engine.start_again()
        await eventually(lambda: bench.engine.slept == 2)
        await until(bench, "sleeping", 1)
        assert "ready" not in states(bench)[1:]


@pytest.mark.parametrize("wish", ["sleeping:1", "ready"])
async def test_sigterm_ends_it_asleep_and_in_the_middle_of_a_step(redis_url: str, wish: DesiredState) -> None:
    async with running(redis_url, "sleep_ms=20,wake_ms=60000") as (bench, task):
        await want(bench, "sleeping:1")
        await until(bench, "sleeping", 1)
        if wish == "ready":
            await want(bench, "ready")
            await eventually(lambda: bench.agent.state == "warming")
        bench.agent.drain()
        await asyncio.wait_for(asyncio.shield(task), 15)
        assert await bench.pools.replicas(bench.pool) == []
        assert states(bench)[-2:] == ["draining", "gone"]


@pytest.mark.parametrize("level", [1, 2])
async def test_an_agent_that_finds_its_engine_asleep_wakes_it(redis_url: str, level: SleepLevel) -> None:
    async with running(redis_url, SIM, asleep=level) as (bench, _):
        await until(bench, "ready")
        assert (await bench.end(await bench.ask(max_tokens=3))).status == "completed"
        assert states(bench)[0] == "sleeping"


@pytest.mark.parametrize("level", [1, 2])
async def test_one_on_standby_lets_it_sleep(redis_url: str, level: SleepLevel) -> None:
    async with running(redis_url, SIM, asleep=level, standby=True) as (bench, _):
        await until(bench, "sleeping", level)
        bench.agent.status.sleep_check.set()
        await bench.agent.lease.renew()
        assert bench.agent.state == "sleeping"
        await want(bench, "ready")
        await until(bench, "ready")


async def test_how_long_it_took_to_wake_is_a_metric(redis_url: str) -> None:
    async with running(redis_url, SIM) as (bench, _):
        metrics = AgentMetrics(bench.pool)
        await want(bench, "sleeping:1")
        await until(bench, "sleeping", 1)
        await want(bench, "ready")
        await until(bench, "ready")
        await eventually(lambda: states(bench)[-1] == "ready")
        for event in bench.heard.events:
            metrics.receive(event)
        page = (await metrics.scraped(bench.agent, ())).body.decode()
        assert f'replica_wake_seconds_count{{pool="{bench.pool}"}} 1.0' in page
