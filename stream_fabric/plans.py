"""What the controller wants of a pool, as it stands in Redis for whoever acts on it. Pure."""

from __future__ import annotations

import msgspec

from stream_fabric.ids import ReplicaId
from stream_fabric.surge import Marks

_OVERDUE = 0.1
"""Of a cold start, what is told of one that takes longer than they do."""


class Usual(msgspec.Struct, frozen=True):
    """What one of a pool's replicas does, as it was last seen: a pool without replicas is reckoned by it."""

    slots: int
    prefill_per_s: float
    decode_per_s: float
    output_tokens: float
    bytes_per_token: float


def route(model: str, dialect: str, tier: str) -> str:
    """Names requests that are alike in how long their answers are."""
    return f"{model}/{dialect}/{tier}"


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
    """As learned, or declared."""
    patience_s: float = 0.0
    """For how long who asks may wait for the first replica: as one may ever take, and not as they usually do."""
    asked: tuple[tuple[int, int], ...] = ()
    """When replicas were asked for that have not come yet, on the fabric's clock, and how many; the oldest first."""
    outputs: dict[str, float] = {}
    """Output tokens by ``route``, on the mean, as learned."""
    surge: Marks | None = None
    """Where requests are refused, and where they may go to another pool; None: the queue's bound alone holds."""
    shedding: tuple[str, ...] = ()
    """Tiers of which requests have been refused of late for the backlog ahead of them."""
    shifting: bool = False
    """Requests have gone to adjacent pools of late."""
    at_us: int = 0
    """When it was last changed, on the fabric's clock."""
    reason: str = ""
    figures: dict[str, float] = {}

    def warming_s(self, position: int, now_us: int, wake_s: float = 0.0) -> float:
        """How long whoever stands there in line, first is 1, is going to wait while no replica takes requests.
        ``wake_s``: one that sleeps is ready in so long; 0: none sleeps, or its time is not known."""
        if not self.asked and self.pods:  # all are up that were asked for, and one is promoted
            left_s = max(wake_s, 1.0)
        else:
            since_us = self.asked[0][0] if self.asked else now_us
            left_s = self.cold_start_s - (now_us - since_us) / 1e6
            # One that should have come is not known to come at once
            left_s = min(max(left_s, _OVERDUE * self.cold_start_s, 1.0), max(self.cold_start_s, 1.0))
            left_s = min(left_s, wake_s or left_s)
        usual = self.usual
        if usual is None:
            return left_s
        turns = (position - 1) // (usual.slots * max(self.ready, 1))
        return left_s + turns * usual.output_tokens * usual.slots / usual.decode_per_s


_decoder = msgspec.json.Decoder(PoolPlan)


def encode_plan(plan: PoolPlan) -> bytes:
    return msgspec.json.encode(plan)


def decode_plan(record: bytes) -> PoolPlan:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(record)
