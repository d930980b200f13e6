"""Recovery of streams whose replica's lease expired, and upkeep of the queues.

Every gateway and controller runs a reaper. Its steps are idempotent; a claim keeps reapers from doing the same work at
the same time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from stream_fabric.errors import DeadlineExceeded, FabricError, ReplicaLost, StreamGwError
from stream_fabric.limits import HEADS_MAX, LEASE_RENEW_S, LEASE_TTL_S, REAP_EVERY_S
from stream_fabric.pool.records import Work
from stream_fabric.ports import Clock, Pools, Random, StreamLog
from stream_fabric.recovery.failover import Failover, wait_s
from stream_fabric.recovery.failover_reporter import FailoverReporter
from stream_fabric.recovery.lost_pools import LostPools
from stream_fabric.stream.frames import ErrorInfo
from stream_fabric.stream.ids import ReplicaId, StreamId, partition_of
from stream_fabric.stream.log import Head

log = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

SEEN_DEAD_S = 0.9
"""Seconds that a lease must be seen expired while Redis answers. After an outage of Redis the agents renew first."""
_LATE_POLL_S = 0.1
_LOOKS_MIN = 10
_LOOKS_S_MIN = 5 * LEASE_TTL_S
"""Looks in a row that see a lease expired, and seconds that they take, after which its replica is dead although Redis
is slow: a living replica renews its lease before one of them, whatever the time of an answer is."""
_ANSWERS = 8
"""Last answers of Redis, whose shortest is the usual one. What an answer takes longer may be an outage."""
_USUAL_S_MAX = LEASE_RENEW_S / 2
"""Maximum seconds of a usual answer: above, renewals take so long that a living replica's lease may expire."""
_WRITE_S_MAX = 0.1
"""Seconds by which a claim, the reaper's first write, may take longer than the read before it; over: Redis answered
reads and took no writes, as without replicas. Then no agent could renew its lease either."""
_QUEUE = ReplicaId("(queue)")
_NO_REPLICA = ReplicaId("")
_AT_ONCE_MAX = 256
"""Concurrent calls; the process has others to serve."""


class _QueueTimeOver(DeadlineExceeded):
    retriable = True


LATE = DeadlineExceeded("the request's deadline passed while it waited for a replica")
WAITED = _QueueTimeOver("no replica had room in time; retry later")
LOST = ReplicaLost("the replica that produced this stream died; retry the request")
NO_ROOM = ReplicaLost("this stream lost its replica, and no other had room in time; retry the request")


class _Expired(NamedTuple):
    """A replica that each of the last looks saw expired."""

    since: float
    """Time of the answer to the first of these looks, in seconds of this process's monotonic clock."""
    looks: int
    seen_s: float
    """Seconds of that time for which Redis answered at once."""

    def is_dead(self, now: float) -> bool:
        return self.seen_s >= SEEN_DEAD_S or self.is_long_dead(now)

    def is_long_dead(self, now: float) -> bool:
        """Return whether it is dead although Redis is slow."""
        return self.looks >= _LOOKS_MIN and now - self.since >= _LOOKS_S_MIN


class _Look(NamedTuple):
    """A look at a pool's leases."""

    at: float = 0.0
    """Seconds of this process's monotonic clock."""
    expired: Mapping[ReplicaId, _Expired] = {}
    answers_s: tuple[float, ...] = ()
    """How long Redis took to answer the last looks."""


