"""A gateway's background tasks when the fabric goes away."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest

from stream_fabric import errors
from stream_fabric.errors import FabricUnavailable, NotFound, StreamGwError
from stream_fabric.limits import ORPHAN_GRACE_S, TENANT_PAGES_READ_MAX, WATCHDOG_S
from stream_fabric.pool.placement import Queued
from stream_fabric.pool.records import Candidate
from stream_fabric.ports import Pools, StreamLog
from stream_fabric.process.host import HostClock
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis_url import Address
from stream_fabric.stream.cursor import BEGINNING, Cursor, Epoch
from stream_fabric.stream.frames import Delta, ErrorInfo, Status, encode
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId, partition_of
from stream_fabric.stream.log import Entry, Head, Page
from stream_fabric.stream.reader import Gap, Reset
from stream_gw.delivery.hub import Hub
from stream_gw.delivery.local_stream import Subscription
from stream_gw.delivery.watchdog import Watchdog
from stream_gw.routing import queue_positions as lines_module
from stream_gw.routing.directory import Directory
from stream_gw.routing.queue_positions import QueuePositions
from tests.fabric.test_placement import FAR_S, ask, info_of, work_of
from tests.gateway.in_process import failover_of, silent
from tests.support.proxy import Proxy
from tests.support.virtual import on_virtual_time
from tests.support.waiting import eventually


class Reading:
    """An outlet that keeps what it is told of the queue and of failures."""

    full = False

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self.failures: list[StreamGwError] = []

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None: ...

    def gap(self, gap: Gap) -> bool:
        return True

    def reset(self, reset: Reset) -> bool:
        return True

    def epoch_changed(self, epoch: str, head: int) -> None: ...

    def queued(self, position: int, of: int, warming_s: float | None) -> None:
        self.places.append((position, of))

    def end(self, status: Status) -> None: ...

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        self.failures.append(error)


@dataclass
class World:
    """A stream that waits in a pool's queue, and a link to its pool that can be cut."""

    hub: Hub
    watchdog: Watchdog
    lines: QueuePositions
    outlet: Reading
    proxy: Proxy


