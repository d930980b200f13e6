"""Leases, placement, inboxes and the reaper, on real Redis."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import pytest

from stream_fabric.cursor import BEGINNING, Epoch
from stream_fabric.errors import FabricUnavailable
from stream_fabric.frames import End, Usage, decode, encode_text
from stream_fabric.ids import ReplicaId, StreamId, TenantId, new_stream_id
from stream_fabric.log import Append, AppendCode
from stream_fabric.ports import EngineLoad, EngineRequest
from stream_fabric.redis.client import Partitions, RedisClient, slot_of
from stream_fabric.redis.pool import Inbox, Placed, RedisPools, ReplicaInfo, ReplicaState, Work
from stream_fabric.redis.reaper import LOST, Reaper
from stream_fabric.redis.streams import RedisStreamLog, check_partitions
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

ACME = TenantId("acme")


class Pool:
    """One pool of the shared Redis, of this test's own."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.pools = RedisPools(client)
        self.name = f"pool-{os.urandom(4).hex()}"

    async def renew(
        self,
        replica: ReplicaId,
        *running: StreamId,
        state: ReplicaState = "ready",
        slots: int = 4,
        room: int | None = None,
        ttl_s: float = 30.0,
    ) -> None:
        info = ReplicaInfo(replica, self.name, "sim", ("m",), state, EngineLoad(len(running), 0, slots), True)
        await self.pools.renew(info, ttl_s, slots if room is None else room, running)

    async def place(self, stream: StreamId, *replicas: ReplicaId) -> Placed | str:
        return await self.pools.place(self.name, work(stream), replicas)

    async def flight(self, replica: ReplicaId) -> set[StreamId]:
        return set(await self.pools.in_flight(self.name, replica))

    def inbox(self, replica: ReplicaId) -> Inbox:
        return Inbox(self.client, self.name, replica)


@pytest.fixture(params=["redis", "cluster"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    client = RedisClient(request.getfixturevalue("redis_url" if request.param == "redis" else "redis_cluster_url"))
    await client.start()
    yield Pool(client)
    await client.close()


def replica(name: str) -> ReplicaId:
    return ReplicaId(f"{name}-{os.urandom(3).hex()}")


def new_stream() -> StreamId:
    return new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))


def work(stream: StreamId) -> Work:
    request = EngineRequest(stream, "chat", "m", msgspec.Raw(b'{"messages":[]}'))
    return Work(request, "1.aa", ACME, b'{"facts":1}', 2.0)


async def test_place_takes_the_least_loaded(pool: Pool) -> None:
    big, small = replica("big"), replica("small")
    await pool.renew(big, *(new_stream() for _ in range(3)), slots=8)
    await pool.renew(small, new_stream(), slots=2)
    placed = await pool.place(new_stream(), small, big)
    assert placed == Placed(big, 4, 8)  # 3 of 8 before 1 of 2
    assert await pool.place(new_stream(), small, big) == Placed(small, 2, 2)  # both half full: the first
    assert await pool.place(new_stream(), small, big) == Placed(big, 5, 8)


async def test_place_hands_the_work_over_and_is_idempotent(pool: Pool) -> None:
    one, two = replica("one"), replica("two")
    await pool.renew(one)
    await pool.renew(two, new_stream(), slots=100)
    stream = new_stream()
    first = await pool.place(stream, one, two)
    assert isinstance(first, Placed) and first.replica == one
    for _ in range(3):
        again = await pool.place(stream, two, one)
        assert isinstance(again, Placed) and again.replica == one
    assert await pool.pools.holds(pool.name, one, stream)
    assert not await pool.pools.holds(pool.name, two, stream)
    inbox = pool.inbox(one)
    ((entry_id, got),) = await inbox.read(0.1)
    assert got == work(stream)
    assert len(await inbox.read(0.1)) == 1  # it stays until it is done with
    await inbox.done([entry_id])
    assert await inbox.read(0.01) == []
    inbox.close()


