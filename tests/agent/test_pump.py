"""Batches of appends on virtual time: when frames leave, and with which others."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest

from inference.agent.pump import Pump
from inference.agent.running import RunningStream, Urgency
from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import FLUSH_FRAMES_MAX, NOTE_WAIT_S
from stream_fabric.ports import StreamLog
from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.ids import StreamId
from stream_fabric.stream.log import Append, AppendCode, AppendReply
from stream_fabric.stream.producer import Producer
from tests.support.virtual import on_virtual_time

FLOOR_S, TRIP_S = 0.01, 0.003


class Stream:
    """A stream of which only frames and their appends matter."""

    def __init__(self, pump: Pump, number: int, partition: int = 0) -> None:
        self.partition = partition
        self.producer = Producer(StreamId(f"s{number}"), Epoch(1, "00"))
        self.owner = self
        self.outcomes: list[str] = []
        self._pump = pump

    def put(self, urgency: Urgency = Urgency.NORMAL) -> None:
        self.producer.push(b'0"x"', 1)
        self._pump.mark_dirty(cast(RunningStream, self), urgency)

    def on_outcome(self, stream: RunningStream, outcome: str) -> None:
        self.outcomes.append(outcome)


class Log:
    """Replies after ``TRIP_S``. ``batches``: (milliseconds, partition, frames of each stream)."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, dict[str, int]]] = []
        self.away = False
        self.missing: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._in_flight: Counter[int] = Counter()

    async def append(self, partition: int, batch: Sequence[Append]) -> list[AppendReply]:
        at_ms = round((self._loop.time() - self._began) * 1000)
        self.batches.append((at_ms, partition, {item.stream: item.last - item.first + 1 for item in batch}))
        if self.away:
            raise FabricUnavailable("Redis is away")
        self._in_flight[partition] += 1
        assert self._in_flight[partition] == 1, "at most one batch of a partition is in flight"
        await asyncio.sleep(TRIP_S)
        self._in_flight[partition] -= 1
        return [
            AppendReply(AppendCode.NOSTREAM, 0)
            if item.stream in self.missing
            else AppendReply(AppendCode.OK, item.last)
            for item in batch
        ]

    @property
    def times_ms(self) -> list[int]:
        return [at_ms for at_ms, _, _ in self.batches]


@asynccontextmanager
async def pumping(floor_s: float = FLOOR_S) -> AsyncIterator[tuple[Log, Pump]]:
    log = Log()
    async with asyncio.TaskGroup() as tasks:
        yield log, Pump(cast(StreamLog, log), tasks, floor_s)
        await wait_ms(100)  # for the last batches: no task can begin once the group has ended


async def wait_ms(milliseconds: float) -> None:
    await asyncio.sleep(milliseconds / 1000)


@on_virtual_time
async def test_a_frame_leaves_at_once_while_little_comes() -> None:
    async with pumping() as (log, pump):
        stream = Stream(pump, 1)
        for _ in range(3):
            stream.put()
            await wait_ms(20)
        assert log.times_ms == [0, 20, 40]


@on_virtual_time
async def test_frames_of_one_turn_leave_together() -> None:
    async with pumping() as (log, pump):
        for number in range(5):
            Stream(pump, number).put()
        await wait_ms(1)
        assert log.batches == [(0, 0, {f"s{number}": 1 for number in range(5)})]


@on_virtual_time
async def test_frames_gather_while_much_comes() -> None:
    """A frame a millisecond: flushes keep to the floor, or to the reply where that takes longer."""
    async with pumping(0.005) as (log, pump):
        stream = Stream(pump, 1)
        for _ in range(31):
            stream.put()
            await wait_ms(1)
        assert log.times_ms == [0, 5, 10, 15, 20, 25, 30]
    async with pumping(floor_s=0.0) as (log, pump):
        stream = Stream(pump, 1)
        for _ in range(13):
            stream.put()
            await wait_ms(1)
        assert log.times_ms == [0, 3, 6, 9, 12]
        assert [frames["s1"] for _, _, frames in log.batches[1:]] == [3] * 4


