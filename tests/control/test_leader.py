"""Controllers that plan pools together: one leads, and whatever dies, nothing is taken by mistake. On virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from inference.control.leader import Leader
from inference.control.metrics import ControllerMetrics
from inference.control.pods import Marker, NoMarker
from inference.control.policy.scale_policy import ScalePolicy, parse_policies
from inference.control.policy.traffic_model import PoolTrafficModel
from inference.control.pool_watch import watch_pools
from inference.control.traffic_model_job import TrafficModelJob
from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import COMMAND_TIMEOUT_S
from stream_fabric.pool.placement import ReplicaState
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import EngineLoad, ReplicaInfo
from stream_fabric.stream.ids import ReplicaId
from stream_gw.cli.commands.pools import Row, as_text
from tests.support.events import Heard
from tests.support.memory_control import LoopClock, MemoryControl, MemoryPools, MemoryRedis
from tests.support.virtual import on_virtual_time

POOL = "pool"
POLICY = ScalePolicy(replicas_min=1, warm_share=0.0, low_s=1.0, cold_start_s=5.0)
STEADY = msgspec.structs.replace(POLICY, low_s=60)


class SeededRandom(random.Random):
    """``Random`` from a seed."""

    def token_bytes(self, count: int) -> bytes:
        return self.randbytes(count)

    def token_hex(self, count: int) -> str:
        return self.randbytes(count).hex()


class Fleet:
    """Replicas of one pool that report every tenth of a second and take the states requested of them."""

    def __init__(self, redis: MemoryRedis, count: int) -> None:
        self.pools = MemoryPools(redis)
        self.states: dict[ReplicaId, ReplicaState] = {ReplicaId(f"r{k}"): "ready" for k in range(count)}
        self.running: dict[ReplicaId, int] = {}
        self.revisions: dict[ReplicaId, str] = {}
        self.changes: list[tuple[str, str]] = []
        """Replica and state, as requested states were taken."""
        self.silent = False

    async def run(self) -> None:
        while True:
            if not self.silent:
                for name in list(self.states):
                    await self._report(name)
            await asyncio.sleep(0.1)

    async def _report(self, name: ReplicaId) -> None:
        load = EngineLoad(self.running.get(name, 0), 0, 10)
        revision = self.revisions.get(name, "")
        info = ReplicaInfo(name, POOL, "sim", ("m",), self.states[name], load, decode_per_s=100.0, revision=revision)
        report = await self.pools.report(info, ttl_s=3.0, running={})
        states: dict[str, ReplicaState] = {"warm": "warm", "ready": "ready", "sleeping:2": "sleeping"}
        state = states.get(report.desired)
        if state is not None and state != self.states[name]:
            self.changes.append((name, report.desired))
            self.states[name] = state


class PoolsInPart(MemoryPools):
    """Pools of which some do not answer: those of a shard that is silent. ``silent`` may also have the list "pools"."""

    def __init__(self, redis: MemoryRedis, silent: set[str]) -> None:
        super().__init__(redis)
        self._silent = silent

    async def pools(self, timeout_s: float | None = None) -> list[str]:
        await self._reach_shard("pools")
        return await super().pools(timeout_s)

    async def replicas(self, pool: str) -> list[ReplicaInfo]:
        await self._reach_shard(pool)
        return await super().replicas(pool)

    async def _reach_shard(self, name: str) -> None:
        if name in self._silent:
            await asyncio.sleep(COMMAND_TIMEOUT_S)
            raise FabricUnavailable(f"no answer within {COMMAND_TIMEOUT_S:g} s")


class Stage:
    """Controllers in this process, each with its own connection to one ``MemoryRedis``."""

    def __init__(self, count: int, policy: ScalePolicy) -> None:
        self.redis = MemoryRedis()
        self.control = MemoryControl(self.redis)
        self.fleet = Fleet(self.redis, count)
        self.policies = {POOL: policy}
        self.silent: set[str] = set()
        """Pools that do not answer."""
        self.sink = Heard()
        self.leaders: dict[str, Leader] = {}
        self.metrics: dict[str, ControllerMetrics] = {}
        self.models: dict[str, TrafficModelJob] = {}
        self._links: dict[str, tuple[MemoryControl, MemoryPools]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, control: MemoryControl | None = None, marker: Marker | None = None) -> None:
        control, pools = control or MemoryControl(self.redis), PoolsInPart(self.redis, self.silent)
        self._links[name] = control, pools
        clock, chance = LoopClock(), SeededRandom(name)
        self.metrics[name] = metrics = ControllerMetrics()
        self.models[name] = models = TrafficModelJob("", "", [POOL], control, clock, chance, load_every_s=0.1)
        self.leaders[name] = leader = Leader(
            name, self.policies, control, pools, self.sink, clock, chance, metrics, marker or NoMarker(), models
        )
        self._tasks[name] = asyncio.create_task(leader.run())

    async def kill(self, name: str) -> None:
        """End a controller as SIGKILL does: it cannot leave."""
        for link in self._links[name]:
            link.cut = True
        await self.stop(name)

    async def stop(self, name: str) -> None:
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        for name in list(self._tasks):
            await self.stop(name)

    async def plan(self) -> PoolPlan | None:
        return (await self.control.plans()).get(POOL)

    async def until(self, condition: Callable[[PoolPlan], Any], what: str) -> PoolPlan:
        async def found() -> PoolPlan | None:
            plan = await self.plan()
            return plan if plan is not None and condition(plan) else None

        plan: PoolPlan = await reached(found, what)
        return plan

    async def until_leads(self, name: str) -> None:
        async def leads() -> bool:
            return await self.control.leader() == name

        await reached(leads, f"{name} to lead")

    def value(self, controller: str, metric: str, **labels: str) -> float | None:
        return self.metrics[controller].registry.get_sample_value(metric, labels)


async def reached(condition: Callable[[], Any], what: str) -> Any:
    """Check a condition, plain or async, every 50 ms of virtual time, for 30 s, until it gives something true."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 30.0
    while loop.time() < deadline:
        seen = condition()
        seen = await seen if asyncio.iscoroutine(seen) else seen
        if seen:
            return seen
        await asyncio.sleep(0.05)
    raise AssertionError(f"waited 30 s for {what}")


