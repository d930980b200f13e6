"""Plan of a pool: the controller's decision, kept in Redis for everybody who acts on it. Pure."""

from __future__ import annotations

import msgspec

from stream_fabric.pool.overload import OverloadMarks
from stream_fabric.stream.ids import ReplicaId

_OVERDUE = 0.1
"""Share of a cold start that is announced as remaining when one takes longer than expected."""


class ReplicaProfile(msgspec.Struct, frozen=True):
    """Typical replica of a pool as last measured; used while the pool has no replicas."""

    slots: int
    prefill_per_s: float
    decode_per_s: float
    output_tokens: float
    bytes_per_token: float
    itl_objective_ms: float = 0.0
    """Largest objective that limits the steps of a replica's engine; 0: a replica's steps are not limited."""


def route_key(model: str, dialect: str, tier: str) -> str:
    """Key of the requests of one model, dialect and tier, whose answers have similar lengths."""
    return f"{model}/{dialect}/{tier}"


class PoolPlan(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    rename={
        "typical_replica": "usual",
        "requested": "asked",
        "overload_marks": "surge",
        "rejecting_tiers": "shedding",
        "is_overflowing": "shifting",
        "is_yielding": "yielding",
    },
):
    """Plan of one pool. Only the leading controller writes it; each change carries its reason and figures."""

    ready: int
    """Number of replicas that should take requests."""
    warm: int
    """Number of replicas that are loaded and take no requests, ready for promotion within a second."""
    pods: int
    """Total number of replicas, for the scaler. It exceeds ``ready`` + ``warm`` until a surplus replica may stop."""
    resting: ReplicaId | None = None
    """Replica that finishes its streams and takes no new ones; None: none."""
    victims: tuple[ReplicaId, ...] = ()
    """Replicas without work that should be stopped (scale-down targets)."""
    typical_replica: ReplicaProfile | None = None
    models: tuple[str, ...] = ()
    """Models declared for the pool. Requests for them wait while the pool has no replica."""
    cold_start_s: float = 0.0
    """Duration of a cold start: learned, or declared."""
    patience_s: float = 0.0
    """Longest time a request may wait for the first replica; covers slow cold starts, not only usual ones."""
    requested: tuple[tuple[int, int], ...] = ()
    """Replicas requested that have not come yet: (moment in µs on the fabric's clock, number), the oldest first."""
    outputs: dict[str, float] = {}
    """Mean output tokens by ``route_key``, from the traffic model."""
    overload_marks: OverloadMarks | None = None
    """Overload marks; None: only the queue's limit holds."""
    rejecting_tiers: tuple[str, ...] = ()
    """Tiers whose requests were recently rejected for the backlog."""
    is_overflowing: bool = False
    """True if requests recently overflowed to adjacent pools."""
    is_yielding: bool = False
    """True if batch work yields to requests of higher tiers, or recently did."""
    peak_rise: float = 0.0
    """The pool's usual peak as a multiple of the replicas that it needs in the mean; 0: unknown."""
    at_us: int = 0
    """Moment of the last change, on the fabric's clock."""
    reason: str = ""
    figures: dict[str, float] = {}

    def starting_s(self, now_us: int) -> list[float]:
        """Time until each requested replica has started, if it takes a cold start; without those that are overdue."""
        left = [(self.cold_start_s - (now_us - asked_us) / 1e6, number) for asked_us, number in self.requested]
        return [left_s for left_s, number in left if left_s > 0 for _ in range(number)]

    def recovery_s(self, tier: str, now_us: int) -> float:
        """Time after which it is worth to send a rejected request again, as far as it depends on replicas that start.

        It is the time until the last one has started, times the share of the pool that is missing: where most requests
        get in, another try is better than to wait. 0: the tier is not being rejected, or nothing starts.
        """
        starting_s = self.starting_s(now_us) if tier in self.rejecting_tiers else []
        return max(starting_s, default=0.0) * min(len(starting_s) / max(self.ready, 1), 1.0)

    def warming_s(self, position: int, now_us: int, wake_s: float = 0.0) -> float:
        """Expected waiting time at a queue position (from 1) while no replica takes requests.

        ``wake_s``: time until a sleeping replica is ready; 0: none sleeps, or the time is unknown.
        """
        if not self.requested and self.pods:  # all requested replicas are up, and one is promoted
            left_s = max(wake_s, 1.0)
        else:
            since_us = self.requested[0][0] if self.requested else now_us
            left_s = self.cold_start_s - (now_us - since_us) / 1e6
            # A replica that is overdue will not necessarily come at once
            left_s = min(max(left_s, _OVERDUE * self.cold_start_s, 1.0), max(self.cold_start_s, 1.0))
            left_s = min(left_s, wake_s or left_s)
        typical = self.typical_replica
        if typical is None:
            return left_s
        turns = (position - 1) // (typical.slots * max(self.ready, 1))
        return left_s + turns * typical.output_tokens * typical.slots / typical.decode_per_s


_decoder = msgspec.json.Decoder(PoolPlan)


def encode_plan(plan: PoolPlan) -> bytes:
    return msgspec.json.encode(plan)


def decode_plan(record: bytes) -> PoolPlan:
    """Decode a plan. Raises msgspec.MsgspecError."""
    return _decoder.decode(record)
