"""The directory when pools change under a request, and what it costs the fabric."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stream_fabric.errors import FabricUnavailable, ModelNotFound, NoReplica
from stream_fabric.pool.lease_changes import LeaseChanges, RoutingGeneration
from stream_fabric.pool.overload import OverloadMarks
from stream_fabric.pool.plan import PoolPlan, ReplicaProfile, route_key
from stream_fabric.pool.records import EngineLoad, ReplicaInfo
from stream_fabric.redis.pools import RedisPools
from stream_fabric.stream.ids import ReplicaId, StreamId
from stream_gw.routing.directory import Directory
from stream_gw.routing.holders import Holder


def whole(*infos: ReplicaInfo) -> LeaseChanges:
    return LeaseChanges(1, True, len(infos), 0, [(info.replica, info) for info in infos], blocks_at="1")


class Pools(RedisPools):
    """One pool, which the test can remove."""

    def __init__(self) -> None:
        self.names = ["p"]
        self.planned: dict[str, PoolPlan] = {}
        self.infos = [ReplicaInfo(ReplicaId("r"), "p", "sim", ("m",), "ready", EngineLoad(0, 0, 1), generation=1)]

    async def plans(self) -> dict[str, PoolPlan]:
        return self.planned

    async def pools(self) -> list[str]:
        return self.names

    async def changes(self, pool: str, since: int, blocks_after: str) -> LeaseChanges:
        return whole(*self.infos)

    async def prefix(self, pool: str, replica: ReplicaId) -> bytes:
        return b""


async def test_a_pool_that_vanishes_after_it_was_found_raises_no_replica() -> None:
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
    assert directory.seen_models == {"m": pool}


async def test_the_context_is_the_largest_of_the_ready_replicas_once_all_tell_theirs() -> None:
    pools = Pools()
    directory = Directory(pools, pools.plans)
    generations = {name: RoutingGeneration() for name in "ab"}

    async def context(**told: tuple[str, int]) -> int:
        pools.infos = [
            generations[name].stamp(
                ReplicaInfo(ReplicaId(name), "p", "sim", ("m",), state, EngineLoad(0, 0, 1, max_model_len=tokens))
            )
            for name, (state, tokens) in told.items()
        ]
        await directory.pool_of("m")  # a pool that is in use is read at each refresh
        await directory.refresh()
        assert directory.models()["m"].max_model_len == directory.context("p", "m")
        return directory.context("p", "m")

    assert await context(a=("ready", 8192), b=("ready", 4096)) == 8192
    assert await context(a=("draining", 8192), b=("ready", 4096)) == 4096
    assert await context(a=("ready", 8192), b=("ready", 0)) == 0
    assert await context(a=("warming", 8192), b=("warming", 4096)) == 0
    before = pools.infos[0].generation
    assert await context(a=("warming", 16_384), b=("warming", 4096)) == 0
    assert pools.infos[0].generation > before, "gateways read a replica again whose context has changed"
    assert directory.context("p", "other") == 0


async def test_a_declared_pool_is_served_while_it_has_no_replica() -> None:
    pools = Pools()
    pools.names = []
    pools.planned = {"p": PoolPlan(0, 0, 0, models=("m", "lora"), cold_start_s=300)}
    directory = Directory(pools, pools.plans)
    assert await directory.pool_of("lora") == "p"
    assert directory.candidates("p", "m", []) == [] and directory.estimates("p").output_tokens == 256
    assert directory.warming("p") == pools.planned["p"]
    assert {model: served.pool for model, served in directory.models().items()} == {"m": "p", "lora": "p"}
    pools.planned = {"p": PoolPlan(1, 0, 1, models=("m",), typical_replica=ReplicaProfile(8, 1000, 100, 99, 3))}
    pools.names = ["p"]
    await directory.refresh()
    assert directory.warming("p") is None, "one is ready"
    with pytest.raises(ModelNotFound):
        await directory.pool_of("other")
    pools.names = []
    await directory.refresh()
    assert directory.estimates("p") == (3, 99), "as it was when it had one"


async def test_output_estimates_use_the_route_when_it_is_known() -> None:
    pools = Pools()
    chat, code = (route_key("m", f"openai.{kind}", "standard") for kind in ("chat", "completions"))
    plan = PoolPlan(1, 0, 1, models=("m",), typical_replica=ReplicaProfile(8, 1000, 100, 99, 3), outputs={chat: 800.0})
    pools.planned = {"p": plan}
    directory = Directory(pools, pools.plans)
    for names, known in ((["p"], (4, 256)), ([], (3, 99))):
        pools.names = names
        await directory.refresh()
        assert directory.estimates("p", chat) == (known[0], 800)
        assert directory.estimates("p", code) == directory.estimates("p") == known, "as of all the pool's"


async def test_standby_replicas_count_as_far_as_they_come_up_in_time() -> None:
    pools = Pools()
    pools.infos = [
        ReplicaInfo(ReplicaId(name), "p", "sim", ("m",), state, EngineLoad(0, 0, 1), generation=1, wake_s=wake_s)
        for name, state, wake_s in (
            ("r", "ready", 0.0), ("w", "warm", 0.0), ("s", "sleeping", 4.0), ("new", "sleeping", 0.0),
            ("far", "sleeping", 60.0), ("gone", "warm", 0.0),
        )
    ]  # fmt: skip
    marks = OverloadMarks((10.0, 5.0, 0.0))
    pools.planned = {"p": PoolPlan(1, 4, 6, overload_marks=marks, victims=(ReplicaId("gone"),))}
    directory = Directory(pools, pools.plans)
    assert await directory.pool_of("m") == "p"

    def counted(tier: int) -> float:
        return directory.overload_terms("p", "m", tier, directory.candidates("p", "m", [])).relief

    assert counted(0) == pytest.approx((1 - 2 / 20) + (1 - 6 / 20)), "within twice the mark"
    assert counted(1) == pytest.approx((1 - 2 / 10) + (1 - 6 / 10))
    assert counted(2) == 0, "it has no mark"
    pools.infos = pools.infos[:1]
    await directory.refresh()
    assert counted(0) == 0


class SlowPools(RedisPools):
    """Pools ``p0``, ``p1`` …, each with one replica and one model. Each read waits until ``open`` is set."""

    def __init__(self, count: int) -> None:
        self.names = [f"p{number}" for number in range(count)]
        self.open = asyncio.Event()
        self.open.set()
        self.lists = 0
        self.reading = self.reading_most = 0
        self.away = False
        self.lost = ""
        """The pool whose shard of Redis is away."""
        self.silent: list[str] = []
        """Pools whose shard of Redis does not answer until ``answering`` is set."""
        self.answering = asyncio.Event()
        self.joined: list[str] = []
        """Further replicas of each pool."""
        self.holders: dict[str, str] = {}
        self.asked: list[str] = []

    async def _read(self, pool: str) -> None:
        if pool in self.silent:
            await self.answering.wait()
        self.reading += 1
        self.reading_most = max(self.reading, self.reading_most)
        await self.open.wait()
        self.reading -= 1

    async def plans(self) -> dict[str, PoolPlan]:
        return {}

    async def pools(self, timeout_s: float | None = None) -> list[str]:
        self.lists += 1
        if self.away:
            raise FabricUnavailable("Redis is away")
        return self.names

    async def changes(self, pool: str, since: int, blocks_after: str) -> LeaseChanges:
        await self._read(pool)
        if pool == self.lost:
            raise FabricUnavailable("its shard is away")
        model = pool.replace("p", "m")
        names = [ReplicaId(f"{name}-{pool}") for name in ("r", *self.joined)]
        load = EngineLoad(0, 0, 1)
        return whole(*(ReplicaInfo(name, pool, "sim", (model,), "ready", load, generation=1) for name in names))

    async def prefix(self, pool: str, replica: ReplicaId) -> bytes:
        return b""

    async def holder(self, pool: str, stream: StreamId) -> Any:
        self.asked.append(pool)
        await self._read(pool)
        if pool == self.lost:
            raise FabricUnavailable("its shard is away")
        return self.holders.get(pool)


async def unknown(directory: Directory, number: int) -> None:
    with pytest.raises(ModelNotFound):
        await directory.pool_of(f"unknown-{number}")


async def settled(work: Coroutine[Any, Any, Any], until: Callable[[], bool]) -> asyncio.Task[Any]:
    """The task of ``work``, once ``until`` holds."""
    task = asyncio.ensure_future(work)
    async with asyncio.timeout(10):
        while not until():
            await asyncio.sleep(0)
    return task


async def test_requests_for_unknown_models_cost_at_most_one_refresh_a_second() -> None:
    pools = SlowPools(3)
    directory = Directory(pools, pools.plans)
    await directory.refresh()
    await asyncio.gather(*(unknown(directory, number) for number in range(100)))
    assert pools.lists == 2
    await asyncio.sleep(1.01)
    pools.names = ["p0", "p9"]
    assert await directory.pool_of("m9") == "p9", "a model that has come is found without waiting for the loop"
    await asyncio.gather(*(unknown(directory, number) for number in range(100)))
    assert pools.lists == 3


async def test_a_known_model_does_not_wait_behind_a_refresh_for_an_unknown_one() -> None:
    pools = SlowPools(3)
    directory = Directory(pools, pools.plans)
    await directory.refresh()
    assert await directory.pool_of("m0") == "p0", "the first request reads what the replicas have cached"
    pools.open.clear()
    asking = await settled(unknown(directory, 1), lambda: pools.reading > 0)
    async with asyncio.timeout(10):
        assert await directory.pool_of("m0") == "p0"
    assert not asking.done()
    pools.open.set()
    await asking


async def test_pools_are_read_concurrently() -> None:
    pools = SlowPools(8)
    pools.open.clear()
    refresh = await settled(Directory(pools, pools.plans).refresh(), lambda: pools.reading == 8)
    pools.open.set()
    await refresh


async def test_while_the_fabric_is_away_unknown_models_share_one_failure() -> None:
    pools = SlowPools(1)
    pools.away = True
    directory = Directory(pools, pools.plans)
    answers = await asyncio.gather(*(directory.pool_of(f"m{n}") for n in range(100)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {FabricUnavailable}
    assert pools.lists == 1


async def test_a_shard_that_is_away_hides_only_its_own_pools() -> None:
    pools = SlowPools(2)
    pools.lost = "p1"
    directory = Directory(pools, pools.plans)
    assert await directory.pool_of("m0") == "p0"
    with pytest.raises(FabricUnavailable, match="its shard is away"):
        await directory.pool_of("m1")
    pools.names.append("p2")
    with pytest.raises(FabricUnavailable):
        await directory.refresh()
    assert await directory.pool_of("m2") == "p2" and directory.by_pool["p2"]


async def test_a_silent_shard_delays_no_news_of_the_others() -> None:
    pools = SlowPools(40)
    directory = Directory(pools, pools.plans)
    await directory.refresh()
    for number in range(40):
        await directory.pool_of(f"m{number}")  # pools in use are read at each refresh
    pools.silent, pools.joined = pools.names[:-1], ["new"]
    async with asyncio.timeout(3):
        with pytest.raises(FabricUnavailable, match=r"pool 'p\d+' was not read"):
            await directory.refresh()
    assert [info.replica for info in directory.by_pool["p39"]] == ["new-p39", "r-p39"]
    assert len(directory.by_pool["p0"]) == 1
    pools.joined = []
    began = asyncio.get_running_loop().time()
    with pytest.raises(FabricUnavailable):
        await directory.refresh()
    assert len(directory.by_pool["p39"]) == 1
    assert asyncio.get_running_loop().time() - began < 0.5, "a refresh does not wait again for reads that go on"
    pools.silent = []
    pools.answering.set()
    await directory.refresh()
    assert len(directory.by_pool["p0"]) == 1


async def test_news_of_known_pools_come_while_the_list_of_pools_is_away() -> None:
    pools = SlowPools(1)
    directory = Directory(pools, pools.plans)
    assert await directory.pool_of("m0") == "p0"
    pools.away, pools.joined = True, ["new"]
    with pytest.raises(FabricUnavailable, match="Redis is away"):
        await directory.refresh()
    assert [info.replica for info in directory.by_pool["p0"]] == ["new-p0", "r-p0"]


async def test_a_producer_is_found_while_the_shard_of_another_pool_is_away() -> None:
    pools = SlowPools(3)
    directory = Directory(pools, pools.plans)
    await directory.refresh()
    stream = StreamId("strm_1")
    pools.lost, pools.holders = "p0", {"p2": "queue"}
    assert await directory.holder_of(None, stream) is Holder.LIVE
    assert await directory.holder_of(ReplicaId("r-p0"), stream) is Holder.LIVE, "the last producer's pool is away"
    pools.silent = ["p1"]
    async with asyncio.timeout(3):
        assert await directory.holder_of(None, stream) is Holder.LIVE
        assert await directory.holder_of(ReplicaId("r-p1"), stream) is Holder.LIVE, (
            "the last producer's pool says nothing"
        )
    pools.silent, pools.holders = [], {}
    with pytest.raises(FabricUnavailable):  # the pool that is away may have it
        await directory.holder_of(None, stream)


async def test_a_request_does_not_fail_for_a_batch_host_that_cannot_be_read() -> None:
    pools = SlowPools(2)
    plans = {"p0": PoolPlan(1, 0, 1, overload_marks=OverloadMarks((1.0, 1.0, 1.0), batch_pools=("p1",)))}

    async def read_plans() -> dict[str, PoolPlan]:
        return plans

    directory = Directory(pools, read_plans)
    await directory.refresh()
    pools.lost = "p1"
    assert await directory.pool_of("m0") == "p0"


async def test_the_last_producers_pool_is_asked_first_and_the_others_concurrently() -> None:
    pools = SlowPools(8)
    directory = Directory(pools, pools.plans)
    await directory.refresh()
    stream, producer = StreamId("strm_1"), ReplicaId("r-p5")
    pools.holders = {"p5": "r-p5"}
    assert await directory.holder_of(producer, stream) is Holder.LIVE
    assert pools.asked == ["p5"]
    pools.holders = {"p2": "queue"}
    pools.asked.clear()
    pools.open.clear()
    asking = await settled(directory.holder_of(None, stream), lambda: pools.reading == 8)
    pools.open.set()
    assert await asking is Holder.LIVE
    pools.holders = {"p2": "r-dead"}
    pools.asked.clear()
    assert await directory.holder_of(producer, stream) is Holder.DEAD
    assert pools.asked[0] == "p5" and sorted(pools.asked) == pools.names, "each pool is asked once"
