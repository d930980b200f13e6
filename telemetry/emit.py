"""The sink: takes a process's events and sees to it that they arrive, without ever holding the process up.

``emit`` encodes an event and appends it to a bounded queue: microseconds, no lock, no await, no error. One background
task hands batches to the transport. While that is away, or slower than events come, they go to the disk spool
(``telemetry.spool``), written by a thread, and from there to the transport once it is back, at a pace that leaves room
for live events.

**Bounds.** Memory and spool are bounded in bytes. Of memory the last quarter is for billing facts alone
(``events.billable``), and in the spool the others make room for them. What then finds no room is dropped and counted,
by kind and reason. For a billing fact that takes a spool that is full of nothing else, or no spool at all: it is
counted apart and logged as an error, each time that any were lost within ten seconds.

**At least once.** An event is sent until it has been acknowledged, and nothing leaves the spool before. Within a
process nothing arrives twice: a transport whose attempt may have arrived repeats just that attempt (Kafka's idempotent
producer by its sequence numbers, Redis by the batch's number) for as long as it takes; a copy of the batch lies in the
spool meanwhile, for the case that the process ends. Only such an end can then double events: those of the one batch
that was sent and not yet known to be acknowledged; another process sends the copy again. (And a Kafka that lost data.)
``Event.id`` is the same in both: a reader of raw rows counts ``uniqExact(id)``, a consumer may drop an id it has seen.
Beside that, a process that is killed loses what it had in memory: while the transport is well, about what came in the
last tenth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stream_fabric.events import AttemptTrace, Event, FleetEvent, RequestTrace, billable, encode_event, event_key
from stream_fabric.limits import (
    EVENT_BYTES_MAX,
    EVENTS_BATCH_BYTES_MAX,
    EVENTS_BATCH_MAX,
    EVENTS_CLOSE_S_MAX,
    EVENTS_LINGER_S,
    EVENTS_MEMORY_BYTES_MAX,
    EVENTS_SPOOL_PER_S,
    EVENTS_STUCK_S,
)
from stream_fabric.ports import EventSink, NoEvents
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from stream_fabric.settings import EmitSettings
from telemetry.redis import RedisTransport
from telemetry.spool import Segment, Spool, Spooled
from telemetry.transport import OVERHEAD_BYTES, Record, Transport, TransportUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

_KINDS: dict[type, str] = {RequestTrace: "request", AttemptTrace: "attempt", FleetEvent: "fleet"}
_UNENCODABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)
_LOOK_S = 0.1
"""How often it is looked, while the transport does not answer, whether the queue has to go to the spool."""
_SPILL_S = 0.5
_RETRY_S_MIN, _RETRY_S_MAX = 0.2, 5.0
_ADOPT_S = 30.0
_SAY_S = 10.0
_EVENT_BYTES_USUAL = 1200
"""With what keeping it takes."""
_DISK_S_MAX = 10.0
"""At a process's end, for what is left to be written."""


class SinkPolicy(msgspec.Struct, frozen=True):
    memory_bytes_max: int = EVENTS_MEMORY_BYTES_MAX
    spool_per_s: float = EVENTS_SPOOL_PER_S
    linger_s: float = EVENTS_LINGER_S
    stuck_s: float = EVENTS_STUCK_S
    close_s_max: float = EVENTS_CLOSE_S_MAX


