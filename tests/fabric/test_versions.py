"""Records in Redis are read by processes of the next and of the previous version: no record of theirs ends a loop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from stream_fabric.pool.placement import Placed
from stream_fabric.pool.plan import PoolPlan, encode_plan
from stream_fabric.pool.records import Candidate, EngineLoad, EngineRequest, ReplicaInfo, Work
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery.lease_reaper import LeaseReaper
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.inbox import RedisInbox
from stream_fabric.redis.pools import RedisPools, pool_prefix, pool_slot
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.topology import slot_of
from stream_fabric.stream.cursor import BEGINNING, Epoch
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId, new_stream_id
from stream_gw.routing.directory import Directory

ACME = TenantId("acme")


class Fleet:
    """A pool of its own, whose records a test replaces."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.skipped: list[str] = []
        self.pools = RedisPools(client, on_skip=self.skipped.append)
        self.control = RedisControl(client, self.skipped.append)
        self.log = RedisStreamLog(client, Partitions(4))
        self.pool = f"versions-{os.urandom(4).hex()}"

    async def join(self, name: str) -> ReplicaInfo:
        info = ReplicaInfo(ReplicaId(name), self.pool, "test", ("m",), "ready", EngineLoad(0, 0, 8), room=8)
        await self.pools.report(info, ttl_s=60.0, running={})
        return info

    async def rewrite(self, info: ReplicaInfo, **changes: Any) -> None:
        """Change fields of the replica's record; None removes one."""
        fields = {**msgspec.json.decode(msgspec.json.encode(info)), **changes}
        record = msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
        await self.execute("SET", f"{info.replica}:info", record)

    async def execute(self, command: str, key: str, *args: str | bytes) -> Any:
        return await self.client.execute(pool_slot(self.pool), command, pool_prefix(self.pool) + key, *args)


@pytest.fixture
async def fleet(redis_url: str) -> AsyncIterator[Fleet]:
    client = RedisClient(redis_url)
    await client.start()
    yield Fleet(client)
    await client.close()


async def _no_plans() -> dict[str, PoolPlan]:
    return {}


async def test_a_replica_in_an_unknown_state_is_not_ready_and_ends_no_loop(fleet: Fleet) -> None:
    old, new = await fleet.join("old"), await fleet.join("new")
    await fleet.rewrite(new, state="hibernating", added="of the next version")
    by_name = {info.replica: info for info in await fleet.pools.replicas(fleet.pool)}
    assert by_name[old.replica].slot().ready and not by_name[new.replica].slot().ready
    directory = Directory(fleet.pools, _no_plans)
    await directory.refresh()
    reaper = asyncio.create_task(LeaseReaper(fleet.pools, fleet.log, HostClock(), HostRandom()).run())
    await asyncio.sleep(1.2)  # two turns
    assert not reaper.done()
    reaper.cancel()
    await asyncio.gather(reaper, return_exceptions=True)
    assert fleet.skipped == []


