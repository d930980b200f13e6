"""What is learned of a pool: from answers of telemetry, from its own starts; kept, checked, and what is made of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from aiohttp import web

from inference.control import learner as learners
from inference.control import lessons
from inference.control.learner import Learner
from inference.control.lessons import Snapshot, jumps, routes, speeds
from inference.control.metrics import ControllerMetrics
from inference.control.profile import SLOT_S, WEEK_S, learned
from inference.control.scaling import PoolScaler, ScalePolicy, Seen
from inference.control.starts import Starts
from stream_fabric.ids import ReplicaId
from stream_fabric.learned import Jump, Learned, Lengths, Route, Speed, decode_learned, started
from stream_fabric.plans import PoolPlan, Usual, decode_plan, encode_plan, route
from stream_fabric.ports import EngineLoad
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.pool import Arrived, Line, ReplicaInfo
from stream_gw import pools
from telemetry.ask.queries import SAVED
from tests.control.test_scaling import POLICY, World
from tests.support.waiting import eventually

NOW_S = 100.0 * WEEK_S
NAN, INF = float("nan"), float("inf")


def a_route(mean: float, requests: float = 100, model: str = "m", tier: str = "standard") -> Route:
    return Route(model, "openai.chat", tier, requests, Lengths(10, 20, 30, 15), Lengths(mean, mean, mean, mean))


# --- what cannot be -----------------------------------------------------------------------------------------


def row(**bad: Any) -> lessons.LengthsRow:
    good: dict[str, Any] = {
        "model": "m", "dialect": "openai.chat", "tier": "batch", "requests": 100.0, "prompt_mean": 15.0,
        "prompt_q": [10.0, 20.0, 30.0], "output_mean": 150.0, "output_q": [100.0, 200.0, 300.0],
    }  # fmt: skip
    return tuple({**good, **bad}.values())


@pytest.mark.parametrize(
    "bad",
    [
        {"requests": 3.0}, {"requests": 0.0}, {"requests": NAN}, {"requests": INF}, {"prompt_mean": 0.0},
        {"prompt_mean": None}, {"prompt_mean": NAN}, {"prompt_q": [NAN, 2.0, 3.0]}, {"prompt_q": [3.0, 2.0, 1.0]},
        {"prompt_q": []}, {"prompt_q": [1.0, None, 3.0]}, {"output_q": [1.0, 2.0, 1e12]}, {"output_mean": -1.0},
        {"output_q": [-5.0, 2.0, 3.0]}, {"output_mean": INF},
    ],
    ids=str,
)  # fmt: skip
def test_lengths_that_cannot_be_teach_nothing_and_the_others_do(bad: dict[str, Any]) -> None:
    found = routes([row(**bad), row(model="well", requests=60.0), row(model="most", requests=900.0)])
    assert [one.model for one in found] == ["most", "well"]
    assert found[0].output == Lengths(100, 200, 300, 150)


def test_speeds_that_cannot_be_teach_nothing_and_the_others_do() -> None:
    well = [(50.0, 8.0, 400.0, 1000.0, 1e6), (50.0, 1.0, 100.0, 3000.0, 1e6)]
    bad = [
        (3.0, 16.0, 1.0, 1.0, 1e6),
        *((50.0, batch, per_s, 1.0, 1.0) for batch, per_s in ((None, 9.0), (NAN, 9.0), (0.5, 9.0), (INF, 9.0))),
        *((50.0, 4.0, per_s, 1.0, 1.0) for per_s in (None, NAN, 0.0, -1.0, 1e9)),
    ]
    assert speeds([*well, *bad]) == ((Speed(1, 100), Speed(8, 400)), 2000.0)
    assert speeds([(50.0, 1.0, 100.0, 0.0, 0.0)]) == ((Speed(1, 100),), 0.0), "no prompt was computed"
    assert speeds([]) == ((), 0.0)


@pytest.mark.parametrize(
    "record",
    [
        {"version": 1, "starts_s": [0.0]}, {"version": 1, "starts_s": [1e9]}, {"version": 1, "learned_s": -1},
        {"version": 1, "prefill_per_s": 1e12}, {"version": 1, "speeds": [{"batch": 0, "tokens_per_s": 5}]},
        {"version": 1, "speeds": [{"batch": 2, "tokens_per_s": 5}, {"batch": 1, "tokens_per_s": 5}]},
        {"version": 1, "jumps": [{"within_s": 60, "requests": -1, "prompt_tokens": 0, "output_tokens": 0}]},
        {"version": 1, "arrivals": {"learned_s": 0, "requests": [1], "prompt_tokens": [1], "output_tokens": [1]}},
        [], "no",
    ],
    ids=str,
)  # fmt: skip
def test_a_snapshot_that_cannot_be_is_refused_whole(record: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_learned(msgspec.json.encode(record), msgspec.json.Decoder(Snapshot))


def test_a_snapshot_of_another_version_is_none() -> None:
    decoder = msgspec.json.Decoder(Snapshot)
    for record in ({"version": 99, "routes": "who knows"}, {"learned_s": 5, "requests": [1.0]}):
        assert decode_learned(msgspec.json.encode(record), decoder) is None
    known = Snapshot(arrivals=learned([(NOW_S - WEEK_S, 1, 2, 3)], NOW_S), routes=(a_route(5),), starts_s=(3.0,))
    again = decode_learned(msgspec.json.encode(known), decoder)
    assert again is not None and again.routes == known.routes and again.arrivals is not None
    assert decode_learned(msgspec.json.encode(known), msgspec.json.Decoder(Learned)) is not None, "without arrivals"


# --- figures ------------------------------------------------------------------------------------------------


def test_a_cold_start_is_what_was_declared_until_enough_have_been_seen_and_never_far_from_it() -> None:
    def of(*took: float) -> float:
        return Learned(starts_s=started((), took)).cold_start_s(100)

    assert of(40, 40, 40, 40) == 100
    assert of(40, 40, 40, 40, 40) == 40
    assert of(*range(40, 50), 80, 90) == 80, "the 90th percentile"
    assert of(*[1.0] * 9) == 10 and of(*[9000.0] * 9) == 300
    assert of(NAN, 0, -5, INF, 1e6, 40, 40, 40, 40) == 100, "what cannot be is not counted"
    assert len(started(range(1, 50), (5.0, 6.0))) == 50 and started(range(1, 51), (99.0,))[-1] == 99


def test_tokens_a_second_lie_between_what_was_seen() -> None:
    known = Learned(speeds=(Speed(2, 100), Speed(8, 250), Speed(32, 400)))
    assert [known.decode_per_s(batch) for batch in (1, 2, 5, 8, 32, 500)] == [50, 100, 175, 250, 400, 400]
    assert Learned().decode_per_s(8) == 0


def test_what_replicas_usually_do_is_known_without_one() -> None:
    known = Learned(
        speeds=(Speed(4, 200), Speed(15.2, 500)), prefill_per_s=2000, routes=(a_route(100, 300), a_route(500, 100))
    )
    assert known.usual(None) == Usual(16, 2000, 500, 200, 4.0), "of as many slots as were ever filled"
    assert known.usual(Usual(4, 9000, 1, 1, 3.0)) == Usual(4, 9000, 200, 200, 3.0)
    last = Usual(4, 9000, 1, 1, 3.0)
    assert Learned(routes=known.routes).usual(last) == last and Learned().usual(None) is None
    assert Learned(speeds=known.speeds, routes=known.routes).usual(None) is None, "how fast prompts go is not known"


def test_the_jump_that_few_exceed() -> None:
    """Each hour of a week a burst of one slot, five times the rest, and one of a hundred times that."""
    rates = [500.0 if slot == 77 else 50.0 if slot * SLOT_S % 3600 == 0 else 10.0 for slot in range(WEEK_S // SLOT_S)]
    begin = NOW_S - WEEK_S
    rows = [(begin + k * SLOT_S, SLOT_S * rate, 10 * SLOT_S * rate, 99 * SLOT_S * rate) for k, rate in enumerate(rates)]
    found = jumps(rows, NOW_S)
    assert [jump.within_s for jump in found] == list(lessons.JUMP_HORIZONS_S)
    assert {(jump.requests, jump.prompt_tokens, jump.output_tokens) for jump in found} == {(40.0, 400.0, 3960.0)}
    assert jumps([(at_s, SLOT_S, 1, 1) for at_s, *_ in rows], NOW_S)[0].requests == 0, "what is even does not jump"
    assert jumps([], NOW_S) == ()
    known = Learned(jumps=(Jump(60, 1, 1, 1), Jump(300, 2, 2, 2)))
    assert [jump and jump.within_s for jump in map(known.jump, (10, 60, 61, 9000))] == [60, 60, 300, 300]
    assert Learned().jump(60) is None


@pytest.mark.parametrize("per_slot", [0.3, 5.0, 600.0])
def test_chance_is_no_jump(per_slot: float) -> None:
    draw = random.Random(7)
    slots = WEEK_S // SLOT_S
    came = [max(round(draw.gauss(per_slot, per_slot**0.5)), 0) for _ in range(slots)]
    found = jumps([(NOW_S - WEEK_S + k * SLOT_S, count, count, count) for k, count in enumerate(came)], NOW_S)
    assert {jump.requests for jump in found} == {0.0}


def test_the_largest_of_what_follows_is_found_whatever_follows() -> None:
    draw = random.Random(4)
    for ahead in (1, 3, 7):
        counts = [draw.choice([0.0, 100.0, 200.0, draw.random() * 900]) for _ in range(60)]
        pairs = [(counts[i], max(counts[i + 1 : i + 1 + ahead])) for i in range(60 - ahead)]
        slow = [most - own if most - own > 4 * (most + own) ** 0.5 else 0.0 for own, most in pairs]
        assert sorted(lessons._rises(counts, ahead)) == sorted(slow) and any(slow)


# --- starts -------------------------------------------------------------------------------------------------


def infos(**states: Any) -> list[ReplicaInfo]:
    return [
        ReplicaInfo(ReplicaId(name), "p", "sim", ("m",), state, EngineLoad(0, 0, 4)) for name, state in states.items()
    ]


def test_a_start_lasts_from_when_the_replica_was_asked_for_until_it_is_up() -> None:
    starts = Starts()
    assert starts.look(1, infos(a="ready"), 1000) == []
    assert starts.look(3, infos(a="ready"), 1010) == [] and starts.asked() == ((1_010_000_000, 2),)
    assert starts.look(4, infos(a="ready", b="starting"), 1020) == []
    assert starts.asked() == ((1_010_000_000, 2), (1_020_000_000, 1))
    assert starts.look(4, infos(a="ready", b="ready"), 1070) == [60]
    assert starts.look(4, infos(a="ready", b="ready", c="warm", d="sleeping"), 1090) == [80, 70]
    assert starts.asked() == ()


def test_what_was_asked_for_and_is_not_wanted_any_more_was_asked_for_last() -> None:
    starts = Starts()
    starts.look(1, infos(a="ready"), 0)
    starts.look(2, infos(a="ready"), 10)
    starts.look(3, infos(a="ready"), 20)
    starts.look(2, infos(a="ready"), 30)
    assert starts.asked() == ((10_000_000, 1),)


def test_a_lease_that_lapsed_is_no_start_and_a_replica_that_died_is_asked_for_again() -> None:
    starts = Starts()
    starts.look(2, infos(a="ready", b="ready"), 0)
    starts.look(2, infos(a="ready"), 100)
    assert starts.asked() == ((100_000_000, 1),)
    assert starts.look(2, infos(a="ready", b="ready"), 105) == [] and starts.asked() == ()
    starts.look(2, infos(a="ready"), 200)
    assert starts.look(2, infos(a="ready", c="ready"), 260) == [60]


def test_who_leads_next_knows_when_they_were_asked_for() -> None:
    before = Starts()
    before.look(1, infos(a="ready"), 0)
    before.look(2, infos(a="ready"), 10)
    before.look(4, infos(a="ready"), 20)
    plan = decode_plan(encode_plan(PoolPlan(4, 0, 4, asked=before.asked())))
    after = Starts(plan.asked)
    assert after.look(4, infos(a="ready", b="ready"), 60) == [], "it came while nobody looked"
    assert after.look(4, infos(a="ready", b="ready", c="ready"), 80) == [60]


# --- what is made of it -------------------------------------------------------------------------------------


def test_the_wait_told_counts_down_from_when_the_replica_was_asked_for() -> None:
    plan = PoolPlan(1, 0, 1, cold_start_s=100, asked=((1_000_000_000, 1), (1_050_000_000, 2)), at_us=1_080_000_000)
    assert [plan.warming_s(1, now_s * 1_000_000) for now_s in (1000, 1030, 1090)] == [100, 70, 10]
    assert plan.warming_s(1, 1_500_000_000) == 10, "one that is late is not known to come at once"
    assert plan.warming_s(1, 900_000_000) == 100, "clocks differ"
    assert PoolPlan(0, 0, 0, cold_start_s=100).warming_s(1, 0) == 100, "nobody was asked for yet"
    assert PoolPlan(1, 0, 1, cold_start_s=100).warming_s(1, 0) == 1, "all are up, and one is promoted"
    served = msgspec.structs.replace(plan, ready=2, usual=Usual(8, 1000, 80, 200, 4))
    asleep = PoolPlan(1, 0, 1, cold_start_s=100)
    assert [asleep.warming_s(1, 0, wake_s) for wake_s in (0.0, 0.2, 8.0)] == [1, 1, 8], "one is woken"
    assert plan.warming_s(1, 1_030_000_000, 8.0) == 8 and plan.warming_s(1, 1_090_000_000, 30.0) == 10, "who is sooner"
    assert [served.warming_s(place, 1_030_000_000) for place in (1, 16, 17, 33)] == [70, 70, 90, 110], "by turns of 16"


def test_a_learned_cold_start_is_how_far_ahead_is_looked_and_what_is_told() -> None:
    policy = ScalePolicy(cold_start_s=300)
    scaler = PoolScaler(policy)
    scaler.learn(None)
    assert scaler.policy is policy
    scaler.learn(Snapshot(starts_s=(100.0,) * 9))
    plan, _, figures = scaler.look(Seen(infos(a="ready"), [], Arrived(0, 0, 0)), 0.0)
    assert plan.cold_start_s == figures.cold_start_s == scaler.policy.cold_start_s == 100
    assert plan.patience_s == 600, "nobody is sent away for a start that takes as long as was declared"
    scaler.learn(Snapshot())
    assert scaler.policy.cold_start_s == 300, "of what was declared, and not of what was learned before"


def test_what_waits_for_a_pool_without_replicas_is_reckoned_by_what_was_learned() -> None:
    """Two thousand requests of 500 output tokens, and no replica was ever seen: at 1,000 tokens a second each, and 100
    seconds for a start, ten are needed."""
    policy = ScalePolicy(replicas_min=0, replicas_max=50, warm_share=0, cold_start_s=100, utilisation_aimed=1.0,
                         utilisation_max=1.0)  # fmt: skip
    lines = [Line(2000, 1.0, 2000, 2000 * 500), Line(0, 0, 0, 0), Line(0, 0, 0, 0)]
    known = Snapshot(speeds=(Speed(2, 200), Speed(20, 1000)), prefill_per_s=100_000, routes=(a_route(500),))
    wanted = []
    for snapshot in (known, None):
        scaler = PoolScaler(policy)
        scaler.learn(snapshot)
        for second in range(5):
            plan, _, _ = scaler.look(Seen([], lines, Arrived(2000, 2000, 2000 * 500)), float(second))
        wanted.append(plan.ready)
    assert wanted == [11, 1], "nothing of it is known without"
    assert known.usual(None) is not None
    metrics = ControllerMetrics()
    value = metrics.registry.get_sample_value
    backlog = []
    for plan in (PoolPlan(1, 0, 1, usual=known.usual(None)), PoolPlan(1, 0, 1)):
        metrics.receive_plans({"p": plan}, leads=True)
        metrics.receive_pools({"p": ([], lines)})
        backlog.append(value("pool_backlog_seconds", {"pool": "p"}))
    assert backlog == [pytest.approx(1000.02), pytest.approx(1_002_000)]


def jumping(output_tokens: float) -> Snapshot:
    return Snapshot(jumps=(Jump(60, 1, 0, output_tokens), Jump(300, 1, 0, 9e9)))


@pytest.mark.parametrize(
    ("jump_replicas", "max_share", "warm"),
    [(0.0, 0.5, 0), (2.0, 0.5, 0), (5.0, 0.5, 4), (5.0, 0.25, 2), (500.0, 0.25, 2), (5.0, 0.0, 0)],
    ids=str,
)
def test_warm_replicas_are_for_the_jumps_that_the_ready_ones_cannot_take(
    jump_replicas: float, max_share: float, warm: int
) -> None:
    """Eight that are filled to 0.6 take 2 replicas' worth of work more until they are filled to 0.85."""
    policy = msgspec.structs.replace(POLICY, replicas_min=8, replicas_max=20, warm_max_share=max_share)
    world = World(lambda t: 4.0, policy).boot(8)
    world.scaler.learn(jumping(jump_replicas * 100))
    plan = world.run(200)
    assert (plan.ready, plan.warm, plan.pods) == (8, warm, 8 + warm)
    if warm:
        told = [plan for _, plan in world.plans if "warm for jumps" in plan.reason]
        assert told and told[0].figures["jump"] == jump_replicas
    assert world.figures is not None and world.figures.jump == jump_replicas


