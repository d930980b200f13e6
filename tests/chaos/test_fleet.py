"""A fleet under load whose agents die and come back at random."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter

import pytest

from tests.chaos.conftest import Undisturbed
from tests.chaos.fleet import Fleet, fleet, log_of
from tests.chaos.readers import SseReader
from tests.gateway.wire import tokens_of_chunks
from tests.support.figures import Tell
from tests.support.redis import RedisServer

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

AGENTS, GATEWAYS = 32, 4
REQUESTS = int(os.environ.get("STREAM_GW_CHAOS_REQUESTS", "10000"))
AT_ONCE = 200
SEEDS = range(20)
TOKENS = 25
DEATH_EVERY_S = 0.8
OUT_OF_STEP_S = 3.0


async def _deaths(running: Fleet, rng: random.Random, died: list[str], over: asyncio.Event) -> None:
    """One agent after another is killed; another takes its place a moment later."""
    number = AGENTS
    while not over.is_set():
        await asyncio.sleep(DEATH_EVERY_S * rng.uniform(0.5, 1.5))
        name = rng.choice([name for name, agent in running.agents.items() if agent.poll() is None])
        running.agents.pop(name).kill()
        died.append(name)
        number += 1
        await running.add_agent(f"replica{number}")


async def test_every_stream_ends_once_while_agents_die_and_come_back(
    redis_server: RedisServer, undisturbed: Undisturbed, tell: Tell
) -> None:
    seed = int(os.environ.get("STREAM_GW_CHAOS_SEED", time.time_ns() % 10_000))
    tell(f"STREAM_GW_CHAOS_SEED={seed}")
    rng = random.Random(seed)
    expected = await undisturbed(SEEDS, TOKENS)
    async with (
        fleet(
            redis_server.url,
            sim="itl_ms=10,ttft_ms=10,max_num_seqs=16",
            gateway_urls=("",) * GATEWAYS,
            agent_urls=("",) * AGENTS,
        ) as running,
        log_of(running.redis_url) as log,
    ):
        left = iter(range(REQUESTS))
        readers: list[SseReader] = []

        async def client(at: int) -> None:
            for _ in left:
                gates = running.gates[at % GATEWAYS :] + running.gates[: at % GATEWAYS]
                reader = SseReader(gates, rng.choice(SEEDS), TOKENS)
                readers.append(reader)
                await reader.read()

        died: list[str] = []
        over = asyncio.Event()
        deaths = asyncio.create_task(_deaths(running, rng, died, over))
        began = time.monotonic()
        await asyncio.gather(*(client(at) for at in range(AT_ONCE)))
        took_s = time.monotonic() - began
        over.set()
        await deaths

        ends = Counter((reader.status, (reader.error or {}).get("code")) for reader in readers)
        tell(f"{len(readers)} streams in {took_s:.0f} s, {len(died)} agents died: {dict(ends)}")
        assert len(readers) == REQUESTS == len({reader.stream for reader in readers}), "no stream twice"
        assert len(died) >= REQUESTS / 1000
        assert set(ends) <= {("completed", None), ("failed", "replica_lost")}
        assert ends["completed", None] > 0.995 * REQUESTS
        for reader in readers:
            if reader.status == "completed":
                reader.check_whole(expected[reader.seed])
            else:
                reader.check_lost(expected[reader.seed])
            assert (await log.terminal(reader.stream)).status == reader.status, "one terminal, the one that was told"
        streams, usage = await log.usage()
        begun = sum(reader.status == "completed" or bool(reader.chunks) for reader in readers)
        assert begun <= streams <= REQUESTS, "each that a producer began is settled once"
        assert usage.output == sum(tokens_of_chunks(reader.chunks) for reader in readers), "billed: what was sent"
        await log.until_no_slot_is_taken(within_s=OUT_OF_STEP_S)
