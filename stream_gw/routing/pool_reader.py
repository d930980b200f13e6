"""Reads a pool for the directory: what changed since the last read, and sometimes all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from stream_fabric.errors import FabricError, FabricUnavailable
from stream_fabric.pool.lease_changes import BLOCK_CHANGES_MAX, BlockChange
from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.ports import Pools
from stream_fabric.process.slots import Slots
from stream_fabric.stream.ids import ReplicaId
from stream_gw.routing.pool_view import PoolView

_USED_S = 60.0
_UNUSED_REFRESH_S = 5.0
_READ_ALL_S = 30.0
"""Interval of reads of all of a pool's leases: a failover of Redis may have lost a change."""
WAIT_S = 1.0
"""Time that a refresh waits for a read; a silent shard of Redis must not delay what the others have to tell."""
CONCURRENT_READS_MAX = 16
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
        self.error: FabricError | None = None
        """Why the last read failed, or is late."""
        self._reading = asyncio.Lock()
        self._read_at = self._read_all_at = float("-inf")

    def is_used(self, now: float) -> bool:
        return now - self.used_at < _USED_S

    def is_due(self, now: float) -> bool:
        """Return whether the refresh that happens each second reads the pool."""
        return not self._reading.locked() and (self.is_used(now) or now - self._read_at >= _UNUSED_REFRESH_S)

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


class PoolReads:
    """Reads pools side by side. A read that takes long goes on while its callers do not wait for it."""

    def __init__(self, note: Callable[[Sequence[ReplicaInfo]], None]) -> None:
        """``note`` is called with the changed replicas of each read."""
        self._note = note
        self._running: set[asyncio.Task[None]] = set()

    async def read(self, readers: Iterable[PoolReader]) -> None:
        """Read the pools, and wait for them ``WAIT_S`` at most. ``PoolReader.error`` says why one was not read.

        A pool that cannot be read keeps its view: a shard of Redis that is away concerns its own pools alone.
        """
        slots = Slots(CONCURRENT_READS_MAX)

        async def read(reader: PoolReader) -> None:
            reading = asyncio.create_task(self._read(reader))
            self._running.add(reading)
            reading.add_done_callback(self._running.discard)
            await asyncio.shield(reading)

        answering_first = sorted(readers, key=lambda reader: reader.error is not None)
        waits = {asyncio.create_task(slots.read(partial(read, reader))): reader for reader in answering_first}
        if not waits:
            return
        try:
            done, late = await asyncio.wait(waits, timeout=WAIT_S)
        finally:
            for wait in waits:
                wait.cancel()
        for wait in late:
            waits[wait].error = waits[wait].error or _late(f"pool {waits[wait].name!r}")
        for wait in done:
            wait.result()

    async def _read(self, reader: PoolReader) -> None:
        try:
            changed = await reader.read()
        except FabricError as error:
            reader.error = error
        else:
            reader.error = None
            self._note(changed)

    def close(self) -> None:
        """Stop the reads that go on."""
        for reading in self._running:
            reading.cancel()


class KeptRead(Generic[_Value]):
    """A value that is read again and again. While its read fails, or takes long, the last value stays."""

    def __init__(self, what: str, read: Callable[[], Awaitable[_Value]], value: _Value) -> None:
        self.value = value
        self.error: FabricError | None = None
        """Why the last read failed, or is late."""
        self._what = what
        self._read = read
        self._reading: asyncio.Future[_Value] | None = None

    async def renew(self) -> None:
        """Read the value, and wait for it ``WAIT_S`` at most."""
        self._reading = self._reading or asyncio.ensure_future(self._read())
        done, _ = await asyncio.wait({self._reading}, timeout=WAIT_S)
        if not done:
            self.error = _late(self._what)
            return
        reading, self._reading = self._reading, None
        try:
            self.value, self.error = reading.result(), None
        except FabricError as error:
            self.error = error

    def close(self) -> None:
        """Stop the read that goes on."""
        if self._reading is not None:
            self._reading.cancel()


def _late(what: str) -> FabricUnavailable:
    return FabricUnavailable(f"Redis did not answer in {WAIT_S:g} s: {what} was not read")


async def concurrently(read: Callable[[_Item], Coroutine[Any, Any, _Value]], items: Iterable[_Item]) -> list[_Value]:
    """Read every item, a limited number at once. Raises the first error."""
    limit = asyncio.Semaphore(CONCURRENT_READS_MAX)

    async def limited(item: _Item) -> _Value:
        async with limit:
            return await read(item)

    return await asyncio.gather(*map(limited, items))
