"""Pools scaled by real processes: controllers, agents and gateways on a real Redis."""

from __future__ import annotations

import asyncio
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inference.control.main import serve
from inference.control.policy.traffic_model import PoolTrafficModel
from inference.control.settings import ControllerSettings
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.pool.traffic_model import Lengths, Route, Speed
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.pools import RedisPools
from stream_fabric.stream.ids import ReplicaId
from tests.gateway.processes import Process, need_redis
from tests.gateway.wire import DONE, Gate, chat, events, tokens_of_chunks
from tests.support.redis import RedisServer
from tests.support.server import free_port
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform


async def plan_of(control: RedisControl, pool: str) -> PoolPlan | None:
    return (await control.plans()).get(pool)


async def until(control: RedisControl, pool: str, condition: Any, what: str) -> PoolPlan:
    async def found() -> PoolPlan | None:
        plan = await plan_of(control, pool)
        return plan if plan is not None and condition(plan) else None

    plan: PoolPlan = await eventually(found, what, 30)
    return plan


async def test_a_wrong_pools_file_is_an_error_before_redis_is_connected(tmp_path: Path) -> None:
    path = tmp_path / "pools.toml"
    path.write_text("[pool.a]\nreplica_max = 5\n")
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    with pytest.raises(ValueError, match="replica_max"):
        await serve(ControllerSettings(redis_url=nobody, pools_file=path), lambda url: None)


