"""A gateway that reads only changes knows what the pool says: on real Redis and on the pool in memory."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest

from inference.agent.lease import Lease
from inference.agent.observe.load_tracker import LoadTracker
from inference.agent.observe.replica_events import ReplicaEvents
from inference.agent.replica import LeasePolicy, ReplicaStatus
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from stream_fabric.errors import FabricFull
from stream_fabric.events import NoEvents
from stream_fabric.limits import CANDIDATES_MAX, PREFIX_BLOCK_BYTES
from stream_fabric.pool.lease_changes import BlockChange, LeaseChanges, RoutingGeneration
from stream_fabric.pool.placement import ReplicaState
from stream_fabric.pool.records import EngineLoad, ReplicaInfo
from stream_fabric.ports import Pools
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.pools import RedisPools, pool_prefix, pool_slot
from stream_fabric.stream.ids import ReplicaId
from stream_gw.routing.pool_reader import PoolReader
from stream_gw.routing.pool_view import PoolView
from tests.sim.memory_pools import MemoryPool
from tests.support.events import SetClock


class CountingPools(RedisPools):
    """Counts what is read, and can be out of memory for block changes."""

    full = False
    reads_of_all = 0
    changed = 0
    summaries = 0

    async def changes(self, pool: str, since: int, blocks_after: str) -> LeaseChanges:
        found = await super().changes(pool, since, blocks_after)
        self.reads_of_all += found.whole
        self.changed += len(found.changed)
        return found

    async def prefix(self, pool: str, replica: ReplicaId) -> bytes:
        self.summaries += 1
        return await super().prefix(pool, replica)

    async def put_block_change(self, pool: str, replica: ReplicaId, change: BlockChange) -> None:
        if self.full:
            raise FabricFull("no memory")
        await super().put_block_change(pool, replica, change)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[RedisClient]:
    made = RedisClient(redis_url)
    await made.start()
    yield made
    await made.close()


def info_of(pool: str, name: str, state: ReplicaState = "ready", running: int = 0, **more: object) -> ReplicaInfo:
    info = ReplicaInfo(ReplicaId(name), pool, "sim", ("m",), state, EngineLoad(running, 0, 8))
    return msgspec.structs.replace(info, **more)


def known(view: PoolView) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(info.replica, info.state, info.models) for info in view.replicas]


async def read(view: PoolView, pools: Pools, pool: str) -> None:
    if not view.apply(await pools.changes(pool, view.at, "")):
        assert view.apply(await pools.changes(pool, 0, ""))


@pytest.mark.parametrize("seed", range(6))
async def test_changes_add_up_to_the_pool(seed: int, client: RedisClient) -> None:
    """Random lives: replicas that join, change, die, leave, come back; a lost pool; a lost tail of a failover; agents
    of an older version beside others; readers that read often and seldom."""
    rng = random.Random(seed)
    pools, name = CountingPools(client), f"pool-{os.urandom(4).hex()}"
    slot, prefix = pool_slot(name), pool_prefix(name)
    memory, memory_view, often, seldom = MemoryPool(6), PoolView(), PoolView(), PoolView()
    generations: dict[str, RoutingGeneration] = {}
    infos: dict[str, ReplicaInfo] = {}
    saved: list[tuple[str, bytes, bytes | None]] = []
    for step in range(150):
        replica = f"r{rng.randrange(5)}"
        match rng.choice(["renew"] * 6 + ["die", "leave", "lost", "save", "failover"]):
            case "renew":
                old = infos.get(replica) or info_of(name, replica)
                if rng.random() < 0.4:
                    old = info_of(name, replica, rng.choice(["ready", "warm", "draining"]), rng.randrange(8))
                infos[replica] = generations.setdefault(replica, RoutingGeneration()).stamp(old)
                await pools.report(infos[replica], ttl_s=60, running={})
                memory.report(infos[replica], time.time() * 1000, 60)
            case "die" if replica in infos:
                await pools.report(infos[replica], ttl_s=0.001, running={})
                memory.report(infos[replica], time.time() * 1000, 0.001)
                await asyncio.sleep(0.003)
            case "leave":
                await pools.retire(name, ReplicaId(replica), leaving=True)
                memory.retire(ReplicaId(replica), 0.0, leaving=True)
            case "lost" if rng.random() < 0.3:
                async for key in _keys(client, slot, prefix):
                    await client.execute(slot, "DEL", key)
                memory = MemoryPool(6)
            case "save":
                saved = [
                    (key, await client.execute(slot, "DUMP", key), None) async for key in _keys(client, slot, prefix)
                ]
            case "failover" if saved:  # Redis as it was, and agents that report on
                async for key in _keys(client, slot, prefix):
                    await client.execute(slot, "DEL", key)
                for key, dump, _ in saved:
                    await client.execute(slot, "RESTORE", key, 0, dump)
                memory = MemoryPool(6)
                for one, info in infos.items():
                    await pools.report(info, ttl_s=60, running={})
                    memory.report(info, time.time() * 1000, 60)
                    assert one == info.replica
        expected = sorted((info.replica, info.state, info.models) for info in await pools.replicas(name))
        await read(often, pools, name)
        assert known(often) == expected, f"step {step}"
        if rng.random() < 0.1:
            await read(seldom, pools, name)
            assert known(seldom) == expected, f"step {step}"
        if not memory_view.apply(memory.changes(memory_view.at, "", time.time() * 1000)):
            assert memory_view.apply(memory.changes(0, "", time.time() * 1000))
        assert known(memory_view) == expected, f"step {step}"
    assert pools.reads_of_all < 100, "most reads are of changes"


async def _keys(client: RedisClient, slot: int, prefix: str) -> AsyncIterator[str]:
    cursor = "0"
    while True:
        cursor, keys = await client.execute(slot, "SCAN", cursor, "MATCH", prefix + "*", "COUNT", 1000)
        for key in keys:
            yield key.decode()
        if cursor in ("0", b"0"):
            return


async def test_reports_that_change_nothing_for_routing_are_not_read(client: RedisClient) -> None:
    pools, name = CountingPools(client), f"pool-{os.urandom(4).hex()}"
    reader, generation = PoolReader(name, pools), RoutingGeneration()
    for _ in range(20):
        jitter = {"tokens_per_s": random.random(), "prefill_ms": random.uniform(0, 400), "queue_p99_ms": 3.0}
        await pools.report(generation.stamp(info_of(name, "r", **jitter)), ttl_s=60, running={})
        await reader.read()
    assert (pools.reads_of_all, pools.changed) == (1, 1)
    await pools.report(generation.stamp(info_of(name, "r", prefill_ms=2000)), ttl_s=60, running={})
    assert [info.prefill_ms for info in await reader.read()] == [2000]


async def test_a_replica_whose_lease_ends_is_not_live_and_comes_back(client: RedisClient) -> None:
    pools, name = CountingPools(client), f"pool-{os.urandom(4).hex()}"
    reader, generation = PoolReader(name, pools), RoutingGeneration()
    info = generation.stamp(info_of(name, "r"))
    await pools.report(info, ttl_s=60, running={})
    await reader.read()
    await pools.report(info, ttl_s=0.001, running={})
    await asyncio.sleep(0.01)
    await reader.read()
    assert known(reader.view) == [] and reader.view.slots == 0
    await pools.report(info, ttl_s=60, running={})
    await reader.read()
    assert len(reader.view.replicas) == 1 and pools.reads_of_all == 1


async def test_agents_of_an_older_version_are_read_each_time(client: RedisClient) -> None:
    pools, name = CountingPools(client), f"pool-{os.urandom(4).hex()}"
    reader = PoolReader(name, pools)
    states: tuple[ReplicaState, ...] = ("ready", "draining", "warm")
    for state in states:
        await pools.report(info_of(name, "old", state), ttl_s=60, running={})
        await pools.report(RoutingGeneration().stamp(info_of(name, "new")), ttl_s=60, running={})
        await reader.read()
        assert [one[:2] for one in known(reader.view)] == [("new", "ready"), ("old", state)]


class Cache:
    """An agent's lease with a prefix cache, and what one gateway knows of it."""

    def __init__(self, pools: CountingPools, name: str) -> None:
        engine = SimEngine(SimSettings())
        events = ReplicaEvents(FleetEventReporter(NoEvents(), SetClock(), "agent"), name, ReplicaId("r"), 30.0)
        self.load = LoadTracker(engine, {}, events)
        policy = LeasePolicy(name, "sim", ("m",), True, 30.0, 1.0)
        status = ReplicaStatus(engine, events, standby=False)
        self.lease = Lease(policy, ReplicaId("r"), pools, {}, status, self.load, events, asyncio.TaskGroup())
        self.load.prefixes.set_capacity(300)
        self.reader = PoolReader(name, pools)
        self.reader.used_at = asyncio.get_running_loop().time()
        self.prompts: list[Sequence[int]] = []

    def use(self, rng: random.Random) -> None:
        """A prompt that begins as an earlier one does, or a new one."""
        start = rng.choice(self.prompts)[: rng.randrange(1, 20)] if self.prompts and rng.random() < 0.7 else []
        self.prompts.append([*start, *(rng.getrandbits(32) for _ in range(rng.randrange(1, 12)))])
        self.load.prefixes.touch(self.prompts[-1])

    async def compare(self) -> int:
        """Renew and read. Returns how many of the prompts are known as the agent knows them."""
        await self.lease.renew()
        await self.reader.read()
        view, ledger = self.reader.view, self.load.prefixes
        bytes_per_token = view.replicas[0].bytes_per_token
        told = [view.candidates("m", prompt, 0)[0].matched_tokens for prompt in self.prompts]
        held = [int(ledger.match(prompt) * PREFIX_BLOCK_BYTES / bytes_per_token) for prompt in self.prompts]
        return sum(map(int.__eq__, told, held))


