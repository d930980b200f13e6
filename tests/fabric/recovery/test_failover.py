"""Where a failover places a stream, and how long it may wait there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stream_fabric.errors import FabricUnavailable
from stream_fabric.events import Prices
from stream_fabric.pool.placement import Placed, Queued, Refused
from stream_fabric.pool.records import Candidate, Work
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery.bill_terms import BillTerms
from stream_fabric.recovery.failover import Failover, placement_record, wait_s
from stream_fabric.recovery.failover_reporter import FailoverReporter
from stream_fabric.recovery.lease_reaper import LOST
from stream_fabric.redis.client import Partitions
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.tenancy.unbilled import RedisUnbilled
from stream_fabric.stream.cursor import BEGINNING, Epoch
from stream_fabric.stream.frames import Delta, End, Usage, decode, encode
from stream_fabric.stream.ids import ReplicaId, StreamId, partition_of
from stream_fabric.stream.log import Append, AppendCode
from tests.fabric.test_pools import ACME, Pool, new_stream, replica, work
from tests.support.events import Heard

SKEW_US = 30_000_000


class SkewedClock(HostClock):
    """The fabric's clock on a host whose own clock is 30 s ahead of it."""

    def now_us(self) -> int:
        return super().now_us() - SKEW_US


class Setting:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.log = RedisStreamLog(pool.client, Partitions(4), replica("any"))
        self.unbilled = RedisUnbilled(pool.client, Partitions(4))
        self.failover = Failover(pool.pools, self.log, HostClock(), HostRandom())

    async def begin(self, on: ReplicaId, meta: bytes = b"{}", retention_s: int | None = None) -> StreamId:
        stream = new_stream()
        await self.log.create(stream, Epoch(1, "aa"), ACME, meta, None, retention_s=retention_s)
        assert await self.pool.place(stream, on) == on
        return stream

    async def move(self, stream: StreamId, lost: ReplicaId) -> str | None:
        """Have another replica take the stream; return the one that has it then."""
        await self.failover.rescue(self.pool.name, lost, stream, LOST)
        return await self.pool.pools.holder(self.pool.name, stream)


async def test_a_third_attempt_does_not_go_back_to_the_first_replica_while_another_lives(pool: Pool) -> None:
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


async def test_a_third_attempt_goes_back_to_the_first_replica_when_no_other_lives(pool: Pool) -> None:
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


async def test_a_failover_waits_for_a_deadline_of_the_fabrics_clock(pool: Pool) -> None:
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


