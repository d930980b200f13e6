"""The lease reaper's upkeep of the queues, on its ports alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any, cast

import pytest

from stream_fabric.limits import LEASE_RENEW_S, LEASE_TTL_S, REAP_EVERY_S
from stream_fabric.ports import Pools, StreamLog
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery.lease_reaper import SEEN_DEAD_S, LeaseReaper
from stream_fabric.stream.ids import ReplicaId, StreamId
from tests.support.virtual import on_virtual_time

QUEUED = 400


class CountingId(str):
    """A stream id that counts how often a set or dictionary looks at it."""

    __slots__ = ()
    hashed = 0

    def __hash__(self) -> int:
        CountingId.hashed += 1
        return super().__hash__()


class Overdue:
    """A pool and its streams: every queued stream has waited too long."""

    def __init__(self) -> None:
        self.streams = [cast(StreamId, CountingId(f"resp_{number:032x}")) for number in range(QUEUED)]
        self.ended: list[StreamId] = []

    async def queue_positions(self, pool: str, streams: Sequence[StreamId]) -> tuple[int, list[int]]:
        return QUEUED, []

    async def claim_recovery(self, pool: str, replica: str, ttl_s: float, nonce: str) -> bool:
        return True

    async def waiting(self, pool: str, *, overdue: bool = False) -> list[StreamId]:
        return list(self.streams)

    async def work(self, pool: str, stream: StreamId) -> None:
        pass

    async def remove_queued(self, pool: str, streams: Sequence[StreamId]) -> int:
        return len(streams)

    async def fence(self, stream: StreamId, *_: Any, **__: Any) -> bool:
        self.ended.append(stream)
        return True


async def test_the_work_of_a_queue_sweep_grows_with_the_queue_and_not_with_its_square() -> None:
    fabric = Overdue()
    CountingId.hashed = 0
    pools, log = cast(Pools, fabric), cast(StreamLog, fabric)
    await LeaseReaper(pools, log, HostClock(), HostRandom())._sweep_queue("pool")
    assert len(fabric.ended) == QUEUED
    assert CountingId.hashed < 20 * QUEUED


class Expired:
    """A pool whose one replica's lease has expired; each read of it takes ``answer_s``."""

    def __init__(self, clock: VirtualClock) -> None:
        self.claims = 0
        self.answer_s = 0.0
        self._clock = clock

    async def pools(self) -> list[str]:
        return ["pool"]

    async def expired(self, pool: str) -> list[ReplicaId]:
        self._clock.pass_s(self.answer_s)
        return [ReplicaId("r")]

    async def claim_recovery(self, pool: str, replica: str, ttl_s: float, nonce: str) -> bool:
        self.claims += 1
        return False


class WritesHeldUp(Expired):
    """A pool whose two replicas' leases have expired. Redis takes ``write_s`` for the first write of a look."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.write_s = 0.0
        self.moved: list[str] = []

    async def expired(self, pool: str) -> list[ReplicaId]:
        return [*await super().expired(pool), ReplicaId("s")]

    async def claim_recovery(self, pool: str, replica: str, ttl_s: float, nonce: str) -> bool:
        await super().claim_recovery(pool, replica, ttl_s, nonce)
        self._clock.pass_s(self.write_s if replica == "r" else 0.0)
        return True

    async def in_flight(self, pool: str, replica: ReplicaId) -> list[StreamId]:
        self.moved.append(replica)
        return []

    async def retire(self, pool: str, replica: ReplicaId) -> bool:
        return True


class Renewed(Expired):
    """The same, but the replica lives."""

    seen_expired = False

    async def expired(self, pool: str) -> list[ReplicaId]:
        """Redis looks at the lease in the middle of the time that the answer takes."""
        asked_s = self._clock.monotonic_us() / 1e6
        await super().expired(pool)
        if (asked_s + self.answer_s / 2) % (LEASE_RENEW_S + self.answer_s) < LEASE_TTL_S:
            return []
        self.seen_expired = True
        return [ReplicaId("r")]


class VirtualClock(HostClock):
    def __init__(self) -> None:
        self._now_us = 1_000_000

    def monotonic_us(self) -> int:
        return self._now_us

    def pass_s(self, seconds: float) -> None:
        self._now_us += int(seconds * 1e6)


@pytest.mark.parametrize(
    "looks",
    (
        pytest.param([(0.0, 0.4), (2.0, 0.0)], id="one outage"),
        pytest.param([(0.0, 0.43), (0.33, 0.43), (0.33, 0.0)], id="two outages, which began while the reaper paused"),
    ),
)
async def test_an_outage_of_redis_is_not_time_for_which_a_lease_was_seen_expired(
    looks: list[tuple[float, float]],
) -> None:
    """``looks``: seconds until the answer, and of the pause after it. After each outage the agents renew first."""
    clock = VirtualClock()
    fabric = Expired(clock)
    reaper = LeaseReaper(cast(Pools, fabric), cast(StreamLog, fabric), clock, HostRandom())
    for answer_s, rest_s in (*looks, (0.0, 0.46), (0.0, 0.46)):
        fabric.answer_s = answer_s
        await reaper._reap("pool")
        clock.pass_s(rest_s)
        assert fabric.claims == 0
    await reaper._reap("pool")
    assert fabric.claims == 1


async def test_an_outage_of_writes_is_not_time_for_which_a_lease_was_seen_expired() -> None:
    clock = VirtualClock()
    fabric = WritesHeldUp(clock)
    reaper = LeaseReaper(cast(Pools, fabric), cast(StreamLog, fabric), clock, HostRandom())
    fabric.write_s = 4.0  # a primary without its replicas answers reads
    while not fabric.claims:
        await reaper._reap("pool")
        clock.pass_s(0.46)
    fabric.write_s = 0.0
    await reaper._reap("pool")
    assert not fabric.moved, "moved before its agent could renew"
    clock.pass_s(0.46)
    await reaper._reap("pool")
    assert fabric.moved == ["r", "s"]


@pytest.mark.parametrize("write_s", (0.2, 1.0, 4.9))
async def test_a_dead_replica_is_found_though_writes_are_slow(write_s: float) -> None:
    clock = VirtualClock()
    fabric = WritesHeldUp(clock)
    fabric.write_s = write_s
    reaper = LeaseReaper(cast(Pools, fabric), cast(StreamLog, fabric), clock, HostRandom())
    began = clock.monotonic_us()
    while not fabric.moved:
        await reaper._reap("pool")
        clock.pass_s(0.46)
        assert clock.monotonic_us() - began < 60e6


@pytest.mark.parametrize("answer_s", (0.1, 0.4, 0.5, 1.0, 2.0, 4.9))
async def test_a_dead_replica_is_found_though_redis_is_slow(answer_s: float) -> None:
    """Soon, if a living replica's lease cannot expire in spite of it."""
    clock = VirtualClock()
    fabric = Expired(clock)
    reaper = LeaseReaper(cast(Pools, fabric), cast(StreamLog, fabric), clock, HostRandom())
    fabric.answer_s = answer_s
    began = clock.monotonic_us()
    while not fabric.claims:
        await reaper._reap("pool")
        clock.pass_s(0.43)
        assert clock.monotonic_us() - began < 60e6
    if answer_s <= LEASE_RENEW_S / 2:
        assert clock.monotonic_us() - began < 5e6
    else:
        assert clock.monotonic_us() - began > 5 * LEASE_TTL_S * 1e6