class Sink:
    """An ``EventSink``; use it as a context manager, in the loop's thread."""

    def __init__(
        self,
        transport: Transport,
        spool: Spool | None = None,
        policy: SinkPolicy = SinkPolicy(),  # noqa: B008  # frozen
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._transport = transport
        self._spool = spool
        self._policy = policy
        self._loop = asyncio.get_running_loop()
        self._disk = ThreadPoolExecutor(1, "events-spool")
        self._queue: deque[Record] = deque()
        self._bytes = 0
        """Of the queue, and of what has left it but is neither delivered nor on the disk."""
        self._rest_bytes_max = policy.memory_bytes_max * 3 // 4
        self._crowded_bytes = policy.memory_bytes_max // 4
        """Above it the queue goes to the spool."""
        self._wake = asyncio.Event()
        self._turn = asyncio.Event()
        """What is waited for while a batch is on its way: its end, a crowded queue, or that we are to give up."""
        self._closing = False
        self._closed = False
        self._gave_up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._away, self._away_why, self._away_said_at = False, "", 0.0
        self._retry_s = _RETRY_S_MIN
        self._spill_at = self._disk_at = 0.0
        self._spool_due = 0.0
        self._spool_turn = False
        self._adopt_due = 0.0
        self.emitted: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.spooled: Counter[str] = Counter()
        self.dropped: Counter[tuple[str, str]] = Counter()
        """By kind and reason."""
        self.bills_dropped: Counter[str] = Counter()
        """Of them, those that had to be kept, by reason."""
        self._drops_said = self._bills_said = 0
        self._said_at = float("-inf")
        self.spool_bytes = 0
        self._spool_oldest: float | None = None
        if registry is not None:
            registry.register(_Metrics(self))

    # --- the caller's side ---------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
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
            self._drop(_KINDS.get(type(event), "unknown"), "unencodable", kept=getattr(event, "billed", False) is True)
            log.error("an event cannot be encoded: %s", error)
            return
        except KeyError:
            self._drop("unknown", "unencodable", kept=False)
            return
        self.emitted[kind] += 1
        if size > EVENT_BYTES_MAX:
            self._drop(kind, "too_large", kept=kept)
        elif self._closed:
            self._drop(kind, "closed", kept=kept)
        elif self._bytes + size > (self._policy.memory_bytes_max if kept else self._rest_bytes_max):
            self._drop(kind, "memory_full", kept=kept)
        else:
            self._queue.append(record)
            self._bytes += size
            if not self._wake.is_set():
                self._wake.set()
            if self._bytes > self._crowded_bytes and not self._turn.is_set():
                self._turn.set()

    @property
    def depth(self) -> int:
        return len(self._queue)

    @property
    def away(self) -> bool:
        """The transport did not take the last batch, or not yet."""
        return self._away

    @property
    def room_used(self) -> float:
        """Of the room for what is not delivered, the share that is taken, in memory or in the spool; at 1 events are
        lost."""
        memory = self._bytes / self._policy.memory_bytes_max
        return max(memory, self.spool_bytes / self._spool.bytes_max) if self._spool is not None else memory

    @property
    def spool_oldest_s(self) -> float:
        return max(0.0, time.time() - self._spool_oldest) if self._spool_oldest is not None else 0.0

    def _drop(self, kind: str, reason: str, *, kept: bool, count: int = 1) -> None:
        self.dropped[kind, reason] += count
        if kept:
            self.bills_dropped[reason] += count
        if self._loop.time() - self._said_at >= _SAY_S:
            self._say_drops()

    def _say_drops(self) -> None:
        """What has been lost since this was last said."""
        total, bills = self.dropped.total(), self.bills_dropped.total()
        if bills > self._bills_said:
            log.error("%d billing facts are lost; since the start: %s; see docs/runbook.md, \"Events are dropped\"",
                      bills - self._bills_said, dict(self.bills_dropped))  # fmt: skip
        elif total > self._drops_said:
            log.warning("%d events are lost, no billing facts; since the start: %s",
                        total - self._drops_said, dict(self.dropped))  # fmt: skip
        else:
            return
        self._drops_said, self._bills_said, self._said_at = total, bills, self._loop.time()

    # --- the task ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._supervise(), name="events")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Deliver what is there, for a bounded time, and put the rest into the spool."""
        if self._task is None or self._closing:
            return
        self._closing = True
        self._wake.set()
        await asyncio.wait({self._task}, timeout=self._policy.close_s_max)
        self._gave_up.set()
        self._turn.set()
        await asyncio.wait({self._task}, timeout=_DISK_S_MAX)
        if not self._task.done():
            log.error("the disk of the events' spool does not answer; %d events in memory are lost", len(self._queue))
            self._task.cancel()
        self._closed = True
        await self._transport.close()
        self._disk.shutdown(wait=False)

    async def _supervise(self) -> None:
        while True:
            try:
                await self._run()
                break
            except Exception:  # telemetry's fault must not cost streams; the queue is bounded meanwhile
                log.exception("the task that delivers events failed")
                if self._gave_up.is_set():
                    break
                await self._rest(_RETRY_S_MAX)
        for record in self._queue:
            self._drop(record.kind, "closed", kept=record.kept)
        self._queue.clear()
        if self._spool is not None:
            await self._on_disk(self._spool.close)
        self._say_drops()

    async def _run(self) -> None:
        while not self._gave_up.is_set():
            if self._bytes > self._crowded_bytes:  # they come faster than they leave
                await self._spill_if_due()
            segment: Segment | None = None
            batch: Sequence[Record]
            if self._queue and not (self._spool_turn and self._spool_ready()):
                await self._gather()
                batch = self._take()
                self._spool_turn = True
            elif (found := await self._from_spool()) is not None:
                segment, batch = found
                self._spool_turn = False
            elif self._closing:
                break
            else:
                await self._idle()
                continue
            await self._deliver(batch, segment)
        await self._spill()

    async def _gather(self) -> None:
        """Let a batch grow for a moment."""
        if not self._closing and len(self._queue) < EVENTS_BATCH_MAX and self._bytes < EVENTS_BATCH_BYTES_MAX:
            await asyncio.sleep(self._policy.linger_s)

    def _take(self) -> list[Record]:
        queue = self._queue
        batch = [queue.popleft()]
        size = batch[0].size
        while queue and len(batch) < EVENTS_BATCH_MAX and size + queue[0].size <= EVENTS_BATCH_BYTES_MAX:
            size += queue[0].size
            batch.append(queue.popleft())
        return batch

    async def _idle(self) -> None:
        """Wait for an event, or until the spool may be looked at again."""
        self._wake.clear()
        if self._queue:
            return
        timeout: float | None = None
        if self._spool is not None:
            now = self._loop.time()
            due = self._adopt_due if self._spool.empty else min(self._adopt_due, self._spool_due)
            timeout = max(due - now, 0.001)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._wake.wait()

    def _spool_ready(self) -> bool:
        return self._spool is not None and not self._spool.empty and self._loop.time() >= self._spool_due

    async def _from_spool(self) -> tuple[Segment, list[Record]] | None:
        if self._spool is None or self._closing:
            return None
        now = self._loop.time()
        try:
            if now >= self._adopt_due:
                self._adopt_due = now + _ADOPT_S * random.uniform(0.7, 1.3)
                found = await self._on_disk(self._spool.adopt)
                if found:
                    log.warning("took over %d spool segments of processes that are gone", found)
            if not self._spool_ready():
                return None
            got = await self._on_disk(self._spool.next)
        except OSError as error:
            log.error("the events' spool cannot be read: %s", error)
            self._spool_due = self._adopt_due = now + _RETRY_S_MAX
            return None
        if got is not None:
            self._spool_due = max(now, self._spool_due) + len(got[1]) / self._policy.spool_per_s
        return got

    async def _deliver(self, batch: Sequence[Record], segment: Segment | None) -> None:
        """One batch, from the queue or a segment; return when its fate is known, or nobody waits for it any more."""
        sending = asyncio.create_task(self._transport.send(batch), name="send-events")
        held = [segment] if segment is not None else []
        uncovered = [] if segment is not None else batch
        stuck_at = self._loop.time() + self._policy.stuck_s
        sending.add_done_callback(lambda _: self._turn.set())
        while not sending.done() and not self._gave_up.is_set():
            self._turn.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._turn.wait()
            if sending.done():
                break
            if self._loop.time() >= stuck_at:
                self._gone("it has not acknowledged a batch yet")
                if uncovered is batch and self._spool is not None:
                    held, uncovered = await self._hold(batch)
            await self._spill_if_due()
        if not sending.done():
            sending.cancel()
        await asyncio.wait({sending})
        unsent, refused, why = _outcome(sending, batch)
        self.sent.update(record.kind for record in batch)
        self.sent.subtract(record.kind for record in (*unsent, *refused))
        for record in refused:
            self._drop(record.kind, "too_large", kept=record.kept)
        if segment is None:
            self._bytes -= _size(batch) - _size(unsent)
        if not unsent:
            await self._done(held)
            self._back()
            return
        if held and len(unsent) == len(batch):
            await self._release(held)
            if segment is None:
                self._bytes -= _size(batch) - _size(uncovered)
            await self._keep(uncovered)
        else:
            if segment is not None:
                self._bytes += _size(unsent)
            await self._keep(unsent)
            await self._done(held)
        if why:
            self._gone(why)
            await self._rest(self._retry_s * random.uniform(0.5, 1))
            self._retry_s = min(self._retry_s * 2, _RETRY_S_MAX)

    async def _rest(self, seconds: float) -> None:
        """Let time pass while the queue is looked after."""
        until = self._loop.time() + seconds
        while not self._gave_up.is_set() and (left := until - self._loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, _LOOK_S)):
                    await self._gave_up.wait()
            await self._spill_if_due()

    def _gone(self, why: str) -> None:
        now = self._loop.time()
        if not self._away or (why != self._away_why and now - self._away_said_at >= _SAY_S):
            self._away, self._away_why, self._away_said_at = True, why, now
            where = "the spool" if self._spool is not None else "memory, as there is no spool"
            log.warning("events are not delivered by %s: %s; they stay in %s", self._transport.name, why, where)

    def _back(self) -> None:
        self._retry_s = _RETRY_S_MIN
        if self._away:
            self._away = False
            log.warning("events are delivered by %s again; %d bytes are in the spool", self._transport.name,
                        self.spool_bytes)  # fmt: skip

    # --- the spool -----------------------------------------------------------------------------------------

    async def _on_disk(self, call: Callable[[], T]) -> T:
        spool = self._spool
        assert spool is not None

        def work() -> tuple[T, int, float | None]:
            return call(), spool.bytes, spool.oldest()

        result, self.spool_bytes, self._spool_oldest = await self._loop.run_in_executor(self._disk, work)
        return result

    async def _spill_if_due(self) -> None:
        now = self._loop.time()
        if self._away and now >= self._spill_at:
            self._spill_at = now + _SPILL_S
            await self._spill()
        elif self._bytes > self._crowded_bytes and now >= self._disk_at:
            await self._spill()

    async def _spill(self) -> None:
        """The queue goes to the spool."""
        if self._spool is not None and self._queue:
            records = list(self._queue)
            self._queue.clear()
            await self._keep(records)

    async def _keep(self, records: Sequence[Record]) -> None:
        """Into the spool; what the disk does not take, back to the queue's head."""
        if not records:
            return
        back: Sequence[Record] = records
        if self._spool is not None:
            spool = self._spool
            told = await self._on_disk(lambda: spool.put(records))
            self.spooled.update(told.spooled)
            self._evicted(told)
            for record in told.refused:
                self._drop(record.kind, "spool_full", kept=record.kept)
            self._disk_failed(told)
            back = told.failed
        self._queue.extendleft(reversed(back))
        self._bytes -= _size(records) - _size(back)

    async def _hold(self, batch: Sequence[Record]) -> tuple[list[Segment], Sequence[Record]]:
        """A copy of a batch that is on its way; and what the spool has no copy of."""
        spool = self._spool
        assert spool is not None
        held, told = await self._on_disk(lambda: spool.hold(batch))
        self._evicted(told)
        self._disk_failed(told)
        return held, [*told.refused, *told.failed]

    def _disk_failed(self, told: Spooled) -> None:
        if told.failed:
            log.error("the events' spool takes nothing, they stay in memory: %s", told.error)
            self._disk_at = self._spill_at = self._loop.time() + _RETRY_S_MAX

    def _evicted(self, told: Spooled) -> None:
        for kind, count in told.evicted.items():
            self._drop(kind, "evicted", kept=False, count=count)

    async def _done(self, held: list[Segment]) -> None:
        if held and self._spool is not None:
            spool = self._spool
            await self._on_disk(lambda: spool.done(held))

    async def _release(self, held: list[Segment]) -> None:
        spool = self._spool
        assert spool is not None
        await self._on_disk(lambda: spool.release(held))


