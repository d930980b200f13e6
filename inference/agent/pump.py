"""Appends the frames of many streams to the log in batches: one batch per partition and at most one of it in flight.

Batches follow the load. While little comes, a frame leaves at once; while much comes, frames gather until the reply to
the batch before, and for the flush floor at least.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from inference.agent.running import RunningStream, Urgency
from stream_fabric.errors import FabricError
from stream_fabric.limits import FLUSH_BYTES_MAX, FLUSH_FRAMES_MAX, NOTE_WAIT_S
from stream_fabric.ports import StreamLog
from stream_fabric.stream.log import AppendCode, AppendReply

_RETRY_S = 0.015
"""Time until a failed batch is sent again, and an append to a stream that does not exist yet."""


class Pump:
    """``floor_s``: minimum time between two flushes, except for urgent frames."""

    def __init__(self, log: StreamLog, tasks: asyncio.TaskGroup, floor_s: float) -> None:
        self._log = log
        self._tasks = tasks
        self._floor_s = floor_s
        self._loop = asyncio.get_running_loop()
        self._dirty: dict[int, dict[RunningStream, None]] = {}
        self._busy: set[int] = set()
        """Partitions with a batch in flight."""
        self._urgent: set[int] = set()
        """Busy partitions whose next batch leaves with the reply, not with the floor."""
        self._flushed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._soon = False
        self._retries = True

    def stop_retries(self) -> None:
        """Give up each batch that fails from now on: without the fabric, its repetition would never end."""
        self._retries = False

    def mark_dirty(self, stream: RunningStream, urgency: Urgency) -> None:
        """Schedule an append of the stream's frames."""
        partition = stream.partition
        self._dirty.setdefault(partition, {})[stream] = None
        if partition not in self._busy:
            self._schedule(urgency)
        elif urgency is Urgency.HIGH:
            self._urgent.add(partition)

    def _schedule(self, urgency: Urgency) -> None:
        """Let the next flush be as soon as frames of this urgency want it."""
        if self._soon:
            return
        now = self._loop.time()
        at = self._flushed_at + self._floor_s
        if urgency is Urgency.LOW:
            at = max(at, now + NOTE_WAIT_S)
        if at <= now or urgency is Urgency.HIGH:
            self._soon = True  # not in this call: what this turn of the loop still reads leaves in the same batch
            self._loop.call_soon(self._flush)
        elif self._timer is None or at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at = self._loop.call_at(at, self._flush), at

    def _flush(self) -> None:
        self._soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flushed_at = self._loop.time()
        for partition in [p for p in self._dirty if p not in self._busy]:
            streams = self._dirty.pop(partition)
            self._busy.add(partition)
            self._urgent.discard(partition)
            self._tasks.create_task(self._send(partition, list(streams)))

    async def _send(self, partition: int, streams: Sequence[RunningStream]) -> None:
        """Append the frames of these streams as one batch, and give each reply to its stream."""
        sent, batch = [], []
        for stream in streams:
            request = stream.producer.append_to_send(FLUSH_FRAMES_MAX, FLUSH_BYTES_MAX)
            if request is not None:
                sent.append(stream)
                batch.append(request)
        replies: Sequence[AppendReply] | None = None
        try:
            if batch:
                replies = await self._log.append(partition, batch)
        except FabricError:
            # The engine goes on; its frames stay in the producers, bounded by a stream's maximum size
            await asyncio.sleep(_RETRY_S)
        finally:
            self._busy.discard(partition)
        for index, stream in enumerate(sent):
            if replies is None:
                stream.producer.receive_lost()
                stream.producer.stopped |= not self._retries
                self._mark_pending(stream)
            elif replies[index].code is AppendCode.NOSTREAM:
                self._tasks.create_task(self._receive_missing(stream, replies[index]))
            else:
                self._receive(stream, replies[index])
        if partition in self._dirty:  # frames that came while the batch was in flight
            self._schedule(Urgency.HIGH if partition in self._urgent else Urgency.NORMAL)

    def _receive(self, stream: RunningStream, reply: AppendReply) -> None:
        outcome = stream.producer.receive_reply(reply)
        if outcome:
            stream.owner.on_outcome(stream, outcome)
        elif reply.unwatched:
            stream.owner.on_unwatched(stream, reply.unwatched, reply.unwatched_ms / 1000)
        self._mark_pending(stream)

    async def _receive_missing(self, stream: RunningStream, reply: AppendReply) -> None:
        """Receive, after a while, that the stream does not exist: its creation may still be on its way."""
        await asyncio.sleep(_RETRY_S)
        self._receive(stream, reply)

    def _mark_pending(self, stream: RunningStream) -> None:
        if stream.producer.pending:
            self.mark_dirty(stream, Urgency.NORMAL)