async def test_a_stream_waits_for_another_replica_as_long_as_its_gateway_lets_requests_wait(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, place, waits = Setting(pool), pool.pools.place, []

    async def noted(*args: Any, wait_s: float, **more: Any) -> Any:
        waits.append(wait_s)
        return await place(*args, wait_s=wait_s, **more)

    monkeypatch.setattr(pool.pools, "place", noted)
    full = replica("full")
    for number, asked_s in enumerate((None, 300.0)):
        first, stream = replica(f"one{number}"), new_stream()
        await pool.renew(first)
        await setting.log.create(stream, Epoch(1, "aa"), ACME, b"{}", None)
        asked = work(stream) if asked_s is None else msgspec.structs.replace(work(stream), wait_s=asked_s)
        await place(pool.name, asked, [Candidate(first, 0)], wait_s=1.0, jitter=0.0)
        await pool.renew(first, state="draining")
        await pool.renew(full, room=0)
        assert await setting.move(stream, first) == "queue"
    assert waits == [60.0, 300.0]


# --- batch hosts ---------------------------------------------------------------------------------------------


class Hosted:
    """A batch host with its home pool, and a batch stream that runs at the host."""

    def __init__(self, pool: Pool) -> None:
        self.setting, self.pools = Setting(pool), pool.pools
        self.host, self.home = pool, Pool(pool.client)

    async def begin(self, on: ReplicaId) -> StreamId:
        stream = new_stream()
        await self.setting.log.create(stream, Epoch(1, "aa"), ACME, b"{}", None)
        batch = msgspec.structs.replace(work(stream), tier=2, home=self.home.name)
        placed = await self.pools.place(self.host.name, batch, [Candidate(on, 0)], wait_s=0, jitter=0.0)
        assert isinstance(placed, Placed)
        return stream

    async def holders(self, stream: StreamId) -> tuple[str | None, str | None]:
        return (
            await self.pools.holder(self.host.name, stream),
            await self.pools.holder(self.home.name, stream),
        )


async def test_another_replica_of_a_batch_host_goes_on_and_without_a_free_slot_there_the_home_pool(
    pool: Pool,
) -> None:
    hosted = Hosted(pool)
    lost, other, own = replica("lost"), replica("other"), replica("own")
    await hosted.host.renew(lost)
    streams = [await hosted.begin(lost) for _ in range(2)]
    await hosted.host.renew(other, slots=1, room=2)
    await hosted.home.renew(own)
    for stream in streams:
        await hosted.setting.move(stream, lost)
    assert [await hosted.holders(stream) for stream in streams] == [(other, None), (None, own)]
    assert await hosted.host.flight(lost) == set()
    moved = await pool.pools.work(hosted.home.name, streams[1])
    assert moved is not None and (moved.attempt, moved.home, moved.tried) == (2, "", (lost,))
    assert await pool.pools.retire(hosted.host.name, lost, leaving=True)
    await hosted.setting.move(streams[0], other)
    assert await hosted.holders(streams[0]) == (None, own)


async def test_a_stream_of_a_batch_host_waits_in_its_home_pools_queue(pool: Pool) -> None:
    hosted = Hosted(pool)
    lost = replica("lost")
    await hosted.host.renew(lost)
    stream = await hosted.begin(lost)
    await hosted.setting.move(stream, lost)
    assert await hosted.holders(stream) == (None, "queue")
    assert hosted.home.name in await pool.pools.pools(), "reapers sweep its queue, and its controller sees it"
    await hosted.home.renew(replica("own"))
    assert (await hosted.holders(stream))[1] not in (None, "queue")


@pytest.mark.parametrize("done", ["placed at home", "whole"])
async def test_a_failover_to_the_home_pool_may_be_repeated(pool: Pool, done: str) -> None:
    """Also where the first one was cut off, and the host has a free slot again; the stream lives on at home."""
    hosted = Hosted(pool)
    lost, other = replica("lost"), replica("other")
    await hosted.host.renew(lost)
    stream = await hosted.begin(lost)
    if done == "whole":
        await hosted.setting.move(stream, lost)
    else:
        kept = pool.pools.remove_in_flight

        async def cut_off(*_: object) -> None:
            raise FabricUnavailable("the process died")

        pool.pools.remove_in_flight = cut_off  # type: ignore[method-assign]
        with pytest.raises(FabricUnavailable):
            await hosted.setting.move(stream, lost)
        pool.pools.remove_in_flight = kept  # type: ignore[method-assign]
        assert await hosted.holders(stream) == (lost, "queue")
    await hosted.host.renew(other)
    await hosted.setting.move(stream, lost)
    assert await hosted.holders(stream) == (None, "queue") and await hosted.host.flight(lost) == set()
    (head,) = await hosted.setting.log.heads(partition_of(stream, 4), [stream], None)
    assert head is not None and head.status == "live" and head.epoch.n == 2


class FullPools(RedisPools):
    """Pools whose queues take nothing back."""

    async def place(self, *_: object, **__: object) -> Refused:
        return Refused(1)


async def test_a_batch_stream_that_the_queue_does_not_take_back_ends_with_the_reason(pool: Pool) -> None:
    setting, holder = Setting(pool), replica("holder")
    await pool.renew(holder)
    stream = await setting.begin(holder)
    heard, clock = Heard(), HostClock()
    reporter = FailoverReporter(heard, clock, setting.log, setting.unbilled)
    failover = Failover(FullPools(pool.client), setting.log, clock, HostRandom(), reporter)
    await failover.yield_stream(pool.name, holder, work(stream))
    page = await setting.log.watch(stream, None, None, BEGINNING)
    assert page is not None
    end = decode(page.entries[-1].frames)
    assert isinstance(end, End) and end.error is not None and end.error.code == "pool_full" and end.error.retriable
    assert "gave its slot to requests of higher tiers" in end.error.message and "send the request" in end.error.message
    (bill,) = heard.attempts
    assert (bill.ended, bill.billed, bill.error_code) == ("failed", True, "pool_full")


class LostReplies(RedisStreamLog):
    """A log whose replies to a fence are lost ``lost`` times, and then the callers give up."""

    lost = 1

    async def fence(self, *args: Any, **more: Any) -> bool:
        fenced = await super().fence(*args, **more)
        if self.lost:
            self.lost -= 1
            raise FabricUnavailable("the reply is lost")
        return fenced


class Billed(Setting):
    """A setting whose failover tells bills."""

    def __init__(self, pool: Pool, log: type[RedisStreamLog] = RedisStreamLog) -> None:
        super().__init__(pool)
        self.log = log(pool.client, Partitions(4), replica("any"))
        self.heard = Heard()

    def rescuer(self, pools: RedisPools | None = None, reporter: FailoverReporter | None = None) -> Failover:
        """Failover of another process."""
        reporter = reporter or FailoverReporter(self.heard, HostClock(), self.log, self.unbilled)
        return Failover(pools or self.pool.pools, self.log, HostClock(), HostRandom(), reporter)

    async def bills(self, stream: StreamId, lost: ReplicaId) -> list[tuple[str, str, int]]:
        assert await self.pool.pools.holder(self.pool.name, stream) is None
        assert not await self.pool.pools.in_flight(self.pool.name, lost)
        return [(each.id.removeprefix(stream), each.ended, each.output_tokens) for each in self.heard.attempts]

    async def produced(self, lost: ReplicaId, meta: bytes = b"{}", retention_s: int | None = None) -> StreamId:
        """Begin a stream that its replica then produces seven tokens of."""
        stream = await self.begin(lost, meta, retention_s)
        log = RedisStreamLog(self.pool.client, Partitions(4), lost)
        appends = [Append(stream, "1.aa", 1, 1, encode(Delta(0, "Hi", 7)), Usage(3, 0, 0, 7))]
        (reply,) = await log.append(partition_of(stream, 4), appends)
        assert reply.code == AppendCode.OK
        return stream


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("refused", [False, True])
async def test_a_fence_whose_reply_is_lost_is_billed_by_the_next_rescue(pool: Pool, refused: bool, dead: bool) -> None:
    """A living replica repeats its own rescue; for a dead one another process may."""
    setting, lost = Billed(pool, LostReplies), replica("lost")
    await pool.renew(lost)
    stream = await setting.produced(lost)
    if refused:  # after the takeover
        await pool.renew(replica("other"))
    pools = FullPools(pool.client) if refused else pool.pools
    first = setting.rescuer(pools)
    with pytest.raises(FabricUnavailable):
        await first.rescue(pool.name, lost, stream, LOST, dead=dead)
    assert await setting.log.settled(stream) == ("failed", Usage(3, 0, 0, 7))
    for _ in range(2):
        next_ = setting.rescuer(pools) if dead else first
        await next_.rescue(pool.name, lost, stream, LOST, dead=dead)
    assert await setting.bills(stream, lost) == [(":end", "failed", 7)]


async def test_a_rescue_that_no_replica_takes_is_billed_once(pool: Pool) -> None:
    setting, lost = Billed(pool), replica("lost")
    await pool.renew(lost)
    stream = await setting.produced(lost)
    await pool.renew(replica("other"))
    for _ in range(2):
        await setting.rescuer(FullPools(pool.client)).rescue(pool.name, lost, stream, LOST, dead=True)
    assert await setting.bills(stream, lost) == [(":end", "failed", 7)]


@pytest.mark.parametrize("others", [False, True])
async def test_a_stream_that_is_cancelled_after_its_replica_died_is_billed(pool: Pool, others: bool) -> None:
    setting, lost = Billed(pool), replica("lost")
    await pool.renew(lost)
    stream = await setting.produced(lost)
    if others:
        await pool.renew(replica("other"))
    assert (await setting.log.cancel(stream, ACME)).result == "accepted"
    for _ in range(2):
        await setting.rescuer().rescue(pool.name, lost, stream, LOST, dead=True)
    assert await setting.bills(stream, lost) == [(":end", "cancelled", 7)]


async def test_a_cancel_after_an_unfinished_takeover_has_one_bill(pool: Pool) -> None:
    """The pool may list the stream in its queue by now: who removes it there gives its bill the same id."""
    setting, lost = Billed(pool), replica("lost")
    await pool.renew(lost)
    stream = await setting.produced(lost)
    await pool.renew(replica("other"))
    taken = await setting.log.takeover(stream, Epoch(1, "aa"), "bb")
    assert taken is not None and (await setting.log.cancel(stream, ACME)).result == "accepted"
    await setting.rescuer().rescue(pool.name, lost, stream, LOST, dead=True)
    assert await setting.bills(stream, lost) == [(":end", "cancelled", 7)]


async def test_a_cancel_between_two_producers_is_billed_by_the_one_that_comes_back(pool: Pool) -> None:
    """The rescuer has died after its takeover, so the stream is still on the first producer's list."""
    setting, lost = Billed(pool), replica("lost")
    await pool.renew(lost)
    stream = await setting.produced(lost)
    assert await setting.log.takeover(stream, Epoch(1, "aa"), "bb") is not None
    assert (await setting.log.cancel(stream, ACME)).result == "accepted"
    for _ in range(2):
        await setting.rescuer().rescue(pool.name, lost, stream, LOST)
    assert await setting.bills(stream, lost) == [(":end", "cancelled", 7)]


@pytest.mark.parametrize("meta", [b"{}", b"of another version", None])
@pytest.mark.parametrize("way", ["rescue", "orphan"])
async def test_a_stream_whose_request_is_lost_is_billed_by_its_meta(pool: Pool, way: str, meta: bytes | None) -> None:
    """A failover of Redis may lose what the pool has, and the log's shard keep the stream."""
    setting, lost = Billed(pool), replica("lost")
    terms = BillTerms(pool="p", session="s", prices=Prices(output=3_000_000), key="k", user_hash="u", retention_days=9)
    whole = msgspec.json.encode({"facts": {"stream": "resp", "created": 1, "model": "m", "n": 1}, "bill": terms})
    await pool.renew(lost)
    stream = await setting.produced(lost, whole if meta is None else meta)
    await pool.pools.remove_in_flight(pool.name, lost, [stream])
    for _ in range(2):
        if way == "rescue":
            await setting.rescuer().rescue(pool.name, lost, stream, LOST, dead=True)
        else:
            (head,) = await setting.log.heads(partition_of(stream, 4), [stream], None)
            assert head is not None
            await setting.rescuer().end_orphan(stream, head, LOST)
    assert await setting.bills(stream, lost) == [(":end", "failed", 7)]
    (bill,) = setting.heard.attempts
    assert (bill.tenant, bill.prompt_tokens, bill.replica, bill.error_code) == (ACME, 3, lost, LOST.code)
    if meta is None:
        assert (bill.model, bill.endpoint, bill.key, bill.user_hash) == ("m", "chat", "k", "u")
        assert (bill.session_hash, bill.price_micro, bill.retention_days) == ("s", 21, 9)
