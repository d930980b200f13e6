"""Queries of the traffic model on the real engine: lengths by route, speeds by concurrency."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack
from statistics import quantiles
from typing import Any
from uuid import uuid4

import pytest

from inference.control.policy.traffic_model import PoolTrafficModel
from inference.control.traffic_model_job import TrafficModelJob
from stream_fabric.events import AttemptTrace, Event, Phases, RequestTrace, encode_event
from stream_fabric.pool.traffic_model import Speed
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId
from telemetry.ask.api import api
from telemetry.ask.named_queries import QUERIES
from telemetry.ask.queries import SAVED
from telemetry.consume.metrics import ConsumerMetrics
from telemetry.consume.rows import build_batch
from telemetry.emit.record import Part, PlainRecord
from telemetry.store.store import Store
from tests.support.stores import own_store
from tests.support.waiting import eventually
from tests.telemetry.load import AT_US

HOUR_US = 3_600_000_000
WINDOW: dict[str, Any] = {"pool": "p", "from_us": AT_US - HOUR_US, "until_us": AT_US + HOUR_US}


@pytest.fixture
async def opened(engine_url: str) -> AsyncIterator[Store]:
    async with own_store(engine_url) as store:
        yield store


def request(number: int, prompt: int, output: int, **more: Any) -> RequestTrace:
    given = {"role": "created", "ended": "completed", "model": "m", "pool": "p", "dialect": "openai.chat"} | more
    return RequestTrace(
        id=f"q{number}", at_us=AT_US + number, gateway=GatewayId("g"), tenant=TenantId("t"), wall_us=1,
        phases=Phases(), prompt_tokens=prompt, output_tokens=output, tier=given.pop("tier", "standard"), **given,
    )  # fmt: skip


def attempt(number: int, company: float, tokens: int, decode_us: int, **more: Any) -> AttemptTrace:
    given = {"pool": "p", "prompt_tokens": 1000, "cached_tokens": 200, "prefill_us": 100_000} | more
    return AttemptTrace(
        id=f"a{number}", at_us=AT_US + number, stream=StreamId(f"resp_{number}"), tenant=TenantId("t"), model="m",
        replica=ReplicaId("r"), ended="completed", output_tokens=tokens, generated_tokens=tokens, decode_us=decode_us,
        decoding_us=int(company * decode_us), **given,
    )  # fmt: skip


async def insert(store: Store, events: Iterable[Event]) -> None:
    records = [PlainRecord(i, event.at_us // 1000, None, encode_event(event)) for i, event in enumerate(events)]
    found = build_batch(Part("t", 0), records)
    assert not found.poison
    for table, rows in found.tables.items():
        for _ in range(2):  # the same block again counts once
            await store.insert(table, rows, "b")


async def ask(store: Store, name: str, **given: Any) -> list[dict[str, Any]]:
    query = SAVED[name]
    return (await store.query(query.sql, query.values(WINDOW | given))).dicts()


def drawn(seed: int) -> Iterator[int]:
    draw = random.Random(seed)
    while True:
        yield max(1, int(draw.lognormvariate(5, 1)))


async def test_lengths_are_by_route_and_of_those_that_ran_to_their_end(opened: Store) -> None:
    lengths = drawn(1)
    chat = [(next(lengths), next(lengths)) for _ in range(1000)]
    await insert(
        opened,
        [
            *(request(i, prompt, output) for i, (prompt, output) in enumerate(chat)),
            *(request(2000 + i, 10, 3000, tier="batch", weight=4) for i in range(10)),
            request(3000, 9_000_000, 0, role="refused", ended="refused"),
            request(3001, 9_000_000, 9, role="resumed"),
            request(3002, 9_000_000, 9, ended="failed"),
            request(3003, 5, 5, pool="another"),
        ],
    )
    standard, batches = await ask(opened, "lengths")
    assert (standard["model"], standard["dialect"], standard["tier"]) == ("m", "openai.chat", "standard")
    assert standard["requests"] == 1000
    for index, name in enumerate(("prompt", "output")):
        values = [pair[index] for pair in chat]
        assert standard[f"{name}_mean"] == pytest.approx(sum(values) / 1000, abs=0.1)
        cuts = quantiles(values, n=100, method="inclusive")
        assert standard[f"{name}_q"] == pytest.approx([cuts[49], cuts[89], cuts[98]], rel=0.03)
    assert (batches["tier"], batches["requests"], batches["output_mean"]) == ("batch", 40, 3000), "by their weight"
    assert await ask(opened, "lengths", pool="none") == []


async def test_speeds_are_the_whole_replicas_by_how_many_share_it(opened: Store) -> None:
    """Alone a sequence makes 100 tokens a second; of 8 each makes 50, of 30 each 20."""
    events = [
        *(attempt(i, 1.0, 101, 1_000_000) for i in range(20)),
        *(attempt(100 + i, 7.6 + 0.04 * i, 101, 2_000_000) for i in range(20)),
        *(attempt(200 + i, 30.0, 201, 10_000_000) for i in range(20)),
        attempt(300, 0.0, 101, 1_000_000),  # untold
        attempt(301, 30.0, 1, 5),  # nothing came after the first token
        attempt(302, 2.0, 101, 1_000_000, pool="another"),
    ]
    await insert(opened, events)
    alone, eight, many = await ask(opened, "speeds")
    assert (alone["tries"], alone["batch_mean"], alone["tokens_per_s"]) == (20, 1, 100)
    assert eight["batch_mean"] == pytest.approx(7.98) and eight["tokens_per_s"] == pytest.approx(7.98 * 50, rel=0.01)
    assert (many["batch_mean"], many["tokens_per_s"]) == (30, 600)
    assert (many["uncached_tokens"], many["prefill_us"]) == (16_000, 2_000_000), "8,000 tokens a second"


async def test_nothing_is_learned_of_what_is_outside_the_window(opened: Store) -> None:
    await insert(opened, [request(0, 5, 5), attempt(1, 2.0, 101, 1_000_000)])
    for name in ("lengths", "speeds"):
        assert await ask(opened, name) != []
        assert await ask(opened, name, from_us=AT_US + HOUR_US) == []


def leading_job(url: str, pool: str, control: RedisControl) -> TrafficModelJob:
    job = TrafficModelJob(url, "t", [pool], control, HostClock(), HostRandom(), load_every_s=0.1, learn_every_s=0.3)
    job.is_leading = True
    return job


async def test_a_controller_learns_from_a_running_consumer(opened: Store, redis_client: RedisClient) -> None:
    """Through the door of telemetry, and what it then keeps in Redis; the door shut, nothing but the age changes."""
    pool = f"p{uuid4().hex}"
    await insert(
        opened,
        [
            *(request(i, 100, 50, pool=pool) for i in range(100)),
            *(attempt(i, 4.0, 101, 1_000_000, pool=pool) for i in range(100)),
        ],
    )
    control = RedisControl(redis_client)
    async with AsyncExitStack() as stack:
        queries = {**QUERIES, **SAVED}
        url = await stack.enter_async_context(api(opened, ConsumerMetrics(), queries, lambda: True, "t", 0))
        learner = leading_job(url, pool, control)
        running = asyncio.create_task(learner.run())
        stack.callback(running.cancel)

        async def learned() -> PoolTrafficModel | None:
            known = learner.known.get(pool)
            return known if known and known.learned_s else None

        known: PoolTrafficModel = await eventually(learned, "it to learn", 30)
        assert [(one.dialect, one.requests, one.output.mean) for one in known.routes] == [("openai.chat", 100, 50)]
        assert known.routes[0].prompt.p99 == pytest.approx(100, rel=0.01)
        assert known.speeds == (Speed(4, 400),) and known.prefill_per_s == pytest.approx(8000)
        assert known.arrivals is not None and sum(known.arrivals.requests) > 0
    await asyncio.sleep(1)
    again = leading_job(url, pool, control)
    running = asyncio.create_task(again.run())
    try:

        async def read() -> PoolTrafficModel | None:
            return again.known.get(pool)

        kept: PoolTrafficModel = await eventually(read, "another to read it")
        assert (kept.routes, kept.speeds, kept.prefill_per_s) == (known.routes, known.speeds, known.prefill_per_s)
        assert 0 < kept.learned_s < time.time() - 0.9
    finally:
        running.cancel()
