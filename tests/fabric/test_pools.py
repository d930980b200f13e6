"""Leases, placement, inboxes and the reaper, on real Redis."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest

from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import CANDIDATES_MAX
from stream_fabric.pool.placement import Placed, Queued, ReplicaState
from stream_fabric.pool.records import Arrival, Candidate, EngineLoad, EngineRequest, LeaseReport, ReplicaInfo, Work
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery import lease_reaper
from stream_fabric.recovery.failover import Failover
from stream_fabric.recovery.lease_reaper import LOST, LeaseReaper
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.inbox import RedisInbox
from stream_fabric.redis.pools import QUEUE_SAMPLE_MAX, RedisPools, pool_prefix, pool_slot
from stream_fabric.redis.streams import RedisStreamLog, check_partitions
from stream_fabric.redis.topology import slot_of
from stream_fabric.stream.cursor import BEGINNING, Epoch
from stream_fabric.stream.frames import End, ErrorInfo, Usage, decode, encode_text
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId, new_stream_id
from stream_fabric.stream.log import Append, AppendCode
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

ACME = TenantId("acme")


class Pool:
    """One pool of the shared Redis, of this test's own."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.pools = RedisPools(client)
        self.name = f"pool-{os.urandom(4).hex()}"

    def info(
        self, replica: ReplicaId, state: ReplicaState = "ready", slots: int = 4, room: int | None = None
    ) -> ReplicaInfo:
        load = EngineLoad(0, 0, slots)
        room = slots if room is None else room
        return ReplicaInfo(
            replica, self.name, "sim", ("m",), state, load, True, room, prefill_per_s=8000, decode_per_s=1e3
        )

    async def renew(
        self,
        replica: ReplicaId,
        *running: StreamId,
        state: ReplicaState = "ready",
        slots: int = 4,
        room: int | None = None,
        ttl_s: float = 30.0,
        ended: Sequence[StreamId] = (),
    ) -> LeaseReport:
        info = self.info(replica, state, slots, room)
        return await self.pools.report(info, ttl_s=ttl_s, ended=ended, running=dict.fromkeys(running, ""))

    async def place(self, stream: StreamId, *replicas: ReplicaId) -> str:
        """Where it went: the replica, or the queue."""
        candidates = [Candidate(replica, 0) for replica in replicas]
        placed = await self.pools.place(self.name, work(stream), candidates, wait_s=60, jitter=0.0)
        return placed.replica if isinstance(placed, Placed) else "queue"

    async def flight(self, replica: ReplicaId) -> set[StreamId]:
        return set(await self.pools.in_flight(self.name, replica))

    def inbox(self, replica: ReplicaId) -> RedisInbox:
        return RedisInbox(self.client, self.name, replica)


def replica(name: str) -> ReplicaId:
    return ReplicaId(f"{name}-{os.urandom(3).hex()}")


def new_stream() -> StreamId:
    return new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))


def work(stream: StreamId) -> Work:
    request = EngineRequest(stream, "chat", "m", msgspec.Raw(b'{"messages":[]}'))
    return Work(request, "1.aa", ACME, b'{"facts":1}', 2.0)


async def test_who_sits_in_a_pool_is_told_the_dead_too(pool: Pool) -> None:
    assert await pool.pools.slot_uses(pool.name) == []
    busy, dead = replica("busy"), replica("dead")
    await pool.renew(busy, new_stream(), new_stream(), ttl_s=30)
    await pool.renew(dead, new_stream(), ttl_s=0.05)
    assert await pool.place(new_stream(), busy) == busy

    async def over() -> bool:
        return dead in await pool.pools.expired(pool.name)

    await eventually(over, "the lease to end")
    seats = {held.replica: held for held in await pool.pools.slot_uses(pool.name)}
    assert seats.keys() == {busy, dead}
    assert 20 < seats[busy].left_s <= 30 and seats[busy].in_flight == 3
    assert -10 < seats[dead].left_s < 0 and seats[dead].in_flight == 1


