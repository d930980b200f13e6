"""Pools in Redis: replica leases, placement, inboxes. All of a pool's keys share one slot, ``{pool:<name>}``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from stream_fabric.cursor import Epoch
from stream_fabric.ids import ReplicaId, StreamId, TenantId
from stream_fabric.ports import EngineLoad, EngineRequest
from stream_fabric.redis.client import RedisClient, slot_of
from stream_fabric.redis.scripts import script
from stream_fabric.redis.wire import Connection, ConnectionLost, ReplyError

_POOLS = "sg:{pools}"
ReplicaState = Literal["starting", "ready", "draining"]


class Work(msgspec.Struct, frozen=True):
    """A request on its way to a replica: with it the producer can make the stream again after a total loss."""

    request: EngineRequest
    epoch: str
    tenant: TenantId
    facts: bytes
    unwatched_s: float | None
    """Cancel so long after the last reader left; None: never."""

    def parsed_epoch(self) -> Epoch:
        return Epoch.parse(self.epoch)


class ReplicaInfo(msgspec.Struct, frozen=True):
    """What an agent says of itself at each renewal."""

    replica: ReplicaId
    pool: str
    engine: str
    models: tuple[str, ...]
    state: ReplicaState
    load: EngineLoad
    simulated: bool = False


_work_encoder = msgspec.json.Encoder()
_work_decoder = msgspec.json.Decoder(Work)


class Placed(msgspec.Struct, frozen=True):
    replica: ReplicaId
    in_flight: int
    slots: int


def _keys(pool: str, replica: str) -> list[str]:
    prefix = f"sg:{{pool:{pool}}}:{replica}:"
    return [prefix + "info", prefix + "flight", prefix + "inbox"]


def _leases(pool: str) -> str:
    return f"sg:{{pool:{pool}}}:leases"


def _slot(pool: str) -> int:
    return slot_of(f"pool:{pool}")


class RedisPools:
    """Every process's view of the pools."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def renew(self, info: ReplicaInfo, ttl_s: float, room: int, running: Sequence[StreamId]) -> None:
        """Take or renew the lease. ``room``: how many streams may be in flight before placement goes elsewhere."""
        slot = _slot(info.pool)
        await script("renew")(
            self._client,
            slot,
            [_leases(info.pool), *_keys(info.pool, info.replica)],
            [
                info.replica,
                int(ttl_s * 1000),
                info.state,
                max(info.load.slots, 1),
                room,
                msgspec.json.encode(info),
                *running,
            ],
            timeout_s=max(ttl_s / 3, 1.0),  # sent again for longer, its list would be out of date
        )
        await self._client.execute(slot_of("pools"), "SADD", _POOLS, info.pool)

    async def pools(self) -> list[str]:
        return sorted(name.decode() for name in await self._client.execute(slot_of("pools"), "SMEMBERS", _POOLS))

    async def replicas(self, pool: str) -> list[ReplicaInfo]:
        """The replicas whose lease is alive."""
        slot = _slot(pool)
        dead = set(await script("expired")(self._client, slot, [_leases(pool)], []))
        alive = [r for r in await self._client.execute(slot, "ZRANGE", _leases(pool), 0, -1) if r not in dead]
        infos = await asyncio.gather(
            *(self._client.execute(slot, "HGET", _keys(pool, replica.decode())[0], "info") for replica in alive)
        )
        return [msgspec.json.decode(info, type=ReplicaInfo) for info in infos if info]

    async def place(self, pool: str, work: Work, candidates: Sequence[ReplicaId]) -> Placed | Literal["full", "none"]:
        """Hand the request to the least loaded candidate with room."""
        keys = [_leases(pool)]
        for replica in candidates:
            keys += _keys(pool, replica)
        reply = await script("place")(
            self._client, _slot(pool), keys, [work.request.stream, _work_encoder.encode(work), *candidates]
        )
        if reply[0] == 0:
            return Placed(ReplicaId(reply[1].decode()), reply[2], reply[3])
        return "full" if reply[0] == 1 else "none"

    async def expired(self, pool: str) -> list[ReplicaId]:
        reply = await script("expired")(self._client, _slot(pool), [_leases(pool)], [])
        return [ReplicaId(item.decode()) for item in reply]

    async def in_flight(self, pool: str, replica: ReplicaId) -> list[StreamId]:
        """The streams a replica was running or about to run when it last said so."""
        reply = await self._client.execute(_slot(pool), "HKEYS", _keys(pool, replica)[1])
        return [StreamId(item.decode()) for item in reply]

    async def holds(self, pool: str, replica: ReplicaId, stream: StreamId) -> bool:
        """Whether the stream is on the replica's list, or was handed to it since it last said so."""
        return bool(await self._client.execute(_slot(pool), "HEXISTS", _keys(pool, replica)[1], stream))

    async def retire(self, pool: str, replica: ReplicaId, *, leaving: bool = False) -> None:
        """Forget a replica; unless ``leaving``, only if its lease is still dead."""
        await script("retire")(
            self._client, _slot(pool), [_leases(pool), *_keys(pool, replica)], [replica, int(leaving)]
        )


class Inbox:
    """A replica's inbox, read on a connection of its own. An entry stays until ``done``."""

    def __init__(self, client: RedisClient, pool: str, replica: ReplicaId) -> None:
        self._client = client
        self._slot = _slot(pool)
        self._key = _keys(pool, replica)[2]
        self._connection: Connection | None = None

    async def read(self, block_s: float) -> list[tuple[str, Work]]:
        """Wait for requests: (entry id, work) of all that are there, none after ``block_s``.

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
        return [(entry_id.decode(), _work_decoder.decode(fields[3])) for entry_id, fields in entries]

    async def done(self, entry_ids: Sequence[str]) -> None:
        await self._client.execute(self._slot, "XDEL", self._key, *entry_ids)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


__all__ = ["ConnectionLost", "Inbox", "Placed", "RedisPools", "ReplicaInfo", "ReplyError", "Work"]
