"""Limits and usage to the token: a crowd on eight gateways, and deaths of gateways, agents and a Redis primary."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from stream_fabric.stream.frames import Usage
from stream_gw.auth import key_digest
from tests.chaos.conftest import Undisturbed
from tests.chaos.fleet import KEY, TENANT, Fleet, fleet, log_of
from tests.chaos.readers import SseReader
from tests.chaos.test_cluster import home_slots
from tests.gateway.wire import chat, tokens_of_chunks
from tests.support.figures import Tell
from tests.support.redis import RedisCluster, RedisServer
from tests.support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

TOKENS_PER_MIN = 1000
GATEWAYS, CALLERS, CROWD_S = 8, 200, 12.0
KEYS = f"""
[plan.few]
tenant = {{ tokens_per_min = {TOKENS_PER_MIN} }}
[[tenant]]
id = "{TENANT}"
plan = "few"
[[tenant.key]]
sha256 = "{key_digest(KEY)}"
"""
SEEDS = range(10)
TOKENS, STREAMS, AT_ONCE = 60, 400, 40


async def test_a_crowd_on_eight_gateways_gets_the_limit_and_one_burst(
    redis_server: RedisServer, tmp_path: Path, tell: Tell
) -> None:
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text(KEYS)
    async with (
        fleet(
            redis_server.url, sim="itl_ms=0,ttft_ms=0", gateway_urls=("",) * GATEWAYS, keys_file=keys_file
        ) as running,
        log_of(running.redis_url) as log,
    ):
        began = time.monotonic()
        statuses, admitted = Counter[int](), 0

        async def call(number: int) -> None:
            nonlocal admitted
            gate = running.gates[number % GATEWAYS]
            while time.monotonic() < began + CROWD_S:
                reply = await gate.ask("POST", "/v1/chat/completions", chat(1 + number % 20, stream=False))
                statuses[reply.status] += 1
                if reply.status == 200:
                    admitted += reply.json["usage"]["total_tokens"]
                else:
                    await asyncio.sleep(0.2)

        await asyncio.gather(*map(call, range(CALLERS)))
        most = TOKENS_PER_MIN + TOKENS_PER_MIN / 60 * (time.monotonic() - began)
        assert set(statuses) == {200, 429}, statuses

        async def settled() -> bool:
            _, used = await log.usage()
            return used.prompt + used.output == admitted

        await eventually(settled, "all streams to be settled")
        tell(
            f"{GATEWAYS} gateways, {CALLERS} callers, {TOKENS_PER_MIN} tokens a minute: {admitted} tokens admitted in "
            f"{CROWD_S:g} s, {most:.0f} allowed; {dict(statuses)}"
        )
        assert 0.9 * TOKENS_PER_MIN < admitted <= most


async def _deaths(running: Fleet, cluster: RedisCluster, rng: random.Random, died: Counter[str]) -> None:
    """Kill agents and gateways, one a second or so, and in the middle a primary that holds streams."""
    for number in range(8):
        await asyncio.sleep(rng.uniform(0.5, 1.2))
        if number == 3:
            slot = rng.choice(home_slots())
            killed = cluster.kill_primary_of(slot)
            await asyncio.to_thread(cluster.wait_failover, slot, killed)
            died["primary"] += 1
        elif number % 2:
            running.agents.pop(rng.choice([*running.agents])).kill()
            await running.add_agent(f"again{number}")
            died["agent"] += 1
        else:
            running.gateways[died["gateway"]].kill()
            await running.add_gateway(f"again{number}")
            died["gateway"] += 1


async def test_the_settled_usage_is_what_was_streamed(
    redis_cluster: RedisCluster, undisturbed: Undisturbed, tell: Tell
) -> None:
    seed = int(os.environ.get("STREAM_GW_CHAOS_SEED", time.time_ns() % 10_000))
    tell(f"STREAM_GW_CHAOS_SEED={seed}")
    rng = random.Random(seed)
    expected = await undisturbed(SEEDS, TOKENS)
    async with (
        fleet(redis_cluster.url, sim="itl_ms=20,ttft_ms=20", agent_urls=("",) * 4, gateway_urls=("",) * 5) as running,
        log_of(redis_cluster.url) as log,
    ):
        left = iter(range(STREAMS))
        readers: list[SseReader] = []

        async def client(at: int) -> None:
            for _ in left:
                reader = SseReader(running.gates[at % 5 :] + running.gates[: at % 5], rng.choice(SEEDS), TOKENS)
                readers.append(reader)
                await reader.read(120.0)

        died = Counter[str]()
        deaths = asyncio.create_task(_deaths(running, redis_cluster, rng, died))
        await asyncio.gather(*(client(at) for at in range(AT_ONCE)))
        await deaths
        ends = Counter(reader.status for reader in readers)
        tell(f"{len(readers)} streams, {dict(died)} died: {dict(ends)}")
        total, begun = Usage(), 0
        for reader in readers:
            if reader.status == "completed":
                reader.check_whole(expected[reader.seed])
            end = await log.terminal(reader.stream)
            assert end.status == reader.status
            settled = await log.settled(reader.stream)
            assert settled == end.usage, f"{reader.stream}: settled as its terminal says"
            assert settled.output == tokens_of_chunks(reader.chunks), f"{reader.stream}: settled is what was streamed"
            total = Usage(prompt=total.prompt + settled.prompt, output=total.output + settled.output)
            begun += settled != Usage()
        streams, used = await log.usage()
        assert begun <= streams <= STREAMS, "each that a producer began is settled once"
        assert (used.prompt, used.output) == (total.prompt, total.output), "the tenant's sum"