@asynccontextmanager
async def staged(count: int, policy: ScalePolicy = POLICY) -> AsyncIterator[Stage]:
    stage = Stage(count, policy)
    reporting = asyncio.create_task(stage.fleet.run())
    try:
        yield stage
    finally:
        await stage.close()
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)


# --- leadership ----------------------------------------------------------------------------------------------


@on_virtual_time
async def test_the_leaders_death_changes_nothing_and_another_goes_on_within_five_seconds() -> None:
    async with staged(4) as stage:
        fleet = stage.fleet
        for replica in fleet.states:
            fleet.running[replica] = 1  # a resting replica has something to finish
        stage.start("a")
        resting = await stage.until(lambda plan: plan.resting, "a replica to rest")
        assert await stage.control.leader() == "a"
        told = as_text("a", [Row(POOL, resting, [], 0, 0.0)], 0.0)
        assert f"stops taking requests: {resting.resting}; it is warm once" in told and "sleep" not in told
        stage.start("b")
        await asyncio.sleep(10)
        assert await stage.control.leader() == "a", "the leader goes on"
        await stage.kill("a")
        loop = asyncio.get_running_loop()
        killed_at = loop.time()
        await stage.until_leads("b")
        assert loop.time() - killed_at < 5
        await asyncio.sleep(10)
        plan = await stage.plan()
        assert plan is not None and plan.resting == resting.resting and plan.pods == 4
        assert fleet.changes == [(resting.resting, "warm")], "no second one"
        assert resting.resting is not None
        fleet.running[resting.resting] = 0
        plan = await stage.until(lambda plan: plan.pods == 3, "the count to fall")
        assert plan.victims == (resting.resting,)
        await asyncio.sleep(30)  # nothing ends the replica, so no other goes
        assert await stage.plan() == plan
        scales = stage.sink.fleet
        assert {event.what for event in scales} == {"scale"} and {event.source for event in scales} == {"a", "b"}
        assert all(event.figures and event.reason for event in scales[1:])


