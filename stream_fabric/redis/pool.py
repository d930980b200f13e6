"""Pools in Redis: replica leases, placement, the queue, inboxes. A pool's keys share one slot, ``{pool:<name>}``."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from stream_fabric import placement
from stream_fabric.cursor import Epoch
from stream_fabric.events import Prices
from stream_fabric.ids import ReplicaId, StreamId, TenantId
from stream_fabric.limits import PIN_S, QUEUE_MAX
from stream_fabric.placement import Placed, Queued, Reason, Refused, ReplicaState, Scored, Seat
from stream_fabric.ports import EngineLoad, EngineRequest
from stream_fabric.redis.client import RedisClient, slot_of
from stream_fabric.redis.scripts import script
from stream_fabric.redis.wire import Arg, Connection, ConnectionLost, ReplyError
from stream_fabric.surge import MISS, NO_SURGE, SPAN, UNDER_SHARE, Surge

_POOLS = "sg:{pools}"
_SCORED = struct.Struct("<dIIdB")
_SEAT = struct.Struct("<dBIIIdddd")
_BARRED: tuple[Literal["", "dead", "full", "over"], ...] = ("", "dead", "full", "over")
_REFUSED: dict[int, Literal["shed", "elsewhere", "crowded"]] = {3: "shed", 4: "elsewhere", 5: "crowded"}
PREFIX_TTL_S = 60.0
LINE_LOOKED_AT = 256
UNIT = "\x1f"
Wish = Literal["draining", "warm", "ready", "sleeping:1", "sleeping:2"]
"""What may be wanted of a replica; asleep at which level."""
DESIRE = b"desire"
"""An agent's doorbell: another state is wanted of it."""