def test_jumps_take_no_warm_replica_away_and_keep_none_of_a_pool_at_zero() -> None:
    declared = msgspec.structs.replace(POLICY, warm_min=3, replicas_min=2)
    world = World(lambda t: 0.0, declared).boot(2)
    world.scaler.learn(jumping(0))
    assert world.run(200).warm == 3
    asleep = World(lambda t: 0.0, msgspec.structs.replace(POLICY, replicas_min=0))
    asleep.scaler.learn(jumping(1e6))
    assert asleep.run(200).pods == 0


# --- kept ---------------------------------------------------------------------------------------------------


class Door:
    """Telemetry's, as far as a learner sees it."""

    def __init__(self) -> None:
        at_s = int(time.time()) // SLOT_S * SLOT_S - WEEK_S + SLOT_S
        self.at_s = at_s
        self.rows: dict[str, list[Any]] = {
            "arrivals": [(at_s, float(SLOT_S), 10.0 * SLOT_S, 100.0 * SLOT_S)],
            "lengths": [row()],
            "speeds": [(50.0, 8.0, 400.0, 1000.0, 1e6)],
        }
        self.status = 200
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    async def query(self, request: web.Request) -> web.Response:
        if request.headers["authorization"] != "Bearer t":
            return web.Response(status=401, text="no")
        self.asked.append(await request.json())
        body = msgspec.json.encode({"columns": [], "rows": self.rows[self.asked[-1]["query"]]})
        return web.Response(body=body, status=self.status, content_type="application/json")

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Door]:
        app = web.Application()
        app.add_routes([web.post("/query", self.query)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def running(*some: Learner) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one.run()) for one in some]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError), outcome


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(learners, "_LOAD_EVERY_S", 0.05)
    monkeypatch.setattr(learners, "_LEARN_EVERY_S", 0.2)
    return f"p{os.urandom(4).hex()}"