class PausingControl(MemoryControl):
    """Pauses its process at the first plan that takes a replica away."""

    def __init__(self, redis: MemoryRedis) -> None:
        super().__init__(redis)
        self.paused, self.resume = asyncio.Event(), asyncio.Event()

    async def write_plan(self, controller: str, term: int, pool: str, plan: PoolPlan | None) -> bool:
        if plan is not None and plan.resting is not None:
            self.paused.set()
            await self.resume.wait()
        return await super().write_plan(controller, term, pool, plan)


@on_virtual_time
async def test_a_leader_that_was_paused_beyond_its_term_requests_nothing() -> None:
    async with staged(3) as stage:
        control = PausingControl(stage.redis)
        stage.start("a", control)
        await asyncio.wait_for(control.paused.wait(), 30)
        assert stage.fleet.changes == []
        stage.start("b")
        await stage.until_leads("b")
        plan = await stage.until(lambda plan: plan.resting or plan.victims, "the other's choice")
        control.resume.set()
        await asyncio.sleep(10)
        after = await stage.plan()
        assert after is not None and {after.resting, *after.victims} - {None} == {plan.resting, *plan.victims} - {None}
        assert len({name for name, _ in stage.fleet.changes}) == 1
        assert await stage.control.leader() == "b"


class OvertakenControl(MemoryControl):
    """Once ``overtaken`` is set, another controller leads when the plan of the pool "other" is written.

    ``POOL`` is decided after that.
    """

    def __init__(self, redis: MemoryRedis) -> None:
        super().__init__(redis)
        self.overtaken, self.lost = False, asyncio.Event()

    async def write_plan(self, controller: str, term: int, pool: str, plan: PoolPlan | None) -> bool:
        if self.overtaken and pool == "other":
            await self.leave(controller)
            await self.lead("another", 600.0)
            self._redis.pool(POOL).desired.clear()
            self.lost.set()
        return await super().write_plan(controller, term, pool, plan)

    async def held_s(self, pool: str) -> float:
        if self.overtaken and pool == POOL:
            await self.lost.wait()
        return await super().held_s(pool)


@on_virtual_time
async def test_a_pool_whose_plan_is_refused_ends_the_requests_of_all_pools() -> None:
    async with staged(3) as stage:
        for replica in stage.fleet.states:
            stage.fleet.running[replica] = 1  # the resting one keeps resting, which each look requests again
        stage.policies = {"other": STEADY, POOL: POLICY}
        control = OvertakenControl(stage.redis)
        stage.start("a", control)
        await stage.until(lambda plan: plan.resting, "a replica to rest")
        await reached(lambda: "other" in stage.redis.plans, "the other pool's plan")
        control.overtaken = True
        del stage.redis.plans["other"]
        await asyncio.wait_for(control.lost.wait(), 30)
        await asyncio.sleep(5)
        assert await stage.control.leader() == "another"
        assert stage.redis.pool(POOL).desired == {}


class SlowMarker:
    """A platform whose first answer to marks of targets comes when the test lets it come."""

    def __init__(self) -> None:
        self.asked, self.answer = asyncio.Event(), asyncio.Event()
        self.forgotten = 0
        self._is_marking = False

    async def mark_only(self, targets: Set[ReplicaId]) -> Set[ReplicaId]:
        self._is_marking = True
        if targets:
            self.asked.set()
            await self.answer.wait()
        self._is_marking = False
        return targets

    def forget(self) -> None:
        assert not self._is_marking, "what is being marked cannot be forgotten"
        self.forgotten += 1


