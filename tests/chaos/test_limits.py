"""Limits of a plan while the processes that settle streams die."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from stream_fabric.accounts.account import CHECK_MS
from stream_fabric.redis.tenancy.accounts import RedisAccounts
from stream_gw.auth import key_digest
from tests.chaos.fleet import KEY, TENANT, Fleet, LogReader, fleet, log_of
from tests.gateway.wire import Gate, chat
from tests.support.figures import Tell
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

PLACES, CALLERS, LOAD_S = 6, 18, 15.0
KEYS = f"""
[plan.few]
tenant = {{ streams = {PLACES} }}
[[tenant]]
id = "{TENANT}"
plan = "few"
[[tenant.key]]
sha256 = "{key_digest(KEY)}"
"""


async def _call(running: Fleet, rng: random.Random, statuses: Counter[int], until: float) -> None:
    """Ask again and again; some requests lose their gateway, some callers leave early."""
    while time.monotonic() < until:
        gate = rng.choice(running.gates)
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError, AssertionError):
            async with gate.create(chat(rng.choice([5, 40, 80]), rng.randrange(100))) as exchange:
                statuses[exchange.status] += 1
                if rng.random() < 0.8:
                    await exchange.rest(10.0)
        await asyncio.sleep(rng.uniform(0, 0.1))


async def _deaths(running: Fleet, rng: random.Random, died: list[str], until: float) -> None:
    """Kill an agent or a gateway each second or so; another takes its place."""
    number = 0
    while time.monotonic() < until:
        await asyncio.sleep(rng.uniform(0.5, 1.5))
        number += 1
        if rng.random() < 0.5:
            name = rng.choice([*running.agents])
            running.agents.pop(name).kill()
            died.append(name)
            await running.add_agent(f"again{number}")
        else:
            index = rng.randrange(len(running.gates))
            running.gateways.pop(index).kill()
            died.append(f"gateway {running.gates.pop(index).pid}")
            await running.add_gateway(f"again{number}")


async def _most_reserved(accounts: RedisAccounts, until: float) -> int:
    most = 0
    while time.monotonic() < until:
        most = max(most, len(await accounts.reserved(TENANT)))
        await asyncio.sleep(0.02)
    return most


async def _returned(gate: Gate, log: LogReader) -> bool:
    """Ask once, as the tenant would; return whether no reservation is left."""
    await gate.ask("POST", "/v1/chat/completions", chat(1, stream=False))
    return not await RedisAccounts(log.client).reserved(TENANT)


async def test_places_are_never_exceeded_and_all_come_back(
    redis_server: RedisServer, tmp_path: Path, tell: Tell
) -> None:
    seed = int(os.environ.get("STREAM_GW_CHAOS_SEED", time.time_ns() % 10_000))
    tell(f"STREAM_GW_CHAOS_SEED={seed}")
    rng = random.Random(seed)
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text(KEYS)
    async with (
        fleet(
            redis_server.url, sim="itl_ms=10,ttft_ms=10", agent_urls=("",) * 4, gateway_urls=("",) * 3,
            keys_file=keys_file,
        ) as running,
        log_of(running.redis_url) as log,
    ):  # fmt: skip
        until = time.monotonic() + LOAD_S
        statuses, died = Counter[int](), list[str]()
        watching = asyncio.create_task(_most_reserved(RedisAccounts(log.client), until))
        deaths = asyncio.create_task(_deaths(running, rng, died, until))
        await asyncio.gather(*(_call(running, rng, statuses, until) for _ in range(CALLERS)))
        await deaths
        most = await watching
        assert most == PLACES, "the limit was reached, and never exceeded"
        assert statuses[200] > PLACES and statuses[429] > 0

        began = time.monotonic()
        await running.until_served()
        await eventually(lambda: _returned(running.gates[0], log), "all places to come back", CHECK_MS / 1000 + 20)
        took_s = time.monotonic() - began
        tell(f"{dict(statuses)}, {len(died)} processes died; all places were free {took_s:.1f} s later")
