"""Placement under overload by several gateways and pools, on a real Redis."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import msgspec
import pytest

from stream_fabric.errors import RegionUnavailable
from stream_fabric.pool.overload import BatchHosted, Overflow, OverloadMarks
from stream_fabric.pool.placement import Placed, Queued, Refused
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import EngineLoad, EngineRequest, ReplicaInfo, Work
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.pools import RedisPools
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId, new_stream_id
from stream_gw.routing.directory import Directory
from stream_gw.routing.place_request import place, refusal
from stream_gw.routing.regions import served_in

GATEWAYS = 4


def work_of(tier: int = 1, session: str = "", model: str = "m") -> Work:
    request = EngineRequest(new_stream_id(1_700_000_000_000, os.urandom(10)), "chat", model, msgspec.Raw(b"{}"))
    return Work(request, "1.aa", TenantId("acme"), b"", 2.0, tier, session, 100, 90)


@dataclass
class Edge:
    """Pools in one Redis, and gateways with a directory each."""

    pools: list[RedisPools]
    plans: dict[str, PoolPlan] = field(default_factory=dict)
    directories: list[Directory] = field(default_factory=list)
    tag: str = field(default_factory=lambda: os.urandom(4).hex())

    async def read(self) -> Mapping[str, PoolPlan]:
        return self.plans

    def pool(self, name: str) -> str:
        base, tilde, number = name.partition("~")
        return f"{base}-{self.tag}{tilde}{number}"

    async def declare(
        self, name: str, adjacent: str = "", models: tuple[str, ...] = (), batch_pools: tuple[str, ...] = ()
    ) -> None:
        marks = OverloadMarks(
            (20.0, 10.0, 0.5),
            1.0,
            (self.pool(adjacent),) if adjacent else (),
            batch_pools=tuple(map(self.pool, batch_pools)),
        )
        self.plans[self.pool(name)] = PoolPlan(1, 0, 1, overload_marks=marks, models=models)

    async def join(
        self,
        name: str,
        slots: int = 4,
        room: int = 5,
        prefill_ms: float = 0.0,
        models: tuple[str, ...] = ("m",),
        prefill_per_s: float = 1000.0,
        region: str = "",
    ) -> None:
        info = ReplicaInfo(
            ReplicaId(f"r-{self.pool(name)}"), self.pool(name), "sim", models, "ready", EngineLoad(0, 0, slots),
            room=room, prefill_ms=prefill_ms, prefill_per_s=prefill_per_s, decode_per_s=100.0,
            region=region,
        )  # fmt: skip
        await self.pools[0].report(info, ttl_s=3600, running={})

    async def look(self) -> None:
        self.directories = [Directory(pools, self.read) for pools in self.pools]
        for directory in self.directories:
            await directory.refresh()

    async def place(
        self, name: str, number: int, work: Work
    ) -> tuple[Placed | Queued | Refused, Overflow | BatchHosted | None]:
        pools, directory = self.pools[number % GATEWAYS], self.directories[number % GATEWAYS]
        candidates = directory.candidates(self.pool(name), work.request.model, (), work.regions)
        outcome = await place(pools, directory, work, self.pool(name), candidates, (), 60.0, random.random())
        return outcome.placed, outcome.elsewhere


@pytest.fixture
async def edge(redis_url: str) -> AsyncIterator[Edge]:
    clients = [RedisClient(redis_url) for _ in range(GATEWAYS)]
    for client in clients:
        await client.start()
    made = Edge([RedisPools(client) for client in clients])
    yield made
    for name in ("home", "host", "home~0", "home~1"):
        replica = ReplicaId(f"r-{made.pool(name)}")
        streams = await made.pools[0].in_flight(made.pool(name), replica)
        await made.pools[0].remove_in_flight(made.pool(name), replica, streams)
        await made.pools[0].remove_queued(made.pool(name), await made.pools[0].waiting(made.pool(name)))
        await made.pools[0].retire(made.pool(name), replica, leaving=True)
    for client in clients:
        await client.close()


async def test_excess_requests_overflow_until_the_adjacent_pool_has_no_capacity_to_spare(edge: Edge) -> None:
    await edge.declare("home", adjacent="host")
    await edge.declare("host")
    await edge.join("home")
    await edge.join("host", slots=20, room=25, prefill_per_s=1e6)
    await edge.look()
    answers = await asyncio.gather(*(edge.place("home", number, work_of()) for number in range(60)))
    shifts = [shift for _, shift in answers if isinstance(shift, Overflow)]
    assert len(shifts) == 12, "six tenths of its slots, however many gateways hand over at once"
    assert {(shift.home, shift.to, shift.shift_s) for shift in shifts} == {(edge.pool("home"), edge.pool("host"), 1.0)}
    assert all(shift.backlog_s >= 1.0 for shift in shifts)
    at_home = [answer for answer, shift in answers if shift is None]
    assert sum(isinstance(answer, Placed) for answer in at_home) == 5
    assert sum(isinstance(answer, Queued) for answer in at_home) > 5, "the rest waits where it belongs"
    surged = await edge.pools[0].overload_totals(edge.pool("home"))
    refused = [answer for answer in at_home if isinstance(answer, Refused)]
    assert (surged.rejected[1], surged.overflowed) == (len(refused), 12)
    assert {refusal(work_of(), answer, 0.0, 0.5).code for answer in refused} <= {"pool_busy"}
    assert (await edge.pools[0].demand_totals(edge.pool("home"))).requests == 60, "each is counted once"
    assert (await edge.pools[0].demand_totals(edge.pool("host"))).requests == 0, "and not where it is a guest"


async def test_two_pools_adjacent_to_each_other_do_not_bounce_a_request(edge: Edge) -> None:
    await edge.declare("home", adjacent="host")
    await edge.declare("host", adjacent="home")
    for name in ("home", "host"):
        await edge.join(name, slots=10, room=12, prefill_ms=3000)
    await edge.look()
    for number in range(20):
        placed, shift = await edge.place(("home", "host")[number % 2], number, work_of())
        assert shift is None and not isinstance(placed, Refused)
    for name in ("home", "host"):
        assert (await edge.pools[0].demand_totals(edge.pool(name))).requests == 10
        assert (await edge.pools[0].overload_totals(edge.pool(name))).overflowed == 0


async def test_sessions_and_adapters_stay_at_home(edge: Edge) -> None:
    await edge.declare("home", adjacent="host")
    await edge.join("home", slots=100, room=125, models=("m", "adapter"))
    await edge.join("host", slots=100, room=125, prefill_per_s=1e6)
    await edge.look()
    _, shift = await edge.place("home", 0, work_of(session="s"))
    assert shift is None
    await edge.join("home", slots=100, room=125, prefill_ms=3000, models=("m", "adapter"))
    for number in range(8):
        placed, shift = await edge.place("home", number, work_of(session="s"))
        assert isinstance(placed, Placed) and shift is None and placed.reason in ("pin", "only")
        placed, shift = await edge.place("home", number, work_of(model="adapter"))
        assert isinstance(placed, Placed) and shift is None
        placed, shift = await edge.place("home", number, work_of(session=f"new-{number}"))
        assert shift is not None, "a session that is bound to nothing loses nothing"


async def test_an_undeclared_pool_never_overflows_or_rejects(edge: Edge) -> None:
    await edge.join("home")
    await edge.join("host", slots=100, room=125)
    await edge.look()
    answers = [await edge.place("home", number, work_of(tier=2)) for number in range(40)]
    assert sum(isinstance(answer, Placed) for answer, _ in answers) == 5
    assert sum(isinstance(answer, Queued) for answer, _ in answers) == 35
    assert {shift for _, shift in answers} == {None}


async def test_a_models_home_is_the_pool_declared_for_it(edge: Edge) -> None:
    model = f"m-{edge.tag}"
    for name in ("host", "home"):
        await edge.join(name, models=(model,))
    await edge.look()
    (first,) = {await directory.pool_of(model) for directory in edge.directories}
    other = next(edge.pool(name) for name in ("home", "host") if edge.pool(name) != first)
    await edge.declare(other.partition("-")[0], models=(model,))
    for directory in edge.directories:
        await directory.refresh()
        assert await directory.pool_of(model) == other == directory.models()[model].pool


async def test_a_request_that_its_cell_queues_moves_to_a_cell_with_room(edge: Edge) -> None:
    """The gateways' figures are a second old. They send a burst to one cell; nobody waits while another has room."""
    for cell in ("home~0", "home~1"):
        await edge.join(cell, slots=4, room=4)
    await edge.look()
    pools, directory, home = edge.pools[0], edge.directories[0], edge.pool("home~0")
    outcomes = []
    for _ in range(10):
        work = work_of()
        candidates = directory.candidates(home, "m", ())
        outcomes.append(await place(pools, directory, work, home, candidates, (), 60.0, random.random()))
    assert [type(one.placed) for one in outcomes[:8]] == [Placed] * 8
    assert [one.cell for one in outcomes[:8]] == [home] * 4 + [edge.pool("home~1")] * 4
    assert all(isinstance(one.placed, Queued) for one in outcomes[8:])
    totals = [await pools.demand_totals(edge.pool(f"home~{number}")) for number in range(2)]
    assert sum(one.requests for one in totals) == 10, "each is counted once"
    assert [(await pools.overload_totals(edge.pool(f"home~{number}"))).overflowed for number in range(2)] == [0, 0]
    lines = [await pools.waiting(edge.pool(f"home~{number}")) for number in range(2)]
    assert len({*lines[0], *lines[1]}) == len(lines[0] + lines[1]) == 2