async def test_the_leader_learns_the_others_read_and_an_outage_changes_nothing_but_the_age(
    redis_client: RedisClient, pool: str, caplog: pytest.LogCaptureFixture
) -> None:
    control = RedisControl(redis_client)
    async with Door().open() as door:
        leader, other = (Learner(door.url, "t", [pool], control, lambda leads=leads: leads) for leads in (True, False))
        async with running(leader, other):

            async def read() -> Snapshot | None:
                known = other.known.get(pool)
                return known if known and known.learned_s else None

            known: Snapshot = await eventually(read, "the other to have it", 10)
            assert known.arrivals is not None and known.arrivals.at(door.at_s + WEEK_S).requests == 1.0
            assert known.outputs() == {route("m", "openai.chat", "batch"): 150.0}
            assert known.speeds == (Speed(8, 400),) and known.prefill_per_s == 1000
            for asked in door.asked[:7]:
                assert asked["parameters"]["pool"] == pool
                assert set(asked["parameters"]) == set(SAVED[asked["query"]].parameters), "it asks what there is"
            assert [asked["query"] for asked in door.asked[:7]] == [*["arrivals"] * 5, "lengths", "speeds"]
            spans = [(asked["parameters"]["from_us"], asked["parameters"]["until_us"]) for asked in door.asked[:5]]
            assert spans[-1][1] - spans[0][0] == 4 * WEEK_S * 1_000_000
            assert all(one[1] == other[0] for one, other in pairwise(spans)), "each week whole, and once"

            async def still(status: int, **rows: list[Any]) -> None:
                """Whatever it answers from now on, what is known stays, and grows old."""
                door.status = status
                door.rows |= rows
                await settled(8)
                before = leader.known[pool]
                await settled(8)
                assert leader.known[pool] == before and leader.known[pool].speeds == (Speed(8, 400),)

            async def settled(times: int) -> None:
                count = len(door.asked)

                async def asked_again() -> bool:
                    return len(door.asked) >= count + times

                await eventually(asked_again, "it to be tried again", 20)

            await still(503)
            assert "nothing can be learned" in caplog.text and "503" in caplog.text
            await still(200, arrivals=[])
            arrivals = [(door.at_s, 1.0, 1.0, 1.0)]
            await still(200, arrivals=[(door.at_s, None, 1.0, 1.0)])
            await still(200, arrivals=[(door.at_s, 1e30, 1.0, 1.0)])
            await still(200, arrivals=arrivals, lengths="no")  # type: ignore[arg-type]
            metrics = ControllerMetrics()
            learned_s = leader.known[pool].learned_s
            metrics.receive_learned({**leader.known, "new": Snapshot()}, learned_s + 77)
            value = metrics.registry.get_sample_value
            assert value("pool_profile_age_seconds", {"pool": pool}) == 77
            assert value("pool_profile_age_seconds", {"pool": "new"}) is None, "nothing is no age"
            door.rows |= {"lengths": [row(output_mean=NAN), row(output_mean=None)], "speeds": [], "arrivals": arrivals}

            async def learned_again() -> bool:
                return leader.known[pool].learned_s > learned_s

            await eventually(learned_again, "it to learn again", 10)
            assert leader.known[pool].outputs() == known.outputs(), "what has no answer now keeps what it taught"


