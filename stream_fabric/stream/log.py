"""The log of a stream: what may happen to it, as a pure state machine, and the door to it.

``StreamState`` is the law. The Lua scripts implement the same law inside Redis; one contract suite runs on both,
and the whole-system simulation runs on this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol

import msgspec

from stream_fabric.cursor import Cursor, Epoch
from stream_fabric.frames import End, ErrorInfo, Status, Usage, encode
from stream_fabric.ids import GatewayId, ReplicaId, StreamId, TenantId

UNIT, RECORD = b"\x1f", b"\x1e"


class AppendCode(IntEnum):
    OK = 0
    DUPLICATE = 1
    """The log already holds these frames."""
    GAP = 2
    """The log ends at ``seq``: send again from there on."""
    FENCED = 3
    CANCELLED = 4
    """At ``seq``: nothing above it was accepted."""
    CLOSED = 5
    NOSTREAM = 6


class Append(NamedTuple):
    """Frames ``first`` to ``last`` of a stream, joined by newlines."""

    stream: StreamId
    epoch: str
    first: int
    last: int
    frames: bytes
    usage: Usage
    """Cumulative, up to ``last``: what a cancel at ``last`` bills."""
    structure: bytes = b""
    """Lines ``<seq> <frame>`` of the frames a reader that starts later must know (what opens and ends)."""
    status: Literal["", "completed", "cancelled", "failed", "incomplete"] = ""
    """With the terminal as the last frame."""


class AppendReply(NamedTuple):
    code: AppendCode
    seq: int


class CreateCode(IntEnum):
    CREATED = 0
    EXISTS = 1
    TAKEN = 2
    CANCELLED = 3
    """A cancel came before; the stream is not created."""


class CancelReply(NamedTuple):
    """``accepted``: nothing above ``at`` exists or ever will. ``watched``: asked for only if nobody watches, and
    somebody does. ``none``: no such stream of the tenant."""

    result: Literal["accepted", "already", "pending", "terminal", "watched", "none"]
    at: Cursor | None
    status: str


class Takeover(NamedTuple):
    epoch: Epoch
    base: int
    """The last frame before the new epoch."""


class Entry(NamedTuple):
    epoch: int
    first: int
    last: int
    frames: bytes


class Page(NamedTuple):
    """A piece of the log and the stream's head at the moment it was read."""

    epoch: Epoch
    head: int
    status: Status
    facts: bytes
    bases: tuple[tuple[int, int], ...]
    """(epoch n, last seq before it) of each takeover."""
    structure: bytes
    tenant: TenantId
    entries: tuple[Entry, ...]
    alone_ms: int = 0
    """For how long nobody had watched the stream when it was read."""


class Head(NamedTuple):
    epoch: Epoch
    last: int
    status: Status
    cancelled_at: int
    """-1: not cancelled."""
    unwatched: Literal["", "L", "V"]
    """L: the last reader left. V: the last gateway vanished."""
    unwatched_ms: int
    watched_by_me: bool
    replica: ReplicaId | None


class StreamLog(Protocol):
    """All calls are idempotent and may raise FabricUnavailable."""

    async def create(
        self,
        stream: StreamId,
        epoch: Epoch,
        tenant: TenantId,
        facts: bytes,
        gateway: GatewayId | None,
        model: str = "",
    ) -> CreateCode:
        """Make the stream, with ``gateway`` as its first watcher. Its usage is the tenant's, under ``model``."""

    async def append(self, partition: int, batch: Sequence[Append]) -> list[AppendReply]:
        """Append to many streams of one partition in one round trip, and publish to their watchers."""

    async def cancel(self, stream: StreamId, tenant: TenantId, unwatched_ms: int | None = None) -> CancelReply:
        """``unwatched_ms``: only if nobody has watched for so long."""

    async def fence(
        self, stream: StreamId, replica: ReplicaId | None, nonce: str, error: ErrorInfo, epoch: Epoch | None = None
    ) -> bool:
        """End a live stream whose producer (``replica``; None: whichever) is gone, in a new epoch. ``epoch``: only if
        no other producer has begun one after it."""

    async def takeover(self, stream: StreamId, lost: Epoch, nonce: str) -> Takeover | None:
        """Begin a new epoch for another producer, when the stream lives and ``lost`` is its epoch. Asked by several or
        again it answers the same, for as long as nobody has appended in the new one."""

    async def watch(
        self, stream: StreamId, tenant: TenantId | None, gateway: GatewayId | None, after: Cursor
    ) -> Page | None:
        """Register the gateway (None: only read) and read after the cursor. None: no such stream of the tenant."""

    async def unwatch(self, stream: StreamId, gateway: GatewayId) -> None: ...

    async def heads(
        self, partition: int, streams: Sequence[StreamId], gateway: GatewayId | None
    ) -> list[Head | None]: ...


