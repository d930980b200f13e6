"""The ports between planes: what one part promises another, without its implementation.

Each port has one contract suite in ``tests/`` that every implementation passes, the fakes of the simulation included.
A process's ``main`` makes the implementations and hands them in. Apart from ``EventSink``, ``Clock`` and ``Random``,
whose calls are local, calls raise ``FabricError``: ``FabricUnavailable`` when the fabric cannot be reached in time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from stream_fabric.events import Event
from stream_fabric.pool.lease_changes import BlockChange, LeaseChanges
from stream_fabric.pool.overload import NO_OVERLOAD_TERMS, OverloadTerms
from stream_fabric.pool.placement import Placed, Queued, Refused
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import (
    Candidate,
    DemandTotals,
    DesiredState,
    EngineLoad,
    EngineRequest,
    Inbound,
    LeaseReport,
    Loaded,
    OverloadTotals,
    ReplicaInfo,
    SlotUse,
    TierQueue,
    Work,
)
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.frames import ErrorInfo, Frame, Status, StoredInput, TerminalStatus, Usage
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId, UserId
from stream_fabric.stream.log import Append, AppendReply, CancelReply, CreateCode, Head, InputCode, Page, Takeover

# --- time and chance ---------------------------------------------------------------------------------------


class Clock(Protocol):
    """Time in a process. Every moment that another process compares is taken from ``now_us``."""

    @property
    def offset_us(self) -> int:
        """Difference ``now_us() - monotonic_us()``."""

    def now_us(self) -> int:
        """Unix time in microseconds on the fabric's clock, which all processes share."""

    def monotonic_us(self) -> int:
        """Microseconds since an arbitrary moment; never goes back. For durations within this process."""


class Random(Protocol):
    """Randomness of a process. ``token_*`` is unpredictable, ``random`` and ``uniform`` are for jitter."""

    def random(self) -> float:
        """Draw a float in [0, 1)."""

    def uniform(self, low: float, high: float) -> float: ...

    def token_bytes(self, count: int) -> bytes: ...

    def token_hex(self, count: int) -> str:
        """Make ``count`` random bytes, written as twice as many hex digits."""


# --- the fabric --------------------------------------------------------------------------------------------


class StreamLog(Protocol):
    """The logs of all streams. Every call is idempotent."""

    partitions: int
    """Number of partitions; see ``partition_of``."""

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
        """Create the stream with ``gateway`` as first watcher. Usage is counted for the tenant under ``model``. Its
        end settles what is ``reserved``. It is kept ``retention_s`` after it; 0: until read; None: as is usual."""

    async def restate(self, stream: StreamId, tenant: TenantId, facts: bytes, model: str) -> None:
        """Replace facts and model of a live stream without frames."""

    async def append(self, partition: int, batch: Sequence[Append]) -> list[AppendReply]:
        """Append to many streams of one partition in one round trip, and publish to their watchers."""

    async def cancel(
        self, stream: StreamId, tenant: TenantId, unwatched_ms: int | None = None, *, steers: bool = False
    ) -> CancelReply:
        """Cancel the stream; with ``unwatched_ms`` if no gateway has watched it for so long. ``steers``: as cut."""

    async def delete(self, stream: StreamId, tenant: TenantId) -> bool:
        """Delete the content of an ended stream of the tenant. False: there is none, or it has not ended."""

    async def fence(
        self, stream: StreamId, replica: ReplicaId | None, nonce: str, error: ErrorInfo, epoch: Epoch | None = None,
        *, withdraws: bool = False,
    ) -> bool:  # fmt: skip
        """End a live stream in a new epoch, because its producer ``replica`` (None: any) is gone. With ``epoch``, only
        if no producer has begun a later one. ``withdraws``: its usage counts nowhere. False: it was not ended."""

    async def takeover(self, stream: StreamId, lost: Epoch, nonce: str) -> Takeover | None:
        """Begin a new epoch for another producer, if the stream is live and ``lost`` is its epoch.
        A repeated call returns the same epoch until a producer has appended in it. None: another epoch is current."""

    async def watch(
        self, stream: StreamId, tenant: TenantId | None, gateway: GatewayId | None, after: Cursor
    ) -> Page | None:
        """Register the gateway as a watcher (None: only read) and read one page after the cursor.
        Returns None when the tenant has no such stream, or its content is deleted. ``tenant`` None: of any tenant, and
        with ``gateway`` None also one whose content is deleted, for as long as Redis has its record."""

    async def unwatch(self, stream: StreamId, gateway: GatewayId) -> None: ...

    async def heads(self, partition: int, streams: Sequence[StreamId], gateway: GatewayId | None) -> list[Head | None]:
        """Read the heads of streams of one partition; None: no such stream. ``gateway`` sets ``Head.watched_by_me``."""

    async def put_placements(self, records: Sequence[tuple[StreamId, bytes]]) -> None:
        """Keep records of placements (JSON, for operators), each for as long as its stream is kept."""

    async def placements(self, stream: StreamId) -> list[bytes]:
        """Read the kept placement records of the stream, one per attempt."""

    async def settled(self, stream: StreamId) -> tuple[Status, Usage] | None:
        """Read the stream's status and usage, which is final once the stream has ended. None: no such stream."""

    async def input(self, stream: StreamId, tenant: TenantId, key: str, item: msgspec.Raw, at_us: int = 0) -> InputCode:
        """Add an item to the stream's inputs, once per ``key``, while its answer has not ended. See ``StoredInput``."""

    async def inputs(self, stream: StreamId) -> list[StoredInput]:
        """The stream's inputs in the order of acceptance."""


