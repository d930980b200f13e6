"""The log of a stream as a pure state machine, and the records of its port.

The Lua scripts implement the rules of ``StreamState`` inside Redis. One contract suite runs on both; the simulation of
the whole system runs on this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple

import msgspec

from stream_fabric.limits import INPUTS_BYTES_MAX, INPUTS_MAX, INPUTS_PENDING_MAX
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.frames import CHOICE_END_PREFIX, ChoiceEnd, End, ErrorInfo, Status, Usage, encode
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId

UNIT, RECORD = b"\x1f", b"\x1e"


Unwatched = Literal["", "L", "V"]
"""Why nobody watches a stream. L: the last reader left. V: the last gateway vanished. Empty: somebody watches."""


class AppendCode(IntEnum):
    """Result of an append."""

    OK = 0
    DUPLICATE = 1
    """The log already holds these frames."""
    GAP = 2
    """The log ends at ``seq``; send again from there on."""
    FENCED = 3
    """Another epoch is current, or another replica appends in this one."""
    CANCELLED = 4
    """The stream is cancelled at ``seq``; nothing above it was accepted."""
    CLOSED = 5
    """The stream has ended, and was neither cancelled nor steered."""
    NOSTREAM = 6
    INPUTS = 7
    """The frames end the answer, but inputs wait that the producer has not answered. Nothing was appended."""
    STEERED = 8
    """The stream was ended at ``seq`` for a successor; nothing above it was accepted."""


class Append(NamedTuple):
    """Frames ``first`` to ``last`` of a stream, joined by newlines."""

    stream: StreamId
    epoch: str
    first: int
    last: int
    frames: bytes
    usage: Usage
    """Cumulative usage up to ``last``, which a cancel at ``last`` bills."""
    structure: bytes = b""
    """Lines ``<seq> <frame>`` of the frames that open and close blocks, for readers that start later."""
    status: Literal["", "completed", "cancelled", "failed", "incomplete"] = ""
    """Terminal status, if the last frame is the terminal."""
    inputs: int | None = None
    """Inputs of the stream that these frames and those before answer; None: as before."""
    closes: bool = False
    """The frames end the answer, so they are appended only while the stream has no more than ``inputs``."""


class AppendReply(NamedTuple):
    code: AppendCode
    seq: int
    """Last frame in the log; for ``CANCELLED``, the last frame before the cancel."""
    unwatched: Unwatched = ""
    """As in ``Head``, before this append; of a stream that lives on."""
    unwatched_ms: int = 0
    inputs: int = 0
    """Number of the stream's inputs."""


class CreateCode(IntEnum):
    """Result of a create."""

    CREATED = 0
    EXISTS = 1
    """The stream exists with the same epoch and tenant."""
    TAKEN = 2
    """The stream exists with another epoch or tenant."""
    CANCELLED = 3
    """A cancel came earlier; the stream is not created."""


class InputCode(IntEnum):
    """Result of adding an input."""

    ACCEPTED = 0
    DUPLICATE = 1
    TOO_MANY = 2
    TERMINAL = 3
    """The answer has ended."""
    NONE = 4
    """The tenant has no such stream."""
    TOO_LARGE = 5
    TOO_MANY_WAIT = 6
    OTHER_ITEM = 7
    """The id was used for another item."""


class CancelReply(NamedTuple):
    """Result of a cancel or a steer.

    ``accepted``: nothing above ``at`` exists or ever will. ``watched``: the cancel was conditional on no watchers, and
    there is one. ``tools``: a call of a tool has begun, so the stream is not steered. ``none``: the tenant has no such
    stream.
    """

    result: Literal["accepted", "already", "pending", "terminal", "watched", "tools", "none"]
    at: Cursor | None
    status: str


class Takeover(NamedTuple):
    """The new epoch that a takeover began."""

    epoch: Epoch
    base: int
    """Last frame before the new epoch."""


class Entry(NamedTuple):
    """Frames ``first`` to ``last`` as one append wrote them, joined by newlines."""

    epoch: int
    first: int
    last: int
    frames: bytes


class Page(NamedTuple):
    """Part of the log, with the stream's head at the moment of reading."""

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
    """Time in ms without a watcher at the moment of reading; 0: it has one."""