class Work(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request on its way to a replica. With it the producer can make the stream again after a total loss, and another
    replica can take it over."""

    request: EngineRequest
    epoch: str
    tenant: TenantId
    facts: bytes
    unwatched_s: float | None
    """Cancel so long after the last reader left; None: never."""
    tier: int = 1
    session: str = ""
    """Names the session within the pool; empty: none."""
    prompt_tokens: int = 1
    """As the gateway estimates them; so ``output_tokens``, as many as usual, within its limit."""
    output_tokens: int = 1
    output_limit: int = 1 << 31
    """The most it may make."""
    prefix: bytes = b""
    """The prompt's block hashes, 4 bytes each."""
    base: int = 0
    """The last frame before this producer's epoch: where it takes over."""
    attempt: int = 1
    """Producers the stream has had, this one counted."""
    prices: Prices | None = None
    """What its tokens cost, as it was when it was asked."""

    def parsed_epoch(self) -> Epoch:
        return Epoch.parse(self.epoch)


class ReplicaInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an agent says of itself at each renewal."""

    replica: ReplicaId
    pool: str
    engine: str
    models: tuple[str, ...]
    state: ReplicaState
    load: EngineLoad
    simulated: bool = False
    room: int = 1
    """Streams in flight before placement goes elsewhere."""
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    prefill_per_s: float = 1.0
    decode_per_s: float = 1.0
    """Measured: prompt tokens it computes, and output tokens its full batch makes, in a second."""
    tokens_per_s: float = 0.0
    """Output tokens of the last seconds."""
    output_tokens_mean: float = 256.0
    """How long answers have been lately."""
    bytes_per_token: float = 4.0
    prefix_version: int = 0
    prefix_blocks: int = 0
    queue_p99_ms: float = 0.0
    """From a request's arrival at the agent to its first token's computation, 99th percentile of the last minute; or
    for how long no first token has come though one should have, when that is longer."""
    region: str = ""
    hardware: str = ""
    revision: str = ""
    """Of what it was deployed from; replicas of several at once are a rollout."""
    ttft_counts: tuple[int, ...] = ()
    """First tokens of the last minute by the time since the request was placed: ``metrics.TTFT_BUCKETS_S``, and one
    more for all above. Tier batch is not counted."""
    adapters: tuple[str, ...] = ()
    """Of its models, those that are LoRA adapters."""
    artifact: str = ""
    """Hash of what its base model was loaded from; empty: its engine does not tell."""
    wake_s: float = 0.0
    """How long its engine took to wake, the last time; 0: it has not slept."""
    sleepless: str = ""
    """Why its engine does not sleep, though it was to."""

    def seat(self) -> Seat:
        return Seat(
            0.0,
            self.state == "ready",
            max(self.load.slots, 1),
            self.room,
            0,
            self.prefill_ms,
            self.decode_ms,
            self.prefill_per_s,
            self.decode_per_s,
        )


class Report(NamedTuple):
    desired: str
    """The state that somebody asked for; empty: none."""
    pulled: int
    """Requests that left the queue for this replica's inbox."""
    waiting: int
    """Requests that still wait in the pool's queue."""
    asked_by: str = ""
    """Who asked for the state."""


class Line(NamedTuple):
    """One tier's line of a pool."""

    depth: int
    oldest_s: float
    """For how long the oldest has waited, of the first ``LINE_LOOKED_AT``."""
    prompt_tokens: int
    """That they ask for; of a long line, as the first of it tell."""
    output_tokens: int


class Arrived(NamedTuple):
    """What has been asked of a pool, also of what was refused; it only grows until the pool is lost."""

    requests: float
    prompt_tokens: float
    """Of them those that no replica held."""
    output_tokens: float
    """As the gateways estimated them."""


class Surged(NamedTuple):
    """What became of requests that came faster than the pool begins them; it only grows until the pool is lost."""

    shed: tuple[int, ...]
    """Refused, by tier."""
    shifted: int
    """Placed in another pool."""


class Held(msgspec.Struct, frozen=True, gc=False):
    """A replica's seat in its pool."""

    replica: ReplicaId
    left_s: float
    """Until its lease ends; below 0: it has ended, and not all of its streams have been looked after."""
    in_flight: int


class Candidate(NamedTuple):
    replica: ReplicaId
    matched_tokens: int
    """Tokens of the prompt that it is believed to hold."""


_work_encoder = msgspec.json.Encoder()
_work_decoder = msgspec.json.Decoder(Work)
_info_decoder = msgspec.json.Decoder(ReplicaInfo)


def _prefix(pool: str) -> str:
    return f"sg:{{pool:{pool}}}:"


def _slot(pool: str) -> int:
    return slot_of(f"pool:{pool}")


class RedisPools:
    """Every process's view of the pools."""

    def __init__(self, client: RedisClient, queue_max: int = QUEUE_MAX) -> None:
        self._client = client
        self._queue_max = queue_max

    async def report(
        self,
        info: ReplicaInfo,
        *,
        ttl_s: float | None,
        ended: Sequence[StreamId] = (),
        running: Mapping[StreamId, str] | None = None,
    ) -> Report:
        """Say which streams have ended and what is still to do; with ``ttl_s`` also take or renew the lease, when
        ``running`` (stream → session) is all that the replica runs. Requests may leave the queue for its inbox.

        A renewal is sent once: sent again, its list would be out of date. Raises FabricUnavailable."""
        seat = info.seat()
        args: list[Arg] = [
            info.replica,
            "" if ttl_s is None else int(ttl_s * 1000),
            int(seat.ready),
            seat.slots,
            seat.room,
            seat.prefill_ms,
            seat.decode_ms,
            seat.prefill_per_s,
            seat.decode_per_s,
            UNIT.join(info.models),
            b"" if ttl_s is None else msgspec.json.encode(info),
            PIN_S * 1000,
            len(ended),
            *ended,
        ]
        for stream, session in (running or {}).items():
            args += (stream, session)
        desired, pulled, waiting, asker = await script("report")(
            self._client,
            _slot(info.pool),
            [_prefix(info.pool)],
            args,
            timeout_s=None if ttl_s is None else 0.0,
        )
        if ttl_s is not None:
            await self._client.execute(slot_of("pools"), "SADD", _POOLS, info.pool)
        return Report(desired.decode(), pulled, waiting, asker.decode())

    async def pools(self, timeout_s: float | None = None) -> list[str]:
        """``timeout_s``: for how long to try again, in place of the client's usual time."""
        found = await self._client.execute(slot_of("pools"), "SMEMBERS", _POOLS, timeout_s=timeout_s)
        return sorted(name.decode() for name in found)

    async def replicas(self, pool: str) -> list[ReplicaInfo]:
        """The replicas whose lease is alive."""
        slot, prefix = _slot(pool), _prefix(pool)
        dead = set(await script("expired")(self._client, slot, [prefix + "leases"], []))
        alive = [r for r in await self._client.execute(slot, "ZRANGE", prefix + "leases", 0, -1) if r not in dead]
        if not alive:
            return []
        infos = await self._client.execute(slot, "MGET", *(f"{prefix}{replica.decode()}:info" for replica in alive))
        return [_info_decoder.decode(info) for info in infos if info]

    async def seats(self, pool: str) -> list[Held]:
        """Who sits in the pool, the dead too. No more than two short commands, however many there are."""
        slot = _slot(pool)
        time, board = await asyncio.gather(
            self._client.execute(slot, "TIME"), self._client.execute(slot, "HGETALL", _prefix(pool) + "board")
        )
        now_ms = int(time[0]) * 1000 + int(time[1]) / 1000
        found = []
        for replica, packed in board.items():
            expires_ms, _, _, _, in_flight, *_ = _SEAT.unpack(packed)
            found.append(Held(ReplicaId(replica.decode()), (expires_ms - now_ms) / 1000, in_flight))
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
        surge: Surge = NO_SURGE,
    ) -> Placed | Queued | Refused:
        """``PoolState.place`` for a request that gives up waiting after ``wait_s``."""
        args: list[Arg] = [
            work.request.stream,
            _work_encoder.encode(work),
            work.tenant,
            work.tier,
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
            surge.packed(),
            SPAN,
            UNDER_SHARE,
            MISS,
        ]
        for candidate in candidates:
            args += candidate
        code, value, reason, packed = await script("place")(self._client, _slot(pool), [_prefix(pool)], args)
        if code == 2:
            return Refused(value)
        if code > 2:
            return Refused(value, _REFUSED[code], float(reason))
        if code == 1 and not candidates:  # it may never have had a replica, and who waits in it is to be looked after
            await self._client.execute(slot_of("pools"), "SADD", _POOLS, pool)
        scored = tuple(
            Scored(candidate.replica, score_ms, matched, in_flight, load_ms, _BARRED[barred])
            for candidate, (score_ms, matched, in_flight, load_ms, barred) in zip(
                candidates, _SCORED.iter_unpack(packed), strict=False
            )
        )
        if code == 1:
            return Queued(value, scored)
        why: Reason = reason.decode()
        return Placed(ReplicaId(value.decode()), why, scored)

    async def leave(self, pool: str, streams: Sequence[StreamId]) -> int:
        """Take streams out of the queue; how many were in it."""
        left: int = await script("leave")(self._client, _slot(pool), [_prefix(pool)], streams)
        await self._forget_unused(pool)
        return left

    async def line(self, pool: str, streams: Sequence[StreamId]) -> tuple[int, list[int]]:
        """How many wait, and where these streams stand, from 1; 0: not in line."""
        waiting, *positions = await script("line")(self._client, _slot(pool), [_prefix(pool)], streams)
        return waiting, positions

    async def lines(self, pool: str) -> list[Line]:
        """Of each tier, how long its line is."""
        reply = await script("lines")(self._client, _slot(pool), [_prefix(pool)], [LINE_LOOKED_AT])
        return [
            Line(depth, oldest_us / 1e6, prompt, output)
            for depth, oldest_us, prompt, output in zip(*(iter(reply),) * 4, strict=True)
        ]

    async def arrived(self, pool: str) -> Arrived:
        reply = await self._client.execute(_slot(pool), "HMGET", _prefix(pool) + "stat", "n", "np", "no")
        return Arrived(*(int(figure or 0) for figure in reply))

    async def surged(self, pool: str) -> Surged:
        fields = [*(f"shed{tier}" for tier in range(len(placement.TIERS))), "sent", "back"]
        reply = await self._client.execute(_slot(pool), "HMGET", _prefix(pool) + "stat", *fields)
        *shed, sent, back = (int(figure or 0) for figure in reply)
        return Surged(tuple(shed), max(sent - back, 0))

    async def waiting(self, pool: str, *, overdue: bool = False) -> list[StreamId]:
        """Streams in the queue, or only those that have waited too long."""
        now_ms = "+inf"
        if overdue:
            seconds, micros = await self._client.execute(_slot(pool), "TIME")
            now_ms = str(int(seconds) * 1000 + int(micros) // 1000)
        reply = await self._client.execute(_slot(pool), "ZRANGEBYSCORE", _prefix(pool) + "late", "-inf", now_ms)
        return [StreamId(item.decode()) for item in reply]

    async def where(self, pool: str, stream: StreamId) -> ReplicaId | Literal["queue"] | None:
        """The replica that has the stream in flight, or the queue; None: nobody."""
        reply = await self._client.execute(_slot(pool), "HGET", _prefix(pool) + "at", stream)
        if reply is None:
            return None
        return ReplicaId(reply.decode()) if reply else "queue"

    async def work(self, pool: str, stream: StreamId) -> Work | None:
        """What a stream in flight or in the queue was asked to be. Raises msgspec.MsgspecError on another version's."""
        reply = await self._client.execute(_slot(pool), "HGET", _prefix(pool) + "work", stream)
        return None if reply is None else _work_decoder.decode(reply)

    async def expired(self, pool: str) -> list[ReplicaId]:
        reply = await script("expired")(self._client, _slot(pool), [_prefix(pool) + "leases"], [])
        return [ReplicaId(item.decode()) for item in reply]

    async def in_flight(self, pool: str, replica: ReplicaId) -> list[StreamId]:
        """The streams a replica was running or about to run when it last said so."""
        reply = await self._client.execute(_slot(pool), "HKEYS", f"{_prefix(pool)}{replica}:flight")
        return [StreamId(item.decode()) for item in reply]

    async def holds(self, pool: str, replica: ReplicaId, stream: StreamId) -> bool:
        """Whether the stream is on the replica's list, or was handed to it since it last said so."""
        return bool(await self._client.execute(_slot(pool), "HEXISTS", f"{_prefix(pool)}{replica}:flight", stream))

    async def drop(self, pool: str, replica: ReplicaId, streams: Sequence[StreamId]) -> None:
        """These streams of a replica need nobody any more."""
        if streams:
            await script("drop")(self._client, _slot(pool), [_prefix(pool)], [replica, *streams])

    async def retire(self, pool: str, replica: ReplicaId, *, leaving: bool = False) -> bool:
        """Forget a replica without streams in flight; unless ``leaving``, only if its lease is still dead."""
        reply = await script("retire")(self._client, _slot(pool), [_prefix(pool)], [replica, int(leaving)])
        await self._forget_unused(pool)
        return bool(reply)

    async def _forget_unused(self, pool: str) -> None:
        """Take a pool off the list that everybody looks through, once it has no replica and nobody waits in it."""
        if not await self._is_used(pool):
            await self._client.execute(slot_of("pools"), "SREM", _POOLS, pool)
            if await self._is_used(pool):  # a replica has come meanwhile, and may have been before us
                await self._client.execute(slot_of("pools"), "SADD", _POOLS, pool)

    async def _is_used(self, pool: str) -> bool:
        prefix = _prefix(pool)
        return bool(await self._client.execute(_slot(pool), "EXISTS", prefix + "leases", prefix + "late"))

    async def claim_rescue(self, pool: str, replica: ReplicaId, ttl_s: float) -> bool:
        """Whether this process is the one to look after a dead replica's streams, for so long."""
        key = f"{_prefix(pool)}{replica}:rescue"
        return await self._client.execute(_slot(pool), "SET", key, "1", "NX", "PX", int(ttl_s * 1000)) is not None

    async def desire(
        self,
        pool: str,
        replica: ReplicaId,
        state: Wish,
        asked_by: str = "operator",
    ) -> bool:
        """What the replica's agent hears at its next report; False: it has been told so already, or is to drain."""
        keys = [_prefix(pool) + "desired", _prefix(pool) + "asker"]
        told = await script("desire")(self._client, _slot(pool), keys, [replica, state, asked_by])
        # So that it asks at once; who does not hear the bell asks at its next renewal
        await self._client.execute(slot_of("p0"), self._client.publish, f"sg:{{p0}}:>{replica}", DESIRE)
        return bool(told)

    async def put_prefix(self, pool: str, replica: ReplicaId, summary: bytes) -> None:
        """Publish what a replica holds of prompts, for ``PREFIX_TTL_S``; ``ReplicaInfo.prefix_version`` tells of a new
        one."""
        key = f"{_prefix(pool)}{replica}:prefix"
        await self._client.execute(_slot(pool), "SET", key, summary, "PX", int(PREFIX_TTL_S * 1000))

    async def prefix(self, pool: str, replica: ReplicaId) -> bytes:
        reply = await self._client.execute(_slot(pool), "GET", f"{_prefix(pool)}{replica}:prefix")
        return bytes(reply or b"")


class Arrival(NamedTuple):
    """A request in an inbox."""

    entry: str
    stream: StreamId
    work: Work | None
    """None: it cannot be read, and is another version's."""
    waited_us: int
    """In the pool's queue."""
    handed_us: int
    """When the replica got it, on Redis's clock."""


class Inbox:
    """A replica's inbox, read on a connection of its own. An entry stays until ``done``."""

    def __init__(self, client: RedisClient, pool: str, replica: ReplicaId) -> None:
        self._client = client
        self._slot = _slot(pool)
        self._prefix = _prefix(pool)
        self._replica = replica
        self._key = f"{self._prefix}{replica}:inbox"
        self._connection: Connection | None = None

    async def read(self, block_s: float) -> list[Arrival]:
        """Wait for requests: all that are there, none after ``block_s``.

        Raises ConnectionLost or ReplyError; the next call connects again.
        """
        if self._connection is None or self._connection.lost:
            self._connection = await self._client.dedicated(self._client.topology.address(self._slot))
        try:
            # From the beginning each time: what was handled is deleted, and a failover may turn ids back
            reply: Any = await self._connection.call(
                "XREAD", "COUNT", 256, "BLOCK", int(block_s * 1000), "STREAMS", self._key, "0"
            )
        except ReplyError as error:
            if error.code == "MOVED":
                await self._client.refresh()
            self.close()
            raise
        if not reply:
            return []
        ((_, entries),) = reply.items()
        return [_arrival(entry_id.decode(), fields) for entry_id, fields in entries]

    async def done(self, entries: Sequence[tuple[str, StreamId]]) -> None:
        """(entry id, stream) of what has been taken."""
        args = [part for entry in entries for part in entry]
        await script("took")(self._client, self._slot, [self._prefix], [self._replica, *args])

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _arrival(entry: str, fields: list[bytes]) -> Arrival:
    _, stream, _, payload, *rest = fields
    # A gateway of an earlier version does not say when
    waited_us, handed_us = map(int, rest[1].split()) if rest else (0, int(entry.partition("-")[0]) * 1000)
    return Arrival(entry, StreamId(stream.decode()), _decoded(payload), waited_us, handed_us)


def _decoded(payload: bytes) -> Work | None:
    try:
        return _work_decoder.decode(payload)
    except msgspec.MsgspecError:
        return None


__all__ = [
    "Candidate",
    "ConnectionLost",
    "Inbox",
    "Placed",
    "Queued",
    "RedisPools",
    "Refused",
    "ReplicaInfo",
    "ReplicaState",
    "ReplyError",
    "Report",
    "Work",
]