@pytest.fixture
async def world(redis_url: str, redis_client: RedisClient, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(lines_module, "_SEND_EVERY_S", 0.02)
    address = Address(*redis_client.url.addresses[0])
    async with Proxy.before(address.port, address.host) as proxy, asyncio.TaskGroup() as tasks:
        linked = RedisClient(proxy.url, timeout_s=1.0)
        await linked.start()
        pools, log = RedisPools(linked), RedisStreamLog(redis_client, Partitions(4))
        asked = ask()
        info = msgspec.structs.replace(info_of("a", slots=0, room=0), pool=f"pool-{asked.stream}")
        await pools.report(info, ttl_s=FAR_S, running={})
        placed = await pools.place(info.pool, work_of(asked), [Candidate(ReplicaId("a"), 0)], wait_s=60, jitter=0)
        assert isinstance(placed, Queued)
        directory = Directory(pools, RedisControl(linked).plans)
        await directory.refresh()
        hub = Hub(GatewayId("g"), log, HostClock(), silent, tasks)
        tenant, epoch = TenantId("acme"), Epoch(1, "aa")
        outlet = Reading()
        subscription = hub.expect(asked.stream, tenant, epoch).attach(outlet)
        await log.create(asked.stream, epoch, tenant, b"{}", GatewayId("g"))
        lines = QueuePositions(pools, directory, lambda: 0, hub.local)
        lines.add(info.pool, subscription)
        yield World(hub, Watchdog(hub, lines.holder_of, failover_of(hub.log), every_s=0.02), lines, outlet, proxy)
        subscription.close()
        proxy.refuse = False
        await pools.retire(info.pool, info.replica, leaving=True)
        await linked.close()


async def test_the_watchdog_outlives_an_outage_at_any_of_its_questions(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = asyncio.create_task(world.watchdog.run())
    world.proxy.refuse = True
    world.proxy.cut_all()
    await eventually(lambda: "not checked" in caplog.text or watchdog.done(), "the outage to be noticed")
    assert not watchdog.done()
    watchdog.cancel()


async def test_who_waits_is_told_again_after_an_outage(world: World, caplog: pytest.LogCaptureFixture) -> None:
    telling = asyncio.create_task(world.lines.run())
    await eventually(lambda: world.outlet.places, "the place in the queue")
    world.proxy.refuse = True
    world.proxy.cut_all()
    await eventually(lambda: "queue positions not read" in caplog.text, "the outage to be noticed")
    world.proxy.refuse = False
    world.outlet.places.clear()
    await eventually(lambda: world.outlet.places, "the place in the queue, again")
    assert set(world.outlet.places) == {(1, 1)}
    telling.cancel()


async def test_who_waits_again_is_told_until_more_of_the_stream_comes(world: World) -> None:
    """The replica of a stream died, and no other has room."""
    (local,) = world.hub.local.values()
    local.head = 7
    telling, watching = (asyncio.create_task(each.run()) for each in (world.lines, world.watchdog))
    await eventually(lambda: len(world.outlet.places) > 2, "the place in the queue")
    assert set(world.outlet.places) == {(1, 1)}
    watching.cancel()
    local.head = 8
    await eventually(lambda: not world.lines._by_pool, "the reader to be left out")
    told = len(world.outlet.places)
    await asyncio.sleep(0.1)
    assert len(world.outlet.places) == told
    telling.cancel()


class HalfSilentPools:
    """Pools of which ``silent`` says nothing, with a queued stream each."""

    async def queue_positions(self, pool: str, streams: Sequence[StreamId]) -> tuple[int, list[int]]:
        if pool == "silent":
            await asyncio.Event().wait()
        return 1, [1 for _ in streams]

    def warming(self, pool: str) -> None: ...

    def wake_s(self, pool: str) -> float:
        return 0.0


@on_virtual_time
async def test_a_silent_shard_delays_the_queue_positions_of_no_other_pool() -> None:
    async with asyncio.TaskGroup() as tasks:
        hub = Hub(GatewayId("g"), cast(StreamLog, AwayLog()), HostClock(), silent, tasks)
        pools, outlets = HalfSilentPools(), {pool: Reading() for pool in ("silent", "works")}
        lines = QueuePositions(cast(Pools, pools), cast(Directory, pools), lambda: 0, hub.local)
        readers = []
        for pool, outlet in outlets.items():
            readers.append(hub.expect(StreamId(pool), TenantId("acme"), Epoch(1, "aa")).attach(outlet))
            lines.add(pool, readers[-1])
        sending = tasks.create_task(lines.run())
        await asyncio.sleep(3.5)
        assert (outlets["works"].places, outlets["silent"].places) == ([(1, 1)] * 3, [])
        sending.cancel()
        for reader in readers:
            reader.close()


class AwayLog:
    """A log that does not answer, except to ``unwatch``."""

    partitions = 1

    async def heads(self, partition: int, streams: Sequence[StreamId], gateway: GatewayId) -> list[Head | None]:
        raise FabricUnavailable("Redis is away")

    async def unwatch(self, stream: StreamId, gateway: GatewayId) -> None: ...


async def produced(replica: ReplicaId | None, stream: StreamId) -> bool:
    return True


@on_virtual_time
async def test_a_reader_is_not_ended_for_an_outage_before_it_came() -> None:
    now, tenant = asyncio.get_running_loop().time, TenantId("acme")
    async with asyncio.TaskGroup() as tasks:
        hub = Hub(GatewayId("g"), cast(StreamLog, AwayLog()), HostClock(), silent, tasks)
        watchdog = tasks.create_task(Watchdog(hub, produced, failover_of(hub.log), every_s=1.0, away_s=10.0).run())
        early = hub.expect(StreamId("s"), tenant, Epoch(1, "aa")).attach(Reading())
        await asyncio.sleep(3)
        early.close()
        await asyncio.sleep(20)
        outlet, came_at = Reading(), now()
        hub.expect(StreamId("s"), tenant, Epoch(2, "bb")).attach(outlet)
        while not outlet.failures:
            await asyncio.sleep(0.5)
        assert 10 <= now() - came_at <= 12
        watchdog.cancel()


class HalfSilentLog(AwayLog):
    """A log whose partition 0 says nothing for five seconds, and then fails."""

    partitions = 2

    def __init__(self) -> None:
        self.read: list[int] = []

    async def heads(self, partition: int, streams: Sequence[StreamId], gateway: GatewayId) -> list[Head | None]:
        self.read.append(partition)
        if partition == 0:
            await asyncio.sleep(5)
            raise FabricUnavailable("Redis is away")
        return [Head(Epoch(1, "aa"), 0, "live", -1, "", 0, True, None, 0) for _ in streams]


@on_virtual_time
async def test_a_silent_shard_delays_the_checks_of_no_other() -> None:
    """Neither its partition nor its pool: what pub/sub loses of the others is found as soon as ever."""
    looked: list[StreamId] = []

    async def ask_silent_pool(replica: ReplicaId | None, stream: StreamId) -> bool:
        looked.append(stream)
        await asyncio.sleep(5)
        return True

    async with asyncio.TaskGroup() as tasks:
        log = HalfSilentLog()
        hub = Hub(GatewayId("g"), cast(StreamLog, log), HostClock(), silent, tasks)
        ids = [next(s for n in range(99) if partition_of(s := StreamId(f"s{n}"), 2) == each) for each in (0, 1)]
        readers = [hub.expect(each, TenantId("acme"), Epoch(1, "aa")).attach(Reading()) for each in ids]
        watchdog = tasks.create_task(Watchdog(hub, ask_silent_pool, failover_of(hub.log), every_s=1.0).run())
        await asyncio.sleep(10.5)
        assert (log.read.count(1), log.read.count(0)) == (10, 2)
        assert looked == [ids[1]] * 2, "one look-up of a stream at a time"
        watchdog.cancel()
        for reader in readers:
            reader.close()


class LiveLog(AwayLog):
    """A log whose streams are live and make no progress."""

    async def heads(self, partition: int, streams: Sequence[StreamId], gateway: GatewayId) -> list[Head | None]:
        return [Head(Epoch(1, "aa"), 0, "live", -1, "", 0, True, None, 0) for _ in streams]


@on_virtual_time
async def test_lookups_at_a_silent_shard_delay_those_of_no_other() -> None:
    found: list[float] = []

    async def find(replica: ReplicaId | None, stream: StreamId) -> bool:
        if stream.startswith("silent"):
            await asyncio.sleep(5)
            raise FabricUnavailable("Redis is away")
        found.append(asyncio.get_running_loop().time())
        return True

    async with asyncio.TaskGroup() as tasks:
        hub = Hub(GatewayId("g"), cast(StreamLog, LiveLog()), HostClock(), silent, tasks)
        ids = [*(StreamId(f"silent{number}") for number in range(100)), StreamId("works")]
        readers = [hub.expect(each, TenantId("acme"), Epoch(1, "aa")).attach(Reading()) for each in ids]
        begun = asyncio.get_running_loop().time()
        watchdog = tasks.create_task(Watchdog(hub, find, failover_of(hub.log)).run())
        await asyncio.sleep(2 * WATCHDOG_S + 1)
        assert found and found[0] - begun < 2 * WATCHDOG_S + 0.5
        watchdog.cancel()
        for reader in readers:
            reader.close()


@on_virtual_time
async def test_a_crowd_of_idle_streams_takes_few_tasks() -> None:
    """A task for each would take as much memory as a third of the stream."""
    most = 0

    async def find(replica: ReplicaId | None, stream: StreamId) -> bool:
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))
        await asyncio.sleep(0.01)
        looked.add(stream)
        return True

    looked: set[StreamId] = set()
    async with asyncio.TaskGroup() as tasks:
        hub = Hub(GatewayId("g"), cast(StreamLog, LiveLog()), HostClock(), silent, tasks)
        ids = [StreamId(f"s{number}") for number in range(1000)]
        readers = [hub.expect(each, TenantId("acme"), Epoch(1, "aa")).attach(Reading()) for each in ids]
        before = len(asyncio.all_tasks())
        watchdog = tasks.create_task(Watchdog(hub, find, failover_of(hub.log)).run())
        await asyncio.sleep(2 * WATCHDOG_S + 1)
        assert looked == set(ids)
        assert most - before < 50
        watchdog.cancel()
        for reader in readers:
            reader.close()


