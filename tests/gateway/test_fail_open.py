"""Limits while Redis does not answer for a tenant's account, and does for everything else."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from stream_fabric.accounts.records import Budget, Budgets, Limits, PlanRecord, TenantRecord
from stream_fabric.errors import FabricUnavailable, RateLimited
from stream_fabric.limits import LIMITS_WAIT_S_MAX
from stream_fabric.redis.client import RedisClient
from stream_gw.auth import KeyStore
from tests.gateway.in_process import SETTINGS, TENANT, InProcess, in_process
from tests.support.waiting import eventually

LIMITED = PlanRecord("pro", tenant=Limits(requests_per_min=1))
BUDGETED = PlanRecord("pro", tenant=Limits(requests_per_min=1), budgets=Budgets(request=Budget(10_000)))


@asynccontextmanager
async def world(
    client: RedisClient, plan: PlanRecord, *, fail_open: bool
) -> AsyncIterator[tuple[InProcess, list[int]]]:
    """A gateway that counts the requests that it admitted without limits."""
    keys = KeyStore([plan, TenantRecord(TENANT, "pro")])
    settings = SETTINGS.model_copy(update={"limits_fail_open": fail_open})
    async with in_process(client, keys=keys, settings=settings) as made:
        opened: list[int] = []
        made.gateway.admission._on_failed_open = lambda: opened.append(1)
        yield made, opened


@pytest.mark.parametrize("silent", [False, True])
async def test_an_account_that_is_away_admits_without_a_reservation(redis_client: RedisClient, silent: bool) -> None:
    async with world(redis_client, LIMITED, fail_open=True) as (made, opened):
        if silent:
            made.accounts_link.pause()
        else:
            made.accounts_link.refuse = True
            made.accounts_link.cut_all()
        began = time.monotonic()
        for number in range(3):
            stream = await made.gateway.streams.create(made.call())
            assert stream is not None and stream.headers == ()
            assert len(opened) == number + 1
        assert time.monotonic() - began < 3 * (LIMITS_WAIT_S_MAX + 1)
        made.accounts_link.refuse = False
        made.accounts_link.resume()

        async def limited() -> bool:
            try:
                await made.gateway.streams.create(made.call())
            except RateLimited:
                return True
            return False

        await eventually(limited, "the limit to hold again")
        assert len(opened) == 3, "no further request"


@pytest.mark.parametrize(("plan", "fail_open"), [(LIMITED, False), (BUDGETED, True)])
async def test_limits_fail_closed_by_default_and_always_with_budgets(
    redis_client: RedisClient, plan: PlanRecord, fail_open: bool
) -> None:
    async with world(redis_client, plan, fail_open=fail_open) as (made, opened):
        made.accounts_link.refuse = True
        made.accounts_link.cut_all()
        with pytest.raises(FabricUnavailable) as raised:
            await made.gateway.streams.create(made.call())
        assert (raised.value.http_status, raised.value.retry_after_s, opened) == (503, 1, [])
