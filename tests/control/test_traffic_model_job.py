"""The traffic model job: what it asks of telemetry, keeps in Redis, and shows to operators."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from aiohttp import web

from inference.control.metrics import ControllerMetrics
from inference.control.policy.arrival_profile import SLOT_S, WEEK_S, learn_profile
from inference.control.policy.traffic_model import PoolTrafficModel
from inference.control.traffic_model_job import TrafficModelJob
from stream_fabric.pool.plan import PoolPlan, route_key
from stream_fabric.pool.traffic_model import Jump, Speed, decode_traffic_model
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from stream_gw.cli.commands import pools
from telemetry.ask.queries import SAVED
from tests.control.test_traffic_model import NAN, NOW_S, a_route, row
from tests.support.waiting import eventually
from tests.support.web import served


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
        async with served([web.post("/query", self.query)]) as self.url:
            yield self


@contextlib.asynccontextmanager
async def running(*some: TrafficModelJob) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one.run()) for one in some]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError), outcome


def job(pool: str, control: RedisControl, url: str = "", *, leads: bool) -> TrafficModelJob:
    made = TrafficModelJob(url, "t", [pool], control, HostClock(), HostRandom(), load_every_s=0.05, learn_every_s=0.2)
    made.is_leading = leads
    return made


@pytest.fixture
def pool() -> str:
    return f"p{os.urandom(4).hex()}"


async def test_the_leader_learns_the_others_read_and_an_outage_changes_nothing_but_the_age(
    redis_client: RedisClient, pool: str, caplog: pytest.LogCaptureFixture
) -> None:
    control = RedisControl(redis_client)
    async with Door().open() as door:
        leader, other = (job(pool, control, door.url, leads=leads) for leads in (True, False))
        async with running(leader, other):

            async def read() -> PoolTrafficModel | None:
                known = other.known.get(pool)
                return known if known and known.learned_s else None

            known: PoolTrafficModel = await eventually(read, "the other to have it")
            assert known.arrivals is not None and known.arrivals.at(door.at_s + WEEK_S).requests == 1.0
            assert known.outputs() == {route_key("m", "openai.chat", "batch"): 150.0}
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
            assert "traffic model not updated" in caplog.text and "503" in caplog.text
            await still(200, arrivals=[])
            arrivals = [(door.at_s, 1.0, 1.0, 1.0)]
            await still(200, arrivals=[(door.at_s, None, 1.0, 1.0)])
            await still(200, arrivals=[(door.at_s, 1e30, 1.0, 1.0)])
            await still(200, arrivals=arrivals, lengths="no")  # type: ignore[arg-type]
            metrics = ControllerMetrics()
            learned_s = leader.known[pool].learned_s
            metrics.receive_models({**leader.known, "new": PoolTrafficModel()}, learned_s + 77)
            value = metrics.registry.get_sample_value
            assert value("pool_profile_age_seconds", {"pool": pool}) == 77
            assert value("pool_profile_age_seconds", {"pool": "new"}) is None, "nothing is no age"
            door.rows |= {"lengths": [row(output_mean=NAN), row(output_mean=None)], "speeds": [], "arrivals": arrivals}

            async def learned_again() -> bool:
                return leader.known[pool].learned_s > learned_s

            await eventually(learned_again, "it to learn again")
            assert leader.known[pool].outputs() == known.outputs(), "what has no answer now keeps what it taught"


@pytest.mark.parametrize(
    "record",
    [b'{"version": 99, "routes": 5}', b'{"learned_s": 3, "requests": [1]}', b"{", b'{"version": 2, "learned_s": "x"}'],
    ids=str,
)
async def test_a_snapshot_of_another_version_or_one_that_is_broken_is_learned_anew(
    redis_client: RedisClient, pool: str, record: bytes
) -> None:
    control = RedisControl(redis_client)
    await control.put_learned(pool, record)
    stale = job(pool, control, leads=False)
    async with running(stale):
        await eventually(lambda: pool in stale.known, "it to have looked")
    assert stale.known[pool] == PoolTrafficModel()
    assert await control.learned(pool) == record, "who does not lead leaves it as it is"
    async with Door().open() as door, running(job(pool, control, door.url, leads=True)):

        async def anew() -> bytes | None:
            stored = await control.learned(pool)
            return stored if stored != record else None

        found = decode_traffic_model(
            await eventually(anew, "it to be learned anew", 10), msgspec.json.Decoder(PoolTrafficModel)
        )
    assert found is not None and found.routes


class Counted(RedisControl):
    """Counts how often what was learned is read."""

    looks = 0

    async def learned(self, pool: str) -> bytes | None:
        self.looks += 1
        return await super().learned(pool)

    async def both_have_looked(self) -> None:
        """Two traffic_model_job, each for the second time from now: whatever they do at a look is done."""
        enough = self.looks + 6
        await eventually(lambda: self.looks >= enough, "learners to look")


async def test_a_redis_that_lost_it_gets_it_back_and_starts_are_kept(redis_client: RedisClient, pool: str) -> None:
    control, known = Counted(redis_client), RedisControl(redis_client)
    a, b = (job(pool, control, leads=leads) for leads in (True, False))

    async def stored() -> PoolTrafficModel | None:
        record = await known.learned(pool)
        return None if record is None else decode_traffic_model(record, msgspec.json.Decoder(PoolTrafficModel))

    async with running(a, b):
        await control.both_have_looked()
        assert await stored() is None, "nothing is known"
        a.receive_starts(pool, [40.0, NAN])
        a.receive_starts(pool, [50.0])

        async def of(*starts: float) -> bool:
            found = await stored()
            return found is not None and found.starts_s == starts

        await eventually(lambda: of(40, 50), "the starts to be kept")
        await eventually(lambda: b.known[pool].starts_s == (40, 50), "the other to read them")
        a.is_leading = False
        await redis_client.execute(0, "DEL", "sg:{control}:profiles")
        await control.both_have_looked()
        assert await stored() is None, "nobody leads"
        b.is_leading = True
        await eventually(lambda: of(40, 50), "the other to put it back")
        b.receive_starts(pool, [60.0])
        await eventually(lambda: of(40, 50, 60), "one more")
        await eventually(lambda: a.known[pool].starts_s == (40, 50, 60), "who led before to read it")


async def test_an_operator_sees_what_was_learned_and_how_old_it_is(
    redis_client: RedisClient, redis_url: str, pool: str
) -> None:
    control, said = RedisControl(redis_client), list[str]()
    term = await control.lead("shown", 5)
    try:
        plan = PoolPlan(1, 0, 1, cold_start_s=45, reason="what was there")
        assert await control.write_plan("shown", term, pool, plan)
        known = PoolTrafficModel(
            learned_s=time.time() - 180, starts_s=(45.0,) * 9, speeds=(Speed(1, 100), Speed(8, 400)),
            routes=(a_route(500, 1234),), jumps=(Jump(60, (0, 0, 0, 2, 2, 3, 4.5), 30, 400),),
            arrivals=learn_profile([], NOW_S),
        )  # fmt: skip
        for record, wanted in (
            (None, ["learned: nothing yet"]),
            (b'{"version": 99}', ["learned: another version's"]),
            (b"{", ["learned: it cannot be read"]),
            (
                msgspec.json.encode(known),
                ["learned: from traces 3 min ago", "cold start: 45 s, of the last 9",
                 "m openai.chat standard, 1234 requests: prompts of 10 (p90 20, p99 30) tokens, answers of 500",
                 "by how many decode at once: 100 of 1, 400 of 8",
                 "95%: 0.00/s, 99%: 2.00/s, 99.5%: 2.00/s, 99.9%: 3.00/s, 100%: 4.50/s"],
            ),
            (
                msgspec.json.encode(PoolTrafficModel(starts_s=(3.0,))),
                ["nothing from traces yet", "45 s as declared, 1 seen"],
            ),
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
        await control.write_plan("shown", term, pool, None)
        await control.leave("shown")