@pytest.mark.parametrize("answer_s", (0.4, 1.0, 2.5, 2.9, 3.5, 4.2, 4.9))
async def test_a_living_replica_is_left_alone_though_redis_is_so_slow_that_its_lease_expires(answer_s: float) -> None:
    """An agent renews its lease a second after the last renewal was answered: each takes ``answer_s``."""
    clock = VirtualClock()
    fabric = Renewed(clock)
    reaper = LeaseReaper(cast(Pools, fabric), cast(StreamLog, fabric), clock, HostRandom())
    fabric.answer_s = answer_s
    random = Random(7)
    for _ in range(2000):
        await reaper._reap("pool")
        clock.pass_s(REAP_EVERY_S * random.uniform(0.7, 1.0))
    assert not fabric.claims
    assert fabric.seen_expired == (LEASE_RENEW_S + answer_s > LEASE_TTL_S)


class Silent:
    """Two pools with dead replicas. Nothing answers about the pool ``silent`` and about the streams of replica ``a``.

    ``recovered`` has what was retired, and when, in seconds of the loop's clock.
    """

    def __init__(self) -> None:
        self.recovered: dict[ReplicaId, float] = {}

    async def pools(self) -> list[str]:
        return ["silent", "works"]

    async def expired(self, pool: str) -> list[ReplicaId]:
        if pool == "silent":
            await asyncio.Event().wait()
        return [replica for replica in (ReplicaId("a"), ReplicaId("b")) if replica not in self.recovered]

    async def queue_positions(self, pool: str, streams: Sequence[StreamId]) -> tuple[int, list[int]]:
        if pool == "silent":
            await asyncio.Event().wait()
        return 0, []

    async def claim_recovery(self, pool: str, replica: str, ttl_s: float, nonce: str) -> bool:
        return True

    async def in_flight(self, pool: str, replica: ReplicaId) -> list[StreamId]:
        if replica == "a":
            await asyncio.Event().wait()
        return []

    async def retire(self, pool: str, replica: ReplicaId) -> bool:
        self.recovered[replica] = asyncio.get_running_loop().time()
        return True


class LoopTime(HostClock):
    def monotonic_us(self) -> int:
        return int(asyncio.get_running_loop().time() * 1e6)


@on_virtual_time
async def test_a_silent_shard_delays_the_recovery_of_no_other_replica() -> None:
    fabric = Silent()
    reaper = LeaseReaper(cast(Pools, fabric), cast(StreamLog, fabric), LoopTime(), HostRandom())
    began = asyncio.get_running_loop().time()
    running = asyncio.create_task(reaper.run())
    await asyncio.sleep(4)
    running.cancel()
    assert set(fabric.recovered) == {"b"}
    assert fabric.recovered[ReplicaId("b")] - began < SEEN_DEAD_S + 3 * REAP_EVERY_S
