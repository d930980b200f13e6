"""How soon a replica serves that was warm, or slept, with the real vLLM; and the contract of an engine's sleep on it.

On a CPU vLLM refuses ``--enable-sleep-mode``. The addresses of its development mode answer there all the same: they
hold requests back, throw the cache away and read the weights again, and free no memory. So this shows the states and
their times; that memory is freed it shows where there is a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import pytest
import pytest_asyncio

from inference.agent.agent import Agent
from inference.agent.observe.gpus import open_nvml, watched_gpus
from inference.agent.replica import AgentPolicy, LeasePolicy
from inference.engines.vllm import VllmEngine
from stream_fabric.errors import EngineFailed
from stream_fabric.pool.records import Candidate, DesiredState, EngineRequest, ReplicaInfo, Work
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.stream.cursor import BEGINNING, Epoch
from stream_fabric.stream.frames import Delta, End, decode
from stream_fabric.stream.ids import StreamId, TenantId, new_stream_id
from tests.agent.engines import test_sleep as contract
from tests.support.agents import make_agent
from tests.support.waiting import eventually
from tests.vllm.real import FIGURES, MODEL, SMALL, Direct, Home, chat

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

test_it_sleeps_and_wakes = contract.test_it_sleeps_and_wakes_as_it_was
test_asleep_it_begins_nothing = contract.test_asleep_it_begins_nothing
test_what_runs_keeps_it_awake = contract.test_what_runs_keeps_it_awake
test_again_is_the_same = contract.test_again_is_the_same
test_a_held_prompt = contract.test_a_prompt_that_it_held_is_computed_again

ACME = TenantId("acme")
PARTITIONS = Partitions(4)
SMI = shutil.which("nvidia-smi")
FREED = 0.01
"""Smallest share of a GPU's memory that a sleep must release, with a cache of 4 GiB."""
QUESTION = chat(max_tokens=40, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sleeper(home: Home, engine: VllmEngine) -> AsyncIterator[VllmEngine]:
    """On a CPU the suite's, in its development mode; on a GPU one that can sleep, with a cache that can be measured."""
    if SMI is None:
        yield engine
        return
    names = ("--served-model-name", MODEL, "sim-small")
    own = home.engine((*SMALL, *names, "--kv-cache-memory-bytes", str(4 << 30), "--enable-sleep-mode"))
    await own.start()
    yield own
    await own.close()


@pytest.fixture
def setup(sleeper: VllmEngine) -> contract.Setup:
    return contract.Setup(sleeper)


async def memory() -> list[float]:
    """In use of each GPU, as the agent reads it; nothing where there is none."""
    async with watched_gpus() as gpus:
        await eventually(lambda: gpus() or open_nvml() is None)
        return [gpu.memory for gpu in gpus()]


class Lent(VllmEngine):
    """The suite's engine in an agent's hands, which must not close it."""

    def __init__(self, engine: VllmEngine) -> None:
        self.__dict__ = engine.__dict__

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Replica:
    agent: Agent
    pools: RedisPools
    log: RedisStreamLog
    pool: str

    async def is_now(self, state: str, asleep: int = 0) -> ReplicaInfo | None:
        (info,) = await self.pools.replicas(self.pool)
        return info if (info.state, info.load.asleep) == (state, asleep) else None

    async def become(self, wish: DesiredState, state: str, asleep: int = 0) -> float:
        """Until its lease says so, as whoever places requests reads it."""
        began = time.monotonic()
        await self.pools.request_state(self.pool, self.agent.replica, wish, "controller")
        await eventually(lambda: self.is_now(state, asleep), f"a lease that says {state}")
        return time.monotonic() - began

    async def ask(self) -> StreamId:
        """A request that waits in the pool's queue until a replica is ready."""
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        request = EngineRequest(stream, "chat", MODEL, msgspec.Raw(msgspec.json.encode(QUESTION)))
        work = Work(request, str(Epoch(1, "aa")), ACME, b"{}", None)
        await self.log.create(stream, work.parsed_epoch(), ACME, b"{}", None)
        await self.pools.place(self.pool, work, [Candidate(self.agent.replica, 0)], wait_s=60, jitter=0.0)
        return stream

    async def where(self, stream: StreamId) -> str | None:
        return await self.pools.holder(self.pool, stream)

    async def text(self, stream: StreamId) -> str:
        """Once it has ended whole."""

        async def ended() -> bool:
            page = await self.log.watch(stream, ACME, None, BEGINNING)
            return page is not None and page.status == "completed"

        await eventually(ended, "the stream's end")
        page = await self.log.watch(stream, ACME, None, BEGINNING)
        assert page is not None
        frames = [decode(line) for entry in page.entries for line in entry.frames.split(b"\n")]
        (end,) = [frame for frame in frames if isinstance(frame, End)]
        assert end.usage is not None and end.usage.output == 40
        return "".join(frame.text for frame in frames if isinstance(frame, Delta))


@contextlib.asynccontextmanager
async def replica(engine: VllmEngine, redis_url: str) -> AsyncIterator[Replica]:
    client = RedisClient(redis_url)
    await client.start()
    pool = f"pool-{os.urandom(4).hex()}"
    policy = AgentPolicy(LeasePolicy(pool, "vllm", (MODEL,), False, 3.0, 1.25), 1.0, 2.0, standby=True)
    agent = make_agent(policy, Lent(engine), client, PARTITIONS)
    task = asyncio.create_task(agent.run())
    try:
        await asyncio.wait_for(agent.ready.wait(), 10)
        yield Replica(agent, RedisPools(client), RedisStreamLog(client, PARTITIONS), pool)
    finally:
        agent.drain()
        await asyncio.wait([task])
        await client.close()
    await task


async def test_from_warm_and_from_each_level_of_sleep_it_serves_again(sleeper: VllmEngine, redis_url: str) -> None:
    assert sleeper.url is not None and sleeper.pid is not None
    expected = "".join(
        choice["delta"].get("content") or ""
        for chunk in await Direct(sleeper.url).chunks("/v1/chat/completions", QUESTION)
        for choice in chunk["choices"]
    )
    pid = sleeper.pid
    took: dict[str, list[float]] = {"warm": [], "level 1": [], "level 2": []}
    wishes: dict[str, tuple[DesiredState, int]] = {"level 1": ("sleeping:1", 1), "level 2": ("sleeping:2", 2)}
    async with replica(sleeper, redis_url) as one:
        for _ in range(3):
            for begins, times in took.items():
                await one.become("warm", "warm")
                if begins in wishes:
                    wish, level = wishes[begins]
                    before = await memory()
                    await one.become(wish, "sleeping", level)
                    given_back = [was - now for was, now in zip(before, await memory(), strict=True)]
                    if SMI is not None:
                        assert max(given_back) > FREED, given_back
                        FIGURES.append(f"asleep at {begins} it gives back {max(given_back):.1%} of the GPU's memory")
                stream = await one.ask()
                assert await one.where(stream) == "queue", "nobody takes it"
                times.append(await one.become("ready", "ready"))
                assert await one.text(stream) == expected
        assert sleeper.pid == pid, "nobody took it for dead"
    for begins, times in took.items():
        FIGURES.append(f"from {begins} to ready: median {sorted(times)[1]:.3f}, worst {max(times):.3f} s")
    if SMI is None:
        FIGURES.append("that sleep is a CPU's: it frees no memory, and has none to fill again")
    assert max(took["warm"]) < 1


@pytest.mark.skipif(SMI is not None, reason="on a GPU it is not refused")
async def test_a_cpu_s_vllm_refuses_the_flag_in_its_words(home: Home) -> None:
    engine = home.engine((*SMALL, "--enable-sleep-mode"))
    with pytest.raises(EngineFailed, match="Sleep mode is not supported on current platform"):
        await engine.start()
    await engine.close()


async def test_an_agent_ends_beside_its_sleep_and_the_next_one_finds_it(sleeper: VllmEngine, redis_url: str) -> None:
    """Its health is looked at meanwhile, and it is not taken for dead."""
    pid = sleeper.pid
    async with replica(sleeper, redis_url) as one:
        await one.become("sleeping:1", "sleeping", 1)
        await asyncio.sleep(2.5)  # two looks
        assert sleeper.pid == pid and await one.is_now("sleeping", 1)
    assert sleeper.load().asleep == 1
    async with replica(sleeper, redis_url) as another:
        await eventually(lambda: another.is_now("sleeping", 1), "the next agent to find it asleep")
        stream = await another.ask()
        await another.become("ready", "ready")
        await another.text(stream)
