"""Lookup of streams by idempotency key, and of a user's running streams, in Redis."""

from __future__ import annotations

import hashlib

from stream_fabric.limits import LIVE_TTL_S
from stream_fabric.ports import Index
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.scripts import script
from stream_fabric.redis.topology import slot_of
from stream_fabric.redis.wire import Arg
from stream_fabric.stream.ids import StreamId, TenantId, UserId

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
