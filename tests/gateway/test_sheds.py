"""Requests that were refused for want of room are told as counts, never one by one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stream_fabric.herald import Herald
from stream_fabric.ids import TenantId
from stream_fabric.limits import SHED_KINDS_MAX
from stream_gw.sheds import Sheds
from stream_gw.trace import Over
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
