"""The stream of events in Redis: bounded, nothing twice, nothing thrown away unread."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from stream_fabric.redis.topology import slot_of
from tests.support.redis import RedisServer


@pytest.fixture
def part() -> str:
    return os.urandom(4).hex()


def plain(*records: bytes) -> Sequence[tuple[bytes, bool]]:
    return [(record, False) for record in records]


async def test_what_is_appended_is_read_in_order_after_an_offset(redis_client: RedisClient, part: str) -> None:
    events = RedisEvents(redis_client, part)
    assert await events.head() == 0
    assert await events.append("a", 1, plain(b"1", b"2")) == []
    assert await events.append("b", 1, plain(b"3")) == []
    (first, _), (second, _), _ = held = await events.read(0, 10)
    assert [record for _, record in held] == [b"1", b"2", b"3"]
    assert await events.head() == held[-1][0]
    assert await events.read(first, 1) == [(second, b"2")]
    assert await events.read(held[-1][0], 10) == []


async def test_a_batch_sent_again_is_not_in_twice(redis_client: RedisClient, part: str) -> None:
    events = RedisEvents(redis_client, part, bytes_max=400)
    batch = plain(b"1" * 100, b"2" * 100, b"3" * 100)
    assert await events.append("a", 7, batch) == [1, 2]
    assert await events.append("a", 7, batch) == [1, 2]
    assert len(await events.read(0, 10)) == 1
    await events.trim(await events.head())
    assert await events.append("a", 7, batch) == [1, 2]
    assert await events.append("a", 8, plain(b"4")) == []
    assert [record for _, record in await events.read(0, 10)] == [b"4"]


async def test_the_batch_before_is_told_also_to_a_repeat(redis_client: RedisClient, part: str) -> None:
    events = RedisEvents(redis_client, part, bytes_max=400)
    batch = plain(b"1" * 100, b"2" * 300, b"3" * 300)
    for _ in range(2):
        assert await events.append_after("a", 7, batch) == ([1, 2], 0)
    await events.trim(await events.head())
    for _ in range(2):
        assert await events.append_after("a", 9, plain(b"4")) == ([], 7)
    assert await events.append_after("a", 10, batch) == ([1, 2], 9)
    assert await events.append_after("a", 11, batch) == ([0, 1, 2], 10)  # a batch without room is none
    assert await events.append_after("a", 12, batch) == ([0, 1, 2], 10)


async def test_what_does_not_fit_is_refused_and_room_comes_only_by_a_trim(redis_client: RedisClient, part: str) -> None:
    events = RedisEvents(redis_client, part, bytes_max=16 * 1024)
    record, size = b"x" * 960, 1024
    assert await events.append("a", 1, plain(*[record] * 20)) == list(range(12, 20))
    assert await events.append("a", 2, plain(record)) == [0]
    # The last quarter is for what must not be dropped
    assert await events.append("a", 3, [(record, True)] * 6) == [4, 5]
    held = await events.read(0, 100)
    assert len(held) * size == 16 * 1024
    await events.trim(held[5][0])
    assert await events.read(0, 100) == held[6:]
    assert await events.append("a", 4, plain(*[record] * 3)) == [2]
    await events.trim(await events.head())
    assert await events.read(0, 100) == []
    assert await events.append("a", 5, plain(*[record] * 13)) == [12]


async def test_offsets_go_on_above_what_was_read_when_redis_has_lost_all(redis_server: RedisServer) -> None:
    client = RedisClient(redis_server.url)
    await client.start()
    events = RedisEvents(client)
    await events.append("a", 1, plain(b"1"))
    before = await events.head()
    # Far more came than the clock has milliseconds for
    await client.execute(slot_of("events"), "SET", "sg:{events}:head", f"{before + (1 << 40)} 0")
    await events.append("a", 2, plain(b"2"))
    assert await events.head() == before + (1 << 40) + 1
    redis_server.restart()
    await events.append("a", 3, plain(b"3"))
    assert await events.head() > before
    await client.close()
