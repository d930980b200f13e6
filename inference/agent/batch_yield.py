"""Running batch streams yield: they are cut, and continued when the pool has room for batch work again.

The pool's reply to a report says how many requests of higher tiers wait. As many batch streams are cut as are needed to
give each of them a slot, those with the least output first: what they have to compute again is the least. A stream that
no replica could continue runs on.
"""

from __future__ import annotations

import logging

from inference.agent.continuation import can_continue
from inference.agent.handover import Handover
from inference.agent.replica import ReplicaStatus
from inference.agent.running import RunningStream
from inference.agent.streams import Streams
from stream_fabric.pool.placement import BATCH_TIER
from stream_fabric.ports import Engine
from stream_fabric.stream.frames import Close, Note, decode

log = logging.getLogger(__name__)


class BatchYield:
    """Cuts batch streams when the pool asks for it."""

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
        needed = self._status.yield_to + max(len(running) - self._engine.load().slots, 0) - leaving
        batch = [stream for stream in running if stream.work.tier == BATCH_TIER and not stream.closed]
        batch.sort(key=lambda stream: stream.tokens)
        cut = 0
        for stream in batch:
            if cut >= needed and stream.first_at is not None:
                break
            if _can_yield(stream):
                self._handover.yield_stream(stream)
                cut += 1
        if cut:
            log.info("batch streams yield: streams=%d waiting=%d", cut, self._status.yield_to)


def _can_yield(stream: RunningStream) -> bool:
    """Whether a replica can go on with the stream after its last frame."""
    producer = stream.producer
    last = producer.last_frame
    if last is None:
        return producer.base > 0
    frame = decode(last)
    if isinstance(frame, Close):  # the finish reason comes next
        return False
    structure = [line for _, line in producer.structure]
    if not producer.base and all(isinstance(decode(line), Note) for line in structure):
        return True  # it has no output, and begins again
    return can_continue(stream.work.request, structure)
