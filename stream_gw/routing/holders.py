"""Look-up of the pool that has a stream in flight or queued."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from stream_fabric.errors import FabricError
from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.ports import Pools
from stream_fabric.process.slots import SLOT_S, Slots
from stream_fabric.stream.ids import StreamId
from stream_gw.routing.pool_reader import CONCURRENT_READS_MAX


async def is_held(
    pools: Pools, replicas: Mapping[str, Sequence[ReplicaInfo]], home: str | None, stream: StreamId
) -> bool:
    """Return whether a live replica of one of these pools, or a pool's queue, has the stream; ``home`` is asked first.

    A True needs one pool's answer, a False that of all: raises FabricError where one is missing.
    """

    async def has_stream(pool: str) -> bool:
        holder = await pools.holder(pool, stream)
        return holder == "queue" or any(info.replica == holder for info in replicas.get(pool, ()))

    slots = Slots(CONCURRENT_READS_MAX)
    asked: list[asyncio.Task[bool]] = []
    try:
        if home is not None:
            asked.append(asyncio.create_task(has_stream(home)))
            done, _ = await asyncio.wait(asked, timeout=SLOT_S)  # one that is silent must not delay the others
            if any(task.exception() is None and task.result() for task in done):
                return True
        asked += [asyncio.create_task(slots.read(partial(has_stream, pool))) for pool in replicas if pool != home]
        return await _any_true(asked)
    finally:
        for task in asked:
            task.cancel()


async def _any_true(asked: Sequence[asyncio.Task[bool]]) -> bool:
    """Wait until one answer is True. Raises FabricError if none is and an answer is missing."""
    failure: FabricError | None = None
    for answer in asyncio.as_completed(asked):
        try:
            if await answer:
                return True
        except FabricError as error:  # another pool may have the stream
            failure = failure or error
    if failure is not None:
        raise failure
    return False
