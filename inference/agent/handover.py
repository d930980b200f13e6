"""Streams that leave this replica: handed over to another one, taken by another one, yielded, or ended.

``Failover`` does the work on the fabric; here it is repeated until the fabric takes it. What a stream's earlier
producers wrote is read here too, for the replica that goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from inference.agent.continuation import CannotContinue
from inference.agent.replica import AgentPorts, LeasePolicy, ReplicaStatus
from inference.agent.running import RunningStream
from inference.agent.steering.turns import can_continue
from inference.agent.streams import Streams
from stream_fabric.errors import FabricError, StreamGwError
from stream_fabric.pool.placement import BATCH_TIER
from stream_fabric.pool.records import Loaded, Work
from stream_fabric.ports import Engine
from stream_fabric.recovery.failover import Failover, OwnBill
from stream_fabric.recovery.lease_reaper import LOST
from stream_fabric.stream.cursor import BEGINNING, Cursor, Epoch
from stream_fabric.stream.frames import Close, Note, Usage, decode
from stream_fabric.stream.ids import ReplicaId, StreamId
from stream_fabric.stream.log import Head

log = logging.getLogger(__name__)

_RETRY_S = 0.25
_FLUSH_POLL_S = 0.01
_PLACED_S = 1.0
"""A process that takes a stream over has placed it within this time, unless the process has died."""


class Handover:
    def __init__(
        self,
        policy: LeasePolicy,
        replica: ReplicaId,
        engine: Engine,
        ports: AgentPorts,
        failover: Failover,
        status: ReplicaStatus,
        streams: Streams,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._policy = policy
        self._replica = replica
        self._engine = engine
        self._log = ports.log
        self._failover = failover
        self._status = status
        self._streams = streams
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._released: set[RunningStream] = set()
        """Streams that another process has taken. They stay on our list, where the pool finds them, until they are on
        another replica's list."""

    def hand_over(
        self, stream: RunningStream, error: StreamGwError, *, comes_back: bool = True, counts: bool = True
    ) -> None:
        """Have another replica continue the stream from its log; where that is impossible, end it with the error.

        ``comes_back`` False: the stream does not wait for this replica if there is no other one. ``counts``: as in
        ``Failover.rescue``.
        """
        if not stream.closed:
            stream.closed = stream.handed_over = True
            self._tasks.create_task(self._place_elsewhere(stream, error, comes_back=comes_back, counts=counts))

    def yield_stream(self, stream: RunningStream) -> None:
        """Stop a batch stream and put it back into the pool's queue, from where any replica continues it."""
        stream.closed = stream.yielded = True
        stream.abort(self._engine)
        self._tasks.create_task(self._requeue(stream))

    async def _requeue(self, stream: RunningStream) -> None:
        # The log takes all that was generated: another replica would have to generate the rest again
        producer = stream.producer
        await self._wait_for_log(stream, lambda: producer.acked == producer.last or producer.is_held)

        async def requeue() -> None:
            if self._streams.is_running(stream):
                await self._failover.yield_stream(self._policy.pool, self._replica, stream.work, self._bill_of(stream))

        await self._let_go(stream, "yield", requeue)

    async def _wait_for_log(self, stream: RunningStream, ready: Callable[[], bool]) -> None:
        """Wait until a reply to an append makes ``ready`` true or stops the producer: one lease lifetime at most."""
        deadline = self._loop.time() + self._policy.ttl_s
        while self._loop.time() < deadline and self._streams.is_running(stream):
            if ready() or stream.producer.stopped:
                return
            await asyncio.sleep(_FLUSH_POLL_S)

    def release(self, stream: RunningStream) -> None:
        """Stop a stream that another process has taken over (this replica was believed dead) or has ended.

        The fence of our own takeover rings here too; that stream is being placed already.
        """
        if stream.handed_over or stream.yielded:
            return
        if self._streams.is_running(stream) and stream not in self._released:
            stream.closed = True
            stream.abort(self._engine)
            self._released.add(stream)
            self._tasks.create_task(self._finish_release(stream))

    async def _finish_release(self, stream: RunningStream) -> None:
        # If the process that took it has died before placing it, the stream is still on our list, and we place it
        await asyncio.sleep(_PLACED_S)
        await self._place_elsewhere(stream, LOST)
        if stream.work.base and not stream.producer.ended:
            # Or the log has lost our epoch and the part before it, which this replica cannot produce again
            await self.fence(stream)

    async def _place_elsewhere(
        self, stream: RunningStream, error: StreamGwError, *, comes_back: bool = True, counts: bool = True
    ) -> None:
        """Abort the request here, and hand the stream to another replica unless it has ended meanwhile."""
        name = stream.name
        if self._streams.is_running(stream):
            stream.abort(self._engine)
        # Its creation may still be on its way: a stream that does not exist cannot be taken over, and would be let go
        await self._wait_for_log(stream, lambda: stream.producer.created)

        async def rescue() -> None:
            if self._streams.is_running(stream):  # it has not ended meanwhile, nor come back in a newer epoch
                waits = comes_back and self._status.failure is None and not self._status.draining.is_set()
                await self._failover.rescue(
                    self._policy.pool,
                    self._replica,
                    name,
                    error,
                    comes_back=waits,
                    counts=counts,
                    known=stream.work,
                    own_bill=self._bill_of(stream),
                )

        await self._let_go(stream, "handover", rescue)

    async def _let_go(self, stream: RunningStream, step: str, place: Callable[[], Awaitable[None]]) -> None:
        """Place the stream with ``place``, and take it off our list."""
        done = await self._retry(step, stream.name, place)
        self._released.discard(stream)
        if done and self._streams.is_running(stream):
            stream.producer.stopped = True
            # ``place`` has taken it off our list, and the pool may have given it back since: a report that it ended,
            # sent again after a lost reply, would take that placement from the pool, and the request with it
            self._streams.remove(stream, keep=False, listed=False)

    def _bill_of(self, stream: RunningStream) -> OwnBill:
        """Return the function that bills a stream which was cancelled before it left this replica.

        The doorbell of such a cancel may be late, or lost. The function raises FabricError.
        """

        async def bill(head: Head) -> None:
            producer = stream.producer
            is_ours = self._streams.is_running(stream) and str(head.epoch) == producer.epoch
            if not is_ours or head.cancelled_at < 0:
                return
            if producer.last == producer.base:  # it has produced nothing: earlier producers' usage is the bill
                _, used = await self._log.settled(stream.name) or ("", Usage())
                producer.receive_prior_usage(used)
            producer.receive_cancel(head.cancelled_at, steered=head.status == "incomplete")
            self._streams.report(stream)

        return bill

    async def end_unread(
        self,
        name: StreamId,
        error: StreamGwError,
        epoch: Epoch | None = None,
        work: Work | None = None,
        own_bill: OwnBill | None = None,
    ) -> None:
        """End a stream that this replica has not begun. The usage is read from the log.

        ``own_bill``: as ``Failover.rescue`` takes it.
        """

        async def end() -> None:
            await self._failover.end(self._policy.pool, self._replica, name, error, epoch, work, own_bill=own_bill)

        await self._retry("end", name, end)

    async def end_unstarted(self, stream: RunningStream, error: StreamGwError) -> None:
        """End a stream that was taken over but cannot be continued here."""
        if not stream.closed:
            stream.closed = True
            work = stream.work
            await self.end_unread(stream.name, error, work.parsed_epoch(), work, self._bill_of(stream))
            stream.producer.stopped = True
            self._streams.remove(stream, keep=False)

    def let_ended_go(self, stream: RunningStream) -> None:
        """Let a stream go that had ended in its epoch before it came: its producer has reported the attempt.

        Whoever placed it had stood still since the takeover, and another process had placed it meanwhile.
        """
        stream.closed = stream.reported = stream.producer.stopped = True
        self._streams.remove(stream, keep=False)

    async def fence(self, stream: RunningStream) -> None:
        """End the stream in its log, unless another producer has begun a newer epoch."""
        work = stream.work

        async def fence() -> None:
            await self._failover.fence(self._policy.pool, self._replica, work, LOST, work.parsed_epoch())

        await self._retry("fence", stream.name, fence)

    async def _retry(self, step: str, stream: StreamId, call: Callable[[], Awaitable[None]]) -> bool:
        """Repeat a call until the fabric accepts it.

        False: the replica is draining, and the fabric was unreachable for longer than two lease lifetimes. The process
        that recovers this replica's streams does the rest.
        """
        deadline = self._loop.time() + self._policy.ttl_s * 2
        while True:
            try:
                await call()
                return True
            except FabricError as error:
                log.warning("handover step failed, retrying: step=%s stream=%s error=%s", step, stream, error)
                if self._status.draining.is_set() and self._loop.time() > deadline:
                    return False
            await asyncio.sleep(_RETRY_S)

    async def read_earlier_frames(self, stream: RunningStream) -> list[bytes]:
        """Return the frames that earlier producers wrote, one JSON line each. Raises FabricError or CannotContinue."""
        lines: list[bytes] = []
        after = BEGINNING
        while len(lines) < stream.work.base:
            page = await self._log.watch(stream.name, stream.work.tenant, None, after)
            if page is None or not page.entries or page.entries[0].first != len(lines) + 1:
                raise CannotContinue("the log no longer holds its output")
            for entry in page.entries:
                lines += entry.frames.split(b"\n")
            after = Cursor(page.entries[-1].epoch, page.entries[-1].last)
        return lines[: stream.work.base]