async def test_the_lines_of_a_pool_are_told_by_tier(pool: Pool) -> None:
    full = replica("full")
    await pool.renew(full, room=0)
    assert await pool.pools.tier_queues(pool.name) == [(0, 0.0, 0, 0)] * 4
    for number in range(QUEUE_SAMPLE_MAX + 4):
        asked = msgspec.structs.replace(work(new_stream()), tier=2 if number else 0, prompt_tokens=10, output_tokens=3)
        candidates = [Candidate(full, 0)]
        assert isinstance(await pool.pools.place(pool.name, asked, candidates, wait_s=60, jitter=0.0), Queued)
    one, none, many, free = await pool.pools.tier_queues(pool.name)
    assert none == free == (0, 0.0, 0, 0)
    assert (one.depth, one.prompt_tokens, one.output_tokens) == (1, 10, 3)
    count = QUEUE_SAMPLE_MAX + 3
    assert (many.depth, many.prompt_tokens, many.output_tokens) == (count, 10 * count, 3 * count), (
        "of more than is read"
    )
    assert one.oldest_s > many.oldest_s > 0


async def test_place_hands_the_work_over_and_is_idempotent(pool: Pool) -> None:
    one, two = replica("one"), replica("two")
    await pool.renew(one)
    await pool.renew(two, new_stream(), slots=100)
    stream = new_stream()
    assert await pool.place(stream, one, two) == one
    for _ in range(3):
        assert await pool.place(stream, two, one) == one
    assert await pool.pools.in_flight(pool.name, one) == [stream]
    assert stream not in await pool.pools.in_flight(pool.name, two)
    inbox = pool.inbox(one)
    ((entry_id, name, got, waited_us, handed_us),) = (await inbox.read(0.1)).arrivals
    assert waited_us == 0
    assert handed_us / 1e6 == pytest.approx(time.time(), abs=5)
    assert (name, got) == (stream, work(stream))
    assert await pool.pools.work(pool.name, stream) == got
    assert len((await inbox.read(0.1)).arrivals) == 1  # it stays until it is done with
    await inbox.read(0.001, [(entry_id, stream)])
    assert (await inbox.read(0.01)).arrivals == []
    inbox.close()


async def test_room_is_respected_under_64_concurrent_callers(pool: Pool) -> None:
    one, two = replica("one"), replica("two")
    await pool.renew(one, slots=20, room=24)
    await pool.renew(two, slots=10, room=12)
    replies = await asyncio.gather(*(pool.place(new_stream(), one, two) for _ in range(64)))
    assert Counter(replies) == {one: 24, two: 12, "queue": 28}
    assert (len(await pool.flight(one)), len(await pool.flight(two))) == (24, 12)


async def test_only_ready_and_living_replicas_get_work(pool: Pool) -> None:
    ready, draining, starting, dead = (replica(name) for name in ("ready", "draining", "starting", "dead"))
    await pool.renew(draining, state="draining")
    await pool.renew(starting, state="starting")
    await pool.renew(dead, ttl_s=0.001)
    await eventually(lambda: _is_expired(pool, dead))
    waiting = new_stream()
    assert await pool.place(waiting, draining, starting, dead, replica("unknown")) == "queue"
    assert (await pool.renew(draining, state="draining")).pulled == 0
    assert await pool.renew(ready, slots=2) == LeaseReport("", 1, 0)
    assert await pool.place(new_stream(), draining, ready, dead) == ready
    assert await pool.place(new_stream(), draining, ready, dead) == "queue"
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
    assert await pool.place(c, one) == "queue"
    inbox = pool.inbox(one)
    entries = (await inbox.read(0.1)).arrivals
    # Requests still in the inbox count, whatever the agent's list says
    await pool.renew(one, slots=2)
    assert await pool.flight(one) == {a, b}
    await inbox.read(0.001, [(e.entry, e.stream) for e in entries])
    assert (await pool.renew(one, a, b, slots=2)).waiting == 1
    # `b` ended, however it did: with the next renewal its slot goes to who waits
    assert await pool.renew(one, a, slots=2) == LeaseReport("", 1, 0)
    assert await pool.flight(one) == {a, c}
    # A renewal that was composed before the agent read the inbox leaks nothing and loses nothing
    await pool.renew(one, a, slots=2)
    assert await pool.flight(one) == {a, c}
    # Nor one that came after the acknowledgement, which has a connection of its own
    entries = (await inbox.read(0.1)).arrivals
    await inbox.read(0.001, [(e.entry, e.stream) for e in entries])
    await pool.renew(one, a, slots=2)
    assert await pool.flight(one) == {a, c}
    assert await pool.pools.work(pool.name, c) is not None and await _holder(pool, c) == one
    # The list of the next one is newer
    await pool.renew(one, a, slots=2)
    assert await pool.flight(one) == {a}
    assert await pool.pools.work(pool.name, c) is None and await _holder(pool, c) is None
    inbox.close()


