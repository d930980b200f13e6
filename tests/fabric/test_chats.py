"""Newest streams of chats, on real Redis."""

from __future__ import annotations

import os

import pytest

from stream_fabric.chats import ChatRecord
from stream_fabric.limits import CHAT_READ_S, CHAT_TTL_S
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.index import RedisChats, chat_tag
from stream_fabric.redis.topology import slot_of
from stream_fabric.stream.ids import StreamId, TenantId

ACME = TenantId("acme")
ONE, TWO = (ChatRecord(StreamId(f"resp_{number:032x}"), before) for number, before in ((1, b""), (2, b'{"a": "b c"}')))


@pytest.fixture
def chats(redis_client: RedisClient) -> RedisChats:
    return RedisChats(redis_client)


@pytest.fixture
def name() -> str:
    return os.urandom(8).hex()


async def ttl_s(client: RedisClient, name: str) -> float:
    tag = chat_tag(ACME, "", name)
    return int(await client.execute(slot_of(tag), "PTTL", f"sg:{{{tag}}}")) / 1000


async def test_the_newest_stream_is_found_by_tenant_scope_and_chat(chats: RedisChats, name: str) -> None:
    assert await chats.find(ACME, "", name) is None
    for record in (ONE, TWO):
        await chats.bind(ACME, "", name, record)
        assert await chats.find(ACME, "", name) == record
    for tenant, scope, chat in ((TenantId("other"), "", name), (ACME, "ann", name), (ACME, "", name + "x")):
        assert await chats.find(tenant, scope, chat) is None


async def test_a_newer_stream_outlives_the_end_of_an_older_one(
    chats: RedisChats, name: str, redis_client: RedisClient
) -> None:
    newer = ChatRecord(StreamId(f"resp_{os.urandom(16).hex()}"), b"")
    await chats.bind(ACME, "", name, newer)
    await chats.unbind(ACME, "", name, ONE.stream)
    await chats.expire(ACME, "", name, ONE.stream, CHAT_READ_S)
    assert await chats.find(ACME, "", name) == newer
    assert CHAT_TTL_S - 60 < await ttl_s(redis_client, name) <= CHAT_TTL_S
    await chats.expire(ACME, "", name, newer.stream, CHAT_READ_S)
    assert 0 < await ttl_s(redis_client, name) <= CHAT_READ_S
    await chats.expire(ACME, "", name, newer.stream, CHAT_TTL_S)
    assert await ttl_s(redis_client, name) <= CHAT_READ_S, "a second reader prolongs nothing"
    await chats.unbind(ACME, "", name, newer.stream)
    assert await chats.find(ACME, "", name) is None
    await chats.expire(ACME, "", name, newer.stream, CHAT_READ_S)