class Pools(Protocol):
    """The pools: replica leases, placement and the queue."""

    async def report(
        self,
        info: ReplicaInfo,
        *,
        ttl_s: float | None,
        ended: Sequence[StreamId] = (),
        running: Mapping[StreamId, str] | None = None,
    ) -> LeaseReport:
        """Report ended streams and remaining work; with ``ttl_s`` also take or renew the replica's lease. This is sent
        once: a repeat would be outdated. ``running``: all that it runs, stream → session. Its inbox may get more."""

    async def pools(self, timeout_s: float | None = None) -> list[str]:
        """Names of all pools, sorted. ``timeout_s``: time for retries, instead of the client's default."""

    async def replicas(self, pool: str) -> list[ReplicaInfo]:
        """Replicas whose lease is alive. A record that cannot be decoded is skipped and counted."""

    async def changes(self, pool: str, since: int, blocks_after: str) -> LeaseChanges:
        """Read what changed for routing since ``at`` of an earlier read; 0: read all. A failover may lose a change.
        ``blocks_after``: the last ``blocks_at``; "0": from now on; "": none."""

    async def slot_uses(self, pool: str) -> list[SlotUse]:
        """Read the lease and the number of streams in flight of every replica, dead ones included."""

    async def place(
        self,
        pool: str,
        work: Work,
        candidates: Sequence[Candidate],
        *,
        wait_s: float,
        jitter: float,
        instead: ReplicaId | None = None,
        terms: OverloadTerms = NO_OVERLOAD_TERMS,
    ) -> Placed | Queued | Refused:
        """Place a request as ``PoolState.place`` decides; it leaves the queue after ``wait_s``.

        ``jitter``: uniform in [0, 1), breaks ties. ``instead``: the replica that loses the stream to this placement.
        """

    async def remove_queued(self, pool: str, streams: Sequence[StreamId]) -> int:
        """Take streams out of the queue. Returns how many were in it."""

    async def queue_positions(self, pool: str, streams: Sequence[StreamId]) -> tuple[int, list[int]]:
        """Length of the queue, and the position of each stream from 1; 0: not queued."""

    async def tier_queues(self, pool: str) -> list[TierQueue]:
        """Read the length and waiting times of each tier's queue, highest tier first."""

    async def demand_totals(self, pool: str) -> DemandTotals: ...

    async def overload_totals(self, pool: str) -> OverloadTotals: ...

    async def waiting(self, pool: str, *, overdue: bool = False) -> list[StreamId]:
        """List queued streams; with ``overdue`` only those that have waited as long as they may."""

    async def holder(self, pool: str, stream: StreamId) -> ReplicaId | Literal["queue"] | None:
        """Find the replica that has the stream in flight; ``queue``: it is queued; None: the pool does not have it."""

    async def work(self, pool: str, stream: StreamId) -> Work | None:
        """The request of a stream in flight or queued. Raises msgspec.MsgspecError when it cannot be decoded."""

    async def restore(self, pool: str, replica: ReplicaId, work: Work) -> None:
        """Keep a request of the replica again that the pool has lost (``LeaseReport.lost``)."""

    async def expired(self, pool: str) -> list[ReplicaId]:
        """Replicas whose lease has expired and that have not been retired."""

    async def in_flight(self, pool: str, replica: ReplicaId) -> list[StreamId]:
        """Streams that the replica ran, or was about to run, at its last report."""

    async def remove_in_flight(self, pool: str, replica: ReplicaId, streams: Sequence[StreamId]) -> None:
        """Take streams off the replica's list of streams in flight, because they need no recovery any more."""

    async def retire(self, pool: str, replica: ReplicaId, *, leaving: bool = False) -> bool:
        """Forget a replica without streams in flight; unless ``leaving``, only while its lease is expired."""

    async def claim_recovery(self, pool: str, replica: ReplicaId, ttl_s: float, nonce: str) -> bool:
        """Claim the replica's recovery for ``ttl_s`` seconds, by a ``nonce`` new for each call. False: it is taken."""

    async def request_state(
        self, pool: str, replica: ReplicaId, state: DesiredState, asked_by: str = "operator"
    ) -> bool:
        """Request a state of the replica for its next report. False: that state or draining is requested already."""

    async def put_prefix(self, pool: str, replica: ReplicaId, summary: bytes) -> None:
        """Publish which prompt blocks a replica holds."""

    async def put_block_change(self, pool: str, replica: ReplicaId, change: BlockChange) -> None:
        """Publish what changed in a replica's blocks."""

    async def prefix(self, pool: str, replica: ReplicaId) -> bytes:
        """Read the published prefix summary of a replica; empty: none."""


