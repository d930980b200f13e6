"""The tenant's account in the simulation, and what it must hold in the end.

The law is ``AccountState``, which one contract suite compares with the scripts in Redis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stream_fabric.accounts.account import AccountState, Admitted, Exceeded, Settlement, Spent, Subject, Use
from stream_fabric.accounts.budgets import BudgetUse, Extended, Spend
from stream_fabric.accounts.records import Budget, Budgets, Limits, Moderation, PlanRecord, TenantRecord
from stream_fabric.events import AttemptTrace, Prices
from stream_fabric.limits import REPAIRS_MAX
from stream_fabric.recovery.settlements import settlement_of
from stream_fabric.stream.ids import StreamId, TenantId
from stream_gw.auth.keys import KeyStore
from tests.sim.fabric import EPOCH_S, Link
from tests.sim.witness import require

if TYPE_CHECKING:
    from tests.sim.world import World

T = TypeVar("T")
PRICES = Prices(3_000_000, 1_000_000, 7_000_000)
_LARGE = 1 << 40
"""A limit that no schedule reaches: what is counted is never cut."""


def keys_of(tenant: TenantId, faults: Collection[str]) -> KeyStore:
    """Make the keys of the tenant of a schedule, whose faults name what its plan has."""
    retention_s = 0 if "zero" in faults else None
    moderation: Moderation = "all" if "moderation" in faults else "off"
    plan = PlanRecord("plan", retention_s=retention_s, moderation=moderation, repairs=REPAIRS_MAX)
    if "budget" not in faults:
        return KeyStore([plan, TenantRecord(tenant, "plan")])
    budget, limits = Budget(_LARGE, _LARGE), Limits(_LARGE, _LARGE, _LARGE)
    plan = msgspec.structs.replace(plan, tenant=limits, budgets=Budgets(tenant_hour=budget, tenant_month=budget))
    return KeyStore([plan, TenantRecord(tenant, "plan", prices={"*": PRICES})])


class AccountsDoor:
    """``RedisAccounts``."""

    def __init__(self, client: Link) -> None:
        self._link = client

    async def _call(self, name: str, step: Callable[[AccountState, int], T]) -> T:
        w, shard = self._link.w, self._link.w.fabric.of_pools()
        return await self._link.call(name, shard, lambda: step(shard.account, EPOCH_S * 1000 + w.now_ms))

    async def admit(
        self, tenant: TenantId, stream: StreamId, subjects: Sequence[Subject], tokens: int, spend: Spend | None = None
    ) -> Admitted | Exceeded | Spent:
        return await self._call("admit", lambda a, now: a.admit(stream, subjects, tokens, now, spend))

    async def add(
        self, tenant: TenantId, stream: StreamId, subjects: Sequence[Subject], requests: int, tokens: int, call: str
    ) -> Admitted | Exceeded:
        return await self._call("add", lambda a, now: a.add(stream, subjects, requests, tokens, now))

    async def extend(self, tenant: TenantId, stream: StreamId, output_tokens: int, prompt_tokens: int = 0) -> Extended:
        return await self._call("extend", lambda a, now: a.extend(stream, output_tokens, prompt_tokens, now))

    async def reprice(self, tenant: TenantId, stream: StreamId, prices: Prices) -> None:
        await self._call("reprice", lambda a, now: a.reprice(stream, prices, now))

    async def settle(self, tenant: TenantId, settlements: Sequence[Settlement]) -> int:
        return await self._call("settle", lambda a, now: sum([a.settle(each, now) for each in settlements]))

    async def uses(self, tenant: TenantId, subjects: Sequence[Subject]) -> tuple[Use, ...]:
        return await self._call("uses", lambda a, now: a.uses(subjects, now))

    async def budgets(self, tenant: TenantId, names: Sequence[str]) -> dict[str, BudgetUse]:
        return await self._call("budgets", lambda a, now: {name: a.budgets.use(name, now) for name in names})


def check_account(world: World) -> None:
    """Check that nothing stays reserved, and that each budget has counted what the streams used and their bills say.

    What processes lost is settled first, as ``settle_overdue`` does it at the tenant's next admission.
    """
    account, now_ms = world.fabric.of_pools().account, EPOCH_S * 1000 + world.now_ms
    for stream in list(account.reservations):
        state = world.fabric.state(stream)
        account.settle(Settlement(stream, 0) if state is None else settlement_of(stream, state.usage), now_ms)
    running = {name: streams for name, streams in account._streams.items() if streams}
    require(not running, f"5: streams that have ended count as running: {running}")
    used = [state.usage for _, state in world.fabric.streams()]
    tokens = sum(each.prompt + each.output for each in used)
    micro = sum(PRICES.of(each.prompt, each.cached, each.output) for each in used)
    bills = {
        each.id: each.price_micro for each in world.events.events if isinstance(each, AttemptTrace) and each.billed
    }
    require(sum(bills.values()) == micro, f"5: bills of {sum(bills.values())} for streams of {micro}")
    for name in account.budgets._counters:
        use = account.budgets.use(name, now_ms)
        found = (use.tokens, use.micro, use.reserved_tokens, use.reserved_micro)
        require(found == (tokens, micro, 0, 0), f"5: {name} has {found}, and its streams used {tokens} for {micro}")
