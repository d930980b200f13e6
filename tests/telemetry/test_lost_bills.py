"""A platform whose events go nowhere: its bills are reconstructed from what Redis settled."""

from __future__ import annotations

import asyncio
import time

import pytest

from stream_fabric.stream.ids import TenantId
from telemetry.ask.reconcile import reconcile_hours
from telemetry.ask.store_ask import StoreAsk
from telemetry.ask.usage import UsageQuery, usage_page
from telemetry.ask.usage.rebuild import rebuild
from telemetry.ask.usage.settled import open_settled
from telemetry.store.store import Store
from tests.gateway.processes import running
from tests.gateway.wire import chat

pytestmark = pytest.mark.platform

HOUR_US = 3_600_000_000
TENANT = TenantId("dev")


async def test_usage_equals_what_was_streamed_after_a_rebuild(store: Store) -> None:
    with running(sim="itl_ms=2,ttft_ms=5", gateways=1, replicas=1, STREAM_GW_EVENTS="off") as platform:
        (gate,) = platform.gates
        now_us = time.time_ns() // 1000
        whole = await asyncio.gather(*(gate.finished(10 + number) for number in range(8)))
        async with gate.create(chat(5000)) as exchange:
            await exchange.events(6)
            await gate.cancel(exchange.headers["x-stream-id"])
            await exchange.rest()
        assert len(whole) == 8
        async with open_settled(platform.redis_url) as settled:
            window = now_us - HOUR_US, now_us + HOUR_US
            held = [used for hour in range(window[0] // HOUR_US, window[1] // HOUR_US + 1)
                    for used in (await settled.usage(TENANT, hour)).values()]  # fmt: skip
            streamed = sum(used.output for _, used in held)
            assert streamed >= sum(10 + number for number in range(8)) + 5
            later_us = now_us + 3 * HOUR_US
            assert await rebuild(store, settled, *window, now_us, TENANT, write=True) == [], "the hour still runs"
            assert await rebuild(store, settled, *window, later_us, TENANT, write=True)
            assert await rebuild(store, settled, *window, later_us, TENANT, write=True) == []
            query = UsageQuery(from_=str(window[0] // 10**6), to=str(window[1] // 10**6), tenant=TENANT)
            page = await usage_page(StoreAsk(store), query, later_us, 400)
            (row,) = page["data"]
            assert (
                (row["requests"], row["output_tokens"]) == (sum(count for count, _ in held), streamed) == (9, streamed)
            )
            assert row["prompt_tokens"] == sum(used.prompt for _, used in held)
            assert (await reconcile_hours(StoreAsk(store), settled, *window)).agrees
