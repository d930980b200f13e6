"""Emits one trace per reader when it ends. On the way it only records timestamps, none of them per token."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from stream_fabric.errors import Draining, StreamGwError
from stream_fabric.events import CandidateScore, Phases, Prices, ReadEnd, RequestTrace, Role, Timing, sampled
from stream_fabric.pool.overload import BatchHosted, Fallback, Overflow
from stream_fabric.pool.placement import TIERS, Placed, Queued
from stream_fabric.pool.records import Loaded
from stream_fabric.ports import Clock, EventSink
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import (
    INPUT_PREFIX,
    SCHEMA_MISMATCH,
    STARTED_PREFIX,
    Check,
    ChoiceEnd,
    End,
    ErrorInfo,
    Note,
    decode,
    schema_mismatch,
    worse_check,
)
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId, hashed_user
from stream_gw.dialects.facts import StreamFacts
from stream_gw.observe.scores import encoded_scores
from stream_gw.observe.steered import Steered
from stream_gw.observe.timeline import Timestamps, phases

_FINISH_PREFIX = b'{"k":"choice-end"'
_OPEN_PREFIX = b'{"k":"open"'
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16}-[0-9a-f]{2})")
_STARTED = msgspec.json.Decoder(dict[str, msgspec.Raw])
_scores: msgspec.msgpack.Decoder[tuple[CandidateScore, ...]] = msgspec.msgpack.Decoder(tuple[CandidateScore, ...])

Transport = Literal["sse", "ws", "whole"]


class ReaderOutcome(NamedTuple):
    """Result of one reader. Every reader has one, also when its trace is not sampled."""

    pool: str
    role: Role
    ended: ReadEnd
    http_status: int
    """HTTP status of the response; for an error inside the stream, the status it would have had."""
    error_code: str
    wall_us: int
    ttft_us: int
    tokens: int
    trace_id: str
    request_id: str
    stream: str
    tenant: TenantId
    tier: str = ""
    overflow_to: str = ""
    """The adjacent pool or batch host that took the request; empty: its home did."""
    elsewhere: str = ""
    """``batch_host``: ``overflow_to`` is a batch host. ``fallback``: it is the pool of a smaller model."""
    replica: ReplicaId | Literal[""] = ""
    """Replica that the request was placed on."""
    ttft_error_us: int | None = None
    """Time from placement to the first token, less what placement expected; None: nothing was expected."""
    dialect: str = ""
    """Dialect that the reader reads in; empty: it was refused before that was known."""

    @property
    def is_sampled(self) -> bool:
        """True if one of N such readers leaves a trace; False: each does."""
        return self.ended == "completed" and self.error_code != SCHEMA_MISMATCH


def _ignore(*args: object) -> None:
    pass


def _nothing_loaded(replica: str) -> Loaded:
    return Loaded()


def _platform_days(tenant: TenantId) -> int:
    return 0


@dataclass(frozen=True)
class Tracer:
    """Configuration and consumers of one gateway's traces."""

    sink: EventSink
    clock: Clock
    gateway: GatewayId
    region: str = ""
    one_in: int = 1
    """Trace 1 in N completed readers; readers that ended otherwise always leave a trace."""
    on_outcome: Callable[[ReaderOutcome], None] = _ignore
    """Called for every reader."""
    loaded: Callable[[ReplicaId | Literal[""]], Loaded] = _nothing_loaded
    """Adapters and artifact that a replica has loaded."""
    on_trace: Callable[[RequestTrace, str], None] = _ignore
    """Called with a trace and the client's span id (empty: none), but not for successes that the client leaves out."""
    retention_days: Callable[[TenantId], int] = _platform_days
    """Returns the ``retention_days`` of a tenant's traces."""


_NO_OVERFLOW = ("", 0.0)
"""(adjacent pool or batch host that took the request, backlog in its home pool in seconds)."""


