"""A release is rolled out, and back, beside the one before it, under load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path

import pytest

from tests.chaos.conftest import Undisturbed
from tests.chaos.fleet import Fleet, fleet, log_of
from tests.chaos.readers import SseReader
from tests.gateway.processes import Process
from tests.gateway.wire import Gate
from tests.support.figures import Tell
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SEEDS = range(8)
TOKENS = 60
READERS = 12
STREAMS_A_STEP = 2 * READERS
"""Streams that complete in each mixture of releases, so that both sides of every port have met."""


class Load:
    """Readers that ask for one stream after another until told to stop."""

    def __init__(self, gates: list[Gate]) -> None:
        self._gates = gates
        self._seeds = cycle(SEEDS)
        self.done: list[SseReader] = []
        self.stopping = False

    async def read(self) -> None:
        while not self.stopping:
            reader = SseReader(self._gates, next(self._seeds), TOKENS)
            reader._gates = self._gates  # gateways come and go while it reads
            await reader.read()
            self.done.append(reader)

    async def step(self) -> None:
        """Wait until streams that began after this call have ended."""
        wanted = len(self.done) + STREAMS_A_STEP
        await eventually(lambda: len(self.done) >= wanted, "streams in this mixture of releases", 60)


@asynccontextmanager
async def load(gates: list[Gate]) -> AsyncIterator[Load]:
    running = Load(gates)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(READERS):
            tasks.create_task(running.read())
        try:
            yield running
        finally:
            running.stopping = True


async def test_a_release_rolls_out_and_back_under_load(
    redis_server: RedisServer, undisturbed: Undisturbed, previous: Path, tell: Tell
) -> None:
    """Every stream is whole, once and in order in every mixture of agents, gateways and controllers of two releases."""
    expected = await undisturbed(SEEDS, TOKENS)
    async with fleet(redis_server.url, sim="itl_ms=10,ttft_ms=20,max_num_seqs=64", tree=previous) as running:
        async with load(running.gates) as readers:
            await readers.step()
            for tree in (None, previous):
                running.tree = tree
                await _replace_controller(running)
                await readers.step()
                for _ in range(2):
                    await _replace_gateway(running)
                    await readers.step()
                for name in list(running.agents):
                    await _replace_agent(running, name)
                    await readers.step()
        for reader in readers.done:
            reader.check_whole(expected[reader.seed])
        tell(f"{len(readers.done)} streams whole through {2 * 5} replaced processes")
        async with log_of(running.redis_url) as log:
            for reader in readers.done:
                assert (await log.terminal(reader.stream)).status == "completed"
            await log.until_no_slot_is_taken()


async def _replace_controller(running: Fleet) -> None:
    await running.add_controller()
    await _end(running.controllers.pop(0))


async def _replace_gateway(running: Fleet) -> None:
    await running.add_gateway(f"gateway{len(running.started)}")
    await running.until_served()
    del running.gates[0]
    await _end(running.gateways.pop(0))


async def _replace_agent(running: Fleet, name: str) -> None:
    await running.add_agent(f"replica{len(running.started)}")
    await running.until_served()
    await _end(running.agents.pop(name))


async def _end(process: Process) -> None:
    process.terminate()
    assert await asyncio.to_thread(process.wait) == 0
