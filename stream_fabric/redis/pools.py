"""Pools in Redis: replica leases, placement, the queue, inboxes. A pool's keys share one slot, ``{pool:<name>}``."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from stream_fabric.errors import FabricError
from stream_fabric.limits import PIN_S, QUEUE_MAX, REQUEST_BYTES_MAX, TENANT_REQUEST_BYTES_MAX
from stream_fabric.pool import placement
from stream_fabric.pool.lease_changes import BLOCK_CHANGES_MAX, BlockChange, LeaseChanges
from stream_fabric.pool.overload import MISS, NO_OVERLOAD_TERMS, SPAN, UNDER_SHARE, OverloadTerms
from stream_fabric.pool.placement import Barred, Placed, Queued, Reason, Refused, Scored, lacks_kv
from stream_fabric.pool.records import (
    BLOCK_CHANGES_KEPT_S,
    PREFIX_TTL_S,
    STATE_REQUESTED,
    Candidate,
    DemandTotals,
    DesiredState,
    LeaseReport,
    OverloadTotals,
    ReplicaInfo,
    SlotUse,
    TierQueue,
    Work,
)
from stream_fabric.ports import Pools
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.scripts import script
from stream_fabric.redis.skipped import SkippedRecords
from stream_fabric.redis.topology import slot_of
from stream_fabric.redis.wire import Arg
from stream_fabric.stream.ids import ReplicaId, StreamId

log = logging.getLogger(__name__)

_POOLS = "sg:{pools}"
_SCORED = struct.Struct("<dIIdB")
_SEAT = struct.Struct("<dBIIIdddd")
_BARRED: tuple[Barred, ...] = ("", "dead", "full", "over", "kv")
_REFUSED: tuple[Literal["full", "shed", "elsewhere", "crowded", "bytes", "tenant_bytes", "busy"], ...] = (
    "full", "shed", "elsewhere", "crowded", "bytes", "tenant_bytes", "busy"
)  # fmt: skip
"""From the script's code 2."""
QUEUE_SAMPLE_MAX = 256
_REGISTER_EVERY_S = 5.0
"""A pool is registered when a replica joins, and again after this time: the list of pools may be lost alone."""
_REGISTER_WAIT_S = 0.5
UNIT = "\x1f"
REGION = "\x1b"
"""Begins a region in the list of a replica's models, and among the regions that a request is bound to."""
PREFIX_HASH_BYTES = 4

_work_encoder = msgspec.json.Encoder()
_work_decoder = msgspec.json.Decoder(Work)
_info_decoder = msgspec.json.Decoder(ReplicaInfo)


def pool_prefix(pool: str) -> str:
    """Prefix of the Redis keys of a pool."""
    return f"sg:{{pool:{pool}}}:"


def _region_mark(region: str) -> tuple[str, ...]:
    """Return how the scripts know a replica's region; nothing for none, or for a name that no plan can have."""
    return (REGION + region,) if region and region.isprintable() else ()


def pool_slot(pool: str) -> int:
    """Cluster slot of a pool's keys."""
    return slot_of(f"pool:{pool}")