@pytest.mark.parametrize("away", (False, True))
@on_virtual_time
async def test_a_first_token_that_comes_while_its_partition_is_busy_leaves_with_the_reply(away: bool) -> None:
    async with pumping(3600.0) as (log, pump):
        stream, neighbour = Stream(pump, 1), Stream(pump, 2)
        log.away = away
        neighbour.put(Urgency.HIGH)
        await wait_ms(1)
        neighbour.put()
        stream.put(Urgency.HIGH)
        await wait_ms(1)
        log.away = False
        await wait_ms(20)
        assert log.times_ms == [0, 15 if away else 3]
        assert log.batches[1][2] == {"s1": 1, "s2": 2 if away else 1}


@on_virtual_time
async def test_an_urgent_frame_of_a_busy_partition_hurries_no_other() -> None:
    async with pumping() as (log, pump):
        Stream(pump, 1).put(Urgency.HIGH)
        await wait_ms(1)
        Stream(pump, 2, partition=1).put()
        Stream(pump, 3).put(Urgency.HIGH)
        await wait_ms(1)
        assert log.times_ms == [0]
        await wait_ms(20)
        assert sorted(batch[:2] for batch in log.batches) == [(0, 0), (3, 0), (3, 1)], (
            "with the flush that comes anyway"
        )


@on_virtual_time
async def test_the_note_of_a_start_leaves_with_the_first_token() -> None:
    async with pumping() as (log, pump):
        stream = Stream(pump, 1)
        stream.put(Urgency.LOW)
        await wait_ms(NOTE_WAIT_S * 1000 - 1)
        stream.put(Urgency.HIGH)
        await wait_ms(20)
        assert log.batches == [(NOTE_WAIT_S * 1000 - 1, 0, {"s1": 2})]


@on_virtual_time
async def test_a_note_waits_a_moment_and_no_longer() -> None:
    async with pumping(0.0005) as (log, pump):
        stream, other = Stream(pump, 1), Stream(pump, 2, partition=1)
        stream.put(Urgency.LOW)
        await wait_ms(20)
        assert log.times_ms == [2]
        stream.put(Urgency.LOW)
        await wait_ms(1)
        other.put()  # has waited for the floor already, and takes the note along
        await wait_ms(20)
        assert sorted(batch[:2] for batch in log.batches[1:]) == [(21, 0), (21, 1)]


@on_virtual_time
async def test_while_redis_is_away_batches_are_tried_again_now_and_then() -> None:
    async with pumping(0.001) as (log, pump):
        stream = Stream(pump, 1)
        log.away = True
        for _ in range(60):
            stream.put(Urgency.HIGH)
            await wait_ms(1)
        assert log.times_ms == [0, 15, 30, 45]
        log.away = False
        await wait_ms(100)
        assert stream.producer.acked == 60, "nothing is lost"


@on_virtual_time
async def test_batches_that_fail_are_given_up_once_the_process_ends() -> None:
    async with pumping(0.001) as (log, pump):
        streams = [Stream(pump, 1), Stream(pump, 2, partition=1)]
        log.away = True
        for stream in streams:
            stream.put(Urgency.HIGH)
        await wait_ms(20)
        pump.stop_retries()
        await wait_ms(100)
        assert log.times_ms == [0, 0, 15, 15]
        assert all(stream.producer.stopped for stream in streams)


@on_virtual_time
async def test_a_stream_that_does_not_exist_yet_is_tried_again_and_holds_up_no_other() -> None:
    async with pumping(0.001) as (log, pump):
        early, other = Stream(pump, 1), Stream(pump, 2)
        log.missing.add("s1")
        for _ in range(40):
            early.put()
            other.put()
            await wait_ms(1)
        tried = [at_ms for at_ms, _, frames in log.batches if "s1" in frames]
        assert [later - earlier >= 15 + 3 for earlier, later in itertools.pairwise(tried)] == [True] * 2
        assert sum("s2" in frames for _, _, frames in log.batches) >= 13
        log.missing.clear()
        await wait_ms(100)
        assert (early.producer.acked, other.producer.acked, early.outcomes) == (40, 40, [])


@on_virtual_time
async def test_a_full_batch_leaves_the_rest_for_the_next() -> None:
    async with pumping() as (log, pump):
        stream = Stream(pump, 1)
        for _ in range(FLUSH_FRAMES_MAX):
            stream.put()
        await wait_ms(1)
        for _ in range(FLUSH_FRAMES_MAX - 1):
            stream.put()
        await wait_ms(100)
        assert [frames["s1"] for _, _, frames in log.batches] == [FLUSH_FRAMES_MAX, FLUSH_FRAMES_MAX - 1]
