"""Questions for more of a budget, on a real Redis that is away for a while."""

from __future__ import annotations

import asyncio
import os

import msgspec

from inference.agent.budgets.extender import BudgetExtender
from inference.agent.observe.attempt_timing import AttemptTiming
from inference.agent.running import RunningStream
from stream_fabric.accounts.account import Admitted
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


async def test_frames_wait_while_redis_is_away_and_none_is_lost(redis_url: str) -> None:
    name, tenant = StreamId("resp_1"), TenantId(f"t-{os.urandom(4).hex()}")
    month = "tenant_month:2099-12"
    host, port = RedisClient(redis_url).url.addresses[0]
    async with Proxy.before(port, host) as link, asyncio.TaskGroup() as tasks:
        client = RedisClient(link.url, timeout_s=0.3)
        await client.start()
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
        link.refuse = True
        link.cut_all()
        stream.frame(Open(0, 0, "text"))
        for _ in range(300):
            stream.text(0, "a")
        await asyncio.sleep(1.0)
        assert stream.tokens == 100
        link.refuse = False

        async def arrived() -> bool:
            return stream.tokens == 300

        await eventually(arrived, "the reply", 10.0)
        for _ in range(400):
            stream.text(0, "a")
            await asyncio.sleep(0)

        async def ended() -> bool:
            return stream.closed

        await eventually(ended, "the end at the budget", 10.0)
        assert stream.tokens == BUDGET - reserved_prompt(1)
        assert frames(stream)[-1].status == "incomplete"
        await client.close()
