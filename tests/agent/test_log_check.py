"""The doorbell and the check of the streams' logs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from inference.agent.log_check import Doorbell, LogCheck
from inference.agent.running import RunningStream
from inference.agent.streams import Streams
from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import COMMAND_TIMEOUT_S, ENDED_KEPT_S, HEADS_MAX
from stream_fabric.ports import StreamLog
from stream_fabric.stream.frames import ChoiceEnd, Delta, Open, Usage
from stream_fabric.stream.ids import GatewayId, StreamId
from stream_fabric.stream.log import Head
from tests.agent.test_lease import stream
from tests.agent.test_streams import Silent
from tests.support.memory_log import MemoryStreamLog
from tests.support.virtual import on_virtual_time

UNUSED: Any = None


class CountingLog(MemoryStreamLog):
    def __init__(self) -> None:
        super().__init__(1, lambda peer, payload: True, lambda: 0)
        self.asked: list[int] = []
        self.names: list[tuple[float, StreamId]] = []
        self.away = False
        self.silent_partitions: set[int] = set()

    async def heads(self, partition: int, streams: Sequence[StreamId], gateway: GatewayId | None) -> list[Head | None]:
        self.asked.append(len(streams))
        if partition in self.silent_partitions:
            await asyncio.sleep(COMMAND_TIMEOUT_S)
        if self.away or partition in self.silent_partitions:
            raise FabricUnavailable("Redis is away")
        self.names += [(asyncio.get_running_loop().time(), name) for name in streams]
        return [None for _ in streams]


def streams_of(count: int) -> Streams:
    running = {StreamId(f"s{number}"): stream(f"s{number}") for number in range(count)}
    return Streams(running, UNUSED, UNUSED, UNUSED)


@on_virtual_time
async def test_the_heads_of_a_partition_are_read_in_chunks() -> None:
    """One script for all of them would hold Redis up for everybody else."""
    log = CountingLog()
    async with asyncio.TaskGroup() as tasks:
        check = tasks.create_task(LogCheck(cast(StreamLog, log), streams_of(2 * HEADS_MAX + 1), UNUSED).run())
        await asyncio.sleep(6)
        assert log.asked == [HEADS_MAX, HEADS_MAX, 1]
        check.cancel()


@on_virtual_time
async def test_logs_are_compared_seldom_and_at_once_when_the_doorbell_is_connected_anew() -> None:
    log = CountingLog()
    check = LogCheck(cast(StreamLog, log), streams_of(2), UNUSED)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(check.run())
        await asyncio.sleep(12)
        assert log.asked == [2, 2]
        check.check_soon(["any"])
        await asyncio.sleep(0.1)
        assert log.asked == [2, 2, 2]
        log.away = True
        check.check_soon(["any"])
        await asyncio.sleep(2)
        log.away = False
        await asyncio.sleep(1)
        assert log.asked == [2] * 8, "tried again until Redis answers, then no more"
        await asyncio.sleep(1.5)
        assert log.asked == [2] * 8
        running.cancel()


@on_virtual_time
async def test_a_stream_that_is_being_taken_over_is_left_to_the_takeover() -> None:
    """A cancel found here would end it before the usage of its earlier producers is known: its bill had no tokens."""
    log, streams = CountingLog(), streams_of(0)
    taken = streams.running[StreamId("taken")] = stream("taken", base=4)
    async with asyncio.TaskGroup() as tasks:
        check = tasks.create_task(LogCheck(cast(StreamLog, log), streams, cast(Any, Silent())).run())
        await asyncio.sleep(6)
        assert log.names == []
        taken.producer.receive_prior_usage(Usage(3, 0, 0, 7))
        taken.frame(Open(0, 0, "text"))
        await asyncio.sleep(5)
        assert [name for _, name in log.names] == ["taken"]
        check.cancel()


def end(streams: Streams, name: str) -> None:
    one = streams.running[StreamId(name)]
    one.frame(Open(0, 0, "text"))
    one.end("completed")
    streams.remove(one, keep=True)


@on_virtual_time
async def test_each_stream_is_checked_once_after_its_end_and_again_when_messages_may_be_lost() -> None:
    silent: Any = Silent()
    names = [f"s{number}" for number in range(40)]
    running = {StreamId(name): stream(name) for name in names}
    log, streams = CountingLog(), Streams(running, silent, silent, silent)
    check = LogCheck(cast(StreamLog, log), streams, silent)
    ended: dict[str, float] = {}
    now = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as tasks:
        checking = tasks.create_task(check.run())
        for name in names:
            await asyncio.sleep(0.37)
            end(streams, name)
            ended[name] = now()
        await asyncio.sleep(ENDED_KEPT_S + 1)
        for name in names:
            ages = [at - ended[name] for at, checked in log.names if checked == name and at > ended[name]]
            assert len(ages) == 1 and 4 <= ages[0] <= ENDED_KEPT_S, (name, ages)
        assert not streams.ended()
        late = StreamId("late")
        streams.running[late] = stream("late")
        end(streams, late)
        log.names.clear()
        log.away = True
        check.check_soon(["any"])
        await asyncio.sleep(1.2)
        log.away = False
        await asyncio.sleep(0.5)
        assert [name for _, name in log.names] == [late], "asked for until Redis answers, however young it is"
        await asyncio.sleep(ENDED_KEPT_S)
        assert [name for _, name in log.names] == [late, late], "and once when its end has settled"
        checking.cancel()


@on_virtual_time
async def test_a_stream_that_ended_before_an_outage_is_checked_after_it() -> None:
    silent: Any = Silent()
    log, streams = CountingLog(), Streams({StreamId("s"): stream("s")}, silent, silent, silent)
    check = LogCheck(cast(StreamLog, log), streams, silent)
    async with asyncio.TaskGroup() as tasks:
        checking = tasks.create_task(check.run())
        end(streams, "s")
        log.away = True
        await asyncio.sleep(ENDED_KEPT_S + 15)
        log.away = False
        check.check_soon(["any"])
        await asyncio.sleep(1)
        assert [name for _, name in log.names] == ["s"], "the failover may have lost its end"
        await asyncio.sleep(ENDED_KEPT_S)
        assert len(log.names) == 1 and not streams.ended()
        checking.cancel()


@on_virtual_time
async def test_a_silent_shard_delays_the_checks_of_no_other() -> None:
    silent: Any = Silent()
    running = {StreamId(name): stream(name) for name in ("silent", "here", "runs")}
    running[StreamId("silent")].partition = 0
    running[StreamId("here")].partition = running[StreamId("runs")].partition = 1
    log, streams = CountingLog(), Streams(running, silent, silent, silent)
    check = LogCheck(cast(StreamLog, log), streams, silent)
    log.silent_partitions.add(0)
    for name in ("silent", "here"):
        end(streams, name)
    begun = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as tasks:
        checking = tasks.create_task(check.run())
        await asyncio.sleep(6)
        check.check_soon(["any"])
        await asyncio.sleep(0.1)
        assert [name for _, name in log.names] == ["runs", "here", "runs", "here"], "at once"
        await asyncio.sleep(ENDED_KEPT_S)
        assert [one.name for one in streams.ended()] == ["silent"], "the other one was checked"
        assert [round(at - begun) for at, name in log.names if name == "runs"] == [5, 6, 11, 16]
        log.silent_partitions.clear()
        await asyncio.sleep(COMMAND_TIMEOUT_S + 1)
        assert [name for _, name in log.names].count("silent") == 1
        await asyncio.sleep(6)
        assert not streams.ended()
        checking.cancel()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x1f\x1f\x1f",
        b"cancel",
        b"cancel\x1fs0",
        b"cancel\x1fs0\x1f1.aa\x1fsoon",
        b"cancel\x1f\xff\xfe\x1f1.aa\x1f3",
        b"cancel\x1fs0\x1f\xff\x1f3",
        b"cancel\x1fs0\x1f1.aa\x1f3\x1fmore",
        b"later\x1fs0\x1f1.aa\x1f3",
    ],
)
async def test_a_doorbell_message_that_cannot_be_decoded_changes_nothing(payload: bytes) -> None:
    streams = streams_of(1)
    Doorbell(UNUSED, streams, UNUSED, UNUSED).receive(payload)
    (only,) = streams.running.values()
    assert not only.closed and not only.producer.stopped


def ended_by(how: str, one: RunningStream) -> None:
    """Ends it as another process or the engine itself does."""
    if how == "cancelled":
        one.producer.receive_cancel(1)
        one.closed = True  # as Requests.stop does in the same call
    else:
        one.end("completed")


@pytest.mark.parametrize("how", ["cancelled", "completed"])
async def test_output_after_the_end_reaches_no_assert(how: str) -> None:
    one = stream("s")
    one.owner = cast(Any, Owner())
    one.frame(Open(0, 0, "text"))
    one.text(0, "Once")
    ended_by(how, one)
    last = one.producer.last
    one.text(0, "more")
    one.text(0, "x" * (1 << 22), 3)
    one.frame(Delta(0, "more"))
    one.frame(ChoiceEnd(0, "stop"))
    one.usage(-1, 5)
    one.computed(-1.0, 1e300)
    one.end("failed")
    assert one.producer.last == last


class Owner:
    def on_first_token(self, stream: RunningStream) -> None: ...

    def on_prompt(self, stream: RunningStream, tokens: int, cached: int) -> None: ...
