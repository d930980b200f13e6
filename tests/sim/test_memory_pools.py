"""The pools in memory and those in Redis: the same answers to the same calls."""

from __future__ import annotations

import asyncio
import os
import random
import time
from itertools import count
from typing import Any

import msgspec
import pytest

from stream_fabric.pool.overload import BATCH_HOST_TERMS, NO_OVERLOAD_TERMS
from stream_fabric.pool.placement import Placed, Queued, Refused, ReplicaState
from stream_fabric.pool.records import Candidate, EngineLoad, EngineRequest, ReplicaInfo, Work
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.inbox import RedisInbox
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.topology import slot_of
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId, new_stream_id
from tests.sim.memory_pools import MemoryPool

QUEUE_MAX = 6
_WHAT = [
    *["place", "renew"] * 3, "move", "end", "read", "drop", "leave", "retire", "claim", "lost",
]  # fmt: skip
_made = count(time.time_ns() // 1_000_000)


def now_ms() -> float:
    return time.time() * 1000


def new_work(rng: random.Random) -> Work:
    stream = new_stream_id(next(_made), os.urandom(10))
    request = EngineRequest(stream, "chat", "m", msgspec.Raw(b"{}"))
    return Work(
        request, "1.aa", TenantId(rng.choice("xyz")), b"", 2.0, rng.randrange(3),
        prompt_tokens=rng.choice([1, 3000]), output_tokens=200,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
async def test_both_pools_say_the_same(seed: int, redis_url: str) -> None:
    """Random lives of replicas and streams: agents that renew, die, come back with what was taken from them; streams
    that are moved, dropped, taken from the queue; the whole pool lost."""
    rng = random.Random(seed)
    client = RedisClient(redis_url)
    await client.start()
    pools, name = RedisPools(client, QUEUE_MAX), f"pool-{os.urandom(4).hex()}"
    memory = MemoryPool(QUEUE_MAX)
    names = [ReplicaId(f"r{k}-{seed}") for k in range(3)]
    boxes = {replica: RedisInbox(client, name, replica) for replica in names}
    works: list[Work] = []
    running: dict[ReplicaId, dict[StreamId, str]] = {replica: {} for replica in names}
    earlier = dict(running)  # before the last read of the inbox
    compared = 0

    async def both(real: Any, ours: Any) -> Any:
        nonlocal compared
        compared += 1
        theirs = await real
        assert _plain(ours) == _plain(theirs)
        return ours

    for _ in range(120):
        replica = rng.choice(names)
        work = rng.choice(works) if works else None
        match rng.choice(_WHAT):
            case "place":
                works.append(new_work(rng))
                candidates = [Candidate(r, 0) for r in rng.sample(names, rng.randint(0, 3))]
                jitter = rng.random()
                await both(
                    pools.place(name, works[-1], candidates, wait_s=3600, jitter=jitter),
                    memory.place(works[-1], candidates, now_ms(), 3600, jitter),
                )
            case "move" if work is not None:
                again = msgspec.structs.replace(work, attempt=work.attempt + 1)
                others = [Candidate(r, 0) for r in names if r != replica]
                where = memory.holder(work.request.stream)
                terms = rng.choice([NO_OVERLOAD_TERMS, BATCH_HOST_TERMS])
                placed = await both(
                    pools.place(name, again, others, wait_s=3600, jitter=0.5, instead=replica, terms=terms),
                    memory.place(again, others, now_ms(), 3600, 0.5, replica, terms),
                )
                if where in (None, replica) and not isinstance(placed, Refused):  # else it stays as it is
                    works[works.index(work)] = again
            case "renew":
                info = _info(rng, name, replica)
                if rng.random() < 0.1 and work is not None:
                    running[replica][work.request.stream] = ""  # back from the dead, with what was taken from it
                listed = (running if rng.random() < 0.8 else earlier)[replica]
                report = await both(
                    pools.report(info, ttl_s=60, running=listed),
                    memory.report(info, now_ms(), 60, (), listed),
                )
                for known in works if rng.random() < 0.5 else ():
                    if known.request.stream in report.lost:
                        by = rng.choice([replica, *names])
                        await pools.restore(name, by, known)
                        memory.restore(by, known)
            case "end":
                ended = [s for s in running[replica] if rng.random() < 0.5]
                running[replica] = {s: "" for s in running[replica] if s not in ended}
                info = _info(rng, name, replica)
                await both(pools.report(info, ttl_s=None, ended=ended), memory.report(info, now_ms(), None, ended))
            case "read":
                real, ours = (await boxes[replica].read(0.001)).arrivals, memory.read(replica).arrivals
                assert [arrival[1:3] for arrival in real] == [arrival[1:3] for arrival in ours]
                earlier[replica] = dict(running[replica])
                running[replica] |= {arrival.stream: "" for arrival in ours}
                if real and rng.random() < 0.8:
                    await boxes[replica].read(0.001, [entry[:2] for entry in real])
                    memory.done(replica, [entry[:2] for entry in ours])
            case "drop" if work is not None:
                await pools.remove_in_flight(name, replica, [work.request.stream])
                memory.remove_in_flight(replica, [work.request.stream])
                running[replica].pop(work.request.stream, None)
            case "leave" if work is not None:
                await both(
                    pools.remove_queued(name, [work.request.stream]), memory.remove_queued([work.request.stream])
                )
            case "retire":
                leaving = rng.random() < 0.5
                gone = await both(
                    pools.retire(name, replica, leaving=leaving), memory.retire(replica, now_ms(), leaving=leaving)
                )
                if gone:
                    running[replica] = {}
            case "claim":
                nonce = rng.choice("ab")
                await both(
                    pools.claim_recovery(name, replica, 3600, nonce),
                    memory.claim_recovery(replica, now_ms(), 3600, nonce),
                )
            case "lost" if rng.random() < 0.1:
                await _forget(client, pools, name)
                memory = MemoryPool(QUEUE_MAX)
        for known in works[-20:]:
            stream = known.request.stream
            await both(pools.holder(name, stream), memory.holder(stream))
            await both(pools.work(name, stream), memory.work(stream))
        assert sorted(await pools.waiting(name)) == sorted(memory.waiting(now_ms()))
        for replica in names:
            assert sorted(await pools.in_flight(name, replica)) == sorted(memory.in_flight(replica))
        await both(pools.replicas(name), memory.replicas(now_ms()))
    assert compared > 500
    for box in boxes.values():
        box.close()
    await client.close()


async def test_a_lease_and_a_claim_run_out_alike(redis_url: str) -> None:
    client = RedisClient(redis_url)
    await client.start()
    pools, name = RedisPools(client, QUEUE_MAX), f"pool-{os.urandom(4).hex()}"
    memory, replica = MemoryPool(QUEUE_MAX), ReplicaId("r")
    info = _info(random.Random(0), name, replica)
    await pools.report(info, ttl_s=0.05, running={})
    memory.report(info, now_ms(), 0.05, (), {})
    work = new_work(random.Random(0))
    await pools.place(name, work, [], wait_s=0.0, jitter=0.0)
    memory.place(work, [], now_ms(), 0.0, 0.0)
    for nonce, claimed in (("a", True), ("b", False), ("a", True)):
        assert await pools.claim_recovery(name, replica, 0.05, nonce) is claimed
        assert memory.claim_recovery(replica, now_ms(), 0.05, nonce) is claimed
    await asyncio.sleep(0.1)
    assert await pools.expired(name) == memory.expired(now_ms()) == [replica]
    assert await pools.replicas(name) == memory.replicas(now_ms()) == []
    assert await pools.waiting(name, overdue=True) == memory.waiting(now_ms(), overdue=True) == [work.request.stream]
    assert await pools.claim_recovery(name, replica, 0.05, "b")
    assert memory.claim_recovery(replica, now_ms(), 0.05, "b")
    await client.close()


def _info(rng: random.Random, pool: str, replica: ReplicaId) -> ReplicaInfo:
    slots, room = rng.choice([(1, 1), (4, 5)])
    state: ReplicaState = "ready" if rng.random() < 0.85 else "draining"
    return ReplicaInfo(
        replica, pool, "sim", ("m",), state, EngineLoad(0, 0, slots), True, room, prefill_per_s=8000.0, decode_per_s=1e3
    )  # fmt: skip


def _plain(answer: Any) -> Any:
    if isinstance(answer, Placed | Queued):
        return type(answer), answer[0], [c[0:1] + c[2:4] + c[5:] for c in answer.candidates]
    if isinstance(answer, Refused):
        return Refused
    if isinstance(answer, list):
        return sorted(answer, key=str)
    return answer


async def _forget(client: RedisClient, pools: RedisPools, pool: str) -> None:
    slot = slot_of(f"pool:{pool}")
    cursor = "0"
    while True:
        reply = await client.execute(slot, "SCAN", cursor, "MATCH", f"sg:{{pool:{pool}}}:*", "COUNT", 1000)
        for key in reply[1]:
            await client.execute(slot, "DEL", key)
        cursor = reply[0].decode()
        if cursor == "0":
            return
