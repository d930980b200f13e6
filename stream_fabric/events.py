"""Telemetry events: what each process knows of a request, said once, when it is over. Never part of a stream.

Three processes know parts of a request's life, so there are three kinds, joined by the stream's id: a gateway tells
of each reader (``RequestTrace``), an agent of each producer's try (``AttemptTrace``), and whoever acts on the fleet of
what it did (``FleetEvent``). Times are microseconds; a moment is on the fabric's clock, which is Redis's, since 1970.
Money is integer micro-units of the operator's currency. Prompts and completions are in no event but where a tenant's
plan says so.

The schema only grows: a field is added with a default, none is renamed or reused. ``SCHEMA_VERSION`` is raised when a
consumer must know; a consumer that meets a newer version than its own puts the record aside.
"""

from __future__ import annotations

from binascii import crc32
from collections.abc import Sequence
from typing import Literal

import msgspec

from stream_fabric.ids import GatewayId, ReplicaId, StreamId, TenantId

SCHEMA_VERSION = 1
SCORES_MAX = 8
"""Of a placement's candidates, those that are kept: the one taken and the best of the others."""
TOKEN_TIMES_MAX = 4096

Role = Literal["created", "attached", "resumed", "refused"]
"""``created``: the request that made the stream, one a stream. ``attached``: it found it by its Idempotency-Key.
``resumed``: another reader, or the same one again. ``refused``: no stream was made."""

ReadEnd = Literal["completed", "cancelled", "failed", "incomplete", "left", "stalled", "drained", "refused"]
"""How it ended for this reader. The first four: with the stream's terminal. ``left``: the client went away before."""

AttemptEnd = Literal["completed", "cancelled", "failed", "incomplete", "handed_over", "lost"]
"""``handed_over``: the replica gave it to another. ``lost``: the replica died; whoever noticed tells it."""

What = Literal[
    "lease", "scale", "rollout", "shed", "breaker", "drain", "dead",
    "shed_begin", "shed_end", "shift_begin", "shift_end", "promote",
]  # fmt: skip
"""``lease``: a replica's state in its pool, and that it has left. ``drain``: somebody has asked for one. ``breaker``:
of an agent whose engine fails. ``shed``: requests were refused, counted. ``dead``: a lease ended unrenewed.
``shed_begin``, ``shed_end``: a pool refuses requests of a tier for its backlog. ``shift_begin``, ``shift_end``: its
requests go to adjacent pools. ``promote``: a warm replica is to take requests. ``scale``: how many there are to be."""