class Head(NamedTuple):
    """State of a stream without its frames."""

    epoch: Epoch
    last: int
    status: Status
    cancelled_at: int
    """-1: not cancelled."""
    unwatched: Unwatched
    unwatched_ms: int
    watched_by_me: bool
    replica: ReplicaId | None
    inputs: int = 0
    """Number of its inputs."""


STEERED_REASON = "steered"
"""Finish reason of a choice that was cut because the client steers to a successor."""
STEERED_CHOICE = encode(ChoiceEnd(0, STEERED_REASON))


def cut_frames(usage: Usage, *, steered: bool) -> list[bytes]:
    """Encode the last frames of a stream that was cancelled, or steered."""
    return [STEERED_CHOICE, encode(End("incomplete", usage))] if steered else [cancelled_end(usage)]


def cancelled_end(usage: Usage) -> bytes:
    """Encode the terminal frame of a cancelled stream."""
    return encode(End("cancelled", usage))


def failed_end(usage: Usage, error: ErrorInfo) -> bytes:
    """Encode the terminal frame of a failed stream."""
    return encode(End("failed", usage, error))


@dataclass
class StreamState:
    """Meta and log of one stream. Methods return what the scripts of the same names return."""

    epoch: Epoch
    tenant: TenantId
    facts: bytes
    watchers: list[GatewayId] = field(default_factory=list)
    last: int = 0
    status: Status = "live"
    cancelled_at: int = -1
    replica: ReplicaId | None = None
    usage: Usage = field(default_factory=Usage)
    begun: bool = False
    """A producer has appended, so that its usage counts as that of a stream."""
    bases: list[tuple[int, int]] = field(default_factory=list)
    structure: bytes = b""
    entries: list[Entry] = field(default_factory=list)
    unwatched: Unwatched = ""
    unwatched_since_ms: int = 0
    retention_s: int | None = None
    """Seconds that it is kept after its end. 0: until it was read. None: the platform's setting."""
    forgotten: bool = False
    """It was read, and its content is deleted."""
    inputs: dict[str, bytes] = field(default_factory=dict)
    inputs_at: dict[str, int] = field(default_factory=dict)
    inputs_answered: int = 0

    def append(self, request: Append, replica: ReplicaId) -> AppendReply:
        if str(self.epoch) != request.epoch or self.replica not in (None, replica):
            return AppendReply(AppendCode.FENCED, self.last)
        if self.status == "cancelled":
            return AppendReply(AppendCode.CANCELLED, self.cancelled_at)
        if self.status == "incomplete" and self.cancelled_at >= 0:
            return AppendReply(AppendCode.STEERED, self.cancelled_at)
        if request.last <= self.last:
            return AppendReply(AppendCode.DUPLICATE, self.last)
        if self.status != "live":
            return AppendReply(AppendCode.CLOSED, self.last)
        if request.first != self.last + 1:
            return AppendReply(AppendCode.GAP, self.last)
        if request.closes and len(self.inputs) != request.inputs:
            return AppendReply(AppendCode.INPUTS, self.last)
        if self.replica is None:
            self.replica = replica
        self.entries.append(Entry(self.epoch.n, request.first, request.last, request.frames))
        self.last = request.last
        self.usage, self.begun = request.usage, True
        self.structure += request.structure
        if request.inputs is not None:
            self.inputs_answered = request.inputs
        if request.status:
            self.status = request.status
        if request.status == "cancelled":
            self.cancelled_at = request.last - 1
        return AppendReply(AppendCode.OK, self.last)

    @property
    def is_answered(self) -> bool:
        """Whether a choice has ended: then the answer is complete, or cut."""
        return b" " + CHOICE_END_PREFIX in self.structure

    def input(self, input_id: str, item: bytes, at_us: int = 0) -> InputCode:
        if input_id in self.inputs:
            if self.inputs[input_id] != item:
                return InputCode.OTHER_ITEM
            is_same_call = at_us and self.inputs_at[input_id] == at_us  # its reply was lost
            return InputCode.ACCEPTED if is_same_call else InputCode.DUPLICATE
        if self.status != "live" or self.is_answered:
            return InputCode.TERMINAL
        if len(self.inputs) >= INPUTS_MAX:
            return InputCode.TOO_MANY
        if len(self.inputs) - self.inputs_answered >= INPUTS_PENDING_MAX:
            return InputCode.TOO_MANY_WAIT
        if sum(len(name) + len(held) for name, held in self.inputs.items()) + len(input_id) + len(item) > (
            INPUTS_BYTES_MAX
        ):
            return InputCode.TOO_LARGE
        self.inputs[input_id] = item
        self.inputs_at[input_id] = at_us
        return InputCode.ACCEPTED

    def cancel(self, now_ms: int = 0, unwatched_ms: int | None = None, *, steers: bool = False) -> CancelReply:
        if self.status == "cancelled":
            return CancelReply("already", Cursor(self.epoch.n, self.cancelled_at), self.status)
        if self.status != "live" or (steers and self.is_answered):
            return CancelReply("terminal", Cursor(self.epoch.n, self.last), self.status)
        if steers and b'"kind":"tool"' in self.structure:
            return CancelReply("tools", Cursor(self.epoch.n, self.last), self.status)
        if unwatched_ms is not None and (not self.unwatched or now_ms - self.unwatched_since_ms < unwatched_ms):
            return CancelReply("watched", Cursor(self.epoch.n, self.last), self.status)
        self.cancelled_at = self.last
        frames = cut_frames(self.usage, steered=steers)
        status: Status = "incomplete" if steers else "cancelled"
        if steers:
            self.structure += b"%d %b\n" % (self.last + 1, STEERED_CHOICE)
        self._append_terminal(b"\n".join(frames), status, len(frames))
        return CancelReply("accepted", Cursor(self.epoch.n, self.cancelled_at), status)

    def fence(
        self,
        replica: ReplicaId | None,
        nonce: str,
        error: ErrorInfo,
        epoch: Epoch | None = None,
        *,
        withdraws: bool = False,
    ) -> bool:
        if self.status != "live":
            return self.epoch.nonce == nonce  # the same call, whose reply was lost
        if replica and self.replica and self.replica != replica:
            return False
        if epoch is not None and self.epoch != epoch and self.epoch.n >= epoch.n:
            return False
        self.epoch = Epoch(self.epoch.n + 1, nonce)
        self.bases.append((self.epoch.n, self.last))
        if withdraws:
            self.usage, self.begun = Usage(), False
        self._append_terminal(failed_end(self.usage, error), "failed")
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

    def forget(self, gateway: GatewayId, terms: bytes = b"") -> bool:
        """Delete the content, if nothing is kept of the ended stream and no other gateway reads it.

        ``terms``: see ``delete``.
        """
        if self.status == "live" or self.retention_s != 0:
            return False
        if gateway in self.watchers:
            self.watchers.remove(gateway)
        if self.watchers:
            return False
        self.delete(terms)
        return True

    def delete(self, terms: bytes = b"") -> bool:
        """Delete the content of an ended stream. False: it has not ended, or has no content any more.

        ``terms``: what stays of its facts, for a bill that is not written yet.
        """
        if self.status == "live" or self.forgotten:
            return False
        self.forgotten, self.facts, self.structure, self.entries, self.watchers = True, terms, b"", [], []
        self.inputs = {}
        return True

    def _append_terminal(self, frames: bytes, status: Status, count: int = 1) -> None:
        self.last += count
        self.entries.append(Entry(self.epoch.n, self.last - count + 1, self.last, frames))
        self.status = status

    def page(self, after: Cursor, entries_max: int, now_ms: int = 0) -> Page:
        """Read at most ``entries_max`` entries after the cursor."""
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
        is_kept = self.status != "live" and self.retention_s != 0  # else it is deleted once its watchers have read it
        if not is_kept and gateway not in self.watchers:
            self.watchers.append(gateway)
        self.unwatched = ""

    def unwatch(self, gateway: GatewayId, now_ms: int) -> None:
        if gateway in self.watchers:
            self.watchers.remove(gateway)
        if not self.watchers and self.status == "live":
            self.unwatched = "L"
            self.unwatched_since_ms = now_ms


def error_json(error: ErrorInfo) -> bytes:
    return msgspec.json.encode(error)
