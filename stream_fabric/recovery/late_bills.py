"""Bills that their writers owe for too long: each died between the end of a stream and its bill.

Every gateway and controller looks for them. A bill that was written nevertheless is written twice, with the same id.
"""

from __future__ import annotations

import asyncio
import logging

from stream_fabric.accounts.ports import Unbilled
from stream_fabric.errors import FabricError
from stream_fabric.ports import Random, StreamLog
from stream_fabric.recovery.bill_terms import lost_work
from stream_fabric.recovery.failover_reporter import FailoverReporter
from stream_fabric.stream.cursor import END
from stream_fabric.stream.ids import ReplicaId, StreamId

log = logging.getLogger(__name__)

_ROUND_S = 20.0
"""Time in which a process looks at all partitions."""
_PAUSE_S_MIN = 0.25
"""Minimum time between two looks: thousands of partitions take longer than ``_ROUND_S``."""


class LateBills:
    """Writes late bills, until cancelled."""

    def __init__(self, streams: StreamLog, unbilled: Unbilled, reporter: FailoverReporter, random: Random) -> None:
        self._streams = streams
        self._unbilled = unbilled
        self._reporter = reporter
        self._random = random

    async def run(self) -> None:
        pause_s = max(_ROUND_S / self._streams.partitions, _PAUSE_S_MIN)
        while True:
            for partition in range(self._streams.partitions):
                await asyncio.sleep(pause_s * self._random.uniform(0.7, 1.3))  # jitter spreads the fleet's processes
                try:
                    await self.write(partition)
                except FabricError as error:
                    log.warning("late bills not written, retrying: partition=%d error=%s", partition, error)

    async def write(self, partition: int) -> None:
        """Write the late bills of a partition. Raises FabricError; the rest is found again later."""
        for stream, ended_ms in await self._unbilled.late(partition):
            await self._write(stream, ended_ms)

    async def _write(self, stream: StreamId, ended_ms: int) -> None:
        page = await self._streams.watch(stream, None, None, END)
        if page is None or page.status == "live":
            log.error(
                'a stream ended without a bill and is gone: stream=%s; see docs/runbook.md, "Alert: BillsAtRisk"',
                stream,
            )
            await self._unbilled.remove([stream])
            return
        log.warning("bill written in place of a process that died: stream=%s", stream)
        pool, work = lost_work(stream, page)
        await self._reporter.report_attempt(pool, ReplicaId(""), work, None, billed=True, at_us=ended_ms * 1000)
