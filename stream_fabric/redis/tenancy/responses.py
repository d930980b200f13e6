"""Stored responses in Redis. All keys of a tenant share the slot of its shard."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from stream_fabric.accounts.stored import Begun, DueResponse, HeldResponse, HeldResponses, NewResponse, Queue
from stream_fabric.limits import (
    LIVE_TTL_S,
    RESPONSE_LOOK_S_MAX,
    RESPONSE_RETRY_S,
    RESPONSES_DUE_MAX,
    RESPONSES_HELD_BYTES_MAX,
)
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.scripts import script
from stream_fabric.redis.topology import slot_of
from stream_fabric.redis.wire import Arg
from stream_fabric.stream.ids import StreamId, TenantId

_SHARDS = 16
"""Fixed: a gateway of another release must find the same keys."""
_LIVE_MS = 2 * LIVE_TTL_S * 1000
_FIRST_LOOK_MS = 500
_DELETED_MS = 3600 * 1000
"""Time in which a process that was writing a deleted response has ended."""


@lru_cache(maxsize=4096)
def _tag(tenant: TenantId) -> tuple[int, str, str]:
    """Return the tenant's slot, the prefix of its shard and its tag in there."""
    digest = hashlib.sha256(tenant.encode()).digest()
    return *_shard(digest[0] % _SHARDS), digest.hex()[:32]


def _shard(number: int) -> tuple[int, str]:
    name = f"rsp{number}"
    return slot_of(name), f"sg:{{{name}}}:"


class RedisResponses(HeldResponses):
    """``HeldResponses`` in Redis."""

    shards = _SHARDS

    def __init__(
        self, client: RedisClient, bytes_max: int = RESPONSES_HELD_BYTES_MAX, retry_s: float = RESPONSE_RETRY_S
    ) -> None:
        """``bytes_max``: of one tenant. ``retry_s``: a response that was taken comes again after so long."""
        self._client = client
        self._bytes_max = bytes_max
        self._retry_ms = int(retry_s * 1000)

    async def begin(self, tenant: TenantId, new: NewResponse) -> Begun:
        slot, prefix, tag = _tag(tenant)
        conversation = f"{tag}:{new.conversation}" if new.conversation is not None else ""
        args: list[Arg] = [new.id, tenant, tag, new.request, len(new.request), conversation]
        args += [new.kept_s * 1000, new.unsaved_s * 1000, _LIVE_MS, _FIRST_LOOK_MS, self._bytes_max]
        code, *running = await script("response_begin")(self._client, slot, [f"{prefix}r:{new.id}"], args)
        return Begun(code == 1, StreamId(running[0].decode()) if running else None)

    async def find(self, tenant: TenantId, response: StreamId) -> HeldResponse | Literal["deleted"] | None:
        slot, prefix, _ = _tag(tenant)
        fields = ("t", "q", "p", "dl")
        owner, request, outcome, deleted = await self._client.execute(slot, "HMGET", f"{prefix}r:{response}", *fields)
        if owner is None or owner.decode() != tenant:
            return None
        if deleted:
            return "deleted"
        return HeldResponse(request, outcome or b"")

    async def complete(self, tenant: TenantId, response: StreamId, outcome: bytes) -> bool:
        slot, prefix, _ = _tag(tenant)
        args: list[Arg] = [response, outcome, len(outcome)]
        return bool(await script("response_complete")(self._client, slot, [f"{prefix}r:{response}"], args))

    async def saved(self, tenant: TenantId, response: StreamId) -> bool:
        slot, prefix, _ = _tag(tenant)
        return bool(await script("response_saved")(self._client, slot, [f"{prefix}r:{response}"], [response]))

    async def delete(self, tenant: TenantId, response: StreamId) -> bool:
        return await self._delete(tenant, response, _DELETED_MS)

    async def drop(self, tenant: TenantId, response: StreamId) -> None:
        await self._delete(tenant, response, 0)

    async def _delete(self, tenant: TenantId, response: StreamId, ms: int) -> bool:
        slot, prefix, _ = _tag(tenant)
        args: list[Arg] = [response, tenant, ms]
        return bool(await script("response_delete")(self._client, slot, [f"{prefix}r:{response}"], args))

    async def due(self, shard: int, queue: Queue) -> Sequence[DueResponse]:
        slot, prefix = _shard(shard)
        args: list[Arg] = [RESPONSES_DUE_MAX, self._retry_ms, _LIVE_MS, _FIRST_LOOK_MS, int(RESPONSE_LOOK_S_MAX * 1000)]
        reply = await script("response_due")(self._client, slot, [prefix + queue], args)
        rows = zip(reply[::4], reply[1::4], reply[2::4], reply[3::4], strict=True)
        return [
            DueResponse(TenantId(tenant.decode()), StreamId(id_.decode()), int(age) / 1000, bool(deleted))
            for id_, tenant, age, deleted in rows
        ]

    async def unsaved(self) -> int:
        shards = map(_shard, range(_SHARDS))
        calls = (self._client.execute(slot, "ZCARD", f"{prefix}unsaved") for slot, prefix in shards)
        return sum(map(int, await asyncio.gather(*calls)))

    async def runs_in(self, tenant: TenantId, conversation: str) -> StreamId | None:
        slot, prefix, tag = _tag(tenant)
        found = await self._client.execute(slot, "GET", f"{prefix}c:{tag}:{conversation}")
        return None if found is None else StreamId(found.decode())

    async def mark_full(self, tenant: TenantId, seconds: float) -> None:
        slot, prefix, tag = _tag(tenant)
        await self._client.execute(slot, "SET", f"{prefix}f:{tag}", 1, "PX", int(seconds * 1000))
