"""Creation of a stream when one of its calls fails, or when its caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from stream_fabric.accounts.account import Subject
from stream_fabric.accounts.records import Limits, PlanRecord, TenantRecord
from stream_fabric.errors import (
    BadRequest,
    FabricError,
    FabricUnavailable,
    ModerationUnavailable,
    NoReplica,
    NotFound,
    ReplicaLost,
    StreamCancelled,
    TooMany,
)
from stream_fabric.limits import RECONNECT_S_MAX
from stream_fabric.moderation.moderator import EndpointFailed, Moderator
from stream_fabric.moderation.remote import Endpoint
from stream_fabric.pool.home import home_partition
from stream_fabric.pool.placement import TIERS
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery import settlements as settlements_module
from stream_fabric.recovery.settlements import Settlements, settle_overdue
from stream_fabric.redis.client import RedisClient
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.frames import ChoiceEnd, Delta, End, ErrorInfo, Frame, Note, Open, Usage, encode
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId, new_stream_id
from stream_fabric.stream.log import Append, AppendCode
from stream_gw.auth import ALL_SCOPES, KeyStore, Principal
from stream_gw.delivery import hub as hub_module
from stream_gw.observe.trace import ReaderTrace
from stream_gw.streams.create_call import CreateCall
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.opened import OpenedStream
from stream_gw.streams.parts import GatewayParts
from tests.gateway.in_process import TENANT, InProcess, Reading, in_process
from tests.support.waiting import eventually

SLOW_S = 0.6


@pytest.fixture
async def world(redis_client: RedisClient) -> AsyncIterator[InProcess]:
    async with in_process(redis_client) as made:
        yield made


async def is_free(world: InProcess, key: str, tenant: TenantId = TENANT) -> bool:
    other = new_stream_id(1, HostRandom().token_bytes(10))
    bound, _ = await world.index.claim(tenant, key, other, "another body")
    if bound == other:
        await world.index.release(tenant, key, other)
    return bound == other


async def assert_withdrawn_before_its_key_is_free(world: InProcess, call: CreateCall) -> None:
    assert call.trace.facts is not None and call.key is not None
    stream: StreamId = call.trace.facts.stream
    key = call.key

    async def free() -> bool:
        return await is_free(world, key)

    await eventually(free, "the key to be free")
    settled = await world.log.settled(stream)
    assert settled is not None, "the create landed"
    assert settled[0] == "failed", "and was withdrawn after it had"
    assert not world.gateway.parts.hub.local


async def test_a_create_that_lands_late_is_withdrawn_before_its_key_is_free(world: InProcess) -> None:
    world.log_link.delay_s = SLOW_S
    world.pools_link.refuse = True
    world.pools_link.cut_all()
    call = world.call(key=HostRandom().token_hex(8))
    with pytest.raises(FabricError):
        await world.gateway.streams.create(call)
    await assert_withdrawn_before_its_key_is_free(world, call)


async def test_a_creation_that_is_cancelled_is_withdrawn_before_its_key_is_free(world: InProcess) -> None:
    world.log_link.delay_s = SLOW_S
    call = world.call(key=HostRandom().token_hex(8))
    creation = asyncio.create_task(world.gateway.streams.create(call))
    await eventually(lambda: call.trace.placing, "its calls to be sent")
    await asyncio.sleep(0)
    creation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creation
    await assert_withdrawn_before_its_key_is_free(world, call)


async def test_a_repeat_begins_anew_where_the_error_of_the_first_was_retriable(world: InProcess) -> None:
    """SDKs repeat with the same key. Else the repeat of a request whose replica was lost is the same failure."""
    create, log = world.gateway.streams.create, world.log
    for error, begins_anew in ((ReplicaLost("gone"), True), (BadRequest("no such tool"), False)):
        key = HostRandom().token_hex(8)
        first = await create(world.call(key=key))
        assert first is not None and await log.fence(first.id, None, "aa", ErrorInfo.of(error))
        repeats = await asyncio.gather(*(create(world.call(key=key)) for _ in range(3)))
        ids = {repeat.id for repeat in repeats if repeat is not None}
        assert len(ids) == 1, "one stream for all of them"
        assert (ids != {first.id}) is begins_anew, error
        resumed = await create(replace(world.call(key=key), after=Cursor(1, 0)))
        assert resumed is not None and {resumed.id} == ids
        assert (await log.settled(first.id) or ("",))[0] == "failed"


async def test_a_reader_of_a_failed_request_reads_on_to_its_end(world: InProcess) -> None:
    key = HostRandom().token_hex(8)
    first = await world.gateway.streams.create(world.call(key=key))
    assert first is not None
    await world.log.fence(first.id, None, "aa", ErrorInfo.of(ReplicaLost("gone")))
    resumed = await world.gateway.streams.create(replace(world.call(key=key), after=Cursor(1, 0)))
    assert resumed is not None and resumed.id == first.id


async def test_a_request_that_its_reader_cannot_read_leaves_its_key_free(world: InProcess) -> None:
    """A client that corrects the request may use the key again."""
    key = HostRandom().token_hex(8)
    with pytest.raises(BadRequest, match="unknown dialect"):
        await world.gateway.streams.create(replace(world.call(key=key), dialect="none"))
    assert await is_free(world, key)


async def test_a_request_that_a_full_gateway_refuses_leaves_its_key_free(
    world: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry goes to another gateway, where it must not wait for this one."""
    monkeypatch.setattr(hub_module, "STREAMS_PER_GATEWAY_MAX", 0)
    key = HostRandom().token_hex(8)
    with pytest.raises(TooMany):
        await world.gateway.streams.create(world.call(key=key))
    assert await is_free(world, key)


