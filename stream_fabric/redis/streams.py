"""The stream log in Redis. Keys of a stream share its partition's slot; see ``lua/prelude.lua`` for the meta."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import (
    ATTEMPTS_MAX,
    INPUTS_BYTES_MAX,
    INPUTS_MAX,
    INPUTS_PENDING_MAX,
    LIVE_TTL_S,
    PAGE_ENTRIES_MAX,
    PENDING_CANCEL_TTL_S,
    RETENTION_S,
)
from stream_fabric.ports import StreamLog
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.scripts import script
from stream_fabric.redis.topology import slot_of
from stream_fabric.redis.wire import Arg
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.frames import ErrorInfo, Status, StoredInput, Usage
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId, partition_of
from stream_fabric.stream.log import (
    Append,
    AppendCode,
    AppendReply,
    CancelReply,
    CreateCode,
    Entry,
    Head,
    InputCode,
    Page,
    Takeover,
    Unwatched,
    error_json,
)

OnEnded = Callable[[TenantId, StreamId, Usage], None]
"""Called once the log has taken a stream's terminal, if the tenant's account holds a reservation for the stream."""


def leave_to_check(tenant: TenantId, stream: StreamId, usage: Usage) -> None:
    """Leave the settlement to the check of overdue reservations: this process settles none."""


_USAGE_FIGURES = len(Usage.__struct_fields__)
_MOMENT_DIGITS = 17
"""Digits of a moment in Unix microseconds."""
_LIVE_MS, _RETENTION_MS = LIVE_TTL_S * 1000, RETENTION_S * 1000
_APPEND_CODES = {code.value: code for code in AppendCode}  # to call the enumeration costs ten times as much


class RedisStreamLog(StreamLog):
    """``StreamLog`` in Redis."""

    def __init__(
        self,
        client: RedisClient,
        partitions: Partitions,
        replica: ReplicaId | None = None,
        on_ended: OnEnded = leave_to_check,
    ) -> None:
        """``replica``: the producer that appends; None: this process does not append."""
        self._client = client
        self._partitions = partitions
        self.partitions = partitions.count
        self._replica = replica or ""
        self._on_ended = on_ended

    def partition(self, stream: StreamId) -> int:
        return partition_of(stream, self._partitions.count)

    def _slot_and_keys(self, stream: StreamId) -> tuple[int, str, str]:
        """Return the slot, the key prefix of the stream and the channel prefix of its partition."""
        k = self.partition(stream)
        return self._partitions.slots[k], f"sg:{{p{k}}}:{stream}:", f"sg:{{p{k}}}:>"

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
        slot, key, _ = self._slot_and_keys(stream)
        kept_ms = "" if retention_s is None else retention_s * 1000
        args: list[Arg] = [str(epoch), tenant, facts, gateway or "", _LIVE_MS, model, int(reserved), kept_ms]
        reply = await script("create")(self._client, slot, [key + "m", key + "l"], args)
        return CreateCode(reply[0])

    async def restate(self, stream: StreamId, tenant: TenantId, facts: bytes, model: str) -> None:
        slot, key, _ = self._slot_and_keys(stream)
        await script("restate")(self._client, slot, [key + "m"], [tenant, facts, model])

    async def append(self, partition: int, batch: Sequence[Append]) -> list[AppendReply]:
        client = self._client
        prefix = f"sg:{{p{partition}}}:"
        keys: list[str] = []
        args: list[Arg] = [
            prefix + ">",
            client.publish,
            int(client.publish_is_counted),
            self._replica,
            _LIVE_MS,
            _RETENTION_MS,
        ]
        for stream, epoch, first, last, frames, u, structure, status, inputs, closes in batch:
            key = prefix + stream
            keys += (key + ":m", key + ":l")
            args += (
                stream,
                epoch,
                first,
                last,
                frames,
                f"{u.prompt} {u.cached} {u.written} {u.output} {u.reasoning}",
                structure,
                status,
                "" if inputs is None else inputs,
                1 if closes else 0,
            )
        reply = await script("append")(client, self._partitions.slots[partition], keys, args)
        replies = []
        for item, code, seq, note, inputs in zip(batch, reply[::4], reply[1::4], reply[2::4], reply[3::4], strict=True):
            if not note:  # nearly always
                replies.append(AppendReply(_APPEND_CODES[code], seq, "", 0, inputs))
                continue
            if note[:1] == b"A":
                self._on_ended(TenantId(note[1:].decode()), item.stream, item.usage)
                note = b""
            replies.append(AppendReply(_APPEND_CODES[code], seq, *_unwatched(note), inputs))
        return replies

    async def cancel(
        self, stream: StreamId, tenant: TenantId, unwatched_ms: int | None = None, *, steers: bool = False
    ) -> CancelReply:
        slot, key, channel = self._slot_and_keys(stream)
        result, epoch, at, status, *used = await script("cancel")(
            self._client,
            slot,
            [key + "m", key + "l"],
            [
                stream,
                tenant,
                channel,
                self._client.publish,
                _RETENTION_MS,
                PENDING_CANCEL_TTL_S * 1000,
                "" if unwatched_ms is None else unwatched_ms,
                int(steers),
            ],
        )
        if used:
            self._on_ended(tenant, stream, _usage(used[0]))
        cursor = Cursor(Epoch.parse(epoch.decode()).n, at) if epoch else None
        return CancelReply(result.decode(), cursor, status.decode())

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
        slot, key, channel = self._slot_and_keys(stream)
        reply = await script("fence")(
            self._client,
            slot,
            [key + "m", key + "l"],
            [
                stream,
                replica or "",
                nonce,
                error_json(error),
                channel,
                self._client.publish,
                _RETENTION_MS,
                "" if epoch is None else str(epoch),
                int(withdraws),
            ],
        )
        if len(reply) > 3:
            self._on_ended(TenantId(reply[3].decode()), stream, _usage(reply[4]))
        return bool(reply[0] == 0)

    async def takeover(self, stream: StreamId, lost: Epoch, nonce: str) -> Takeover | None:
        slot, key, channel = self._slot_and_keys(stream)
        code, epoch, last = await script("takeover")(
            self._client,
            slot,
            [key + "m", key + "l"],
            [stream, str(lost), nonce, channel, self._client.publish, _LIVE_MS],
        )
        return Takeover(Epoch.parse(epoch.decode()), last) if code == 0 else None

    async def put_placements(self, records: Sequence[tuple[StreamId, bytes]]) -> None:
        slots: dict[int, tuple[list[str], list[Arg]]] = {}
        for stream, record in records:
            slot, key, _ = self._slot_and_keys(stream)
            keys, args = slots.setdefault(slot, ([], [_LIVE_MS + _RETENTION_MS, _RETENTION_MS, ATTEMPTS_MAX]))
            keys += (key + "m", key + "p")
            args.append(record)
        put = script("placement_record")
        await asyncio.gather(*(put(self._client, slot, keys, args) for slot, (keys, args) in slots.items()))

    async def placements(self, stream: StreamId) -> list[bytes]:
        slot, key, _ = self._slot_and_keys(stream)
        reply: list[bytes] = await self._client.execute(slot, "LRANGE", key + "p", 0, -1)
        return reply

    async def settled(self, stream: StreamId) -> tuple[Status, Usage] | None:
        slot, key, _ = self._slot_and_keys(stream)
        status, used = await self._client.execute(slot, "HMGET", key + "m", "st", "us")
        if status is None:
            return None
        return cast(Status, status.decode()), _usage(used or b"")

    async def usage(self, tenant: TenantId, hour: int) -> dict[str, tuple[int, Usage]]:
        """Read the usage of a tenant's streams that ended in one hour: model → (streams, usage).

        ``hour``: hours since 1970.

        The script that appends a terminal counts the usage, so each stream counts once. One that ended before any
        producer had begun it does not count.
        """
        replies = await asyncio.gather(
            *(
                self._client.execute(slot, "HGETALL", f"sg:{{p{k}}}:usage:{tenant}:{hour}")
                for k, slot in enumerate(self._partitions.slots)
            )
        )
        totals: dict[str, list[int]] = {}
        for reply in replies:
            for name, value in reply.items():
                model, _, kind = name.decode().rpartition(" ")
                if int(kind) <= _USAGE_FIGURES:  # a newer version may count more
                    totals.setdefault(model, [0] * (1 + _USAGE_FIGURES))[int(kind)] += int(value)
        return {model: (count, Usage(*tokens)) for model, (count, *tokens) in totals.items()}

    async def watch(
        self, stream: StreamId, tenant: TenantId | None, gateway: GatewayId | None, after: Cursor
    ) -> Page | None:
        slot, key, _ = self._slot_and_keys(stream)
        reply = await script("watch")(
            self._client,
            slot,
            [key + "m", key + "l"],
            [tenant or "", gateway or "", str(after), PAGE_ENTRIES_MAX],
        )
        if not reply:
            return None
        epoch, last, status, facts, bases, structure, owner, alone_ms, raw = reply
        entries = []
        for entry_id, fields in raw:
            n, _, stop = entry_id.decode().partition("-")
            entries.append(Entry(int(n), int(fields[1]), int(stop), fields[3]))
        return Page(
            Epoch.parse(epoch.decode()),
            last,
            cast(Status, status.decode()),
            facts,
            tuple((int(n), int(s)) for n, _, s in (item.partition(":") for item in bases.decode().split())),
            structure,
            TenantId(owner.decode()),
            tuple(entries),
            alone_ms,
        )

    async def forget(self, stream: StreamId, gateway: GatewayId) -> bool:
        """Delete the content of an ended stream that the gateway has read, if its plan keeps nothing and no other
        gateway reads it."""
        slot, key, _ = self._slot_and_keys(stream)
        keys = [key + "m", key + "l", key + "i", key + "p"]
        return bool(await script("forget")(self._client, slot, keys, [gateway]))

    async def delete(self, stream: StreamId, tenant: TenantId) -> bool:
        slot, key, _ = self._slot_and_keys(stream)
        keys = [key + "m", key + "l", key + "i", key + "p"]
        return bool(await script("delete")(self._client, slot, keys, [tenant]))

    async def unwatch(self, stream: StreamId, gateway: GatewayId) -> None:
        slot, key, channel = self._slot_and_keys(stream)
        await script("unwatch")(self._client, slot, [key + "m"], [gateway, stream, channel, self._client.publish])

    async def heads(self, partition: int, streams: Sequence[StreamId], gateway: GatewayId | None) -> list[Head | None]:
        reply = await script("heads")(
            self._client,
            self._partitions.slots[partition],
            [f"sg:{{p{partition}}}:{stream}:m" for stream in streams],
            [gateway or ""],
        )
        return [_head(item) if item else None for item in reply]

    async def input(self, stream: StreamId, tenant: TenantId, key: str, item: msgspec.Raw, at_us: int = 0) -> InputCode:
        slot, prefix, channel = self._slot_and_keys(stream)
        code = await script("input")(
            self._client,
            slot,
            [prefix + "m", prefix + "i"],
            [
                stream,
                tenant,
                key,
                bytes(item),
                INPUTS_MAX,
                INPUTS_BYTES_MAX,
                _LIVE_MS,
                channel,
                self._client.publish,
                INPUTS_PENDING_MAX,
                f"{at_us:0{_MOMENT_DIGITS}d}",
            ],
        )
        return InputCode(code)

    async def inputs(self, stream: StreamId) -> list[StoredInput]:
        slot, key, _ = self._slot_and_keys(stream)
        reply = await self._client.execute(slot, "HGETALL", key + "i")
        numbered = []
        for name, value in reply.items():
            number, _, item = value.partition(b" ")
            # A gateway of the release before writes no moment
            count, at_us = number[:-_MOMENT_DIGITS] or number, number[-_MOMENT_DIGITS:]
            stored = StoredInput(name.decode(), item, int(at_us) if count != number else 0)
            numbered.append((int(count), stored))
        return [stored for _, stored in sorted(numbered)]


def _usage(text: bytes) -> Usage:
    """Decode the figures of a stream's meta; a newer version may count more."""
    return Usage(*map(int, text.split()[:_USAGE_FIGURES]))


