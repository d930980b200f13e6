"""Limits of tenants in Redis. All keys of a tenant share one slot."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from stream_fabric.accounts.account import KINDS, Admitted, Exceeded, Settlement, Subject, Use
from stream_fabric.accounts.ports import Accounts
from stream_fabric.accounts.records import Limits
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.scripts import script
from stream_fabric.redis.topology import slot_of
from stream_fabric.redis.wire import Arg
from stream_fabric.stream.ids import StreamId, TenantId

_KINDS = {kind[0].encode(): kind for kind in KINDS}
_HEAD = 5
"""Items of the script's reply before the uses."""


@lru_cache(maxsize=4096)
def _slot_and_key(tenant: TenantId) -> tuple[int, str]:
    tag = "acct:" + hashlib.sha256(tenant.encode()).hexdigest()[:32]
    return slot_of(tag), f"sg:{{{tag}}}:held"


class RedisAccounts(Accounts):
    """``Accounts`` in Redis."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def admit(
        self, tenant: TenantId, stream: StreamId, subjects: Sequence[Subject], tokens: int
    ) -> Admitted | Exceeded:
        reply = await self._run_admit(tenant, stream, subjects, tokens)
        overdue = tuple(StreamId(each.decode()) for each in reply[4].split())
        if reply[0]:
            return Exceeded(reply[1], _KINDS[reply[2]], float(reply[3]), _uses(reply), overdue)
        return Admitted(_uses(reply), overdue)

    async def settle(self, tenant: TenantId, settlements: Sequence[Settlement]) -> int:
        slot, key = _slot_and_key(tenant)
        args: list[Arg] = [arg for each in settlements for arg in (each.stream, each.tokens, each.requests)]
        settled: int = await script("account_settle")(self._client, slot, [key], args)
        return settled

    async def uses(self, tenant: TenantId, subjects: Sequence[Subject]) -> tuple[Use, ...]:
        return _uses(await self._run_admit(tenant, "", subjects, 0))

    async def reserved(self, tenant: TenantId) -> dict[StreamId, tuple[str, ...]]:
        slot, key = _slot_and_key(tenant)
        held: dict[bytes, bytes] = await self._client.execute(slot, "HGETALL", key)
        return {StreamId(stream.decode()): tuple(record.decode().split("\x1f")[1:]) for stream, record in held.items()}

    async def _run_admit(self, tenant: TenantId, stream: str, subjects: Sequence[Subject], tokens: int) -> Any:
        slot, key = _slot_and_key(tenant)
        args: list[Arg] = [stream, tokens]
        for name, limits in subjects:
            args.append(name)
            args += ("" if each is None else each for each in _figures(limits))
        return await script("account_admit")(self._client, slot, [key], args)


def _figures(limits: Limits) -> tuple[int | None, int | None, int | None]:
    return limits.requests_per_min, limits.tokens_per_min, limits.streams


def _uses(reply: Sequence[Any]) -> tuple[Use, ...]:
    return tuple(
        Use(float(reply[i]), float(reply[i + 1]), int(reply[i + 2])) for i in range(_HEAD, len(reply), len(KINDS))
    )
