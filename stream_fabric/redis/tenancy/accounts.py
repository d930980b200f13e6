"""Limits and budgets of tenants in Redis. All keys of a tenant share one slot."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from stream_fabric.accounts.account import KINDS, Admitted, Exceeded, Settlement, Spent, Subject, Use
from stream_fabric.accounts.budgets import BudgetUse, Crossed, Crossing, Extended, Spend, Unit
from stream_fabric.accounts.periods import expires_ms
from stream_fabric.accounts.ports import Accounts
from stream_fabric.accounts.records import Limits
from stream_fabric.events import Prices
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.scripts import script
from stream_fabric.redis.topology import slot_of
from stream_fabric.redis.wire import Arg
from stream_fabric.stream.ids import StreamId, TenantId

_KINDS = {kind[0].encode(): kind for kind in KINDS}
_UNITS: dict[bytes, Unit] = {b"t": "tokens", b"m": "micro"}
_CROSSINGS: dict[bytes, Crossing] = {b"warning": "warning", b"exceeded": "exceeded"}
_HEAD = 7
"""Items of the script's reply before the uses."""
_BUDGET_FIELDS = ("t", "m", "rt", "rm", "f")


@lru_cache(maxsize=4096)
def _slot_and_key(tenant: TenantId) -> tuple[int, str]:
    tag = "acct:" + hashlib.sha256(tenant.encode()).hexdigest()[:32]
    return slot_of(tag), f"sg:{{{tag}}}:held"


class RedisAccounts(Accounts):
    """``Accounts`` in Redis."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def admit(
        self,
        tenant: TenantId,
        stream: StreamId,
        subjects: Sequence[Subject],
        tokens: int,
        spend: Spend | None = None,
    ) -> Admitted | Exceeded | Spent:
        reply = await self._run_admit(tenant, stream, subjects, tokens, spend)
        code, which, kind, retry, overdue_ids, granted, crossings = reply[:_HEAD]
        overdue = tuple(StreamId(each.decode()) for each in overdue_ids.split())
        end = _HEAD + len(KINDS) * len(subjects)
        uses, budgets, crossed = _uses(reply[:end]), _budget_uses(reply[end:]), _crossed(crossings.split())
        if code == 1:
            return Exceeded(which, _KINDS[kind], float(retry), uses, overdue)
        if code == 2:
            return Spent(which, _UNITS[kind], uses, overdue, budgets, crossed)
        return Admitted(uses, overdue, granted, budgets, crossed)

    async def add(
        self, tenant: TenantId, stream: StreamId, subjects: Sequence[Subject], requests: int, tokens: int, call: str
    ) -> Admitted | Exceeded:
        slot, key = _slot_and_key(tenant)
        args: list[Arg] = [stream, requests, tokens, len(subjects), call]
        for name, limits in subjects:
            args.append(name)
            args += ("" if each is None else each for each in _figures(limits)[:2])
        reply = await script("account_add")(self._client, slot, [key], args)
        code, which, kind, retry, *_ = reply
        return Exceeded(which, _KINDS[kind], float(retry), _uses(reply)) if code else Admitted(_uses(reply))

    async def extend(self, tenant: TenantId, stream: StreamId, output_tokens: int, prompt_tokens: int = 0) -> Extended:
        slot, key = _slot_and_key(tenant)
        args: list[Arg] = [stream, output_tokens, prompt_tokens]
        granted, *crossings = await script("account_extend")(self._client, slot, [key], args)
        return Extended(granted, _crossed(crossings))

    async def reprice(self, tenant: TenantId, stream: StreamId, prices: Prices) -> None:
        slot, key = _slot_and_key(tenant)
        args: list[Arg] = [stream, prices.prompt, prices.cached, prices.output]
        await script("account_reprice")(self._client, slot, [key], args)

    async def settle(self, tenant: TenantId, settlements: Sequence[Settlement]) -> int:
        slot, key = _slot_and_key(tenant)
        args: list[Arg] = [
            arg for each in settlements for arg in (each.stream, each.tokens, each.requests, each.cached, each.output)
        ]
        settled: int = await script("account_settle")(self._client, slot, [key], args)
        return settled

    async def uses(self, tenant: TenantId, subjects: Sequence[Subject]) -> tuple[Use, ...]:
        return _uses(await self._run_admit(tenant, "", subjects, 0))

    async def reserved(self, tenant: TenantId) -> dict[StreamId, tuple[str, ...]]:
        slot, key = _slot_and_key(tenant)
        held: dict[bytes, bytes] = await self._client.execute(slot, "HGETALL", key)
        return {
            StreamId(stream.decode()): tuple(
                part for part in record.decode().split("\x1f")[1:] if not part.startswith(("$", "%"))
            )
            for stream, record in held.items()
        }

    async def budgets(self, tenant: TenantId, names: Sequence[str]) -> dict[str, BudgetUse]:
        slot, key = _slot_and_key(tenant)
        prefix = key.removesuffix("held")
        found = await asyncio.gather(
            *(self._client.execute(slot, "HMGET", f"{prefix}q:{name}", *_BUDGET_FIELDS) for name in names)
        )
        return {
            name: BudgetUse(*(int(field or 0) for field in fields)) for name, fields in zip(names, found, strict=True)
        }

    async def raise_to(self, tenant: TenantId, counter: str, tokens: int, micro: int) -> None:
        slot, key = _slot_and_key(tenant)
        args: list[Arg] = [counter, tokens, micro, expires_ms(counter)]
        await script("account_raise")(self._client, slot, [key], args)

    async def _run_admit(
        self,
        tenant: TenantId,
        stream: str,
        subjects: Sequence[Subject],
        tokens: int,
        spend: Spend | None = None,
    ) -> Any:
        slot, key = _slot_and_key(tenant)
        args: list[Arg] = [stream, tokens, len(subjects)]
        for name, limits in subjects:
            args.append(name)
            args += ("" if each is None else each for each in _figures(limits))
        if spend is not None:
            prices = spend.prices
            args += (spend.prompt, spend.output, prices.prompt, prices.cached, prices.output)
            for claim in spend.claims:
                limits_ = ("" if each is None else each for each in (claim.tokens, claim.micro))
                args += (claim.name, *limits_, claim.expires_ms, int(claim.warns))
        return await script("account_admit")(self._client, slot, [key], args)


def _figures(limits: Limits) -> tuple[int | None, int | None, int | None]:
    return limits.requests_per_min, limits.tokens_per_min, limits.streams


def _budget_uses(fields: Sequence[int]) -> tuple[BudgetUse, ...]:
    size = len(_BUDGET_FIELDS)
    return tuple(BudgetUse(*fields[i : i + size]) for i in range(0, len(fields), size))


def _crossed(words: Sequence[bytes]) -> tuple[Crossed, ...]:
    """Read pairs of a budget and the mark that it has crossed."""
    pairs = zip(words[::2], words[1::2], strict=True)
    return tuple(Crossed(name.decode(), _CROSSINGS[mark]) for name, mark in pairs)


def _uses(reply: Sequence[Any]) -> tuple[Use, ...]:
    return tuple(
        Use(float(reply[i]), float(reply[i + 1]), int(reply[i + 2])) for i in range(_HEAD, len(reply), len(KINDS))
    )