def _size(records: Sequence[Record]) -> int:
    return sum(record.size for record in records)


def _outcome(sending: asyncio.Task[None], batch: Sequence[Record]) -> tuple[Sequence[Record], Sequence[Record], str]:
    """What was not sent, what never can be, and why."""
    if sending.cancelled():
        return batch, (), ""
    match sending.exception():
        case None:
            return (), (), ""
        case TransportUnavailable() as error:
            return error.unsent, error.refused, str(error)
        case error:
            # A fault of the transport must not lose events
            log.error("the events' transport failed", exc_info=error)
            return batch, (), repr(error)


class _Metrics(Collector):
    """Reads what the sink counts anyway, so that ``emit`` pays for no metric."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def collect(self) -> Iterator[Metric]:
        sink = self._sink
        for name, text, counts in (
            ("events_emitted", "Events that parts of this process told", sink.emitted),
            ("events_sent", "Events that the transport has acknowledged", sink.sent),
            ("events_spooled", "Events that went to the disk spool", sink.spooled),
        ):
            family = CounterMetricFamily(name, text, labels=["kind"])
            for kind in _KINDS.values():
                family.add_metric([kind], counts[kind])
            yield family
        dropped = CounterMetricFamily("events_dropped", "Events lost, by kind and reason", labels=["kind", "reason"])
        for (kind, reason), count in tuple(sink.dropped.items()):
            dropped.add_metric([kind, reason], count)
        yield dropped
        bills = CounterMetricFamily("events_billing_dropped", "Of them, billing facts: there must be none")
        bills.add_metric([], sink.bills_dropped.total())
        yield bills
        for name, text, value in (
            ("events_queue_depth", "Events in memory, not yet handed to the transport", sink.depth),
            ("events_transport_away", "1 while the transport takes no events", int(sink.away)),
            ("events_room_used_ratio", "Of the room for events not delivered, what is taken", sink.room_used),
            ("events_spool_bytes", "Bytes in the disk spool", sink.spool_bytes),
            (
                "events_spool_oldest_seconds",
                "Age of the oldest spooled event; 0 when there is none",
                sink.spool_oldest_s,
            ),
        ):
            yield GaugeMetricFamily(name, text, value)


class OpenSink(EventSink, Protocol):
    """A sink for the time of a ``with``."""

    async def __aenter__(self) -> EventSink: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Off(NoEvents):
    async def __aenter__(self) -> EventSink:
        return self

    async def __aexit__(self, *exc: object) -> None: ...


def open_sink(settings: EmitSettings, client: RedisClient, registry: CollectorRegistry) -> OpenSink:
    """The process's sink, as its settings say. Whether its transport can be reached does not matter for the start.

    Raises ValueError for settings that cannot work on this machine.
    """
    if settings.events == "off":
        return _Off()
    transport = make_transport(settings, client)
    spool = Spool(Path(settings.events_spool), settings.events_spool_bytes_max) if settings.events_spool else None
    if spool is None and settings.events == "kafka":
        log.warning("events go to Kafka and there is no spool: %s", without_spool(settings))
    return Sink(transport, spool, SinkPolicy(memory_bytes_max=settings.events_memory_bytes_max), registry)


def without_spool(settings: EmitSettings) -> str:
    """What comes of it, and what to do."""
    about = settings.events_memory_bytes_max // _EVENT_BYTES_USUAL
    return (
        f"while Kafka is away {settings.events_memory_bytes_max >> 20} MiB of them wait in memory, about {about:,}; "
        "what comes then is lost, bills too. Set STREAM_GW_EVENTS_SPOOL to a folder on disk, in a container on a volume"
    )


def make_transport(settings: EmitSettings, client: RedisClient) -> Transport:
    if settings.events == "redis":
        return RedisTransport(RedisEvents(client, bytes_max=settings.events_redis_bytes_max))
    try:
        from telemetry.kafka import KafkaTransport
    except ModuleNotFoundError as error:
        raise ValueError("events kafka needs aiokafka; pip install 'stream-gw[kafka]'") from error
    return KafkaTransport(settings)
