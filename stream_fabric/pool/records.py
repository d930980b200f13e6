"""Records that processes exchange about a pool: requests, replicas and the queue. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from stream_fabric.events import Prices
from stream_fabric.limits import QUEUE_WAIT_S_MAX
from stream_fabric.pool.placement import DEFAULT_SHARE, FREE_TIER, ReplicaSlot
from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId

PREFIX_TTL_S = 60.0
"""Lifetime of a replica's published prefix summary."""
BLOCK_CHANGES_KEPT_S = 10.0
"""A gateway that has not read a pool's block changes for longer reads the summaries."""
STATE_REQUESTED = b"desire"
"""Message on a replica's channel: a desired state waits for its agent."""
DesiredState = Literal["draining", "warm", "ready", "sleeping:1", "sleeping:2"]
"""State that a replica can be asked for. ``sleeping:<level>`` names the sleep level."""


class _PromptBody(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    n: int | None = None


class EngineRequest(msgspec.Struct, frozen=True):
    """A request as the engine gets it."""

    stream: StreamId
    kind: Literal["chat", "completions", "embeddings", "rerank", "classify", "score", "tokenize"]
    """For all but the first two the answer is one block of kind ``item``, whose deltas are the server's JSON body."""
    model: str
    body: msgspec.Raw
    """Request body in OpenAI's format as the client sent it, without ``stream`` and our own fields."""
    deadline_unix_ms: int = 0
    """Unix time in ms on the fabric's clock; 0: no deadline."""
    traceparent: str = ""
    """W3C trace context for the engine's own spans."""
    own_chars: int = 0
    """Characters at the end of the prompt, or of its last message, that are the stream's own output; the answer
    continues them."""
    plain: bool = False
    """True: the answer has one choice, and the body asks for no schema and holds no media, so nobody looks for them in
    a long body. A gateway of an earlier release does not say so."""

    @property
    def prompts(self) -> int:
        """Number of prompts: a completions request may have several, each with its own choices."""
        several = self.kind == "completions" and not self.plain
        raw = bytes(msgspec.json.decode(self.body, type=_PromptBody).prompt) if several else b""
        if raw[:1] != b"[":
            return 1
        parts = msgspec.json.decode(raw, type=list[msgspec.Raw])
        return len(parts) if parts and bytes(parts[0])[:1] in (b'"', b"[") else 1  # else: token ids of one prompt

    @property
    def choices(self) -> int:
        """Number of choices of the answer, ``n`` for each prompt. Choice ``i`` of prompt ``p`` has index ``p * n + i``.

        A wrong ``n``, which the engine refuses, counts as 1: a body must not end the agent that reads it.
        """
        if self.plain:
            return 1
        try:
            n = msgspec.json.decode(self.body, type=_PromptBody).n
        except msgspec.ValidationError:
            n = 1
        return self.prompts * max(n or 1, 1)


class EngineLoad(msgspec.Struct, frozen=True):
    """Load of an engine at one moment, for the lease. Figures that the engine does not report are 0."""

    running: int
    waiting: int
    slots: int
    """Sequences that it runs at once (``max_num_seqs``)."""
    ready: bool = True
    """True while it takes requests; False while it boots, warms up, sleeps or restarts."""
    waits_beside_slots: bool = False
    """True: its last step let a sequence wait although a slot was free. The KV cache had no room for it, or other
    prompts took all tokens of the step."""
    kv_used_ratio: float = 0.0
    kv_capacity_tokens: int = 0
    kv_evicted_tokens: int = 0
    """Total of tokens evicted from the KV cache; only grows."""
    kv_clears: int = 0
    """Number of times the whole prefix cache was cleared; only grows."""
    prefix_queries_tokens: int = 0
    """Total of prompt tokens looked up in the prefix cache."""
    prefix_hits_tokens: int = 0
    """Total of prompt tokens found in the prefix cache."""
    metrics_missing: int = 0
    """Number of expected metrics that the server does not export."""
    asleep: int = 0
    """Its sleep level, until it is awake again; 0: awake."""
    itl_objective_ms: float = 0.0
    """Objective that limits the prompt tokens of its steps while answers are running; 0: nothing limits them."""
    max_model_len: int = 0
    """Maximum context: tokens of a prompt and its output together; 0: unknown."""


class Loaded(msgspec.Struct, frozen=True):
    """Models that an engine has loaded, as far as it reports them."""

    adapters: tuple[str, ...] = ()
    """Served models that are LoRA adapters of another."""
    artifact: str = ""
    """Hash of the files that its base model was loaded from."""
    continues_chats: bool = True
    """False: the base model's chat template ends an answer that the engine is asked to continue."""


class Work(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request with everything that a producer needs.

    It is enough to create the stream again after a total loss, and for another replica to take the stream over.
    """

    request: EngineRequest
    epoch: str
    tenant: TenantId
    facts: bytes
    unwatched_s: float | None
    """Grace period in seconds without readers, after which the stream is cancelled; None: never."""
    tier: int = 1
    session: str = ""
    """Name of the session within the pool; empty: none."""
    prompt_tokens: int = 1
    """Estimate of the gateway, as ``output_tokens``, which is the usual length within the limit."""
    output_tokens: int = 1
    output_limit: int = 1 << 31
    """Maximum of output tokens."""
    prefix: bytes = b""
    """Block hashes of the prompt, 4 bytes each."""
    base: int = 0
    """Last frame before this producer's epoch."""
    attempt: int = 1
    """Number of the stream's producers, including this one."""
    tried: tuple[ReplicaId, ...] = ()
    """Replicas that produced the stream before; a failover avoids them while another replica lives."""
    prices: Prices | None = None
    """Prices at the time of the request; None: not billed by price."""
    reserved: bool = False
    """The tenant's account holds a reservation for the stream."""
    grant: int = 0
    """Output tokens that the tenant's budgets granted at first; 0: the request has no budget."""
    key: str = ""
    """Id of the API key that made the request, or that minted its capability token; for the bill."""
    user_hash: str = ""
    """Short hash of tenant and user, for the bill; empty: there is no user."""
    retention_s: int | None = None
    """Seconds that Redis keeps the ended stream. 0: until it was read. None: the platform's setting."""
    retention_days: int = 0
    """As in ``events.AttemptTrace``."""
    moderated: bool = False
    """The answer is moderated before it enters the log."""
    repairs: int = 0
    """Further replies that may be made while they do not fit the JSON schema of the request."""
    free: bool = False
    """True: the request is of tier free. ``tier`` is then batch, as which processes of earlier releases treat it."""
    regions: tuple[str, ...] = ()
    """Regions that may serve the stream, sorted; empty: all."""
    share: int = DEFAULT_SHARE
    """Weight of its tenant in a pool's queue."""
    home: str = ""
    """Home pool, or its cell, of a request at a batch host, where it goes back to; empty: it is in its home pool, or
    overflowed."""
    moved: int = 0
    """Producers that drained, and handed the stream on with a token of theirs."""
    wait_s: float = QUEUE_WAIT_S_MAX
    """Seconds that the stream may wait in a queue after it has lost its replica."""

    def parsed_epoch(self) -> Epoch:
        return Epoch.parse(self.epoch)

    @property
    def attempts_counted(self) -> int:
        """Attempts of which a stream has ``ATTEMPTS_MAX``: a replica that drains has not failed at it."""
        return self.attempt - self.moved

    @property
    def rank(self) -> int:
        """Index of its tier in ``TIERS``."""
        return FREE_TIER if self.free else self.tier

    def may_run_on(self, info: ReplicaInfo) -> bool:
        """True if the replica serves the model, in a region that the stream may be served in."""
        return self.request.model in info.models and (not self.regions or info.region in self.regions)


class ReplicaInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A replica's report, which its agent sends with each lease renewal."""

    replica: ReplicaId
    pool: str
    engine: str
    models: tuple[str, ...]
    state: str
    """A ``ReplicaState``, or one that only a newer version knows; such a replica takes no requests here."""
    load: EngineLoad
    simulated: bool = False
    room: int = 1
    """Streams in flight above which placement goes elsewhere."""
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    prefill_per_s: float = 1.0
    decode_per_s: float = 1.0
    """Measured speeds: prompt tokens per second, and output tokens per second of the full batch."""
    tokens_per_s: float = 0.0
    """Output tokens per second, over the last seconds."""
    output_tokens_mean: float = 256.0
    """Moving average of the answers' lengths."""
    bytes_per_token: float = 4.0
    prefix_version: int = 0
    prefix_blocks: int = 0
    generation: int = 0
    """Number of the last report that changed something for routing (``RoutingGeneration``); 0: of an older version."""
    queue_p99_ms: float = 0.0
    """Time from a request's arrival at the agent until prefill starts, 99th percentile of the last minute.

    If no first token has come for longer than that, although one is due, it is that time.
    """
    region: str = ""
    hardware: str = ""
    revision: str = ""
    """Deployment revision. More than one revision in a pool means a rollout is in progress."""
    ttft_counts: tuple[int, ...] = ()
    """Counts of first tokens in the last minute by the time since placement, in the buckets of
    ``replica_load.TTFT_BUCKETS_S`` and one more for all above. Tier batch is not counted."""
    adapters: tuple[str, ...] = ()
    """Models that are LoRA adapters."""
    artifact: str = ""
    """Hash of the base model's files; empty: the engine does not report it."""
    wake_s: float = 0.0
    """Time its engine took to wake, the last time; 0: it has not slept."""
    sleepless: str = ""
    """Reason why its engine did not fall asleep when asked; empty: none."""
    blocked: str = ""
    """Reason why it takes no requests although it is ready; empty: it takes them."""
    yieldable: int = 0
    """Batch streams that it would put back into the queue for requests of higher tiers."""

    def slot(self) -> ReplicaSlot:
        """Make the replica's entry in the load table, without lease and streams in flight, which the pool fills in."""
        return ReplicaSlot(
            0.0,
            self.state == "ready",
            max(self.load.slots, 1),
            self.room,
            0,
            self.prefill_ms,
            self.decode_ms,
            self.prefill_per_s,
            self.decode_per_s,
            self.load.kv_capacity_tokens * (1 - self.load.kv_used_ratio) if self.load.kv_capacity_tokens else -1.0,
            self.yieldable,
        )


def service_weights(infos: Sequence[ReplicaInfo]) -> Sequence[int]:
    """Return the weight of each replica in a mean of what replicas have measured: 1 or 0.

    A new replica reports defaults. Until its first token they count only where no replica had one in the last minute.
    """
    served = [int(any(info.ttft_counts)) for info in infos]
    return served if any(served) else [1 for _ in infos]


class LeaseReport(NamedTuple):
    """Reply to a replica's report."""

    desired: str
    """State that somebody requested; empty: none."""
    pulled: int
    """Requests that moved from the queue to this replica's inbox."""
    waiting: int
    """Requests still in the pool's queue."""
    asked_by: str = ""
    """Requester of the state."""
    yield_to: int | None = None
    """Queued requests of higher tiers that batch work yields to; None: it does not yield."""
    lost: tuple[StreamId, ...] = ()
    """Streams that run here, whose requests the pool does not have: Redis has lost them."""


class TierQueue(NamedTuple):
    """Queue of one tier of a pool."""

    depth: int
    oldest_s: float
    """Longest waiting time among the first ``QUEUE_SAMPLE_MAX`` requests."""
    prompt_tokens: int
    """Prompt tokens of all waiting requests; for long queues extrapolated from the first ones."""
    output_tokens: int


class DemandTotals(NamedTuple):
    """Totals of all requests to a pool, rejected ones included. They grow until the pool is lost."""

    requests: float
    prompt_tokens: float
    """Prompt tokens that no replica had cached."""
    output_tokens: float
    """Output tokens as estimated by gateways."""


class OverloadTotals(NamedTuple):
    """Totals of requests that an overloaded pool did not take. They grow until the pool is lost."""

    rejected: tuple[int, ...]
    """Rejected requests by tier."""
    overflowed: int
    """Requests that overflowed to another pool."""
    asked: tuple[int, ...] = ()
    """All requests of the pool by tier, rejected ones included."""
    yielded_to: int = 0
    """Requests that batch work yielded to."""


class SlotUse(msgspec.Struct, frozen=True, gc=False):
    """Lease and streams in flight of a replica, from its pool's load table."""

    replica: ReplicaId
    left_s: float
    """Seconds until its lease expires; below 0: it has expired, and not all of its streams are recovered."""
    in_flight: int


class Candidate(NamedTuple):
    """A replica that may take a request."""

    replica: ReplicaId
    matched_tokens: int
    """Prompt tokens that it is believed to have cached."""


class Arrival(NamedTuple):
    """A request in an inbox."""

    entry: str
    stream: StreamId
    work: Work | None
    """None: another version wrote it, and it cannot be decoded."""
    waited_us: int
    """Time in the pool's queue."""
    handed_us: int
    """Moment when the replica got it, on Redis's clock."""


class Inbound(NamedTuple):
    """Reply to one read of an inbox."""

    arrivals: list[Arrival]
    called: bool = False
    """The pool asks for a report now: batch streams have to yield."""