class BatchYield:
    """Cuts running batch streams when the pool asks for it.

    The pool's reply to a report says how many requests of higher tiers wait. As many batch streams are cut as are
    needed to give each of them a slot and to keep one free. Tier free goes first, then
    those with the least output: what they have to compute again is the least.
    """

    def __init__(self, engine: Engine, status: ReplicaStatus, streams: Streams, handover: Handover) -> None:
        self._engine = engine
        self._status = status
        self._streams = streams
        self._handover = handover

    async def run(self) -> None:
        """Cut streams whenever a report's reply asks for it, until cancelled."""
        while True:
            await self._status.yield_check.wait()
            self._status.yield_check.clear()
            self.check()

    def check(self) -> None:
        """Cut as many streams as higher tiers need slots, and all streams without a first token.

        The latter would make the prompts of higher tiers wait, and lose nothing.
        """
        running = self._streams.running.values()
        leaving = sum(stream.yielded for stream in running)
        # A request that came to full slots may have been refused: one slot is kept for the next
        needed = self._status.yield_to + max(len(running) + 1 - self._engine.load().slots, 0) - leaving
        batch = [stream for stream in running if stream.work.tier == BATCH_TIER and not stream.closed]
        batch.sort(key=lambda stream: (not stream.work.free, stream.tokens))
        cut = 0
        for stream in batch:
            if cut >= needed and stream.first_at is not None:
                break
            if _can_yield(stream, self._engine.loaded()):
                self._handover.yield_stream(stream)
                cut += 1
        if cut:
            log.info("batch streams yield: streams=%d waiting=%d", cut, self._status.yield_to)


def _can_yield(stream: RunningStream, loaded: Loaded) -> bool:
    """Whether a replica can go on with the stream after its last frame."""
    producer = stream.producer
    last = producer.last_frame
    if last is None:
        return producer.base > 0
    frame = decode(last)
    if isinstance(frame, Close):  # the finish reason comes next
        return False
    if not producer.base and all(isinstance(decode(line), Note) for line in stream.structure):
        return True  # it has no output, and begins again
    return can_continue(stream.work.request, stream.structure, loaded)