async def test_an_ended_stream_leaves_nothing_in_the_pool(pool: Pool) -> None:
    one, stream = replica("one"), new_stream()
    await pool.renew(one)
    await pool.place(stream, one)
    inbox = pool.inbox(one)
    ((entry_id, *_),) = (await inbox.read(0.1)).arrivals
    await inbox.read(0.001, [(entry_id, stream)])
    inbox.close()
    assert await pool.pools.holder(pool.name, stream) == one
    await pool.pools.report(pool.info(one), ttl_s=None, ended=[stream])
    assert await pool.pools.holder(pool.name, stream) is None
    assert await pool.pools.work(pool.name, stream) is None
    assert await pool.flight(one) == set()


async def test_what_an_operator_asks_for_is_heard_at_the_next_report(pool: Pool) -> None:
    one = replica("one")
    assert (await pool.renew(one)).desired == ""
    await pool.pools.request_state(pool.name, one, "ready", "controller")
    heard = await pool.renew(one)
    assert (heard.desired, heard.asked_by) == ("ready", "controller")
    await pool.pools.request_state(pool.name, one, "draining")
    await pool.pools.request_state(pool.name, one, "draining", "health")
    heard = await pool.renew(one)
    assert (heard.desired, heard.asked_by) == ("draining", "operator"), "who asked first"
    assert await pool.pools.retire(pool.name, one, leaving=True)
    heard = await pool.renew(one)
    assert (heard.desired, heard.asked_by) == ("", ""), "of who has left nothing is kept"


async def test_what_a_replica_holds_of_prompts_is_read_as_it_was_written(pool: Pool) -> None:
    one = replica("one")
    assert await pool.pools.prefix(pool.name, one) == b""
    await pool.pools.put_prefix(pool.name, one, bytes(range(256)) * 4)
    assert await pool.pools.prefix(pool.name, one) == bytes(range(256)) * 4


async def test_work_of_another_version_is_told_from_work(pool: Pool) -> None:
    one = replica("one")
    key = f"sg:{{pool:{pool.name}}}:{one}:inbox"
    await pool.client.execute(slot_of(f"pool:{pool.name}"), "XADD", key, "*", "s", "resp_x", "w", b'{"new":1}')
    inbox = pool.inbox(one)
    ((_, stream, got, *_),) = (await inbox.read(0.1)).arrivals
    assert (stream, got) == ("resp_x", None)
    inbox.close()


async def test_invariant_7_no_leaked_slot_after_a_total_loss(redis_server: RedisServer) -> None:
    client = RedisClient(redis_server.url)
    await client.start()
    pool = Pool(client)
    one, two, stream = replica("one"), replica("two"), new_stream()
    await pool.renew(one)
    await pool.place(stream, one)
    assert (await pool.renew(one, stream)).lost == ()
    redis_server("FLUSHALL")
    for _ in range(2):  # until the pool has the request again
        assert (await pool.renew(one, stream)).lost == (stream,)
        assert await pool.flight(one) == {stream}
    await pool.pools.restore(pool.name, two, work(stream))  # it has let the stream go meanwhile
    assert await pool.pools.work(pool.name, stream) is None
    await pool.pools.restore(pool.name, one, work(stream))
    newer = msgspec.structs.replace(work(stream), epoch="2.bb")
    await pool.pools.restore(pool.name, one, newer)  # a repeat that is late
    assert await pool.pools.work(pool.name, stream) == work(stream)
    assert (await pool.renew(one, stream)).lost == ()
    assert (await pool.renew(one, ended=[stream])).lost == ()
    assert await pool.pools.work(pool.name, stream) is None
    assert (await pool.client.execute(pool_slot(pool.name), "HGETALL", pool_prefix(pool.name) + "bytes")) == {}
    await client.close()