class Inbox(Protocol):
    """One replica's inbox. An entry stays until it is acknowledged, so a request is handed out at least once."""

    async def read(self, block_s: float, done: Sequence[tuple[str, StreamId]] = ()) -> Inbound:
        """Acknowledge and remove ``done`` (entry id, stream), then read the inbox; wait up to ``block_s`` for a first
        request or the pool's call. A call of this method after an error reconnects; it repeats ``done``."""

    def close(self) -> None: ...


class Index(Protocol):
    """Lookup of streams by idempotency key, and of a user's running streams."""

    async def claim(self, tenant: TenantId, key: str, stream: StreamId, fingerprint: str) -> tuple[StreamId, str]:
        """Bind an idempotency key to a stream. Returns the stream and body fingerprint that the key is bound to."""

    async def is_claimed(self, tenant: TenantId, key: str) -> bool:
        """Say whether an idempotency key is bound to a stream."""

    async def release(self, tenant: TenantId, key: str, stream: StreamId) -> None:
        """Unbind a key from a stream that was not created."""

    async def add_live(self, tenant: TenantId, user: UserId, stream: StreamId, created_ms: int) -> None:
        """Add a stream to the list of the user's running streams."""

    async def live(self, tenant: TenantId, user: UserId) -> list[StreamId]:
        """List the user's running streams, newest first. The list may still contain streams that have ended."""

    async def remove_live(self, tenant: TenantId, user: UserId, streams: list[StreamId]) -> None:
        """Take ended streams off the list of the user's running streams."""


