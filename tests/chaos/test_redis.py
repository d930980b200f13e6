"""Redis is lost whole, or fails over to a replica that lacks the newest frames."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import pytest

from tests.chaos.conftest import Undisturbed
from tests.chaos.fleet import Fleet, fleet, log_of
from tests.chaos.readers import Answer, Reader, SseReader, python_clients, until_running
from tests.gateway.wire import Gate
from tests.support.proxy import Proxy
from tests.support.redis import RedisServer, SentinelSetup
from tests.support.waiting import eventually

pytestmark = pytest.mark.chaos

SEEDS = range(10)
TOKENS = 80
SIM = "itl_ms=40,ttft_ms=20"


async def _serves_again(running: Fleet, expected: dict[int, Answer]) -> None:
    """Leases and placement have come back by themselves."""
    await running.until_served()
    fresh = [SseReader([gate], seed, TOKENS) for gate in running.gates for seed in SEEDS[:2]]
    await asyncio.gather(*(reader.read() for reader in fresh))
    for reader in fresh:
        reader.check_whole(expected[reader.seed])


async def _check_unnoticed(running: Fleet, readers: Sequence[Reader], expected: dict[int, Answer]) -> None:
    async with log_of(running.redis_url) as log:
        for reader in readers:
            reader.check_whole(expected[reader.seed])
            assert len(reader.connected_at) == 1, "no reader was sent away"
            assert (await log.terminal(reader.stream)).status == "completed"
        await log.until_no_slot_is_taken()


async def _heard_more(readers: Sequence[Reader], more: int) -> None:
    counts = {reader: len(reader.heard_at) + more for reader in readers}
    await eventually(
        lambda: all(r.status or len(r.heard_at) >= n for r, n in counts.items()), "every stream to go on or end", 20
    )


async def _known_everywhere(gate: Gate, readers: Sequence[Reader]) -> set[int]:
    replies = await asyncio.gather(*(gate.ask("GET", f"/v1/streams/{reader.stream}/info") for reader in readers))
    return {reply.status for reply in replies}


async def test_invariant_10_redis_restarts_empty_under_50_streams(
    redis_server: RedisServer, undisturbed: Undisturbed
) -> None:
    expected = await undisturbed(SEEDS, TOKENS)
    async with fleet(redis_server.url, sim=SIM) as running:
        sse = [SseReader(running.gates[k % 2 :], SEEDS[k % len(SEEDS)], TOKENS) for k in range(30)]
        async with python_clients(running.gates, [r.seed for r in sse[:20]], TOKENS) as sockets:
            readers: list[Reader] = [*sse, *sockets]
            reading = [asyncio.create_task(reader.read()) for reader in readers]
            await until_running(readers, 10)
            await asyncio.to_thread(redis_server.restart)
            # Nobody is told that there is no such stream while its producer makes it again: not by the gateways that
            # saw the loss, nor by one that comes up in the middle of it
            for answers in await asyncio.gather(
                *(_known_everywhere(gate, readers[:10]) for gate in [*running.gates, await running.add_gateway("new")])
            ):
                assert answers == {200}
            await _heard_more(readers, 5)
            # The lost log is there again, readable on any gateway
            late = SseReader(running.gates[1:], sse[0].seed, TOKENS)
            late.stream = sse[0].stream
            await asyncio.gather(late.read(), *reading)
        late.check_whole(expected[late.seed])
        await _check_unnoticed(running, readers, expected)
        await _serves_again(running, expected)


async def test_invariant_10_failover_to_a_replica_without_the_tail(
    redis_server: RedisServer, undisturbed: Undisturbed
) -> None:
    expected = await undisturbed(SEEDS, TOKENS)
    with RedisServer() as replica:
        replica.follow(redis_server)
        async with Proxy.before(redis_server.port) as proxy, fleet(proxy.url, sim=SIM) as running:
            sse = [SseReader(running.gates[k % 2 :], SEEDS[k % len(SEEDS)], TOKENS) for k in range(20)]
            async with python_clients(running.gates, list(SEEDS), TOKENS) as sockets:
                readers: list[Reader] = [*sse, *sockets]
                reading = [asyncio.create_task(reader.read()) for reader in readers]
                await until_running(readers, 10)
                replica("REPLICAOF", "NO", "ONE")
                await _heard_more(readers, 10)
                proxy.point_at(replica.port)
                async with log_of(replica.url) as old, log_of(redis_server.url) as new:
                    for reader in readers[:5]:
                        assert (await old.head(reader.stream)).last < (await new.head(reader.stream)).last
                redis_server.kill()
                proxy.cut_all()
                await asyncio.gather(*reading)
            await _check_unnoticed(running, readers, expected)
            await _serves_again(running, expected)


async def test_invariant_10_failover_after_the_end(redis_server: RedisServer, undisturbed: Undisturbed) -> None:
    """The ends are acknowledged and then lost: the producers, which have nothing more to say, send them again."""
    tokens = 20
    expected = await undisturbed(SEEDS, tokens)
    with RedisServer() as replica:
        replica.follow(redis_server)
        async with Proxy.before(redis_server.port) as proxy, fleet(proxy.url, sim=SIM) as running:
            readers = [SseReader(running.gates[k % 2 :], seed, tokens) for k, seed in enumerate(SEEDS)]
            reading = [asyncio.create_task(reader.read()) for reader in readers]
            await until_running(readers, 3)
            replica("REPLICAOF", "NO", "ONE")
            await asyncio.gather(*reading)
            proxy.point_at(replica.port)
            redis_server.kill()
            proxy.cut_all()
            async with log_of(running.redis_url) as log:

                async def ended_again() -> bool:
                    return all([(await log.head(reader.stream)).status == "completed" for reader in readers])

                await eventually(ended_again, "the ends to be sent again", 8)
            await _check_unnoticed(running, readers, expected)
            for reader in readers:
                late = SseReader(running.gates, reader.seed, tokens)
                late.stream = reader.stream
                await late.read()
                late.check_whole(expected[late.seed])


async def test_an_agent_dies_after_redis_was_lost(redis_server: RedisServer, undisturbed: Undisturbed) -> None:
    """The agents have told the new Redis of their requests, so another agent goes on with those of the dead one."""
    tokens = 200
    expected = await undisturbed(SEEDS, tokens)
    async with fleet(redis_server.url, sim=SIM) as running:
        readers = [SseReader(running.gates[k % 2 :], SEEDS[k % len(SEEDS)], tokens) for k in range(40)]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        await until_running(readers, 10)
        await asyncio.to_thread(redis_server.restart)
        await _heard_more(readers, 30)  # at least a renewal of each lease
        next(iter(running.agents.values())).kill()
        await asyncio.gather(*reading)
        await _check_unnoticed(running, readers, expected)


async def test_redis_is_lost_after_a_deploy_has_moved_streams(
    redis_server: RedisServer, undisturbed: Undisturbed
) -> None:
    """The agent that goes on with them also writes what the one before had written."""
    tokens = 150
    expected = await undisturbed(SEEDS, tokens)
    async with fleet(redis_server.url, sim=SIM) as running, log_of(running.redis_url) as log:
        readers = [SseReader(running.gates[k % 2 :], seed, tokens) for k, seed in enumerate(SEEDS)]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        await until_running(readers, 5)
        running.agents.pop("replica0").terminate()

        async def moved() -> bool:
            heads = [await log.head(reader.stream) for reader in readers]
            return len({head.replica for head in heads}) == 1 and all(head.replica for head in heads)

        await eventually(moved, "all streams to be at one agent", 10)
        epochs = {(await log.head(reader.stream)).epoch.n for reader in readers}
        assert epochs == {1, 2}
        await asyncio.to_thread(redis_server.restart)
        await asyncio.gather(*reading)
        late = SseReader(running.gates, readers[0].seed, tokens)
        late.stream = readers[0].stream
        await late.read()
        late.check_whole(expected[late.seed])
        await _check_unnoticed(running, readers, expected)


async def test_redis_and_a_gateway_are_lost_at_once(redis_server: RedisServer, undisturbed: Undisturbed) -> None:
    """Readers ask the other gateway when Redis has come back empty and no producer has been there yet."""
    expected = await undisturbed(SEEDS, TOKENS)
    async with fleet(redis_server.url, sim=SIM) as running:
        sse = [SseReader(running.gates, seed, TOKENS) for seed in SEEDS]
        async with python_clients(running.gates, list(SEEDS), TOKENS) as sockets:
            readers: list[Reader] = [*sse, *sockets]
            reading = [asyncio.create_task(reader.read()) for reader in readers]
            await until_running(readers, 10)
            redis_server.kill()
            for agent in running.agents.values():
                os.kill(agent.pid, signal.SIGSTOP)
            running.gateways[0].kill()
            await asyncio.to_thread(redis_server.start)
            await asyncio.sleep(0.5)  # the producers' way back
            for agent in running.agents.values():
                os.kill(agent.pid, signal.SIGCONT)
            await asyncio.gather(*reading)
        for reader in readers:
            reader.check_whole(expected[reader.seed])
        await _check_unnoticed(running, [], expected)


async def test_sentinels_promote_a_replica(sentinel: SentinelSetup, undisturbed: Undisturbed) -> None:
    expected = await undisturbed(SEEDS, TOKENS)
    async with fleet(sentinel.url, sim=SIM) as running:
        readers = [SseReader(running.gates[k % 2 :], seed, TOKENS) for k, seed in enumerate(SEEDS)]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        await until_running(readers, 10)
        primary = sentinel.primary()
        primary.kill()
        await asyncio.gather(*reading)
        assert sentinel.primary() is not primary
        await _check_unnoticed(running, readers, expected)
        await _serves_again(running, expected)


async def test_redis_freezes_for_a_second(redis_server: RedisServer, undisturbed: Undisturbed) -> None:
    """A stall, as a fork or a slow disk gives: nothing is lost and nobody is declared dead."""
    expected = await undisturbed(SEEDS, TOKENS)
    async with fleet(redis_server.url, sim=SIM) as running:
        readers = [SseReader(running.gates[k % 2 :], seed, TOKENS) for k, seed in enumerate(SEEDS)]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        await until_running(readers, 10)
        redis_server.freeze()
        await asyncio.sleep(1.0)  # the length of the stall itself
        redis_server.thaw()
        await asyncio.gather(*reading)
        await _check_unnoticed(running, readers, expected)


async def test_a_dead_agents_streams_go_on_while_redis_is_far_away(
    redis_server: RedisServer, undisturbed: Undisturbed
) -> None:
    """In another region: each answer takes 0.12 s."""
    expected = await undisturbed(SEEDS, TOKENS)
    async with Proxy.before(redis_server.port) as proxy, fleet(proxy.url, sim=SIM) as running:
        proxy.delay_s = 0.06
        readers = [SseReader(running.gates[k % 2 :], seed, TOKENS) for k, seed in enumerate(SEEDS)]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        await until_running(readers, 5)
        next(iter(running.agents.values())).kill()
        await asyncio.gather(*reading)
        for reader in readers:
            reader.check_whole(expected[reader.seed])
