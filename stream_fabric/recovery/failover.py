"""Failover of streams that lose their producer: another replica takes the stream over, or the stream ends.

Whoever claims a dead replica recovers its streams; a living agent hands its own streams over. Every step is
idempotent. A stream stays on its old replica's list until it is placed elsewhere, so an unfinished failover is found
and repeated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from stream_fabric.errors import PoolFull, StreamGwError
from stream_fabric.limits import ATTEMPTS_MAX, CANDIDATES_MAX, QUEUE_WAIT_S_MAX, YIELD_WAIT_S_MAX
from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.overload import (
    BATCH_HOST_TERMS,
    NO_OVERLOAD_TERMS,
    BatchHosted,
    Fallback,
    Overflow,
    OverloadTerms,
)
from stream_fabric.pool.placement import BATCH_TIER, Placed, Queued, Refused
from stream_fabric.pool.records import Candidate, Work
from stream_fabric.ports import Clock, Pools, Random, StreamLog
from stream_fabric.recovery.bill_terms import lost_work
from stream_fabric.recovery.failover_reporter import FailoverReporter
from stream_fabric.stream.cursor import END, Epoch
from stream_fabric.stream.frames import ErrorInfo
from stream_fabric.stream.ids import ReplicaId, StreamId, partition_of
from stream_fabric.stream.log import Head

OwnBill = Callable[[Head], Awaitable[None]]
"""Writes a replica's own bill of a stream with this head, if it was cancelled in its epoch. Raises FabricError."""
_NONCE_BYTES = 4
_UNBILLED_MAX = 10_000
"""Fences without a bill that are remembered; another process may have repeated them."""