class Control(Protocol):
    """State shared by controllers: the leader, and the plan of each pool."""

    async def lead(self, controller: str, ttl_s: float) -> int:
        """Take or renew leadership for ``ttl_s``. Returns the term, 0 when another controller leads."""

    async def leave(self, controller: str) -> None:
        """Give leadership up."""

    async def leader(self) -> str:
        """Name of the leader; empty: there is none."""

    async def write_plan(self, controller: str, term: int, pool: str, plan: PoolPlan | None) -> bool:
        """Write a pool's plan, or remove it. False: this controller no longer leads in that term."""

    async def plans(self) -> dict[str, PoolPlan]:
        """Plans by pool. A plan that cannot be decoded is left out and logged."""

    async def put_learned(self, pool: str, record: bytes) -> None:
        """Write a pool's encoded traffic model."""

    async def learned(self, pool: str) -> bytes | None:
        """Read a pool's encoded traffic model; None: there is none."""

    async def hold(self, pool: str, seconds: float) -> None:
        """Forbid the controllers to scale the pool down for ``seconds``; 0 allows it again."""

    async def held_s(self, pool: str) -> float:
        """Remaining seconds of the pool's ``hold``; 0: there is none."""


class Subscription(Protocol):
    """A process's channels on the fabric, one per partition. Delivery is at most once."""

    @property
    def healthy(self) -> bool:
        """True while every channel is subscribed."""

    async def wait_ready(self) -> None:
        """Wait until every channel was subscribed once."""

    async def run(self) -> None:
        """Keep all channels subscribed until cancelled."""


Subscribe = Callable[[str, Callable[[bytes], None], Callable[[list[str]], None]], Subscription]
"""Makes the subscription of a peer: (peer, on_message, on_subscribed). ``on_message(payload)`` is the hot callback.
``on_subscribed(names)`` says that messages of these channels may have been missed."""

# --- the engine beside an agent ----------------------------------------------------------------------------


class FrameSink(Protocol):
    """Receiver of one request's output. Calls never block and never raise.

    Frames arrive in the order of the calls. After ``end``, or after ``abort`` was called, calls are ignored.
    """

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        """Take a text delta of a block. Called for every token, so it must be fast."""

    def frame(self, frame: Frame) -> None:
        """Take a frame other than ``End``."""

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        """Set the stream's token counts until now; output tokens are counted from the deltas."""

    def computed(self, queue_s: float, prefill_s: float) -> None:
        """Take the times that the engine reports: in its queue, and from there to the first token. Before ``end``."""

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        """End the stream with its one terminal. ``usage``: the engine's own token counts, if it reports them."""


SleepLevel = Literal[1, 2]
"""1: the weights are kept in the host's memory; 2: nothing is kept, and they are read again. Either loses the cache."""


class Engine(Protocol):
    """One model server. Failures of a request end that request through its sink, never raise."""

    async def start(self) -> Sequence[str]:
        """Connect to the engine or boot it; return the names of its models. Raises EngineFailed with what to do."""

    async def serving(self) -> None:
        """Wait until ``close``. Raises the error that ends the engine; the caller then ends the open sinks."""

    def submit(self, request: EngineRequest, sink: FrameSink) -> None:
        """Begin a request. The sink receives its output and exactly one ``end``, unless the request is aborted."""

    def abort(self, stream: StreamId) -> None:
        """Stop a request; its sink hears nothing more, also of a next one. Unknown or ended streams are ignored."""

    def load(self) -> EngineLoad: ...

    def loaded(self) -> Loaded:
        """Models that the engine has loaded; called only after ``start``."""

    async def sleep(self, level: SleepLevel) -> bool:
        """Put the engine to sleep, which frees the GPU's memory. True: it sleeps now. False: it is busy or restarts.

        The prefix cache is lost. Until ``wake`` returns, each request fails with ``EngineLost``.
        Raises Unsupported if the engine cannot sleep, EngineFailed if it did not; the caller then calls ``wake``.
        """

    async def wake(self) -> None:
        """Wake the engine (harmless if awake) and generate one test token. After an error it takes no request.

        Raises EngineLost if it restarts (``load().ready``: it serves again), EngineFailed if nobody restarts it.
        """

    async def close(self) -> None:
        """Abort all requests and release the engine."""


# --- telemetry ---------------------------------------------------------------------------------------------


class EventSink(Protocol):
    """Receiver of a process's telemetry events."""

    def emit(self, event: Event) -> None:
        """Take the event. Never blocks and never raises; a dropped event is counted."""
