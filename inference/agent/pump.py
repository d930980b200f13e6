"""Appends the frames of many streams to the log, batched by partition, one batch of a partition on its way at a time.

A stream's first token and its end leave at once; else a flush follows the one before by at least the window,
so that streams that run out of step still share a round trip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from inference.agent.running import RunningStream
from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import FLUSH_BYTES_MAX, FLUSH_FRAMES_MAX, FLUSH_WINDOW_S
from stream_fabric.log import AppendReply, StreamLog
from stream_fabric.producer import Outcome


class Pump:
    """``on_outcome(stream, outcome)`` is told what a reply asks for (never the empty outcome)."""

    def __init__(
        self,
        log: StreamLog,
        tasks: asyncio.TaskGroup,
        on_outcome: Callable[[RunningStream, Outcome], None],
        window_s: float = FLUSH_WINDOW_S,
    ) -> None:
        self._log = log
        self._tasks = tasks
        self._on_outcome = on_outcome
        self._window_s = window_s
        self._loop = asyncio.get_running_loop()
        self._dirty: dict[int, dict[RunningStream, None]] = {}
        self._busy: set[int] = set()
        self._flushed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False

    def dirty(self, stream: RunningStream, urgent: bool) -> None:
        """The stream has frames to append."""
        self._dirty.setdefault(stream.partition, {})[stream] = None
        if self._soon:
            return
        if urgent or self._loop.time() - self._flushed_at >= self._window_s:
            self._soon = True
            self._loop.call_soon(self._flush)
        elif self._timer is None:
            self._timer = self._loop.call_at(self._flushed_at + self._window_s, self._flush)

    def _flush(self) -> None:
        self._soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flushed_at = self._loop.time()
        for partition in [p for p in self._dirty if p not in self._busy]:
            streams = self._dirty.pop(partition)
            self._busy.add(partition)
            self._tasks.create_task(self._send(partition, list(streams)))

    async def _send(self, partition: int, streams: Sequence[RunningStream]) -> None:
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
        except FabricUnavailable:
            # The engine goes on; its frames wait here, bounded by the stream's size
            replies = None
        finally:
            self._busy.discard(partition)
        for index, stream in enumerate(sent):
            if replies is None:
                stream.producer.receive_lost()
            else:
                outcome = stream.producer.receive_reply(replies[index])
                if outcome:
                    self._on_outcome(stream, outcome)
            if stream.producer.pending:
                self.dirty(stream, urgent=False)
        if partition in self._dirty and not self._soon and self._timer is None:
            # What came while the batch was on its way
            self._timer = self._loop.call_at(self._flushed_at + self._window_s, self._flush)