@pytest.mark.parametrize(
    "record",
    [b'{"version": 99, "routes": 5}', b'{"learned_s": 3, "requests": [1]}', b"{", b'{"version": 1, "learned_s": "x"}'],
    ids=str,
)
async def test_a_snapshot_of_another_version_or_one_that_is_broken_is_learned_anew(
    redis_client: RedisClient, pool: str, record: bytes
) -> None:
    control = RedisControl(redis_client)
    await control.put_learned(pool, record)
    stale = Learner("", "", [pool], control, lambda: False)
    async with running(stale):
        await eventually(lambda: pool in stale.known, "it to have looked", 10)
    assert stale.known[pool] == Snapshot()
    assert await control.learned(pool) == record, "who does not lead leaves it as it is"
    async with Door().open() as door, running(Learner(door.url, "t", [pool], control, lambda: True)):

        async def anew() -> bytes | None:
            stored = await control.learned(pool)
            return stored if stored != record else None

        found = decode_learned(await eventually(anew, "it to be learned anew", 10), msgspec.json.Decoder(Snapshot))
    assert found is not None and found.routes


class Counted(RedisControl):
    """Counts how often what was learned is read."""

    looks = 0

    async def learned(self, pool: str) -> bytes | None:
        self.looks += 1
        return await super().learned(pool)

    async def both_have_looked(self) -> None:
        """Two learners, each for the second time from now: whatever they do at a look is done."""
        enough = self.looks + 6
        await eventually(lambda: self.looks >= enough, "learners to look", 10)


