"""The same on a Redis Cluster of three primaries, each with a replica."""

from __future__ import annotations

import asyncio

import pytest

from stream_fabric.pool.home import home_partition
from stream_fabric.redis.client import Partitions
from stream_fabric.redis.topology import slot_of
from tests.chaos.conftest import Undisturbed
from tests.chaos.fleet import PARTITIONS, Fleet, fleet, log_of
from tests.chaos.readers import Answer, Reader, SseReader, body, python_clients, until_running
from tests.gateway.wire import MODEL, events
from tests.support.redis import RedisCluster

pytestmark = pytest.mark.chaos

SEEDS = range(10)
TOKENS = 100
SIM = "itl_ms=40,ttft_ms=20"


async def _resume_elsewhere(running: Fleet, expected: dict[int, Answer]) -> None:
    """A gateway dies; its readers go on through the other."""
    sse = [SseReader(running.gates, seed, TOKENS) for seed in SEEDS]
    async with python_clients(running.gates, list(SEEDS), TOKENS) as sockets:
        readers: list[Reader] = [*sse, *sockets]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        await until_running(readers)
        running.gateways[0].kill()
        await asyncio.gather(*reading)
    for reader in readers:
        reader.check_whole(expected[reader.seed])
        assert len(reader.connected_at) >= 2


async def _cancels_exactly(running: Fleet) -> None:
    """Invariant 5, from the gateway that does not deliver."""

    async def cancel(number: int) -> None:
        one, two = running.gates[number % 2], running.gates[1 - number % 2]
        async with one.create(body(number, 10_000)) as exchange:
            if number % 4 < 2:
                await exchange.events(5)
            ack = await two.cancel(exchange.headers["x-stream-id"])
            found = events(await exchange.rest())
        assert ack["result"] == "accepted"
        assert found[-1].json["error"]["code"] == "cancelled"
        at = int(ack["at"].partition("-")[2])
        assert [int((event.id or "").partition("-")[2]) <= at for event in found[:-1]].count(False) == 0

    await asyncio.gather(*map(cancel, range(20)))


def home_slots() -> list[int]:
    """Slots of the partitions that hold the streams."""
    homes = {home_partition(MODEL, 2, PARTITIONS, draw) for draw in range(2)}
    return [Partitions(PARTITIONS).slots[home] for home in sorted(homes, key=str) if home is not None]


async def test_streams_cancels_and_resumes(redis_cluster: RedisCluster, undisturbed: Undisturbed) -> None:
    expected = await undisturbed(SEEDS, TOKENS)
    async with fleet(redis_cluster.url, sim=SIM) as running, log_of(redis_cluster.url) as log:
        holders = {redis_cluster.primary_of(slot).port for slot in home_slots()}
        assert len(holders) > 1, "the streams lie on several primaries"
        await _cancels_exactly(running)
        await _resume_elsewhere(running, expected)
        await log.until_no_slot_is_taken()


async def test_a_primary_dies_and_a_slot_moves_under_streams(
    redis_cluster: RedisCluster, undisturbed: Undisturbed
) -> None:
    tokens = 150
    expected = await undisturbed(SEEDS, tokens)
    async with fleet(redis_cluster.url, sim=SIM) as running, log_of(redis_cluster.url) as log:
        sse = [SseReader(running.gates[k % 2 :], SEEDS[k % len(SEEDS)], tokens) for k in range(20)]
        async with python_clients(running.gates, list(SEEDS), tokens) as sockets:
            readers: list[Reader] = [*sse, *sockets]
            reading = [asyncio.create_task(reader.read()) for reader in readers]
            await until_running(readers)
            # The partition first, then the pool: leases, inboxes and placement move with it
            moved, lost = home_slots()
            for slot in (moved, slot_of(f"pool:{MODEL}")):
                move = redis_cluster.move_slot(slot)
                await asyncio.to_thread(move.finish)
            killed = redis_cluster.kill_primary_of(lost)
            await asyncio.to_thread(redis_cluster.wait_failover, lost, killed)
            await asyncio.gather(*reading)
        for reader in readers:
            reader.check_whole(expected[reader.seed])
            assert len(reader.connected_at) == 1, "no reader was sent away"
            assert (await log.terminal(reader.stream)).status == "completed"
        await log.until_no_slot_is_taken()
        await running.until_served()
        fresh = [SseReader([gate], seed, tokens) for gate in running.gates for seed in SEEDS[:2]]
        await asyncio.gather(*(reader.read() for reader in fresh))
        for reader in fresh:
            reader.check_whole(expected[reader.seed])