class Prices(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Micro-units for a million tokens, frozen with the request. ``cached`` tokens are priced instead of, not besides,
    those of the prompt."""

    prompt: int = 0
    cached: int = 0
    output: int = 0

    def of(self, prompt: int, cached: int, output: int) -> int:
        """Micro-units, rounded half up once, at the end."""
        cached = min(cached, prompt)
        return ((prompt - cached) * self.prompt + cached * self.cached + output * self.output + 500_000) // 1_000_000


class Phases(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Where the reader's time went, in microseconds. They add up to its wall time; what nobody can account for is the
    ``residual_us``, which is negative where clocks have told of more than passed."""

    gateway_us: int = 0
    """Reading, checking and understanding the request."""
    admission_us: int = 0
    """Limits, and the call that places it."""
    pool_queue_us: int = 0
    engine_queue_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    fabric_us: int = 0
    """Between gateway and agent, both ways; and to an engine that tells its own times."""
    client_stall_us: int = 0
    """The reader's connection took nothing more."""
    resume_gap_us: int = 0
    """The stream went on, or waited, while its reader was away."""
    recovery_us: int = 0
    """A replica had died, and another had to take the stream over."""
    residual_us: int = 0

    @property
    def total_us(self) -> int:
        return sum(getattr(self, name) for name in PHASES)


PHASES: tuple[str, ...] = Phases.__struct_fields__


class Timing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the agent of a stream's last producer tells the gateways, with the terminal."""

    waited_us: int
    """In the pool's queue."""
    handed_us: int
    """The moment its replica got it."""
    taken_us: int
    """The moment the agent read it."""
    queue_us: int
    """In the engine, before its computation began."""
    prefill_us: int
    decode_us: int
    """From the first token to the end; 0 and ``prefill_us`` to the end when there was none."""


class CandidateScore(msgspec.Struct, frozen=True, array_like=True, gc=False):
    replica: ReplicaId
    score_ms: float
    matched_tokens: int
    in_flight: int
    load_ms: float
    barred: str


class RequestTrace(msgspec.Struct, frozen=True, tag_field="kind", tag="request", omit_defaults=True):
    """One reader of a stream, told by its gateway when it is over."""

    id: str
    """Names this event."""
    at_us: int
    """The moment it was over."""
    gateway: GatewayId
    role: Role
    ended: ReadEnd
    tenant: TenantId
    wall_us: int
    """From the request's first byte at the gateway to the last byte that its socket took."""
    phases: Phases
    v: int = SCHEMA_VERSION
    stream: StreamId | Literal[""] = ""
    request_id: str = ""
    trace_id: str = ""
    """32 hex digits: W3C trace context, the client's or our own."""
    user_hash: str = ""
    model: str = ""
    adapter: str = ""
    """The model's name once more, where it is a LoRA adapter."""
    artifact: str = ""
    """Hash of what the model was loaded from, where the engine tells."""
    pool: str = ""
    """Whose request it is, wherever it ran: a pool's arrivals are what it is scaled by."""
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
    """Why it went where it went: pin, prefix, load, spill, only, queued, shift."""
    queue_position: int = 0
    scores: tuple[CandidateScore, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """As the stream's terminal tells; of a reader that left before, what it was shown."""
    streamed_tokens: int = 0
    """Counted in what this reader was shown."""
    attempts: int = 1
    epochs: int = 1
    first_seq: int = 0
    last_seq: int = 0
    cancel_point: str = ""
    """The cursor that a cancel was accepted at."""
    ttft_us: int = 0
    """From the request's first byte to the first token's; 0: none came."""
    price_micro: int = 0
    weight: int = 1
    """So many requests like this one stand behind it: head sampling."""
    prompt: str = ""
    completion: str = ""
    shifted_to: str = ""
    """The adjacent pool that took it."""
    backlog_ms: int = 0
    """What was ahead of it in its own pool when that refused it or let another take it."""


class AttemptTrace(msgspec.Struct, frozen=True, tag_field="kind", tag="attempt", omit_defaults=True):
    """One producer's try at a stream. The one with ``billed`` is the stream's bill: there is one a stream."""

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
    queue_estimated: bool = True
    """The engine does not tell when it began; what the prompt's computation does not explain counts as queue."""
    believed_cached_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """Of the stream up to here, as its log holds them: with ``billed`` what is billed."""
    generated_tokens: int = 0
    """What the engine has made in this try, shown or not."""
    reasoning_tokens: int = 0
    finish_reason: str = ""
    error_code: str = ""
    last_seq: int = 0
    billed: bool = False
    price_micro: int = 0
    itl_sketch: tuple[int, ...] = ()
    """Gaps between tokens, counted by ``itl_bucket``."""
    itl_max_us: int = 0
    token_us: tuple[int, ...] = ()
    """Sampled: of each token, microseconds since the one before; first since the try began."""
    decoding_us: int = 0
    """What ``decode_us`` is of this sequence alone, summed over all that decoded on the replica meanwhile: divided by
    it, how many shared a step. 0: untold."""


class FleetEvent(msgspec.Struct, frozen=True, tag_field="kind", tag="fleet", omit_defaults=True):
    """Something that happened to the fleet."""

    id: str
    at_us: int
    what: What
    source: str
    """Who did it or saw it."""
    v: int = SCHEMA_VERSION
    pool: str = ""
    replica: ReplicaId | Literal[""] = ""
    state: str = ""
    """A lease's state, a breaker's, a shed's layer."""
    reason: str = ""
    figures: dict[str, float] = {}
    """What it rested on."""
    asked_by: str = ""
    """Who wanted it: operator, health, controller, SIGTERM, standby; empty: nobody did, it came about."""


Event = RequestTrace | AttemptTrace | FleetEvent

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)


def decode_event(record: bytes) -> Event:
    """Raises msgspec.MsgspecError on what is no event, ValueError on one of a newer schema."""
    event = _decoder.decode(record)
    if event.v > SCHEMA_VERSION:
        raise ValueError(f"the event has schema version {event.v}, this process knows {SCHEMA_VERSION}; upgrade it")
    return event


def billable(event: Event) -> bool:
    """Whether it must never be dropped."""
    return isinstance(event, AttemptTrace) and event.billed


def sampled(stream: str, one_in: int) -> bool:
    """Whether a stream belongs to the sample of one in so many: the same answer in every process."""
    return one_in <= 1 or crc32(stream.encode(), 0x5EED) % one_in == 0


def event_key(event: Event) -> bytes:
    """What decides an event's partition: all of a stream in one."""
    match event:
        case RequestTrace(stream=stream) if stream:
            return stream.encode()
        case AttemptTrace(stream=stream):
            return stream.encode()
        case FleetEvent(pool=pool) if pool:
            return pool.encode()
    return event.id.encode()


# --- gaps between tokens -------------------------------------------------------------------------------------

ITL_BUCKETS = 112


def itl_bucket(gap_us: int) -> int:
    """The bucket of a gap: four to each doubling, so a bucket's bounds are at most 25 % apart."""
    if gap_us < 4:
        return max(gap_us, 0)
    bits = gap_us.bit_length()
    return min(4 * (bits - 2) + (gap_us >> (bits - 3) & 3), ITL_BUCKETS - 1)


def itl_bounds_us(bucket: int) -> tuple[int, int]:
    """The gaps in a bucket, from and up to."""
    if bucket < 4:
        return bucket, bucket + 1
    shift = bucket // 4 - 1
    low = (4 + bucket % 4) << shift
    return low, low + (1 << shift)


def itl_quantile_us(sketch: Sequence[int], share: float) -> float:
    """The gap that so much of the sketch is below, in the middle of its bucket; 0 of an empty one."""
    wanted, seen = share * sum(sketch), 0
    for bucket, count in enumerate(sketch):
        seen += count
        if count and seen >= wanted:
            low, high = itl_bounds_us(bucket)
            return (low + high) / 2
    return 0.0