async def test_room_is_respected_under_64_concurrent_callers(pool: Pool) -> None:
    one, two = replica("one"), replica("two")
    await pool.renew(one, slots=20, room=24)
    await pool.renew(two, slots=10, room=12)
    replies = await asyncio.gather(*(pool.place(new_stream(), one, two) for _ in range(64)))
    placed = Counter(reply.replica if isinstance(reply, Placed) else reply for reply in replies)
    assert placed == {one: 24, two: 12, "full": 28}
    assert (len(await pool.flight(one)), len(await pool.flight(two))) == (24, 12)


async def test_only_ready_and_living_replicas_get_work(pool: Pool) -> None:
    ready, draining, starting, dead = (replica(name) for name in ("ready", "draining", "starting", "dead"))
    await pool.renew(draining, state="draining")
    await pool.renew(starting, state="starting")
    await pool.renew(dead, ttl_s=0.001)
    await eventually(lambda: _is_expired(pool, dead))
    assert await pool.place(new_stream(), draining, starting, dead, replica("unknown")) == "none"
    await pool.renew(ready, slots=1)
    placed = await pool.place(new_stream(), draining, ready, dead)
    assert isinstance(placed, Placed) and placed.replica == ready
    assert await pool.place(new_stream(), draining, ready, dead) == "full"
    assert {info.replica for info in await pool.pools.replicas(pool.name)} == {ready, draining, starting}
    assert pool.name in await pool.pools.pools()


async def _is_expired(pool: Pool, name: ReplicaId) -> bool:
    return name in await pool.pools.expired(pool.name)


async def test_invariant_7_no_leaked_slot(pool: Pool) -> None:
    one = replica("one")
    a, b, c = (new_stream() for _ in range(3))
    await pool.renew(one, slots=2)
    for stream in (a, b):
        await pool.place(stream, one)
    assert await pool.place(c, one) == "full"
    inbox = pool.inbox(one)
    entries = await inbox.read(0.1)
    # What the agent has not taken from its inbox counts, whatever its list says
    await pool.renew(one, slots=2)
    assert await pool.flight(one) == {a, b}
    await inbox.done([entry_id for entry_id, _ in entries])
    await pool.renew(one, a, b, slots=2)
    assert await pool.place(c, one) == "full"
    # `b` ended, however it did: its slot is free with the next renewal
    await pool.renew(one, a, slots=2)
    assert await pool.flight(one) == {a}
    assert await pool.place(c, one) == Placed(one, 2, 2)
    # A renewal that was composed before the agent read the inbox leaks nothing and loses nothing
    await pool.renew(one, a, slots=2)
    assert await pool.flight(one) == {a, c}
    inbox.close()


async def test_invariant_7_no_leaked_slot_after_a_total_loss(redis_server: RedisServer) -> None:
    client = RedisClient(redis_server.url)
    await client.start()
    pool = Pool(client)
    one, stream = replica("one"), new_stream()
    await pool.renew(one, stream)
    redis_server("FLUSHALL")
    await pool.renew(one, stream)
    assert await pool.flight(one) == {stream}
    await client.close()


async def test_retire_spares_a_replica_that_came_back(pool: Pool) -> None:
    one = replica("one")
    await pool.renew(one, new_stream())
    await pool.pools.retire(pool.name, one)
    assert len(await pool.flight(one)) == 1
    await pool.pools.retire(pool.name, one, leaving=True)
    assert await pool.flight(one) == set()
    assert await pool.pools.replicas(pool.name) == []
    assert await pool.place(new_stream(), one) == "none"


async def test_pool_keys_expire_but_for_the_leases(pool: Pool) -> None:
    one = replica("one")
    await pool.renew(one, new_stream())
    await pool.place(new_stream(), one)
    await pool.renew(one, new_stream())
    slot = slot_of(f"pool:{pool.name}")
    for part in ("info", "flight", "inbox"):
        ttl = await pool.client.execute(slot, "PTTL", f"sg:{{pool:{pool.name}}}:{one}:{part}")
        assert ttl > 0, part