@pytest.mark.parametrize("changes", [{"load": None}, {"models": "m"}, {"room": "8"}, {"replica": 3}])
async def test_a_replica_record_that_cannot_be_decoded_is_skipped_and_counted(
    fleet: Fleet, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    one, two = await fleet.join("one"), await fleet.join("two")
    await fleet.rewrite(two, **changes)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [info.replica for info in await fleet.pools.replicas(fleet.pool)] == [one.replica]
    assert fleet.skipped == ["replica"] * 3
    assert len([r for r in caplog.records if "record skipped" in r.getMessage()]) == 1, "logged once per record"


async def test_an_older_agent_tells_no_context_and_nothing_is_refused_for_it(fleet: Fleet) -> None:
    old, new = await fleet.join("old"), await fleet.join("new")
    load = msgspec.json.decode(msgspec.json.encode(new.load))
    await fleet.rewrite(new, load={**load, "max_model_len": 8192})
    directory = Directory(fleet.pools, _no_plans)
    del load["max_model_len"]
    await fleet.rewrite(old, load=load)
    await directory.refresh()
    assert directory.context(fleet.pool, "m") == 0, "the older replica may take longer requests"
    await fleet.pools.retire(fleet.pool, old.replica, leaving=True)
    directory = Directory(fleet.pools, _no_plans)
    await directory.refresh()
    assert directory.context(fleet.pool, "m") == 8192


async def test_a_slot_of_another_layout_is_read_or_skipped(fleet: Fleet) -> None:
    one, two = await fleet.join("one"), await fleet.join("two")
    packed = await fleet.execute("HGET", "board", one.replica)
    await fleet.execute("HSET", "board", one.replica, packed + b"more")
    await fleet.execute("HSET", "board", two.replica, packed[:10])
    assert [use.replica for use in await fleet.pools.slot_uses(fleet.pool)] == [one.replica]
    assert fleet.skipped == ["slot"]


async def test_a_slot_of_a_version_without_kv_cache_takes_requests_and_keeps_its_layout(fleet: Fleet) -> None:
    one = await fleet.join("one")
    packed = await fleet.execute("HGET", "board", one.replica)
    await fleet.execute("HSET", "board", one.replica, packed[:53])
    for number in range(2):
        stream = new_stream_id(time.time_ns() // 1_000_000 + number, os.urandom(10))
        work = Work(EngineRequest(stream, "chat", "m", msgspec.Raw(b"{}")), "1.aa", ACME, b"{}", None)
        placed = await fleet.pools.place(fleet.pool, work, [Candidate(one.replica, 0)], wait_s=60, jitter=0.0)
        assert isinstance(placed, Placed) and placed.candidates[0].in_flight == number
    assert (await fleet.pools.slot_uses(fleet.pool))[0].in_flight == 2


async def test_a_prefix_summary_of_another_format_is_skipped(fleet: Fleet) -> None:
    one = await fleet.join("one")
    await fleet.pools.put_prefix(fleet.pool, one.replica, b"12345")
    assert await fleet.pools.prefix(fleet.pool, one.replica) == b""
    assert fleet.skipped == ["prefix"]
    await fleet.rewrite(one, prefix_version=3)
    await Directory(fleet.pools, _no_plans).refresh()


async def test_a_plan_that_cannot_be_decoded_is_skipped_and_unknown_fields_are_ignored(fleet: Fleet) -> None:
    slot, plans = slot_of("control"), "sg:{control}:plans"
    record = msgspec.json.decode(encode_plan(PoolPlan(2, 0, 2)))
    bad = {**record, "ready": "two"}
    try:
        await fleet.client.execute(slot, "HSET", plans, fleet.pool, msgspec.json.encode({**record, "added": 1}))
        await fleet.client.execute(slot, "HSET", plans, f"{fleet.pool}-2", msgspec.json.encode(bad))
        found = await fleet.control.plans()
        assert found[fleet.pool] == PoolPlan(2, 0, 2) and f"{fleet.pool}-2" not in found
        assert fleet.skipped == ["plan"]
    finally:
        await fleet.client.execute(slot, "HDEL", plans, fleet.pool, f"{fleet.pool}-2")


async def test_work_of_another_version_reaches_the_agent_as_unreadable(fleet: Fleet) -> None:
    one = await fleet.join("one")
    stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
    work = Work(EngineRequest(stream, "chat", "m", msgspec.Raw(b"{}")), "1.aa", ACME, b"{}", None)
    await fleet.pools.place(fleet.pool, work, [Candidate(one.replica, 0)], wait_s=60, jitter=0.0)
    inbox = RedisInbox(fleet.client, fleet.pool, one.replica)
    ((_, _, got, *_),) = (await inbox.read(0.1)).arrivals
    assert got == work
    fields = msgspec.json.decode(msgspec.json.encode(work))
    for changed, readable in (({"added": 1}, True), ({"tier": "first"}, False)):
        payload = msgspec.json.encode({**fields, **changed})
        await fleet.execute("XADD", f"{one.replica}:inbox", "*", "s", stream, "w", payload, "t", "0 0")
        arrival = (await inbox.read(0.1)).arrivals[-1]
        assert (arrival.work == work) is readable and (arrival.work is None) is not readable
    inbox.close()


async def test_usage_with_more_figures_than_this_version_knows_is_read(fleet: Fleet) -> None:
    stream = StreamId(new_stream_id(time.time_ns() // 1_000_000, os.urandom(10)))
    await fleet.log.create(stream, Epoch(1, "aa"), ACME, b"{}", None)
    partition = fleet.log.partition(stream)
    key, slot = f"sg:{{p{partition}}}:{stream}:m", slot_of(f"p{partition}")
    await fleet.client.execute(slot, "HSET", key, "us", "1 2 3 4 5 6", "added", "x", "st", "paused")
    assert await fleet.log.settled(stream) == ("paused", Usage(1, 2, 3, 4, 5))
    assert await fleet.log.watch(stream, ACME, None, BEGINNING) is not None
    (head,) = await fleet.log.heads(partition, [stream], None)
    assert head is not None and head.status == "paused"
    tenant, hour = TenantId(f"t-{fleet.pool}"), 1
    name = f"sg:{{p{partition}}}:usage:{tenant}:{hour}"
    await fleet.client.execute(slot, "HSET", name, "m 0", 1, "m 4", 7, "m 6", 9)
    assert await fleet.log.usage(tenant, hour) == {"m": (1, Usage(output=7))}