class ReplayedLog(AwayLog):
    """A log of long streams, with one frame in a page. Counts how many are read at once for each tenant."""

    def __init__(self) -> None:
        self.reading: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.read: Counter[str] = Counter()

    async def watch(
        self, stream: StreamId, tenant: TenantId | None, gateway: GatewayId | None, after: Cursor
    ) -> Page | None:
        name = stream.partition("-")[0]
        self.reading[name] += 1
        self.most[name] = max(self.most[name], self.reading[name])
        await asyncio.sleep(5.0 if stream.endswith("silent") else 0.01)
        self.reading[name] -= 1
        self.read[name] += 1
        return long_stream(TenantId(name), Entry(1, after.seq + 1, after.seq + 1, encode(Delta(0, "x"))))


def long_stream(tenant: TenantId, *entries: Entry) -> Page:
    return Page(Epoch(1, "aa"), 1000, "completed", b"{}", (), b"", tenant, entries)


def replaying(hub: Hub, stream: str) -> Subscription:
    page = long_stream(TenantId(stream.partition("-")[0]))
    return hub.follow(StreamId(stream), page, Cursor(1, 0), None, cast(Any, Reading()), exact=False)


@on_virtual_time
async def test_a_tenants_replays_take_turns_and_leave_the_loop_to_others() -> None:
    log = ReplayedLog()
    async with asyncio.TaskGroup() as tasks:
        hub = Hub(GatewayId("g"), cast(StreamLog, log), HostClock(), silent, tasks)
        readers = [replaying(hub, f"acme-{number}") for number in range(60)]
        readers.append(replaying(hub, "globex-0"))
        await asyncio.sleep(0.015)
        assert log.read["acme"] == 60, "nobody waits for the first page"
        log.most.clear()
        await asyncio.sleep(1)
        assert log.most["acme"] == TENANT_PAGES_READ_MAX
        assert log.read["globex"] > 10, "another tenant does not wait for their turns"
        for reader in readers:
            reader.close()


