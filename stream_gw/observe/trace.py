"""What becomes of each reader, told once when it is over. Beside the token path: it only takes note of moments."""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec

from stream_fabric.cursor import Cursor
from stream_fabric.errors import Draining, StreamGwError
from stream_fabric.events import (
    SCORES_MAX,
    CandidateScore,
    Prices,
    ReadEnd,
    RequestTrace,
    Role,
    Timing,
    sampled,
)
from stream_fabric.frames import STARTED_PREFIX, ChoiceEnd, Delta, End, Note, decode, is_text, text_parts
from stream_fabric.ids import GatewayId, ReplicaId, StreamId, TenantId
from stream_fabric.placement import TIERS, Placed, Queued, Scored
from stream_fabric.ports import EventSink, Loaded
from stream_fabric.surge import Shift
from stream_gw.dialects.facts import StreamFacts
from stream_gw.timeline import Moments, phases

_QUOTE = 0x22
_FINISH_PREFIX = b'{"k":"choice-end"'
_DELTA_PREFIX = b'{"k":"delta"'
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_STARTED = msgspec.json.Decoder(dict[str, msgspec.Raw])

Transport = Literal["sse", "ws", "whole"]


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


def tokens_of(lines: Sequence[bytes]) -> int:
    """Output tokens in frames."""
    count = 0
    for line in lines:
        if is_text(line):
            # The hot frame: a block's digit, and a text of one token
            count += 1 if line[1] == _QUOTE else text_parts(line)[1]
        elif line.startswith(_DELTA_PREFIX):
            frame = decode(line)
            assert isinstance(frame, Delta)
            count += frame.tokens
    return count


class Clock(Protocol):
    offset_us: int
    """From this process's monotonic clock to the fabric's."""


class Over(NamedTuple):
    """How a reader ended: of every one, also of those whose trace is not told."""

    pool: str
    role: Role
    ended: ReadEnd
    http_status: int
    """That its request was answered with, or that its stream's error would have."""
    error_code: str
    wall_us: int
    ttft_us: int
    tokens: int
    trace_id: str
    request_id: str
    stream: str
    tenant: TenantId
    tier: str = ""
    shifted_to: str = ""
    """The adjacent pool that took it."""


def _nobody(*told: object) -> None:
    pass


def _nothing(replica: str) -> Loaded:
    return Loaded()


@dataclass(frozen=True)
class Tracer:
    """One gateway's."""

    sink: EventSink
    clock: Clock
    gateway: GatewayId
    region: str = ""
    one_in: int = 1
    """Of successes one in so many is told; all else always."""
    on_over: Callable[[Over], None] = _nobody
    """Hears of every reader."""
    loaded: Callable[[ReplicaId | Literal[""]], Loaded] = _nothing
    """What a replica has loaded."""
    on_told: Callable[[RequestTrace, str], None] = _nobody
    """Hears of those that are told, and the client's span that each belongs to; empty: none."""


_CALM = ("", 0.0)
"""To which adjacent pool it went, and the seconds of work that were ahead of it at home: nowhere."""


