"""Queue of events that are not delivered yet, and counts of emitted, sent, spooled and dropped events."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

from stream_fabric.limits import EVENTS_BATCH_BYTES_MAX, EVENTS_BATCH_MAX
from telemetry.emit.transport import Record

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
"""Minimum time between two log lines about the same trouble, in seconds."""


class Backlog:
    """A queue bounded in bytes, whose last quarter is for billing events alone.

    ``bytes`` counts the queue and the batch that has left it but is neither delivered nor on disk.
    """

    def __init__(self, bytes_max: int, now: Callable[[], float]) -> None:
        self.bytes_max = bytes_max
        self._other_bytes_max = bytes_max * 3 // 4
        self._crowded_bytes = bytes_max // 4
        self._now = now
        self.queue: deque[Record] = deque()
        self.bytes = 0
        self.closed = False
        self.added = asyncio.Event()
        self.attention = asyncio.Event()
        """Set when the delivery has to look again: a batch ended, the queue is crowded, or the sink gives up."""
        self.emitted: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.spooled: Counter[str] = Counter()
        self.dropped: Counter[tuple[str, str]] = Counter()
        """By kind and reason."""
        self.bills_dropped: Counter[str] = Counter()
        """Dropped billing events by reason."""
        self._drops_logged = self._bills_logged = 0
        self._logged_at = float("-inf")

    @property
    def crowded(self) -> bool:
        """True when the queue has to go to the spool because events come faster than they leave."""
        return self.bytes > self._crowded_bytes

    @property
    def bill_bytes(self) -> int:
        """Bytes of the billing events in the queue. Counted at each call."""
        return sum(record.size for record in self.queue if record.kept)

    def add(self, record: Record) -> None:
        """Queue a record; without room, or after the close, count the record as dropped."""
        size = record.size
        if self.closed:
            self.count_drop(record.kind, "closed", kept=record.kept)
        elif self.bytes + size > (self.bytes_max if record.kept else self._other_bytes_max):
            self.count_drop(record.kind, "memory_full", kept=record.kept)
        else:
            self.queue.append(record)
            self.bytes += size
            if not self.added.is_set():
                self.added.set()
            if self.bytes > self._crowded_bytes and not self.attention.is_set():
                self.attention.set()

    def take(self) -> list[Record]:
        """Remove one batch from the queue, which must not be empty. The batch's bytes still count."""
        queue = self.queue
        batch = [queue.popleft()]
        size = batch[0].size
        while queue and len(batch) < EVENTS_BATCH_MAX and size + queue[0].size <= EVENTS_BATCH_BYTES_MAX:
            size += queue[0].size
            batch.append(queue.popleft())
        return batch

    def put_back(self, records: Sequence[Record]) -> None:
        """Put records at the head of the queue again. Their bytes were counted all the time."""
        self.queue.extendleft(reversed(records))

    def count_drop(self, kind: str, reason: str, *, kept: bool, count: int = 1) -> None:
        """Count dropped records. ``kept``: they are billing events."""
        self.dropped[kind, reason] += count
        if kept:
            self.bills_dropped[reason] += count
        if self._now() - self._logged_at >= LOG_EVERY_S:
            self.log_drops()

    def log_drops(self) -> None:
        """Log what was dropped since the last log line."""
        total, bills = self.dropped.total(), self.bills_dropped.total()
        if bills > self._bills_logged:
            log.error("billing events dropped: count=%d since_start=%s; see docs/runbook.md, \"Events are dropped\"",
                      bills - self._bills_logged, dict(self.bills_dropped))  # fmt: skip
        elif total > self._drops_logged:
            log.warning("events dropped, none of them billing events: count=%d since_start=%s",
                        total - self._drops_logged, dict(self.dropped))  # fmt: skip
        else:
            return
        self._drops_logged, self._bills_logged, self._logged_at = total, bills, self._now()


def bytes_of(records: Sequence[Record]) -> int:
    """Return the bytes that records count for in memory."""
    return sum(record.size for record in records)