@on_virtual_time
async def test_replays_at_a_silent_shard_do_not_stop_those_of_the_same_tenant() -> None:
    log = ReplayedLog()
    async with asyncio.TaskGroup() as tasks:
        hub = Hub(GatewayId("g"), cast(StreamLog, log), HostClock(), silent, tasks)
        readers = [replaying(hub, f"acme-{number}-silent") for number in range(2 * TENANT_PAGES_READ_MAX)]
        readers.append(replaying(hub, "acme-works"))
        await asyncio.sleep(1)
        assert log.read["acme"] > 5, "their slots are free after a moment"
        for reader in readers:
            reader.close()


class EmptyLog(AwayLog):
    """A log that has lost its streams. It takes 3.9 s to answer the first time."""

    def __init__(self) -> None:
        self.answered_at = 0.0

    async def heads(self, partition: int, streams: Sequence[StreamId], gateway: GatewayId) -> list[Head | None]:
        if not self.answered_at:
            await asyncio.sleep(3.9)
            self.answered_at = asyncio.get_running_loop().time()
        return [None for _ in streams]


@on_virtual_time
async def test_a_late_answer_takes_nothing_off_the_time_for_a_lost_stream_to_reappear() -> None:
    now, outlet, log = asyncio.get_running_loop().time, Reading(), EmptyLog()
    async with asyncio.TaskGroup() as tasks:
        hub = Hub(GatewayId("g"), cast(StreamLog, log), HostClock(), silent, tasks)
        watchdog = tasks.create_task(Watchdog(hub, produced, failover_of(hub.log)).run())
        hub.expect(StreamId("s"), TenantId("acme"), Epoch(1, "aa")).attach(outlet)
        while not outlet.failures:
            await asyncio.sleep(0.1)
        assert ORPHAN_GRACE_S < now() - log.answered_at < ORPHAN_GRACE_S + WATCHDOG_S
        watchdog.cancel()