async def test_the_streams_of_a_pool_share_its_home_partitions(world: InProcess) -> None:
    """Two of the four, however many streams: a replica's batches stay large."""
    made = set()
    for number in range(24):
        opened = await world.gateway.streams.create(world.call(seed=number))
        assert opened is not None
        made.add(world.log.partition(opened.id))
    assert made == {home_partition(world.model, 1, 4, draw) for draw in range(2)}


async def test_a_stream_that_was_created_is_delivered_to_the_outlet_that_subscribes(world: InProcess) -> None:
    """The frames that come between creation and subscription are not lost."""
    opened = await world.gateway.streams.create(world.call())
    assert opened is not None and not opened.attached
    local = world.gateway.parts.hub.local[opened.id.encode()]
    local.receive(opened.epoch.encode(), 1, 1, b'{"k":"open","block":0,"kind":"text"}')
    local.receive(opened.epoch.encode(), 2, 3, b'0" a"\n0" b"')
    outlet = Reading()
    subscription = opened.subscribe(outlet)
    assert outlet.lines == [b'{"k":"open","block":0,"kind":"text"}', b'0" a"', b'0" b"']
    local.receive(opened.epoch.encode(), 4, 4, b'0" c"')
    assert outlet.lines[-1] == b'0" c"'
    subscription.close()


# --- limits of plans ---------------------------------------------------------------------------------------


@pytest.fixture
async def limited(redis_client: RedisClient) -> AsyncIterator[tuple[InProcess, Principal]]:
    """A gateway, and a caller whose plan has limits and the lowest tier."""
    tenant = f"t-{HostRandom().token_hex(4)}"
    plan = PlanRecord("small", "batch", tenant=Limits(requests_per_min=5, tokens_per_min=5000, streams=2))
    keys = KeyStore([plan, TenantRecord(tenant, "small")])
    async with in_process(redis_client, keys=keys) as made:
        yield made, Principal(TenantId(tenant), ALL_SCOPES)


async def test_a_request_that_is_refused_after_its_admission_counts_as_never_sent(
    limited: tuple[InProcess, Principal],
) -> None:
    world, who = limited
    world.pools_link.refuse = True
    world.pools_link.cut_all()
    for _ in range(8):  # more than the limit of requests
        with pytest.raises(FabricError):
            await world.gateway.streams.create(replace(world.call(max_tokens=1000), who=who))
        parts = world.gateway.parts
        subjects = parts.authenticator.keys.subjects(who, None, world.model)

        async def returned(subjects: list[Subject] = subjects) -> bool:
            (use,) = await world.gateway.parts.accounts.uses(who.tenant, subjects)
            return use.requests < 0.5 and use.tokens < 1 and use.streams == 0

        await eventually(returned, "the reservation to be given back")


