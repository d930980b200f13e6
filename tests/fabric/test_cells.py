"""The choice of a cell: the same on every gateway, where the prompt is cached, and without hot spots."""

from __future__ import annotations

import os
import time
from collections import Counter

import msgspec
import pytest

from stream_fabric.pool.cells import CellLoad, cell_of, choose_cell, pool_of, pools_of
from stream_fabric.pool.records import Candidate, EngineLoad, EngineRequest, ReplicaInfo, Work
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.divided_pools import DividedPools
from stream_fabric.redis.pools import RedisPools
from stream_fabric.stream.ids import ReplicaId, TenantId, new_stream_id

NAMES = [f"llama~{number}" for number in range(8)]


def loads(**more: CellLoad) -> list[CellLoad]:
    return [more.get(name.replace("llama~", "c"), CellLoad(name, 50, 100, 0)) for name in NAMES]


def test_replicas_are_spread_over_the_cells_and_stay_in_theirs() -> None:
    names = [ReplicaId(f"pod-{number}-6b0183aad81fa1") for number in range(2000)]
    counts = Counter(cell_of("llama", name, 32) for name in names)
    assert len(counts) == 32 and min(counts.values()) > 30 and max(counts.values()) < 100
    assert cell_of("llama", names[0], 1) == "llama"


@pytest.mark.parametrize(
    ("cell", "pool"), [("llama~3", "llama"), ("llama", "llama"), ("a~b~12", "a~b"), ("llama~", "llama~"), ("~1", "~1")]
)
def test_a_cell_names_its_pool(cell: str, pool: str) -> None:
    assert pool_of(cell) == pool
    assert pools_of([cell, pool]) == [pool]


def test_a_key_has_the_same_cell_everywhere_and_keys_are_spread() -> None:
    keys = [f"session-{number}".encode() for number in range(800)]
    chosen = {key: choose_cell(loads(), key) for key in keys}
    assert chosen == {key: choose_cell(loads()[::-1], key) for key in keys}
    assert min(Counter(chosen.values()).values()) > 60
    fewer = [cell for cell in loads() if cell.name != "llama~3"]
    moved = [key for key in keys if choose_cell(fewer, key) != chosen[key]]
    assert {chosen[key] for key in moved} == {"llama~3"}, "a cell that goes moves only its own keys"


def test_a_cached_prefix_attracts_and_load_bounds_it() -> None:
    keys = [f"session-{number}".encode() for number in range(100)]
    holder = CellLoad("llama~5", 60, 100, 4)
    assert {choose_cell(loads(c5=holder), key) for key in keys} == {"llama~5"}
    over = holder._replace(streams=80)
    assert "llama~5" not in {choose_cell(loads(c5=over), key) for key in keys}, "more than a quarter above the mean"


def test_a_full_cell_is_left_alone_while_others_have_room() -> None:
    busy = [CellLoad(name, 85 + number, 100, 0) for number, name in enumerate(NAMES)]
    full = busy[-1]._replace(streams=99, prefix=9)
    assert {choose_cell([*busy[:-1], full], bytes([key])) for key in range(100)}.isdisjoint({full.name})
    crowd = [CellLoad(name, 300, 100, 0) for name in NAMES]
    chosen = Counter(choose_cell(crowd, bytes([key])) for key in range(200))
    assert len(chosen) == len(NAMES), "when all are full their queues grow alike"


def test_cells_without_a_ready_replica_are_chosen_only_together() -> None:
    empty = CellLoad("llama~2", 0, 0, 9)
    assert "llama~2" not in {choose_cell(loads(c2=empty), bytes([key])) for key in range(100)}
    assert choose_cell([empty], b"k") == "llama~2"
    assert choose_cell([CellLoad(name, 0, 0, 0) for name in NAMES], b"k") in NAMES


def test_load_stays_level_when_all_prompts_share_a_beginning() -> None:
    """The herd of one hot system prompt: each cell that takes a request caches it."""
    streams, cached = Counter(dict.fromkeys(NAMES, 0)), {NAMES[0]}
    for number in range(600):
        cells = [CellLoad(name, streams[name], 100, int(name in cached)) for name in NAMES]
        taken = choose_cell(cells, number.to_bytes(4, "big"))
        streams[taken] += 1
        cached.add(taken)
    assert max(streams.values()) <= 1.25 * 75 + 1


def test_a_sparse_cell_keeps_its_sessions() -> None:
    quiet = [CellLoad(name, 0, 8, 0) for name in NAMES]
    home = choose_cell(quiet, b"tale")
    assert choose_cell([cell._replace(streams=2 * (cell.name == home)) for cell in quiet], b"tale") == home


async def test_the_totals_of_a_cell_that_comes_and_goes_do_not(redis_url: str) -> None:
    """A controller derives the demand from their growth: a cell that comes back is no burst of requests."""
    client = RedisClient(redis_url)
    await client.start()
    cells, whole, pool = RedisPools(client), DividedPools(client), f"pool-{os.urandom(4).hex()}"

    async def join(number: int) -> ReplicaInfo:
        name = ReplicaId(f"r{number}-{os.urandom(2).hex()}")
        info = ReplicaInfo(name, f"{pool}~{number}", "sim", ("m",), "ready", EngineLoad(0, 0, 50), room=50)
        await cells.report(info, ttl_s=60, running={})
        return info

    async def ask(info: ReplicaInfo) -> None:
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        work = Work(EngineRequest(stream, "chat", "m", msgspec.Raw(b"{}")), "1.aa", TenantId("t"), b"", None)
        await cells.place(info.pool, work, [Candidate(info.replica, 0)], wait_s=1, jitter=0.0)
        await cells.report(info, ttl_s=None, ended=[stream])

    one, two = await join(0), await join(1)
    for info in (one, one, two):
        await ask(info)
    seen = [(await whole.demand_totals(pool)).requests]
    assert await cells.retire(two.pool, two.replica, leaving=True)
    assert await whole.pools() and [info.replica for info in await whole.replicas(pool)] == [one.replica]
    seen.append((await whole.demand_totals(pool)).requests)
    await ask(await join(1))
    seen.append((await whole.demand_totals(pool)).requests)
    assert seen == [3, 3, 4]
    assert sorted(info.pool for info in await whole.replicas(pool)) == [f"{pool}~0", f"{pool}~1"]
    assert len(await whole.replicas(f"{pool}~1")) == 1, "a cell can be read alone"
    await client.close()