async def test_batch_requests_go_to_a_batch_host_while_it_has_slots_and_others_never(edge: Edge) -> None:
    await edge.declare("home", batch_pools=("host",))
    await edge.declare("host")
    await edge.join("home", slots=8, room=10)
    await edge.join("host", slots=4, room=5)
    await edge.look()
    for number in range(6):
        placed, elsewhere = await edge.place("home", number, work_of(tier=number % 2))
        assert isinstance(placed, Placed) and elsewhere is None
    taken: list[StreamId] = []
    for number in range(6):
        work = work_of(tier=2)
        placed, elsewhere = await edge.place("home", number, work)
        if elsewhere is not None:
            assert elsewhere == BatchHosted(edge.pool("home"), edge.pool("host")) and isinstance(placed, Placed)
            taken.append(work.request.stream)
    assert len(taken) == 4, "one a slot; none waits there"
    kept = await edge.pools[0].work(edge.pool("host"), taken[0])
    assert kept is not None and kept.home == edge.pool("home")
    assert (await edge.pools[0].demand_totals(edge.pool("home"))).requests == 8, "what its host takes is no demand"
    assert (await edge.pools[0].demand_totals(edge.pool("host"))).requests == 0


async def test_a_pinned_request_overflows_to_pools_of_its_region_only(edge: Edge) -> None:
    await edge.declare("home", adjacent="host")
    await edge.declare("host")
    await edge.join("home", region="eu", prefill_ms=60_000)
    await edge.join("host", slots=20, room=25, prefill_per_s=1e6, region="us")
    await edge.look()
    pinned, both = (msgspec.structs.replace(work_of(0), regions=regions) for regions in (("eu",), ("eu", "us")))
    placed, elsewhere = await edge.place("home", 0, pinned)
    assert elsewhere is None and isinstance(placed, Refused), "it is refused rather than moved"
    placed, elsewhere = await edge.place("home", 0, both)
    assert isinstance(elsewhere, Overflow) and isinstance(placed, Placed)