class Failover:
    """Moves streams from a replica that can no longer produce them. ``reporter`` hears of each lost attempt."""

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
        self._unbilled: dict[StreamId, str] = {}
        """Nonces of fences whose reply was lost, or whose bill could not be read."""

    async def rescue(
        self,
        pool: str,
        replica: ReplicaId,
        stream: StreamId,
        error: StreamGwError,
        *,
        comes_back: bool = False,
        counts: bool = True,
        dead: bool = False,
        known: Work | None = None,
        own_bill: OwnBill | None = None,
    ) -> None:
        """Place the stream on another replica; if none can take it, end it with ``error``.

        ``comes_back``: the replica's engine restarts, so the stream may wait even for a model's only replica.
        ``counts``: the replica has failed at the stream, which ``ATTEMPTS_MAX`` replicas may.
        ``dead``: the replica cannot report its lost attempt, so it is reported here.
        ``known``: the replica's own copy of the request, in case a failover of Redis has lost the pool's.
        ``own_bill``: the bill of a living replica, for a stream that has ended in its epoch.

        Raises FabricError; the call can then be repeated.
        """
        try:
            work = await self._pools.work(pool, stream)
        except msgspec.MsgspecError:  # written by another version; nobody here could run it
            work = None
        # Read after the work: then the work that was read is this replica's, not that of a replica which has it since
        if await self._pools.holder(pool, stream) not in (replica, None):
            await self._pools.remove_in_flight(pool, replica, [stream])
            return
        if work is None:
            if await self._is_at_home(stream):
                await self._pools.remove_in_flight(pool, replica, [stream])
                return
            if known is None:
                await self.end(pool, replica, stream, error)
                return
            work = known
        if work.home and await self._pools.holder(work.home, stream) is not None:  # an unfinished failover put it there
            await self._pools.remove_in_flight(pool, replica, [stream])
            return
        tried = tuple(dict.fromkeys((*work.tried, replica)))
        others = await self._candidates(pool, replica, tried, work)
        if (counts and work.attempts_counted >= ATTEMPTS_MAX) or not (others or comes_back or work.home):
            epoch = await self._current_epoch(stream, work)
            await self.end(pool, replica, stream, error, epoch, work, dead=dead, own_bill=own_bill)
            return
        taken = await self._streams.takeover(stream, work.parsed_epoch(), self._random.token_hex(_NONCE_BYTES))
        if taken is None:  # the stream has ended, or another producer has it
            await self._bill_ended(pool, replica, work, error, dead=dead, own_bill=own_bill)
            await self._pools.remove_in_flight(pool, replica, [stream])
            return
        again = msgspec.structs.replace(
            work,
            epoch=str(taken.epoch),
            base=taken.base,
            attempt=work.attempt + 1,
            moved=work.moved + (not counts),
            tried=tried,
        )
        if not await self._requeue(pool, again, others, replica):
            await self.end(pool, replica, stream, error, taken.epoch, work, dead=dead, own_bill=own_bill)
            return
        if dead:
            await self._report(pool, replica, work, error, billed=False)

    async def yield_stream(self, pool: str, replica: ReplicaId, work: Work, own_bill: OwnBill | None = None) -> None:
        """Put a running batch stream back into the queue, before all others of its tier.

        The replica has not failed at the stream, so this counts as no attempt, and the replica may take it again.
        ``own_bill``: as in ``rescue``.

        Raises FabricError; the call can then be repeated.
        """
        stream = work.request.stream
        if await self._pools.holder(pool, stream) in (replica, None):
            error = _not_taken_back(pool, work)
            taken = await self._streams.takeover(stream, work.parsed_epoch(), self._random.token_hex(_NONCE_BYTES))
            if taken is not None:
                again = msgspec.structs.replace(work, epoch=str(taken.epoch), base=taken.base)
                if not await self._requeue(pool, again, [Candidate(replica, work.prompt_tokens)], replica):
                    await self.end(pool, replica, stream, error, taken.epoch, work, own_bill=own_bill)
                return
            await self._bill_ended(pool, replica, work, error, dead=False, own_bill=own_bill)
        await self._pools.remove_in_flight(pool, replica, [stream])

    async def _requeue(self, pool: str, work: Work, candidates: Sequence[Candidate], instead: ReplicaId) -> bool:
        """Place a stream that has begun, and keep the record of it. False: the pool refuses it.

        A batch host takes it at once or not at all; then it goes back to its home pool.
        """
        if not work.home:
            return await self._place(pool, work, candidates, instead)
        if candidates and await self._place(pool, work, candidates, instead, BATCH_HOST_TERMS):
            return True
        there = await self._candidates(work.home, instead, work.tried, work)
        # The host's list keeps it until it is at home: an unfinished failover is repeated, and finds it there
        placed = await self._place(work.home, msgspec.structs.replace(work, home=""), there, instead)
        await self._pools.remove_in_flight(pool, instead, [work.request.stream])
        return placed

    async def _place(
        self,
        pool: str,
        work: Work,
        candidates: Sequence[Candidate],
        instead: ReplicaId,
        terms: OverloadTerms = NO_OVERLOAD_TERMS,
    ) -> bool:
        """Place a stream that has begun. A batch stream may wait for long: the pool may yield."""
        now_us = self._clock.now_us()
        most_s = YIELD_WAIT_S_MAX if work.tier == BATCH_TIER else work.wait_s
        placed = await self._pools.place(
            pool,
            work,
            candidates,
            wait_s=wait_s(work, now_us, most_s),
            jitter=self._random.random(),
            instead=instead,
            terms=terms,
        )
        if isinstance(placed, Refused):
            return False
        await self._streams.put_placements([(work.request.stream, placement_record(work, placed, now_us))])
        return True

    async def _is_at_home(self, stream: StreamId) -> bool:
        """Return whether a stream whose request this pool does not have was moved to its home pool.

        It then has an epoch that no producer has begun. A producer that has begun it protects it without this.
        """
        (head,) = await self._streams.heads(partition_of(stream, self._streams.partitions), [stream], None)
        return head is not None and head.replica is None and head.epoch.n > 1

    async def _current_epoch(self, stream: StreamId, work: Work) -> Epoch:
        """Return the epoch to fence: the one in ``work``, or the next one if an unfinished failover has begun it.

        Such a failover stopped between takeover and placement: the pool still lists the stream with the old replica,
        and no producer appends in the new epoch.
        """
        epoch = work.parsed_epoch()
        (head,) = await self._streams.heads(partition_of(stream, self._streams.partitions), [stream], None)
        unfinished = head is not None and head.replica is None and head.epoch.n == epoch.n + 1
        return head.epoch if head is not None and unfinished else epoch

    async def _candidates(
        self, pool: str, replica: ReplicaId, tried: tuple[ReplicaId, ...], work: Work
    ) -> list[Candidate]:
        """List other replicas that may serve the stream, least loaded first; ``tried`` ones only if there are no
        others."""
        infos = [info for info in await self._pools.replicas(pool) if info.replica != replica and work.may_run_on(info)]
        infos = [info for info in infos if info.replica not in tried] or infos
        infos.sort(key=lambda info: info.prefill_ms + info.decode_ms)
        return [Candidate(info.replica, 0) for info in infos[:CANDIDATES_MAX]]

    async def end(
        self,
        pool: str,
        replica: ReplicaId,
        stream: StreamId,
        error: StreamGwError,
        epoch: Epoch | None = None,
        work: Work | None = None,
        *,
        dead: bool = False,
        own_bill: OwnBill | None = None,
    ) -> None:
        """End the stream with ``error`` and take it off the replica's list of streams in flight.

        ``epoch``: the replica's epoch, if known. ``work``: the request, if known; else the bill is made from the meta.
        ``dead`` and ``own_bill``: as in ``rescue``.

        Raises FabricError; the call can then be repeated.
        """
        if work is None:
            _, work = await self._lost_work(stream) or ("", None)
        fenced = await self._fence(stream, replica, error, epoch)
        if work is not None and fenced:
            await self._report(pool, replica, work, error, billed=True)
        elif work is not None:
            await self._bill_ended(pool, replica, work, error, dead=dead, own_bill=own_bill)
        await self._pools.remove_in_flight(pool, replica, [stream])

    async def _bill_ended(
        self,
        pool: str,
        replica: ReplicaId,
        work: Work,
        error: StreamGwError,
        *,
        dead: bool,
        own_bill: OwnBill | None,
    ) -> None:
        """Report the bill of a stream that has ended, if nobody else reports it.

        A stream is taken off its replica's list after its bill. So whoever ended a dead replica's stream that is still
        on the list has not come so far. A living replica bills what ended in its own epoch, such as a cancelled stream
        (``own_bill``), and what was cancelled after a takeover whose rescuer has died: the stream is still on its list.
        """
        stream = work.request.stream
        (head,) = await self._streams.heads(partition_of(stream, self._streams.partitions), [stream], None)
        if head is None or head.status == "live":
            return
        taken_over = head.replica is None and head.epoch != work.parsed_epoch()
        if dead or (taken_over and head.cancelled_at >= 0):
            due = await self._pools.holder(pool, stream) == replica
        else:  # its list does not tell: it lists what it runs
            due = head.epoch.nonce == self._unbilled.get(stream)
        if due:
            is_fenced = head.status == "failed" and head.epoch.n != work.parsed_epoch().n
            await self._report(pool, replica, work, error if is_fenced else None, billed=True)
        elif own_bill is not None:
            await own_bill(head)

    async def fence(self, pool: str, replica: ReplicaId, work: Work, error: StreamGwError, epoch: Epoch) -> None:
        """End the stream in its log, with its bill, unless another producer has begun a newer epoch.

        Raises FabricError; the call can then be repeated.
        """
        if await self._fence(work.request.stream, None, error, epoch):
            await self._report(pool, replica, work, error, billed=True)

    async def end_orphan(self, stream: StreamId, head: Head, error: StreamGwError) -> None:
        """End a live stream that neither a producer nor a queue has, with its bill. ``head``: as it was found.

        Raises FabricError; the call can then be repeated.
        """
        found = await self._lost_work(stream)
        if found is not None:
            pool, work = found
            await self.fence(pool, head.replica or ReplicaId(""), work, error, head.epoch)

    async def _lost_work(self, stream: StreamId) -> tuple[str, Work] | None:
        """Return what the bill of a live stream needs, from its meta: no pool has its request."""
        page = await self._streams.watch(stream, None, None, END)
        return None if page is None or page.status != "live" else lost_work(stream, page)

    async def _fence(
        self, stream: StreamId, replica: ReplicaId | None, error: StreamGwError, epoch: Epoch | None
    ) -> bool:
        """Fence a stream. A call that is repeated after its reply was lost is told that it fenced."""
        nonce = self._unbilled.setdefault(stream, self._random.token_hex(_NONCE_BYTES))
        if len(self._unbilled) > _UNBILLED_MAX:
            del self._unbilled[next(iter(self._unbilled))]
        fenced = await self._streams.fence(stream, replica, nonce, ErrorInfo.of(error), epoch)
        if not fenced:
            self._unbilled.pop(stream, None)
        return fenced

    async def _report(
        self,
        pool: str,
        replica: ReplicaId,
        work: Work,
        error: StreamGwError | None,
        *,
        billed: bool,
    ) -> None:
        if self._reporter is not None:
            await self._reporter.report_attempt(pool, replica, work, error, billed=billed)
        self._unbilled.pop(work.request.stream, None)


