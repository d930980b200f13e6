"""Estimate of the fabric's clock from readings with round trips."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.clock import ClockEstimate, FabricClock
from tests.support.waiting import eventually


def test_the_reading_with_the_shortest_round_trip_counts() -> None:
    estimate = ClockEstimate()
    assert estimate.offset_us is None
    estimate.receive(0, 5_000_400, 1_000)
    estimate.receive(10_000, 5_010_090, 10_200)
    estimate.receive(20_000, 5_021_000, 24_000)
    assert estimate.offset_us == 4_999_990


def test_after_a_failover_the_clock_of_the_new_host_counts_at_once() -> None:
    estimate = ClockEstimate()
    for sent_us in range(0, 300_000_000, 20_000_000):
        estimate.receive(sent_us, sent_us + 50, sent_us + 100)
    assert estimate.offset_us == 0
    estimate.receive(300_000_000, 302_000_500, 300_001_000)  # its clock is 2 s ahead, its link slower
    assert estimate.offset_us == 2_000_000


def test_readings_of_one_clock_never_contradict_each_other() -> None:
    rng = random.Random(7)
    estimate = ClockEstimate()
    errors: list[tuple[int, int]] = []
    for sent_us in range(0, 200_000_000, 20_000_000):
        there_us, back_us = rng.randrange(1, 5_000), rng.randrange(1, 5_000)
        estimate.receive(sent_us, sent_us + there_us + 777, sent_us + there_us + back_us)
        errors.append((there_us + back_us, abs(there_us - back_us)))
        assert estimate.offset_us is not None
        assert abs(estimate.offset_us - 777) <= min(errors)[0] // 2 + 1, "none with a shorter trip was dropped"


class _FailingOver(RedisClient):
    """A Redis whose hosts have clocks of their own."""

    def __init__(self) -> None:
        super().__init__("redis://127.0.0.1:1/0")
        self.ahead_s = 0.0
        self.readings = 0

    async def execute(self, slot: int, *args: Any, timeout_s: float | None = None) -> Any:
        assert args == ("TIME",)
        self.readings += 1
        now_us = int((time.time() + self.ahead_s) * 1e6)
        return [b"%d" % (now_us // 1_000_000), b"%d" % (now_us % 1_000_000)]

    def open_connection(self, slot: int) -> Any:
        return self.ahead_s


async def test_the_clock_of_another_server_is_read_at_once() -> None:
    client = _FailingOver()
    clock = FabricClock(client, HostClock(), HostRandom())
    reading = asyncio.create_task(clock.run())
    await eventually(lambda: client.readings >= 5)
    client.ahead_s = -30.0
    await eventually(lambda: abs(clock.now_us() / 1e6 - time.time() + 30) < 1, "the other clock", 10)
    reading.cancel()
    await client.close()
