"""Sends readers of queued streams their queue position once a second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from stream_fabric.errors import FabricError
from stream_fabric.ports import Pools
from stream_fabric.stream.ids import ReplicaId, StreamId
from stream_gw.delivery.local_stream import LocalStream, Subscription
from stream_gw.routing.directory import Directory
from stream_gw.routing.holders import Holder

log = logging.getLogger(__name__)

_SEND_EVERY_S = 1.0
_STREAMS_PER_READ = 1000


class QueuePositions:
    def __init__(
        self, pools: Pools, directory: Directory, now_us: Callable[[], int], local: Mapping[bytes, LocalStream]
    ) -> None:
        """``now_us`` is on the fabric's clock. ``local``: the streams with readers here, by id."""
        self._now_us = now_us
        self._pools = pools
        self._directory = directory
        self._local = local
        self._by_pool: dict[str, dict[Subscription, int]] = {}
        """Readers of queued streams, with the last seq that their stream had when they were added."""
        self._sending: set[str] = set()
        """Pools whose positions are being read."""

    def add(self, pool: str, subscription: Subscription) -> None:
        """Send the reader its queue position once a second until the stream leaves the queue."""
        self._by_pool.setdefault(pool, {}).setdefault(subscription, subscription.local.head)

    async def holder_of(self, replica: ReplicaId | None, stream: StreamId) -> Holder:
        """Return what ``Directory.holder_of`` does; add the readers of a stream that waits, such as after its replica
        died."""

        def add_readers(pool: str) -> None:
            local = self._local.get(stream.encode())
            for sub in () if local is None else local.subs:
                self.add(pool, sub)

        return await self._directory.holder_of(replica, stream, add_readers)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(_SEND_EVERY_S)
                for pool in [each for each in self._by_pool if each not in self._sending]:
                    self._sending.add(pool)  # nothing waits for it: a silent shard of Redis delays its own pools alone
                    tasks.create_task(self._try_send(pool))

    async def _try_send(self, pool: str) -> None:
        try:
            await self._send(pool)
        except FabricError as error:
            log.warning("queue positions not read, retrying: pool=%s error=%s", pool, error)
        finally:
            self._sending.discard(pool)

    async def _send(self, pool: str) -> None:
        """Read the positions of the pool's queued streams, and send each to its reader."""
        added = self._by_pool.pop(pool).items()
        waiting = [(sub, head) for sub, head in added if _waits(sub, head)]
        for start in range(0, len(waiting), _STREAMS_PER_READ):
            batch = waiting[start : start + _STREAMS_PER_READ]
            try:
                length, positions = await self._pools.queue_positions(pool, [sub.local.id for sub, _ in batch])
            except FabricError:
                self._by_pool.setdefault(pool, {}).update(waiting[start:])
                raise
            plan = self._directory.warming(pool)  # None: the pool has replicas, so the queue waits for a free slot
            now_us, wake_s = self._now_us(), self._directory.wake_s(pool)
            for (sub, head), position in zip(batch, positions, strict=True):
                if position and _waits(sub, head):
                    warming_s = None if plan is None else plan.warming_s(position, now_us, wake_s)
                    sub.outlet.queued(position, length, warming_s)
                    self._by_pool.setdefault(pool, {})[sub] = head


def _waits(sub: Subscription, head: int) -> bool:
    """Whether the reader is there, and nothing of its stream has come since ``head``."""
    return sub.local.head == head and sub in sub.local.subs
