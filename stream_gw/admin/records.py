"""Records of the operations feed. Their field names are the API that the page reads."""

from __future__ import annotations

from typing import Literal

import msgspec

from stream_gw.observe.local_stats import LocalStats


class LoadSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    load_percent: int
    """Sequences that ran or waited in the engine, in percent of its slots."""
    kv_used_percent: int | None
    """Share of the KV cache in use; None: the engine does not report it."""
    waiting: int
    """Sequences in the engine that waited for a slot."""


class Replica(msgspec.Struct, frozen=True, gc=False):
    replica: str
    state: str
    """State from its agent; ``lost``: its lease has expired; ``new``: the directory has not read it yet."""
    lease_left_s: float
    in_flight: int
    """Streams that it runs or that were placed there; ``room`` is the limit."""
    room: int = 0
    running: int = 0
    """Sequences in the engine; ``slots`` is the limit."""
    slots: int = 0
    waiting: int = 0
    """Sequences in the engine that wait for a slot."""
    tokens_per_s: float = 0.0
    load_ms: float = 0.0
    queue_p99_ms: float = 0.0
    kv_used: float | None = None
    """Share of the KV cache in use (0 to 1); None: the engine does not report it."""
    prefix_hits: float | None = None
    """Share of looked-up prompt tokens that were cached (0 to 1)."""
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    """The models that are LoRA adapters."""
    engine: str = ""
    hardware: str = ""
    region: str = ""
    revision: str = ""
    simulated: bool = False
    blocked: str = ""
    """Reason why it takes no requests although it is ready."""
    recent: tuple[LoadSample, ...] = ()
    """One sample every 10 s, the oldest first."""


class Tier(msgspec.Struct, frozen=True, gc=False):
    tier: str
    waiting: int
    oldest_s: float


class Plan(msgspec.Struct, frozen=True):
    """The leading controller's plan for a declared pool, with the reason."""

    ready: int
    warm: int
    pods: int
    reason: str
    at_ms: int
    yielding: bool = False
    """Batch work yields to requests of higher tiers, or did within the last seconds."""


class Pool(msgspec.Struct, frozen=True):
    pool: str
    plan: Plan | None
    """None: the pool is not declared."""
    states: dict[str, int]
    """Number of replicas by state."""
    slots: int
    """Slots of ready replicas."""
    asked: int
    """Sequences that run or wait, in engines and in the pool's queue."""
    tokens_per_s: float
    ttft_p50_ms: float | None
    """From placement to first token, in the last minute, as replicas report it; without tier batch."""
    ttft_p99_ms: float | None
    tiers: list[Tier]
    replicas: list[Replica]
    """For a large pool only a part; replicas that are not ready come first."""


class Fleet(msgspec.Struct, frozen=True):
    pools: list[Pool]
    pools_all: int


class Minutes(msgspec.Struct, frozen=True, gc=False):
    """A row of the saved query ``pulse``: one minute, or with ``minute_us`` 0 one pool over all minutes."""

    minute_us: int
    pool: str
    requests: int
    failed: int
    refused: int
    tokens: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    ttft_p99_ms: float | None


class GatewayStats(msgspec.Struct, frozen=True):
    name: str
    region: str
    open_streams: int
    open_sockets: int
    lagging: int
    viewers: int


class Source(msgspec.Struct, frozen=True):
    """State of a data source."""

    state: Literal["off", "ok", "away"]
    age_s: float
    """Age of its shown figures."""
    message: str


class Snapshot(msgspec.Struct, frozen=True):
    at_ms: int
    every_s: float
    gateway: GatewayStats
    here: LocalStats
    fabric: Source
    fleet: Fleet | None
    telemetry: Source
    history: list[Minutes] | None
