"""Telemetry events: records of finished requests and of changes to the fleet. They are never part of a stream.

There are three kinds, joined by the stream's id: a gateway emits one ``RequestTrace`` per reader, an agent one
``AttemptTrace`` per attempt of a producer, and every process that acts on the fleet emits ``FleetEvent``. Times are in
microseconds; moments are Unix time on the fabric's clock. Money is in integer micro-units of the operator's currency.
Events contain prompts and completions only if the tenant's plan says so.

The schema only grows: a field is added with a default, none is renamed or reused. ``SCHEMA_VERSION`` is raised when a
consumer must know; a consumer moves records of a newer version than its own to the dead-letter queue.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId, spread_of

SCHEMA_VERSION = 1
SCORES_MAX = 8
"""Maximum number of placement candidates in an event: the chosen one and the best of the others."""
TOKEN_TIMES_MAX = 4096
"""Maximum number of token times in an event; later tokens are left out."""

Role = Literal["created", "attached", "resumed", "refused"]
"""Origin of the reader. ``created``: its request created the stream. ``attached``: its Idempotency-Key
named an existing stream. ``resumed``: it read the stream by id. ``refused``: no stream was created."""

ReadEnd = Literal["completed", "cancelled", "failed", "incomplete", "left", "stalled", "drained", "refused"]
"""Outcome for this reader. The first four are the stream's terminal status. ``left``: the client left earlier."""

AttemptEnd = Literal["completed", "cancelled", "failed", "incomplete", "handed_over", "yielded", "lost"]
"""Outcome of an attempt. ``handed_over``: the replica gave the stream to another one. ``yielded``: a batch stream was
put back into the queue, because higher tiers needed its slot. ``lost``: the replica died; the process that recovered
the stream emits the event."""

What = Literal[
    "lease", "scale", "rollout", "shed", "breaker", "drain", "dead",
    "shed_begin", "shed_end", "shift_begin", "shift_end", "yield_begin", "yield_end", "promote",
    "budget_warning", "budget_exceeded", "velocity_trip",
]  # fmt: skip
"""Kinds of fleet events:

- ``lease``: a replica changed its state in its pool, or left. ``dead``: a lease expired.
- ``drain``: somebody requested a drain. ``promote``: a warm replica was told to take requests.
- ``breaker``: the circuit breaker of an agent changed, because its engine fails or works again.
- ``shed``: number of rejected requests. ``shed_begin``, ``shed_end``: a pool rejects a tier's requests for its backlog.
- ``shift_begin``, ``shift_end``: a pool's requests overflow to adjacent pools.
- ``yield_begin``, ``yield_end``: batch work of a pool yields to requests of higher tiers.
- ``scale``: the wanted number of replicas changed.
- ``budget_warning``: 80 % of a tenant's budget of a period are used or reserved. ``budget_exceeded``: a budget has
  refused a request or ended a stream. ``velocity_trip``: the same for a tenant's budget of an hour. Each comes once in
  the period, with the budget's name in ``state``.
- ``rollout``: a pool begins to run several revisions (``begin``), or runs one again (``end``).
"""


