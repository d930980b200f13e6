"""Events of what a replica can no longer report: its lost attempts with their bills, and its death."""

from __future__ import annotations

from stream_fabric.errors import StreamGwError
from stream_fabric.events import AttemptEnd, AttemptTrace
from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.placement import TIERS
from stream_fabric.pool.records import Work
from stream_fabric.ports import Clock, EventSink, StreamLog
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.recovery.bill_terms import bill_id
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import ReplicaId


class FailoverReporter:
    """Emits events for a replica that can no longer emit its own: lost attempts, and its death."""

    def __init__(self, sink: EventSink, clock: Clock, streams: StreamLog) -> None:
        self._sink = sink
        self._clock = clock
        self._fleet_events = FleetEventReporter(sink, clock, "reaper")
        self._streams = streams

    async def report_attempt(
        self,
        pool: str,
        replica: ReplicaId,
        work: Work,
        error: StreamGwError | None,
        *,
        billed: bool,
    ) -> None:
        """Emit the ``AttemptTrace`` of an attempt that no replica reports.

        ``billed``: the stream ended with this attempt; otherwise another replica continues it. ``error``: its reason;
        None: another process has ended the stream.
        """
        stream = work.request.stream
        status, used = await self._streams.settled(stream) or ("failed", Usage())
        ended: AttemptEnd = "lost" if not billed else "failed" if status == "live" else status
        epoch = work.parsed_epoch().n
        self._sink.emit(
            AttemptTrace(
                id=bill_id(stream) if billed else f"{stream}:{work.epoch}:lost",
                at_us=self._clock.now_us(),
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

    def report_dead(self, pool: str, replica: ReplicaId, streams: int) -> None:
        """Emit the fleet event of a dead replica that had ``streams`` streams in flight."""
        self._fleet_events.report(
            "dead", pool=pool_of(pool), replica=replica, reason="its lease expired", figures={"streams": streams}
        )