def _unwatched(text: bytes) -> tuple[Unwatched, int]:
    """Decode ``L<ms>``, ``V<ms>`` or nothing."""
    return (cast(Unwatched, text[:1].decode()), int(text[1:])) if text else ("", 0)


def _head(item: list[bytes | int]) -> Head:
    """Decode one item of the ``heads`` script's reply."""
    epoch, last, status, cancelled_at, unwatched, ms, watched, replica, inputs = item
    assert isinstance(epoch, bytes) and isinstance(status, bytes)
    assert isinstance(unwatched, bytes) and isinstance(replica, bytes)
    return Head(
        Epoch.parse(epoch.decode()),
        int(last),
        cast(Status, status.decode()),
        int(cancelled_at),
        unwatched.decode(),  # type: ignore[arg-type]
        int(ms),
        bool(watched),
        ReplicaId(replica.decode()) if replica else None,
        int(inputs),
    )


async def held_partitions(client: RedisClient) -> Partitions | None:
    """Read the partitions that this Redis is set to. None: no process has set them."""
    held = await client.execute(slot_of("p0"), "GET", "sg:{p0}:partitions")
    return None if held is None else Partitions(int(held), new=False)


async def check_partitions(client: RedisClient, count: int) -> Partitions:
    """Set this Redis to ``count`` partitions, if no process has set it yet, and return the partitions.

    Raises FabricUnavailable if this Redis is set to another number.
    """
    key, slot = "sg:{p0}:partitions", slot_of("p0")
    found = await client.execute(slot, "GET", key)
    new = found is None and await client.execute(slot, "SET", key, count, "NX") is not None
    held = int(found or await client.execute(slot, "GET", key))
    if held != count:
        raise FabricUnavailable(
            f"this Redis holds streams in {held} partitions, but this process is set to {count}; "
            f"set STREAM_GW_PARTITIONS={held}, or use another Redis"
        )
    return Partitions(count, new=new)