def unpack_parts(payload: bytes) -> list[tuple[StreamId, Epoch, int, int, bytes]]:
    """A published message: (stream, epoch, first, last, frames) of each stream's part."""
    out = []
    for part in payload.split(RECORD):
        stream, epoch, first, last, frames = part.split(UNIT, 4)
        out.append((StreamId(stream.decode()), Epoch.parse(epoch.decode()), int(first), int(last), frames))
    return out


def cancelled_end(usage: Usage) -> bytes:
    return encode(End("cancelled", usage))


def failed_end(usage: Usage, error: ErrorInfo) -> bytes:
    return encode(End("failed", usage, error))


@dataclass
class StreamState:
    """One stream's meta and log. Methods return what the scripts of the same names return."""

    epoch: Epoch
    tenant: TenantId
    facts: bytes
    watchers: list[GatewayId] = field(default_factory=list)
    last: int = 0
    status: Status = "live"
    cancelled_at: int = -1
    replica: ReplicaId | None = None
    usage: Usage = field(default_factory=Usage)
    bases: list[tuple[int, int]] = field(default_factory=list)
    structure: bytes = b""
    entries: list[Entry] = field(default_factory=list)
    unwatched: Literal["", "L", "V"] = ""
    unwatched_since_ms: int = 0

    def append(self, request: Append, replica: ReplicaId) -> AppendReply:
        if str(self.epoch) != request.epoch or self.replica not in (None, replica):
            return AppendReply(AppendCode.FENCED, self.last)
        if self.status == "cancelled":
            return AppendReply(AppendCode.CANCELLED, self.cancelled_at)
        if request.last <= self.last:
            return AppendReply(AppendCode.DUPLICATE, self.last)
        if self.status != "live":
            return AppendReply(AppendCode.CLOSED, self.last)
        if request.first != self.last + 1:
            return AppendReply(AppendCode.GAP, self.last)
        if self.replica is None:
            self.replica = replica
        self.entries.append(Entry(self.epoch.n, request.first, request.last, request.frames))
        self.last = request.last
        self.usage = request.usage
        self.structure += request.structure
        if request.status:
            self.status = request.status
        if request.status == "cancelled":
            self.cancelled_at = request.last - 1
        return AppendReply(AppendCode.OK, self.last)

    def cancel(self, now_ms: int = 0, unwatched_ms: int | None = None) -> CancelReply:
        if self.status == "cancelled":
            return CancelReply("already", Cursor(self.epoch.n, self.cancelled_at), self.status)
        if self.status != "live":
            return CancelReply("terminal", Cursor(self.epoch.n, self.last), self.status)
        if unwatched_ms is not None and (not self.unwatched or now_ms - self.unwatched_since_ms < unwatched_ms):
            return CancelReply("watched", Cursor(self.epoch.n, self.last), self.status)
        self.cancelled_at = self.last
        self._finish(cancelled_end(self.usage), "cancelled")
        return CancelReply("accepted", Cursor(self.epoch.n, self.cancelled_at), "cancelled")

    def fence(self, replica: ReplicaId | None, nonce: str, error: ErrorInfo, epoch: Epoch | None = None) -> bool:
        if self.status != "live" or (replica and self.replica and self.replica != replica):
            return False
        if epoch is not None and self.epoch != epoch and self.epoch.n >= epoch.n:
            return False
        self.epoch = Epoch(self.epoch.n + 1, nonce)
        self.bases.append((self.epoch.n, self.last))
        self._finish(failed_end(self.usage, error), "failed")
        return True

    def takeover(self, lost: Epoch, nonce: str) -> Takeover | None:
        if self.status == "live" and self.epoch.n == lost.n + 1 and self.replica is None:
            return Takeover(self.epoch, self.last)
        if self.status != "live" or self.epoch != lost:
            return None
        self.epoch = Epoch(self.epoch.n + 1, nonce)
        self.bases.append((self.epoch.n, self.last))
        self.replica = None
        return Takeover(self.epoch, self.last)

    def _finish(self, frame: bytes, status: Status) -> None:
        self.last += 1
        self.entries.append(Entry(self.epoch.n, self.last, self.last, frame))
        self.status = status

    def page(self, after: Cursor, entries_max: int, now_ms: int = 0) -> Page:
        entries = tuple(e for e in self.entries if (e.epoch, e.last) > after)[:entries_max]
        return Page(
            self.epoch,
            self.last,
            self.status,
            self.facts,
            tuple(self.bases),
            self.structure,
            self.tenant,
            entries,
            max(now_ms - self.unwatched_since_ms, 0) if self.unwatched else 0,
        )

    def watch(self, gateway: GatewayId) -> None:
        if self.status == "live" and gateway not in self.watchers:
            self.watchers.append(gateway)
        self.unwatched = ""

    def unwatch(self, gateway: GatewayId, now_ms: int, *, vanished: bool = False) -> None:
        if gateway in self.watchers:
            self.watchers.remove(gateway)
        if not self.watchers and self.status == "live":
            self.unwatched = "V" if vanished else "L"
            self.unwatched_since_ms = now_ms


def error_json(error: ErrorInfo) -> bytes:
    return msgspec.json.encode(error)
