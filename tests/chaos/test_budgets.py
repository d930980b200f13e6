"""Budgets while the agents that hold streams to them die."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from stream_fabric.accounts.periods import counter_name
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.tenancy.accounts import RedisAccounts
from stream_gw.auth import key_digest
from tests.chaos.fleet import KEY, TENANT, Fleet, fleet
from tests.gateway.wire import chat, events, text
from tests.support.figures import Tell
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(200)]

BUDGET = 1500
KEYS = f"""
[plan.few]
budgets.tenant_month = {{ tokens = {BUDGET} }}
[[tenant]]
id = "{TENANT}"
plan = "few"
[[tenant.key]]
sha256 = "{key_digest(KEY)}"
"""


async def _killed_in_the_middle(running: Fleet, streams: int, deaths: int) -> tuple[int, list[str]]:
    """Read streams to their end while agents die; return the tokens used and the texts."""

    async def read(number: int) -> tuple[int, str]:
        body = chat(5000, number, stream_options={"include_usage": True})
        async with running.gates[number % len(running.gates)].create(body) as exchange:
            assert exchange.status == 200
            found = events(await exchange.rest(90.0))
        usage, last = found[-2].json["usage"], found[-3].json["choices"][0]
        assert last["stop_reason"] == "budget", last
        return usage["total_tokens"], text(found)

    async def kill() -> None:
        for number in range(deaths):
            await asyncio.sleep(1.0)
            running.agents.pop(next(iter(running.agents))).kill()
            await running.add_agent(f"again{number}")

    killing = asyncio.create_task(kill())
    readers = [asyncio.create_task(read(number)) for number in range(streams)]
    try:
        found = await asyncio.gather(*readers)
    finally:
        await killing
    return sum(total for total, _ in found), [written for _, written in found]


@pytest.mark.parametrize(("streams", "deaths"), [(1, 1), (4, 2)])
async def test_a_stream_that_moves_to_another_replica_keeps_to_its_budget(
    redis_server: RedisServer, tmp_path: Path, tell: Tell, streams: int, deaths: int
) -> None:
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text(KEYS)
    async with fleet(
        redis_server.url, sim="itl_ms=10,ttft_ms=10", agent_urls=("",) * 3, keys_file=keys_file
    ) as running:
        total, texts = await _killed_in_the_middle(running, streams, deaths)
        assert 0.9 * BUDGET <= total <= BUDGET
        assert streams > 1 or total == BUDGET
        assert all(texts)
        name = counter_name("tenant_month", int(time.time() * 1000))
        client = RedisClient(running.redis_url)
        await client.start()

        async def settled() -> bool:
            use = (await RedisAccounts(client).budgets(TENANT, [name]))[name]
            return use.reserved_tokens == 0 and use.tokens == total

        try:
            await eventually(settled, "all reservations settled", 10.0)
        finally:
            await client.close()
        tell(f"{streams} streams, {deaths} agents killed: {total} of {BUDGET} tokens used")
