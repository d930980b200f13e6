"""Memory in Redis is bounded in bytes: requests of a tenant and of a pool, inputs of a stream, and maxmemory."""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import msgspec
import pytest

from stream_fabric.errors import FabricFull
from stream_fabric.pool.placement import Placed, PlacementRequest, Queued, Refused
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import Candidate, EngineLoad, EngineRequest, ReplicaInfo, Work
from stream_fabric.pool.state import PoolState
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.index import RedisIndex
from stream_fabric.redis.ingest import RedisIngest
from stream_fabric.redis.pools import RedisPools, pool_prefix, pool_slot
from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId, new_stream_id
from tests.fabric.test_failures import Teller, running
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

ACME, OTHER = TenantId("acme"), TenantId("other")
REPLICA = ReplicaId("r")
KIB = 1024


def new_stream() -> StreamId:
    return new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))


def work_of(tenant: TenantId, size: int, stream: StreamId | None = None) -> Work:
    """A request whose record has about ``size`` bytes."""
    body = msgspec.Raw(b'"' + b"x" * size + b'"')
    return Work(EngineRequest(stream or new_stream(), "chat", "m", body), "1.aa", tenant, b"", None)


class Bounded:
    """A pool of its own, with small bounds."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.pools = RedisPools(client, bytes_max=100 * KIB, tenant_bytes_max=40 * KIB)
        self.name = f"bytes-{os.urandom(4).hex()}"

    def info(self, room: int) -> ReplicaInfo:
        return ReplicaInfo(REPLICA, self.name, "test", ("m",), "ready", EngineLoad(0, 0, 4), room=room)

    async def place(self, work: Work) -> Placed | Queued | Refused:
        return await self.pools.place(self.name, work, [Candidate(REPLICA, 0)], wait_s=60, jitter=0.0)

    async def hash(self, name: str) -> dict[str, bytes]:
        reply = await self.client.execute(pool_slot(self.name), "HGETALL", pool_prefix(self.name) + name)
        return {key.decode(): value for key, value in reply.items()}

    async def check(self) -> None:
        """Check that the counters equal the sizes of the kept requests."""
        owners, kept = await self.hash("owner"), Counter[str]()
        for stream, payload in (await self.hash("work")).items():
            kept[""] += len(payload)
            kept[owners[stream].decode().partition(" ")[2]] += len(payload)
        assert {k: int(v) for k, v in (await self.hash("bytes")).items() if int(v)} == kept


@pytest.fixture
async def bounded(redis_client: RedisClient) -> Bounded:
    return Bounded(redis_client)


async def test_requests_are_refused_over_the_bytes_of_their_tenant_and_of_the_pool(bounded: Bounded) -> None:
    for _ in range(3):
        assert isinstance(await bounded.place(work_of(ACME, 12 * KIB)), Queued)
    refused = await bounded.place(work_of(ACME, 12 * KIB))
    assert isinstance(refused, Refused) and refused.why == "tenant_bytes" and refused.retry_after_s >= 1
    assert refused.backlog_s > 36 * KIB
    assert isinstance(await bounded.place(work_of(ACME, KIB)), Queued), "a small one still fits"
    for name in ("b", "c"):
        assert isinstance(await bounded.place(work_of(TenantId(name), 30 * KIB)), Queued)
    refused = await bounded.place(work_of(OTHER, 30 * KIB))
    assert isinstance(refused, Refused) and refused.why == "bytes"
    await bounded.check()
    waiting = await bounded.pools.waiting(bounded.name)
    assert await bounded.pools.remove_queued(bounded.name, waiting) == len(waiting)
    assert await bounded.hash("bytes") == {} and await bounded.hash("owner") == {}
    assert isinstance(await bounded.place(work_of(ACME, 12 * KIB)), Queued)


async def test_invariant_7_bytes_are_exact_after_all_that_can_happen_to_a_request(bounded: Bounded) -> None:
    rng = random.Random(7)
    law = PoolState(10_000, 100 * KIB, 40 * KIB)
    running: dict[StreamId, str] = {}
    for turn in range(400):
        streams = list(law.at)
        match rng.randrange(6):
            case 0 | 1 | 2:
                work = work_of(rng.choice((ACME, OTHER, TenantId("third"))), rng.randrange(12 * KIB))
                size = len(msgspec.json.encode(work))
                asked = PlacementRequest(
                    work.request.stream, work.tenant, 1, "m", "", 1, 1, time.time() * 1000 + 60_000, 0.0, size
                )
                ours = await bounded.place(work)
                theirs = law.place(asked, [REPLICA], [0], time.time() * 1000)
                assert type(ours) is type(theirs), turn
                if isinstance(ours, Refused) and isinstance(theirs, Refused):
                    assert (ours.why, ours.backlog_s) == (theirs.why, theirs.backlog_s)
            case 3 if streams:
                stream = rng.choice(streams)
                assert await bounded.pools.remove_queued(bounded.name, [stream]) == int(law.remove_queued(stream))
            case 4:
                ended = [s for s in streams if law.at[s] == REPLICA and rng.random() < 0.5]
                info, room = bounded.info(8), 8
                await bounded.pools.report(info, ttl_s=60.0, ended=ended, running=running)
                slot = info.slot()._replace(expires_ms=time.time() * 1000 + 60_000, room=room)
                law.report(REPLICA, slot, ("m",), ended, running, time.time() * 1000)
            case 5 if streams:
                stream = rng.choice(streams)
                if law.at[stream] == REPLICA:
                    await bounded.pools.remove_in_flight(bounded.name, REPLICA, [stream])
                    law.flights[REPLICA].pop(stream, None)
                    del law.at[stream]
            case _:
                pass
        await bounded.check()


async def test_requests_that_an_older_version_removed_are_not_counted_for_ever(bounded: Bounded) -> None:
    for _ in range(3):
        await bounded.place(work_of(ACME, 12 * KIB))
    slot, prefix = pool_slot(bounded.name), pool_prefix(bounded.name)
    streams = await bounded.pools.waiting(bounded.name)
    await bounded.client.execute(slot, "HDEL", prefix + "work", *streams[1:])  # as scripts did that do not count
    assert isinstance(await bounded.place(work_of(ACME, 12 * KIB)), Queued)
    await bounded.check()


async def test_at_maxmemory_new_work_is_refused_and_running_streams_end_whole(redis_server: RedisServer) -> None:
    async with running(redis_server.url, Teller(150, 0.02)) as (follower, agent):
        streams = [await follower.begin(agent.replica) for _ in range(3)]
        await eventually(lambda: all(len(follower.lines[s]) > 5 for s in streams))
        redis_server("CONFIG", "SET", "maxmemory", 1)
        new = new_stream()
        with pytest.raises(FabricFull):
            await follower.log.create(new, Epoch(1, "aa"), ACME, b"{}", follower.name)
        with pytest.raises(FabricFull):
            await follower.pools.place(
                "pool", work_of(ACME, 10, new), [Candidate(agent.replica, 0)], wait_s=1, jitter=0
            )
        with pytest.raises(FabricFull):
            await RedisIndex(follower.client).claim(ACME, f"k-{new}", new, "print")
        with pytest.raises(FabricFull):
            await follower.log.input(streams[0], ACME, "i", msgspec.Raw(b"{}"))
        assert (await follower.log.heads(follower.log.partition(new), [new], None)) == [None], "nothing is half made"
        await eventually(lambda: all(map(follower.ended, streams)), "the ends")
        for stream in streams:
            await follower.check_whole(stream, 150)
        assert await follower.pools.expired("pool") == [], "leases are renewed"
        redis_server("CONFIG", "SET", "maxmemory", 0)
        again = await follower.begin(agent.replica)
        await eventually(lambda: follower.ended(again), "a stream after it")


async def test_at_maxmemory_leadership_plans_recovery_and_ingest_go_on(redis_server: RedisServer) -> None:
    client = RedisClient(redis_server.url)
    await client.start()
    control, pools = RedisControl(client), RedisPools(client)
    ingest = RedisIngest(client, "c", 5000)
    try:
        redis_server("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(FabricFull):
            await client.execute(pool_slot("p"), "SET", "sg:{p}:any", "1")
        term = await control.lead("a", 5.0)
        assert term > 0 and await control.lead("a", 5.0) == term and await control.lead("b", 5.0) == 0
        assert await control.write_plan("a", term, "p", PoolPlan(1, 0, 1))
        assert await control.write_plan("a", term, "p", PoolPlan(2, 0, 2))
        assert (await control.plans())["p"].ready == 2
        assert await pools.claim_recovery("p", REPLICA, 5.0, "a")
        assert not await pools.claim_recovery("p", REPLICA, 5.0, "b")
        assert await pools.request_state("p", REPLICA, "draining", "a test")
        assert await ingest.own() is not None and await ingest.commit(7, "")
        assert await RedisIngest(client, "d", 5000).own() is None
        again = await ingest.own()
        assert again is not None and again.next == 7
    finally:
        redis_server("CONFIG", "SET", "maxmemory", 0)
        await client.close()
