"""The published records of tenants: the same cases in memory, in Redis and in a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_fabric.accounts.ports import TenantRecords
from stream_fabric.errors import FabricLost
from stream_fabric.limits import TENANT_RECORDS_MAX
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.tenancy.tenants import RedisTenants
from stream_fabric.redis.topology import slot_of
from tests.support.memory_tenants import MemoryTenants
from tests.support.redis import RedisServer

SLOT = slot_of("tenants")
KEYS = ("sg:{tenants}:records", "sg:{tenants}:revisions")


@pytest.fixture(params=["memory", "redis", "cluster"])
async def records(request: pytest.FixtureRequest) -> AsyncIterator[TenantRecords]:
    if request.param == "memory":
        yield MemoryTenants()
        return
    client = RedisClient(request.getfixturevalue("redis_url" if request.param == "redis" else "redis_cluster_url"))
    await client.start()
    await client.execute(SLOT, "DEL", *KEYS)
    yield RedisTenants(client)
    await client.execute(SLOT, "DEL", *KEYS)
    await client.close()


async def read_all(records: TenantRecords) -> tuple[int, dict[str, bytes]]:
    """All changes, by as many reads as they need."""
    since, found = 0, dict[str, bytes]()
    while True:
        newest, page = await records.changes(since)
        if not page:
            assert newest == since
            return since, found
        assert newest > since and not set(page) & set(found), "each page begins after the last one"
        found |= page
        since = newest


async def test_nothing_is_published_at_first(records: TenantRecords) -> None:
    assert await records.revision() == 0
    assert await records.changes(0) == (0, {})
    assert await records.changes(7) == (7, {}), "a reader of a Redis that lost everything keeps its place"
    await records.publish({})
    assert await records.revision() == 0


async def test_changes_come_once_and_with_their_newest_value(records: TenantRecords) -> None:
    await records.publish({"tenant:a": (1, b"a1"), "plan:p": (2, b"p2")})
    assert await records.changes(0) == (2, {"tenant:a": b"a1", "plan:p": b"p2"})
    assert await records.changes(2) == (2, {})
    await records.publish({"tenant:a": (3, b"a3")})
    assert await records.changes(2) == (3, {"tenant:a": b"a3"})
    assert await records.changes(0) == (3, {"plan:p": b"p2", "tenant:a": b"a3"})
    assert await records.revision() == 3


async def test_an_older_or_equal_revision_changes_nothing(records: TenantRecords) -> None:
    await records.publish({"tenant:a": (5, b"new")})
    await records.publish({"tenant:a": (4, b"old"), "tenant:b": (6, b"b")})
    await records.publish({"tenant:a": (5, b"other")})
    assert await records.changes(0) == (6, {"tenant:a": b"new", "tenant:b": b"b"})


async def test_nothing_is_published_on_top_of_what_is_lost(records: TenantRecords) -> None:
    """Redis would seem complete up to the new revision."""
    await records.publish({"tenant:a": (5, b"a")}, after=0)
    await records.publish({"tenant:b": (7, b"b")}, after=5)
    with pytest.raises(FabricLost):
        await records.publish({"tenant:c": (9, b"c")}, after=8)
    await records.publish({"tenant:c": (6, b"c")}, after=5)
    assert await records.changes(5) == (7, {"tenant:c": b"c", "tenant:b": b"b"})
    await records.publish({}, after=99)


async def test_a_deleted_record_is_an_empty_one(records: TenantRecords) -> None:
    await records.publish({"tenant:a": (1, b"a")})
    await records.publish({"tenant:a": (2, b"")})
    assert await records.changes(1) == (2, {"tenant:a": b""})
    assert await records.changes(0) == (2, {"tenant:a": b""})


async def test_many_records_come_in_pages_the_oldest_first(records: TenantRecords) -> None:
    count = 2 * TENANT_RECORDS_MAX + 10
    names = {f"tenant:{number}": (number, b"%d" % number) for number in range(1, count + 1)}
    await records.publish(names)
    newest, page = await records.changes(0)
    assert newest == TENANT_RECORDS_MAX and len(page) == TENANT_RECORDS_MAX
    assert await read_all(records) == (count, {name: record for name, (_, record) in names.items()})


async def test_records_of_one_revision_stay_together(records: TenantRecords) -> None:
    """A page ends before or after them, or a reader would miss some."""
    first = {f"tenant:a{number}": (1, b"a") for number in range(TENANT_RECORDS_MAX - 1)}
    second = {f"tenant:b{number}": (2, b"b") for number in range(TENANT_RECORDS_MAX + 1)}
    await records.publish(first | second | {"plan:p": (3, b"p")})
    newest, page = await records.changes(0)
    assert newest == 1 and page.keys() == first.keys()
    newest, page = await records.changes(1)
    assert newest == 2 and page.keys() == second.keys()
    assert await records.changes(2) == (3, {"plan:p": b"p"})


async def test_large_revisions_keep_their_digits(records: TenantRecords) -> None:
    large = (1 << 53) - 2
    await records.publish({"tenant:a": (large, b"a"), "tenant:b": (large + 1, b"b")})
    assert await records.changes(large) == (large + 1, {"tenant:b": b"b"})
    assert await records.revision() == large + 1


async def test_publishers_at_the_same_time_end_with_the_newest(records: TenantRecords) -> None:
    await asyncio.gather(*(records.publish({"tenant:a": (each, b"%d" % each)}) for each in (3, 9, 1, 7, 2, 8)))
    assert await records.changes(0) == (9, {"tenant:a": b"9"})


_CHANGES = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 2)), min_size=1, max_size=30)


@given(_CHANGES, st.randoms(use_true_random=False), st.integers(1, 4))
@settings(max_examples=60)
def test_any_order_of_publishing_converges(
    redis_url: str, changed: list[tuple[str, int]], random: object, at_once: int
) -> None:
    """A reader that reads between the calls ends with what one reads who reads everything at the end."""

    async def run() -> None:
        client = RedisClient(redis_url)
        await client.start()
        await client.execute(SLOT, "DEL", *KEYS)
        try:
            await _converges([MemoryTenants(), RedisTenants(client)], changed, random, at_once)
        finally:
            await client.execute(SLOT, "DEL", *KEYS)
            await client.close()

    asyncio.run(run())


async def _converges(both: list[TenantRecords], changed: list[tuple[str, int]], random: object, at_once: int) -> None:
    history = [(name, revision, b"" if kind == 0 else b"%d" % revision) for revision, (name, kind) in
               enumerate(changed, 1)]  # fmt: skip
    last = {name: (revision, record) for name, revision, record in history}
    order = list(history)
    random.shuffle(order)  # type: ignore[attr-defined]
    order += history[-at_once:]  # the last ones again, as a repeated command would
    for records in both:
        for first in range(0, len(order), at_once):
            batch: dict[str, tuple[int, bytes]] = {}
            for name, revision, record in order[first : first + at_once]:
                batch[name] = max(batch.get(name, (0, b"")), (revision, record))
            await records.publish(batch)
        assert await read_all(records) == (len(history), {name: record for name, (_, record) in last.items()})
        assert await records.revision() == len(history)


async def test_a_redis_at_its_memory_limit_takes_a_revocation() -> None:
    with RedisServer(**{"maxmemory-policy": "noeviction"}) as server:
        client = RedisClient(server.url)
        await client.start()
        records = RedisTenants(client)
        await records.publish({"tenant:a": (1, b"a")})
        server("CONFIG", "SET", "maxmemory", "1")
        await records.publish({"tenant:a": (2, b"")})
        assert await records.changes(1) == (2, {"tenant:a": b""})
        await client.close()
