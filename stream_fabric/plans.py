"""What the controller wants of a pool, as it stands in Redis for whoever acts on it. Pure."""

from __future__ import annotations

import msgspec

from stream_fabric.ids import ReplicaId


class Usual(msgspec.Struct, frozen=True):
    """What one of a pool's replicas does, as it was last seen: a pool without replicas is reckoned by it."""

    slots: int
    prefill_per_s: float
    decode_per_s: float
    output_tokens: float
    bytes_per_token: float


class PoolPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """Written by the leading controller alone, each change with what it rested on."""

    ready: int
    """Replicas that are to take requests."""
    warm: int
    """Replicas that are loaded and take none, to be promoted within a second."""
    pods: int
    """Replicas in all, as whoever starts and ends processes is asked for; above ``ready`` + ``warm`` until the next one
    too many may go."""
    resting: ReplicaId | None = None
    """It finishes what it has and takes nothing new."""
    victim: ReplicaId | None = None
    """It has nothing left to do and is the one to be ended."""
    usual: Usual | None = None
    models: tuple[str, ...] = ()
    """Declared for the pool: served also while it has no replica, by who waits for one."""
    cold_start_s: float = 0.0
    at_us: int = 0
    """When it was last changed, on the fabric's clock."""
    reason: str = ""
    figures: dict[str, float] = {}


_decoder = msgspec.json.Decoder(PoolPlan)


def encode_plan(plan: PoolPlan) -> bytes:
    return msgspec.json.encode(plan)


def decode_plan(record: bytes) -> PoolPlan:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(record)
