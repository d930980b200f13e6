"""Questions for more of a budget, on a real Redis that is away for a while."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import msgspec
import pytest

from inference.agent.budgets.extender import BudgetExtender
from inference.agent.observe.attempt_timing import AttemptTiming
from inference.agent.running import RunningStream
from stream_fabric.accounts.account import Admitted, Settlement
from stream_fabric.accounts.budgets import Claim, Spend, reserved_prompt
from stream_fabric.accounts.periods import expires_ms
from stream_fabric.events import NoEvents
from stream_fabric.pool.records import EngineRequest, Work
from stream_fabric.process.budget_events import BudgetEvents
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.process.host import HostClock
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.tenancy.accounts import RedisAccounts
from stream_fabric.stream.frames import Open
from stream_fabric.stream.ids import StreamId, TenantId
from tests.agent.budgets.test_allowance import frames
from tests.agent.owner import Owner
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

BUDGET = 500


class Asking(Owner):
    """Passes the questions on."""

    extender: BudgetExtender

    def on_budget_used(self, stream: RunningStream, question: tuple[int, int]) -> None:
        super().on_budget_used(stream, question)
        self.extender.ask(stream, question)


@contextlib.asynccontextmanager
async def budgeted(client: RedisClient) -> AsyncIterator[tuple[RunningStream, TenantId]]:
    """A stream with a month's budget, which has been granted 100 output tokens."""
    name, tenant = StreamId("resp_1"), TenantId(f"t-{os.urandom(4).hex()}")
    month = "tenant_month:2099-12"
    async with asyncio.TaskGroup() as tasks:
        accounts = RedisAccounts(client)
        spend = Spend((Claim(month, BUDGET, None, expires_ms(month)),), reserved_prompt(1), 100)
        admitted = await accounts.admit(tenant, name, [], 0, spend)
        assert isinstance(admitted, Admitted)
        owner = Asking()
        owner.extender = BudgetExtender(
            accounts, BudgetEvents(FleetEventReporter(NoEvents(), HostClock(), "agent")), tasks
        )
        work = Work(
            EngineRequest(name, "chat", "m", msgspec.Raw(b"{}")), "1.aa", tenant, b"", None, grant=admitted.granted
        )
        stream = RunningStream(work, 0, lambda *_: None, owner, 0.0, AttemptTiming(HostClock(), 0, 0))
        owner.extender.limit(stream)
        stream.frame(Open(0, 0, "text"))
        yield stream, tenant


async def test_frames_wait_while_redis_is_away_and_none_is_lost(redis_url: str) -> None:
    host, port = RedisClient(redis_url).url.addresses[0]
    async with Proxy.before(port, host) as link, contextlib.AsyncExitStack() as stack:
        client = RedisClient(link.url, timeout_s=0.3)
        stack.push_async_callback(client.close)
        await client.start()
        stream, _ = await stack.enter_async_context(budgeted(client))
        link.refuse = True
        link.cut_all()
        for _ in range(300):
            stream.text(0, "a")
        await asyncio.sleep(1.0)
        assert stream.tokens == 100
        link.refuse = False
        await eventually(lambda: stream.tokens == 300, "the reply", 10.0)
        for _ in range(400):
            stream.text(0, "a")
            await asyncio.sleep(0)
        await eventually(lambda: stream.closed, "the end at the budget", 10.0)
        assert stream.tokens == BUDGET - reserved_prompt(1)
        assert frames(stream)[-1].status == "incomplete"


async def test_a_stream_whose_reservation_is_lost_with_redis_data_goes_on(
    redis_client: RedisClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Its budgets' counters are lost too: an end at the grant would cut the answer and protect nothing."""
    async with budgeted(redis_client) as (stream, tenant):
        accounts = RedisAccounts(redis_client)
        await accounts.settle(tenant, [Settlement(stream.name, 0, 0)])
        for _ in range(BUDGET + 100):
            stream.text(0, "a")
        await eventually(lambda: stream.tokens == BUDGET + 100, "the frames that waited", 10.0)
        assert not stream.closed
    assert "reservation of a stream's budgets is lost, it goes on without: stream=resp_1" in caplog.text