async def test_the_home_of_a_pinned_request_is_a_pool_of_its_region(edge: Edge) -> None:
    await edge.declare("home", adjacent="host", models=("m-pinned",))
    await edge.declare("host")
    await edge.join("home", models=("m-pinned",), region="us")
    await edge.join("host", models=("m-pinned",), region="eu")
    await edge.look()
    directory = edge.directories[0]
    assert await directory.pool_of("m-pinned") == edge.pool("home")
    assert await directory.pool_of("m-pinned", None, ("us",)) == edge.pool("home")
    assert await directory.pool_of("m-pinned", None, ("eu",)) == edge.pool("host")
    with pytest.raises(RegionUnavailable, match="ap"):
        await directory.pool_of("m-pinned", None, ("ap",))
    served = directory.models()
    assert "m-pinned" in dict(served_in(directory, served, ("eu",)))
    assert "m-pinned" not in dict(served_in(directory, served, ("ap",)))


async def test_a_batch_host_is_no_models_home(edge: Edge) -> None:
    model = f"m-{edge.tag}"
    await edge.declare("home", models=(model,), batch_pools=("host",))
    await edge.declare("host", models=(model,))
    await edge.join("host", models=(model,))
    await edge.look()
    for directory in edge.directories:
        assert await directory.pool_of(model) == edge.pool("home") == directory.models()[model].pool
    placed, elsewhere = await edge.place("home", 0, work_of(tier=0, model=model))
    assert isinstance(placed, Queued) and elsewhere is None, "it waits for a replica of its own pool"
    _, elsewhere = await edge.place("home", 0, work_of(tier=2, model=model))
    assert elsewhere is not None


def test_who_is_rejected_is_told_to_wait_for_the_replicas_that_start() -> None:
    """If eight of ten replicas start, most tries are in vain. If one of a hundred starts, nearly none is."""
    asked_us = 1_000_000_000
    few = PoolPlan(10, 0, 10, cold_start_s=240, requested=((asked_us, 8),), rejecting_tiers=("batch",))
    assert few.recovery_s("batch", asked_us) == pytest.approx(192)
    assert few.recovery_s("batch", asked_us + 200_000_000) == pytest.approx(32)
    assert few.recovery_s("batch", asked_us + 250_000_000) == 0, "one that is overdue tells nothing"
    assert few.recovery_s("interactive", asked_us) == 0
    many = PoolPlan(100, 0, 100, cold_start_s=240, requested=((asked_us, 1),), rejecting_tiers=("batch",))
    assert many.recovery_s("batch", asked_us) == pytest.approx(2.4)
    for recovery_s, draw, told in ((192.0, 0.0, 40), (192.0, 0.99, 60), (2.4, 0.0, 3), (0.0, 0.9, 2)):
        error = refusal(work_of(), Refused(2, "shed", 1.5), recovery_s, draw)
        assert error.retry_after_s == told
    assert refusal(work_of(), Refused(5), 192.0, 0.0).retry_after_s == 5, "the queue is full: that passes"


def test_a_refusal_names_the_kv_cache_where_only_that_lacks_room() -> None:
    work = work_of()
    for refused in (Refused(2, lacks_kv=True), Refused(2, "shed", 7.0, lacks_kv=True)):
        error = refusal(work, refused, 0.0, 0.5)
        assert "no KV cache has room for its 190 expected tokens" in error.message and "retry after" in error.message
        assert error.http_status == 503 and error.retry_after_s
    assert "KV" not in refusal(work, Refused(2), 0.0, 0.5).message
