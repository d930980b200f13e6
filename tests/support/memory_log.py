"""``StreamLog`` in memory, built on ``StreamState``. The contract suite verifies it against Redis."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import astuple

from stream_fabric.limits import BILL_LATE_S, BILLS_LATE_MAX, PAGE_ENTRIES_MAX, PENDING_CANCEL_TTL_S
from stream_fabric.redis.streams import OnEnded, leave_to_check
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.frames import ErrorInfo, StoredInput, Usage
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId, partition_of
from stream_fabric.stream.log import (
    RECORD,
    UNIT,
    Append,
    AppendCode,
    AppendReply,
    CancelReply,
    CreateCode,
    Head,
    InputCode,
    Page,
    StreamState,
    Takeover,
)

Publish = Callable[[str, bytes], bool]
"""(gateway or replica, payload) → whether anybody heard it."""


class _Meta(msgspec.Struct):
    facts: dict[str, msgspec.Raw]
    bill: dict[str, msgspec.Raw] = {}


class MemoryStreamLog:
    """``publish`` takes the messages; ``now_ms`` is the clock. ``view`` gives another peer's door to the same data."""

    def __init__(
        self,
        partitions: int,
        publish: Publish,
        now_ms: Callable[[], int],
        replica: str = "",
        on_ended: OnEnded = leave_to_check,
    ) -> None:
        self.partitions = partitions
        self._publish = publish
        self._now_ms = now_ms
        self._replica = ReplicaId(replica)
        self.streams: dict[StreamId, StreamState] = {}
        self.pending: dict[StreamId, tuple[TenantId, int]] = {}
        """Cancels that came before their stream: tenant, and until when they are kept."""
        self._models: dict[StreamId, str] = {}
        self._reserved: set[StreamId] = set()
        self.unbilled: dict[StreamId, int] = {}
        """Fenced streams that have no bill yet, and when they ended, in ms."""
        self._on_ended = on_ended

    def view(self, replica: str) -> MemoryStreamLog:
        other = MemoryStreamLog(self.partitions, self._publish, self._now_ms, replica, self._on_ended)
        other.streams, other.pending = self.streams, self.pending
        other._models, other._reserved = self._models, self._reserved
        other.unbilled = self.unbilled
        return other

    def partition(self, stream: StreamId) -> int:
        return partition_of(stream, self.partitions)

    def _pending(self, stream: StreamId) -> TenantId | None:
        tenant, until_ms = self.pending.get(stream, (None, 0))
        if until_ms <= self._now_ms():
            self.pending.pop(stream, None)
            return None
        return tenant

    def _owned(self, stream: StreamId, tenant: TenantId | None) -> StreamState | None:
        state = self.streams.get(stream)
        return state if state is not None and tenant in (None, state.tenant) else None

    async def restate(self, stream: StreamId, tenant: TenantId, facts: bytes, model: str) -> None:
        state = self._owned(stream, tenant)
        if state is not None and state.status == "live" and state.last == 0:
            state.facts, self._models[stream] = facts, model

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
        state = self.streams.get(stream)
        if state is not None:
            return CreateCode.EXISTS if (state.epoch, state.tenant) == (epoch, tenant) else CreateCode.TAKEN
        if self._pending(stream) == tenant:
            return CreateCode.CANCELLED
        self.pending.pop(stream, None)
        state = StreamState(epoch, tenant, facts, [gateway] if gateway else [], retention_s=retention_s)
        if gateway is None:
            state.unwatched, state.unwatched_since_ms = "L", self._now_ms()
        self.streams[stream] = state
        self._models[stream] = model
        if reserved:
            self._reserved.add(stream)
        return CreateCode.CREATED

    def _note_ended(self, stream: StreamId, state: StreamState) -> None:
        """Report a stream that has ended now, if a reservation is to be settled."""
        if stream in self._reserved and state.status != "live":
            self._on_ended(state.tenant, stream, state.usage)

    async def append(self, partition: int, batch: Sequence[Append]) -> list[AppendReply]:
        replies = []
        parts: dict[GatewayId, list[tuple[StreamState, bytes]]] = {}
        for item in batch:
            assert self.partition(item.stream) == partition
            state = self.streams.get(item.stream)
            if state is None:
                replies.append(AppendReply(AppendCode.NOSTREAM, 0))
                continue
            reply = state.append(item, self._replica)._replace(inputs=len(state.inputs))
            if reply.code is AppendCode.OK and state.status == "live" and state.unwatched:
                reply = reply._replace(
                    unwatched=state.unwatched, unwatched_ms=self._now_ms() - state.unwatched_since_ms
                )
            replies.append(reply)
            if reply.code is AppendCode.OK:
                self._note_ended(item.stream, state)
                part = _part(item.stream, item.epoch, item.first, item.last, item.frames)
                for gateway in state.watchers:
                    parts.setdefault(gateway, []).append((state, part))
        for gateway, list_ in parts.items():
            if not self._publish(gateway, RECORD.join(part for _, part in list_)):
                for state, _ in list_:
                    # Also when this was the terminal, as the script does it
                    state.watchers.remove(gateway)
                    if not state.watchers:
                        state.unwatched, state.unwatched_since_ms = "V", self._now_ms()
        return replies

    def _tell(self, stream: StreamId, state: StreamState, *, doorbell: bytes) -> None:
        entry = state.entries[-1]
        part = _part(stream, str(state.epoch), entry.first, entry.last, entry.frames)
        for gateway in state.watchers:
            self._publish(gateway, part)
        if state.replica:
            self._publish(state.replica, doorbell)

    async def cancel(
        self, stream: StreamId, tenant: TenantId, unwatched_ms: int | None = None, *, steers: bool = False
    ) -> CancelReply:
        state = self.streams.get(stream)
        if state is None:
            if steers or unwatched_ms is not None or self._pending(stream) not in (None, tenant):
                return CancelReply("none", None, "")
            self.pending[stream] = (tenant, self._now_ms() + PENDING_CANCEL_TTL_S * 1000)
            return CancelReply("pending", None, "")
        if state.tenant != tenant:
            return CancelReply("none", None, "")
        reply = state.cancel(self._now_ms(), unwatched_ms, steers=steers)
        if reply.result == "accepted":
            at = b"%d" % state.cancelled_at
            self._note_ended(stream, state)
            what = b"steer" if steers else b"cancel"
            self._tell(stream, state, doorbell=UNIT.join((what, stream.encode(), str(state.epoch).encode(), at)))
        return reply

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
        state = self.streams.get(stream)
        if state is None:
            return False
        old, last, was = str(state.epoch), state.last, state.status
        if not state.fence(replica, nonce, error, epoch, withdraws=withdraws):
            return False
        if was != "live":
            return True
        if not withdraws:
            self._note_ended(stream, state)
        if state.begun:
            self.unbilled[stream] = self._now_ms()
        self._tell(stream, state, doorbell=UNIT.join((b"fence", stream.encode(), old.encode(), b"%d" % last)))
        return True

    async def takeover(self, stream: StreamId, lost: Epoch, nonce: str) -> Takeover | None:
        state = self.streams.get(stream)
        if state is None:
            return None
        old, last, had = str(state.epoch), state.last, state.replica
        taken = state.takeover(lost, nonce)
        if taken is not None and had:
            self._publish(had, UNIT.join((b"fence", stream.encode(), old.encode(), b"%d" % last)))
        return taken

    async def usage(self, tenant: TenantId, hour: int) -> dict[str, tuple[int, Usage]]:
        """Usage of all hours together; no test lasts longer than one."""
        totals: dict[str, tuple[int, Usage]] = {}
        for stream, state in self.streams.items():
            if state.tenant == tenant and state.status != "live" and state.begun:
                count, total = totals.get(self._models[stream], (0, Usage()))
                summed = (a + b for a, b in zip(astuple(total), astuple(state.usage), strict=True))
                totals[self._models[stream]] = (count + 1, Usage(*summed))
        return totals

    async def watch(
        self, stream: StreamId, tenant: TenantId | None, gateway: GatewayId | None, after: Cursor
    ) -> Page | None:
        state = self._owned(stream, tenant)
        if state is None or (state.forgotten and (tenant, gateway) != (None, None)):
            return None
        page = state.page(after, PAGE_ENTRIES_MAX, self._now_ms())
        if gateway is not None:
            state.watch(gateway)
        return page

    async def forget(self, stream: StreamId, gateway: GatewayId) -> bool:
        state = self.streams.get(stream)
        return state is not None and state.forget(gateway, self._terms(stream, state))

    async def delete(self, stream: StreamId, tenant: TenantId) -> bool:
        state = self._owned(stream, tenant)
        return state is not None and state.delete(self._terms(stream, state))

    def _terms(self, stream: StreamId, state: StreamState) -> bytes:
        """Return what stays of a stream whose content is deleted: the terms of a bill that is not written yet."""
        if stream not in self.unbilled:
            return b""
        try:
            meta = msgspec.json.decode(state.facts, type=_Meta)
        except msgspec.MsgspecError:
            return b""
        facts = {name: meta.facts[name] for name in ("model", "kind") if name in meta.facts}
        return msgspec.json.encode({"facts": facts, "bill": meta.bill})

    async def unwatch(self, stream: StreamId, gateway: GatewayId) -> None:
        state = self.streams.get(stream)
        if state is None:
            return
        state.unwatch(gateway, self._now_ms())
        if not state.watchers and state.status == "live" and state.replica:
            self._publish(state.replica, UNIT.join((b"unwatched", stream.encode(), str(state.epoch).encode(), b"0")))

    async def heads(self, partition: int, streams: Sequence[StreamId], gateway: GatewayId | None) -> list[Head | None]:
        return [self._head(stream, gateway) for stream in streams]

    def _head(self, stream: StreamId, gateway: GatewayId | None) -> Head | None:
        state = self.streams.get(stream)
        if state is None:
            return None
        return Head(
            state.epoch,
            state.last,
            state.status,
            state.cancelled_at,
            state.unwatched,
            self._now_ms() - state.unwatched_since_ms if state.unwatched else 0,
            gateway in state.watchers,
            state.replica,
            len(state.inputs),
        )

    async def input(self, stream: StreamId, tenant: TenantId, key: str, item: msgspec.Raw, at_us: int = 0) -> InputCode:
        state = self._owned(stream, tenant)
        if state is None:
            return InputCode.NONE
        code = state.input(key, bytes(item), at_us)
        if code is InputCode.ACCEPTED and state.replica:
            bell = UNIT.join((b"input", stream.encode(), str(state.epoch).encode(), b"0"))
            self._publish(state.replica, bell)
        return code

    async def inputs(self, stream: StreamId) -> list[StoredInput]:
        state = self.streams.get(stream)
        if state is None:
            return []
        return [StoredInput(name, item, state.inputs_at[name]) for name, item in state.inputs.items()]


class MemoryUnbilled:
    """``Unbilled`` beside a log in memory."""

    def __init__(self, log: MemoryStreamLog) -> None:
        self._log = log
        self.claimed_until_ms: dict[int, int] = {}

    async def late(self, partition: int) -> list[tuple[StreamId, int]]:
        now, log = self._log._now_ms(), self._log
        due = sorted(
            (at, stream)
            for stream, at in log.unbilled.items()
            if log.partition(stream) == partition and at <= now - int(BILL_LATE_S * 1000)
        )
        if not due or self.claimed_until_ms.get(partition, 0) > now:
            return []
        self.claimed_until_ms[partition] = now + int(BILL_LATE_S * 1000)
        return [(stream, at) for at, stream in due[:BILLS_LATE_MAX]]

    async def remove(self, streams: Sequence[StreamId]) -> None:
        for stream in streams:
            self._log.unbilled.pop(stream, None)


def _part(stream: StreamId, epoch: str, first: int, last: int, frames: bytes) -> bytes:
    return UNIT.join((stream.encode(), epoch.encode(), b"%d" % first, b"%d" % last, frames))