class ReaderTrace:
    """What one reader's end will tell. Moments are microseconds on the monotonic clock; 0: not yet."""

    __slots__ = (
        "arrived", "attempts", "broke", "facts", "finish_reason", "first", "first_seq", "gap_us", "is_over",
        "parent_id", "placed", "placing", "pool", "position", "prices", "reason", "received", "replica",
        "request_id", "role", "scores", "session", "stalled_at", "stalled_us", "started", "surge", "tenant", "tier",
        "trace_id", "tracer", "transport", "user",
    )  # fmt: skip

    def __init__(
        self,
        tracer: Tracer,
        request_id: str,
        transport: Transport,
        traceparent: str | None = None,
        received_us: int | None = None,
    ) -> None:
        """``traceparent``: W3C trace context as the client sent it; what is none is passed over, as its standard
        wants. ``received_us``: when the request's first byte came; None: now."""
        self.tracer = tracer
        self.request_id = request_id
        self.transport = transport
        found = _TRACEPARENT.fullmatch(traceparent or "")
        self.trace_id = found[1] if found and found[1].strip("0") else ""
        """The client's; empty: the stream's own digits are it."""
        self.parent_id = found[2] if found and self.trace_id else ""
        self.received = monotonic_us() if received_us is None else received_us
        self.role: Role = "refused"
        self.is_over = False
        self.tenant = TenantId("")
        self.placing = self.placed = self.started = self.first = self.arrived = self.broke = 0
        self.stalled_at = self.stalled_us = self.gap_us = self.position = 0
        self.attempts = self.first_seq = 1
        self.facts: StreamFacts | None = None
        self.user: str | None = None
        self.pool = self.session = self.reason = self.finish_reason = ""
        self.surge = _CALM
        self.replica: ReplicaId | Literal[""] = ""
        self.tier = -1
        self.prices: Prices | None = None
        self.scores = b""
        """Encoded: most traces are never looked at."""

    def traceparent(self, stream: StreamId) -> str:
        """The context that the stream's producer goes on with: our span has the stream's last digits."""
        return f"00-{self.trace_id or stream[5:]}-{stream[-16:]}-01"

    # --- on the way ----------------------------------------------------------------------------------------

    def receive_placed(self, placed: Placed | Queued, shift: Shift | None = None) -> None:
        self.placed = monotonic_us()
        match placed:
            case Placed(replica, reason, candidates):
                self.replica, self.reason = _shared(replica), reason
            case Queued(position, candidates):
                self.reason, self.position = "queued", position
        if shift is not None:
            self.reason, self.surge = "shift", (shift.to, shift.backlog_s)
        self.scores = _encoded_scores(candidates, self.replica)

    def receive_control(self, line: bytes, now_us: int) -> None:
        """A frame that is no text."""
        if line.startswith(STARTED_PREFIX):
            note = decode(line)
            assert isinstance(note, Note)
            told = _STARTED.decode(note.body or b"{}")
            self.replica = _shared(msgspec.json.decode(told["replica"], type=ReplicaId))
            self.attempts = msgspec.json.decode(told["attempt"], type=int)
            self.started = now_us
        elif line.startswith(_FINISH_PREFIX):
            frame = decode(line)
            assert isinstance(frame, ChoiceEnd)
            self.finish_reason = frame.finish_reason

    def receive_stall(self) -> None:
        if not self.stalled_at:
            self.stalled_at = monotonic_us()

    def receive_drained(self) -> None:
        if self.stalled_at:
            self.stalled_us += monotonic_us() - self.stalled_at
            self.stalled_at = 0

    # --- the end -------------------------------------------------------------------------------------------

    def finish(
        self,
        ended: ReadEnd,
        *,
        end: End | None = None,
        error: StreamGwError | None = None,
        epoch: int = 1,
        last_seq: int = 0,
        tokens: int = 0,
    ) -> None:
        """The reader is over: tell it."""
        tracer = self.tracer
        stream: StreamId | Literal[""] = "" if self.facts is None else self.facts.stream
        if isinstance(error, Draining):
            ended = "drained"
        self.is_over = True
        done = monotonic_us()
        self.receive_drained()
        failed = error or (end.error if end is not None else None)
        failure = failed.code if failed is not None else ""
        ttft_us = self.first - self.received if self.first and self.role == "created" else 0
        trace_id = self.trace_id or stream[5:]
        tracer.on_over(
            Over(
                self.pool, self.role, ended, failed.http_status if failed is not None else 200, failure,
                done - self.received, ttft_us, tokens, trace_id, self.request_id, stream, self.tenant,
                TIERS[self.tier] if self.tier >= 0 else "", self.surge[0],
            )
        )  # fmt: skip
        if ended == "completed" and not sampled(stream, tracer.one_in):
            return
        offset = tracer.clock.offset_us
        told = end.timing if end is not None else None
        arrived = self.arrived or (done if end is not None else 0)
        wall_us, parts = phases(
            Moments(
                self.received, self.placing, self.placed, self.started, self.first, arrived, done,
                self.stalled_us, self._stalled_after(arrived, done), self.broke, self.gap_us,
            ),
            _shifted(told, -offset),
            created=self.role in ("created", "refused"),
            queued=self.reason == "queued",
        )  # fmt: skip
        usage = end.usage if end is not None else None
        facts, prices = self.facts, self.prices
        loaded = tracer.loaded(self.replica)
        model = "" if facts is None else facts.model
        status = error.http_status if error is not None and ended == "refused" else 200
        tracer.sink.emit(
            told_of := RequestTrace(
                id=f"{self.request_id}:{stream}:{self.received}",
                at_us=done + offset,
                gateway=tracer.gateway,
                role=self.role,
                ended=ended,
                tenant=self.tenant,
                wall_us=wall_us,
                phases=parts,
                stream=stream,
                request_id=self.request_id,
                trace_id=self.trace_id or stream[5:],
                user_hash=_hashed(self.tenant, self.user),
                model=model,
                adapter=model if model in loaded.adapters else "",
                artifact=loaded.artifact,
                pool=self.pool,
                replica=self.replica,
                session_hash=self.session,
                region=tracer.region,
                dialect="" if facts is None else f"openai.{facts.kind}",
                transport=self.transport,
                tier=TIERS[self.tier] if self.tier >= 0 else "",
                http_status=status,
                error_code=failure,
                finish_reason=self.finish_reason,
                placement=self.reason,
                queue_position=self.position,
                shifted_to=self.surge[0],
                backlog_ms=round(self.surge[1] * 1000),
                scores=msgspec.msgpack.decode(self.scores, type=tuple[CandidateScore, ...]) if self.scores else (),
                prompt_tokens=usage.prompt if usage else 0,
                cached_tokens=usage.cached if usage else 0,
                output_tokens=usage.output if usage else tokens,
                streamed_tokens=tokens,
                attempts=self.attempts,
                epochs=epoch,
                first_seq=self.first_seq,
                last_seq=last_seq,
                cancel_point=str(Cursor(epoch, last_seq - 1)) if ended == "cancelled" else "",
                ttft_us=self.first - self.received if self.first and self.role == "created" else 0,
                price_micro=prices.of(usage.prompt, usage.cached, usage.output) if prices and usage else 0,
                weight=tracer.one_in if ended == "completed" else 1,
            )
        )
        tracer.on_told(told_of, self.parent_id)

    def _stalled_after(self, arrived: int, done: int) -> int:
        return min(self.stalled_us, done - arrived) if arrived else 0


def _shared(replica: ReplicaId) -> ReplicaId:
    """One string for all the readers of a replica: there are thousands of them, each for as long as its stream runs."""
    return ReplicaId(sys.intern(replica))


def _shifted(told: Timing | None, by_us: int) -> Timing | None:
    if told is None:
        return None
    return msgspec.structs.replace(told, handed_us=told.handed_us + by_us, taken_us=told.taken_us + by_us)


def _hashed(tenant: TenantId, user: str | None) -> str:
    return hashlib.sha256(f"{tenant}\0{user}".encode()).hexdigest()[:16] if user else ""


def _encoded_scores(candidates: Sequence[Scored], taken: ReplicaId | Literal[""]) -> bytes:
    """The one taken, then the best of the others."""

    def rank(c: Scored) -> tuple[bool, bool, float]:
        return c.replica != taken, c.score_ms < 0, c.score_ms

    best = sorted(candidates, key=rank)[:SCORES_MAX]
    return msgspec.msgpack.encode(
        [
            CandidateScore(c.replica, round(c.score_ms), c.matched_tokens, c.in_flight, round(c.load_ms), c.barred)
            for c in best
        ]
    )
