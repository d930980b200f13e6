"""Links that cut, delay, half-close, stall and refuse, everywhere at once."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from tests.chaos.conftest import Undisturbed
from tests.chaos.fleet import fleet, log_of
from tests.chaos.readers import Reader, SseReader, python_clients
from tests.support.figures import Tell
from tests.support.proxy import Proxy
from tests.support.redis import RedisServer

pytestmark = pytest.mark.chaos

SEEDS = range(10)
CHAOS_S = 20.0
TOKENS = 50
FAULT_S_MAX = 0.8
"""Shorter than what a lease forgives: longer ones are the agents' tests."""

Fault = Callable[[Proxy, random.Random], Awaitable[None]]


async def cut(proxy: Proxy, rng: random.Random) -> None:
    proxy.cut_all()


async def cut_in_a_reply(proxy: Proxy, rng: random.Random) -> None:
    proxy.cut_after_bytes(rng.randrange(1, 5000))


async def half_close(proxy: Proxy, rng: random.Random) -> None:
    proxy.half_close_all()


async def delay(proxy: Proxy, rng: random.Random) -> None:
    proxy.delay_s = rng.uniform(0.005, 0.15)
    await asyncio.sleep(rng.uniform(0.1, FAULT_S_MAX))
    proxy.delay_s = 0.0


async def stall(proxy: Proxy, rng: random.Random) -> None:
    proxy.pause()
    await asyncio.sleep(rng.uniform(0.1, FAULT_S_MAX))
    proxy.resume()


async def refuse(proxy: Proxy, rng: random.Random) -> None:
    proxy.refuse = True
    proxy.cut_all()
    await asyncio.sleep(rng.uniform(0.05, FAULT_S_MAX))
    proxy.refuse = False


FAULTS: list[Fault] = [cut, cut_in_a_reply, half_close, delay, stall, refuse]


async def test_every_link_fails_at_random(redis_server: RedisServer, undisturbed: Undisturbed, tell: Tell) -> None:
    seed = int(os.environ.get("STREAM_GW_CHAOS_SEED", "1"))
    rng = random.Random(seed)
    tell(f"STREAM_GW_CHAOS_SEED={seed}")
    expected = await undisturbed(SEEDS, TOKENS)
    async with AsyncExitStack() as stack:

        async def proxied(port: int) -> Proxy:
            return await stack.enter_async_context(Proxy.before(port))

        to_redis = [await proxied(redis_server.port) for _ in range(4)]
        gateway_urls, agent_urls = [p.url for p in to_redis[:2]], [p.url for p in to_redis[2:]]
        running = await stack.enter_async_context(
            fleet(redis_server.url, sim="itl_ms=30,ttft_ms=30", gateway_urls=gateway_urls, agent_urls=agent_urls)
        )
        to_gates = [await proxied(gate.port) for gate in running.gates]
        gates = [
            replace(gate, url=f"http://127.0.0.1:{proxy.port}")
            for gate, proxy in zip(running.gates, to_gates, strict=True)
        ]
        loop = asyncio.get_running_loop()
        until = loop.time() + CHAOS_S
        readers: list[Reader] = []
        faults = Counter[str]()

        async def wreck(proxy: Proxy) -> None:
            while loop.time() < until:
                await asyncio.sleep(rng.uniform(0.2, 1.0))
                fault = rng.choice(FAULTS)
                faults[fault.__name__] += 1
                await fault(proxy, rng)

        async def ask(number: int) -> None:
            while loop.time() < until:
                readers.append(SseReader(gates[number % 2 :], SEEDS[number % len(SEEDS)], TOKENS))
                await readers[-1].read()

        async def ask_by_socket(number: int) -> None:
            turn = [gates[number % 2], gates[1 - number % 2]]
            while loop.time() < until:
                async with python_clients(turn, [SEEDS[(number + k) % len(SEEDS)] for k in range(5)], TOKENS) as some:
                    readers.extend(some)
                    await asyncio.gather(*(reader.read() for reader in some))

        async with asyncio.TaskGroup() as tasks:
            for proxy in (*to_redis, *to_gates):
                tasks.create_task(wreck(proxy))
            for number in range(20):
                tasks.create_task(ask(number))
            for number in range(4):
                tasks.create_task(ask_by_socket(number))
        again = sum(len(reader.connected_at) - 1 for reader in readers if isinstance(reader, SseReader))
        tell(f"{len(readers)} streams, {faults.total()} faults {dict(faults)}, {again} SSE connections made again")
        async with log_of(running.redis_url) as log:
            for reader in readers:
                reader.check_whole(expected[reader.seed])
                assert (await log.terminal(reader.stream)).status == "completed"
            await log.until_no_slot_is_taken()
