"""The fabric's ports in the simulation, in place of ``RedisStreamLog``, ``RedisPools``, ``Inbox``, ``RedisIndex`` and
``Subscriber``: each call one trip over a ``Link``, its script run by the law."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Literal, TypeVar

import msgspec

from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import COMMAND_TIMEOUT_S
from stream_fabric.pool.lease_changes import BlockChange, LeaseChanges
from stream_fabric.pool.overload import NO_OVERLOAD_TERMS, OverloadTerms
from stream_fabric.pool.placement import Placed, Queued, Refused
from stream_fabric.pool.records import Candidate, Inbound, LeaseReport, ReplicaInfo, Work
from stream_fabric.redis.client import Partitions
from stream_fabric.redis.streams import OnEnded, leave_to_check
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.frames import ErrorInfo, Status, StoredInput, Usage
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId, partition_of
from stream_fabric.stream.log import Append, AppendReply, CancelReply, CreateCode, Head, InputCode, Page, Takeover
from tests.sim.fabric import PARTITIONS, Link, Shard, at_once
from tests.sim.memory_pools import MemoryPool

T = TypeVar("T")
_PAGE_ENTRIES_MAX = 4
"""Few, so that what is read takes more than one page."""


class StreamDoor:
    """``RedisStreamLog``."""

    def __init__(
        self,
        client: Link,
        partitions: Partitions,
        replica: ReplicaId | None = None,
        on_ended: OnEnded = leave_to_check,
    ) -> None:
        self._link = client
        self._on_ended = on_ended
        self._w = client.w
        self._replica = replica or ReplicaId("")

    partitions = PARTITIONS.count

    def partition(self, stream: StreamId) -> int:
        return partition_of(stream, self.partitions)

    def _shard(self, stream: StreamId) -> Shard:
        return self._w.fabric.of_partition(self.partition(stream))

    async def _end(self, name: str, shard: Shard, step: Callable[[], T]) -> T:
        """Run a script that may end streams; its reply tells which of them their account must settle."""

        def run() -> tuple[T, list[tuple[TenantId, StreamId, Usage]]]:
            shard.ended.clear()
            return step(), list(shard.ended)

        result, ended = await self._link.call(name, shard, run)
        for each in ended:
            self._on_ended(*each)
        return result

    async def create(
        self,
        stream: StreamId,
        epoch: Epoch,
        tenant: TenantId,
        facts: bytes,
        gateway: GatewayId | None,
        model: str = "",
        *,
        reserved: bool = False,
        retention_s: int | None = None,
    ) -> CreateCode:
        shard = self._shard(stream)

        def step() -> CreateCode:
            return at_once(
                shard.log.create(
                    stream, epoch, tenant, facts, gateway, model, reserved=reserved, retention_s=retention_s
                )
            )

        return await self._link.call("create", shard, step)

    async def restate(self, stream: StreamId, tenant: TenantId, facts: bytes, model: str) -> None:
        shard = self._shard(stream)
        await self._link.call("restate", shard, lambda: at_once(shard.log.restate(stream, tenant, facts, model)))

    async def append(self, partition: int, batch: Sequence[Append]) -> list[AppendReply]:
        shard = self._w.fabric.of_partition(partition)

        def step() -> list[AppendReply]:
            with self._w.witness.watching(shard, [item.stream for item in batch]) as seen:
                replies = at_once(shard.log.view(self._replica).append(partition, batch))
                seen.appended(batch, replies, self._replica)
            return replies

        return await self._end("append", shard, step)

    async def input(self, stream: StreamId, tenant: TenantId, key: str, item: msgspec.Raw, at_us: int = 0) -> InputCode:
        shard = self._shard(stream)
        return await self._link.call("input", shard, lambda: at_once(shard.log.input(stream, tenant, key, item, at_us)))

    async def inputs(self, stream: StreamId) -> list[StoredInput]:
        shard = self._shard(stream)
        return await self._link.call("inputs", shard, lambda: at_once(shard.log.inputs(stream)))

    async def cancel(
        self, stream: StreamId, tenant: TenantId, unwatched_ms: int | None = None, *, steers: bool = False
    ) -> CancelReply:
        shard = self._shard(stream)

        def step() -> CancelReply:
            with self._w.witness.watching(shard, [stream]) as seen:
                reply = at_once(shard.log.cancel(stream, tenant, unwatched_ms, steers=steers))
                seen.cancelled(stream, reply)
            return reply

        return await self._end("cancel", shard, step)

    async def fence(
        self,
        stream: StreamId,
        replica: ReplicaId | None,
        nonce: str,
        error: ErrorInfo,
        epoch: Epoch | None = None,
        *,
        withdraws: bool = False,
    ) -> bool:
        shard, listed = self._shard(stream), self._w.witness.listed_by(self._link.process)

        def step() -> bool:
            with self._w.witness.watching(shard, [stream]) as seen:
                fenced = at_once(shard.log.fence(stream, replica, nonce, error, epoch, withdraws=withdraws))
                if fenced:
                    seen.fenced(stream, replica, epoch, listed, withdraws=withdraws)
            return fenced

        return await self._end("fence", shard, step)

    async def takeover(self, stream: StreamId, lost: Epoch, nonce: str) -> Takeover | None:
        shard = self._shard(stream)

        def step() -> Takeover | None:
            with self._w.witness.watching(shard, [stream]) as seen:
                taken = at_once(shard.log.takeover(stream, lost, nonce))
                if taken is not None:
                    seen.taken_over(stream, lost, taken)
                elif stream not in shard.log.streams:
                    self._w.witness.unplaced.add(stream)
            return taken

        return await self._link.call("takeover", shard, step)

    async def put_placements(self, records: Sequence[tuple[StreamId, bytes]]) -> None:
        """Told to operators only."""

    async def settled(self, stream: StreamId) -> tuple[Status, Usage] | None:
        shard = self._shard(stream)

        def step() -> tuple[Status, Usage] | None:
            state = shard.log.streams.get(stream)
            return None if state is None else (state.status, state.usage)

        return await self._link.call("settled", shard, step)

    async def watch(
        self, stream: StreamId, tenant: TenantId | None, gateway: GatewayId | None, after: Cursor
    ) -> Page | None:
        shard = self._shard(stream)

        def step() -> Page | None:
            page = at_once(shard.log.watch(stream, tenant, gateway, after))
            return None if page is None else page._replace(entries=page.entries[:_PAGE_ENTRIES_MAX])

        return await self._link.call("watch", shard, step)

    async def forget(self, stream: StreamId, gateway: GatewayId) -> bool:
        shard = self._shard(stream)

        def step() -> bool:
            before = copy(shard.log.streams.get(stream))
            is_deleted = at_once(shard.log.forget(stream, gateway))
            if is_deleted and before is not None and not before.forgotten:
                shard.deleted[stream] = before
            return is_deleted

        return await self._link.call("forget", shard, step)

    async def delete(self, stream: StreamId, tenant: TenantId) -> bool:
        shard = self._shard(stream)
        return await self._link.call("delete", shard, lambda: at_once(shard.log.delete(stream, tenant)))

    async def unwatch(self, stream: StreamId, gateway: GatewayId) -> None:
        shard = self._shard(stream)
        await self._link.call("unwatch", shard, lambda: at_once(shard.log.unwatch(stream, gateway)))

    async def heads(self, partition: int, streams: Sequence[StreamId], gateway: GatewayId | None) -> list[Head | None]:
        shard = self._w.fabric.of_partition(partition)
        return await self._link.call("heads", shard, lambda: at_once(shard.log.heads(partition, streams, gateway)))


class UnbilledDoor:
    """``RedisUnbilled``."""

    def __init__(self, client: Link) -> None:
        self._link = client
        self._fabric = client.w.fabric

    async def late(self, partition: int) -> list[tuple[StreamId, int]]:
        shard = self._fabric.of_partition(partition)
        return await self._link.call("bills_late", shard, lambda: at_once(shard.unbilled.late(partition)))

    async def remove(self, streams: Sequence[StreamId]) -> None:
        for stream in streams:
            shard = self._fabric.of_partition(partition_of(stream, PARTITIONS.count))
            await self._link.call("billed", shard, partial(_remove_unbilled, shard, stream))


def _remove_unbilled(shard: Shard, stream: StreamId) -> None:
    at_once(shard.unbilled.remove([stream]))


class PoolsDoor:
    """``RedisPools``."""

    def __init__(self, client: Link, queue_max: int = 0) -> None:
        self._link = client
        self._w = client.w

    @property
    def _shard(self) -> Shard:
        return self._w.fabric.of_pools()

    async def _call(
        self, name: str, pool: str, step: Callable[[MemoryPool, float], T], timeout_s: float = COMMAND_TIMEOUT_S
    ) -> T:
        shard = self._shard

        def run() -> T:
            state = shard.pool(pool)
            result = step(state, self._w.now_ms)
            for replica in list(shard.blocked):
                if state.inboxes.get(ReplicaId(replica)) or replica in state.law.calls:
                    shard.wake(replica)
            return result

        return await self._link.call(name, shard, run, timeout_s)

    async def report(
        self,
        info: ReplicaInfo,
        *,
        ttl_s: float | None,
        ended: Sequence[StreamId] = (),
        running: Mapping[StreamId, str] | None = None,
    ) -> LeaseReport:
        ended = list(ended)
        timeout_s = COMMAND_TIMEOUT_S if ttl_s is None else 0.0
        return await self._call(
            "report", info.pool, lambda p, now: p.report(info, now, ttl_s, ended, running), timeout_s
        )

    async def pools(self) -> list[str]:
        shard = self._shard
        return await self._link.call(
            "pools",
            shard,
            lambda: sorted(name for name, p in shard.pools.items() if p.leases or len(p.law.queue)),
        )

    async def replicas(self, pool: str) -> list[ReplicaInfo]:
        found = await self._call("replicas", pool, lambda p, now: p.replicas(now))
        self._w.witness.lists(self._link.process, [info.replica for info in found])
        return found

    async def place(
        self,
        pool: str,
        work: Work,
        candidates: Sequence[Candidate],
        *,
        wait_s: float,
        jitter: float,
        instead: ReplicaId | None = None,
        terms: OverloadTerms = NO_OVERLOAD_TERMS,
    ) -> Placed | Queued | Refused:
        stream, unheard = work.request.stream, self._w.witness.unheard
        if instead is None:
            unheard[stream] = self._link.process

        def step(p: MemoryPool, now: float) -> Placed | Queued | Refused:
            unheard.pop(stream, None)
            return p.place(work, candidates, now, wait_s, jitter, instead, terms)

        try:
            return await self._call("place", pool, step)
        finally:  # who lives to see that no pool has heard is the one to say so
            unheard.pop(stream, None)

    async def remove_queued(self, pool: str, streams: Sequence[StreamId]) -> int:
        return await self._call("leave", pool, lambda p, _: p.remove_queued(streams))

    async def queue_positions(self, pool: str, streams: Sequence[StreamId]) -> tuple[int, list[int]]:
        return await self._call("line", pool, lambda p, _: p.queue_positions(streams))

    async def waiting(self, pool: str, *, overdue: bool = False) -> list[StreamId]:
        return await self._call("waiting", pool, lambda p, now: p.waiting(now, overdue=overdue))

    async def holder(self, pool: str, stream: StreamId) -> ReplicaId | Literal["queue"] | None:
        return await self._call("where", pool, lambda p, _: p.holder(stream))

    async def work(self, pool: str, stream: StreamId) -> Work | None:
        return await self._call("work", pool, lambda p, _: p.work(stream))

    async def restore(self, pool: str, replica: ReplicaId, work: Work) -> None:
        await self._call("restore", pool, lambda p, now: p.restore(replica, work))

    async def expired(self, pool: str) -> list[ReplicaId]:
        return await self._call("expired", pool, lambda p, now: p.expired(now))

    async def in_flight(self, pool: str, replica: ReplicaId) -> list[StreamId]:
        return await self._call("in_flight", pool, lambda p, _: p.in_flight(replica))

    async def remove_in_flight(self, pool: str, replica: ReplicaId, streams: Sequence[StreamId]) -> None:
        await self._call("drop", pool, lambda p, _: p.remove_in_flight(replica, streams))

    async def retire(self, pool: str, replica: ReplicaId, *, leaving: bool = False) -> bool:
        return await self._call("retire", pool, lambda p, now: p.retire(replica, now, leaving=leaving))

    async def claim_recovery(self, pool: str, replica: ReplicaId, ttl_s: float, nonce: str) -> bool:
        return await self._call("claim", pool, lambda p, now: p.claim_recovery(replica, now, ttl_s, nonce))

    async def changes(self, pool: str, since: int, blocks_after: str) -> LeaseChanges:
        found, live = await self._call(
            "changes", pool, lambda p, now: (p.changes(since, blocks_after, now), p.replicas(now))
        )
        self._w.witness.lists(self._link.process, [info.replica for info in live])  # the changes add up to these
        return found

    async def put_block_change(self, pool: str, replica: ReplicaId, change: BlockChange) -> None:
        await self._call("put_block_change", pool, lambda p, _: p.put_block_change(replica, change))

    async def put_prefix(self, pool: str, replica: ReplicaId, summary: bytes) -> None:
        await self._call("put_prefix", pool, lambda p, _: p.prefixes.update({replica: summary}))

    async def prefix(self, pool: str, replica: ReplicaId) -> bytes:
        return await self._call("prefix", pool, lambda p, _: p.prefixes.get(replica, b""))


class InboxDoor:
    """``Inbox``."""

    def __init__(self, client: Link, pool: str, replica: ReplicaId) -> None:
        self._link = client
        self._pool = pool
        self._replica = replica

    async def read(self, block_s: float, done: Sequence[tuple[str, StreamId]] = ()) -> Inbound:
        shard = self._link.w.fabric.of_pools()
        if done:
            await self._link.call(
                "took", shard, lambda: shard.pool(self._pool).done(self._replica, done), dedicated=True
            )

        def step() -> list[Inbound]:
            found = shard.pool(self._pool).read(self._replica)
            return [found] if found.arrivals or found.called else []

        found = await self._link.blocking(shard, self._replica, step, block_s)
        return found[0] if found else Inbound([])

    def close(self) -> None:
        pass


class IndexDoor:
    """``RedisIndex``."""

    def __init__(self, client: Link) -> None:
        self._link = client

    async def claim(self, tenant: TenantId, key: str, stream: StreamId, fingerprint: str) -> tuple[StreamId, str]:
        shard = self._link.w.fabric.of_pools()
        held = await self._link.call("claim_key", shard, lambda: shard.keys.setdefault(key, f"{stream} {fingerprint}"))
        owner, _, print_ = held.partition(" ")
        return StreamId(owner), print_

    async def is_claimed(self, tenant: TenantId, key: str) -> bool:
        shard = self._link.w.fabric.of_pools()
        return await self._link.call("read_key", shard, lambda: key in shard.keys)

    async def release(self, tenant: TenantId, key: str, stream: StreamId) -> None:
        shard = self._link.w.fabric.of_pools()

        def step() -> None:
            if shard.keys.get(key, "").startswith(f"{stream} "):
                del shard.keys[key]

        await self._link.call("release_key", shard, step)


class SubscriberDoor:
    """``Subscriber``: one subscription to each shard, made again when it is lost."""

    def __init__(
        self,
        client: Link,
        channels: Mapping[str, int],
        on_message: Callable[[bytes], None],
        on_subscribed: Callable[[list[str]], None],
    ) -> None:
        self._link = client
        self._w = client.w
        self._names = list(channels)
        self._peer = self._names[0].partition(">")[2]
        self._on_message = on_message
        self._on_subscribed = on_subscribed
        self._ready = asyncio.Event()
        self._lost = asyncio.Event()
        self._blocked_until = 0.0
        client.subscriber = self

    def cut(self, for_s: float) -> None:
        """The connections end, and no new one comes about for a while."""
        self._blocked_until = self._w.loop.now + for_s
        for shard in self._w.fabric.shards:
            shard.listening.pop(self._peer, None)
        self.wake()

    def wake(self) -> None:
        """Some connection has ended."""
        self._w.loop.at(0.0, self._link.process, self._lost.set)

    def _subscribed(self, shard: Shard) -> bool:
        return shard.listening.get(self._peer, (-1,))[0] == shard.generation

    @property
    def healthy(self) -> bool:
        return all(map(self._subscribed, self._w.fabric.shards))

    async def wait_ready(self) -> None:
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await self._ready.wait()
        except TimeoutError:
            raise FabricUnavailable("no subscription") from None

    async def run(self) -> None:
        w = self._w
        while True:
            for shard in w.fabric.shards:
                if not self._subscribed(shard):
                    await asyncio.sleep(w.random.uniform(0.0, 0.2) if self._ready.is_set() else 0.001)
                    if shard.up and w.loop.now >= self._blocked_until and not self._link.stalled:
                        shard.listening[self._peer] = (shard.generation, self._on_message, self._link.process)
                        mine = (k for k in range(len(self._names)) if w.fabric.of_partition(k) is shard)
                        self._on_subscribed([self._names[k] for k in mine])
            if self.healthy:
                self._ready.set()
                self._lost.clear()
                await self._lost.wait()
            await asyncio.sleep(0.05)
