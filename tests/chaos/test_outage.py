"""Kafka away under load, stopped and frozen: no request notices, and every bill arrives. As ``python -m bench.outage``
measures it for minutes, here for seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.outage import Plan, compared, outages
from tests.gateway.processes import need_redis
from tests.support.figures import Tell

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

DOWN_S = 15.0
SLOWER_MOST, SLOWER_S_MOST = 2.0, 0.03
"""At the median, of a machine that others use too. What blocked a loop would cost whole tenths of a second."""
CORES_MOST = 0.25
"""More of the processors than usual."""


@pytest.mark.parametrize("kind", ["stopped", "frozen"])
async def test_an_outage_of_kafka_costs_no_request_and_no_bill(kind: str, tmp_path: Path, tell: Tell) -> None:
    need_redis()
    told = await outages(Plan((kind,), DOWN_S, rest_s=6.0, rate=20.0, window_s=3.0), tmp_path)
    (outage,) = told.outages
    usual = told.processor_share(told.began_at, outage.begun_at)
    down = told.processor_share(outage.begun_at, outage.ended_at)
    high = told.most(lambda sample: sample.spool, outage.begun_at, outage.drained_at)
    tell(
        f"{kind} for {DOWN_S:g} s: {len(told.load.streams)} requests, {told.accounts}; spool {high} bytes at most; "
        f"{usual:.2f} cores before, {down:.2f} while; drained in {outage.drained_s:.1f} s"
    )
    assert told.load.failed == []
    assert len(told.load.streams) > 20.0 * DOWN_S
    assert told.accounts.exact, told.accounts
    assert told.accounts.bills == len(told.load.streams)
    assert told.dropped == 0
    assert high > 0 and told.counters["events_spooled_total"] > 0, "the outage was none"
    assert told.counters["events_spool_bytes"] == 0
    assert down < usual + CORES_MOST
    for one in compared(told, outage):
        if one.share == 0.5:
            tell(f"{one.what} p50 {one.rest * 1e3:.1f} ms, {one.down * 1e3:.1f} ms while Kafka is {kind}")
            assert one.down < one.rest * SLOWER_MOST + SLOWER_S_MOST
    assert "Traceback" not in told.log, told.log
    assert told.log.count("\n") < 100, told.log


async def test_without_a_spool_what_memory_holds_arrives_too(tmp_path: Path, tell: Tell) -> None:
    need_redis()
    told = await outages(Plan(("frozen",), 6.0, rest_s=3.0, rate=20.0, window_s=3.0, spool=False), tmp_path)
    tell(str(told.accounts))
    assert told.load.failed == [] and told.dropped == 0
    assert told.accounts.exact, told.accounts
    assert told.counters["events_spooled_total"] == 0