@on_virtual_time
async def test_leadership_lost_while_pods_are_marked_ends_no_controller_and_its_answer_counts_for_nothing() -> None:
    async with staged(3) as stage:
        marker = SlowMarker()
        stage.start("a", marker=marker)
        await asyncio.wait_for(marker.asked.wait(), 60)
        plan = await stage.until(lambda plan: plan.victims, "a victim")
        await stage.control.hold(POOL, 600)  # the next leader keeps it
        await stage.control.leave("a")
        await stage.control.lead("b", 3.0)
        await reached(lambda: stage.value("a", "controller_leads") == 0, "the loss of leadership to be shown")
        await stage.until_leads("a")
        await reached(lambda: stage.value("a", "controller_leads") == 1, "the second term")
        assert marker.forgotten == 1, "the first term's"
        await asyncio.sleep(5)
        assert await stage.plan() == plan
        marker.answer.set()
        await reached(lambda: marker.forgotten == 2, "the marks to be read again")


@on_virtual_time
async def test_a_redis_that_lost_everything_gets_its_plans_back() -> None:
    async with staged(4, STEADY) as stage:
        fleet = stage.fleet
        stage.start("a")
        stage.start("b")
        before = await stage.until(lambda plan: plan.typical_replica is not None, "a plan")
        await reached(lambda: stage.value("b", "pool_desired_replicas", pool=POOL) == 4, "the standby to read it")
        fleet.silent = True  # and its replicas take a while to report again
        stage.redis.flush()
        plan = await stage.until(lambda plan: True, "the plan to be written again")
        assert (plan.ready, plan.pods) == (before.ready, before.pods) == (4, 4)
        await asyncio.sleep(5)
        fleet.silent = False
        await asyncio.sleep(5)
        plan = await stage.until(lambda plan: True, "a plan")
        assert (plan.ready, plan.pods, plan.resting) == (4, 4, None) and fleet.changes == []


@on_virtual_time
async def test_no_controller_keeps_the_plan_of_a_pool_that_left_the_pools_file() -> None:
    async with staged(2, STEADY) as stage:
        stage.policies = {"gone": STEADY, POOL: STEADY}
        stage.start("old")
        await reached(lambda: stage.redis.plans.keys() == {"gone", POOL}, "both plans")
        stage.policies = {POOL: STEADY}
        for name in "ab":
            stage.start(name)

        def desired(name: str) -> float | None:
            return stage.value(name, "pool_desired_replicas", pool="gone")

        await reached(lambda: desired("a") and desired("b"), "both to read the plans")
        await stage.kill("old")
        await reached(lambda: stage.redis.plans.keys() == {POOL}, "the plan to be removed")
        await reached(lambda: desired("a") is None and desired("b") is None, "neither to show the plan")


@on_virtual_time
async def test_a_controller_without_redis_shows_neither_leadership_nor_counts() -> None:
    """Another may lead by then, and want something else."""
    async with staged(2, STEADY) as stage:
        stage.start("a")
        await stage.until(lambda plan: plan.pods == 2, "a plan")
        desired, loop = stage.leaders["a"].desired, asyncio.get_running_loop()

        def shows() -> bool:
            return stage.value("a", "controller_leads") == 1 and desired.count(POOL, loop.time()) == 2

        await reached(shows, "the plan to be shown")
        assert stage.value("a", "pool_slo_burn_ratio", pool=POOL, window="1h") is not None
        stage.redis.reachable.clear()
        await reached(lambda: stage.value("a", "controller_leads") == 0, "the loss of leadership to be shown")
        assert stage.value("a", "pool_slo_burn_ratio", pool=POOL, window="1h") is None, "its alert would stay"
        await reached(lambda: desired.count(POOL, loop.time()) is None, "the counts to be unknown")
        stage.redis.reachable.set()
        await reached(shows, "the plan to be shown again")


