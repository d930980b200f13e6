"""The task that delivers a process's events: batches from memory, and from the spool once the transport is back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import msgspec

from stream_fabric.limits import (
    EVENTS_BATCH_BYTES_MAX,
    EVENTS_BATCH_MAX,
    EVENTS_CLOSE_S_MAX,
    EVENTS_LINGER_S,
    EVENTS_MEMORY_BYTES_MAX,
    EVENTS_SPOOL_PER_S,
    EVENTS_STUCK_S,
)
from stream_fabric.ports import Random
from stream_fabric.process.backoff import Backoff, BackoffPolicy
from telemetry.emit.async_spool import AsyncSpool
from telemetry.emit.backlog import LOG_EVERY_S, Backlog, bytes_of
from telemetry.emit.segments import Segment
from telemetry.emit.spool import Spooled
from telemetry.emit.transport import Record, Transport, TransportUnavailable

log = logging.getLogger(__name__)

_LOOK_S = 0.1
"""Period of looking at the queue while the transport does not answer, in seconds."""
_SPILL_S = 0.5
_RETRY = BackoffPolicy(first_s=0.2, longest_s=5.0)
_ADOPT_S = 30.0
"""Mean period of looking for spools of dead processes, in seconds."""


class SinkPolicy(msgspec.Struct, frozen=True):
    memory_bytes_max: int = EVENTS_MEMORY_BYTES_MAX
    spool_per_s: float = EVENTS_SPOOL_PER_S
    linger_s: float = EVENTS_LINGER_S
    stuck_s: float = EVENTS_STUCK_S
    close_s_max: float = EVENTS_CLOSE_S_MAX


class Delivery:
    """Sends batches one after another; while the transport is away, moves the queue to the spool."""

    def __init__(
        self, backlog: Backlog, transport: Transport, spool: AsyncSpool | None, policy: SinkPolicy, random: Random
    ) -> None:
        self._backlog = backlog
        self._transport = transport
        self._spool = spool
        self._policy = policy
        self._random = random
        self._retry = Backoff(_RETRY, random)
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._gave_up = asyncio.Event()
        self.away = False
        """True while the transport has not taken the last batch."""
        self._away_reason, self._away_logged_at = "", 0.0
        self._spill_at = self._disk_at = 0.0
        """Earliest time of the next move to the spool: while the transport is away, and while the queue is crowded."""
        self._spool_due = self._adopt_due = 0.0
        self._spool_turn = False

    def finish(self) -> None:
        """Deliver what is in memory and then end."""
        self._closing = True
        self._backlog.added.set()

    def give_up(self) -> None:
        """Stop sending; move what is left to the spool and end."""
        self._gave_up.set()
        self._backlog.attention.set()

    async def run(self) -> None:
        """Deliver events until ``finish`` or ``give_up``, then close the spool."""
        while True:
            try:
                await self._deliver_batches()
                break
            except Exception:  # a fault of telemetry must not cost streams; the queue is bounded meanwhile
                log.exception("delivery of events failed, restarting")
                if self._gave_up.is_set():
                    break
                await self._wait_before_retry(_RETRY.longest_s)
        backlog = self._backlog
        for record in backlog.queue:
            backlog.count_drop(record.kind, "closed", kept=record.kept)
        backlog.queue.clear()
        if self._spool is not None:
            await self._spool.call(lambda spool: spool.close())
        backlog.log_drops()

    async def _deliver_batches(self) -> None:
        """Send batches from memory and spool in turn; at the end move the rest to the spool."""
        backlog = self._backlog
        while not self._gave_up.is_set():
            if backlog.crowded:
                await self._spill_if_due()
            segment: Segment | None = None
            batch: Sequence[Record]
            if backlog.queue and not (self._spool_turn and self._spool_ready()):
                await self._linger()
                batch = backlog.take()
                self._spool_turn = True
            elif (found := await self._next_from_spool()) is not None:
                segment, batch = found
                self._spool_turn = False
            elif self._closing:
                break
            else:
                await self._idle()
                continue
            await self._deliver(batch, segment)
        await self._spill()

    async def _linger(self) -> None:
        """Wait ``linger_s`` for a small batch to grow."""
        backlog = self._backlog
        if not self._closing and len(backlog.queue) < EVENTS_BATCH_MAX and backlog.bytes < EVENTS_BATCH_BYTES_MAX:
            await asyncio.sleep(self._policy.linger_s)

    async def _idle(self) -> None:
        """Wait for an event, or until the spool is due."""
        self._backlog.added.clear()
        if self._backlog.queue:
            return
        timeout: float | None = None
        if self._spool is not None:
            due = self._adopt_due if self._spool.empty else min(self._adopt_due, self._spool_due)
            timeout = max(due - self._loop.time(), 0.001)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._backlog.added.wait()

    # --- one batch -----------------------------------------------------------------------------------------

    async def _deliver(self, batch: Sequence[Record], segment: Segment | None) -> None:
        """Send one batch, from the queue or a segment. Returns when its outcome is known, or after ``give_up``."""
        backlog = self._backlog
        sending = asyncio.create_task(self._transport.send(batch), name="send-events")
        held = [segment] if segment is not None else []
        uncovered: Sequence[Record] = [] if segment is not None else batch
        sending.add_done_callback(lambda _: backlog.attention.set())
        stuck_at = self._loop.time() + self._policy.stuck_s
        while not sending.done() and not self._gave_up.is_set():
            backlog.attention.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await backlog.attention.wait()
            if sending.done():
                break
            if self._loop.time() >= stuck_at:
                self._report_away("a batch is not acknowledged yet")
                if uncovered is batch and self._spool is not None:
                    held, uncovered = await self._spool_copy(batch, self._spool)
            await self._spill_if_due()
        if not sending.done():
            sending.cancel()
        await asyncio.wait({sending})
        unsent, refused, reason = _send_outcome(sending, batch)
        backlog.sent.update(record.kind for record in batch)
        backlog.sent.subtract(record.kind for record in (*unsent, *refused))
        for record in refused:
            backlog.count_drop(record.kind, "too_large", kept=record.kept)
        if segment is None:
            backlog.bytes -= bytes_of(batch) - bytes_of(unsent)
        if not unsent:
            await self._remove_segments(held)
            self._report_back()
            return
        if held and len(unsent) == len(batch):
            assert self._spool is not None
            await self._spool.call(lambda spool: spool.release(held))
            if segment is None:
                backlog.bytes -= bytes_of(batch) - bytes_of(uncovered)
            await self._put_in_spool(uncovered)
        else:
            if segment is not None:
                backlog.bytes += bytes_of(unsent)
            await self._put_in_spool(unsent)
            await self._remove_segments(held)
        if reason:
            self._report_away(reason)
            await self._wait_before_retry(self._retry.next_s())

    async def _wait_before_retry(self, seconds: float) -> None:
        """Wait, and move the queue to the spool when that is due."""
        until = self._loop.time() + seconds
        while not self._gave_up.is_set() and (left := until - self._loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, _LOOK_S)):
                    await self._gave_up.wait()
            await self._spill_if_due()

    def _report_away(self, reason: str) -> None:
        """Mark the transport as away and log the reason; a changed reason is logged after ``LOG_EVERY_S``."""
        now = self._loop.time()
        if not self.away or (reason != self._away_reason and now - self._away_logged_at >= LOG_EVERY_S):
            self.away, self._away_reason, self._away_logged_at = True, reason, now
            kept_in = "spool" if self._spool is not None else "memory, there is no spool"
            log.warning("events are not delivered: transport=%s reason=%s kept_in=%s",
                        self._transport.name, reason, kept_in)  # fmt: skip

    def _report_back(self) -> None:
        """Reset the backoff, and log the end of an outage."""
        self._retry.reset()
        if self.away:
            self.away = False
            log.warning("events are delivered again: transport=%s spool_bytes=%d",
                        self._transport.name, self._spool.bytes if self._spool is not None else 0)  # fmt: skip

    # --- the spool -----------------------------------------------------------------------------------------

    def _spool_ready(self) -> bool:
        """Return True if a spooled segment may be sent now."""
        return self._spool is not None and not self._spool.empty and self._loop.time() >= self._spool_due

    async def _next_from_spool(self) -> tuple[Segment, list[Record]] | None:
        """Return the next segment of the spool with its records. None: nothing is due, or the sink closes."""
        if self._spool is None or self._closing:
            return None
        now = self._loop.time()
        try:
            if now >= self._adopt_due:
                self._adopt_due = now + _ADOPT_S * self._random.uniform(0.7, 1.3)
                adopted = await self._spool.call(lambda spool: spool.adopt())
                if adopted:
                    log.warning("took over the spool of dead processes: segments=%d", adopted)
            if not self._spool_ready():
                return None
            found = await self._spool.call(lambda spool: spool.next())
        except OSError as error:
            log.error("spool cannot be read, retrying: retry_s=%g error=%s", _RETRY.longest_s, error)
            self._spool_due = self._adopt_due = now + _RETRY.longest_s
            return None
        if found is not None:
            self._spool_due = max(now, self._spool_due) + len(found[1]) / self._policy.spool_per_s
        return found

    async def _spill_if_due(self) -> None:
        """Move the queue to the spool: during an outage every ``_SPILL_S``, or when the queue is crowded."""
        now = self._loop.time()
        if self.away and now >= self._spill_at:
            self._spill_at = now + _SPILL_S
            await self._spill()
        elif self._backlog.crowded and now >= self._disk_at:
            await self._spill()

    async def _spill(self) -> None:
        """Move the queue to the spool."""
        queue = self._backlog.queue
        if self._spool is not None and queue:
            records = list(queue)
            queue.clear()
            await self._put_in_spool(records)

    async def _put_in_spool(self, records: Sequence[Record]) -> None:
        """Put records into the spool; those that the disk does not take go back to the queue."""
        if not records:
            return
        back: Sequence[Record] = records
        backlog = self._backlog
        if self._spool is not None:
            outcome = await self._spool.call(lambda spool: spool.put(records))
            backlog.spooled.update(outcome.spooled)
            self._count_spool_losses(outcome)
            for record in outcome.refused:
                backlog.count_drop(record.kind, "spool_full", kept=record.kept)
            back = outcome.failed
        backlog.put_back(back)
        backlog.bytes -= bytes_of(records) - bytes_of(back)

    async def _spool_copy(self, batch: Sequence[Record], spool: AsyncSpool) -> tuple[list[Segment], Sequence[Record]]:
        """Spool a copy of an unacknowledged batch. Returns its segments, and the records without a copy."""
        held, outcome = await spool.call(lambda spool: spool.hold(batch))
        self._count_spool_losses(outcome)
        return held, [*outcome.refused, *outcome.failed]

    def _count_spool_losses(self, outcome: Spooled) -> None:
        """Count events evicted from the spool; if the disk failed, log and delay the next write."""
        for kind, count in outcome.evicted.items():
            self._backlog.count_drop(kind, "evicted", kept=False, count=count)
        if outcome.failed:
            log.error("spool takes nothing, events stay in memory: error=%s", outcome.error)
            self._disk_at = self._spill_at = self._loop.time() + _RETRY.longest_s

    async def _remove_segments(self, held: list[Segment]) -> None:
        if held and self._spool is not None:
            await self._spool.call(lambda spool: spool.done(held))


def _send_outcome(
    sending: asyncio.Task[None], batch: Sequence[Record]
) -> tuple[Sequence[Record], Sequence[Record], str]:
    """Return the unsent records, the records that are too large, and the reason."""
    if sending.cancelled():
        return batch, (), ""
    match sending.exception():
        case None:
            return (), (), ""
        case TransportUnavailable() as error:
            return error.unsent, error.refused, str(error)
        case error:
            # A fault in the transport's code must not lose events
            log.error("transport of events failed", exc_info=error)
            return batch, (), repr(error)