class ReaderTrace:
    """Collects one reader's trace. Timestamps are microseconds on the monotonic clock; 0: has not happened."""

    __slots__ = (
        "arrived", "asked_model", "attempts", "broke", "check", "continued", "dialect", "expected_us", "facts",
        "finish_reason", "first", "first_seq", "gap_us", "has_ended", "overflow", "parent", "paused_us", "placed",
        "placing", "pool", "position", "prices", "reason", "received", "regions", "replica", "request_id", "role",
        "scores", "session", "stalled_at", "stalled_us", "started", "steered", "tenant", "tier", "trace_id", "tracer",
        "transport", "user",
    )  # fmt: skip

    def __init__(
        self,
        tracer: Tracer,
        request_id: str,
        transport: Transport,
        traceparent: str | None = None,
        received_us: int | None = None,
    ) -> None:
        """``traceparent``: the client's W3C trace context; an invalid one is ignored, as the standard demands.
        ``received_us``: time of the request's first byte; None: now."""
        self.tracer = tracer
        self.request_id = request_id
        self.transport = transport
        found = _TRACEPARENT.fullmatch(traceparent or "")
        self.trace_id = found[1] if found and found[1].strip("0") else ""
        """The client's trace id; empty: the digits of the stream's id serve as trace id."""
        self.parent = found[2] if found and self.trace_id else ""
        """The client's span id and trace flags; empty: it sent none."""
        self.received = tracer.clock.monotonic_us() if received_us is None else received_us
        self.role: Role = "refused"
        self.has_ended = False
        self.tenant = TenantId("")
        self.placing = self.placed = self.started = self.first = self.arrived = 0
        self.broke = self.continued = self.paused_us = 0
        self.stalled_at = self.stalled_us = self.gap_us = self.position = 0
        self.expected_us = 0
        """Expected time from placement to the first token; 0: none was expected."""
        self.attempts = self.first_seq = 1
        self.facts: StreamFacts | None = None
        self.user: str | None = None
        self.asked_model = ""
        """Model that the request names, if a smaller one answers; else empty."""
        self.pool = self.session = self.reason = self.finish_reason = self.dialect = ""
        self.check: Check | None = None
        """The worst check of a choice against its schema."""
        self.steered: Steered | None = None
        """Inputs that the stream got; None: it got none."""
        self.overflow = _NO_OVERFLOW
        self.replica: ReplicaId | Literal[""] = ""
        self.tier = -1
        self.regions: tuple[str, ...] = ()
        """Regions that the request is bound to; empty: none."""
        self.prices: Prices | None = None
        self.scores = b""
        """Scores of the candidates, encoded because an object per candidate would cost more memory."""

    def traceparent(self, stream: StreamId) -> str:
        """Return the trace context for the stream's producer. Our span id is the end of the stream's id."""
        return f"00-{self.trace_id or stream[5:]}-{stream[-16:]}-{self._is_recorded:02x}"

    @property
    def _is_recorded(self) -> bool:
        """False: the client's context lacks the sampled flag; OpenTelemetry's parent-based sampler sends no spans."""
        return not self.parent or int(self.parent[17:], 16) & 1 == 1

    # --- on the way ----------------------------------------------------------------------------------------

    def receive_placed(
        self, placed: Placed | Queued, elsewhere: Overflow | BatchHosted | Fallback | None = None
    ) -> None:
        """Record the placement: its time, replica, reason and scores."""
        self.placed = self.tracer.clock.monotonic_us()
        match placed:
            case Placed(replica, reason, candidates, expected_ms):
                self.replica, self.reason, self.expected_us = _shared_id(replica), reason, int(expected_ms * 1000)
            case Queued(position, candidates):
                self.reason, self.position = "queued", position
        match elsewhere:
            case Overflow(_, to, backlog_s):
                self.reason, self.overflow = "shift", (to, backlog_s)
            case BatchHosted(_, to):
                self.reason, self.overflow = "batch_host", (to, 0.0)
            case Fallback(_, to, model, asked):
                self.reason, self.overflow, self.asked_model = "fallback", (to, 0.0), asked
                assert self.facts is not None
                self.facts = msgspec.structs.replace(self.facts, model=model)
        self.scores = encoded_scores(candidates, self.replica)

    def receive_control(self, line: bytes, now_us: int) -> None:
        """Record what a frame without text says: the producer that started, or why a choice finished."""
        if line.startswith(STARTED_PREFIX):
            note = decode(line)
            assert isinstance(note, Note)
            body = _STARTED.decode(note.body or b"{}")
            self.replica = _shared_id(msgspec.json.decode(body["replica"], type=ReplicaId))
            self.attempts = msgspec.json.decode(body["attempt"], type=int)
            self.started = self.started or now_us
            if self.role == "refused":  # the producer was quicker than the reply of the create
                self.role = "created"
        elif line.startswith(_FINISH_PREFIX):
            frame = decode(line)
            assert isinstance(frame, ChoiceEnd)
            self.finish_reason = frame.finish_reason
            self.check = worse_check(self.check, frame.check)
        elif line.startswith(INPUT_PREFIX):
            self.steered = self.steered or Steered()
            self.steered.receive_note(line, now_us, early=not self.first)
        elif self.steered is not None and line.startswith(_OPEN_PREFIX):
            self.steered.receive_output(now_us)

    def receive_stall(self) -> None:
        """Record that the reader's outlet is full."""
        if not self.stalled_at:
            self.stalled_at = self.tracer.clock.monotonic_us()

    def receive_break(self, at_us: int) -> None:
        """Record the last frame of a producer that another one follows."""
        if 0 < self.first <= self.broke < self.continued:
            self.paused_us += self.continued - self.broke
        self.broke = at_us
        if self.steered is not None:
            self.steered.receive_break(at_us)

    def receive_continuation(self) -> None:
        """Record that the first frame of a following producer has arrived."""
        self.continued = self.tracer.clock.monotonic_us()

    def receive_drained(self) -> None:
        """Record that the reader's outlet has drained, and count the stalled time."""
        if self.stalled_at:
            self.stalled_us += self.tracer.clock.monotonic_us() - self.stalled_at
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
        """Record the reader's end: report its outcome and, if it is sampled, emit its trace."""
        tracer = self.tracer
        if isinstance(error, Draining) and ended != "refused":
            ended = "drained"
        self.has_ended = True
        done = tracer.clock.monotonic_us()
        self.receive_drained()
        failure = error or (end.error if end is not None else None)
        outcome = self._outcome(ended, done, failure, tokens)
        tracer.on_outcome(outcome)
        if outcome.is_sampled and not sampled(outcome.stream, tracer.one_in):
            return
        status = error.http_status if error is not None and ended == "refused" else 200
        trace = self._trace(outcome, end, done, status, epoch, last_seq)
        tracer.sink.emit(trace)
        if self._is_recorded or not outcome.is_sampled:
            tracer.on_trace(trace, self.parent[:16])

    def _outcome(
        self, ended: ReadEnd, done: int, failure: StreamGwError | ErrorInfo | None, tokens: int
    ) -> ReaderOutcome:
        stream = "" if self.facts is None else self.facts.stream
        is_expected = self.expected_us and self.first and self.attempts == 1
        return ReaderOutcome(
            self.pool,
            self.role,
            ended,
            200 if failure is None else failure.http_status,
            schema_mismatch(self.check) if failure is None else failure.code,
            done - self.received,
            self.first - self.received if self.first and self.role == "created" else 0,
            tokens,
            self.trace_id or stream[5:],
            self.request_id,
            stream,
            self.tenant,
            TIERS[self.tier] if self.tier >= 0 else "",
            self.overflow[0],
            self.reason if self.reason in ("batch_host", "fallback") else "",
            self.replica,
            self.first - self.placed - self.expected_us if is_expected else None,
            self.dialect or ("" if self.facts is None else self.facts.own_dialect),
        )

    def _phases(self, end: End | None, done: int) -> tuple[int, Phases]:
        arrived = self.arrived or (done if end is not None else 0)
        stalled_after_us = min(self.stalled_us, done - arrived) if arrived else 0
        timing = end.timing if end is not None else None
        if self.steered is not None:
            self.steered.receive_output(arrived or done)
        return phases(
            Timestamps(
                self.received, self.placing, self.placed, self.started, self.first, arrived, done,
                self.stalled_us, stalled_after_us, self.broke, self.gap_us, self.paused_us, self.steered,
                self.continued if self.continued > self.broke else 0,
            ),
            None if timing is None else _on_our_clock(timing, self.tracer.clock.offset_us),
            created=self.role in ("created", "refused"),
            queued=self.reason == "queued",
        )  # fmt: skip

    def _trace(
        self, outcome: ReaderOutcome, end: End | None, done: int, status: int, epoch: int, last_seq: int
    ) -> RequestTrace:
        tracer, facts, prices = self.tracer, self.facts, self.prices
        stream: StreamId | Literal[""] = "" if facts is None else facts.stream
        wall_us, parts = self._phases(end, done)
        usage = end.usage if end is not None else None
        loaded = tracer.loaded(self.replica)
        model = "" if facts is None else facts.model
        return RequestTrace(
            id=f"{self.request_id}:{stream}:{self.received}",
            at_us=done + tracer.clock.offset_us,
            gateway=tracer.gateway,
            role=self.role,
            ended=outcome.ended,
            tenant=self.tenant,
            wall_us=wall_us,
            phases=parts,
            stream=stream,
            request_id=self.request_id,
            trace_id=outcome.trace_id,
            user_hash=hashed_user(self.tenant, self.user),
            model=model,
            adapter=model if model in loaded.adapters else "",
            artifact=loaded.artifact,
            pool=self.pool,
            replica=self.replica,
            session_hash=self.session,
            region=tracer.region,
            asked_model=self.asked_model,
            regions=",".join(self.regions),
            dialect=outcome.dialect,
            transport=self.transport,
            tier=outcome.tier,
            http_status=status,
            error_code=outcome.error_code,
            finish_reason=self.finish_reason,
            schema_check=self.check.result if self.check else "",
            repairs=self.check.repairs if self.check else 0,
            inputs=self.steered.applied if self.steered else 0,
            inputs_refused=self.steered.refused if self.steered else 0,
            placement=self.reason,
            queue_position=self.position,
            shifted_to=self.overflow[0],
            backlog_ms=round(self.overflow[1] * 1000),
            scores=_scores.decode(self.scores) if self.scores else (),
            prompt_tokens=usage.prompt if usage else 0,
            cached_tokens=usage.cached if usage else 0,
            output_tokens=usage.output if usage else outcome.tokens,
            streamed_tokens=outcome.tokens,
            attempts=self.attempts,
            epochs=epoch,
            first_seq=self.first_seq,
            last_seq=last_seq,
            cancel_point=str(Cursor(epoch, last_seq - 1)) if outcome.ended == "cancelled" else "",
            ttft_us=outcome.ttft_us,
            price_micro=prices.of(usage.prompt, usage.cached, usage.output) if prices and usage else 0,
            weight=tracer.one_in if outcome.is_sampled else 1,
            retention_days=tracer.retention_days(self.tenant),
        )


def _shared_id(replica: ReplicaId) -> ReplicaId:
    """Return one string object per replica, shared by the thousands of readers that hold it."""
    return ReplicaId(sys.intern(replica))


def _on_our_clock(timing: Timing, offset_us: int) -> Timing:
    """Return the producer's timing in this gateway's clock, which is ``offset_us`` behind the fabric's."""
    return msgspec.structs.replace(timing, handed_us=timing.handed_us - offset_us, taken_us=timing.taken_us - offset_us)