async def test_retire_spares_a_replica_that_came_back_and_one_whose_streams_are_not_looked_after(pool: Pool) -> None:
    one, stream = replica("one"), new_stream()
    await pool.renew(one, stream)
    assert not await pool.pools.retire(pool.name, one)
    assert not await pool.pools.retire(pool.name, one, leaving=True)
    assert await pool.flight(one) == {stream}
    await pool.pools.remove_in_flight(pool.name, one, [stream])
    assert await pool.pools.retire(pool.name, one, leaving=True)
    assert await pool.pools.replicas(pool.name) == []
    assert await pool.place(new_stream(), one) == "queue"


async def test_every_key_of_a_pool_expires(pool: Pool) -> None:
    one = replica("one")
    await pool.renew(one, new_stream(), slots=3)
    await pool.place(new_stream(), one)
    await pool.pools.put_prefix(pool.name, one, b"1234")
    await pool.pools.request_state(pool.name, one, "ready")
    await pool.renew(one, new_stream())
    slot = slot_of(f"pool:{pool.name}")
    keys = []
    async for key in _keys(pool, slot):
        keys.append(key)
        assert await pool.client.execute(slot, "PTTL", key) > 0, key
    assert len(keys) >= 8


async def _keys(pool: Pool, slot: int) -> AsyncIterator[str]:
    pattern, cursor = f"sg:{{pool:{pool.name}}}:*", "0"
    while True:
        reply = await pool.client.execute(slot, "SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        for key in reply[1]:
            yield key.decode()
        cursor = reply[0].decode()
        if cursor == "0":
            return


async def test_an_inbox_reader_wakes_at_once_and_survives_its_connection(pool: Pool) -> None:
    one = replica("one")
    await pool.renew(one)
    inbox = pool.inbox(one)
    reading = asyncio.create_task(inbox.read(5.0))
    stream = new_stream()
    await pool.place(stream, one)
    started = asyncio.get_running_loop().time()
    ((_, _, got, *_),) = (await reading).arrivals
    assert got is not None and got.request.stream == stream
    assert asyncio.get_running_loop().time() - started < 4.0
    inbox.close()
    assert len((await inbox.read(0.1)).arrivals) == 1
    inbox.close()


class Streams:
    """Streams that a replica has begun, in the shared Redis."""

    def __init__(self, pool: Pool, owner: ReplicaId) -> None:
        self.log = RedisStreamLog(pool.client, Partitions(4), owner)

    async def begin(self) -> StreamId:
        stream = new_stream()
        await self.log.create(stream, Epoch(1, "aa"), ACME, b"{}", None)
        item = Append(stream, "1.aa", 1, 1, encode_text(0, "x"), Usage(output=1))
        ((code, *_),) = await self.log.append(self.log.partition(stream), [item])
        assert code is AppendCode.OK
        return stream

    async def status(self, stream: StreamId) -> str:
        page = await self.log.watch(stream, ACME, None, BEGINNING)
        assert page is not None
        return page.status


def failover_of(pool: Pool, log: RedisStreamLog) -> Failover:
    return Failover(pool.pools, log, HostClock(), HostRandom())


def reaper_of(pool: Pool, log: RedisStreamLog) -> LeaseReaper:
    return LeaseReaper(pool.pools, log, HostClock(), HostRandom())


async def test_invariant_6_no_zombie_a_dead_replicas_streams_go_elsewhere_or_end(pool: Pool) -> None:
    dead, alive = replica("dead"), replica("alive")
    of_dead, of_alive = Streams(pool, dead), Streams(pool, alive)
    lost, kept, begun = await of_dead.begin(), await of_alive.begin(), await of_dead.begin()
    unread = new_stream()
    await of_dead.log.create(unread, Epoch(1, "aa"), ACME, b"{}", None)
    await pool.renew(dead)
    await pool.place(begun, dead)
    await _read(pool, dead)
    await pool.renew(dead, lost, begun, ttl_s=0.3)  # nobody knows what `lost` was asked to be
    await pool.renew(alive, kept)
    await pool.place(unread, dead)  # in its inbox when it dies
    reapers = [asyncio.create_task(reaper_of(pool, of_alive.log).run()) for _ in range(3)]
    started = asyncio.get_running_loop().time()
    try:
        await eventually(lambda: _gone(pool, dead), "the reaper")
    finally:
        for reaper in reapers:
            reaper.cancel()
        await asyncio.gather(*reapers, return_exceptions=True)
    assert asyncio.get_running_loop().time() - started < 8.0
    streams = (lost, unread, begun, kept)
    assert [await of_dead.status(s) for s in streams] == ["failed", "live", "live", "live"]
    page = await of_dead.log.watch(lost, ACME, None, BEGINNING)
    assert page is not None
    assert decode(page.entries[-1].frames) == End("failed", Usage(output=1), ErrorInfo.of(LOST))
    assert page.bases == ((2, 1),)  # three reapers, one fence
    assert await pool.flight(alive) == {kept, unread, begun}
    moved = {e.stream: e.work for e in await _read(pool, alive)}
    assert {(w.epoch[:2], w.base, w.attempt) for w in moved.values() if w is not None} == {("2.", 0, 2), ("2.", 1, 2)}
    # The dead one's late words do not count
    item = Append(begun, "1.aa", 2, 2, encode_text(0, "x"), Usage(output=2))
    ((code, *_),) = await of_dead.log.append(of_dead.log.partition(begun), [item])
    assert code is AppendCode.FENCED


async def _read(pool: Pool, name: ReplicaId) -> list[Arrival]:
    inbox = pool.inbox(name)
    entries = (await inbox.read(0.1)).arrivals
    await inbox.read(0.001, [(e.entry, e.stream) for e in entries])
    inbox.close()
    return entries


async def test_a_stream_that_kills_its_replicas_is_not_handed_on_for_ever(pool: Pool) -> None:
    streams = Streams(pool, replica("any"))
    stream = new_stream()
    await streams.log.create(stream, Epoch(1, "aa"), ACME, b"{}", None)
    rescue = failover_of(pool, streams.log)
    first, second, third, fourth = (replica(name) for name in ("one", "two", "three", "four"))
    await pool.renew(first)
    assert await pool.place(stream, first) == first
    for one, other in ((first, second), (second, third)):
        await pool.renew(one, state="draining")
        await pool.renew(other)
        await rescue.rescue(pool.name, one, stream, LOST)
        assert await pool.pools.holder(pool.name, stream) == other
        assert await streams.status(stream) == "live"
    await pool.renew(fourth)
    await rescue.rescue(pool.name, third, stream, LOST)
    assert await streams.status(stream) == "failed"
    assert await pool.pools.holder(pool.name, stream) is None


async def test_many_who_rescue_a_stream_at_once_hand_it_to_one_that_can_go_on(pool: Pool) -> None:
    """A claim runs out while its owner is still at it; an agent hands over what a reaper has begun with."""
    dead, alive, late = replica("dead"), replica("alive"), replica("late")
    streams = Streams(pool, dead)
    await pool.renew(dead)
    await pool.renew(alive, slots=100)
    for _ in range(10):
        stream = await streams.begin()
        assert await pool.place(stream, dead) == dead
        await asyncio.gather(*(failover_of(pool, streams.log).rescue(pool.name, dead, stream, LOST) for _ in range(5)))
        ((_, _, got, *_),) = await _read(pool, alive)
        assert got is not None
        mine = Append(stream, got.epoch, got.base + 1, got.base + 1, encode_text(0, "y"), Usage(output=2))
        # One more that comes late, before the new producer's first word
        await failover_of(pool, streams.log).rescue(pool.name, dead, stream, LOST)
        ((code, *_),) = await RedisStreamLog(pool.client, Partitions(4), alive).append(
            streams.log.partition(stream), [mine]
        )
        assert code is AppendCode.OK
        assert await pool.pools.holder(pool.name, stream) == alive
    await pool.renew(late)


async def test_a_pinned_stream_is_rescued_in_its_region_or_ends(pool: Pool) -> None:
    async def join(name: ReplicaId, region: str) -> None:
        await pool.pools.report(msgspec.structs.replace(pool.info(name), region=region), ttl_s=30, running={})

    dead, far, near = replica("dead"), replica("far"), replica("near")
    streams = Streams(pool, dead)
    await join(dead, "eu")
    await join(far, "us")

    async def lose() -> StreamId:
        stream = await streams.begin()
        pinned = msgspec.structs.replace(work(stream), regions=("eu",))
        await pool.pools.place(pool.name, pinned, [Candidate(dead, 0)], wait_s=60, jitter=0.0)
        await failover_of(pool, streams.log).rescue(pool.name, dead, stream, LOST)
        return stream

    stream = await lose()
    assert await streams.status(stream) == "failed", "only a replica of another region lives: it is not moved"
    await join(near, "eu")
    stream = await lose()
    assert await pool.pools.holder(pool.name, stream) == near
    work_there = await pool.pools.work(pool.name, stream)
    assert work_there is not None and work_there.regions == ("eu",), "the next failover keeps the pin"
    assert await pool.flight(far) == set()


async def test_a_rescue_looks_at_no_more_candidates_than_placement_may(pool: Pool) -> None:
    dead = replica("dead")
    streams = Streams(pool, dead)
    await pool.renew(dead)
    stream = await streams.begin()
    assert await pool.place(stream, dead) == dead
    for _ in range(CANDIDATES_MAX + 6):
        await pool.renew(replica("other"))
    await failover_of(pool, streams.log).rescue(pool.name, dead, stream, LOST)
    (record,) = await streams.log.placements(stream)
    assert len(msgspec.json.decode(record)["candidates"]) == CANDIDATES_MAX


async def test_one_pool_that_cannot_be_read_keeps_no_other_from_its_reaper(pool: Pool) -> None:
    dead, alive, streams = replica("dead"), replica("alive"), Streams(pool, replica("any"))
    broken = Pool(pool.client)
    await broken.renew(replica("r"), state="draining")
    assert await broken.place(new_stream()) == "queue"
    slot, prefix = slot_of(f"pool:{broken.name}"), f"sg:{{pool:{broken.name}}}:"
    await pool.client.execute(slot, "SET", prefix + "late", "not what it should be", "PX", 60_000)
    await pool.renew(dead)
    stream = await streams.begin()
    assert await pool.place(stream, dead) == dead
    await pool.renew(dead, ttl_s=0.001)
    await pool.renew(alive)
    reaper = asyncio.create_task(reaper_of(pool, streams.log).run())

    async def rescued() -> bool:
        if reaper.done():
            reaper.result()
        return await pool.pools.holder(pool.name, stream) == alive

    try:
        await eventually(rescued, "the rescue")
    finally:
        reaper.cancel()
        await asyncio.gather(reaper, return_exceptions=True)
        await pool.client.execute(slot, "DEL", *[key async for key in _keys(broken, slot)])


async def test_the_queue_is_read_by_one_reaper_at_a_time_and_survives_work_of_another_version(pool: Pool) -> None:
    streams, stream = Streams(pool, replica("any")), new_stream()
    await pool.renew(replica("full"), state="draining")
    await streams.log.create(stream, Epoch(1, "aa"), ACME, b"{}", None)
    asked = msgspec.structs.replace(work(stream), unwatched_s=0.0)
    assert isinstance(await pool.pools.place(pool.name, asked, [], wait_s=1.0, jitter=0.0), Queued)
    slot, prefix = slot_of(f"pool:{pool.name}"), f"sg:{{pool:{pool.name}}}:"
    await pool.client.execute(slot, "HSET", prefix + "work", stream, b'{"of":"tomorrow"}')
    reaper = reaper_of(pool, streams.log)
    await reaper._sweep_queue(pool.name)  # nobody watches it, and for how long it may go on is not known
    assert await streams.status(stream) == "live"

    async def swept() -> bool:
        await reaper._sweep_queue(pool.name)
        return await streams.status(stream) == "failed"

    await eventually(swept, "its time to be over")
    assert await pool.pools.waiting(pool.name) == []


async def test_who_does_not_sweep_a_queue_does_not_read_it(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_reaper, "REAP_EVERY_S", 120.0)  # the claim outlives a slow machine
    client = RedisClient(redis_server.url)
    await client.start()
    pool = Pool(client)
    streams = Streams(pool, replica("any"))
    await pool.renew(replica("full"), state="draining")
    assert await pool.place(new_stream()) == "queue"
    await pool.client.execute(0, "SET", f"sg:{{pool:{pool.name}}}:(queue):rescue", "another's", "PX", 60_000)
    redis_server("CONFIG", "RESETSTAT")
    await reaper_of(pool, streams.log)._sweep_queue(pool.name)
    assert b"zrangebyscore" not in redis_server("INFO", "commandstats")
    await client.close()


async def test_a_pool_that_everybody_has_left_is_forgotten(pool: Pool) -> None:
    one, two = replica("one"), replica("two")
    await pool.renew(one)
    await pool.renew(two)
    assert await pool.pools.retire(pool.name, one, leaving=True)
    assert pool.name in await pool.pools.pools()
    waits = new_stream()
    assert await pool.place(waits) == "queue"
    await pool.renew(two, state="draining")
    assert await pool.pools.retire(pool.name, two, leaving=True)
    assert pool.name in await pool.pools.pools(), "somebody waits in its queue"
    await pool.pools.remove_queued(pool.name, [waits])
    await pool.renew(one)
    assert await pool.pools.retire(pool.name, one, leaving=True)
    assert pool.name not in await pool.pools.pools()


async def test_who_waits_too_long_or_is_cancelled_leaves_the_queue(pool: Pool) -> None:
    streams = Streams(pool, replica("any"))
    overdue, cancelled, left, kept = (new_stream() for _ in range(4))
    await pool.renew(replica("full"), state="draining")
    for stream in (overdue, cancelled, left, kept):
        gateway = None if stream == left else GatewayId("g")
        await streams.log.create(stream, Epoch(1, "aa"), ACME, b"{}", gateway)
        asked = msgspec.structs.replace(work(stream), unwatched_s=0.05)
        wait_s = 0.0 if stream == overdue else 60
        assert isinstance(await pool.pools.place(pool.name, asked, [], wait_s=wait_s, jitter=0.0), Queued)
    await streams.log.cancel(cancelled, ACME)
    reaper = asyncio.create_task(reaper_of(pool, streams.log).run())

    async def settled() -> bool:
        if reaper.done():
            reaper.result()
        return await pool.pools.waiting(pool.name) == [kept]

    try:
        await eventually(settled, "the queue to be swept")
    finally:
        reaper.cancel()
        await asyncio.gather(reaper, return_exceptions=True)
    assert [await streams.status(s) for s in (overdue, cancelled, left, kept)] == [
        "failed",
        "cancelled",
        "cancelled",
        "live",
    ]


async def test_a_stream_that_found_no_room_in_time_can_be_sent_again(pool: Pool) -> None:
    """One whose own deadline passed cannot."""
    streams = Streams(pool, replica("any"))
    now_ms = time.time_ns() // 1_000_000
    cases = [(tried, deadline_ms) for deadline_ms in (0, now_ms) for tried in ((), (replica("dead"),))]
    asked_for = [new_stream() for _ in cases]
    await pool.renew(replica("full"), state="draining")
    for stream, (tried, deadline_ms) in zip(asked_for, cases, strict=True):
        await streams.log.create(stream, Epoch(1, "aa"), ACME, b"{}", GatewayId("g"))
        asked = msgspec.structs.replace(work(stream), tried=tried)
        asked = msgspec.structs.replace(
            asked, request=msgspec.structs.replace(asked.request, deadline_unix_ms=deadline_ms)
        )
        instead = tried[0] if tried else None
        await pool.pools.place(pool.name, asked, [], wait_s=0.0, jitter=0.0, instead=instead)
    await reaper_of(pool, streams.log)._sweep_queue(pool.name)
    errors = []
    for stream in asked_for:
        page = await streams.log.watch(stream, ACME, None, BEGINNING)
        assert page is not None
        end = decode(page.entries[-1].frames)
        assert isinstance(end, End) and end.error is not None
        errors.append((end.error.code, end.error.retriable))
    late = ("deadline_exceeded", False)
    assert errors == [("deadline_exceeded", True), ("replica_lost", True), late, late]


async def _gone(pool: Pool, name: ReplicaId) -> bool:
    return not await _is_expired(pool, name) and not await pool.flight(name)


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 2500])
async def test_a_renewal_names_any_number_of_streams(pool: Pool, count: int) -> None:
    """The list is the report's, whatever stood there before; a stream that went elsewhere stays there."""
    one, two = replica("one"), replica("two")
    streams = [new_stream() for _ in range(count)]
    await pool.renew(one, *streams, slots=count)
    assert sorted(await pool.pools.in_flight(pool.name, one)) == sorted(streams)
    await pool.renew(two, *streams[:1])
    assert await _holder(pool, streams[0]) == one, "the first that named it"
    kept, added = streams[: count // 2], [new_stream() for _ in range(3)]
    await pool.renew(one, *kept, *added, slots=count)
    assert sorted(await pool.pools.in_flight(pool.name, one)) == sorted([*kept, *added])
    assert await _holder(pool, added[-1]) == one
    if count > 1:
        assert await _holder(pool, streams[-1]) is None, "the pool forgets what nobody names"
        assert await _holder(pool, kept[-1]) == one


async def _holder(pool: Pool, stream: StreamId) -> ReplicaId | None:
    """The replica that the pool believes to have the stream."""
    reply = await pool.client.execute(pool_slot(pool.name), "HGET", f"{pool_prefix(pool.name)}at", stream)
    return None if reply is None else ReplicaId(reply.decode())


async def test_the_reaper_waits_for_a_replica_that_renews_after_an_outage(pool: Pool) -> None:
    """Leases that ran out while Redis was away are renewed before anybody is declared dead."""
    one = replica("one")
    streams = Streams(pool, one)
    stream = await streams.begin()
    await pool.renew(one, stream, ttl_s=0.001)
    await eventually(lambda: _is_expired(pool, one))
    reaper = reaper_of(pool, streams.log)
    await reaper._reap(pool.name)
    look = reaper._looks[pool.name]
    assert look.expired[one].seen_s == 0.0
    await pool.renew(one, stream)
    reaper._looks[pool.name] = look._replace(expired={one: look.expired[one]._replace(seen_s=10.0)})
    await reaper._reap(pool.name)
    assert reaper._looks[pool.name].expired == {}
    assert await streams.status(stream) == "live"


async def test_processes_agree_on_the_number_of_partitions(redis_server: RedisServer) -> None:
    client = RedisClient(redis_server.url)
    await client.start()
    assert (await check_partitions(client, 8)).count == 8
    assert (await check_partitions(client, 8)).count == 8
    with pytest.raises(FabricUnavailable, match="STREAM_GW_PARTITIONS=8"):
        await check_partitions(client, 16)
    await client.close()


async def test_claims_and_leadership_end_after_the_clock_of_redis_went_back(redis_server: RedisServer) -> None:
    """Their keys then live on for as long as the step was, also of a process that is gone."""
    client = RedisClient(redis_server.url)
    await client.start()
    try:
        pools, control = RedisPools(client), RedisControl(client)
        assert await pools.claim_recovery("p", ReplicaId("r"), 3.0, "a")
        assert not await pools.claim_recovery("p", ReplicaId("r"), 3.0, "b")
        term = await control.lead("a", 3.5)
        assert await control.lead("b", 3.5) == 0
        for key in ("sg:{pool:p}:r:rescue", "sg:{control}:leader"):
            assert redis_server("PEXPIRE", key, 3_600_000)
        assert await pools.claim_recovery("p", ReplicaId("r"), 3.0, "b")
        assert not await pools.claim_recovery("p", ReplicaId("r"), 3.0, "a")
        assert await control.lead("b", 3.5) == term + 1
        assert await control.lead("a", 3.5) == 0
    finally:
        await client.close()


async def test_a_replica_that_died_is_found_after_the_clock_of_redis_went_back(pool: Pool) -> None:
    """Its lease then lies in the future; the living ones have renewed theirs."""
    dead, alive = replica("dead"), replica("alive")
    streams = Streams(pool, dead)
    lost = await streams.begin()
    await pool.renew(dead, lost)
    slot, leases = pool_slot(pool.name), f"{pool_prefix(pool.name)}leases"
    assert await pool.client.execute(slot, "ZADD", leases, "XX", "CH", str(time.time() * 1000 + 3.6e6), dead)
    await pool.renew(alive)
    assert await pool.pools.expired(pool.name) == [dead]
    reaper = asyncio.create_task(reaper_of(pool, streams.log).run())
    await eventually(lambda: _gone(pool, dead), "the reaper")
    reaper.cancel()
    assert await streams.status(lost) == "failed", "nobody knows what it was asked to be"
    assert [info.replica for info in await pool.pools.replicas(pool.name)] == [alive]
