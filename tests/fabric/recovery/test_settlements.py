"""Settlements on their way: batches, outages, and the end of the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import pytest

from stream_fabric.accounts.account import Settlement
from stream_fabric.errors import FabricUnavailable
from stream_fabric.process.backoff import BackoffPolicy
from stream_fabric.process.host import HostRandom
from stream_fabric.recovery import settlements as module
from stream_fabric.recovery.settlements import Settlements
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import StreamId, TenantId
from tests.support.waiting import eventually

USED = Usage(10, 4, 2, 3, 1)
SETTLED = 13
"""Tokens of ``USED``: the prompt and the output."""


class Accounts:
    """Keeps the settlements that arrive. While ``away``, calls fail; those of ``silent`` tenants get no answer."""

    def __init__(self) -> None:
        self.away = False
        self.silent: set[TenantId] = set()
        self.heard = asyncio.Event()
        self.failed_at: list[float] = []
        self.calls: list[tuple[TenantId, Sequence[Settlement]]] = []

    async def settle(self, tenant: TenantId, settlements: Sequence[Settlement]) -> int:
        await asyncio.sleep(0)
        if self.away:
            self.failed_at.append(asyncio.get_running_loop().time())
            raise FabricUnavailable("away")
        if tenant in self.silent:
            await self.heard.wait()
        self.calls.append((tenant, settlements))
        return len(settlements)

    def arrived(self) -> dict[StreamId, int]:
        return {each.stream: each.tokens for _, batch in self.calls for each in batch}


def stream(number: int) -> StreamId:
    return StreamId(f"resp_{number}")


def settlements_of(accounts: Accounts) -> Settlements:
    return Settlements(accounts, HostRandom())  # type: ignore[arg-type]  # of the port, only ``settle`` is called


@pytest.fixture
async def running() -> AsyncIterator[tuple[Accounts, Settlements]]:
    accounts = Accounts()
    settlements = settlements_of(accounts)
    task = asyncio.create_task(settlements.run())
    yield accounts, settlements
    task.cancel()


async def test_a_tenants_settlements_share_a_call(running: tuple[Accounts, Settlements]) -> None:
    accounts, settlements = running
    for number in range(20):
        settlements.add(TenantId(f"t{number % 2}"), stream(number), USED)
    await eventually(lambda: len(accounts.arrived()) == 20, "all settlements")
    assert len(accounts.calls) == 2
    assert set(accounts.arrived().values()) == {SETTLED}


async def test_settlements_wait_while_redis_is_away(
    running: tuple[Accounts, Settlements], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY", BackoffPolicy(0.01, 0.02))
    accounts, settlements = running
    accounts.away = True
    settlements.add(TenantId("t"), stream(1), USED)
    await asyncio.sleep(0.05)
    settlements.add(TenantId("t"), stream(2), USED)
    assert not accounts.calls
    accounts.away = False
    await eventually(lambda: len(accounts.arrived()) == 2, "both settlements")


async def test_each_retry_waits_longer_up_to_a_bound(
    running: tuple[Accounts, Settlements], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY", BackoffPolicy(0.02, 0.08, jitter=0.0))
    accounts, settlements = running
    accounts.away = True
    settlements.add(TenantId("t"), stream(1), USED)
    await eventually(lambda: len(accounts.failed_at) == 6, "six tries")
    waited_s = [after - before for before, after in pairwise(accounts.failed_at)]
    assert all(real >= planned * 0.9 for real, planned in zip(waited_s, (0.02, 0.04, 0.08, 0.08, 0.08), strict=True))


async def test_a_shard_that_does_not_answer_delays_its_own_tenants_alone(
    running: tuple[Accounts, Settlements],
) -> None:
    """The tenants of other shards would be refused for places and tokens that their ended streams still hold."""
    accounts, settlements = running
    accounts.silent = {TenantId(f"silent{number}") for number in range(150)}
    for number, tenant in enumerate(sorted(accounts.silent)):
        settlements.add(tenant, stream(number), USED)
    for number in range(1000, 1300):
        settlements.add(TenantId(f"t{number % 2}"), stream(number), USED)
        await asyncio.sleep(0)
    await eventually(lambda: len(accounts.arrived()) == 300, "those of other tenants", 5.0)
    accounts.heard.set()
    await eventually(lambda: len(accounts.arrived()) == 450, "all settlements")


async def test_no_more_wait_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAITING_MAX", 3)
    accounts = Accounts()
    settlements = settlements_of(accounts)
    for number in range(5):
        settlements.add(TenantId("t"), stream(number), USED)
    await settlements.flush()
    assert set(accounts.arrived()) == {stream(0), stream(1), stream(2)}, "the others are left to the check"


async def test_a_process_that_ends_sends_what_waits_and_does_not_wait_for_redis() -> None:
    accounts = Accounts()
    settlements = settlements_of(accounts)
    for number in range(250):
        settlements.add(TenantId("t"), stream(number), USED)
    await settlements.flush()
    assert len(accounts.arrived()) == 250
    accounts.away = True
    settlements.add(TenantId("t"), stream(999), USED)
    await asyncio.wait_for(settlements.flush(), 1.0)