async def test_a_stream_whose_readers_have_left_takes_no_later_reader_with_it() -> None:
    """The watchdog abandons streams that it listed before it waited for their heads."""
    async with asyncio.TaskGroup() as tasks:
        hub = Hub(GatewayId("g"), cast(StreamLog, AwayLog()), HostClock(), silent, tasks)
        left = hub.expect(StreamId("s"), TenantId("acme"), Epoch(1, "aa")).attach(Reading())
        left.close()
        outlet = Reading()
        came = hub.expect(StreamId("s"), TenantId("acme"), Epoch(1, "aa")).attach(outlet)
        hub.abandon(left.local, FabricUnavailable("Redis is away"))
        assert list(hub.local.values()) == [came.local] and not outlet.failures
        hub.abandon(came.local, FabricUnavailable("Redis is away"))
        assert not hub.local and len(outlet.failures) == 1


async def test_a_reader_whose_stream_is_deleted_hears_so_at_once(redis_client: RedisClient) -> None:
    """Else it waits, as after a loss of Redis, for a producer that makes the stream again."""
    log, stream, tenant = RedisStreamLog(redis_client, Partitions(4)), ask().stream, TenantId("acme")
    await log.create(stream, Epoch(1, "aa"), tenant, b"{}", None)
    await log.cancel(stream, tenant)
    outlet, loop = Reading(), asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        hub = Hub(GatewayId("g"), log, HostClock(), silent, tasks)
        page = await hub.read_page(stream, tenant, BEGINNING)
        assert await log.delete(stream, tenant)
        since = loop.time()
        hub.follow(stream, page, BEGINNING, None, outlet, exact=True)
        await eventually(lambda: outlet.failures, "the reader's error")
    assert loop.time() - since < ORPHAN_GRACE_S / 2
    assert [type(error) for error in outlet.failures] == [NotFound] and "was deleted" in str(outlet.failures[0])


async def test_servers_that_are_subscribed_one_after_another_at_the_start_are_no_outage() -> None:
    """Else a gateway of a cluster waits for lost frames: it accepts a cursor that another stream gave."""
    returns: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        hub = Hub(GatewayId("g"), cast(StreamLog, EmptyLog()), HostClock(), silent, tasks)
        hub.on_return = lambda: returns.append(asyncio.get_running_loop().time())
        hub.resubscribed(["sg:{p0}:>g", "sg:{p2}:>g"])
        hub.resubscribed(["sg:{p1}:>g"])
        assert not hub.recently_away and not returns
        hub.resubscribed(["sg:{p1}:>g"])
        assert hub.recently_away and len(returns) == 1


def all_of(kind: type[StreamGwError]) -> list[type[StreamGwError]]:
    return [kind, *(found for below in kind.__subclasses__() for found in all_of(below))]


KINDS = all_of(StreamGwError)
PLAIN = [kind for kind in KINDS if "retry_after_s" in inspect.signature(kind).parameters]


def test_an_error_that_makes_its_own_message_is_no_429_or_503() -> None:
    assert [kind for kind in KINDS if kind not in PLAIN and kind.http_status in (429, 503)] == []


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_every_429_and_503_says_when_to_come_back(kind: type[StreamGwError]) -> None:
    error = kind("words")
    assert (error.retry_after_s is not None) is (kind.http_status in (429, 503))
    assert kind("words", retry_after_s=7).retry_after_s == 7
    # As the terminal of a stream repeats it
    again = errors.from_info(ErrorInfo.of(FabricUnavailable("words")))
    assert again.retry_after_s == 1