async def test_an_inbox_reader_wakes_at_once_and_survives_its_connection(pool: Pool) -> None:
    one = replica("one")
    await pool.renew(one)
    inbox = pool.inbox(one)
    reading = asyncio.create_task(inbox.read(5.0))
    stream = new_stream()
    await pool.place(stream, one)
    started = asyncio.get_running_loop().time()
    ((_, got),) = await reading
    assert got.request.stream == stream
    assert asyncio.get_running_loop().time() - started < 2.0
    inbox.close()
    assert len(await inbox.read(0.1)) == 1
    inbox.close()


class Streams:
    """Streams that a replica has begun, in the shared Redis."""

    def __init__(self, pool: Pool, owner: ReplicaId) -> None:
        self.log = RedisStreamLog(pool.client, Partitions(4), owner)

    async def begin(self) -> StreamId:
        stream = new_stream()
        await self.log.create(stream, Epoch(1, "aa"), ACME, b"{}", None)
        item = Append(stream, "1.aa", 1, 1, encode_text(0, "x"), Usage(output=1))
        ((code, _),) = await self.log.append(self.log.partition(stream), [item])
        assert code is AppendCode.OK
        return stream

    async def status(self, stream: StreamId) -> str:
        page = await self.log.watch(stream, ACME, None, BEGINNING)
        assert page is not None
        return page.status


async def test_invariant_6_no_zombie_the_reaper_ends_a_dead_replicas_streams(pool: Pool) -> None:
    dead, alive = replica("dead"), replica("alive")
    of_dead, of_alive = Streams(pool, dead), Streams(pool, alive)
    lost, kept = await of_dead.begin(), await of_alive.begin()
    unread = new_stream()
    await of_dead.log.create(unread, Epoch(1, "aa"), ACME, b"{}", None)
    await pool.renew(dead, lost, ttl_s=0.3)
    await pool.renew(alive, kept)
    await pool.place(unread, dead)  # in its inbox when it dies
    reapers = [asyncio.create_task(Reaper(pool.pools, of_alive.log).run()) for _ in range(3)]
    started = asyncio.get_running_loop().time()
    try:
        await eventually(lambda: _gone(pool, dead), "the reaper", 5)
    finally:
        for reaper in reapers:
            reaper.cancel()
        await asyncio.gather(*reapers, return_exceptions=True)
    assert asyncio.get_running_loop().time() - started < 3.0
    assert [await of_dead.status(s) for s in (lost, unread, kept)] == ["failed", "failed", "live"]
    page = await of_dead.log.watch(lost, ACME, None, BEGINNING)
    assert page is not None
    assert decode(page.entries[-1].frames) == End("failed", Usage(output=1), LOST)
    assert page.bases == ((2, 1),)  # three reapers, one fence
    assert await pool.flight(alive) == {kept}


async def _gone(pool: Pool, name: ReplicaId) -> bool:
    return not await _is_expired(pool, name) and not await pool.flight(name)


async def test_the_reaper_waits_for_a_replica_that_renews_after_an_outage(pool: Pool) -> None:
    """Leases that ran out while Redis was away are renewed before anybody is declared dead."""
    one = replica("one")
    streams = Streams(pool, one)
    stream = await streams.begin()
    await pool.renew(one, stream, ttl_s=0.001)
    await eventually(lambda: _is_expired(pool, one))
    reaper = Reaper(pool.pools, streams.log)
    await reaper._reap()
    await pool.renew(one, stream)
    reaper._dead_since = {key: since - 10 for key, since in reaper._dead_since.items()}
    await reaper._reap()
    assert reaper._dead_since == {}
    assert await streams.status(stream) == "live"


async def test_processes_agree_on_the_number_of_partitions(redis_server: RedisServer) -> None:
    client = RedisClient(redis_server.url)
    await client.start()
    assert (await check_partitions(client, 8)).count == 8
    assert (await check_partitions(client, 8)).count == 8
    with pytest.raises(FabricUnavailable, match="STREAM_GW_PARTITIONS=8"):
        await check_partitions(client, 16)
    await client.close()