@on_virtual_time
async def test_controllers_without_a_plan_watch_the_pool_before_they_plan() -> None:
    """After a loss of everything replicas come back one by one: the first that is seen is not the whole fleet."""
    async with staged(1, STEADY) as stage:
        fleet = stage.fleet
        stage.start("a")
        await asyncio.sleep(5)
        assert await stage.plan() is None
        assert stage.value("a", "pool_desired_replicas", pool=POOL) is None, "no count is better than a wrong one"
        for k in range(1, 4):
            fleet.states[ReplicaId(f"r{k}")] = "ready"
        plan = await stage.until(lambda plan: True, "a plan")
        assert (plan.ready, plan.pods) == (4, 4)
        await reached(lambda: stage.value("a", "pool_desired_replicas", pool=POOL) == 4, "the metric")


@on_virtual_time
async def test_pools_of_a_silent_shard_cost_no_leadership_and_the_others_no_plan() -> None:
    async with staged(4, STEADY) as stage:
        lost = [f"lost-{k}" for k in range(200)]
        stage.policies = dict.fromkeys([*lost, POOL], STEADY)
        stage.silent.update(lost)
        stage.start("a")
        await stage.until_leads("a")
        stage.start("b")
        plan = await stage.until(lambda plan: True, "the plan of the pool that answers")
        assert (plan.ready, plan.pods) == (4, 4)
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began < 20:
            assert await stage.control.leader() == "a"
            await asyncio.sleep(0.1)
        failed = stage.value("a", "pool_looks_failed_total")
        assert failed is not None and failed > len(lost) * 5
        stage.silent.clear()
        await reached(lambda: stage.value("a", "pool_needed_replicas", pool=lost[0]) is not None, "the shard's pools")


@on_virtual_time
async def test_a_list_of_pools_that_cannot_be_read_costs_no_leadership() -> None:
    async with staged(0, msgspec.structs.replace(STEADY, replicas_min=0)) as stage:
        stage.start("a")
        await stage.until(lambda plan: plan.pods == 0, "a plan without replicas")
        stage.start("b")
        stage.silent.add("pools")
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began < 20:
            assert await stage.control.leader() == "a"
            await asyncio.sleep(0.1)


@on_virtual_time
async def test_pools_of_a_silent_shard_have_no_metrics_and_the_others_have_theirs() -> None:
    async with staged(4, STEADY) as stage:
        lost = Fleet(stage.redis, 1)
        info = ReplicaInfo(ReplicaId("r"), "lost", "sim", ("m",), "ready", EngineLoad(0, 0, 10))
        await lost.pools.report(info, ttl_s=600.0, running={})
        stage.start("a")
        await stage.until(lambda plan: plan.pods == 4, "a plan")
        pools = PoolsInPart(stage.redis, stage.silent)
        watching = asyncio.create_task(watch_pools(pools, stage.metrics["a"], SeededRandom("w")))

        def ready(pool: str) -> float | None:
            return stage.value("a", "pool_replicas", pool=pool, state="ready")

        await reached(lambda: (ready("lost"), ready(POOL)) == (1, 4), "the metrics of both")
        stage.silent.add("lost")
        stage.fleet.states.pop(ReplicaId("r0"))
        await reached(lambda: ready(POOL) == 3, "the pool that answers to go on")
        assert ready("lost") is None, "what is not known is not shown"
        await reached(lambda: stage.value("a", "pool_short_seconds", pool=POOL), "the replica to be missed")
        watching.cancel()