class LeaseReaper:
    """Recovers dead replicas' streams and sweeps the queues, until cancelled."""

    def __init__(
        self,
        pools: Pools,
        streams: StreamLog,
        clock: Clock,
        random: Random,
        reporter: FailoverReporter | None = None,
        on_lost: Callable[[Collection[str]], None] | None = None,
    ) -> None:
        """``on_lost`` is called with the names of all pools whose last replica has died, when they change."""
        self._pools = pools
        self._streams = streams
        self._clock = clock
        self._random = random
        self._reporter = reporter
        self._failover = Failover(pools, streams, clock, random, reporter)
        self._known: Sequence[str] = ()
        """Pools as they were last listed."""
        self._looks: dict[str, _Look] = {}
        self._lost = None if on_lost is None else LostPools(pools, clock, on_lost)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # a long queue must not delay the recovery of dead replicas
            tasks.create_task(self._list_pools(), name="pools")
            tasks.create_task(self._each_pool(tasks, self._reap, "recovery of dead replicas"), name="reap")
            tasks.create_task(self._each_pool(tasks, self._sweep_queue, "queue sweep"), name="sweep")

    async def _list_pools(self) -> None:
        """List the pools about every ``REAP_EVERY_S`` seconds, until cancelled. The last list holds until the next."""
        while True:
            try:
                self._known = await self._pools.pools()
                if self._lost is not None:
                    await self._lost.renew(self._known)
            except FabricError as error:
                log.warning("list of pools failed, retrying: error=%s", error)
            await self._rest()

    async def _each_pool(self, tasks: asyncio.TaskGroup, step: Callable[[str], Awaitable[None]], name: str) -> None:
        """Begin ``step`` for each pool about every ``REAP_EVERY_S`` seconds, until cancelled; log failures as ``name``.

        A pool whose step has not ended is left out: a part of the fabric that does not answer delays no other.
        """
        running: set[str] = set()

        async def take(pool: str) -> None:
            try:
                await step(pool)
            except FabricError as error:
                log.warning("%s failed, retrying: pool=%s error=%s", name, pool, error)
            finally:
                running.discard(pool)

        while True:
            await self._rest()
            for pool in self._known:
                if pool not in running:
                    running.add(pool)
                    tasks.create_task(take(pool))

    async def _rest(self) -> None:
        await asyncio.sleep(REAP_EVERY_S * self._random.uniform(0.7, 1.0))  # jitter spreads the reapers of a fleet

    async def _reap(self, pool: str) -> None:
        """Recover the streams of replicas that were seen expired for ``SEEN_DEAD_S``, or in many looks."""
        before = self._looks.pop(pool, _Look())  # what it saw does not count if the pool answers no more
        asked_at = self._clock.monotonic_us() / 1e6
        names = await self._pools.expired(pool)
        now = self._clock.monotonic_us() / 1e6
        # A wait for the answer may be an outage that began just after the last look: it counts against the pause
        answered_s = now - asked_at
        answers_s = (*before.answers_s[1 - _ANSWERS :], answered_s)
        usual_s = min(*answers_s, _USUAL_S_MAX)
        looked_s = min(asked_at - before.at + usual_s, REAP_EVERY_S) - (answered_s - usual_s)
        expired = {}
        for name in names:
            seen = before.expired.get(name)
            expired[name] = (
                _Expired(now, 1, 0.0)
                if seen is None
                else _Expired(seen.since, seen.looks + 1, max(seen.seen_s + looked_s, 0.0))
            )
        late = [name for name, seen in expired.items() if seen.is_dead(now)]
        dead = []
        for replica in late:
            asked_at = self._clock.monotonic_us() / 1e6
            claimed = await self._claim(pool, replica, LEASE_TTL_S)
            claimed_at = self._clock.monotonic_us() / 1e6
            if claimed_at - asked_at > answered_s + _WRITE_S_MAX and not expired[replica].is_long_dead(now):
                now = claimed_at  # the agents renew first
                expired = {name: seen._replace(seen_s=0.0) for name, seen in expired.items()}
                break
            if claimed:
                dead.append(replica)
        if dead and self._lost is not None:
            await self._lost.receive_dead(pool, dead, self._known)
        await _gather(lambda replica: self._recover(pool, replica, late), dead)
        left = {name: seen for name, seen in expired.items() if name not in dead}
        self._looks[pool] = _Look(now, left, answers_s)

    async def _recover(self, pool: str, replica: ReplicaId, dead: Collection[ReplicaId]) -> None:
        """Move the streams of a dead replica, and retire it if all were moved; else a later look finds it again.

        ``dead``: all dead replicas of the pool.
        """
        is_alive, streams = await asyncio.gather(
            self._wait_for_late(pool, replica, dead), self._pools.in_flight(pool, replica)
        )
        if is_alive:
            return
        log.warning(
            "replica lease expired, moving its streams: pool=%s replica=%s streams=%d", pool, replica, len(streams)
        )
        if self._reporter is not None:
            self._reporter.report_dead(pool, replica, len(streams))
        moved = await _gather(partial(self._failover.rescue, pool, replica, error=LOST, dead=True), streams)
        if len(moved) == len(streams):
            await self._pools.retire(pool, replica)

    async def _wait_for_late(self, pool: str, replica: ReplicaId, dead: Collection[ReplicaId]) -> bool:
        """Wait up to ``SEEN_DEAD_S`` while the leases of all others have run out: they may have stood still.

        Streams that find no other replica end. Returns whether the replica itself has renewed its lease.
        """
        for _ in range(math.ceil(SEEN_DEAD_S / _LATE_POLL_S)):
            expired = await self._pools.expired(pool)
            if replica not in expired:
                return True
            if all(name in dead for name in expired) or await self._pools.replicas(pool):
                break
            await asyncio.sleep(_LATE_POLL_S)
        return False

    async def _sweep_queue(self, pool: str) -> None:
        """End queued streams that waited too long; remove those that were cancelled or have lost their readers."""
        count, _ = await self._pools.queue_positions(pool, [])
        if not count or not await self._claim(pool, _QUEUE, REAP_EVERY_S / 2):
            return
        waiting = await self._pools.waiting(pool)
        overdue = dict.fromkeys(await self._pools.waiting(pool, overdue=True))
        ended = await _gather(partial(self._end_overdue, pool), list(overdue))
        gone = list(ended)
        heads = await self._heads([stream for stream in waiting if stream not in overdue])
        gone += [stream for stream, head in heads.items() if head.status != "live"]
        unwatched = [stream for stream, head in heads.items() if head.status == "live" and head.unwatched]
        abandoned = await _gather(lambda stream: self._cancel_abandoned(pool, stream, heads[stream]), unwatched)
        gone += [stream for stream, cancelled in abandoned.items() if cancelled]
        if gone:
            await self._remove_ended(pool, gone, {stream for stream, fenced in ended.items() if fenced})

    async def _remove_ended(self, pool: str, streams: Sequence[StreamId], billed: Collection[StreamId]) -> None:
        """Take ended streams out of the queue, and bill those that a replica had begun; ``billed`` are already."""
        unbilled = [] if self._reporter is None else [stream for stream in streams if stream not in billed]
        works = await _gather(partial(self._work, pool), unbilled)
        begun = {stream: work for stream, work in works.items() if work is not None and work.base}
        await self._pools.remove_queued(pool, [stream for stream in streams if stream not in begun])
        for stream, work in begun.items():
            if await self._pools.holder(pool, stream) == "queue":  # else a replica has just taken it, and bills it
                await self._bill(pool, work, None)
                await self._pools.remove_queued(pool, [stream])

    async def _bill(self, pool: str, work: Work | None, error: StreamGwError | None) -> None:
        """Report the bill of a stream that has ended in the queue, if a replica had begun it."""
        if self._reporter is not None and work is not None and work.base:
            await self._reporter.report_attempt(pool, _NO_REPLICA, work, error, billed=True)

    async def _work(self, pool: str, stream: StreamId) -> Work | None:
        try:
            return await self._pools.work(pool, stream)
        except msgspec.MsgspecError:  # written by another version
            return None

    async def _claim(self, pool: str, replica: ReplicaId, ttl_s: float) -> bool:
        return await self._pools.claim_recovery(pool, replica, ttl_s, self._random.token_hex(4))

    async def _end_overdue(self, pool: str, stream: StreamId) -> bool:
        """End a stream that waited in the queue too long. False: it had ended before."""
        work = await self._work(pool, stream)
        error: StreamGwError = WAITED
        if work is not None and not wait_s(work, self._clock.now_us()):
            error = LATE
        elif work is not None and work.tried:
            error = NO_ROOM
        fenced = await self._streams.fence(stream, None, self._random.token_hex(4), ErrorInfo.of(error))
        if fenced:
            await self._bill(pool, work, error)
        return fenced

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
        work = await self._work(pool, stream)  # another version's waits until it is handed out, or its time is over
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
