"""Which replica is drained for being stuck: the decision alone, and on a real fleet."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from inference.control.health import Health, HealthPolicy, HealthState, Stuck
from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import COMMAND_TIMEOUT_S
from stream_fabric.pool.placement import ReplicaState
from stream_fabric.pool.records import EngineLoad, ReplicaInfo
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.process.host import HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.pools import RedisPools
from stream_fabric.stream.ids import ReplicaId
from tests.gateway.processes import Process, need_redis
from tests.gateway.wire import DONE, Gate, chat, events, tokens_of_chunks
from tests.support.events import Heard, SetClock
from tests.support.redis import RedisServer
from tests.support.virtual import on_virtual_time
from tests.support.waiting import eventually

POLICY = HealthPolicy(looks=3)


def info(
    name: str,
    p99_ms: float,
    state: ReplicaState = "ready",
    *,
    waits: bool = True,
    room: int = 8,
    models: tuple[str, ...] = ("m",),
) -> ReplicaInfo:
    return ReplicaInfo(
        ReplicaId(name),
        "p",
        "vllm",
        models,
        state,
        EngineLoad(1, 0, 8),
        room=room,
        prefill_ms=10.0 if waits else 0.0,
        queue_p99_ms=p99_ms,
    )


FINE = [info("a", 100), info("b", 200), info("c", 150)]
STUCK = info("s", 5000)


def first_drained(state: HealthState, infos: Sequence[ReplicaInfo]) -> tuple[int, Stuck] | None:
    """Looked at each second: at which look, from 1, and what."""
    for number in range(1, 21):
        for stuck in state.find_stuck({"p": infos}, float(number)):
            return number, stuck
    return None


def test_a_stuck_replica_is_drained_once_enough_looks_have_found_it() -> None:
    drained = first_drained(HealthState(POLICY), [*FINE, STUCK])
    assert drained == (3, Stuck("p", STUCK.replica, 5000, 175, 4))


@pytest.mark.parametrize(
    "infos",
    [
        [*FINE],
        [info("a", 0), info("b", 0), info("s", 1000)],
        [info("a", 1000), info("b", 1000), info("s", 3000)],
        [info("a", 4000), info("b", 3000), info("s", 5000)],
        [info("a", 0), info("s", 5000)],
        [info("a", 0), info("b", 0, "draining"), info("c", 0), info("s", 5000)],
        [info("a", 0), info("b", 0, "warming"), info("s", 5000)],
        [info("a", 0), info("b", 0, room=0), info("s", 5000)],
        [*FINE, info("s", 5000, waits=False)],
        [*FINE, info("s", 5000, "warm")],
        [*FINE, info("s", 5000, models=("m", "only here"))],
        [],
    ],
    ids=[
        "nobody is slow", "at the floor", "at the ratio", "all are slow", "two replicas", "one is draining",
        "two are ready", "too few with room would stay", "slow a minute ago", "not ready", "the only one of a model",
        "an empty pool",
    ],
)  # fmt: skip
def test_nobody_is_drained_when(infos: list[ReplicaInfo]) -> None:
    assert first_drained(HealthState(POLICY), infos) is None


@pytest.mark.parametrize(
    "infos",
    [
        [info("a", 0), info("b", 0), info("s", 1001)],
        [info("a", 1000), info("b", 1000), info("s", 3001)],
        [info("a", 0), info("b", 0), info("w", 0, "warm"), info("x", 0, "starting"), STUCK],
        [*FINE, info("n", 9000, models=("other",)), STUCK],
        [*FINE, info("s", 5000, room=0)],
        [*FINE, info("r", 4000), STUCK],
    ],
    ids=["over the floor", "over the ratio", "others come up", "another model's", "its breaker is open", "the worst"],
)
def test_the_stuck_one_is_drained_when(infos: list[ReplicaInfo]) -> None:
    drained = first_drained(HealthState(POLICY), infos)
    assert drained is not None
    assert (drained[0], drained[1].replica) == (3, "s")


def test_looks_that_find_it_must_be_in_a_row() -> None:
    state = HealthState(POLICY)
    well, ill = {"p": [*FINE, info("s", 100)]}, {"p": [*FINE, STUCK]}
    for number, fleet in enumerate([ill, ill, well, ill, ill, {"p": FINE}, ill, ill]):
        assert state.find_stuck(fleet, float(number)) == []
    assert state.find_stuck(ill, 8.0) != []


def test_looks_before_an_outage_do_not_count() -> None:
    state = HealthState(POLICY)
    ill = {"p": [*FINE, STUCK]}
    assert [state.find_stuck(ill, now) for now in (0.0, 1.0, 1.0 + POLICY.gap_s + 0.1, 7.0)] == [[], [], [], []]
    assert state.find_stuck(ill, 8.0) != []


def test_a_pool_rests_after_a_drain_and_others_do_not() -> None:
    state = HealthState(POLICY)
    both = {"p": [*FINE, STUCK, info("t", 4000)], "q": FINE}
    drained: list[tuple[float, str, str]] = []
    for now in range(200):
        if now == 10:
            both["q"] = [*FINE, info("u", 5000)]
        drained += [(now, stuck.pool, stuck.replica) for stuck in state.find_stuck(both, float(now))]
        both["p"] = [one for one in both["p"] if one.replica not in {replica for _, _, replica in drained}]
        both["q"] = [one for one in both["q"] if one.replica not in {replica for _, _, replica in drained}]
    # The next one of p after the rest and as many looks as the first took
    assert drained == [(2, "p", "s"), (12, "q", "u"), (2 + POLICY.rest_s + POLICY.looks - 1, "p", "t")]


# --- whatever the fleet does -----------------------------------------------------------------------------------

looks_like = st.builds(
    lambda p99_ms, state, waits, room, models: (
        lambda name: info(name, p99_ms, state, waits=waits, room=room, models=models)
    ),
    st.sampled_from([0.0, 0.0, 300.0, 999.0, 1001.0, 2000.0, 3500.0, 20_000.0]),
    st.sampled_from([*["ready"] * 12, "warm", "draining"]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([8, 8, 8, 0]),
    st.sampled_from([*[("m",)] * 6, ("m", "n")]),
)
fleets = st.lists(looks_like, max_size=7).map(lambda made: [make(f"r{n}") for n, make in enumerate(made)])
# The same fleet is seen several times, so that something is ever ripe
histories = st.lists(st.tuples(fleets, st.integers(1, 5), st.sampled_from([0.5, 1.0, 1.0, 1.0, 6.0, 61.0])), max_size=8)


def too_slow(one: ReplicaInfo, infos: Sequence[ReplicaInfo], policy: HealthPolicy) -> bool:
    """The rule, said once more."""
    peers = [other for other in infos if other.state == "ready" and all(m in other.models for m in one.models)]
    return (
        one in peers
        and (one.prefill_ms > 0 or one.load.waiting > 0)
        and one.queue_p99_ms > 1000
        and one.queue_p99_ms > 3 * statistics.median([other.queue_p99_ms for other in peers])
        and len(peers) >= 3
        and len([other for other in peers if other is not one and other.room]) >= 2
    )


@given(histories, st.randoms(use_true_random=False))
def test_a_drain_is_always_earned_and_never_takes_too_much(
    history: list[tuple[list[ReplicaInfo], int, float]], random: Any
) -> None:
    policy = HealthPolicy(looks=2)
    state, other = HealthState(policy), HealthState(policy)
    looks = [(infos, step_s) for infos, times, step_s in history for _ in range(times)]
    now, before, drained_at, drains = 0.0, [], float("-inf"), 0
    for infos, step_s in looks:
        now += step_s
        found = state.find_stuck({"p": infos}, now)
        shuffled = random.sample(infos, len(infos))
        assert other.find_stuck({"p": shuffled}, now) == found, "controllers that see the same do the same"
        slow = {one.replica for one in infos if too_slow(one, infos, policy)}
        may = now - drained_at >= policy.rest_s and not any(one.state == "draining" for one in infos)
        ripe = slow & set(before) if may and step_s <= policy.gap_s else set()
        assert {stuck.replica for stuck in found} <= ripe
        assert len(found) == min(len(ripe), 1), "one at most, and one where one is ripe"
        if found:
            drained_at, drains = now, drains + 1
        before = slow if may else set()
    event(f"{drains} drains")


# --- pools that do not answer ------------------------------------------------------------------------------------


class PoolsInPart:
    """A pool with a stuck replica, one whose shard is silent, and one whose shard refuses connections."""

    def __init__(self) -> None:
        self.requested: list[tuple[str, ReplicaId, str]] = []

    async def pools(self) -> list[str]:
        return ["refusing", "silent", "works"]

    async def replicas(self, pool: str) -> list[ReplicaInfo]:
        if pool == "works":
            return [*FINE, STUCK]
        if pool == "silent":
            await asyncio.sleep(COMMAND_TIMEOUT_S)
        raise FabricUnavailable("Redis is away")

    async def claim_recovery(self, pool: str, replica: ReplicaId, ttl_s: float, nonce: str) -> bool:
        return True

    async def request_state(self, pool: str, replica: ReplicaId, state: str, asked_by: str) -> None:
        self.requested.append((pool, replica, state))


@on_virtual_time
async def test_a_stuck_replica_is_drained_while_the_shards_of_other_pools_are_away() -> None:
    pools: Any = PoolsInPart()
    looking = asyncio.create_task(Health(pools, HealthPolicy(), HostRandom()).run())
    await asyncio.sleep(15)
    assert pools.requested == [("works", STUCK.replica, "draining")] and not looking.done()
    looking.cancel()


# --- on Redis --------------------------------------------------------------------------------------------------


async def test_two_controllers_drain_one_replica_of_a_pool(redis_client: RedisClient) -> None:
    """And one that died between its look and its word leaves the pool as it was."""
    pools = RedisPools(redis_client)
    pool = f"pool-{os.urandom(4).hex()}"
    policy = HealthPolicy(looks=1)
    desired: list[str] = []

    async def report(infos: Sequence[ReplicaInfo]) -> None:
        for one in infos:
            answer = await pools.report(
                ReplicaInfo(**{name: getattr(one, name) for name in one.__struct_fields__} | {"pool": pool}),
                ttl_s=30,
                running={},
            )
            if answer.desired:
                desired.append(f"{one.replica} {answer.desired}")

    counted: list[str] = []
    heard = Heard()
    here = Health(
        pools, policy, HostRandom(), lambda: counted.append("here"), FleetEventReporter(heard, SetClock(), "health")
    )
    there = Health(pools, policy, HostRandom(), lambda: counted.append("there"))
    await report([*FINE, STUCK])
    await here._drain_stuck()
    # The first's word has not been heard, and by now the other sees another that is worse
    await report([*FINE, info("t", 9000)])
    await there._drain_stuck()
    desired.clear()
    await report([*FINE, STUCK, info("t", 9000)])
    assert desired == ["s draining"]
    assert counted == ["here"]
    (told,) = heard.fleet
    assert (told.what, told.replica, told.source, told.asked_by) == ("drain", "s", "health", "health")
    assert told.figures["queue_p99_ms"] > told.figures["ratio"] * told.figures["median_ms"]


@pytest.mark.platform
async def test_a_slow_replica_is_drained_its_streams_finish_whole_and_the_others_stay(
    redis_server: RedisServer,
) -> None:
    need_redis()
    env = {"STREAM_GW_REDIS_URL": redis_server.url, "STREAM_GW_PARTITIONS": "4"}
    with ExitStack() as stack:

        async def start(*flags: str) -> Process:
            return stack.enter_context(await asyncio.to_thread(Process, *flags, **env))

        def agent(name: str, ttft_ms: int) -> Any:
            return start("agent", "--replica", name, "--sim", f"model=trio,itl_ms=20,ttft_ms={ttft_ms}")

        slow, *fine = await asyncio.gather(agent("slow", 2500), agent("fine", 20), agent("fine", 20))
        controllers = await asyncio.gather(start("controller"), start("controller"))
        gateway = await start("gateway", "--port", "0", "--dev-key", "k")
        gate = Gate(gateway.facts["url"], gateway.pid, "k")
        client = RedisClient(redis_server.url)
        await client.start()
        pools = RedisPools(client)
        drained = asyncio.Event()
        tokens = 60

        async def ask() -> int:
            """Streams one after the other, each read to its end; how many."""
            count = 0
            while not drained.is_set():
                async with gate.create(chat(tokens, seed=count, model="trio")) as exchange:
                    assert exchange.status == 200, exchange.status
                    *chunks, done = events(await exchange.rest())
                assert done.data == DONE
                assert chunks[-1].json["choices"][0]["finish_reason"] == "length"
                assert tokens_of_chunks(chunk.json for chunk in chunks) == tokens
                count += 1
            return count

        async def states() -> dict[str, str]:
            return {one.replica: one.state for one in await pools.replicas("trio")}

        async def begins() -> bool:
            return (await states()).get(slow.facts["replica"]) == "draining"

        async def drain() -> list[Any]:
            try:
                await eventually(begins, "the slow replica to be drained", 180)
                # Readers that are on it now stay to their ends
                return await pools.in_flight("trio", slow.facts["replica"])
            finally:
                drained.set()

        try:
            running, *counts = await asyncio.gather(drain(), *(ask() for _ in range(24)))
            assert running, "it had streams when it was told"
            assert all(counts)
            assert await asyncio.to_thread(slow.wait) == 0
            assert await states() == {one.facts["replica"]: "ready" for one in fine}
        finally:
            await client.close()
        said = [line for one in controllers for line in one.log.splitlines() if "replica drained" in line]
        assert len(said) == 1, said
        assert slow.facts["replica"] in said[0]
        assert "peers=3" in said[0]


@pytest.mark.platform
async def test_a_controller_told_so_drains_nobody(redis_server: RedisServer) -> None:
    """The same figures, one controller with the setting off and one with it on, in turn."""
    env = {"STREAM_GW_REDIS_URL": redis_server.url, "STREAM_GW_PARTITIONS": "4"}
    client = RedisClient(redis_server.url)
    await client.start()
    pools = RedisPools(client)

    async def told() -> bool:
        answers = [await pools.report(one, ttl_s=30, running={}) for one in [*FINE, STUCK]]
        return any(answer.desired for answer in answers)

    try:
        with await asyncio.to_thread(Process, "controller", "--no-drain-stuck", **env):
            deadline = asyncio.get_running_loop().time() + 2 * HealthPolicy().looks
            while asyncio.get_running_loop().time() < deadline:
                assert not await told()
                await asyncio.sleep(0.2)
        with await asyncio.to_thread(Process, "controller", **env):
            await eventually(told, "the same figures to be acted on", 20)
    finally:
        await client.close()
