"""The scripts of stored responses, on one Redis and in a cluster: the life of a response, and repeated calls."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from stream_fabric.accounts.stored import Begun, DueResponse, HeldResponse, NewResponse, Queue
from stream_fabric.process.host import HostClock
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.tenancy.responses import RedisResponses
from stream_fabric.stream.ids import StreamId, TenantId, new_stream_id
from tests.support.waiting import eventually

RETRY_S = 0.05


@pytest.fixture(params=["redis", pytest.param("cluster", marks=pytest.mark.platform)])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[RedisClient]:
    made = RedisClient(request.getfixturevalue("redis_url" if request.param == "redis" else "redis_cluster_url"))
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def tenant() -> TenantId:
    return TenantId("t-" + secrets.token_hex(8))


def new(conversation: str | None = None, size: int = 10, unsaved_s: int = 100) -> NewResponse:
    stream = new_stream_id(HostClock().now_us() // 1000, secrets.token_bytes(10))
    return NewResponse(stream, b"q" * size, conversation, 10, unsaved_s)


async def due(held: RedisResponses, queue: Queue, response: StreamId) -> DueResponse:
    """Take a response once its time has come; others of the shared Redis are left to come again."""

    async def take() -> DueResponse | None:
        taken = [await held.due(shard, queue) for shard in range(held.shards)]
        return next((each for shard in taken for each in shard if each.id == response), None)

    found: DueResponse = await eventually(take)
    return found


async def test_a_response_goes_from_its_stream_to_the_database(client: RedisClient, tenant: TenantId) -> None:
    held, each = RedisResponses(client, retry_s=RETRY_S), new("conv_1")
    for _ in range(2):
        assert await held.begin(tenant, each) == Begun()
    assert await held.runs_in(tenant, "conv_1") == each.id
    assert (await held.begin(tenant, new("conv_1"))).blocked_by == each.id
    for number in range(60):  # some of them share the tenant's shard
        assert await held.begin(TenantId(f"{tenant}-{number}"), new("conv_1")) == Begun(), (
            "another tenant's conversation"
        )
    assert await due(held, "live", each.id) == DueResponse(tenant, each.id, pytest.approx(0, abs=60), False)  # type: ignore[arg-type]
    await due(held, "live", each.id)  # it comes again, as its taker did nothing
    for outcome in (b"first", b"second"):
        assert await held.complete(tenant, each.id, outcome)
    assert await held.unsaved() >= 1
    assert await held.find(tenant, each.id) == HeldResponse(each.request, b"first")
    await due(held, "unsaved", each.id)
    await due(held, "unsaved", each.id)
    for _ in range(2):
        assert await held.saved(tenant, each.id)
    assert await held.runs_in(tenant, "conv_1") is None
    assert await held.find(tenant, each.id) == HeldResponse(each.request, b"first")
    assert await held.begin(tenant, new("conv_1")) == Begun()


async def test_only_its_tenant_has_a_response(client: RedisClient, tenant: TenantId) -> None:
    held, each = RedisResponses(client), new()
    await held.begin(tenant, each)
    for number in range(40):  # some of them share its shard
        stranger = TenantId(f"{tenant}{number}")
        assert await held.find(stranger, each.id) is None
        assert not await held.delete(stranger, each.id)
        await held.drop(stranger, each.id)
    assert await held.find(tenant, each.id) is not None


async def test_a_deletion_is_remembered_while_a_write_may_run(client: RedisClient, tenant: TenantId) -> None:
    held, running, ended = RedisResponses(client, retry_s=RETRY_S), new(), new()
    for each in (running, ended):
        await held.begin(tenant, each)
    await held.complete(tenant, ended.id, b"p")
    for each in (running, ended):
        assert await held.delete(tenant, each.id)
        assert not await held.delete(tenant, each.id)
        assert not await held.complete(tenant, each.id, b"late")
    assert await held.find(tenant, running.id) is None, "no process can be writing it"
    assert await held.find(tenant, ended.id) == "deleted"
    assert (await due(held, "unsaved", ended.id)).is_deleted
    assert not await held.saved(tenant, ended.id), "the writer deletes its row"
    assert await held.find(tenant, ended.id) == "deleted"


async def test_bytes_count_as_long_as_a_response_is_held(client: RedisClient, tenant: TenantId) -> None:
    held = RedisResponses(client, bytes_max=250)
    kept = [new(size=100, unsaved_s=0) for _ in range(3)]
    assert [(await held.begin(tenant, each)).is_full for each in kept] == [False, False, True]
    await held.drop(tenant, kept[0].id)
    assert not (await held.begin(tenant, kept[2])).is_full
    await held.complete(tenant, kept[1].id, b"p" * 500)  # what was generated is not lost
    assert (await held.begin(tenant, new(size=1))).is_full
    await held.delete(tenant, kept[1].id)
    short = NewResponse(kept[0].id, b"q" * 100, None, 0, 0)
    assert not (await held.begin(tenant, short)).is_full
    await held.complete(tenant, short.id, b"")

    async def has_room() -> bool:
        return not (await held.begin(tenant, new(size=100))).is_full

    await eventually(has_room, "the response that is kept for no time expires")


async def test_a_full_database_refuses_for_a_while(client: RedisClient, tenant: TenantId) -> None:
    held = RedisResponses(client)
    await held.mark_full(tenant, 0.1)
    assert (await held.begin(tenant, new())).is_full

    async def is_over() -> bool:
        return not (await held.begin(tenant, new())).is_full

    await eventually(is_over)
