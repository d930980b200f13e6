"""Reads a pool for the directory: what changed since the last read, and sometimes all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from stream_fabric.errors import FabricError
from stream_fabric.pool.lease_changes import BLOCK_CHANGES_MAX, BlockChange
from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.ports import Pools
from stream_fabric.stream.ids import ReplicaId
from stream_gw.routing.pool_view import PoolView

_USED_S = 60.0
_UNUSED_REFRESH_S = 5.0
_READ_ALL_S = 30.0
"""Interval of reads of all of a pool's leases: a failover of Redis may have lost a change."""
_CONCURRENT_READS_MAX = 16
_CHANGES_PER_TURN = 32
"""Changes of prefixes that are applied before other tasks of the loop get a turn."""

_Item = TypeVar("_Item")
_Value = TypeVar("_Value")


class PoolReader:
    """Keeps the view of one pool. Times are the loop's."""

    def __init__(self, name: str, pools: Pools) -> None:
        self.name = name
        self.view = PoolView()
        self.used_at = float("-inf")
        """When this gateway last had a request for the pool."""
        self._pools = pools
        self._reading = asyncio.Lock()
        self._read_at = self._read_all_at = float("-inf")

    def is_used(self, now: float) -> bool:
        return now - self.used_at < _USED_S

    def is_due(self, now: float) -> bool:
        """Return whether the refresh that happens each second reads the pool."""
        return self.is_used(now) or now - self._read_at >= _UNUSED_REFRESH_S

    async def read(self) -> list[ReplicaInfo]:
        """Read what changed, of a used pool also what its replicas have cached. Returns the changed replicas."""
        async with self._reading:
            now = asyncio.get_running_loop().time()
            view, is_used = self.view, self.is_used(now)
            if not is_used:
                view.forget_prefixes()
            if view.has_older_agents or now - self._read_all_at >= _READ_ALL_S:
                view.at = 0
            changes = await self._pools.changes(self.name, view.at, (view.blocks_at or "0") if is_used else "")
            blocks, blocks_at = changes.blocks, changes.blocks_at
            if not view.apply(changes):
                changes = await self._pools.changes(self.name, 0, "")
                view.apply(changes)
            self._read_at = now
            if changes.whole:
                self._read_all_at = now
            if is_used:
                await self._read_prefixes(blocks)
                view.blocks_at = blocks_at
                while len(blocks) == BLOCK_CHANGES_MAX:
                    more = await self._pools.changes(self.name, view.at or changes.at, view.blocks_at)
                    blocks, view.blocks_at = more.blocks, more.blocks_at
                    await self._read_prefixes(blocks)
                view.end_turn()
            return [info for _, info in changes.changed if info is not None]

    async def _read_prefixes(self, blocks: Sequence[tuple[ReplicaId, BlockChange]]) -> None:
        """Apply the changes of what replicas have cached; read the summaries of those whose changes do not connect."""

        async def renew(info: ReplicaInfo) -> None:
            self.view.renew_prefix(info, await self._pools.prefix(self.name, info.replica))

        await concurrently(renew, self.view.outdated(blocks))
        for number, (replica, change) in enumerate(blocks, 1):
            self.view.apply_change(replica, change)
            if number % _CHANGES_PER_TURN == 0:
                await asyncio.sleep(0)


async def read_pools(
    readers: Sequence[PoolReader], note: Callable[[Sequence[Sequence[ReplicaInfo]]], None]
) -> FabricError | None:
    """Read every pool and call ``note`` with the changed replicas. Returns the first error.

    A pool that cannot be read keeps its view: a shard of Redis that is away concerns its own pools alone.
    """

    async def read(reader: PoolReader) -> list[ReplicaInfo] | FabricError:
        try:
            return await reader.read()
        except FabricError as error:
            return error

    found = await concurrently(read, readers)
    note([changed for changed in found if not isinstance(changed, FabricError)])
    return next((error for error in found if isinstance(error, FabricError)), None)


async def concurrently(read: Callable[[_Item], Coroutine[Any, Any, _Value]], items: Iterable[_Item]) -> list[_Value]:
    """Read every item, a limited number at once. Raises the first error."""
    limit = asyncio.Semaphore(_CONCURRENT_READS_MAX)

    async def limited(item: _Item) -> _Value:
        async with limit:
            return await read(item)

    return await asyncio.gather(*map(limited, items))