@on_virtual_time
async def test_a_planned_pool_whose_last_replica_died_is_shown_without_a_ready_one() -> None:
    async with staged(1, STEADY) as stage:
        stage.start("a")
        await stage.until(lambda plan: plan.pods == 1, "a plan")
        pools = PoolsInPart(stage.redis, stage.silent)
        watching = asyncio.create_task(watch_pools(pools, stage.metrics["a"], SeededRandom("w")))
        await reached(lambda: stage.value("a", "pool_replicas", pool=POOL, state="ready") == 1, "the replica")
        stage.fleet.states.clear()
        stage.redis.pool(POOL).leases.clear()
        assert await pools.pools() == []
        await reached(lambda: stage.value("a", "pool_short_seconds", pool=POOL), "the replica to be missed")
        assert stage.value("a", "pool_replicas", pool=POOL, state="ready") == 0, "NoReplicaReady needs a value"
        watching.cancel()


# --- what it does with a pool --------------------------------------------------------------------------------


@on_virtual_time
async def test_a_hold_keeps_everything_and_ends_by_itself() -> None:
    async with staged(3) as stage:
        await stage.control.hold(POOL, 60)
        stage.start("a")
        await stage.until(lambda plan: plan.ready == 3, "a plan")
        await asyncio.sleep(40)
        plan = await stage.plan()
        assert plan is not None and plan.ready == 3 and await stage.control.held_s(POOL) > 0
        await stage.until(lambda plan: plan.ready < 3, "the hold to end")


@on_virtual_time
async def test_warm_replicas_sleep_at_their_level_and_another_leader_wakes_none() -> None:
    policy = msgspec.structs.replace(STEADY, warm_min=2, sleep_level=2, sleep_after_s=1)
    async with staged(3, policy) as stage:
        fleet = stage.fleet
        fleet.states = {name: "ready" if name == "r0" else "warm" for name in fleet.states}
        stage.start("a")
        await reached(lambda: fleet.changes, "a replica to fall asleep")
        await asyncio.sleep(10)
        assert fleet.changes == [("r1", "sleeping:2")], "the other stays awake, as awake_min says"
        await stage.kill("a")
        stage.start("b")
        await stage.until_leads("b")
        await asyncio.sleep(10)
        assert len(fleet.changes) == 1
        plan = await stage.plan()
        assert plan is not None and (plan.ready, plan.warm, plan.pods) == (1, 2, 3)


@on_virtual_time
async def test_cold_starts_are_learned_also_by_a_leader_that_was_not_there_at_the_request() -> None:
    async with staged(1, msgspec.structs.replace(POLICY, replicas_min=3)) as stage:
        fleet, loop = stage.fleet, asyncio.get_running_loop()
        stage.start("a")
        asked = await stage.until(lambda plan: plan.pods == 3 and plan.requested, "two replicas to be asked for")
        asked_at = loop.time()
        assert [count for _, count in asked.requested] == [2]
        fleet.states[ReplicaId("early")] = "starting"
        await asyncio.sleep(1)
        stage.start("b")
        await stage.kill("a")
        await stage.until_leads("b")
        plan = await stage.plan()
        assert plan is not None and plan.requested == asked.requested
        await asyncio.sleep(2)  # one look of the new leader
        learning = asyncio.create_task(stage.models["b"].run())
        took_s: list[float] = []
        for name in ("early", "late"):
            fleet.states[ReplicaId(name)] = "ready"
            took_s.append(loop.time() - asked_at)

            async def learned() -> PoolTrafficModel | None:
                record = await stage.control.learned(POOL)
                found = None if record is None else msgspec.json.decode(record, type=PoolTrafficModel)
                return found if found is not None and len(found.starts_s) == len(took_s) else None

            model: PoolTrafficModel = await reached(learned, f"the start of {name} to be learned")
        assert list(model.starts_s) == [pytest.approx(one, abs=2.0) for one in took_s] and min(took_s) > 2.5
        assert (await stage.until(lambda plan: not plan.requested, "no replica to be missing")).pods == 3
        learning.cancel()