class _PoolList:
    """The list of all pools. It is on a shard of its own, which may be away while those of the pools answer."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._due_at: dict[str, float] = {}
        self._adding: dict[str, asyncio.Task[None]] = {}

    async def add(self, pool: str) -> None:
        await script("pool_register")(self._client, slot_of("pools"), [_POOLS], [pool])

    async def keep(self, pool: str, *, joins: bool) -> None:
        """Add the pool if it is due, and wait for that ``_REGISTER_WAIT_S`` at most: a lease must not wait for it."""
        is_due = joins or asyncio.get_running_loop().time() >= self._due_at.get(pool, 0.0)
        if is_due and pool not in self._adding:
            self._adding[pool] = asyncio.create_task(self._try_to_add(pool))
            await asyncio.wait({self._adding[pool]}, timeout=_REGISTER_WAIT_S)

    async def _try_to_add(self, pool: str) -> None:
        try:
            await self.add(pool)
            self._due_at[pool] = asyncio.get_running_loop().time() + _REGISTER_EVERY_S
        except FabricError as error:
            log.warning("pool not added to the list of pools, retrying: pool=%s error=%s", pool, error)
        finally:
            del self._adding[pool]


class RedisPools(Pools):
    """``Pools`` in Redis: each decision is one script, so it is exact for any number of gateways."""

    def __init__(
        self,
        client: RedisClient,
        queue_max: int = QUEUE_MAX,
        on_skip: Callable[[str], None] | None = None,
        *,
        bytes_max: int = REQUEST_BYTES_MAX,
        tenant_bytes_max: int = TENANT_REQUEST_BYTES_MAX,
    ) -> None:
        """Make the port; ``on_skip`` is called with the kind of each record that cannot be decoded."""
        self._client = client
        self._queue_max = queue_max
        self._bytes_max = bytes_max
        self._tenant_bytes_max = tenant_bytes_max
        self._skipped = SkippedRecords(on_skip)
        self._list = _PoolList(client)

    async def report(
        self,
        info: ReplicaInfo,
        *,
        ttl_s: float | None,
        ended: Sequence[StreamId] = (),
        running: Mapping[StreamId, str] | None = None,
    ) -> LeaseReport:
        slot = info.slot()
        args: list[Arg] = [
            info.replica,
            "" if ttl_s is None else int(ttl_s * 1000),
            int(slot.ready),
            slot.slots,
            slot.room,
            slot.prefill_ms,
            slot.decode_ms,
            slot.prefill_per_s,
            slot.decode_per_s,
            UNIT.join((*info.models, *_region_mark(info.region))),
            b"" if ttl_s is None else msgspec.json.encode(info),
            PIN_S * 1000,
            info.generation,
            slot.kv_free,
            slot.yieldable,
            len(ended),
            *ended,
        ]
        for stream, session in (running or {}).items():
            args += (stream, session)
        desired, pulled, waiting, asker, joins, yield_to, lost = await script("report")(
            self._client,
            pool_slot(info.pool),
            [pool_prefix(info.pool)],
            args,
            timeout_s=None if ttl_s is None else 0.0,
        )
        if ttl_s is not None:
            await self._list.keep(info.pool, joins=bool(joins))
        yields = None if yield_to < 0 else yield_to
        unknown = tuple(StreamId(name.decode()) for name in lost)
        return LeaseReport(desired.decode(), pulled, waiting, asker.decode(), yields, unknown)

    async def pools(self, timeout_s: float | None = None) -> list[str]:
        found = await self._client.execute(slot_of("pools"), "SMEMBERS", _POOLS, timeout_s=timeout_s)
        return sorted(name.decode() for name in found)

    async def replicas(self, pool: str) -> list[ReplicaInfo]:
        slot, prefix = pool_slot(pool), pool_prefix(pool)
        dead = set(await script("expired")(self._client, slot, [prefix + "leases"], []))
        alive = [r for r in await self._client.execute(slot, "ZRANGE", prefix + "leases", 0, -1) if r not in dead]
        if not alive:
            return []
        infos = await self._client.execute(slot, "MGET", *(f"{prefix}{replica.decode()}:info" for replica in alive))
        decoded = (self._decode_info(replica.decode(), info) for replica, info in zip(alive, infos, strict=True))
        return [info for info in decoded if info is not None]

    def _decode_info(self, replica: str, record: bytes | None) -> ReplicaInfo | None:
        if not record:
            return None
        try:
            return _info_decoder.decode(record)
        except msgspec.MsgspecError as error:
            self._skipped.add("replica", replica, error)
            return None

    async def changes(self, pool: str, since: int, blocks_after: str) -> LeaseChanges:
        at, whole, leases, streams, changed, gone, expired, blocks_at, blocks = await script("lease_changes")(
            self._client, pool_slot(pool), [pool_prefix(pool)], [since, blocks_after, BLOCK_CHANGES_MAX]
        )
        names = [ReplicaId(name.decode()) for name in changed[::2]]
        return LeaseChanges(
            at,
            bool(whole),
            leases,
            streams,
            [(name, self._decode_info(name, info)) for name, info in zip(names, changed[1::2], strict=True)],
            [ReplicaId(name.decode()) for name in gone],
            [ReplicaId(name.decode()) for name in expired],
            blocks_at.decode(),
            list(self._decode_blocks(blocks)),
        )

    def _decode_blocks(self, pairs: Sequence[bytes]) -> Iterator[tuple[ReplicaId, BlockChange]]:
        for name, record in zip(pairs[::2], pairs[1::2], strict=True):
            try:
                yield ReplicaId(name.decode()), BlockChange.decode(record)
            except ValueError as error:
                self._skipped.add("blocks", name.decode(), error)

    async def slot_uses(self, pool: str) -> list[SlotUse]:
        slot = pool_slot(pool)
        time, board = await asyncio.gather(
            self._client.execute(slot, "TIME"), self._client.execute(slot, "HGETALL", pool_prefix(pool) + "board")
        )
        now_ms = int(time[0]) * 1000 + int(time[1]) / 1000
        found = []
        for replica, packed in board.items():
            try:
                expires_ms, _, _, _, in_flight, *_ = _SEAT.unpack_from(packed)
            except struct.error as error:
                self._skipped.add("slot", replica.decode(), error)
                continue
            found.append(SlotUse(ReplicaId(replica.decode()), (expires_ms - now_ms) / 1000, in_flight))
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
        args: list[Arg] = [
            work.request.stream,
            _work_encoder.encode(work),
            work.tenant,
            work.rank,
            work.request.model,
            work.session,
            work.prompt_tokens,
            work.output_tokens,
            int(wait_s * 1000),
            jitter,
            self._queue_max,
            PIN_S * 1000,
            instead or "",
            placement.BOUND,
            placement.SPILL_AT,
            placement.DECODE_WEIGHT,
            placement.REPEAT_WEIGHT,
            terms.packed(),
            SPAN,
            UNDER_SHARE,
            MISS,
            self._bytes_max,
            self._tenant_bytes_max,
            "".join(f"\x1c{replica}\x1c" for replica in work.tried),
            REGION + REGION.join((*work.regions, "")) if work.regions else "",
            work.share,
        ]
        for candidate in candidates:
            args += candidate
        code, value, reason, packed, *expected_ms = await script("place")(
            self._client, pool_slot(pool), [pool_prefix(pool)], args
        )
        if code == 1 and not candidates:  # a pool that never had a replica has a queue to sweep
            await self._list.add(pool)
        scored = tuple(
            Scored(candidate.replica, score_ms, matched, in_flight, load_ms, _BARRED[barred])
            for candidate, (score_ms, matched, in_flight, load_ms, barred) in zip(
                candidates, _SCORED.iter_unpack(packed), strict=False
            )
        )
        if code >= 2:
            return Refused(value, _REFUSED[code - 2], float(reason or 0), lacks_kv(scored))
        if code == 1:
            return Queued(value, scored)
        why: Reason = reason.decode()
        return Placed(ReplicaId(value.decode()), why, scored, *map(float, expected_ms))

    async def remove_queued(self, pool: str, streams: Sequence[StreamId]) -> int:
        left: int = await script("queue_remove")(self._client, pool_slot(pool), [pool_prefix(pool)], streams)
        await self._forget_unused(pool)
        return left

    async def queue_positions(self, pool: str, streams: Sequence[StreamId]) -> tuple[int, list[int]]:
        waiting, *positions = await script("queue_positions")(
            self._client, pool_slot(pool), [pool_prefix(pool)], streams
        )
        return waiting, positions

    async def tier_queues(self, pool: str) -> list[TierQueue]:
        reply = await script("tier_queues")(self._client, pool_slot(pool), [pool_prefix(pool)], [QUEUE_SAMPLE_MAX])
        return [
            TierQueue(depth, oldest_us / 1e6, prompt, output)
            for depth, oldest_us, prompt, output in zip(*(iter(reply),) * 4, strict=True)
        ]

    async def demand_totals(self, pool: str) -> DemandTotals:
        reply = await self._client.execute(pool_slot(pool), "HMGET", pool_prefix(pool) + "stat", "n", "np", "no")
        return DemandTotals(*(int(figure or 0) for figure in reply))

    async def overload_totals(self, pool: str) -> OverloadTotals:
        tiers = range(len(placement.TIERS))
        fields = [*(f"shed{tier}" for tier in tiers), *(f"n{tier}" for tier in tiers), "sent", "back", "yielded"]
        reply = await self._client.execute(pool_slot(pool), "HMGET", pool_prefix(pool) + "stat", *fields)
        *by_tier, sent, back, yielded_to = (int(figure or 0) for figure in reply)
        rejected, asked = tuple(by_tier[: len(tiers)]), tuple(by_tier[len(tiers) :])
        return OverloadTotals(rejected, max(sent - back, 0), asked, yielded_to)

    async def waiting(self, pool: str, *, overdue: bool = False) -> list[StreamId]:
        now_ms = "+inf"
        if overdue:
            seconds, micros = await self._client.execute(pool_slot(pool), "TIME")
            now_ms = str(int(seconds) * 1000 + int(micros) // 1000)
        reply = await self._client.execute(pool_slot(pool), "ZRANGEBYSCORE", pool_prefix(pool) + "late", "-inf", now_ms)
        return [StreamId(item.decode()) for item in reply]

    async def holder(self, pool: str, stream: StreamId) -> ReplicaId | Literal["queue"] | None:
        reply = await self._client.execute(pool_slot(pool), "HGET", pool_prefix(pool) + "at", stream)
        return None if reply is None else ReplicaId(reply.decode()) if reply else "queue"

    async def work(self, pool: str, stream: StreamId) -> Work | None:
        reply = await self._client.execute(pool_slot(pool), "HGET", pool_prefix(pool) + "work", stream)
        return None if reply is None else _work_decoder.decode(reply)

    async def restore(self, pool: str, replica: ReplicaId, work: Work) -> None:
        args = (replica, work.request.stream, _work_encoder.encode(work), work.tenant)
        await script("work_restore")(self._client, pool_slot(pool), [pool_prefix(pool)], args)

    async def expired(self, pool: str) -> list[ReplicaId]:
        reply = await script("expired")(self._client, pool_slot(pool), [pool_prefix(pool) + "leases"], [])
        return [ReplicaId(item.decode()) for item in reply]

    async def in_flight(self, pool: str, replica: ReplicaId) -> list[StreamId]:
        reply = await self._client.execute(pool_slot(pool), "HKEYS", f"{pool_prefix(pool)}{replica}:flight")
        return [StreamId(item.decode()) for item in reply]

    async def remove_in_flight(self, pool: str, replica: ReplicaId, streams: Sequence[StreamId]) -> None:
        if streams:
            await script("flight_remove")(self._client, pool_slot(pool), [pool_prefix(pool)], [replica, *streams])

    async def retire(self, pool: str, replica: ReplicaId, *, leaving: bool = False) -> bool:
        reply = await script("retire")(self._client, pool_slot(pool), [pool_prefix(pool)], [replica, int(leaving)])
        await self._forget_unused(pool)
        return bool(reply)

    async def _forget_unused(self, pool: str) -> None:
        """Remove a pool without replicas and without a queue from the list of pools."""
        if not await self._is_used(pool):
            await self._client.execute(slot_of("pools"), "SREM", _POOLS, pool)
            if await self._is_used(pool):  # a replica has joined meanwhile, perhaps before the removal
                await self._list.add(pool)

    async def _is_used(self, pool: str) -> bool:
        """True if the pool has a replica or a queue."""
        prefix = pool_prefix(pool)
        return bool(await self._client.execute(pool_slot(pool), "EXISTS", prefix + "leases", prefix + "late"))

    async def claim_recovery(self, pool: str, replica: ReplicaId, ttl_s: float, nonce: str) -> bool:
        key = f"{pool_prefix(pool)}{replica}:rescue"
        return bool(await script("recovery_claim")(self._client, pool_slot(pool), [key], [int(ttl_s * 1000), nonce]))

    async def request_state(
        self, pool: str, replica: ReplicaId, state: DesiredState, asked_by: str = "operator"
    ) -> bool:
        keys = [pool_prefix(pool) + "desired", pool_prefix(pool) + "asker"]
        told = await script("state_request")(self._client, pool_slot(pool), keys, [replica, state, asked_by])
        # The message makes the agent report at once; without it the agent hears at its next renewal
        await self._client.execute(slot_of("p0"), self._client.publish, f"sg:{{p0}}:>{replica}", STATE_REQUESTED)
        return bool(told)

    async def put_prefix(self, pool: str, replica: ReplicaId, summary: bytes) -> None:
        key = f"{pool_prefix(pool)}{replica}:prefix"
        await self._client.execute(pool_slot(pool), "SET", key, summary, "PX", int(PREFIX_TTL_S * 1000))

    async def put_block_change(self, pool: str, replica: ReplicaId, change: BlockChange) -> None:
        key, kept_ms = pool_prefix(pool) + "blocks", int(BLOCK_CHANGES_KEPT_S * 1000)
        await script("blocks_append")(self._client, pool_slot(pool), [key], [replica, change.encode(), kept_ms])

    async def prefix(self, pool: str, replica: ReplicaId) -> bytes:
        reply = await self._client.execute(pool_slot(pool), "GET", f"{pool_prefix(pool)}{replica}:prefix")
        summary = bytes(reply or b"")
        if len(summary) % PREFIX_HASH_BYTES:
            self._skipped.add("prefix", replica, ValueError(f"{len(summary)} bytes"))
            return b""
        return summary
