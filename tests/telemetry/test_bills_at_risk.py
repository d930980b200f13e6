"""Bills during an outage: the sink says when it has no room for them, and the agent's switch acts on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.agent.observe.bill_guard import BillGuard
from telemetry.emit.delivery import SinkPolicy
from telemetry.emit.sink import Sink
from tests.support.waiting import eventually
from tests.telemetry.fake import MemoryTransport
from tests.telemetry.sinks import make_sink, make_spool
from tests.telemetry.test_emit import attempt, request

MB = 1 << 20
QUICK = SinkPolicy(memory_bytes_max=4 * MB, linger_s=0.001, stuck_s=0.05, close_s_max=0.2, spool_per_s=1e6)


@pytest.fixture
async def transport() -> MemoryTransport:
    made = MemoryTransport()
    made.well.clear()
    return made


@pytest.fixture(params=["spool", "memory"])
async def sink(request: pytest.FixtureRequest, transport: MemoryTransport, tmp_path: Path) -> AsyncIterator[Sink]:
    spool = make_spool(tmp_path, MB) if request.param == "spool" else None
    async with make_sink(transport, spool, QUICK) as opened:
        yield opened


async def until_at_risk(sink: Sink) -> int:
    """Emit bills until there is hardly room for more; return how many."""
    bills = 0
    while not sink.bills_at_risk:
        for _ in range(50):
            sink.emit(attempt(f"b{bills}"))
            bills += 1
        await asyncio.sleep(0.005)
        assert bills < 100_000
    return bills


async def test_both_settings_while_bills_find_no_room(sink: Sink, transport: MemoryTransport) -> None:
    never = BillGuard("never", lambda: sink.bills_at_risk)
    reconstruct = BillGuard("reconstruct", lambda: sink.bills_at_risk)
    assert never.refusal(0.0) == reconstruct.refusal(0.0) == ""
    await until_at_risk(sink)
    assert sink.backlog.bills_dropped == {}, "the switch acts before the first bill is lost"
    assert never.refusal(1.0) and not reconstruct.refusal(1.0)
    assert never.at_risk and reconstruct.at_risk
    transport.well.set()
    await eventually(lambda: not sink.bills_at_risk)
    assert never.refusal(2.0) == "", "requests are taken again once bills leave"


async def test_other_events_put_no_bill_at_risk(sink: Sink) -> None:
    for number in range(20_000):
        sink.emit(request(str(number)))
        if number % 500 == 0:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.2)
    assert sum(sink.backlog.dropped.values()) > 0
    assert not sink.bills_at_risk, "they make room for bills"