@on_virtual_time
async def test_a_rollout_is_told_once_when_it_begins_and_once_when_it_ends() -> None:
    async with staged(3, STEADY) as stage:
        fleet = stage.fleet
        fleet.revisions = dict.fromkeys(fleet.states, "v1")
        stage.start("a")
        await stage.until(lambda plan: plan.ready == 3, "a plan")

        def rollouts() -> list[tuple[str, str, float, str]]:
            events = [event for event in stage.sink.fleet if event.what == "rollout"]
            return [(event.pool, event.state, event.figures["revisions"], event.source) for event in events]

        assert rollouts() == []
        for done, replica in enumerate(list(fleet.states)):
            fleet.revisions[replica] = "v2"
            await asyncio.sleep(5)
            if done < 2:
                assert rollouts() == [(POOL, "begin", 2, "a")], "one beginning, however many replicas follow"
            if done == 0:
                await stage.kill("a")
                stage.start("b")
                await stage.until_leads("b")
        assert rollouts() == [(POOL, "begin", 2, "a"), (POOL, "end", 1, "b")]
        (begin, _) = [event for event in stage.sink.fleet if event.what == "rollout"]
        assert begin.reason == "several revisions run: 2 of revision v1, 1 of revision v2"


# --- the pools file ------------------------------------------------------------------------------------------


def test_the_pools_file_is_read_and_its_mistakes_are_named() -> None:
    text = '[defaults]\nwarm_min = 1\n[pool.a]\nmodels = ["m"]\nreplicas_max = 5\n[pool.b]\nwarm_min = 0\n'
    policies = parse_policies(text.encode(), "pools.toml")
    assert policies["a"] == ScalePolicy(models=("m",), replicas_max=5, warm_min=1)
    assert policies["b"].warm_min == 0
    spot = parse_policies(b'[pool.a]\nmodels = ["m"]\nbatch_pools = ["b"]\n[pool.b]\nmodels = ["m"]\n', "pools.toml")
    assert spot["a"].marks(None).batch_pools == ("b",)
    for text, mistake in (
        ("[pool.a]\nreplica_max = 5\n", "replica_max"),
        ("[pool.a]\nreplicas_max = 'x'\n", "replicas_max"),
        ("[pool.a]\nreplicas_min = 5\nreplicas_max = 4\n", "replicas_max must be at least 1 and at least replicas_min"),
        ("[pool.a]\nsleep_level = 3\n", "sleep_level must be 0, 1 or 2"),
        ("[pool.a]\nsleep_after_s = -1\n", "times must be 0 or more"),
        ("[pool.a]\nawake_min = -1\n", "awake_min must be 0 or more"),
        ("[pool.a]\nttft_objective_s = inf\n", "objectives, marks, shift_backlog_s and cold_start_s must be finite"),
        ("[pool.a]\ncold_start_s = inf\n", "must be finite"),
        ("[pool.a]\nshed_batch_s = inf\nshed_standard_s = 0\nshed_interactive_s = 0\n", "must be finite"),
        ("[pool.a\n", "line 1"),
        ('[pool.a]\nbatch_pools = ["a"]\n', "batch_pools names the pool itself"),
        ('[pool.a]\nbatch_pools = ["b"]\n', "batch_pools names 'b', which is not declared"),
        ('[pool.a]\nbatch_pools = ["b"]\n[pool.b]\nbatch_pools = ["a"]\n', "which has batch_pools itself"),
        (
            '[pool.a]\nbatch_pools = ["b"]\nadjacent = ["b"]\n[pool.b]\n',
            "'b', which is adjacent to a pool; requests of higher tiers would go there",
        ),
        (
            '[pool.a]\nmodels = ["m"]\nbatch_pools = ["b"]\n[pool.b]\nmodels = ["n"]\n',
            "'b', which serves other models: n",
        ),
    ):
        with pytest.raises(ValueError, match=mistake) as failed:
            parse_policies(text.encode(), "pools.toml")
        assert "pools.toml" in str(failed.value)
