"""Lookup of streams by idempotency key and by chat, of a user's running streams, and of ended links, in Redis."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection

from stream_fabric.chats import ChatRecord, Chats
from stream_fabric.limits import CHAT_TTL_S, LINKS_ENDED_S, LIVE_TTL_S
from stream_fabric.links import Links
from stream_fabric.ports import Index
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.scripts import script
from stream_fabric.redis.topology import slot_of
from stream_fabric.redis.wire import Arg
from stream_fabric.stream.ids import StreamId, TenantId, UserId, partition_of

_LISTED_MAX = 1000


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


class RedisIndex(Index):
    """``Index`` in Redis."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def claim(self, tenant: TenantId, key: str, stream: StreamId, fingerprint: str) -> tuple[StreamId, str]:
        tag = "idem:" + _digest(tenant, key)
        held = await script("idempotency_claim")(
            self._client, slot_of(tag), [f"sg:{{{tag}}}"], [f"{stream} {fingerprint}", LIVE_TTL_S * 1000]
        )
        owner, _, print_ = held.decode().partition(" ")
        return StreamId(owner), print_

    async def is_claimed(self, tenant: TenantId, key: str) -> bool:
        tag = "idem:" + _digest(tenant, key)
        return await self._client.execute(slot_of(tag), "GET", f"sg:{{{tag}}}") is not None

    async def release(self, tenant: TenantId, key: str, stream: StreamId) -> None:
        tag = "idem:" + _digest(tenant, key)
        await script("idempotency_release")(self._client, slot_of(tag), [f"sg:{{{tag}}}"], [stream])

    async def add_live(self, tenant: TenantId, user: UserId, stream: StreamId, created_ms: int) -> None:
        tag = "live:" + _digest(tenant, user)
        args: list[Arg] = [created_ms, stream, _LISTED_MAX, LIVE_TTL_S]
        await script("user_streams_add")(self._client, slot_of(tag), [f"sg:{{{tag}}}"], args)

    async def live(self, tenant: TenantId, user: UserId) -> list[StreamId]:
        tag = "live:" + _digest(tenant, user)
        reply = await self._client.execute(slot_of(tag), "ZREVRANGE", f"sg:{{{tag}}}", 0, _LISTED_MAX - 1)
        return [StreamId(item.decode()) for item in reply]

    async def remove_live(self, tenant: TenantId, user: UserId, streams: list[StreamId]) -> None:
        if streams:
            tag = "live:" + _digest(tenant, user)
            await self._client.execute(slot_of(tag), "ZREM", f"sg:{{{tag}}}", *streams)


class RedisChats(Chats):
    """``Chats`` in Redis: one key a chat, with the stream and what it continues."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def bind(self, tenant: TenantId, scope: str, chat: str, record: ChatRecord) -> None:
        tag = chat_tag(tenant, scope, chat)
        value = b"%b %b" % (record.stream.encode(), record.before)
        await self._client.execute(slot_of(tag), "SET", f"sg:{{{tag}}}", value, "EX", CHAT_TTL_S)

    async def find(self, tenant: TenantId, scope: str, chat: str) -> ChatRecord | None:
        tag = chat_tag(tenant, scope, chat)
        held = await self._client.execute(slot_of(tag), "GET", f"sg:{{{tag}}}")
        if held is None:
            return None
        stream, _, before = held.partition(b" ")
        return ChatRecord(StreamId(stream.decode()), before)

    async def unbind(self, tenant: TenantId, scope: str, chat: str, stream: StreamId) -> None:
        tag = chat_tag(tenant, scope, chat)
        await script("idempotency_release")(self._client, slot_of(tag), [f"sg:{{{tag}}}"], [stream])

    async def expire(self, tenant: TenantId, scope: str, chat: str, stream: StreamId, within_s: int) -> None:
        tag = chat_tag(tenant, scope, chat)
        await script("chat_expire")(self._client, slot_of(tag), [f"sg:{{{tag}}}"], [stream, within_s * 1000])


class RedisLinks(Links):
    """``Links`` in Redis: one time a stream whose links were ended, in the stream's slot."""

    def __init__(self, client: RedisClient, partitions: Partitions) -> None:
        self._client = client
        self._partitions = partitions

    def _key(self, stream: StreamId) -> tuple[int, str]:
        k = partition_of(stream, self._partitions.count)
        return self._partitions.slots[k], f"sg:{{p{k}}}:{stream}:g"

    async def generations(self, streams: Collection[StreamId]) -> dict[StreamId, int]:
        calls = [self._client.execute(slot, "GET", key) for slot, key in map(self._key, streams)]
        return {stream: int(found or 0) for stream, found in zip(streams, await asyncio.gather(*calls), strict=True)}

    async def end(self, stream: StreamId) -> None:
        slot, key = self._key(stream)
        await script("links_end")(self._client, slot, [key], [int(LINKS_ENDED_S * 1000)])


def chat_tag(tenant: TenantId, scope: str, chat: str) -> str:
    """Return the hash tag of a chat's key."""
    return "chat:" + _digest(tenant, scope, chat)
