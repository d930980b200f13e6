"""Agents die, freeze and flap; controllers die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from itertools import pairwise

import pytest

from stream_fabric.limits import LEASE_TTL_S
from tests.chaos.conftest import Undisturbed
from tests.chaos.fleet import fleet, log_of
from tests.chaos.readers import Reader, SseReader, body, figures, python_clients, until_running
from tests.support.figures import Tell
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.chaos

SEEDS = range(10)
NO_ZOMBIE_S = 5.0
MOVED_S_MAX = 2.0
"""A move takes 0.1 s, and 0.5 s while nine other processes use the machine. After a death it takes over 3 s."""


async def test_invariant_6_an_agent_dies_under_100_streams(
    redis_server: RedisServer, undisturbed: Undisturbed, tell: Tell
) -> None:
    """Its streams go on at the other agent from the token they had come to: nobody can tell, but for a pause."""
    tokens = 200
    expected = await undisturbed(SEEDS, tokens)
    async with (
        fleet(redis_server.url, sim="itl_ms=60,ttft_ms=60,max_num_seqs=256") as running,
        log_of(running.redis_url) as log,
    ):
        sse = [SseReader(running.gates[k % 2 :], SEEDS[k % len(SEEDS)], tokens) for k in range(160)]
        async with python_clients(running.gates, [r.seed for r in sse[:40]], tokens) as sockets:
            readers: list[Reader] = [*sse, *sockets]
            reading = [asyncio.create_task(reader.read()) for reader in readers]
            await until_running(readers)
            victim = running.agents["replica0"]
            produced_by = {r.stream: (await log.head(r.stream)).replica for r in readers}
            lost = [r for r in readers if produced_by[r.stream] == victim.facts["replica"]]
            assert 80 <= len(lost) <= 120, "placement is even"
            killed_at = asyncio.get_running_loop().time()
            victim.kill()
            await asyncio.gather(*reading)
        seconds = [_silent_s(reader, killed_at) for reader in lost]
        tell(f"streaming again at another agent after the first one's death: {figures(seconds)}")
        assert max(seconds) < NO_ZOMBIE_S
        for reader in readers:
            reader.check_whole(expected[reader.seed])
            assert len(reader.connected_at) == 1, "no reader was sent away"
            end = await log.terminal(reader.stream)
            assert end.status == "completed"
            assert end.usage is not None and end.usage.output == tokens, "billed once, whoever made which part"
        streams, usage = await log.usage()
        assert (streams, usage.output) == (len(readers), len(readers) * tokens)
        await log.until_no_slot_is_taken()


def _silent_s(reader: Reader, killed_at: float) -> float:
    """From the death to the first news from the next producer: the longest silence after it."""
    heard = [killed_at, *(at for at in reader.heard_at if at > killed_at)]
    gap, after = max((b - a, b) for a, b in pairwise(heard))
    assert gap > 1.0, f"{reader.stream} was not interrupted"
    return after - killed_at


async def test_invariant_9_an_agents_deploy_is_invisible(redis_server: RedisServer, undisturbed: Undisturbed) -> None:
    """A stream that does not end within the grace continues on another agent, with hardly a pause."""
    tokens = 120
    expected = await undisturbed(SEEDS, tokens)
    async with (
        fleet(redis_server.url, sim="itl_ms=40,ttft_ms=20,max_num_seqs=64") as running,
        log_of(running.redis_url) as log,
    ):
        readers = [SseReader(running.gates[k % 2 :], seed, tokens) for k, seed in enumerate(SEEDS)]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        await until_running(readers)
        leaving = running.agents.pop("replica0")
        leaving.terminate()
        await asyncio.gather(*reading)
        for reader in readers:
            reader.check_whole(expected[reader.seed])
            assert len(reader.connected_at) == 1
            assert max(b - a for a, b in pairwise(reader.heard_at)) < MOVED_S_MAX
        assert await asyncio.to_thread(leaving.wait) == 0
        await log.until_no_slot_is_taken()


async def test_one_stream_survives_a_gateways_and_its_replicas_death(
    redis_server: RedisServer, undisturbed: Undisturbed
) -> None:
    """At the same moment."""
    tokens = 150
    expected = await undisturbed(SEEDS, tokens)
    async with (
        fleet(redis_server.url, sim="itl_ms=40,ttft_ms=20,max_num_seqs=64") as running,
        log_of(running.redis_url) as log,
    ):
        readers = [SseReader(running.gates, seed, tokens) for seed in SEEDS]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        await until_running(readers)
        running.agents["replica0"].kill()
        os.kill(running.gates[0].pid, signal.SIGKILL)
        await asyncio.gather(*reading)
        for reader in readers:
            reader.check_whole(expected[reader.seed])
            assert len(reader.connected_at) >= 2
        await log.until_no_slot_is_taken()


async def test_gateways_end_a_dead_agents_streams_without_a_controller(
    redis_server: RedisServer, undisturbed: Undisturbed
) -> None:
    expected = await undisturbed(SEEDS, 100)
    async with fleet(redis_server.url, sim="itl_ms=40,ttft_ms=20", agent_urls=("",)) as running:
        readers = [SseReader(running.gates[k % 2 :], seed, 100) for k, seed in enumerate(SEEDS)]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        await until_running(readers)
        running.controllers[0].kill()
        killed_at = asyncio.get_running_loop().time()
        running.agents["replica0"].kill()
        await asyncio.gather(*reading)
        for reader in readers:
            reader.check_lost(expected[reader.seed])
            assert reader.ended_at - killed_at < NO_ZOMBIE_S
        refused = await running.gates[0].ask("POST", "/v1/chat/completions", body(1, 5))
        assert (refused.status, refused.json["error"]["code"]) == (503, "no_replica")
        await running.add_agent("replica1")
        await running.until_served(1)
        again = SseReader(running.gates, SEEDS[0], 100)
        await again.read()
        again.check_whole(expected[SEEDS[0]])


async def test_a_controller_ends_a_dead_agents_streams_without_a_gateway(redis_server: RedisServer) -> None:
    async with (
        fleet(redis_server.url, sim="itl_ms=40,ttft_ms=20", agent_urls=("",)) as running,
        log_of(running.redis_url) as log,
    ):
        streams = [await running.gates[k % 2].background(1000, seed=k) for k in range(10)]
        for gateway in running.gateways:
            gateway.kill()
        running.agents["replica0"].kill()

        async def all_ended() -> bool:
            return all([(await log.head(stream)).status == "failed" for stream in streams])

        await eventually(all_ended, "invariant 6: every stream to end", NO_ZOMBIE_S)
        for stream in streams:
            error = (await log.terminal(stream)).error
            assert error is not None and error.code == "replica_lost"


async def test_invariant_1_an_agent_that_was_frozen_is_fenced(
    redis_server: RedisServer, undisturbed: Undisturbed
) -> None:
    """It wakes after its streams were ended in its stead: it says nothing more of them, and serves again."""
    tokens = 80
    expected = await undisturbed(SEEDS, tokens)
    async with (
        fleet(redis_server.url, sim="itl_ms=30,ttft_ms=20", agent_urls=("",)) as running,
        log_of(running.redis_url) as log,
    ):
        readers = [SseReader(running.gates[k % 2 :], seed, tokens) for k, seed in enumerate(SEEDS)]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        await until_running(readers)
        agent = running.agents["replica0"]
        frozen_at = asyncio.get_running_loop().time()
        os.kill(agent.pid, signal.SIGSTOP)
        await asyncio.gather(*reading)
        os.kill(agent.pid, signal.SIGCONT)
        ends = {}
        for reader in readers:
            reader.check_lost(expected[reader.seed])
            assert LEASE_TTL_S - 1 < reader.ended_at - frozen_at < NO_ZOMBIE_S
            ends[reader.stream] = await log.terminal(reader.stream)
        await running.until_served(1)
        again = SseReader(running.gates, SEEDS[0], tokens)
        await again.read()
        again.check_whole(expected[SEEDS[0]])
        for stream, end in ends.items():
            assert await log.terminal(stream) == end
        await log.until_no_slot_is_taken()


async def test_invariant_7_a_flapping_agent_leaks_no_slot(
    redis_server: RedisServer, undisturbed: Undisturbed, tell: Tell
) -> None:
    """Killed and started again five times under 300 requests."""
    requests, at_once, flaps, tokens = 300, 50, 5, 40
    expected = await undisturbed(SEEDS, tokens)
    async with (
        fleet(redis_server.url, sim="itl_ms=20,ttft_ms=20") as running,
        log_of(running.redis_url) as log,
    ):
        readers = [SseReader(running.gates[k % 2 :], SEEDS[k % len(SEEDS)], tokens) for k in range(requests)]
        left = list(reversed(readers))
        done = Counter[str | None]()

        async def some() -> None:
            while left:
                reader = left.pop()
                await reader.read()
                done[reader.status] += 1

        async def flap() -> None:
            for number in range(flaps):
                await eventually(lambda n=number: done.total() >= n * requests // (flaps + 1), "requests to pass", 30)
                running.agents["replica0"].kill()
                await running.add_agent("replica0")

        await asyncio.gather(flap(), *(some() for _ in range(at_once)))
        tell(f"{dict(done)}")
        # Until its lease runs out a dead replica is still given its share
        assert set(done) <= {"completed", "failed"} and done["completed"] > requests // 4
        for reader in readers:
            end = await log.terminal(reader.stream)
            assert end.status == reader.status
            if reader.status == "completed":
                reader.check_whole(expected[reader.seed])
            else:
                reader.check_lost(expected[reader.seed])
        await log.until_no_slot_is_taken()
        await eventually(lambda: len(redis_server("KEYS", "sg:{pool:*:info")) == 2, "the dead to be forgotten")
        assert redis_server("KEYS", "sg:{pool:*:flight") == []
        await running.until_served(2)
