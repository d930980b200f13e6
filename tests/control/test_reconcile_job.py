"""The nightly job: when it runs, what it asks of telemetry, and what it does with the answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from aiohttp import web

from inference.control.metrics import ControllerMetrics
from inference.control.reconcile_job import ReconcileJob, next_due_us
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.tenancy.accounts import RedisAccounts
from stream_fabric.stream.ids import TenantId
from tests.support.events import SetClock
from tests.support.redis import RedisServer
from tests.support.waiting import eventually
from tests.support.web import served

HOUR_US = 3_600_000_000
NIGHT = datetime(2026, 11, 20, 3, 10, tzinfo=UTC)
NIGHT_US = int(NIGHT.timestamp()) * 1_000_000


class Telemetry:
    """The two paths that the job asks."""

    def __init__(self) -> None:
        self.found = 0
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.tenants = [[f"t{number:04d}", 3, 10 * number, number] for number in range(2000)]
        self.url = ""

    async def reconcile(self, request: web.Request) -> web.Response:
        assert request.headers["authorization"] == "Bearer t"
        self.bodies.append(await request.json())
        if self.status != 200:
            return web.Response(status=self.status, text="ClickHouse is away")
        return web.json_response({"found": self.found, "drift_tokens": 7 * self.found, "disagreements": []})

    async def query(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["query"] == "billed_tenants"
        after, top = body["parameters"]["after"], body["parameters"]["top"]
        rows = [row for row in self.tenants if str(row[0]) > after][:top]
        return web.Response(body=msgspec.json.encode({"rows": rows}), content_type="application/json")

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Telemetry]:
        async with served([web.post("/reconcile", self.reconcile), web.post("/query", self.query)]) as self.url:
            yield self


@pytest.fixture
async def telemetry() -> AsyncIterator[Telemetry]:
    async with Telemetry().open() as opened:
        yield opened


def value(metrics: ControllerMetrics, name: str) -> float:
    found = metrics.registry.get_sample_value(name)
    assert found is not None
    return found


@pytest.fixture
async def accounts(redis_server: RedisServer) -> AsyncIterator[RedisAccounts]:
    client = RedisClient(redis_server.url)
    await client.start()
    yield RedisAccounts(client)
    await client.close()


async def test_closed_hours_are_compared_and_budgets_raised(telemetry: Telemetry, accounts: RedisAccounts) -> None:
    metrics, clock, month = ControllerMetrics(), SetClock(), "tenant_month:2026-11"
    await accounts.raise_to(TenantId("t1998"), month, 50_000, 1)
    job = ReconcileJob(telemetry.url, "t", lambda: True, metrics, clock, accounts)
    telemetry.found = 2
    await job.reconcile(NIGHT_US)
    assert telemetry.bodies == [
        {"from_us": NIGHT_US // HOUR_US * HOUR_US - 48 * HOUR_US, "until_us": NIGHT_US // HOUR_US * HOUR_US}
    ]
    assert (value(metrics, "usage_disagreements"), value(metrics, "usage_drift_tokens")) == (2, 14)
    raised = {number: await accounts.budgets(TenantId(f"t{number:04d}"), [month]) for number in (3, 1998, 1999)}
    used = {number: (found[month].tokens, found[month].micro) for number, found in raised.items()}
    assert used == {3: (30, 3), 1998: (50_000, 1998), 1999: (19_990, 1999)}, "all pages; no counter is lowered"


async def test_the_first_night_of_a_month_closes_the_month_before(telemetry: Telemetry) -> None:
    job = ReconcileJob(telemetry.url, "t", lambda: True, ControllerMetrics(), SetClock())
    midnight = int(datetime(2026, 12, 1, tzinfo=UTC).timestamp()) * 1_000_000
    assert (await job.billed_month(midnight))[0] == "2026-11"
    assert (await job.billed_month(midnight + HOUR_US))[0] == "2026-12"


async def test_it_runs_each_hour_while_usage_disagrees(telemetry: Telemetry) -> None:
    """Else the alert would go on until the next night, whatever is repaired."""
    metrics, clock = ControllerMetrics(), SetClock()
    clock.at_us = NIGHT_US - 60_000_000
    job = ReconcileJob(telemetry.url, "t", lambda: True, metrics, clock, look_s=0.01)
    task = asyncio.create_task(job.run())
    try:
        await asyncio.sleep(0)
        telemetry.found, clock.at_us = 1, NIGHT_US
        await eventually(lambda: len(telemetry.bodies) == 1)
        await eventually(lambda: value(metrics, "usage_disagreements") == 1)
        telemetry.found, clock.at_us = 0, NIGHT_US + HOUR_US
        await eventually(lambda: len(telemetry.bodies) == 2)
        await eventually(lambda: value(metrics, "usage_disagreements") == 0)
        clock.at_us = NIGHT_US + 2 * HOUR_US
        await eventually(lambda: value(metrics, "usage_reconciled_age_seconds") == 3600)
        assert len(telemetry.bodies) == 2, "it agrees: the next one is at night"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_runs_at_once_when_redis_has_lost_the_budgets(
    telemetry: Telemetry, accounts: RedisAccounts, redis_server: RedisServer
) -> None:
    """Else every tenant could use its month's budget once more until the night."""
    clock, month, tenant = SetClock(), "tenant_month:2026-11", TenantId("t1998")
    clock.at_us = NIGHT_US - 60_000_000
    metrics = ControllerMetrics()
    job = ReconcileJob(telemetry.url, "t", lambda: True, metrics, clock, accounts, look_s=0.01)

    async def is_raised() -> bool:
        return (await accounts.budgets(tenant, [month]))[month].tokens == 19_980

    task = asyncio.create_task(job.run())
    try:
        await asyncio.sleep(0)
        clock.at_us = NIGHT_US
        await eventually(is_raised)
        clock.at_us += HOUR_US
        redis_server("FLUSHALL")
        await eventually(is_raised, "the budgets to be raised again")
        assert len(telemetry.bodies) == 2
        clock.at_us = int(datetime(2026, 12, 1, tzinfo=UTC).timestamp()) * 1_000_000
        await eventually(lambda: len(telemetry.bodies) == 3, "the night that was passed over")
        await eventually(lambda: value(metrics, "usage_reconciled_age_seconds") == 0)
        clock.at_us += 1_000_000
        await eventually(lambda: value(metrics, "usage_reconciled_age_seconds") == 1)
        assert len(telemetry.bodies) == 3, "counters of a month that is over are no loss"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_new_leader_finds_what_the_former_one_had_found(telemetry: Telemetry) -> None:
    """Else a restart ends the alert of usage that disagrees, or the former leader's goes on after the repair."""
    clock, leads = SetClock(), [True, False]
    clock.at_us = NIGHT_US - 60_000_000
    metrics = [ControllerMetrics(), ControllerMetrics()]
    jobs = [
        ReconcileJob(telemetry.url, "t", lambda number=number: leads[number], metrics[number], clock, look_s=0.01)
        for number in (0, 1)
    ]
    tasks = [asyncio.create_task(job.run()) for job in jobs]
    try:
        await asyncio.sleep(0)
        telemetry.found, clock.at_us = 1, NIGHT_US
        await eventually(lambda: value(metrics[0], "usage_disagreements") == 1)
        leads[:] = False, True
        await eventually(lambda: value(metrics[0], "usage_disagreements") == 0)
        clock.at_us += HOUR_US // 60
        await eventually(lambda: value(metrics[1], "usage_reconciled_age_seconds") == 60)
        assert len(telemetry.bodies) == 1, "leaders may change several times in a minute"
        clock.at_us += HOUR_US // 10
        await eventually(lambda: value(metrics[1], "usage_disagreements") == 1)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_it_runs_once_a_night_on_the_leader_and_repeats_what_failed(telemetry: Telemetry) -> None:
    metrics, clock, leads = ControllerMetrics(), SetClock(), [False]
    clock.at_us = NIGHT_US - 60_000_000
    job = ReconcileJob(telemetry.url, "t", lambda: leads[0], metrics, clock, look_s=0.01, retry_s=60)

    def age() -> float:
        """Age that the last look reported; each look of this test is at another moment."""
        return value(metrics, "usage_reconciled_age_seconds")

    task = asyncio.create_task(job.run())
    try:
        await asyncio.sleep(0)  # it begins a minute before the night
        clock.at_us = NIGHT_US
        await eventually(lambda: age() == 60)
        assert not telemetry.bodies, "another controller leads"
        leads[0], telemetry.status = True, 503
        clock.at_us = NIGHT_US + 24 * HOUR_US
        await eventually(lambda: len(telemetry.bodies) == 1)
        await eventually(lambda: age() == 86_400)
        telemetry.status, telemetry.found = 200, 1
        clock.at_us += 1_000_000
        await eventually(lambda: age() == 86_401)
        assert len(telemetry.bodies) == 1, "it waits before it tries again"
        assert value(metrics, "usage_reconciled_timestamp_seconds") == 0
        clock.at_us += 59_000_000
        await eventually(lambda: len(telemetry.bodies) == 2)
        await eventually(lambda: age() == 0)
        assert value(metrics, "usage_reconciled_timestamp_seconds") == clock.at_us / 1e6
        clock.at_us += 60_000_000
        await eventually(lambda: age() == 60)
        assert len(telemetry.bodies) == 2, "once a night"
        assert value(metrics, "usage_disagreements") == 1
        leads[0] = False
        clock.at_us = NIGHT_US + 48 * HOUR_US
        await eventually(lambda: value(metrics, "usage_disagreements") == 0, "the next leader's result to hold alone")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_the_next_night() -> None:
    due = 3 * HOUR_US
    midnight = NIGHT_US // (24 * HOUR_US) * 24 * HOUR_US
    assert next_due_us(midnight, due) == midnight + due
    assert next_due_us(midnight + due, due) == midnight + due + 24 * HOUR_US