class Prices(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Prices per million tokens, in micro-units, as of the request's start.

    A cached prompt token costs ``cached`` instead of ``prompt``.
    """

    prompt: int = 0
    cached: int = 0
    output: int = 0

    def of(self, prompt: int, cached: int, output: int) -> int:
        """Price of a request's tokens in micro-units; the sum is rounded half up."""
        cached = min(cached, prompt)
        return ((prompt - cached) * self.prompt + cached * self.cached + output * self.output + 500_000) // 1_000_000


class Phases(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Breakdown of a reader's wall time, in microseconds.

    The phases add up to the wall time. ``residual_us`` is the unexplained rest; clock errors can make it negative.
    """

    gateway_us: int = 0
    """Authenticating, reading and parsing the request."""
    admission_us: int = 0
    """Idempotency key, what the request builds on, limits, moderation of the prompt, and the placement call."""
    pool_queue_us: int = 0
    engine_queue_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    fabric_us: int = 0
    """Transport between gateway and agent, both ways; and to an engine that reports its own times."""
    client_stall_us: int = 0
    """Time in which the reader's connection accepted no bytes."""
    resume_gap_us: int = 0
    """Time in which the reader was disconnected."""
    recovery_us: int = 0
    """Time from a replica's death until another replica took the stream over."""
    check_us: int = 0
    """Check of a structured reply against its schema, and the replies that were made again because one did not fit.
    Moderation of an answer after its last token."""
    steer_us: int = 0
    """From the cut of an answer by an input of the client to the first token of the next answer, over all inputs."""
    residual_us: int = 0

    @property
    def total_us(self) -> int:
        return sum(getattr(self, name) for name in PHASES)


PHASES: tuple[str, ...] = Phases.__struct_fields__


class Timing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Times of the last attempt, sent by its agent with the terminal."""

    waited_us: int
    """Time in the pool's queue."""
    handed_us: int
    """Moment when the request entered the replica's inbox."""
    taken_us: int
    """Moment when the agent read it."""
    queue_us: int
    """Time in the engine before prefill."""
    prefill_us: int
    decode_us: int
    """Time from the first token to the last of the engine's reply. Without a first token it is 0, and ``prefill_us``
    lasts to the end, or to the first input."""
    check_us: int = 0
    """Time from there to the end, in which a reply was checked or moderated, and perhaps made again."""
    steer_us: int = 0
    """As in ``Phases``; in no other of these times."""


class InputTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One input of the client, as its replica took it."""

    at_us: int
    """Moment when a gateway received it; 0: unknown."""
    result: Literal["applied", "refused"]
    reason: str
    """Why it was refused, as in ``InputNote``."""
    waited_us: int
    """Time from there until the replica applied or refused it."""
    answered_us: int = 0
    """Time from there to the first token of the next answer; 0: none came."""


class CandidateScore(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Score of one placement candidate; the fields are those of ``placement.Scored``."""

    replica: ReplicaId
    score_ms: float
    matched_tokens: int
    in_flight: int
    load_ms: float
    barred: str


class RequestTrace(msgspec.Struct, frozen=True, tag_field="kind", tag="request", omit_defaults=True):
    """One reader of a stream, emitted by its gateway when the reader is done."""

    id: str
    """Id of this event; a repeated event has the same id."""
    at_us: int
    """Moment when the reader was done."""
    gateway: GatewayId
    role: Role
    ended: ReadEnd
    tenant: TenantId
    wall_us: int
    """Time from the request's first byte at the gateway to the last byte that the socket accepted."""
    phases: Phases
    v: int = SCHEMA_VERSION
    stream: StreamId | Literal[""] = ""
    request_id: str = ""
    trace_id: str = ""
    """W3C trace id, 32 hex digits: the client's or our own."""
    user_hash: str = ""
    model: str = ""
    adapter: str = ""
    """The model's name again if it is a LoRA adapter; otherwise empty."""
    artifact: str = ""
    """Hash of the files the model was loaded from; empty: the engine does not report it."""
    pool: str = ""
    """Home pool of the request, also if an adjacent pool served it: pools are scaled by their own arrivals."""
    replica: ReplicaId | Literal[""] = ""
    session_hash: str = ""
    region: str = ""
    dialect: str = ""
    transport: Literal["sse", "ws", "whole", ""] = ""
    tier: str = ""
    http_status: int = 200
    error_code: str = ""
    finish_reason: str = ""
    placement: str = ""
    """Reason of the placement: pin, prefix, load, spill, only, queued, shift (overflow), batch_host,
    fallback (a smaller model)."""
    queue_position: int = 0
    scores: tuple[CandidateScore, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """Output tokens according to the stream's terminal; for a reader that left before it, the tokens it was sent."""
    streamed_tokens: int = 0
    """Output tokens that were sent to this reader."""
    attempts: int = 1
    epochs: int = 1
    first_seq: int = 0
    last_seq: int = 0
    cancel_point: str = ""
    """Cursor at which a cancel was accepted."""
    ttft_us: int = 0
    """Time from the request's first byte to the first token; 0: no token came."""
    price_micro: int = 0
    weight: int = 1
    """Sampling weight: this event represents N requests."""
    prompt: str = ""
    completion: str = ""
    shifted_to: str = ""
    """Adjacent pool, batch host or pool of a smaller model that took the request; empty: none."""
    backlog_ms: int = 0
    """Backlog ahead of the request in its home pool when it was rejected or overflowed."""
    retention_days: int = 0
    """Days that the row is kept, by the tenant's plan. 0: as the platform is set. -1: only roll-ups are kept."""
    regions: str = ""
    """Regions that the request was bound to, separated by commas; empty: none."""
    asked_model: str = ""
    """Model that the request named, if ``model``, a smaller one, answered it; else empty."""
    schema_check: Literal["valid", "invalid", "unchecked", ""] = ""
    """Check of the reply against the schema that the request asks for, the worst of its choices; empty: none."""
    repairs: int = 0
    """Replies that did not fit their schema and were made again."""
    inputs: int = 0
    """Inputs that were applied to the stream, as this reader has seen them."""
    inputs_refused: int = 0


class AttemptTrace(msgspec.Struct, frozen=True, tag_field="kind", tag="attempt", omit_defaults=True):
    """One producer's attempt at a stream. Exactly one attempt of a stream has ``billed``: it is the stream's bill."""

    id: str
    at_us: int
    stream: StreamId
    tenant: TenantId
    model: str
    pool: str
    replica: ReplicaId
    ended: AttemptEnd
    v: int = SCHEMA_VERSION
    epoch: int = 1
    attempt: int = 1
    engine: str = ""
    region: str = ""
    hardware: str = ""
    tier: str = ""
    trace_id: str = ""
    waited_us: int = 0
    inbox_us: int = 0
    engine_queue_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    check_us: int = 0
    """As in ``Timing``; so is ``steer_us``."""
    steer_us: int = 0
    inputs: tuple[InputTimes, ...] = ()
    """Inputs that this attempt applied or refused."""
    queue_estimated: bool = True
    """True: the engine does not report its queue time; time that prefill does not explain counts as queue."""
    believed_cached_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """Output tokens of the stream so far, as in its log; with ``billed``, the billed tokens."""
    generated_tokens: int = 0
    """Output tokens generated in this attempt, whether or not a reader saw them."""
    reasoning_tokens: int = 0
    finish_reason: str = ""
    error_code: str = ""
    last_seq: int = 0
    billed: bool = False
    price_micro: int = 0
    itl_sketch: tuple[int, ...] = ()
    """Histogram of the gaps between tokens, by ``gap_histogram.itl_bucket``."""
    itl_max_us: int = 0
    token_us: tuple[int, ...] = ()
    """Time of each token since the previous one, in sampled attempts; the first since the attempt began."""
    decoding_us: int = 0
    """Sum of decode times of all sequences on the replica during ``decode_us``. Divided by ``decode_us`` it is the mean
    number of sequences that shared a step. 0: unknown."""
    key: str = ""
    """Id of the API key that made the request, or that minted its capability token."""
    user_hash: str = ""
    """As in ``RequestTrace``; so is ``session_hash``."""
    session_hash: str = ""
    endpoint: str = ""
    """Kind of the request: chat, completions, embeddings, rerank, classify, score, tokenize."""
    gpu_us: int = 0
    """Share of the replica's busy time: each moment is divided equally among the sequences that it computes."""
    gpu_cost_micro: int = 0
    """Cost of ``gpu_us`` in micro-units, by the agent's price for an hour; 0: no price is set."""
    retention_days: int = 0
    """As in ``RequestTrace``; bills by the hour are kept in any case."""


class FleetEvent(msgspec.Struct, frozen=True, tag_field="kind", tag="fleet", omit_defaults=True):
    """A change in the fleet."""

    id: str
    at_us: int
    what: What
    source: str
    """Part that did it or saw it."""
    v: int = SCHEMA_VERSION
    pool: str = ""
    replica: ReplicaId | Literal[""] = ""
    state: str = ""
    """State of the lease or the breaker, or the layer that rejected requests."""
    reason: str = ""
    figures: dict[str, float] = {}
    """Figures that the decision was based on."""
    asked_by: str = ""
    """Requester: operator, health, controller, SIGTERM, standby; empty: nobody requested it."""
    tenant: str = ""
    """Tenant whose budget it is about; empty: none."""


Event = RequestTrace | AttemptTrace | FleetEvent

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)


def decode_event(record: bytes) -> Event:
    """Decode an event. Raises msgspec.MsgspecError if it is no event, ValueError if its schema is newer."""
    event = _decoder.decode(record)
    if event.v > SCHEMA_VERSION:
        raise ValueError(
            f"the event has schema version {event.v}, this process knows {SCHEMA_VERSION}; upgrade this process"
        )
    return event


def billable(event: Event) -> bool:
    """True for billing events, which must never be dropped."""
    return isinstance(event, AttemptTrace) and event.billed


def sampled(stream: str, one_in: int) -> bool:
    """True if the stream belongs to a sample of 1 in ``one_in``; every process gives the same answer."""
    return one_in <= 1 or spread_of(stream.encode()) % one_in == 0


def event_key(event: Event) -> bytes:
    """Partition key of an event: all events of a stream go to one partition."""
    match event:
        case RequestTrace(stream=stream) if stream:
            return stream.encode()
        case AttemptTrace(stream=stream):
            return stream.encode()
        case FleetEvent(pool=pool) if pool:
            return pool.encode()
    return event.id.encode()


class NoEvents:
    """An ``EventSink`` that drops everything."""

    def emit(self, event: Event) -> None: ...
