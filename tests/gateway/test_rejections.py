"""Requests that were refused for want of room are told as counts, never one by one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from stream_fabric.events import FleetEvent, RequestTrace, decode_event
from stream_fabric.herald import Herald
from stream_fabric.ids import TenantId
from stream_fabric.limits import SHED_KINDS_MAX
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from stream_gw.sheds import Sheds
from stream_gw.trace import Over
from tests.gateway.processes import Process, Running
from tests.gateway.wire import Gate, chat
from tests.support.events import Heard, SetClock


def over(code: str = "pool_full", pool: str = "p", **more: Any) -> Over:
    facts = {"role": "refused", "ended": "refused", "http_status": 503, "wall_us": 1000, "ttft_us": 0, "tokens": 0}
    told = {**facts, "trace_id": "", "request_id": "r", "stream": "", "tenant": TenantId("t"), **more}
    return Over(pool=pool, error_code=code, **told)


def sheds() -> tuple[Sheds, Heard]:
    heard = Heard()
    return Sheds(Herald(heard, SetClock(), "gw-1")), heard


def test_a_thousand_refusals_are_one_event_for_each_layer_and_pool() -> None:
    mine, heard = sheds()
    for _ in range(1000):
        mine.receive_over(over())
    for _ in range(7):
        mine.receive_over(over("too_many"))
    mine.receive_over(over(pool="q"))
    assert heard.fleet == []
    mine.tell()
    told = {(e.what, e.state, e.pool, e.reason): e.figures["requests"] for e in heard.fleet}
    assert told == {
        ("shed", "pool", "p", "pool_full"): 1000,
        ("shed", "rate", "p", "too_many"): 7,
        ("shed", "pool", "q", "pool_full"): 1,
    }
    assert {event.source for event in heard.fleet} == {"gw-1"}
    mine.tell()
    assert len(heard.fleet) == 3, "of a time in which nothing was refused nothing is told"


def test_what_was_not_refused_for_want_of_room_is_none() -> None:
    mine, heard = sheds()
    mine.receive_over(over("", ended="completed", role="created", http_status=200))
    mine.receive_over(over("invalid_request", http_status=400))
    mine.receive_over(over("deadline_exceeded", ended="failed", role="created", ttft_us=5000))
    mine.tell()
    assert heard.fleet == []


def test_pools_without_end_are_bounded() -> None:
    mine, heard = sheds()
    for number in range(3 * SHED_KINDS_MAX):
        mine.receive_over(over(pool=f"p{number}"))
    assert len(mine._counts) <= SHED_KINDS_MAX + 1
    mine.tell()
    assert any(event.reason == "others" for event in heard.fleet)


async def test_what_has_gathered_is_told_in_time_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_gw.sheds.SHED_TOLD_EVERY_S", 0.01)
    mine, heard = sheds()
    running = asyncio.create_task(mine.run())
    mine.receive_over(over())
    async with asyncio.timeout(5):
        while not heard.fleet:
            await asyncio.sleep(0.005)
    mine.receive_over(over(pool="last"))
    running.cancel()
    await asyncio.wait([running])
    assert [event.pool for event in heard.fleet] == ["p", "last"]


async def test_a_gateway_tells_of_what_it_refused_also_when_it_ends(platform: Running) -> None:
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
