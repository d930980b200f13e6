"""A replica's inbox in Redis, read on a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from stream_fabric.pool.records import Arrival, Inbound, Work
from stream_fabric.ports import Inbox
from stream_fabric.redis.client import RedisClient, fabric_error, retrieve_error
from stream_fabric.redis.pools import pool_prefix, pool_slot
from stream_fabric.redis.scripts import script
from stream_fabric.redis.wire import Connection, ConnectionLost, ReplyError
from stream_fabric.redis_url import Address
from stream_fabric.stream.ids import ReplicaId, StreamId

_READ_MAX = 256
_decoder = msgspec.json.Decoder(Work)


class RedisInbox(Inbox):
    """``Inbox`` as a Redis stream."""

    def __init__(self, client: RedisClient, pool: str, replica: ReplicaId) -> None:
        self._client = client
        self._slot = pool_slot(pool)
        self._prefix = pool_prefix(pool)
        self._replica = replica
        self._key = f"{self._prefix}{replica}:inbox"
        self._calls_key = f"{self._prefix}{replica}:calls"
        self._called = "0"
        """Id of the last call."""
        self._connection: Connection | None = None
        self._address: Address | None = None
        """Server of the connection."""

    async def read(self, block_s: float, done: Sequence[tuple[str, StreamId]] = ()) -> Inbound:
        acknowledged: asyncio.Future[Any] | None = None
        ack, args = script("inbox_ack"), [self._replica, *(part for entry in done for part in entry)]
        try:
            address = self._client.topology.address(self._slot)
            if address != self._address:  # a former primary may answer for ever, and has nothing new
                self.close()
                self._called = "0"
            if self._connection is None or self._connection.lost:
                self._connection = await self._client.dedicated(address)
                self._address = address
            if done:  # one write for both, and one wake-up for both replies
                acknowledged = self._connection.call("EVALSHA", ack.sha, 1, self._prefix, *args)
                acknowledged.add_done_callback(retrieve_error)
            # From the beginning each time: handled entries are deleted, and a failover may turn ids back
            reply: Any = await self._connection.call(
                "XREAD", "COUNT", _READ_MAX, "BLOCK", int(block_s * 1000),
                "STREAMS", self._key, self._calls_key, "0", self._called,
            )  # fmt: skip
        except (ConnectionLost, ReplyError) as error:
            self.close()
            self._called = "0"  # a failover may turn ids back; to hear a call twice costs a report
            await self._client.refresh()
            raise fabric_error("the inbox's XREAD", error) from error
        if acknowledged is not None and acknowledged.exception() is not None:  # the server does not know the script
            await ack(self._client, self._slot, [self._prefix], args)
        found = {key.decode(): entries for key, entries in (reply or {}).items()}
        calls = found.get(self._calls_key, [])
        if calls:
            self._called = calls[-1][0].decode()
        known = {entry for entry, _ in done}
        arrivals = [_arrival(entry_id.decode(), fields) for entry_id, fields in found.get(self._key, [])]
        return Inbound([arrival for arrival in arrivals if arrival.entry not in known], bool(calls))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _arrival(entry: str, fields: list[bytes]) -> Arrival:
    """Decode one entry of the inbox."""
    _, stream, _, payload, *rest = fields
    # A gateway of an earlier version does not write the times
    waited_us, handed_us = map(int, rest[1].split()) if rest else (0, int(entry.partition("-")[0]) * 1000)
    return Arrival(entry, StreamId(stream.decode()), _decode_work(payload), waited_us, handed_us)


def _decode_work(payload: bytes) -> Work | None:
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError:
        return None
