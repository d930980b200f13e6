"""Placement records leave a gateway in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, cast

from stream_fabric.ports import StreamLog
from stream_fabric.stream.ids import StreamId
from stream_gw.delivery.hub import Hub
from stream_gw.streams import placements
from stream_gw.streams.placements import PlacementRecords


class Log:
    def __init__(self) -> None:
        self.batches: list[list[tuple[StreamId, bytes]]] = []

    async def put_placements(self, records: Sequence[tuple[StreamId, bytes]]) -> None:
        self.batches.append(list(records))


class Tasks:
    """A hub as far as it runs tasks."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._group.create_task(work)


async def test_records_of_a_moment_leave_together_in_order_and_none_is_lost() -> None:
    log = Log()
    added = [(StreamId(f"resp_{number:032x}"), b"%d" % number) for number in range(3 * placements._BATCH_MAX + 7)]
    async with asyncio.TaskGroup() as group:
        records = PlacementRecords(cast(StreamLog, log), cast(Hub, Tasks(group)))
        for stream, record in added[:-3]:
            records.add(stream, record)
        await asyncio.sleep(2 * placements._GATHER_S)
        assert [len(batch) for batch in log.batches] == [placements._BATCH_MAX] * 3 + [4]
        for stream, record in added[-3:]:
            records.add(stream, record)
    assert [item for batch in log.batches for item in batch] == added, "the last ones leave before the tasks end"


async def test_a_reader_finds_the_record_of_the_moment_before() -> None:
    log = Log()
    async with asyncio.TaskGroup() as group:
        records = PlacementRecords(cast(StreamLog, log), cast(Hub, Tasks(group)))
        records.add(StreamId("resp_1"), b"1")
        await records.send()
        assert log.batches == [[(StreamId("resp_1"), b"1")]]
        await records.send()
        records.add(StreamId("resp_2"), b"2")
    assert log.batches == [[(StreamId("resp_1"), b"1")], [(StreamId("resp_2"), b"2")]], "each leaves once"
