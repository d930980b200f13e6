"""The contract of ``StreamLog``, on the fake in memory and on Redis: alone, clustered, with either publish."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import pytest

from stream_fabric.limits import (
    ATTEMPTS_MAX,
    INPUTS_BYTES_MAX,
    INPUTS_MAX,
    INPUTS_PENDING_MAX,
    LIVE_TTL_S,
    PAGE_ENTRIES_MAX,
    PENDING_CANCEL_TTL_S,
    RETENTION_S,
)
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.subscriber import Subscriber, partition_channels
from stream_fabric.redis.topology import slot_of
from stream_fabric.stream.cursor import BEGINNING, Cursor, Epoch
from stream_fabric.stream.frames import ChoiceEnd, End, ErrorInfo, Open, Usage, decode, encode, encode_text
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId, new_stream_id
from stream_fabric.stream.log import (
    STEERED_CHOICE,
    UNIT,
    Append,
    AppendCode,
    AppendReply,
    CancelReply,
    CreateCode,
    Entry,
    InputCode,
    Takeover,
    cancelled_end,
    cut_frames,
    failed_end,
)
from tests.support.memory_log import MemoryStreamLog
from tests.support.published import unpack_parts
from tests.support.waiting import eventually

ACME, OTHER = TenantId("acme"), TenantId("other")
R1, R2 = ReplicaId("replica-1"), ReplicaId("replica-2")
EPOCH = Epoch(1, "aa")
FACTS = b'{"model":"m \xc3\xa9"}'
LOST = ErrorInfo("replica_lost", 'it "died"\nhere', "server_error", 502, True)
PARTITIONS = 4


class Reply(NamedTuple):
    """``AppendReply`` without whether somebody watches."""

    code: AppendCode
    seq: int


class Fabric:
    """A log under test, its second agent's door, and who hears what is published."""

    counted = True
    redis: RedisClient | None = None

    def __init__(self, log: Any, log2: Any) -> None:
        self.log = log
        self.log2 = log2
        self.stop: list[Callable[[], Awaitable[None]]] = []
        self.tag = os.urandom(3).hex()
        self.ended: list[tuple[TenantId, StreamId, Usage]] = []

    def note_ended(self, tenant: TenantId, stream: StreamId, usage: Usage) -> None:
        self.ended.append((tenant, stream, usage))

    def name(self, name: str) -> GatewayId:
        return GatewayId(f"{name}-{self.tag}")

    async def listen(self, peer: str) -> Ear:
        raise NotImplementedError

    async def keys(self, stream: StreamId) -> dict[str, int]:
        return {}

    def stream(self, partition: int | None = None) -> StreamId:
        while True:
            stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
            if partition is None or self.log.partition(stream) == partition:
                return stream

    async def create(self, gateway: GatewayId | None = None, partition: int | None = None) -> StreamId:
        stream = self.stream(partition)
        assert await self.log.create(stream, EPOCH, ACME, FACTS, gateway) is CreateCode.CREATED
        return stream

    async def append(self, *items: Append) -> list[Reply]:
        replies = await self.log.append(self.log.partition(items[0].stream), items)
        return [Reply(reply.code, reply.seq) for reply in replies]

    async def watch(self, stream: StreamId, after: Cursor = BEGINNING, gateway: GatewayId | None = None) -> Any:
        page = await self.log.watch(stream, ACME, gateway, after)
        assert page is not None
        return page

    async def head(self, stream: StreamId, gateway: GatewayId | None = None) -> Any:
        (head,) = await self.log.heads(self.log.partition(stream), [stream], gateway)
        return head


