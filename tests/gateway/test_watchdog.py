"""Readers are told when the fabric stays away, and one reader's fault costs the others nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from stream_fabric.recovery.failover import Failover
from stream_fabric.recovery.failover_reporter import FailoverReporter
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.tenancy.unbilled import RedisUnbilled
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.frames import Delta, Note, Usage, encode
from stream_fabric.stream.ids import ReplicaId, StreamId
from stream_fabric.stream.log import Append
from stream_gw.delivery import watchdog as watchdog_module
from stream_gw.delivery.local_stream import LocalStream, Subscription
from stream_gw.delivery.watchdog import Watchdog
from stream_gw.observe.trace import ReaderTrace
from stream_gw.routing.holders import Holder
from stream_gw.streams.opened import OpenedStream
from stream_gw.streams.readiness import Readiness
from tests.gateway.in_process import WHO, InProcess, Reading, failover_of, in_process
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

AWAY_S = 1.0


@pytest.fixture
async def world(redis_client: RedisClient) -> AsyncIterator[InProcess]:
    async with in_process(redis_client) as made:
        yield made


async def created(world: InProcess) -> OpenedStream:
    opened = await world.gateway.streams.create(world.call())
    assert opened is not None
    return opened


async def test_readers_hear_of_a_fabric_that_stays_away(world: InProcess) -> None:
    """After the bound each reader gets a retriable error with its cursor; not before it."""
    parts = world.gateway.parts
    opened = await created(world)
    outlet = Reading()
    opened.subscribe(outlet)
    parts.hub.local[opened.id.encode()].receive(opened.epoch.encode(), 1, 2, b'0" a"\n0" b"')
    watchdog = asyncio.create_task(
        Watchdog(parts.hub, parts.directory.holder_of, failover_of(parts.log), every_s=0.05, away_s=AWAY_S).run()
    )
    world.log_link.refuse = True
    world.log_link.cut_all()
    began = asyncio.get_running_loop().time()
    await eventually(lambda: outlet.failures, "the reader to be told")
    assert asyncio.get_running_loop().time() - began >= AWAY_S
    error, cursor = outlet.failures[0]
    assert (error.code, error.retriable, cursor) == ("fabric_unavailable", True, Cursor(1, 2))
    assert not parts.hub.local
    watchdog.cancel()


async def test_a_shorter_outage_ends_no_stream(world: InProcess) -> None:
    parts = world.gateway.parts
    opened = await created(world)
    outlet = Reading()
    subscription = opened.subscribe(outlet)
    watchdog = Watchdog(parts.hub, parts.directory.holder_of, failover_of(parts.log), every_s=0.05, away_s=30.0)
    running = asyncio.create_task(watchdog.run())
    for _ in range(2):
        world.log_link.refuse = True
        world.log_link.cut_all()
        await eventually(lambda: watchdog._away_since, "the outage to be noticed")
        world.log_link.refuse = False
        await eventually(lambda: not watchdog._away_since, "the fabric to be back")
    assert not outlet.failures
    running.cancel()
    subscription.close()


async def test_a_stream_that_nothing_produces_ends_with_its_bill(
    world: InProcess, redis_client: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pool has lost the request, and its replica is dead: the stream's meta has what the bill needs."""
    monkeypatch.setattr(watchdog_module, "ORPHAN_GRACE_S", 0.1)
    parts, used = world.gateway.parts, Usage(9, 0, 0, 1)
    opened = await created(world)
    outlet = Reading()
    opened.subscribe(outlet)
    append = Append(opened.id, opened.epoch, 1, 1, encode(Delta(0, " a", 1)), used)
    await world.log.append(world.log.partition(opened.id), [append])
    reporter = FailoverReporter(world.heard, parts.clock, parts.log, RedisUnbilled(redis_client, Partitions(4)))

    async def nobody(replica: ReplicaId | None, stream: StreamId) -> Holder:
        return Holder.NOBODY

    failover = Failover(parts.pools, parts.log, parts.clock, parts.random, reporter)
    watching = asyncio.create_task(Watchdog(parts.hub, nobody, failover, every_s=0.02).run())
    (bill,) = await eventually(lambda: world.heard.attempts, "the bill")
    watching.cancel()
    assert (bill.stream, bill.ended, bill.billed, bill.error_code) == (opened.id, "failed", True, "replica_lost")
    assert (bill.tenant, bill.model, bill.pool) == (WHO.tenant, world.model, world.model)
    assert (bill.prompt_tokens, bill.output_tokens) == (9, 1)


async def test_a_gateway_is_ready_while_a_part_of_the_fabric_answers(world: InProcess) -> None:
    """The list of pools is on one shard: without it no gateway may leave its load balancer for good."""
    parts = world.gateway.parts
    readiness = Readiness(parts.pools, parts.log, 0.0)
    world.pools_link.refuse = True
    world.pools_link.cut_all()
    assert await readiness.check() == (True, "ready")
    world.log_link.refuse = True
    world.log_link.cut_all()
    is_ready, reason = await readiness.check()
    assert not is_ready and "Redis did not answer" in reason
    world.pools_link.refuse = False
    assert await readiness.check() == (True, "ready")


class Faulty(Reading):
    """An outlet whose encoder fails."""

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        raise KeyError(b"0")


def reader_of(local: LocalStream, outlet: Reading) -> Subscription:
    return local.hub.expect(local.id, local.tenant, Epoch.parse(local.epoch.decode())).attach(outlet)


async def test_a_fault_in_one_readers_encoder_ends_that_reader_alone(world: InProcess) -> None:
    opened = await created(world)
    first, second = Reading(), Reading()
    subscriptions = [opened.subscribe(first)]
    local = world.gateway.parts.hub.local[opened.id.encode()]
    faulty = Faulty()
    subscriptions += [reader_of(local, faulty), reader_of(local, second)]
    local.receive(opened.epoch.encode(), 1, 1, b'0" a"')
    local.receive(opened.epoch.encode(), 2, 2, b'0" b"')
    assert [error.code for error, _ in faulty.failures] == ["internal_error"]
    assert first.lines == second.lines == [b'0" a"', b'0" b"']
    for subscription in subscriptions:
        subscription.close()


async def test_a_started_note_that_comes_with_text_is_traced(world: InProcess) -> None:
    call = world.call()
    trace: ReaderTrace = call.trace
    opened = await world.gateway.streams.create(call)
    assert opened is not None
    subscription = opened.subscribe(Reading())
    local = world.gateway.parts.hub.local[opened.id.encode()]
    note = encode(Note("started", body=msgspec.Raw(b'{"replica":"r7","attempt":2}')))
    local.receive(opened.epoch.encode(), 1, 2, note + b'\n0" a"')
    assert (trace.replica, trace.attempts) == ("r7", 2)
    assert subscription.tokens == 1
    subscription.close()