async def test_a_replica_that_rests_finishes_its_streams_and_is_promoted_within_a_second(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    need_redis()
    declared = tmp_path / "pools.toml"
    declared.write_text(
        '[pool.duo]\nmodels = ["duo"]\nreplicas_min = 1\nwarm_share = 0\nlow_s = 1\ncold_start_s = 30\n'
        "ttft_objective_s = 30\n"  # the burst below waits for seconds
    )
    env = {"STREAM_GW_REDIS_URL": redis_server.url, "STREAM_GW_PARTITIONS": "4"}
    with ExitStack() as stack:

        async def start(*flags: str) -> Process:
            return stack.enter_context(await asyncio.to_thread(Process, *flags, **env))

        sim = ("--sim", "model=duo,itl_ms=50,ttft_ms=20,max_num_seqs=20")
        agents = [await start("agent", "--replica", name, *sim) for name in ("one", "two")]
        gateway = await start("gateway", "--port", "0", "--dev-key", "k")
        gate = Gate(gateway.facts["url"], gateway.pid, "k")
        client = RedisClient(redis_server.url)
        await client.start()
        pools, control = RedisPools(client), RedisControl(client)

        async def states() -> dict[str, str]:
            return {one.replica: one.state for one in await pools.replicas("duo")}

        async def ask(seed: int, tokens: int) -> int:
            async with gate.create(chat(tokens, seed=seed, model="duo")) as exchange:
                assert exchange.status == 200, exchange.status
                *chunks, done = events(await exchange.rest(60))
            assert done.data == DONE
            return tokens_of_chunks(chunk.json for chunk in chunks)

        try:
            streams = [asyncio.create_task(ask(seed, 700)) for seed in range(4)]

            async def all_run() -> bool:
                found = await pools.replicas("duo")
                return sum(info.load.running for info in found) == 4 and all(info.load.running for info in found)

            await eventually(all_run, "streams on both", 20)
            await start("controller", "--pools-file", str(declared))
            resting = await until(control, "duo", lambda plan: plan.resting, "one to rest")

            async def rests() -> bool:
                return (await states())[resting.resting or ""] == "warm"

            await eventually(rests, "it to hear")
            assert len(await pools.in_flight("duo", ReplicaId(resting.resting or ""))) >= 1, "with its streams"
            assert not any(stream.done() for stream in streams)
            assert [await stream for stream in streams] == [700] * 4, "each to its end"
            plan = await until(control, "duo", lambda plan: plan.pods == 1, "the count to fall")
            assert plan.victims == (resting.resting,) and all(agent.poll() is None for agent in agents)

            # More than one replica runs: the one that was to go is promoted long before another could have come
            loop = asyncio.get_running_loop()
            more = [asyncio.create_task(ask(seed, 200)) for seed in range(40)]
            await until(control, "duo", lambda plan: plan.ready >= 2, "it to be wanted again")
            wanted_at = loop.time()

            async def promoted() -> bool:
                return list((await states()).values()) == ["ready", "ready"]

            await eventually(promoted, "it to take requests")
            took_s = loop.time() - wanted_at
            print(f"promoted {took_s * 1000:.0f} ms after it was wanted")
            assert took_s < 5, took_s
            assert await asyncio.gather(*more) == [200] * 40
        finally:
            await client.close()


async def test_a_warm_replica_sleeps_and_is_woken_for_what_comes(redis_server: RedisServer, tmp_path: Path) -> None:
    need_redis()
    declared = tmp_path / "pools.toml"
    declared.write_text(
        '[pool.duo]\nmodels = ["duo"]\nwarm_min = 1\nlow_s = 60\ncold_start_s = 30\n'
        "sleep_level = 2\nsleep_after_s = 1\nawake_min = 0\n"
        "ttft_objective_s = 30\n"  # the burst below waits for seconds
    )
    env = {"STREAM_GW_REDIS_URL": redis_server.url, "STREAM_GW_PARTITIONS": "4"}
    with ExitStack() as stack:

        async def start(*flags: str) -> Process:
            return stack.enter_context(await asyncio.to_thread(Process, *flags, **env))

        sim = ("--sim", "model=duo,itl_ms=50,ttft_ms=20,max_num_seqs=20,sleep_ms=200,wake_ms=300,reload_ms=1500")
        await start("agent", "--replica", "one", *sim)
        await start("agent", "--replica", "two", "--standby", *sim)
        gateway = await start("gateway", "--port", "0", "--dev-key", "k")
        gate = Gate(gateway.facts["url"], gateway.pid, "k")
        client = RedisClient(redis_server.url)
        await client.start()
        pools, control = RedisPools(client), RedisControl(client)

        async def second() -> ReplicaInfo:
            (found,) = [info for info in await pools.replicas("duo") if info.replica.startswith("two-")]
            return found

        async def is_now(state: str) -> bool:
            return (await second()).state == state

        async def ask(seed: int) -> int:
            async with gate.create(chat(200, seed=seed, model="duo")) as exchange:
                assert exchange.status == 200, exchange.status
                *chunks, done = events(await exchange.rest(60))
            assert done.data == DONE
            return tokens_of_chunks(chunk.json for chunk in chunks)

        try:
            await start("controller", "--pools-file", str(declared))
            await eventually(lambda: is_now("sleeping"), "it to sleep", 20)
            assert (await second()).load.asleep == 2
            more = [asyncio.create_task(ask(seed)) for seed in range(40)]
            await until(control, "duo", lambda plan: plan.ready == 2, "it to be wanted")
            began = asyncio.get_running_loop().time()
            await eventually(lambda: is_now("ready"), "it to take requests")
            print(f"ready {(asyncio.get_running_loop().time() - began) * 1000:.0f} ms after it was wanted")
            assert 1.79 <= (await second()).wake_s < 4
            assert await asyncio.gather(*more) == [200] * 40
        finally:
            await client.close()


async def test_a_pool_without_a_replica_is_a_waiting_room(redis_server: RedisServer, tmp_path: Path) -> None:
    """A request waits with an estimate, the pool is asked for a replica within seconds, and the first one that comes is
    given what waits."""
    declared = tmp_path / "pools.toml"
    declared.write_text('[pool.idle]\nmodels = ["idle"]\nreplicas_min = 0\nreplicas_max = 4\ncold_start_s = 40\n')
    env = {"STREAM_GW_REDIS_URL": redis_server.url, "STREAM_GW_PARTITIONS": "4"}
    with ExitStack() as stack:

        async def start(*flags: str) -> Process:
            return stack.enter_context(await asyncio.to_thread(Process, *flags, **env))

        await start("controller", "--pools-file", str(declared))
        # A request may wait twice a cold start, however short the time is that requests wait for room
        gateway = await start("gateway", "--port", "0", "--dev-key", "k", "--queue-wait-s", "1")
        gate = Gate(gateway.facts["url"], gateway.pid, "k")
        client = RedisClient(redis_server.url)
        await client.start()
        control, pools = RedisControl(client), RedisPools(client)
        try:
            plan = await until(control, "idle", lambda plan: True, "a plan")
            assert (plan.ready, plan.pods) == (0, 0)

            async def listed() -> bool:
                return "idle" in [model["id"] for model in (await gate.ask("GET", "/v1/models")).json["data"]]

            await eventually(listed, "the gateway to have read it")
            loop = asyncio.get_running_loop()
            asked_at = loop.time()
            async with gate.create(chat(20, model="idle")) as exchange:
                assert exchange.status == 200, exchange.status
                plan = await until(control, "idle", lambda plan: plan.pods == 1, "a replica to be asked for")
                print(f"asked for {(loop.time() - asked_at) * 1000:.0f} ms after the request")
                assert loop.time() - asked_at < 5
                said = b""
                while b"warming up" not in said:
                    said += await exchange.piece()
                assert b": queued 1 of 1, warming up, about " in said
                await asyncio.sleep(2)  # longer than requests wait for room
                assert await pools.waiting("idle")
                await start("agent", "--replica", "first", "--pool", "idle", "--sim", "model=idle,itl_ms=5")
                rest = await exchange.rest(30)
                *chunks, done = [one for one in events(said + rest) if one.data]
            assert done.data == DONE and tokens_of_chunks(chunk.json for chunk in chunks) == 20
        finally:
            await client.close()


async def test_the_wait_told_is_what_replicas_have_taken_and_counts_down_whatever_changes(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """Declared are 90 seconds, the last replicas took 9; more requests come, and the plan changes, while one starts."""
    declared = tmp_path / "pools.toml"
    declared.write_text('[pool.idle]\nmodels = ["idle"]\nreplicas_min = 0\nreplicas_max = 9\ncold_start_s = 90\n')
    env = {"STREAM_GW_REDIS_URL": redis_server.url, "STREAM_GW_PARTITIONS": "4"}
    with ExitStack() as stack:

        async def start(*flags: str) -> Process:
            return stack.enter_context(await asyncio.to_thread(Process, *flags, **env))

        client = RedisClient(redis_server.url)
        await client.start()
        control, loop = RedisControl(client), asyncio.get_running_loop()
        speed = Speed(32, 4.0)  # so slow that more requests need more replicas
        route = Route("idle", "openai.chat", "standard", 100, Lengths(9, 9, 9, 9), Lengths(20, 20, 20, 20))
        known = PoolTrafficModel(starts_s=(9.0,) * 9, speeds=(speed,), prefill_per_s=1000, routes=(route,))
        await control.put_learned("idle", msgspec.json.encode(known))
        await start("controller", "--pools-file", str(declared))
        gateway = await start("gateway", "--port", "0", "--dev-key", "k")
        gate = Gate(gateway.facts["url"], gateway.pid, "k")
        told: list[tuple[float, int]] = []

        async def ask(seed: int, tokens: int) -> int:
            async with gate.create(chat(tokens, seed=seed, model="idle")) as exchange:
                assert exchange.status == 200, exchange.status
                said = b""
                while b"data:" not in said:
                    piece = await exchange.piece()
                    said += piece
                    told.extend((loop.time(), int(left)) for left in re.findall(rb"about (\d+) s", piece))
                served.append(loop.time())
                *chunks, _ = [one for one in events(said + await exchange.rest(30)) if one.data]
                return tokens_of_chunks(chunk.json for chunk in chunks)

        served: list[float] = []
        try:

            async def ready_to_plan() -> bool:
                plan = await plan_of(control, "idle")
                listed = [model["id"] for model in (await gate.ask("GET", "/v1/models")).json["data"]]
                return plan is not None and plan.cold_start_s == 9 and "idle" in listed

            await eventually(ready_to_plan, "the learned cold start to be in the plan", 30)
            asks = [asyncio.create_task(ask(0, 20))]
            first = await until(control, "idle", lambda plan: plan.requested, "a replica to be asked for")
            await asyncio.sleep(3)
            asks += [asyncio.create_task(ask(seed, 20)) for seed in range(1, 21)]
            more = await until(control, "idle", lambda plan: plan.pods > first.pods, "more to be asked for")
            assert more.at_us > first.at_us and more.requested[0] == first.requested[0]
            await asyncio.sleep(2)
            await start("agent", "--replica", "first", "--pool", "idle", "--sim", "model=idle,itl_ms=5")
            assert await asyncio.gather(*asks) == [20] * 21
        finally:
            await client.close()
        # By the countdown from the request for a replica, and not by when this machine has started one
        came, began = min(served), told[0][0]
        ahead = [(max(9 - (at - began), 0.9), left) for at, left in told if came - at > 1]
        print(f"expected and told: {[(round(due, 1), left) for due, left in ahead[:: len(ahead) // 6]]}")
        assert len(ahead) > 10 and all(abs(left - due) <= 2.5 for due, left in ahead), ahead
        assert told[0][1] >= 7 and min(left for _, left in told) <= 4, "it counts down"
