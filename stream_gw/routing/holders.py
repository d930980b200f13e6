"""Look-up of the pool that has a stream in flight or queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from stream_fabric.errors import FabricError
from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.ports import Pools
from stream_fabric.stream.ids import StreamId
from stream_gw.routing.pool_reader import CONCURRENT_READS_MAX, SLOT_S


async def is_held(
    pools: Pools, replicas: Mapping[str, Sequence[ReplicaInfo]], home: str | None, stream: StreamId
) -> bool:
    """Return whether a live replica of one of these pools, or a pool's queue, has the stream; ``home`` is asked first.

    A True needs one pool's answer, a False that of all: raises FabricError where one is missing.
    """

    async def has_stream(pool: str) -> bool:
        holder = await pools.holder(pool, stream)
        return holder == "queue" or any(info.replica == holder for info in replicas.get(pool, ()))

    failure: FabricError | None = None
    try:
        if home is not None and await has_stream(home):
            return True
    except FabricError as error:  # another pool may have the stream
        failure = error
    found = await _any_true(has_stream, [pool for pool in replicas if pool != home])
    if not found and failure is not None:
        raise failure
    return found


async def _any_true(ask: Callable[[str], Coroutine[Any, Any, bool]], pools: Sequence[str]) -> bool:
    """Ask about every pool, a limited number at once, until one answer is True.

    Raises FabricError if none is and an answer is missing.
    """
    slots = asyncio.Semaphore(CONCURRENT_READS_MAX)
    failure: FabricError | None = None

    async def limited(pool: str) -> bool:
        async with slots:
            asking = asyncio.create_task(ask(pool))
            try:
                await asyncio.wait({asking}, timeout=SLOT_S)
            except asyncio.CancelledError:
                asking.cancel()
                raise
        return await asking

    asked = [asyncio.create_task(limited(pool)) for pool in pools]
    try:
        for answer in asyncio.as_completed(asked):
            try:
                if await answer:
                    return True
            except FabricError as error:
                failure = failure or error
    finally:
        for task in asked:
            task.cancel()
    if failure is not None:
        raise failure
    return False
