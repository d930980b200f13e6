"""A pool that is divided into cells, as its users and operators see it: one pool."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from stream_fabric.limits import LEASE_RENEW_S
from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.records import EngineLoad, ReplicaInfo
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.divided_pools import DividedPools
from stream_fabric.redis.pools import RedisPools
from stream_fabric.stream.ids import ReplicaId
from tests.gateway.processes import Running, run_cli, running
from tests.gateway.wire import DONE, Gate, chat, events, tokens_of_chunks
from tests.metrics.conftest import fetch
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

POOL = "sim-small"
CELLS = 3
REPLICAS = 7


@pytest.fixture(scope="module")
def divided() -> Iterator[Running]:
    """Seven replicas in three cells, and two gateways."""
    sim = "itl_ms=20,ttft_ms=5,max_num_seqs=8"
    with running(sim=sim, replicas=REPLICAS, STREAM_GW_CELLS=str(CELLS), STREAM_GW_LEASE_TTL_S="2.5") as platform:
        yield platform


@pytest.fixture
async def client(divided: Running) -> AsyncIterator[RedisClient]:
    made = RedisClient(divided.redis_url)
    await made.start()
    yield made
    await made.close()


async def stream_of(gate: Gate, tokens: int = 5, **more: Any) -> tuple[str, str]:
    """Id and replica of an answer that came whole."""
    async with gate.create(chat(tokens, **more)) as exchange:
        found = events(await exchange.rest(60))
        assert found[-1].data == DONE
        assert tokens_of_chunks(event.json for event in found[:-1]) == tokens
        stream = str(exchange.headers["x-stream-id"])

    placed = (await gate.ask("GET", f"/v1/streams/{stream}/placement")).json
    return stream, placed["producers"][0]["replica"]


async def test_requests_use_every_cell_and_come_whole(divided: Running, client: RedisClient) -> None:
    cells = await RedisPools(client).pools()
    by_cell = {cell: {str(info.replica) for info in await RedisPools(client).replicas(cell)} for cell in cells}
    assert len(by_cell) > 1 and sum(map(len, by_cell.values())) == REPLICAS
    assert {pool_of(cell) for cell in cells} == {POOL} and await DividedPools(client).pools() == [POOL]

    async def is_seen(gate: Gate) -> bool:
        """Whether the gateway has read every cell: those whose replicas joined last come a second later."""
        placed = [(await stream_of(gate, 1))[1] for _ in range(3 * CELLS)]
        return all(names & set(placed) for names in by_cell.values())

    for gate in divided.gates[:2]:
        await eventually(partial(is_seen, gate), "the gateway to use every cell", 20)
    answers = await asyncio.gather(*(stream_of(divided.gates[number % 2], 20) for number in range(48)))
    used = Counter(cell for _, replica in answers for cell, names in by_cell.items() if replica in names)
    assert used.keys() == by_cell.keys() and sum(used.values()) == 48


async def test_a_session_stays_with_its_replica_on_every_gateway(divided: Running) -> None:
    await asyncio.sleep(2 * LEASE_RENEW_S)  # both gateways have read that the cells are idle
    for session in ("first", "second", "third", "fourth"):
        seen = {(await stream_of(divided.gates[turn % 2], session_id=session))[1] for turn in range(4)}
        assert len(seen) == 1, session


async def test_a_key_finds_its_stream_on_the_other_gateway(divided: Running) -> None:
    body, key = chat(5), f"key-{os.urandom(4).hex()}"
    found = []
    for gate in divided.gates:
        async with gate.create(body, {"idempotency-key": key}) as exchange:
            events(await exchange.rest(60))
            found.append(exchange.headers["x-stream-id"])
    assert found[0] == found[1]


async def test_the_streams_of_a_dead_replica_go_on_in_its_cell(divided: Running, client: RedisClient) -> None:
    """Every answer has as many tokens as were asked for, in order, whichever replica made them."""
    running_now = [asyncio.create_task(stream_of(divided.gates[number % 2], 200)) for number in range(14)]
    pools = RedisPools(client)

    async def busy_with_peers() -> ReplicaId | None:
        for cell in await pools.pools():
            infos = await pools.replicas(cell)
            for info in infos:
                if len(infos) > 1 and await pools.in_flight(cell, info.replica):
                    return info.replica
        return None

    doomed = await eventually(busy_with_peers, "a busy replica that is not alone in its cell")
    os.kill({agent["replica"]: agent["pid"] for agent in divided.process.facts["agents"]}[doomed], signal.SIGKILL)
    assert len(await asyncio.gather(*running_now)) == 14

    async def found_dead() -> float:
        """Deaths that all processes with a reaper count, whichever of them found it."""
        urls = [*(gate.url for gate in divided.gates), divided.process.facts["controller"]["metrics"]]
        pages = [await fetch(url) for url in urls]
        return sum(float(count) for page in pages for count in re.findall(r"^dead_replicas_total (.*)$", page, re.M))

    await eventually(found_dead, "the death to be counted")
    assert await found_dead() == 1


async def test_operators_see_one_pool(divided: Running, client: RedisClient) -> None:
    await stream_of(divided.gates[0])  # for its metrics
    listed = json.loads(run_cli("replicas", "--json", STREAM_GW_REDIS_URL=divided.redis_url).stdout)
    assert [pool["pool"] for pool in listed] == [POOL] and len(listed[0]["replicas"]) >= REPLICAS - 1
    text = run_cli("pools", STREAM_GW_REDIS_URL=divided.redis_url).stdout
    assert POOL in text and "~" not in text
    name = listed[0]["replicas"][0]["replica"]
    drained = run_cli("replicas", "drain", name, "--redis-url", divided.redis_url)
    assert drained.returncode == 0 and f"{name} of pool {POOL} is draining" in drained.stdout, drained.stderr

    async def left() -> bool:
        return name not in {info.replica for info in await DividedPools(client).replicas(POOL)}

    await eventually(left, "the drained replica to leave")
    assert await DividedPools(client).request_state(POOL, ReplicaId(listed[0]["replicas"][1]["replica"]), "draining")
    page = (await divided.gates[0].ask("GET", "/metrics")).body.decode()
    assert f'pool="{POOL}"' in page and "~" not in page


async def test_a_divided_pool_s_figures_are_the_sum_of_its_cells(divided: Running, client: RedisClient) -> None:
    cells, whole = RedisPools(client), DividedPools(client)
    await stream_of(divided.gates[0])
    names = await cells.pools()
    totals = [await cells.demand_totals(name) for name in names]
    assert (await whole.demand_totals(POOL)).requests == sum(one.requests for one in totals) > 0
    assert len(await whole.slot_uses(POOL)) == sum([len(await cells.slot_uses(name)) for name in names])
    assert (await whole.tier_queues(POOL))[0].depth == 0 and len(await whole.tier_queues(POOL)) == 4
    assert (await whole.overload_totals(POOL)).rejected == (0, 0, 0, 0)
    assert await whole.queue_positions(POOL, []) == (0, [])


async def test_doctor_names_cells_with_one_replica(divided: Running, client: RedisClient) -> None:
    pools, pool = RedisPools(client), f"pool-{os.urandom(3).hex()}"
    infos = [
        ReplicaInfo(ReplicaId(f"r{number}"), f"{pool}~{number // 2}", "sim", ("m",), "ready", EngineLoad(0, 0, 1))
        for number in range(3)
    ]
    for info in infos:
        await pools.report(info, ttl_s=60, running={})
    told = (await asyncio.to_thread(run_cli, "doctor", "--redis-url", divided.redis_url)).stdout
    for info in infos:
        await pools.retire(info.pool, info.replica, leaving=True)
    assert f"{pool}~1" in told and f"{pool}~0" not in told
    assert "STREAM_GW_CELLS" in told
