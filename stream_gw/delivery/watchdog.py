"""Finds what pub/sub has lost: compares every local stream with its log, and ends what nothing will continue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from stream_fabric.errors import FabricError, FabricUnavailable
from stream_fabric.limits import FABRIC_AWAY_S_MAX, HEADS_MAX, ORPHAN_GRACE_S, RECOVERY_S_MAX, WATCHDOG_S
from stream_fabric.process.slots import Slots
from stream_fabric.recovery.failover import Failover
from stream_fabric.recovery.lease_reaper import LOST
from stream_fabric.stream.ids import ReplicaId, StreamId
from stream_fabric.stream.log import Head
from stream_fabric.stream.reader import Need
from stream_gw.delivery.hub import Hub, stream_gone
from stream_gw.delivery.local_stream import LocalStream, Missing
from stream_gw.routing.holders import Holder

log = logging.getLogger(__name__)

_LOOKUPS_MAX = 32
"""Concurrent look-ups of a stream's producer."""


class Watchdog:
    """Compares all local streams with their logs every ``every_s``, partition by partition.

    A reader behind its log reads on. A stream without log or producer ends. Readers of a partition that has not
    answered for ``away_s`` end too.
    """

    def __init__(
        self,
        hub: Hub,
        holder_of: Callable[[ReplicaId | None, StreamId], Coroutine[Any, Any, Holder]],
        failover: Failover,
        *,
        every_s: float = WATCHDOG_S,
        away_s: float = FABRIC_AWAY_S_MAX,
    ) -> None:
        """``holder_of(replica, stream)``: who has the stream. ``failover`` ends those that nobody has."""
        self._hub = hub
        self._log = hub.log
        self._holder_of = holder_of
        self._failover = failover
        self._every_s = every_s
        self._away_s = away_s
        self._away_since: dict[int, float] = {}
        """Partition → when a read of it first failed, on the loop's clock; reset by its next answer."""
        self._lookups = Slots(_LOOKUPS_MAX)
        self._comparing: set[int] = set()
        """Partitions whose streams are being compared with their logs."""
        self._beginning: set[int] = set()
        """Partitions with idle streams that wait for the look-up of their producers."""
        self._looking_up: set[StreamId] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._every_s)
                by_partition: dict[int, list[LocalStream]] = {}
                for local in self._hub.local.values():
                    by_partition.setdefault(local.partition, []).append(local)
                # A partition without streams is not read: the absence may have ended before its next stream comes
                self._away_since = {each: since for each, since in self._away_since.items() if each in by_partition}
                for partition, streams in by_partition.items():
                    check = partial(self._check_partition, tasks, partition, streams)
                    _begin(tasks, self._comparing, partition, check)

    async def _check_partition(self, tasks: asyncio.TaskGroup, partition: int, streams: Sequence[LocalStream]) -> None:
        idle: list[tuple[LocalStream, Head]] = []
        for start in range(0, len(streams), HEADS_MAX):
            batch = streams[start : start + HEADS_MAX]
            try:
                heads = await self._log.heads(partition, [local.id for local in batch], self._hub.gateway)
            except FabricError as error:
                log.warning("stream heads not read: partition=%d error=%s", partition, error)
                self._abandon_if_away(partition, streams)
                break
            self._away_since.pop(partition, None)
            for local, head in zip(batch, heads, strict=True):
                if self._compare(local, head) and head is not None:
                    idle.append((local, head))
        if idle:
            _begin(tasks, self._beginning, partition, partial(self._begin_lookups, tasks, idle))

    async def _begin_lookups(self, tasks: asyncio.TaskGroup, idle: Sequence[tuple[LocalStream, Head]]) -> None:
        """Look up the producers of idle streams as slots are free: a task for each of them at once takes 2 KB."""
        for local, head in idle:
            if local.id not in self._looking_up:
                self._looking_up.add(local.id)
                await self._lookups.begin(tasks, partial(self._check_producer, local, head))

    def _abandon_if_away(self, partition: int, streams: Sequence[LocalStream]) -> None:
        """End all readers of a partition that has not answered for ``away_s``."""
        now = asyncio.get_running_loop().time()
        if now - self._away_since.setdefault(partition, now) < self._away_s:
            return
        for local in streams:
            self._hub.abandon(
                local,
                FabricUnavailable(
                    f"the fabric has not answered for {self._away_s:g} s; the stream may still go on, so resume it "
                    "after the cursor",
                    retry_after_s=5,
                ),
            )

    def _compare(self, local: LocalStream, head: Head | None) -> bool:
        """Recheck readers that are behind. Returns whether the stream is live and made no progress since the last
        time."""
        idle = [sub for sub in local.subs if sub.reader.need is Need.LIVE and sub.watched_seq == sub.reader.seq]
        for sub in local.subs:
            sub.watched_seq = sub.reader.seq
        if head is None:
            if self._is_orphan(local, ORPHAN_GRACE_S):
                for sub in tuple(local.subs):
                    local.fail(sub, stream_gone())
            return False
        unwatched = head.status == "live" and not head.watched_by_me
        for sub in idle:
            # One that waits for publishes of an ended stream has missed its terminal, also at the same seq
            is_behind = head.status != "live" or head.last != sub.reader.seq or head.epoch.n != sub.reader.epoch
            if unwatched or is_behind:
                sub.reader.recheck()
                self._hub.catch_up(sub)
        if unwatched and not idle:
            local.recheck()
        if idle and head.status == "live":
            return True
        local.missing = None
        return False

    def _is_orphan(self, local: LocalStream, patience_s: float) -> bool:
        """Count an answer that found neither log nor producer. Returns whether they are missing for ``patience_s``.

        The time since the last such answer counts for ``every_s`` at most: this process may have stood still.
        """
        now = asyncio.get_running_loop().time()
        missing_s = 0.0 if local.missing is None else local.missing.s + min(now - local.missing.at, self._every_s)
        local.missing = Missing(missing_s, now)
        return missing_s > patience_s

    async def _check_producer(self, local: LocalStream, head: Head) -> None:
        """End a live stream that neither a producer nor a queue has: its request or its producer was lost."""
        try:
            holder = await self._holder_of(head.replica, local.id)
            if holder is Holder.LIVE:
                local.missing = None
                return
            if self._is_orphan(local, RECOVERY_S_MAX if holder is Holder.DEAD else ORPHAN_GRACE_S):
                await self._failover.end_orphan(local.id, head, LOST)
        except FabricError as error:
            log.warning("producer of a stream not checked: stream=%s error=%s", local.id, error)
        finally:
            self._looking_up.discard(local.id)


def _begin(
    tasks: asyncio.TaskGroup, running: set[int], partition: int, check: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Begin a check of a partition, unless its last one goes on.

    Nothing waits for it: a shard of Redis that does not answer must not delay the checks of the others.
    """
    if partition not in running:
        running.add(partition)
        tasks.create_task(check()).add_done_callback(lambda _: running.discard(partition))