async def test_a_redis_that_lost_it_gets_it_back_and_starts_are_kept(redis_client: RedisClient, pool: str) -> None:
    control, known = Counted(redis_client), RedisControl(redis_client)
    leads = {"a": True, "b": False}
    a, b = (Learner("", "", [pool], control, lambda name=name: leads[name]) for name in leads)

    async def stored() -> Snapshot | None:
        record = await known.learned(pool)
        return None if record is None else decode_learned(record, msgspec.json.Decoder(Snapshot))

    async with running(a, b):
        await control.both_have_looked()
        assert await stored() is None, "nothing is known"
        a.receive_starts(pool, [40.0, NAN])
        a.receive_starts(pool, [50.0])

        async def of(*starts: float) -> bool:
            found = await stored()
            return found is not None and found.starts_s == starts

        await eventually(lambda: of(40, 50), "the starts to be kept", 10)
        await eventually(lambda: b.known[pool].starts_s == (40, 50), "the other to read them", 10)
        leads["a"] = False
        await redis_client.execute(0, "DEL", "sg:{control}:profiles")
        await control.both_have_looked()
        assert await stored() is None, "nobody leads"
        leads["b"] = True
        await eventually(lambda: of(40, 50), "the other to put it back", 10)
        b.receive_starts(pool, [60.0])
        await eventually(lambda: of(40, 50, 60), "one more", 10)
        await eventually(lambda: a.known[pool].starts_s == (40, 50, 60), "who led before to read it", 10)


