"""The sink: queues the events of a process and delivers them in the background; ``emit`` never waits.

``emit`` encodes an event and appends it to a bounded queue in microseconds: no lock, no await, no error. One background
task (``delivery.py``) hands batches to the transport. While the transport is away, or slower than events come, they go
to the disk spool (``spool.py``), written by a thread. From there they are sent once the transport is back, at a rate
that leaves room for live events.

**Bounds.** Memory and spool are bounded in bytes. The last quarter of memory is for billing events alone
(``events.billable``), and in the spool other events make room for them. An event that finds no room is dropped and
counted by kind and reason. A billing event is dropped only when the spool is full of billing events, or there is no
spool. It is counted apart and logged as an error, at most once in ten seconds.

**At least once.** An event is sent until it is acknowledged, and leaves the spool only then. Within a process nothing
arrives twice: a transport whose attempt may have arrived repeats exactly that attempt (Kafka by its producer's sequence
numbers, Redis by the batch's number). A copy of the batch is in the spool meanwhile, in case the process ends. Only
then can events arrive twice: those of the one batch that was sent and not acknowledged. ``Event.id`` is the same in
both copies, so a reader of raw rows counts ``uniqExact(id)``, and a consumer may drop an id that it has seen. A killed
process loses what it had in memory; while the transport is well, that is the last tenth of a second.
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Self

import msgspec
from prometheus_client import CollectorRegistry

from stream_fabric.events import AttemptTrace, Event, FleetEvent, RequestTrace, billable, encode_event, event_key
from stream_fabric.limits import EVENT_BYTES_MAX
from stream_fabric.ports import Clock, Random
from telemetry.emit.async_spool import AsyncSpool
from telemetry.emit.backlog import Backlog
from telemetry.emit.delivery import Delivery, SinkPolicy
from telemetry.emit.emit_metrics import EmitMetrics
from telemetry.emit.spool import Spool
from telemetry.emit.transport import OVERHEAD_BYTES, Record, Transport

log = logging.getLogger(__name__)

_KINDS: dict[type, str] = {RequestTrace: "request", AttemptTrace: "attempt", FleetEvent: "fleet"}
_UNENCODABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)
_RISK = 0.95
"""Used share of the room for billing events from which new ones are at risk."""
_DISK_S_MAX = 10.0
"""Time for the last writes to the spool when the process ends, in seconds."""


class Sink:
    """An ``EventSink``; use it as a context manager, in the loop's thread."""

    def __init__(
        self,
        transport: Transport,
        spool: Spool | None,
        policy: SinkPolicy,
        clock: Clock,
        random: Random,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._transport = transport
        self._policy = policy
        self._spool = AsyncSpool(spool, clock) if spool is not None else None
        self.backlog = Backlog(policy.memory_bytes_max, asyncio.get_running_loop().time)
        self._delivery = Delivery(self.backlog, transport, self._spool, policy, random)
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        if registry is not None:
            registry.register(EmitMetrics(self))

    def emit(self, event: Event) -> None:
        """Encode and queue an event. Never blocks, never raises; an event without room is dropped and counted."""
        backlog = self.backlog
        try:
            kind = _KINDS[type(event)]
            value = encode_event(event)
            kept = billable(event)
            size = len(value) + OVERHEAD_BYTES
            if size > EVENT_BYTES_MAX and isinstance(event, RequestTrace) and (event.prompt or event.completion):
                event = msgspec.structs.replace(event, prompt="", completion="")
                value = encode_event(event)
                size = len(value) + OVERHEAD_BYTES
            record = Record(value, event_key(event), kind, kept, getattr(event, "trace_id", ""))
        except _UNENCODABLE as error:
            kept = getattr(event, "billed", False) is True
            backlog.count_drop(_KINDS.get(type(event), "unknown"), "unencodable", kept=kept)
            log.error("event cannot be encoded: %s", error)
            return
        except KeyError:
            backlog.count_drop("unknown", "unencodable", kept=False)
            return
        backlog.emitted[kind] += 1
        if size > EVENT_BYTES_MAX:
            backlog.count_drop(kind, "too_large", kept=kept)
        else:
            backlog.add(record)

    @property
    def depth(self) -> int:
        """Events in memory that are not handed to the transport yet."""
        return len(self.backlog.queue)

    @property
    def away(self) -> bool:
        """True while the transport has not taken the last batch."""
        return self._delivery.away

    @property
    def room_used(self) -> float:
        """Used share of memory or spool, the larger of both. At 1 events are dropped."""
        memory = self.backlog.bytes / self.backlog.bytes_max
        return max(memory, self._spool.share_used) if self._spool is not None else memory

    @property
    def bills_at_risk(self) -> bool:
        """True when nearly no room for billing events is left: in memory or, during an outage, in the spool."""
        if self.backlog.bytes >= _RISK * self.backlog.bytes_max:
            return True
        return self.away and self._spool is not None and not self._spool.has_room(self.backlog.bill_bytes, _RISK)

    @property
    def spool_bytes(self) -> int:
        return self._spool.bytes if self._spool is not None else 0

    @property
    def spool_oldest_s(self) -> float:
        """Age of the oldest spooled event in seconds; 0: none."""
        return self._spool.oldest_s if self._spool is not None else 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._delivery.run(), name="events")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Deliver what is in memory for a bounded time, and put the rest into the spool."""
        if self._task is None or self._closing:
            return
        self._closing = True
        self._delivery.finish()
        await asyncio.wait({self._task}, timeout=self._policy.close_s_max)
        self._delivery.give_up()
        await asyncio.wait({self._task}, timeout=_DISK_S_MAX)
        if not self._task.done():
            log.error("disk of the spool does not answer, events in memory are lost: count=%d", self.depth)
            self._task.cancel()
        self.backlog.closed = True
        await self._transport.close()
        if self._spool is not None:
            self._spool.shutdown()
