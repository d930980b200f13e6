"""Look-up of the pool that has a stream in flight or queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import TypeAlias

from stream_fabric.errors import FabricError
from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.ports import Pools
from stream_fabric.process.slots import SLOT_S, Slots
from stream_fabric.stream.ids import StreamId
from stream_gw.routing.pool_reader import CONCURRENT_READS_MAX

OnQueued: TypeAlias = Callable[[str], None]
"""Called with the pool in whose queue a stream is."""


def ignore(pool: str) -> None:
    """Do nothing with the pool."""


class Holder(IntEnum):
    """Holder of a stream, the best that any pool tells."""

    NOBODY = 0
    DEAD = 1
    """A replica without a lease. Lease reapers have not moved the stream yet."""
    LIVE = 2
    """A live replica, or a queue."""


async def holder_of(
    pools: Pools,
    replicas: Mapping[str, Sequence[ReplicaInfo]],
    home: str | None,
    stream: StreamId,
    on_queued: OnQueued,
) -> Holder:
    """Return who of these pools has the stream; ``home`` is asked first.

    ``on_queued`` is called with the pool in whose queue it is. ``LIVE`` needs one pool's answer, anything else that of
    all: raises FabricError where one is missing.
    """

    async def ask(pool: str) -> Holder:
        holder = await pools.holder(pool, stream)
        if holder == "queue":
            on_queued(pool)
            return Holder.LIVE
        if any(info.replica == holder for info in replicas.get(pool, ())):
            return Holder.LIVE
        return Holder.NOBODY if holder is None else Holder.DEAD

    slots = Slots(CONCURRENT_READS_MAX)
    asked: list[asyncio.Task[Holder]] = []
    try:
        if home is not None:
            asked.append(asyncio.create_task(ask(home)))
            done, _ = await asyncio.wait(asked, timeout=SLOT_S)  # one that is silent must not delay the others
            if any(task.exception() is None and task.result() is Holder.LIVE for task in done):
                return Holder.LIVE
        asked += [asyncio.create_task(slots.read(partial(ask, pool))) for pool in replicas if pool != home]
        return await _best(asked)
    finally:
        for task in asked:
            task.cancel()


async def _best(asked: Sequence[asyncio.Task[Holder]]) -> Holder:
    """Wait until one answer is ``LIVE``, or for the best of all. Raises FabricError if an answer is missing then."""
    best, failure = Holder.NOBODY, None
    for answer in asyncio.as_completed(asked):
        try:
            best = max(best, await answer)
        except FabricError as error:  # another pool may have the stream
            failure = failure or error
        if best is Holder.LIVE:
            return best
    if failure is not None:
        raise failure
    return best