async def test_an_operator_sees_what_was_learned_and_how_old_it_is(
    redis_client: RedisClient, redis_url: str, pool: str
) -> None:
    control, said = RedisControl(redis_client), list[str]()
    term = await control.lead("shown", 5)
    try:
        plan = PoolPlan(1, 0, 1, cold_start_s=45, reason="what was there")
        assert await control.decree("shown", term, pool, plan)
        known = Snapshot(
            learned_s=time.time() - 180, starts_s=(45.0,) * 9, speeds=(Speed(1, 100), Speed(8, 400)),
            routes=(a_route(500, 1234),), jumps=(Jump(60, 2, 30, 400),), arrivals=learned([], NOW_S),
        )  # fmt: skip
        for record, wanted in (
            (None, ["learned: nothing yet"]),
            (b'{"version": 99}', ["learned: another version's"]),
            (b"{", ["learned: it cannot be read"]),
            (
                msgspec.json.encode(known),
                ["learned: from traces 3 min ago", "cold start: 45 s, of the last 9",
                 "m openai.chat standard, 1234 requests: prompts of 10 (p90 20, p99 30) tokens, answers of 500",
                 "by how many decode at once: 100 of 1, 400 of 8", "less than 2.00 requests (400 output tokens)"],
            ),
            (msgspec.json.encode(Snapshot(starts_s=(3.0,))), ["nothing from traces yet", "45 s as declared, 1 seen"]),
        ):  # fmt: skip
            if record is not None:
                await control.put_learned(pool, record)
            said.clear()
            await pools.show(redis_url, json=False, say=said.append, learned=True)
            assert [words for words in wanted if words not in said[0]] == [], said[0]
        await pools.show(redis_url, json=True, say=said.append, learned=True)
        (told,) = [one for one in msgspec.json.decode(said[-1])["pools"] if one["pool"] == pool]
        assert told["learned"]["starts_s"] == [3.0] and "arrivals" not in told["learned"]
        await pools.show(redis_url, json=False, say=said.append)
        assert "learned" not in said[-1]
    finally:
        await control.decree("shown", term, pool, None)
        await control.leave("shown")
