"""Events of what a replica can no longer report: its lost attempts with their bills, and its death.

A fence adds the stream that it ends to the unbilled streams, in the same step. The process that writes the bill removes
it, once the event has left the process's memory. So a bill that is lost with its process is written by another one
(``late_bills.py``), with the same id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math

from stream_fabric.accounts.ports import Unbilled
from stream_fabric.errors import FabricError, StreamGwError
from stream_fabric.events import AttemptEnd, AttemptTrace
from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.placement import TIERS
from stream_fabric.pool.records import Work
from stream_fabric.ports import Clock, EventSink, StreamLog
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.recovery.bill_terms import bill_id
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import ReplicaId, StreamId

log = logging.getLogger(__name__)

_DELIVERED_S = 3.0
"""Time after which an event is delivered or in the spool, if the process has one."""
_LOOK_S = 1.0


class FailoverReporter:
    """Emits events for a replica that can no longer emit its own: lost attempts, and its death."""

    def __init__(self, sink: EventSink, clock: Clock, streams: StreamLog, unbilled: Unbilled) -> None:
        self._sink = sink
        self._clock = clock
        self._fleet_events = FleetEventReporter(sink, clock, "reaper")
        self._streams = streams
        self._unbilled = unbilled
        self._billed: dict[StreamId, float] = {}
        """Streams that may be among the unbilled ones, and when their bill was written, on the loop's clock."""

    async def run(self) -> None:
        """Remove the streams whose bill is delivered from the unbilled ones, until cancelled."""
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                try:
                    await self._remove_billed(asyncio.get_running_loop().time() - _DELIVERED_S)
                except FabricError as error:
                    log.warning("billed streams not noted, retrying: error=%s", error)
        finally:  # the events sink delivers what it has before the process ends
            with contextlib.suppress(FabricError):
                await self._remove_billed(math.inf)

    async def _remove_billed(self, until_s: float) -> None:
        billed = [stream for stream, at_s in self._billed.items() if at_s <= until_s]
        if billed:
            await self._unbilled.remove(billed)
            for stream in billed:
                self._billed.pop(stream, None)

    async def report_attempt(
        self,
        pool: str,
        replica: ReplicaId,
        work: Work,
        error: StreamGwError | None,
        *,
        billed: bool,
        at_us: int | None = None,
    ) -> None:
        """Emit the ``AttemptTrace`` of an attempt that no replica reports.

        ``billed``: the stream ended with this attempt; otherwise another replica continues it. ``error``: its reason;
        None: another process has ended the stream. ``at_us``: moment of its end; None: now.
        """
        stream = work.request.stream
        status, used = await self._streams.settled(stream) or ("failed", Usage())
        ended: AttemptEnd = "lost" if not billed else "failed" if status == "live" else status
        epoch = work.parsed_epoch().n
        self._sink.emit(
            AttemptTrace(
                id=bill_id(stream) if billed else f"{stream}:{work.epoch}:lost",
                at_us=self._clock.now_us() if at_us is None else at_us,
                stream=stream,
                tenant=work.tenant,
                model=work.request.model,
                pool=pool_of(pool),
                replica=replica,
                ended=ended,
                epoch=epoch,
                attempt=work.attempt,
                tier=TIERS[work.rank],
                trace_id=work.request.traceparent[3:35] or stream[5:],
                prompt_tokens=used.prompt,
                cached_tokens=used.cached,
                output_tokens=used.output,
                reasoning_tokens=used.reasoning,
                error_code=error.code if ended in ("failed", "lost") and error is not None else "",
                billed=billed,
                price_micro=work.prices.of(used.prompt, used.cached, used.output) if billed and work.prices else 0,
                key=work.key,
                user_hash=work.user_hash,
                session_hash=work.session,
                endpoint=work.request.kind,
                retention_days=work.retention_days,
            )
        )
        if billed:
            self._billed[stream] = asyncio.get_running_loop().time()

    def report_dead(self, pool: str, replica: ReplicaId, streams: int) -> None:
        """Emit the fleet event of a dead replica that had ``streams`` streams in flight."""
        self._fleet_events.report(
            "dead", pool=pool_of(pool), replica=replica, reason="its lease expired", figures={"streams": streams}
        )
