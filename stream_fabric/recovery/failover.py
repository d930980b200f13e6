"""Streams that lose their producer: another replica takes them over, or they get their terminal.

A dead replica's streams are looked after by whoever claims it first, a living agent's by itself. Every step is
idempotent; what is left half-done is found again, because the stream stays on its replica's list until it is elsewhere.
"""

from __future__ import annotations

import random
import secrets
import time

import msgspec

from stream_fabric.cursor import Epoch
from stream_fabric.errors import StreamGwError
from stream_fabric.events import AttemptTrace
from stream_fabric.frames import ErrorInfo, Usage
from stream_fabric.herald import Herald
from stream_fabric.ids import ReplicaId, StreamId
from stream_fabric.limits import ATTEMPTS_MAX, CANDIDATES_MAX, QUEUE_WAIT_S_MAX
from stream_fabric.placement import TIERS, Placed, Queued, Refused
from stream_fabric.ports import EventSink
from stream_fabric.redis.clock import FabricClock
from stream_fabric.redis.pool import Candidate, RedisPools, Work
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.surge import Shift


class Witness:
    """Tells of tries that cannot tell of themselves any more."""

    def __init__(self, sink: EventSink, clock: FabricClock, streams: RedisStreamLog) -> None:
        self._sink = sink
        self._clock = clock
        self._herald = Herald(sink, clock, "reaper")
        self._streams = streams

    async def tell(self, pool: str, replica: ReplicaId, work: Work, error: StreamGwError, *, billed: bool) -> None:
        """``billed``: it has ended the stream. Otherwise another replica goes on with it."""
        stream = work.request.stream
        _, used = await self._streams.settled(stream) or ("", Usage())
        epoch = work.parsed_epoch().n
        self._sink.emit(
            AttemptTrace(
                id=f"{stream}:end" if billed else f"{stream}:{work.epoch}:lost",
                at_us=self._clock.now_us(),
                stream=stream,
                tenant=work.tenant,
                model=work.request.model,
                pool=pool,
                replica=replica,
                ended="failed" if billed else "lost",
                epoch=epoch,
                attempt=work.attempt,
                tier=TIERS[work.tier],
                trace_id=work.request.traceparent[3:35] or stream[5:],
                prompt_tokens=used.prompt,
                cached_tokens=used.cached,
                output_tokens=used.output,
                reasoning_tokens=used.reasoning,
                error_code=error.code,
                billed=billed,
                price_micro=work.prices.of(used.prompt, used.cached, used.output) if billed and work.prices else 0,
            )
        )

    def tell_dead(self, pool: str, replica: ReplicaId, streams: int) -> None:
        self._herald.tell(
            "dead", pool=pool, replica=replica, reason="its lease has ended", figures={"streams": streams}
        )


class Rescue:
    """``witness``: is told of what is ended here, and of what a dead replica had begun."""

    def __init__(self, pools: RedisPools, streams: RedisStreamLog, witness: Witness | None = None) -> None:
        self._pools = pools
        self._streams = streams
        self._witness = witness

    async def rescue(
        self,
        pool: str,
        replica: ReplicaId,
        stream: StreamId,
        error: StreamGwError,
        *,
        comes_back: bool = False,
        dead: bool = False,
    ) -> None:
        """Have another replica produce the stream; where that cannot be, end it with the error. ``comes_back``: the
        replica's engine is being restarted, so that even the only replica of a model is worth waiting for. ``dead``:
        the replica does not tell of it itself.

        Raises FabricUnavailable: nothing is lost by another call.
        """
        try:
            work = await self._pools.work(pool, stream)
        except msgspec.MsgspecError:  # another version's: nobody here could run it
            work = None
        # Asked after the work: what was read is then this replica's, not that of one which has taken it since
        if await self._pools.where(pool, stream) not in (replica, None):
            await self._pools.drop(pool, replica, [stream])
            return
        if work is None:
            await self.end(pool, replica, stream, error)
            return
        others = await self._others(pool, replica, work.request.model)
        if work.attempt >= ATTEMPTS_MAX or not (others or comes_back):
            await self.end(pool, replica, stream, error, await self._epoch(stream, work), work)
            return
        taken = await self._streams.takeover(stream, work.parsed_epoch(), secrets.token_hex(4))
        if taken is None:  # it has ended, or another has it
            await self._pools.drop(pool, replica, [stream])
            return
        again = msgspec.structs.replace(work, epoch=str(taken.epoch), base=taken.base, attempt=work.attempt + 1)
        placed = await self._pools.place(
            pool, again, others, wait_s=wait_s(work), jitter=random.random(), instead=replica
        )
        if isinstance(placed, Refused):
            if await self._streams.fence(stream, None, secrets.token_hex(4), ErrorInfo.of(error), taken.epoch):
                await self._tell(pool, replica, work, error, billed=True)
            return
        await self._streams.put_placement(stream, explain(again, placed))
        if dead:
            await self._tell(pool, replica, work, error, billed=False)

    async def _epoch(self, stream: StreamId, work: Work) -> Epoch:
        """The replica's. Or, where a takeover has raised it and whoever made that has died since, the one that it made:
        the pool has the stream on this replica's list still, and nobody appends in it."""
        epoch = work.parsed_epoch()
        (head,) = await self._streams.heads(self._streams.partition(stream), [stream], None)
        half_way = head is not None and head.replica is None and head.epoch.n == epoch.n + 1
        return head.epoch if head is not None and half_way else epoch

    async def _others(self, pool: str, replica: ReplicaId, model: str) -> list[Candidate]:
        """Of a large pool, those with least to do."""
        infos = [i for i in await self._pools.replicas(pool) if i.replica != replica and model in i.models]
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
    ) -> None:
        """Give the stream its terminal, and take it off the replica's list. ``epoch``: the replica's, where known."""
        ended = await self._streams.fence(stream, replica, secrets.token_hex(4), ErrorInfo.of(error), epoch)
        if ended and work is not None:
            await self._tell(pool, replica, work, error, billed=True)
        await self._pools.drop(pool, replica, [stream])

    async def _tell(self, pool: str, replica: ReplicaId, work: Work, error: StreamGwError, *, billed: bool) -> None:
        if self._witness is not None:
            await self._witness.tell(pool, replica, work, error, billed=billed)


def wait_s(work: Work, most_s: float = QUEUE_WAIT_S_MAX) -> float:
    """How long a request may wait in the queue."""
    deadline_ms = work.request.deadline_unix_ms
    left_s = deadline_ms / 1000 - time.time() if deadline_ms else most_s
    return min(max(left_s, 0.0), most_s)


def explain(work: Work, placed: Placed | Queued, shift: Shift | None = None) -> bytes:
    """One placement, as it is told."""
    more = {} if shift is None else {"shift": shift._asdict()}
    return msgspec.json.encode(
        more
        | {
            "at_unix_ms": time.time_ns() // 1_000_000,
            "attempt": work.attempt,
            "replica": placed.replica if isinstance(placed, Placed) else None,
            "reason": placed.reason if isinstance(placed, Placed) else "queued",
            "position": placed.position if isinstance(placed, Queued) else 0,
            "prompt_tokens": work.prompt_tokens,
            "output_tokens": work.output_tokens,
            "candidates": [scored._asdict() for scored in placed.candidates],
        }
    )
