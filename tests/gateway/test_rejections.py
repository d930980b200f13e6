"""Rejected requests are reported as counts, never one by one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from stream_fabric.events import FleetEvent, RequestTrace, decode_event
from stream_fabric.limits import SHED_KINDS_MAX
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from stream_fabric.stream.ids import TenantId
from stream_gw.observe.rejections import Rejections
from stream_gw.observe.trace import ReaderOutcome
from tests.gateway.processes import Process, Running
from tests.gateway.wire import Gate, chat
from tests.support.events import Heard, SetClock


def over(code: str = "pool_full", pool: str = "p", **more: Any) -> ReaderOutcome:
    facts = {"role": "refused", "ended": "refused", "http_status": 503, "wall_us": 1000, "ttft_us": 0, "tokens": 0}
    told = {**facts, "trace_id": "", "request_id": "r", "stream": "", "tenant": TenantId("t"), **more}
    return ReaderOutcome(pool=pool, error_code=code, **told)


def sheds() -> tuple[Rejections, Heard]:
    heard = Heard()
    return Rejections(FleetEventReporter(heard, SetClock(), "gw-1")), heard


def test_a_thousand_rejections_are_one_event_per_layer_and_pool() -> None:
    mine, heard = sheds()
    for _ in range(1000):
        mine.receive_outcome(over())
    for _ in range(7):
        mine.receive_outcome(over("too_many"))
    mine.receive_outcome(over(pool="q"))
    assert heard.fleet == []
    mine.report()
    told = {(e.what, e.state, e.pool, e.reason): e.figures["requests"] for e in heard.fleet}
    assert told == {
        ("shed", "pool", "p", "pool_full"): 1000,
        ("shed", "rate", "p", "too_many"): 7,
        ("shed", "pool", "q", "pool_full"): 1,
    }
    assert {event.source for event in heard.fleet} == {"gw-1"}
    mine.report()
    assert len(heard.fleet) == 3, "of a time in which nothing was refused nothing is told"


def test_other_outcomes_are_no_rejections() -> None:
    mine, heard = sheds()
    mine.receive_outcome(over("", ended="completed", role="created", http_status=200))
    mine.receive_outcome(over("invalid_request", http_status=400))
    mine.receive_outcome(over("deadline_exceeded", ended="failed", role="created", ttft_us=5000))
    mine.receive_outcome(over("deadline_exceeded", ended="failed", role="resumed", tokens=7))
    for role in ("created", "attached", "resumed"):
        mine.receive_outcome(over("draining", ended="drained", role=role))
    mine.report()
    assert heard.fleet == []


def test_the_number_of_counted_pools_is_bounded() -> None:
    mine, heard = sheds()
    for number in range(3 * SHED_KINDS_MAX):
        mine.receive_outcome(over(pool=f"p{number}"))
    assert len(mine._counts) <= SHED_KINDS_MAX + 1
    mine.report()
    assert any(event.reason == "others" for event in heard.fleet)


async def test_rejections_are_reported_periodically_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_gw.observe.rejections.SHED_TOLD_EVERY_S", 0.01)
    mine, heard = sheds()
    running = asyncio.create_task(mine.run())
    mine.receive_outcome(over())
    async with asyncio.timeout(5):
        while not heard.fleet:
            await asyncio.sleep(0.005)
    mine.receive_outcome(over(pool="last"))
    running.cancel()
    await asyncio.wait([running])
    assert [event.pool for event in heard.fleet] == ["p", "last"]


@pytest.mark.platform
async def test_a_gateway_reports_its_rejections_before_it_ends(platform: Running) -> None:
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    sim = "model=sim-tight,itl_ms=20,ttft_ms=1,max_num_seqs=1"
    refused = 3
    with contextlib.ExitStack() as stack:
        stack.enter_context(Process("agent", "--replica", "tight", "--sim", sim, "--room-ratio", "1", **env))
        process = stack.enter_context(platform.gateway("--gateway", "sheds", "--queue-max", "0"))
        gate = Gate(process.facts["url"], process.pid, platform.key)
        async with gate.create(chat(2000, model="sim-tight")) as busy:
            await busy.events(1)
            for _ in range(refused):
                reply = await gate.ask("POST", "/v1/chat/completions", chat(5, model="sim-tight"))
                assert (reply.status, reply.json["error"]["code"]) == (503, "pool_full")
            await gate.cancel(busy.headers["x-stream-id"])
            await busy.rest()
        process.terminate()
        assert await asyncio.to_thread(process.wait) == 0
    client = RedisClient(platform.redis_url)
    await client.start()
    source, seen, told = RedisEvents(client), 0, 0.0
    readers: list[RequestTrace] = []
    while records := await source.read(seen, 500):
        seen = records[-1][0]
        for event in (decode_event(record) for _, record in records):
            if isinstance(event, FleetEvent) and event.what == "shed" and event.source.startswith("sheds-"):
                assert (event.pool, event.state, event.reason) == ("sim-tight", "pool", "pool_full")
                told += event.figures["requests"]
            elif isinstance(event, RequestTrace) and event.pool == "sim-tight" and event.ended == "refused":
                readers.append(event)
    await client.close()
    assert told == refused
    assert len(readers) == len({reader.id for reader in readers}) == refused, "each is told once"