def _not_taken_back(pool: str, work: Work) -> PoolFull:
    return PoolFull(
        f"the stream gave its slot to requests of higher tiers, and the queue of pool {pool_of(pool)!r} did not take "
        f"it back; send the request for model {work.request.model!r} again later"
    )


def wait_s(work: Work, now_us: int, most_s: float = QUEUE_WAIT_S_MAX) -> float:
    """Seconds that a request may wait in the queue: until its deadline, at most ``most_s``.

    ``now_us`` is the fabric's clock, which the deadline was computed with.
    """
    deadline_ms = work.request.deadline_unix_ms
    left_s = deadline_ms / 1000 - now_us / 1e6 if deadline_ms else most_s
    return min(max(left_s, 0.0), most_s)


def placement_record(
    work: Work, placed: Placed | Queued, now_us: int, elsewhere: Overflow | BatchHosted | Fallback | None = None
) -> bytes:
    """Encode one placement as the JSON record for ``StreamLog.put_placements``. ``now_us``: the fabric's clock.

    ``elsewhere``: why it is not in its home pool; None: it is.
    """
    record: dict[str, object] = {}
    if elsewhere is not None:
        names: dict[type, str] = {Overflow: "shift", BatchHosted: "batch_host", Fallback: "fallback"}
        record[names[type(elsewhere)]] = elsewhere._asdict()
    return msgspec.json.encode(
        record
        | {
            "at_unix_ms": now_us // 1000,
            "attempt": work.attempt,
            "replica": placed.replica if isinstance(placed, Placed) else None,
            "reason": placed.reason if isinstance(placed, Placed) else "queued",
            "position": placed.position if isinstance(placed, Queued) else 0,
            "prompt_tokens": work.prompt_tokens,
            "output_tokens": work.output_tokens,
            "candidates": [scored._asdict() for scored in placed.candidates],
        }
    )