@asynccontextmanager
async def settling(parts: GatewayParts) -> AsyncIterator[None]:
    """Settle the reservations of streams that end, as a gateway does."""
    settlements = Settlements(parts.accounts, HostRandom())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.log, "_on_ended", settlements.add)
        task = asyncio.create_task(settlements.run())
        try:
            yield
        finally:
            task.cancel()


async def is_returned(parts: GatewayParts, who: Principal) -> bool:
    return not await parts.accounts.reserved(who.tenant)


async def test_a_request_that_the_pool_refuses_counts_as_never_sent(
    limited: tuple[InProcess, Principal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of its stream is settled too, like that of every stream."""
    world, who = limited
    parts = world.gateway.parts
    monkeypatch.setattr(parts.pools, "_queue_max", 0)
    await world.pools.retire(world.model, world.replica, leaving=True)
    subjects = parts.authenticator.keys.subjects(who, None, world.model)
    async with settling(parts):
        for key in (None, "a", None, "b"):
            with pytest.raises(NoReplica):
                await world.gateway.streams.create(replace(world.call(key=key, max_tokens=100), who=who))
            await eventually(lambda: is_returned(parts, who), "the reservation to be given back")
            (use,) = await parts.accounts.uses(who.tenant, subjects)
            assert use.requests == 0


async def test_a_creation_that_is_cancelled_gives_its_reservation_back(limited: tuple[InProcess, Principal]) -> None:
    world, who = limited
    world.log_link.delay_s = SLOW_S
    call = replace(world.call(), who=who)
    creation = asyncio.create_task(world.gateway.streams.create(call))
    await eventually(lambda: world.gateway.parts.hub.local, "its calls to be sent")
    await asyncio.sleep(0)
    creation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creation

    async def returned() -> bool:
        return not await world.gateway.parts.accounts.reserved(who.tenant)

    await eventually(returned, "the reservation to be given back")


async def withdrawn_late(world: InProcess, call: CreateCall, *written: Frame, used: Usage) -> StreamId:
    """Let a replica write frames of a stream whose creation then fails, as when a user's shard does not answer."""
    parts, has_begun = world.gateway.parts, asyncio.Event()

    async def unheard(*_: Any) -> None:
        await has_begun.wait()
        raise FabricUnavailable("the shard of the user's streams does not answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.index, "add_live", unheard)
        creation = asyncio.create_task(world.gateway.streams.create(call))
        await eventually(lambda: call.trace.role == "created", "the stream to exist")
        assert call.trace.facts is not None
        name = call.trace.facts.stream
        work = await eventually(lambda: world.pools.work(world.model, name), "the request to be placed")
        lines = b"\n".join(map(encode, written))
        status = written[-1].status if isinstance(written[-1], End) else ""
        append = Append(name, work.epoch, 1, len(written), lines, used, b"", status)
        (reply,) = await parts.log.append(world.log.partition(name), [append])
        assert reply.code is AppendCode.OK
        has_begun.set()
        with pytest.raises(FabricUnavailable):
            await creation
    return name


async def test_what_a_replica_made_of_a_withdrawn_request_is_not_counted(limited: tuple[InProcess, Principal]) -> None:
    world, who = limited
    parts, hour = world.gateway.parts, int(world.gateway.parts.unix_s() // 3600)
    call = replace(world.call(key=HostRandom().token_hex(8), user="ann", max_tokens=100), who=who)
    subjects = parts.authenticator.keys.subjects(who, "ann", world.model)
    async with settling(parts):
        stream = await withdrawn_late(world, call, Open(0, 0, "text"), Delta(0, " a", 1), used=Usage(9, 0, 0, 1))
        await eventually(lambda: is_free(world, str(call.key), who.tenant), "the key to be free")
        assert await world.log.settled(stream) == ("failed", Usage())
        await eventually(lambda: is_returned(parts, who), "the reservation to be given back")
        (use,) = await parts.accounts.uses(who.tenant, subjects)
        assert use.requests == 0
    for at in (hour, hour + 1):
        assert not await world.log.usage(who.tenant, at)


async def test_an_answer_that_ends_before_its_request_is_withdrawn_is_kept(
    limited: tuple[InProcess, Principal],
) -> None:
    """A retry gets it, and the tenant pays for one answer."""
    world, who = limited
    parts, key = world.gateway.parts, HostRandom().token_hex(8)
    call = replace(world.call(key=key, user="ann", max_tokens=100), who=who)
    subjects = parts.authenticator.keys.subjects(who, "ann", world.model)
    frames = (Open(0, 0, "text"), Delta(0, " a", 1), ChoiceEnd(0, "stop"), End("completed", Usage(9, 0, 0, 1)))
    async with settling(parts):
        stream = await withdrawn_late(world, call, *frames, used=Usage(9, 0, 0, 1))
        await eventually(lambda: is_returned(parts, who), "the reservation to be settled")
        (use,) = await parts.accounts.uses(who.tenant, subjects)
        assert use.requests > 0.9, "it counts"
        again = replace(call, trace=ReaderTrace(parts.tracer, "req", "sse"))
        opened = await world.gateway.streams.create(again)
        assert opened is not None and (opened.id, opened.attached) == (stream, True)


async def test_an_admission_that_is_cancelled_leaves_neither_reservation_nor_key(
    limited: tuple[InProcess, Principal], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, who = limited
    accounts, has_reserved = world.gateway.parts.accounts, asyncio.Event()
    admit = accounts.admit

    async def unheard(*args: Any) -> None:
        await admit(*args)
        has_reserved.set()
        await asyncio.Event().wait()  # the reply does not come

    monkeypatch.setattr(accounts, "admit", unheard)
    key = HostRandom().token_hex(8)
    creation = asyncio.create_task(world.gateway.streams.create(replace(world.call(key=key), who=who)))
    await has_reserved.wait()
    assert await accounts.reserved(who.tenant)
    creation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creation

    async def returned() -> bool:
        return not await accounts.reserved(who.tenant)

    await eventually(returned, "the reservation to be given back", 5.0)
    await eventually(lambda: is_free(world, key, who.tenant), "the key to be free", 5.0)


async def test_an_image_takes_no_more_of_the_limits_than_an_image(limited: tuple[InProcess, Principal]) -> None:
    """By its bytes it would need 50 times the tenant's limit of a minute, and be refused for good."""
    world, who = limited
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    messages = [{"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}]
    assert await world.gateway.streams.create(replace(world.call(messages=messages, max_tokens=100), who=who))


async def test_a_plan_caps_the_tier_of_a_request(limited: tuple[InProcess, Principal]) -> None:
    world, who = limited
    opened = await world.gateway.streams.create(replace(world.call(service_tier="priority"), who=who))
    assert opened is not None
    work = await world.pools.work(world.model, opened.id)
    assert work is not None
    assert TIERS[work.tier] == "batch"
    assert work.reserved


async def test_an_overdue_reservation_is_settled_by_the_next_admission(limited: tuple[InProcess, Principal]) -> None:
    """A gateway that died between the admission and the stream costs the tenant a place for a while only."""
    world, who = limited
    accounts = world.gateway.parts.accounts
    subjects = world.gateway.parts.authenticator.keys.subjects(who, None, world.model)
    lost, running = new_stream_id(1, bytes(10)), new_stream_id(2, bytes(10))
    await accounts.admit(who.tenant, lost, subjects, 100)
    await accounts.admit(who.tenant, running, subjects, 100)
    await world.log.create(running, Epoch(1, "aa"), who.tenant, b"{}", None, reserved=True)
    await settle_overdue(accounts, world.log, who.tenant, [lost, running], _held)
    assert set(await accounts.reserved(who.tenant)) == {running}
    await world.log.cancel(running, who.tenant)
    await settle_overdue(accounts, world.log, who.tenant, [running], _held)
    assert not await accounts.reserved(who.tenant)


async def _held(replica: ReplicaId | None, stream: StreamId) -> int:
    return 1


async def test_a_reservation_whose_stream_runs_nowhere_is_settled(
    limited: tuple[InProcess, Principal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis was started anew from a copy of a minute ago: streams that have ended since run in it."""
    monkeypatch.setattr(settlements_module, "ORPHAN_GRACE_S", 0.5)
    world, who = limited
    accounts, directory = world.gateway.parts.accounts, world.gateway.parts.directory
    subjects = world.gateway.parts.authenticator.keys.subjects(who, None, world.model)
    ended, late = (new_stream_id(1, HostRandom().token_bytes(10)) for _ in range(2))
    for stream in (ended, late):
        await accounts.admit(who.tenant, stream, subjects, 100)
        await world.log.create(stream, Epoch(1, "aa"), who.tenant, b"{}", None, reserved=True)
    (info,) = await world.pools.replicas(world.model)
    overdue = [ended, late]
    checking = asyncio.create_task(settle_overdue(accounts, world.log, who.tenant, overdue, directory.holder_of))
    await asyncio.sleep(0.05)
    await world.pools.report(info, ttl_s=60, running={late: ""})  # the pool was lost too, and the agent says so
    await checking
    assert set(await accounts.reserved(who.tenant)) == {late}


async def test_a_stream_that_ends_before_its_placement_is_read_was_created(world: InProcess) -> None:
    """The replica may be quicker than the reply of the placement."""
    world.pools_link.pause()
    call = world.call()
    creation = asyncio.create_task(world.gateway.streams.create(call))
    await eventually(lambda: call.trace.role == "created", "the stream to exist")
    facts = call.trace.facts
    assert facts is not None
    (subscription,) = world.gateway.parts.hub.local[facts.stream.encode()].subs
    call.trace.first = call.trace.received + 5
    subscription.finish_trace("completed")
    world.pools_link.resume()
    await creation
    (trace,) = world.traces
    assert (trace.role, trace.ttft_us) == ("created", 5)


async def test_a_stream_that_ends_before_its_creation_is_read_was_created(world: InProcess) -> None:
    world.log_link.pause()
    call = world.call()
    creation = asyncio.create_task(world.gateway.streams.create(call))
    await eventually(lambda: world.gateway.parts.hub.local, "its calls to be sent")
    (local,) = world.gateway.parts.hub.local.values()
    started = Note("started", body=msgspec.Raw(b'{"replica":"r","attempt":1}'))
    frames = [started, Open(0, 0, "text"), Delta(0, " a", 1), ChoiceEnd(0, "stop"), End("completed")]
    local.receive(local.epoch, 1, len(frames), b"\n".join(map(encode, frames)))
    world.log_link.resume()
    await creation
    (trace,) = world.traces
    assert (trace.role, trace.ended) == ("created", "completed")
    assert trace.ttft_us > 0


async def test_a_request_that_is_refused_after_its_stream_was_created_is_refused(
    world: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence that withdraws the stream may be read before the refusal is raised."""
    monkeypatch.setattr(world.gateway.parts.pools, "_queue_max", 0)
    await world.pools.retire(world.model, world.replica, leaving=True)
    call = world.call()
    with pytest.raises(NoReplica):
        await world.gateway.streams.create(call)
    (trace,) = world.traces
    assert (trace.role, trace.ended) == ("refused", "refused")


async def test_a_stream_that_is_cancelled_before_it_begins_answers_cancelled(world: InProcess) -> None:
    key = HostRandom().token_hex(8)
    call = world.call(key=key)
    world.log_link.pause()
    creation = asyncio.create_task(world.gateway.streams.create(call))
    await eventually(lambda: call.trace.facts, "the id of the stream")
    assert call.trace.facts is not None
    reply = await world.log.cancel(call.trace.facts.stream, TENANT)
    assert reply.result == "pending"
    world.log_link.resume()
    with pytest.raises(StreamCancelled) as raised:
        await creation
    assert (raised.value.http_status, raised.value.code, raised.value.retriable) == (499, "cancelled", False)
    assert call.trace.role == "refused"


# --- idempotency keys --------------------------------------------------------------------------------------


class SlowEndpoint:
    """A moderation endpoint: its first question is answered when ``answered`` is set, all others at once."""

    timeout_s = 3.0

    def __init__(self) -> None:
        self.questions = 0
        self.answered = asyncio.Event()

    async def flagged(self, texts: Sequence[str]) -> str | None:
        self.questions += 1
        if self.questions == 1:
            await self.answered.wait()
            raise EndpointFailed("no answer")
        return None


@pytest.fixture
async def moderated(redis_client: RedisClient) -> AsyncIterator[tuple[InProcess, Principal, SlowEndpoint]]:
    """A gateway, and a caller whose plan has limits and moderation."""
    tenant, endpoint = f"t-{HostRandom().token_hex(4)}", SlowEndpoint()
    plan = PlanRecord("checked", tenant=Limits(streams=9), moderation="prompt")
    async with in_process(redis_client, keys=KeyStore([plan, TenantRecord(tenant, "checked")])) as made:
        moderator = Moderator(None, cast(Endpoint, endpoint), lambda outcome, s: None, HostClock(), fail_open=False)
        made.gateway = Gateway(replace(made.gateway.parts, moderator=moderator))
        yield made, Principal(TenantId(tenant), ALL_SCOPES), endpoint


@pytest.mark.parametrize("limits", [Limits(streams=9), Limits()])
async def test_moderation_is_part_of_the_admission_in_a_trace(redis_client: RedisClient, limits: Limits) -> None:
    """Also for a plan without limits."""
    tenant, endpoint = f"t-{HostRandom().token_hex(4)}", SlowEndpoint()
    plan = PlanRecord("checked", tenant=limits, moderation="prompt")
    async with in_process(redis_client, keys=KeyStore([plan, TenantRecord(tenant, "checked")])) as world:
        moderator = Moderator(None, cast(Endpoint, endpoint), lambda outcome, s: None, HostClock(), fail_open=False)
        streams = Gateway(replace(world.gateway.parts, moderator=moderator)).streams
        call = replace(world.call(), who=Principal(TenantId(tenant), ALL_SCOPES))
        creation = asyncio.create_task(streams.create(call))
        await eventually(lambda: endpoint.questions, "the check")
        asked_us = world.gateway.parts.clock.monotonic_us()
        endpoint.answered.set()
        with pytest.raises(ModerationUnavailable):
            await creation
        (told,) = world.traces
        assert told.phases.gateway_us <= asked_us - call.trace.received
        assert told.phases.admission_us == told.wall_us - told.phases.gateway_us


@pytest.mark.parametrize("ends", ["refused", "cancelled"])
async def test_a_repeat_takes_the_key_over_from_a_request_that_ends_in_moderation(
    moderated: tuple[InProcess, Principal, SlowEndpoint], ends: str
) -> None:
    """It has a reservation of its own, and further repeats attach to it."""
    world, who, endpoint = moderated
    call = replace(world.call(key=HostRandom().token_hex(8)), who=who)

    def create() -> asyncio.Task[OpenedStream | None]:
        trace = ReaderTrace(world.gateway.parts.tracer, "req", "sse")
        return asyncio.create_task(world.gateway.streams.create(replace(call, trace=trace)))

    first = create()
    await eventually(lambda: endpoint.questions, "the check of the first")
    second = create()
    await asyncio.sleep(RECONNECT_S_MAX * 1.3)
    assert endpoint.questions == 1 and not second.done(), "it waits for as long as a check may take"
    if ends == "refused":
        endpoint.answered.set()
        with pytest.raises(ModerationUnavailable):
            await first
    else:
        first.cancel()
    opened = await second
    assert opened is not None and not opened.attached
    assert list(await world.gateway.parts.accounts.reserved(who.tenant)) == [opened.id]
    again = await create()
    assert again is not None and (again.id, again.attached) == (opened.id, True)


async def test_a_repeat_of_a_request_whose_answer_is_deleted_reserves_nothing(redis_client: RedisClient) -> None:
    tenant = TenantId(f"t-{HostRandom().token_hex(4)}")
    plan = PlanRecord("zero", tenant=Limits(requests_per_min=5, streams=2), retention_s=0)
    async with in_process(redis_client, keys=KeyStore([plan, TenantRecord(tenant, "zero")])) as world:
        accounts, who = world.gateway.parts.accounts, Principal(tenant, ALL_SCOPES)
        key = HostRandom().token_hex(8)
        opened = await world.gateway.streams.create(replace(world.call(key=key), who=who))
        assert opened is not None
        await world.log.cancel(opened.id, tenant)
        await world.gateway.admission.withdraw(tenant, opened.id)
        assert await world.log.forget(opened.id, world.gateway.parts.name)
        with pytest.raises(NotFound):
            await world.gateway.streams.create(replace(world.call(key=key), who=who))
        assert not await accounts.reserved(tenant)