class Ear:
    """Messages that one peer received."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.close: Callable[[], Awaitable[None]]

    def parts(self) -> list[tuple[Any, ...]]:
        return [part for payload in self.payloads for part in unpack_parts(payload)]


class MemoryFabric(Fabric):
    def __init__(self) -> None:
        self.ears: dict[str, Ear] = {}
        log = MemoryStreamLog(PARTITIONS, self._publish, lambda: time.monotonic_ns() // 1_000_000, R1, self.note_ended)
        super().__init__(log, log.view(R2))

    def _publish(self, peer: str, payload: bytes) -> bool:
        ear = self.ears.get(peer)
        if ear is None:
            return False
        ear.payloads.append(payload)
        return True

    async def listen(self, peer: str) -> Ear:
        ear = self.ears[peer] = Ear()

        async def close() -> None:
            del self.ears[peer]

        ear.close = close
        return ear


class RedisFabric(Fabric):
    def __init__(self, client: RedisClient) -> None:
        self.partitions = Partitions(PARTITIONS)
        super().__init__(
            RedisStreamLog(client, self.partitions, R1, self.note_ended), RedisStreamLog(client, self.partitions, R2)
        )
        self.redis = client
        self.counted = client.publish_is_counted

    async def listen(self, peer: str) -> Ear:
        assert self.redis is not None
        ear = Ear()
        channels = partition_channels(peer, self.partitions.slots)
        subscriber = Subscriber(self.redis, channels, ear.payloads.append, lambda names: None)
        task = asyncio.create_task(subscriber.run())
        await subscriber.wait_ready()

        async def close() -> None:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await eventually(lambda: self._nobody_hears(channels), "the subscription to go")

        ear.close = close
        self.stop.append(close)
        return ear

    async def _nobody_hears(self, channels: dict[str, int]) -> bool:
        assert self.redis is not None
        verb = "SHARDNUMSUB" if self.redis.publish == "SPUBLISH" else "NUMSUB"
        replies = [await self.redis.execute(slot, "PUBSUB", verb, name) for name, slot in channels.items()]
        return all(not any(reply.values() if isinstance(reply, dict) else reply[1::2]) for reply in replies)

    async def keys(self, stream: StreamId) -> dict[str, int]:
        assert self.redis is not None
        k = self.log.partition(stream)
        ttls = {}
        for suffix in "mlip":
            ttl = await self.redis.execute(self.partitions.slots[k], "PTTL", f"sg:{{p{k}}}:{stream}:{suffix}")
            if ttl != -2:
                ttls[suffix] = ttl
        return ttls


def text(first: int, last: int) -> list[bytes]:
    return [encode_text(0, f"t{seq} ") for seq in range(first, last + 1)]


def batch(
    stream: StreamId, first: int, last: int, *, epoch: Epoch = EPOCH, usage: Usage | None = None, structure: bytes = b""
) -> Append:
    usage = usage or Usage(7, 3, 2, last, 1)
    return Append(stream, str(epoch), first, last, b"\n".join(text(first, last)), usage, structure)


def ending(stream: StreamId, seq: int, status: Any = "completed", usage: Usage | None = None) -> Append:
    usage = usage or Usage(7, 3, 2, seq - 1, 1)
    return Append(stream, str(EPOCH), seq, seq, encode(End(status, usage)), usage, b"", status)


def joined(entries: Iterable[Entry]) -> list[bytes]:
    return [line for entry in entries for line in entry.frames.split(b"\n")]


# --- create ------------------------------------------------------------------------------------------------


async def test_create_is_idempotent_and_knows_its_owner(fabric: Fabric) -> None:
    stream = await fabric.create()
    await fabric.append(batch(stream, 1, 3))
    assert await fabric.log.create(stream, EPOCH, ACME, FACTS, None) is CreateCode.EXISTS
    assert await fabric.log.create(stream, Epoch(1, "bb"), ACME, FACTS, None) is CreateCode.TAKEN
    assert await fabric.log.create(stream, EPOCH, OTHER, FACTS, None) is CreateCode.TAKEN
    page = await fabric.watch(stream)
    assert (page.head, page.facts, page.tenant, page.status, page.epoch) == (3, FACTS, ACME, "live", EPOCH)


async def test_create_registers_its_gateway(fabric: Fabric) -> None:
    gateway = fabric.name("g")
    watched, unwatched = await fabric.create(gateway), await fabric.create(None)
    head = await fabric.head(watched, gateway)
    assert (head.watched_by_me, head.unwatched, head.replica, head.cancelled_at) == (True, "", None, -1)
    assert not (await fabric.head(watched, fabric.name("h"))).watched_by_me
    head = await fabric.head(unwatched, gateway)
    assert (head.watched_by_me, head.unwatched) == (False, "L")


async def test_invariant_5_exact_cancel_before_the_stream_exists(fabric: Fabric) -> None:
    stream = fabric.stream()
    assert await fabric.log.cancel(stream, ACME) == CancelReply("pending", None, "")
    assert await fabric.log.cancel(stream, ACME) == CancelReply("pending", None, "")
    assert await fabric.log.cancel(stream, OTHER) == CancelReply("none", None, "")
    assert await fabric.log.create(stream, EPOCH, ACME, FACTS, None) is CreateCode.CANCELLED
    assert await fabric.append(batch(stream, 1, 2)) == [(AppendCode.NOSTREAM, 0)]
    assert await fabric.log.watch(stream, ACME, None, BEGINNING) is None
    assert await fabric.head(stream) is None
    # Another tenant's cancel of an id it guessed stops nothing
    assert await fabric.log.create(stream, EPOCH, OTHER, FACTS, None) is CreateCode.CREATED


# --- append ------------------------------------------------------------------------------------------------


async def test_append_answers(fabric: Fabric) -> None:
    stream = await fabric.create()
    assert await fabric.append(batch(stream, 1, 3)) == [(AppendCode.OK, 3)]
    assert await fabric.append(batch(stream, 1, 3)) == [(AppendCode.DUPLICATE, 3)]
    assert await fabric.append(batch(stream, 2, 2)) == [(AppendCode.DUPLICATE, 3)]
    assert await fabric.append(batch(stream, 5, 6)) == [(AppendCode.GAP, 3)]
    assert await fabric.append(batch(stream, 2, 4)) == [(AppendCode.GAP, 3)]
    assert await fabric.append(batch(stream, 4, 4)) == [(AppendCode.OK, 4)]
    assert (await fabric.append(batch(stream, 5, 5, epoch=Epoch(1, "bb"))))[0].code is AppendCode.FENCED
    assert await fabric.append(ending(stream, 5)) == [(AppendCode.OK, 5)]
    assert await fabric.append(ending(stream, 5)) == [(AppendCode.DUPLICATE, 5)]
    assert await fabric.append(batch(stream, 6, 6)) == [(AppendCode.CLOSED, 5)]
    assert await fabric.append(batch(fabric.stream(), 1, 1)) == [(AppendCode.NOSTREAM, 0)]


async def test_invariant_1_single_writer(fabric: Fabric) -> None:
    stream = await fabric.create()
    await fabric.append(batch(stream, 1, 3))
    assert await fabric.log.fence(stream, R1, "bb", LOST)
    for epoch in (EPOCH, Epoch(2, "cc"), Epoch(3, "bb")):
        reply = await fabric.append(batch(stream, 5, 5, epoch=epoch))
        assert reply[0].code is AppendCode.FENCED
    assert (await fabric.watch(stream)).head == 4


async def test_invariant_2_dense_log(fabric: Fabric) -> None:
    stream = await fabric.create()
    for first, last in ((1, 4), (3, 5), (6, 6), (5, 6), (1, 2), (5, 9), (8, 9), (7, 9)):
        await fabric.append(batch(stream, first, last))
    page = await fabric.watch(stream)
    assert [(e.first, e.last) for e in page.entries] == [(1, 4), (5, 6), (7, 9)]
    assert joined(page.entries) == text(1, 9)


async def test_a_batch_of_many_streams_is_answered_one_by_one(fabric: Fabric) -> None:
    streams = [await fabric.create(partition=2) for _ in range(40)]
    await fabric.append(*(batch(stream, 1, 2) for stream in streams))
    await fabric.log.cancel(streams[7], ACME)
    missing = fabric.stream(partition=2)
    items = [batch(stream, 3, 3 + i % 3) for i, stream in enumerate(streams)]
    items[3] = batch(streams[3], 9, 9)
    items[11] = batch(missing, 1, 1)
    items[20] = batch(streams[20], 3, 3, epoch=Epoch(2, "x"))
    items[39] = batch(streams[39], 1, 2)
    replies = await fabric.append(*items)
    expected = [(AppendCode.OK, 3 + i % 3) for i in range(40)]
    expected[3] = (AppendCode.GAP, 2)
    expected[7] = (AppendCode.CANCELLED, 2)
    expected[11] = (AppendCode.NOSTREAM, 0)
    expected[20] = (AppendCode.FENCED, 2)
    expected[39] = (AppendCode.DUPLICATE, 2)
    assert replies == expected


async def test_frames_with_any_bytes_a_frame_may_hold(fabric: Fabric) -> None:
    gateway = fabric.name("g")
    ear = await fabric.listen(gateway)
    stream = await fabric.create(gateway)
    lines = [encode_text(0, s) for s in ("\x1e\x1f\n\r\0", "日本語🎉", '"\\', "")]
    await fabric.append(Append(stream, str(EPOCH), 1, 4, b"\n".join(lines), Usage()))
    assert joined((await fabric.watch(stream)).entries) == lines
    await eventually(ear.parts)
    assert ear.parts() == [(stream, EPOCH, 1, 4, b"\n".join(lines))]


async def test_publish_reaches_each_watcher_once_with_the_whole_flush(fabric: Fabric) -> None:
    g, h = fabric.name("g"), fabric.name("h")
    ear_g, ear_h = await fabric.listen(g), await fabric.listen(h)
    a, b, c = [await fabric.create(g, partition=1) for _ in range(3)]
    await fabric.watch(b, gateway=h)
    await fabric.watch(b, gateway=h)
    await fabric.log.unwatch(c, g)
    items = [batch(a, 1, 2), batch(b, 1, 1), batch(c, 1, 3)]
    await fabric.append(*items)
    await fabric.append(*items)  # a duplicate is not published again
    await fabric.append(batch(b, 2, 2))
    await eventually(lambda: len(ear_g.payloads) >= 2 and len(ear_h.payloads) >= 2)
    part = {s: (s, EPOCH, i.first, i.last, i.frames) for s, i in zip((a, b, c), items, strict=True)}
    last = (b, EPOCH, 2, 2, text(2, 2)[0])
    assert [unpack_parts(p) for p in ear_g.payloads] == [[part[a], part[b]], [last]]
    assert [unpack_parts(p) for p in ear_h.payloads] == [[part[b]], [last]]


async def test_a_vanished_watcher_is_dropped(fabric: Fabric) -> None:
    g, h = fabric.name("g"), fabric.name("h")
    ear, ear_h = await fabric.listen(g), await fabric.listen(h)
    stream = await fabric.create(g)
    await fabric.watch(stream, gateway=h)
    await ear.close()
    await fabric.append(batch(stream, 1, 1))
    head = await fabric.head(stream, g)
    if not fabric.counted:
        assert head.watched_by_me  # nobody can tell; the watchdog and graces have to
        return
    assert (head.watched_by_me, head.unwatched) == (False, "")
    await ear_h.close()
    await fabric.append(batch(stream, 2, 2))
    head = await fabric.head(stream, h)
    assert (head.watched_by_me, head.unwatched) == (False, "V")
    await fabric.watch(stream, gateway=g)
    assert (await fabric.head(stream, g)).unwatched == ""


# --- cancel ------------------------------------------------------------------------------------------------


async def test_invariant_5_exact_cancel(fabric: Fabric) -> None:
    gateway = fabric.name("g")
    ear, bell = await fabric.listen(gateway), await fabric.listen(R1)
    stream = await fabric.create(gateway)
    usage = Usage(11, 5, 4, 3, 2)
    await fabric.append(batch(stream, 1, 3, usage=usage))
    assert await fabric.log2.cancel(stream, ACME) == CancelReply("accepted", Cursor(1, 3), "cancelled")
    # Nothing above, whoever asks and however often
    assert await fabric.append(batch(stream, 4, 5)) == [(AppendCode.CANCELLED, 3)]
    assert await fabric.append(ending(stream, 4)) == [(AppendCode.CANCELLED, 3)]
    assert await fabric.append(batch(stream, 1, 3)) == [(AppendCode.CANCELLED, 3)]
    assert await fabric.log.cancel(stream, ACME) == CancelReply("already", Cursor(1, 3), "cancelled")
    page = await fabric.watch(stream)
    assert (page.status, page.head) == ("cancelled", 4)
    assert page.entries[-1] == Entry(1, 4, 4, cancelled_end(usage))
    head = await fabric.head(stream)
    assert (head.status, head.last, head.cancelled_at) == ("cancelled", 4, 3)
    await eventually(lambda: len(ear.parts()) == 2)
    assert ear.parts()[-1] == (stream, EPOCH, 4, 4, cancelled_end(usage))
    await eventually(lambda: [p for p in bell.payloads if stream.encode() in p])
    assert bell.payloads[-1] == UNIT.join((b"cancel", stream.encode(), b"1.aa", b"3"))


async def test_invariant_5_exact_cancel_before_the_first_token(fabric: Fabric) -> None:
    stream = await fabric.create()
    assert await fabric.log.cancel(stream, ACME) == CancelReply("accepted", Cursor(1, 0), "cancelled")
    assert await fabric.append(batch(stream, 1, 1)) == [(AppendCode.CANCELLED, 0)]
    page = await fabric.watch(stream)
    assert page.entries == (Entry(1, 1, 1, cancelled_end(Usage())),)
    assert (await fabric.keys(stream)).keys() <= {"m", "l"}


async def test_cancel_of_an_ended_stream_and_of_another_tenants(fabric: Fabric) -> None:
    stream = await fabric.create()
    await fabric.append(batch(stream, 1, 3))
    assert await fabric.log.cancel(stream, OTHER) == CancelReply("none", None, "")
    assert (await fabric.append(batch(stream, 4, 4)))[0].code is AppendCode.OK
    await fabric.append(ending(stream, 5))
    assert await fabric.log.cancel(stream, ACME) == CancelReply("terminal", Cursor(1, 5), "completed")
    assert await fabric.log.cancel(stream, ACME, 0) == CancelReply("terminal", Cursor(1, 5), "completed")


async def test_cancel_of_a_stream_whose_producer_ended_it_as_cancelled(fabric: Fabric) -> None:
    """Its engine said so, or the producer repairs a failover that lost an accepted cancel."""
    stream = await fabric.create()
    await fabric.append(batch(stream, 1, 3))
    assert await fabric.append(ending(stream, 4, "cancelled")) == [(AppendCode.OK, 4)]
    assert (await fabric.head(stream)).cancelled_at == 3
    assert await fabric.append(ending(stream, 4, "cancelled"), batch(stream, 5, 5)) == [(AppendCode.CANCELLED, 3)] * 2
    assert await fabric.log.cancel(stream, ACME) == CancelReply("already", Cursor(1, 3), "cancelled")


async def test_cancel_only_if_unwatched(fabric: Fabric) -> None:
    gateway = fabric.name("g")
    watched, left, missing = await fabric.create(gateway), await fabric.create(None), fabric.stream()
    assert (await fabric.log.cancel(watched, ACME, 0)).result == "watched"
    assert (await fabric.log.cancel(left, ACME, 60_000)).result == "watched"
    assert await fabric.log.cancel(missing, ACME, 0) == CancelReply("none", None, "")
    assert await fabric.log.create(missing, EPOCH, ACME, FACTS, None) is CreateCode.CREATED
    assert (await fabric.log.cancel(left, ACME, 0)).result == "accepted"
    await fabric.log.unwatch(watched, gateway)
    await eventually(lambda: _older(fabric, watched, 20))
    assert (await fabric.log.cancel(watched, ACME, 20)).result == "accepted"


async def _older(fabric: Fabric, stream: StreamId, ms: int) -> bool:
    return bool((await fabric.head(stream)).unwatched_ms >= ms)


async def test_invariant_5_exact_cancel_among_racing_appends(fabric: Fabric) -> None:
    """Many cancels from many callers while frames come: one position, and nothing above it."""
    stream = await fabric.create()

    async def produce() -> int:
        for seq in range(1, 200):
            (reply,) = await fabric.append(batch(stream, seq, seq))
            if reply.code is AppendCode.CANCELLED:
                return reply.seq
            await asyncio.sleep(0)
        raise AssertionError("the cancel never came")

    async def cancel(after: int) -> CancelReply:
        await eventually(lambda: _at(fabric, stream, after))
        return await fabric.log2.cancel(stream, ACME)

    at, *replies = await asyncio.gather(produce(), *(cancel(n) for n in range(1, 30)))
    assert [r.result for r in replies].count("accepted") == 1
    assert {r.at for r in replies} == {Cursor(1, at)}
    page = await fabric.watch(stream, Cursor(1, at))
    assert page.entries == (Entry(1, at + 1, at + 1, cancelled_end(Usage(7, 3, 2, at, 1))),)


async def _at(fabric: Fabric, stream: StreamId, seq: int) -> bool:
    head = await fabric.head(stream)
    return bool(head.last >= seq or head.status != "live")


# --- fence -------------------------------------------------------------------------------------------------


async def test_invariant_6_no_zombie_a_fence_ends_the_stream(fabric: Fabric) -> None:
    gateway = fabric.name("g")
    ear, bell = await fabric.listen(gateway), await fabric.listen(R1)
    stream = await fabric.create(gateway)
    usage = Usage(11, 5, 4, 3, 2)
    await fabric.append(batch(stream, 1, 3, usage=usage))
    assert not await fabric.log2.fence(stream, R2, "bb", LOST)
    assert await fabric.log2.fence(stream, R1, "bb", LOST)
    assert not await fabric.log2.fence(stream, R1, "cc", LOST)
    page = await fabric.watch(stream)
    assert (page.epoch, page.head, page.status, page.bases) == (Epoch(2, "bb"), 4, "failed", ((2, 3),))
    assert page.entries[-1] == Entry(2, 4, 4, failed_end(usage, LOST))
    assert decode(page.entries[-1].frames) == End("failed", usage, LOST)
    await eventually(lambda: len(ear.parts()) == 2)
    assert ear.parts()[-1] == (stream, Epoch(2, "bb"), 4, 4, failed_end(usage, LOST))
    await eventually(lambda: [p for p in bell.payloads if stream.encode() in p])
    assert bell.payloads[-1] == UNIT.join((b"fence", stream.encode(), b"1.aa", b"3"))
    assert (await fabric.log.cancel(stream, ACME)).result == "terminal"


async def test_a_fence_whose_reply_was_lost_says_again_that_it_fenced(fabric: Fabric) -> None:
    """The process that fences a stream writes its bill: without this none would."""
    gateway = fabric.name("g")
    ear = await fabric.listen(gateway)
    stream, ended = await fabric.create(gateway), await fabric.create()
    await fabric.append(batch(stream, 1, 3))
    await fabric.append(ending(ended, 1))
    assert await fabric.log.fence(stream, R1, "bb", LOST, EPOCH)
    assert await fabric.log.fence(stream, R1, "bb", LOST, EPOCH)
    assert not await fabric.log.fence(stream, R1, "cc", LOST, EPOCH)
    assert not await fabric.log.fence(ended, R1, "bb", LOST, EPOCH)
    page = await fabric.watch(stream)
    assert (page.epoch, page.head, len(page.entries)) == (Epoch(2, "bb"), 4, 2)
    await eventually(lambda: len(ear.parts()) == 2)


async def test_a_fence_takes_streams_nobody_began_and_leaves_ended_ones(fabric: Fabric) -> None:
    unborn, ended, missing = await fabric.create(), await fabric.create(), fabric.stream()
    await fabric.append(ending(ended, 1))
    assert await fabric.log.fence(unborn, R1, "bb", LOST)
    assert not await fabric.log.fence(ended, None, "bb", LOST)
    assert not await fabric.log.fence(missing, None, "bb", LOST)
    assert (await fabric.append(batch(unborn, 1, 1)))[0].code is AppendCode.FENCED
    anyone = await fabric.create()
    await fabric.append(batch(anyone, 1, 1))
    assert await fabric.log.fence(anyone, None, "bb", LOST)


# --- takeover and usage ------------------------------------------------------------------------------------


async def test_invariant_1_single_writer_across_a_takeover(fabric: Fabric) -> None:
    gateway = fabric.name("g")
    ear, bell = await fabric.listen(gateway), await fabric.listen(R1)
    stream = await fabric.create(gateway)
    await fabric.append(batch(stream, 1, 3))
    assert await fabric.log2.takeover(stream, Epoch(1, "zz"), "bb") is None, "it is another's"
    taken = await fabric.log2.takeover(stream, EPOCH, "bb")
    assert taken == Takeover(Epoch(2, "bb"), 3)
    await eventually(lambda: [p for p in bell.payloads if stream.encode() in p])
    assert bell.payloads[-1] == UNIT.join((b"fence", stream.encode(), b"1.aa", b"3"))
    assert (await fabric.append(batch(stream, 4, 4)))[0].code is AppendCode.FENCED
    ((code, seq, *_),) = await fabric.log2.append(
        fabric.log2.partition(stream), [batch(stream, 4, 5, epoch=Epoch(2, "bb"))]
    )
    assert (code, seq) == (AppendCode.OK, 5)
    await eventually(lambda: len(ear.parts()) == 2)
    assert ear.parts()[-1][1:4] == (Epoch(2, "bb"), 4, 5)
    page = await fabric.watch(stream)
    assert (page.epoch, page.head, page.status, page.bases) == (Epoch(2, "bb"), 5, "live", ((2, 3),))
    assert (await fabric.head(stream)).replica == R2, "whoever appends first is its producer"
    assert [e.epoch for e in page.entries] == [1, 2]
    reply = await fabric.log.cancel(stream, ACME)
    assert (reply.result, reply.at) == ("accepted", Cursor(2, 5))


async def test_invariant_1_one_epoch_is_one_replicas(fabric: Fabric) -> None:
    """A failover of the pool may give one epoch to two replicas: who appends first has it."""
    stream = await fabric.create()
    await fabric.append(batch(stream, 1, 3))
    for again in (batch(stream, 1, 2), batch(stream, 4, 4)):
        ((code, seq, *_),) = await fabric.log2.append(fabric.log2.partition(stream), [again])
        assert (code, seq) == (AppendCode.FENCED, 3)
    assert (await fabric.append(batch(stream, 4, 4)))[0].code is AppendCode.OK


async def test_a_takeover_before_the_first_frame_and_of_ended_streams(fabric: Fabric) -> None:
    unborn, ended, missing = await fabric.create(), await fabric.create(), fabric.stream()
    await fabric.append(ending(ended, 1))
    assert await fabric.log.takeover(unborn, EPOCH, "bb") == Takeover(Epoch(2, "bb"), 0)
    assert await fabric.log.takeover(unborn, Epoch(2, "bb"), "cc") == Takeover(Epoch(3, "cc"), 0), "nobody began it"
    assert await fabric.log.takeover(ended, EPOCH, "bb") is None
    assert await fabric.log.takeover(missing, EPOCH, "bb") is None


async def test_several_who_take_a_stream_over_get_the_same_epoch_until_somebody_appends_in_it(fabric: Fabric) -> None:
    stream = await fabric.create()
    await fabric.append(batch(stream, 1, 3))
    taken = [await log.takeover(stream, EPOCH, nonce) for log, nonce in ((fabric.log, "bb"), (fabric.log2, "cc"))]
    assert taken == [Takeover(Epoch(2, "bb"), 3)] * 2
    await fabric.log2.append(fabric.log2.partition(stream), [batch(stream, 4, 4, epoch=Epoch(2, "bb"))])
    assert await fabric.log.takeover(stream, EPOCH, "dd") is None
    assert (await fabric.watch(stream)).bases == ((2, 3),)


async def test_a_fence_of_a_producer_whose_stream_went_on_elsewhere_comes_too_late(fabric: Fabric) -> None:
    stream, behind = await fabric.create(), await fabric.create()
    await fabric.append(batch(stream, 1, 3))
    await fabric.log.takeover(stream, EPOCH, "bb")
    # Nobody has appended in the new epoch, so it is no replica's by name
    assert not await fabric.log.fence(stream, R1, "cc", LOST, EPOCH)
    assert not await fabric.log.fence(stream, None, "cc", LOST, Epoch(2, "other"))
    assert (await fabric.head(stream)).status == "live"
    assert await fabric.log.fence(stream, None, "cc", LOST, Epoch(2, "bb"))
    # A failover has lost the takeover
    assert await fabric.log.fence(behind, None, "cc", LOST, Epoch(2, "bb"))


async def test_usage_is_settled_once_with_the_terminal_whoever_writes_it(fabric: Fabric) -> None:
    tenant, hour = TenantId(fabric.name("payer")), int(time.time() // 3600)
    streams = [fabric.stream() for _ in range(5)]
    for number, stream in enumerate(streams):
        await fabric.log.create(stream, EPOCH, tenant, FACTS, None, "m 8b" if number else "other")
        await fabric.append(batch(stream, 1, 3, usage=Usage(10, 4, 2, 3, 1)))
    completed, cancelled, fenced, taken, live = streams
    refused, withdrawn = fabric.stream(), fabric.stream()
    for stream in (refused, withdrawn):
        await fabric.log.create(stream, EPOCH, tenant, FACTS, None, "refused")
    await fabric.log.fence(refused, None, "bb", LOST)
    await fabric.log.cancel(withdrawn, tenant)
    for _ in range(2):  # an append whose reply was lost is sent again
        await fabric.append(ending(completed, 4, usage=Usage(10, 4, 2, 5, 1)))
    for _ in range(2):
        await fabric.log.cancel(cancelled, tenant)
        await fabric.log.fence(fenced, R1, "bb", LOST)
    await fabric.log.fence(completed, None, "bb", LOST)
    epoch = (await fabric.log.takeover(taken, EPOCH, "bb")).epoch
    last = Append(
        taken,
        str(epoch),
        4,
        4,
        encode(End("completed", Usage(10, 4, 2, 9, 1))),
        Usage(10, 4, 2, 9, 1),
        b"",
        "completed",
    )
    await fabric.log2.append(fabric.log2.partition(taken), [last])
    totals: dict[str, tuple[int, Usage]] = {}
    for at in (hour, hour + 1) if fabric.redis else (hour,):
        totals |= await fabric.log.usage(tenant, at)
    assert totals == {"other": (1, Usage(10, 4, 2, 5, 1)), "m 8b": (3, Usage(30, 12, 6, 15, 3))}
    assert (await fabric.head(live)).status == "live", "what runs is not settled"


async def test_who_writes_the_terminal_is_told_to_settle_a_reserved_stream(fabric: Fabric) -> None:
    used = Usage(10, 4, 2, 3, 1)
    streams = [fabric.stream() for _ in range(4)]
    for number, stream in enumerate(streams):
        await fabric.log.create(stream, EPOCH, ACME, FACTS, None, "m", reserved=number > 0)
        await fabric.append(batch(stream, 1, 3, usage=used))
    unreserved, completed, cancelled, fenced = streams
    assert fabric.ended == []
    for _ in range(2):  # only the step that ends the stream tells it
        for stream in (unreserved, completed):
            await fabric.append(ending(stream, 4, usage=used))
        await fabric.log.cancel(cancelled, ACME)
        await fabric.log.fence(fenced, R1, "bb", LOST)
    assert fabric.ended == [(ACME, stream, used) for stream in (completed, cancelled, fenced)]


async def test_what_was_made_of_a_withdrawn_stream_counts_nowhere(fabric: Fabric) -> None:
    tenant, hour, stream = TenantId(fabric.name("payer")), int(time.time() // 3600), fabric.stream()
    await fabric.log.create(stream, EPOCH, tenant, FACTS, None, "m", reserved=True)
    await fabric.append(batch(stream, 1, 3, usage=Usage(10, 4, 2, 3, 1)))
    for _ in range(2):  # its reply was lost
        assert await fabric.log.fence(stream, None, "bb", LOST, withdraws=True)
    page = await fabric.log.watch(stream, tenant, None, BEGINNING)
    assert page is not None and page.entries[-1] == Entry(2, 4, 4, failed_end(Usage(), LOST))
    assert not await fabric.log.usage(tenant, hour) and not await fabric.log.usage(tenant, hour + 1)
    assert fabric.ended == [], "its request gives the reservation back"


# --- read --------------------------------------------------------------------------------------------------


async def test_paging(fabric: Fabric) -> None:
    stream = await fabric.create()
    count = PAGE_ENTRIES_MAX * 2 + 5
    for number in range(count):
        await fabric.append(batch(stream, number * 2 + 1, number * 2 + 2))
    after, seen, pages = BEGINNING, [], 0
    while (page := await fabric.watch(stream, after)).entries:
        assert len(page.entries) <= PAGE_ENTRIES_MAX
        assert page.head == count * 2
        seen += joined(page.entries)
        after = Cursor(page.entries[-1].epoch, page.entries[-1].last)
        pages += 1
    assert (seen, pages) == (text(1, count * 2), 3)
    # A cursor within an entry gets that entry again
    page = await fabric.watch(stream, Cursor(1, 5))
    assert page.entries[0] == Entry(1, 5, 6, b"\n".join(text(5, 6)))
    assert (await fabric.watch(stream, Cursor(1, 6))).entries[0].first == 7
    assert (await fabric.watch(stream, Cursor(1, count * 2 + 9))).entries == ()


async def test_structure_and_facts_travel_with_every_page(fabric: Fabric) -> None:
    stream = await fabric.create()
    one, two = (encode(Open(n, 0, "text")) for n in (0, 1))
    await fabric.append(batch(stream, 1, 2, structure=b"1 " + one + b"\n"))
    await fabric.append(batch(stream, 3, 3))
    await fabric.append(batch(stream, 4, 4, structure=b"4 " + two + b"\n"))
    await fabric.append(batch(stream, 4, 4, structure=b"4 " + two + b"\n"))
    page = await fabric.watch(stream, Cursor(1, 4))
    assert page.structure == b"1 " + one + b"\n4 " + two + b"\n"
    assert page.facts == FACTS


async def test_watch_registers_from_that_moment_and_only_live_streams(fabric: Fabric) -> None:
    gateway = fabric.name("g")
    ear = await fabric.listen(gateway)
    stream = await fabric.create()
    await fabric.append(batch(stream, 1, 2))
    page = await fabric.watch(stream, gateway=gateway)
    assert joined(page.entries) == text(1, 2)
    await fabric.append(batch(stream, 3, 3))
    await eventually(ear.parts)
    assert ear.parts() == [(stream, EPOCH, 3, 3, text(3, 3)[0])]
    await fabric.append(ending(stream, 4))
    ended = await fabric.create()
    await fabric.append(ending(ended, 1))
    await fabric.watch(ended, gateway=gateway)
    assert not (await fabric.head(ended, gateway)).watched_by_me


async def test_reading_is_the_tenants_own(fabric: Fabric) -> None:
    stream = await fabric.create()
    gateway = fabric.name("g")
    assert await fabric.log.watch(stream, OTHER, gateway, BEGINNING) is None
    assert not (await fabric.head(stream, gateway)).watched_by_me
    assert await fabric.log.watch(stream, None, None, BEGINNING) is not None
    assert await fabric.log.watch(fabric.stream(), None, gateway, BEGINNING) is None


async def test_an_append_tells_that_nobody_watches(fabric: Fabric) -> None:
    gateway = fabric.name("g")
    await fabric.listen(gateway)
    stream, watched = await fabric.create(gateway, partition=1), await fabric.create(gateway, partition=1)

    async def append(seq: int, item: Append | None = None) -> AppendReply:
        mine, other = await fabric.log.append(1, [item or batch(stream, seq, seq), batch(watched, seq, seq)])
        assert other == AppendReply(AppendCode.OK, seq)
        assert mine[:2] == (AppendCode.OK, seq)
        return AppendReply(*mine)

    assert (await append(1)).unwatched == ""
    await fabric.log.unwatch(stream, gateway)
    assert (await append(2)).unwatched == "L"
    await eventually(lambda: _older(fabric, stream, 30))
    reply = await append(3)
    assert reply.unwatched == "L" and 30 <= reply.unwatched_ms < 60_000
    await fabric.watch(stream, gateway=gateway)
    assert (await append(4)).unwatched == ""
    await fabric.log.unwatch(stream, gateway)
    assert (await append(5, ending(stream, 5))).unwatched == "", "it has ended"


async def test_the_last_reader_s_leaving_rings_the_replica(fabric: Fabric) -> None:
    g, gg = fabric.name("g"), fabric.name("gg")
    bell = await fabric.listen(R1)
    stream, unbegun, last = [await fabric.create(g, partition=1) for _ in range(3)]
    await fabric.append(batch(stream, 1, 1))
    await fabric.append(batch(last, 1, 1))
    await fabric.watch(stream, gateway=gg)
    await fabric.log.unwatch(unbegun, g)
    await fabric.log.unwatch(stream, g)
    await fabric.log.unwatch(stream, gg)
    rung = UNIT.join((b"unwatched", stream.encode(), str(EPOCH).encode(), b"0"))
    await eventually(lambda: bell.payloads)
    assert bell.payloads == [rung], "once, by the stream that has a replica"
    await fabric.append(ending(stream, 2))
    await fabric.log.unwatch(stream, gg)
    await fabric.log.unwatch(last, g)
    await eventually(lambda: len(bell.payloads) > 1)
    assert bell.payloads == [rung, rung.replace(stream.encode(), last.encode())], "not of one that has ended"


async def test_unwatch(fabric: Fabric) -> None:
    g, gg = fabric.name("g"), fabric.name("gg")
    stream = await fabric.create(g)
    await fabric.watch(stream, gateway=gg)
    await fabric.log.unwatch(stream, g)
    assert not (await fabric.head(stream, g)).watched_by_me
    head = await fabric.head(stream, gg)
    assert (head.watched_by_me, head.unwatched) == (True, "")
    await fabric.log.unwatch(stream, gg)
    assert (await fabric.head(stream, gg)).unwatched == "L"
    await fabric.log.unwatch(fabric.stream(), g)


async def test_heads_of_many(fabric: Fabric) -> None:
    gateway = fabric.name("g")
    a, b, missing = await fabric.create(gateway, 3), await fabric.create(None, 3), fabric.stream(3)
    await fabric.append(batch(a, 1, 5))
    await fabric.log.cancel(b, ACME)
    heads = await fabric.log.heads(3, [a, missing, b], gateway)
    assert heads[1] is None
    assert (heads[0].epoch, heads[0].last, heads[0].status, heads[0].replica) == (EPOCH, 5, "live", R1)
    assert (heads[2].last, heads[2].status, heads[2].cancelled_at, heads[2].replica) == (1, "cancelled", 0, None)
    assert await fabric.log.heads(0, [], gateway) == []


AT_US = 1_795_168_800_000_001


async def inputs_after(fabric: Fabric, item: Append) -> tuple[AppendCode, int, int]:
    (reply,) = await fabric.log.append(fabric.log.partition(item.stream), [item])
    return reply.code, reply.seq, reply.inputs


async def test_inputs(fabric: Fabric) -> None:
    bell = await fabric.listen(R1)
    stream = await fabric.create()
    await fabric.append(batch(stream, 1, 1))
    assert await fabric.log.input(stream, ACME, "b", msgspec.Raw(b'{"x":1}'), AT_US) is InputCode.ACCEPTED
    assert await fabric.log.input(stream, ACME, "a", msgspec.Raw(b'"two words"')) is InputCode.ACCEPTED
    assert await fabric.log.input(stream, ACME, "b", msgspec.Raw(b'{"x":1}'), AT_US) is InputCode.ACCEPTED, "sent again"
    for at_us in (AT_US + 1, 0):
        assert await fabric.log.input(stream, ACME, "b", msgspec.Raw(b'{"x":1}'), at_us) is InputCode.DUPLICATE
    assert await fabric.log.input(stream, ACME, "b", msgspec.Raw(b"2"), AT_US) is InputCode.OTHER_ITEM
    assert await fabric.log.input(stream, OTHER, "c", msgspec.Raw(b"2")) is InputCode.NONE
    assert await fabric.log.input(fabric.stream(), ACME, "c", msgspec.Raw(b"2")) is InputCode.NONE
    assert await fabric.log.inputs(stream) == [("b", b'{"x":1}', AT_US), ("a", b'"two words"', 0)]
    await eventually(lambda: [p for p in bell.payloads if stream.encode() in p])
    assert bell.payloads[-1] == UNIT.join((b"input", stream.encode(), b"1.aa", b"0"))
    assert await inputs_after(fabric, ending(stream, 2)) == (AppendCode.OK, 2, 2)
    assert await fabric.log.input(stream, ACME, "d", msgspec.Raw(b"1")) is InputCode.TERMINAL
    assert await fabric.log.input(stream, ACME, "b", msgspec.Raw(b'{"x":1}')) is InputCode.DUPLICATE


async def test_an_answer_ends_only_while_no_input_waits(fabric: Fabric) -> None:
    stream = await fabric.create()
    finish = encode(ChoiceEnd(0, "stop"))
    end = Append(stream, "1.aa", 2, 2, finish, Usage(), b"2 " + finish + b"\n", "", 0, True)
    assert await inputs_after(fabric, batch(stream, 1, 1)) == (AppendCode.OK, 1, 0)
    assert await fabric.log.input(stream, ACME, "a", msgspec.Raw(b"1")) is InputCode.ACCEPTED
    assert await inputs_after(fabric, end) == (AppendCode.INPUTS, 1, 1)
    assert [e.last for e in (await fabric.watch(stream)).entries] == [1]
    # The producer answers the input, and says so
    answer = Append(stream, "1.aa", 2, 2, encode_text(0, "x"), Usage(), b"", "", 1)
    assert await inputs_after(fabric, answer) == (AppendCode.OK, 2, 1)
    end = end._replace(first=3, last=3, inputs=1)
    assert await inputs_after(fabric, end) == (AppendCode.OK, 3, 1)
    assert await inputs_after(fabric, end) == (AppendCode.DUPLICATE, 3, 1), "its reply was lost"
    # The choice has ended, though the stream has not: no input comes between
    assert await fabric.log.input(stream, ACME, "b", msgspec.Raw(b"1")) is InputCode.TERMINAL
    head = await fabric.head(stream)
    assert head.status == "live" and head.inputs == 1


async def test_inputs_are_bounded(fabric: Fabric) -> None:
    stream = await fabric.create()
    for start in range(0, INPUTS_MAX, INPUTS_PENDING_MAX):
        count = min(INPUTS_PENDING_MAX, INPUTS_MAX - start)
        codes = await asyncio.gather(
            *(fabric.log.input(stream, ACME, f"i{start + n}", msgspec.Raw(b"1")) for n in range(count + 3))
        )
        assert codes.count(InputCode.ACCEPTED) == count
        waits = start + count < INPUTS_MAX
        assert set(codes) == {InputCode.ACCEPTED, InputCode.TOO_MANY_WAIT if waits else InputCode.TOO_MANY}
        at = start // INPUTS_PENDING_MAX + 1
        answered = Append(stream, "1.aa", at, at, encode_text(0, "x"), Usage(), b"", "", start + count)
        assert await inputs_after(fabric, answered) == (AppendCode.OK, at, start + count)
    assert await fabric.log.input(stream, ACME, "i0", msgspec.Raw(b"1")) is InputCode.DUPLICATE


async def test_inputs_live_as_long_as_their_stream(fabric: Fabric) -> None:
    if fabric.redis is None:
        pytest.skip("nothing expires in the model")
    stream = await fabric.create()
    assert await fabric.log.input(stream, ACME, "a", msgspec.Raw(b"1")) is InputCode.ACCEPTED
    k = fabric.log.partition(stream)
    slot, key = slot_of(f"p{k}"), f"sg:{{p{k}}}:{stream}:i"
    for renew in (lambda: fabric.append(batch(stream, 1, 1)), lambda: fabric.log.takeover(stream, EPOCH, "bb")):
        await fabric.redis.execute(slot, "PEXPIRE", key, 1000)
        await renew()
        assert await fabric.redis.execute(slot, "PTTL", key) > LIVE_TTL_S * 900


async def test_an_input_after_lost_ones_counts(fabric: Fabric) -> None:
    if fabric.redis is None:
        pytest.skip("the model loses no part of a stream")
    stream = await fabric.create()
    assert await inputs_after(fabric, batch(stream, 1, 1)) == (AppendCode.OK, 1, 0)
    assert await fabric.log.input(stream, ACME, "a", msgspec.Raw(b"1")) is InputCode.ACCEPTED
    k = fabric.log.partition(stream)
    await fabric.redis.execute(slot_of(f"p{k}"), "DEL", f"sg:{{p{k}}}:{stream}:i")  # evicted
    assert await fabric.log.input(stream, ACME, "b", msgspec.Raw(b"2")) is InputCode.ACCEPTED
    assert (await fabric.head(stream)).inputs == 2, "its producer would not read it"


async def test_inputs_are_bounded_in_bytes(fabric: Fabric) -> None:
    stream = await fabric.create()
    item = msgspec.Raw(b'"' + b"x" * (INPUTS_BYTES_MAX * 2 // 3) + b'"')
    assert await fabric.log.input(stream, ACME, "a", item) is InputCode.ACCEPTED
    assert await fabric.log.input(stream, ACME, "b", item) is InputCode.TOO_LARGE
    assert await fabric.log.input(stream, ACME, "c", msgspec.Raw(b"1")) is InputCode.ACCEPTED


async def test_a_steer_ends_the_answer_exactly(fabric: Fabric) -> None:
    bell = await fabric.listen(R1)
    stream = await fabric.create()
    await fabric.append(batch(stream, 1, 3))
    assert await fabric.log.cancel(stream, OTHER, steers=True) == CancelReply("none", None, "")
    assert await fabric.log.cancel(fabric.stream(), ACME, steers=True) == CancelReply("none", None, "")
    assert await fabric.log.cancel(stream, ACME, steers=True) == CancelReply("accepted", Cursor(1, 3), "incomplete")
    assert await fabric.log.cancel(stream, ACME, steers=True) == CancelReply("terminal", Cursor(1, 5), "incomplete")
    for last in (4, 5, 6):  # the log has as many frames, but not these
        assert await fabric.append(batch(stream, 4, last)) == [Reply(AppendCode.STEERED, 3)]
    page = await fabric.watch(stream)
    assert page.status == "incomplete" and page.head == 5
    *_, last = page.entries
    assert (last.first, last.last) == (4, 5)
    assert last.frames.split(b"\n") == cut_frames(Usage(7, 3, 2, 3, 1), steered=True)
    assert page.structure.endswith(b"4 " + STEERED_CHOICE + b"\n")
    await eventually(lambda: [p for p in bell.payloads if stream.encode() in p])
    assert bell.payloads[-1] == UNIT.join((b"steer", stream.encode(), b"1.aa", b"3"))
    head = await fabric.head(stream)
    assert (head.status, head.cancelled_at) == ("incomplete", 3)


async def test_a_steer_spares_an_answer_that_has_ended(fabric: Fabric) -> None:
    stream = await fabric.create()
    finish = encode(ChoiceEnd(0, "stop"))
    await fabric.append(Append(stream, "1.aa", 1, 1, finish, Usage(), b"1 " + finish + b"\n", "", 0, True))
    assert (await fabric.log.cancel(stream, ACME, steers=True)).result == "terminal"
    assert await fabric.append(ending(stream, 2)) == [Reply(AppendCode.OK, 2)]


async def test_placement_records_are_kept_once_and_the_newest(fabric: Fabric) -> None:
    if fabric.redis is None:
        pytest.skip("the model has no records for operators")
    one, other = await fabric.create(), await fabric.create()
    records = [b"%d" % number for number in range(ATTEMPTS_MAX + 1)]
    await fabric.log.put_placements([(one, records[0]), (other, b"{}"), (one, records[1])])
    await fabric.log.put_placements([(one, records[1])])  # sent again
    assert await fabric.log.placements(one) == records[:2]
    await fabric.log.put_placements([(one, record) for record in records[2:]])
    assert await fabric.log.placements(one) == records[1:]
    assert await fabric.log.placements(other) == [b"{}"]


# --- what only Redis has -----------------------------------------------------------------------------------


async def test_every_key_expires(fabric: Fabric) -> None:
    if fabric.redis is None:
        pytest.skip("memory does not expire")
    live_ms, retention_ms = LIVE_TTL_S * 1000, RETENTION_S * 1000
    created, running, ended, cancelled, fenced, short = [await fabric.create() for _ in range(6)]
    for stream in (running, ended, cancelled, fenced):
        await fabric.append(batch(stream, 1, 2))
    for stream in (ended, cancelled, fenced):
        await fabric.log.put_placements([(stream, b"{}")])
    await fabric.log.input(running, ACME, "a", msgspec.Raw(b"1"))
    await fabric.append(ending(ended, 3))
    await fabric.log.cancel(cancelled, ACME)
    await fabric.log.fence(fenced, None, "bb", LOST)
    await fabric.append(ending(short, 1))
    await fabric.log.put_placements([(short, b"{}")])  # its record comes after its end
    pending = fabric.stream()
    await fabric.log.cancel(pending, ACME)

    async def check(stream: StreamId, names: str, ttl_ms: int) -> None:
        ttls = await fabric.keys(stream)
        assert "".join(ttls) == names
        assert all(ttl_ms - 60_000 < ttl <= ttl_ms for ttl in ttls.values()), ttls

    await check(created, "m", live_ms)
    await check(running, "mli", live_ms)
    for stream in (ended, cancelled, fenced, short):
        await check(stream, "mlp", retention_ms)
    ttls = await fabric.keys(pending)
    assert 0 < ttls["m"] <= PENDING_CANCEL_TTL_S * 1000
    # A pending cancel's short life does not pass on to the stream that another tenant makes of its id
    await fabric.log.create(pending, EPOCH, OTHER, FACTS, None)
    await check(pending, "m", live_ms)


async def test_scripts_are_loaded_again_after_a_flush(fabric: Fabric) -> None:
    if fabric.redis is None:
        pytest.skip("memory has no scripts")
    stream = await fabric.create()
    slot = slot_of(f"p{fabric.log.partition(stream)}")
    await fabric.redis.execute(slot, "SCRIPT", "FLUSH")
    assert await fabric.append(batch(stream, 1, 3)) == [(AppendCode.OK, 3)]
    assert (await fabric.watch(stream)).head == 3
    await fabric.redis.execute(slot, "SCRIPT", "FLUSH")
    assert (await fabric.log.cancel(stream, ACME)).result == "accepted"


async def test_a_log_that_outlived_its_meta_does_not_block_the_stream(fabric: Fabric) -> None:
    """Eviction takes keys one by one: what is made again starts from nothing."""
    if fabric.redis is None:
        pytest.skip("memory evicts nothing")
    stream = await fabric.create()
    await fabric.append(batch(stream, 1, 3))
    k = fabric.log.partition(stream)
    await fabric.redis.execute(slot_of(f"p{k}"), "DEL", f"sg:{{p{k}}}:{stream}:m")
    assert await fabric.append(batch(stream, 4, 4)) == [(AppendCode.NOSTREAM, 0)]
    assert await fabric.log.create(stream, EPOCH, ACME, FACTS, None) is CreateCode.CREATED
    assert await fabric.append(batch(stream, 1, 2)) == [(AppendCode.OK, 2)]
    assert joined((await fabric.watch(stream)).entries) == text(1, 2)
