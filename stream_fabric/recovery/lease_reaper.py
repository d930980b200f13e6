"""Recovery of streams whose replica's lease expired, and upkeep of the queues.

Every gateway and controller runs a reaper. Its steps are idempotent; a claim keeps reapers from doing the same work at
the same time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from stream_fabric.errors import DeadlineExceeded, FabricError, ReplicaLost
from stream_fabric.limits import HEADS_MAX, LEASE_TTL_S, REAP_EVERY_S
from stream_fabric.ports import Clock, Pools, Random, StreamLog
from stream_fabric.recovery.failover import Failover, FailoverReporter
from stream_fabric.stream.frames import ErrorInfo
from stream_fabric.stream.ids import ReplicaId, StreamId, partition_of
from stream_fabric.stream.log import Head

log = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

SEEN_DEAD_S = 0.9
"""Seconds that a lease must be seen expired while Redis answers. After an outage of Redis the agents renew first."""
_QUEUE = ReplicaId("(queue)")
_AT_ONCE_MAX = 256
"""Concurrent calls; the process has others to serve."""

WAITED = DeadlineExceeded("no replica had room in time; retry later")
LOST = ReplicaLost("the replica that produced this stream died; retry the request")


class LeaseReaper:
    """Recovers dead replicas' streams and sweeps the queues, until cancelled."""

    def __init__(
        self,
        pools: Pools,
        streams: StreamLog,
        clock: Clock,
        random: Random,
        reporter: FailoverReporter | None = None,
    ) -> None:
        self._pools = pools
        self._streams = streams
        self._clock = clock
        self._random = random
        self._reporter = reporter
        self._failover = Failover(pools, streams, clock, random, reporter)
        self._looked_at = 0.0
        """When the leases were last read, in seconds of this process's monotonic clock."""
        self._expired_s: dict[tuple[str, ReplicaId], float] = {}
        """Seconds for which each replica has been seen expired."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # a long queue must not delay the recovery of dead replicas
            tasks.create_task(self._repeat(self._reap, "recovery of dead replicas"), name="reap")
            tasks.create_task(self._repeat(self._sweep_queues, "queue sweep"), name="sweep")

    async def _repeat(self, step: Callable[[], Awaitable[None]], name: str) -> None:
        """Call ``step`` about every ``REAP_EVERY_S`` seconds, until cancelled; log its failures as ``name``."""
        while True:
            # Jitter spreads the many reapers of a fleet
            await asyncio.sleep(REAP_EVERY_S * self._random.uniform(0.7, 1.0))
            try:
                await step()
            except FabricError as error:
                log.warning("%s failed, retrying: error=%s", name, error)

    async def _reap(self) -> None:
        """Move the streams of replicas that were expired for ``SEEN_DEAD_S``, and retire these replicas."""
        before, self._expired_s = self._expired_s, {}  # kept only if the whole step succeeds
        expired = await _gather(self._pools.expired, await self._pools.pools())
        now = self._clock.monotonic_us() / 1e6
        # An outage between two looks is not time for which Redis answered
        looked_s, self._looked_at = min(now - self._looked_at, REAP_EVERY_S), now
        expired_s = {
            (pool, replica): before[pool, replica] + looked_s if (pool, replica) in before else 0.0
            for pool, replicas in expired.items()
            for replica in replicas
        }
        complete = True
        for (pool, replica), seen_s in list(expired_s.items()):
            if seen_s < SEEN_DEAD_S or not await self._claim(pool, replica, LEASE_TTL_S):
                continue
            streams = await self._pools.in_flight(pool, replica)
            log.warning(
                "replica lease expired, moving its streams: pool=%s replica=%s streams=%d", pool, replica, len(streams)
            )
            if self._reporter is not None:
                self._reporter.report_dead(pool, replica, len(streams))
            moved = await _gather(partial(self._failover.rescue, pool, replica, error=LOST, dead=True), streams)
            complete = complete and len(moved) == len(streams)
            if len(moved) == len(streams) and await self._pools.retire(pool, replica):
                del expired_s[pool, replica]
        if complete:
            self._expired_s = expired_s

    async def _sweep_queues(self) -> None:
        await _gather(self._sweep_queue, await self._pools.pools())

    async def _sweep_queue(self, pool: str) -> None:
        """End queued streams that waited too long; remove those that were cancelled or have lost their readers."""
        count, _ = await self._pools.queue_positions(pool, [])
        if not count or not await self._claim(pool, _QUEUE, REAP_EVERY_S / 2):
            return
        waiting = await self._pools.waiting(pool)
        overdue = dict.fromkeys(await self._pools.waiting(pool, overdue=True))
        gone = list(await _gather(self._end_overdue, list(overdue)))
        heads = await self._heads([stream for stream in waiting if stream not in overdue])
        gone += [stream for stream, head in heads.items() if head.status != "live"]
        unwatched = [stream for stream, head in heads.items() if head.status == "live" and head.unwatched]
        abandoned = await _gather(lambda stream: self._cancel_abandoned(pool, stream, heads[stream]), unwatched)
        gone += [stream for stream, cancelled in abandoned.items() if cancelled]
        if gone:
            await self._pools.remove_queued(pool, gone)

    async def _claim(self, pool: str, replica: ReplicaId, ttl_s: float) -> bool:
        return await self._pools.claim_recovery(pool, replica, ttl_s, self._random.token_hex(4))

    async def _end_overdue(self, stream: StreamId) -> None:
        """End a stream that waited in the queue too long."""
        await self._streams.fence(stream, None, self._random.token_hex(4), ErrorInfo.of(WAITED))

    async def _heads(self, streams: Sequence[StreamId]) -> dict[StreamId, Head]:
        """Read the heads of streams of any partition; streams that do not exist are left out."""
        by_partition: dict[int, list[StreamId]] = {}
        for stream in streams:
            by_partition.setdefault(partition_of(stream, self._streams.partitions), []).append(stream)
        batches = [
            (partition, tuple(members[start : start + HEADS_MAX]))
            for partition, members in by_partition.items()
            for start in range(0, len(members), HEADS_MAX)
        ]
        read = await _gather(lambda batch: self._streams.heads(batch[0], batch[1], None), batches)
        return {
            stream: head
            for (_, members), heads in read.items()
            for stream, head in zip(members, heads, strict=True)
            if head is not None
        }

    async def _cancel_abandoned(self, pool: str, stream: StreamId, head: Head) -> bool:
        """Cancel a queued stream that nobody has watched for its whole grace period. True: it was cancelled."""
        try:
            work = await self._pools.work(pool, stream)
        except msgspec.MsgspecError:  # written by another version: it waits until it is handed out, or its time is over
            return False
        if work is None or work.unwatched_s is None or head.unwatched_ms < work.unwatched_s * 1000:
            return False
        reply = await self._streams.cancel(stream, work.tenant, int(work.unwatched_s * 1000))
        return reply.result == "accepted"


async def _gather(call: Callable[[K], Awaitable[T]], keys: Sequence[K]) -> dict[K, T]:
    """Call ``call`` for every key; return the results of the calls that did not raise FabricError.

    A key whose part of the fabric is unavailable does not delay the others; the next turn tries it again.
    """
    found: dict[K, T] = {}
    for start in range(0, len(keys), _AT_ONCE_MAX):
        batch = keys[start : start + _AT_ONCE_MAX]
        for key, outcome in zip(batch, await asyncio.gather(*map(call, batch), return_exceptions=True), strict=True):
            if isinstance(outcome, FabricError):
                log.warning("recovery failed, retrying: of=%s error=%s", key, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                found[key] = outcome
    return found
