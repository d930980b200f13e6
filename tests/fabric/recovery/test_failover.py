"""Where a failover places a stream, and how long it may wait there."""

from __future__ import annotations

import msgspec
import pytest

from stream_fabric.pool.placement import Placed, Queued
from stream_fabric.pool.records import Candidate, Work
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery.failover import Failover, placement_record, wait_s
from stream_fabric.recovery.lease_reaper import LOST
from stream_fabric.redis.client import Partitions
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.ids import ReplicaId, StreamId
from tests.fabric.test_pools import ACME, Pool, new_stream, pool, replica, work  # noqa: F401  # the fixture

SKEW_US = 30_000_000


class SkewedClock(HostClock):
    """The fabric's clock on a host whose own clock is 30 s ahead of it."""

    def now_us(self) -> int:
        return super().now_us() - SKEW_US


class Setting:
    def __init__(self, pool: Pool) -> None:  # noqa: F811
        self.pool = pool
        self.log = RedisStreamLog(pool.client, Partitions(4), replica("any"))
        self.failover = Failover(pool.pools, self.log, HostClock(), HostRandom())

    async def begin(self, on: ReplicaId) -> StreamId:
        stream = new_stream()
        await self.log.create(stream, Epoch(1, "aa"), ACME, b"{}", None)
        assert await self.pool.place(stream, on) == on
        return stream

    async def move(self, stream: StreamId, lost: ReplicaId) -> str | None:
        """Have another replica take the stream; return the one that has it then."""
        await self.failover.rescue(self.pool.name, lost, stream, LOST)
        return await self.pool.pools.holder(self.pool.name, stream)


async def test_a_third_attempt_does_not_go_back_to_the_first_replica_while_another_lives(pool: Pool) -> None:  # noqa: F811
    setting = Setting(pool)
    first, second, third = replica("one"), replica("two"), replica("three")
    await pool.renew(first)
    stream = await setting.begin(first)
    await pool.renew(second)
    assert await setting.move(stream, first) == second
    busy = msgspec.structs.replace(pool.info(third), prefill_ms=5_000.0)
    await pool.pools.report(busy, ttl_s=30.0, running={})
    assert await setting.move(stream, second) == third
    moved = await pool.pools.work(pool.name, stream)
    assert moved is not None and (moved.attempt, moved.tried) == (3, (first, second))


async def test_a_third_attempt_goes_back_to_the_first_replica_when_no_other_lives(pool: Pool) -> None:  # noqa: F811
    setting = Setting(pool)
    first, second = replica("one"), replica("two")
    await pool.renew(first)
    stream = await setting.begin(first)
    await pool.renew(second)
    assert await setting.move(stream, first) == second
    assert await setting.move(stream, second) == first


def test_work_of_releases_without_tried_replicas_can_be_read_and_the_other_way_round() -> None:
    plain = work(new_stream())
    assert b"tried" not in msgspec.json.encode(plain)
    tried = msgspec.structs.replace(plain, tried=(ReplicaId("a"), ReplicaId("b")))
    assert msgspec.json.decode(msgspec.json.encode(tried), type=Work) == tried

    class Previous(msgspec.Struct):
        attempt: int = 1

    assert msgspec.json.decode(msgspec.json.encode(tried), type=Previous).attempt == 1


def test_a_deadline_is_compared_with_the_fabrics_clock() -> None:
    clock = SkewedClock()
    deadline_ms = clock.now_us() // 1000 + 5_000
    request = msgspec.structs.replace(work(new_stream()).request, deadline_unix_ms=deadline_ms)
    dated = msgspec.structs.replace(work(request.stream), request=request)
    assert wait_s(dated, clock.now_us()) == pytest.approx(5.0, abs=0.5)
    assert wait_s(dated, clock.now_us(), 2.0) == 2.0
    assert wait_s(dated, clock.now_us() + 10_000_000) == 0.0


def test_a_placement_record_is_dated_with_the_fabrics_clock() -> None:
    for placed in (Placed(ReplicaId("r"), "load", ()), Queued(3, ())):
        record = msgspec.json.decode(placement_record(work(new_stream()), placed, 1_700_000_000_123_456))
        assert record["at_unix_ms"] == 1_700_000_000_123


async def test_a_failover_waits_for_a_deadline_of_the_fabrics_clock(pool: Pool) -> None:  # noqa: F811
    """By the host's own clock the deadline would have passed 10 s ago."""
    setting, clock = Setting(pool), SkewedClock()
    setting.failover = Failover(pool.pools, setting.log, clock, HostRandom())
    first, full = replica("one"), replica("full")
    await pool.renew(first)
    stream = new_stream()
    await setting.log.create(stream, Epoch(1, "aa"), ACME, b"{}", None)
    deadline_ms = clock.now_us() // 1000 + 20_000
    request = msgspec.structs.replace(work(stream).request, deadline_unix_ms=deadline_ms)
    dated = msgspec.structs.replace(work(stream), request=request)
    await pool.pools.place(pool.name, dated, [Candidate(first, 0)], wait_s=1.0, jitter=0.0)
    await pool.renew(full, room=0)
    assert await setting.move(stream, first) == "queue"
    assert await pool.pools.waiting(pool.name, overdue=True) == []