async def test_cached_prefixes_are_known_from_changes(client: RedisClient) -> None:
    rng, pools, name = random.Random(1), CountingPools(client), f"pool-{os.urandom(4).hex()}"
    cache = Cache(pools, name)
    for turn in range(60):
        for _ in range(rng.randrange(4)):
            cache.use(rng)
        assert await cache.compare() == len(cache.prompts), f"turn {turn}"
    assert pools.summaries == 1, "the rest came as changes"
    cache.load.prefixes.clear()
    assert await cache.compare() == len(cache.prompts) and pools.summaries == 2


async def test_a_lost_change_of_prefixes_is_mended_by_the_next_summary(
    client: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, pools, name = random.Random(2), CountingPools(client), f"pool-{os.urandom(4).hex()}"
    cache = Cache(pools, name)
    cache.use(rng)
    assert await cache.compare() == 1
    cache.use(rng)
    await cache.lease.renew()
    await client.execute(pool_slot(name), "DEL", pool_prefix(name) + "blocks")
    cache.use(rng)
    assert await cache.compare() == 2, "the lost one's is missing"
    monkeypatch.setattr("inference.agent.lease._PUBLISH_AGAIN_S", -1.0)
    assert await cache.compare() == 3
    monkeypatch.undo()
    for _ in range(3):
        cache.use(rng)
        assert await cache.compare() == len(cache.prompts), "the changes connect again"
    pools.full = True
    cache.use(rng)
    await cache.lease.renew()
    pools.full = False
    assert await cache.compare() == len(cache.prompts), "what Redis refused comes as a summary"


async def test_a_large_pool_s_candidates_are_the_best_prefixes_and_others_in_turn() -> None:
    view, count = PoolView(), 5 * CANDIDATES_MAX
    infos = [info_of("p", f"r{number:03}", generation=1, bytes_per_token=512.0) for number in range(count)]
    view.apply(LeaseChanges(1, True, count, 0, [(info.replica, info) for info in infos]))
    for info in view.outdated([]):
        view.renew_prefix(info, b"")
    holder = ReplicaId("r123")
    view.sent(holder, [8, 16, 24])
    seen: set[str] = set()
    for turn in range(20):
        found = view.candidates("m", [8, 16, 24, 32], turn * 31)
        assert len(found) == CANDIDATES_MAX and found[0] == (holder, 3)
        seen |= {candidate.replica for candidate in found}
    assert len(seen) == count, "no replica is left out"


async def test_what_a_new_replica_says_of_answers_it_has_not_seen_is_no_estimate() -> None:
    view = PoolView()
    old = info_of("p", "old", generation=1, output_tokens_mean=80.0, bytes_per_token=3.0, ttft_counts=(0, 40))
    new = info_of("p", "new", generation=1)
    view.apply(LeaseChanges(1, True, 2, 0, [(old.replica, old), (new.replica, new)]))
    assert view.estimates == (3.0, 80.0)
    view.apply(LeaseChanges(2, True, 1, 0, [(new.replica, new)]))
    assert view.estimates == (new.bytes_per_token, new.output_tokens_mean), "nobody knows better"
