"""Queue of a pool: requests that wait for room, by tier and with fair shares between tenants. Pure.

Within a tier requests are ordered by start time fair queueing: each tenant's next request starts where its last one
finishes, in tokens of virtual time. A tenant's share divides the tokens: with three times the share its requests follow
each other at a third of the distance.

The requests of each set of regions form a lane of their tier; those that any region may serve are in the lane without
regions. A replica looks at the lanes that its region is in, so a lane whose regions have no room keeps it from no other
request. All lanes of a tier share the tier's virtual time, and a replica takes their requests in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stream_fabric.pool.overload import RETRY_S_MAX
from stream_fabric.pool.placement import (
    DEFAULT_SHARE,
    LOCALITY,
    LOOK_AHEAD,
    PASSED_MAX,
    PINNED_QUEUE_SHARE,
    RATE_WINDOW_MS,
    SCAN_MAX,
    TIERS,
    PlacementRequest,
    ReplicaSlot,
)
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId

Lane = tuple[str, ...]
"""Sorted regions that may serve the requests of the lane; empty: any."""


def admits(lane: Lane, region: str) -> bool:
    """True if a replica of this region may serve requests of the lane."""
    return not lane or region in lane


def goes_before(lane: Lane, taken: str | None, alive: Iterable[str]) -> bool:
    """True if requests of the lane, of the same or a higher tier, go before a new request.

    ``taken``: region of the replica that the new request would go to; None: none has room. Then they go before it only
    where they may use all replicas that it may use: ``alive``, their regions.
    """
    if taken is not None:
        return admits(lane, taken)
    return all(admits(lane, region) for region in alive)


def sorted_regions(regions: Sequence[str]) -> Lane:
    """Return the lane of these regions."""
    return tuple(sorted(set(regions)))


@dataclass
class QueuedRequest:
    """A request in the queue."""

    request: PlacementRequest
    start: float
    """Its place in the tier's virtual time, in tokens."""
    cached: dict[ReplicaId, int]
    """Prompt tokens that replicas had cached when it was queued."""
    pin: str
    """The replica that its session was bound to, or empty."""
    passed: int = 0
    """Number of times another request overtook it while it was the first."""

    def sort_key(self, replica: ReplicaId) -> float:
        """Sort key of the request for a replica: lower if the replica has the prompt cached, higher if others have."""
        here = self.request.prompt_tokens if replica == self.pin else self.cached.get(replica, 0)
        most = self.request.prompt_tokens if self.pin else max(self.cached.values(), default=0)
        return self.start - LOCALITY * (2 * here - most)


class Next(NamedTuple):
    """The request that a replica takes next."""

    tier: int
    first: QueuedRequest
    """The first request that the replica could serve."""
    taken: QueuedRequest
    """The request that it takes."""


@dataclass
class PoolQueue:
    """Requests of one pool that wait for room."""

    tiers: list[dict[StreamId, QueuedRequest]] = field(default_factory=lambda: [{} for _ in TIERS])
    finish: list[dict[TenantId, float]] = field(default_factory=lambda: [{} for _ in TIERS])
    """By tier: where the last request of each tenant finishes in virtual time."""
    virtual: list[float] = field(default_factory=lambda: [0.0 for _ in TIERS])
    """Virtual time of each tier."""
    popped: int = 0
    popped_since_ms: float = 0.0
    rate_per_s: float = 0.0
    """Requests that leave the queue per second, over the last window."""

    def __len__(self) -> int:
        return sum(map(len, self.tiers))

    def __iter__(self) -> Iterator[StreamId]:
        return (stream for tier in self.tiers for stream in tier)

    def ahead(self, tier: int, taken: str | None, alive: Sequence[str]) -> Iterator[PlacementRequest]:
        """Requests that go before a new request of the tier. ``taken``, ``alive``: see ``goes_before``."""
        return (
            queued.request
            for line in self.tiers[: tier + 1]
            for queued in line.values()
            if goes_before(queued.request.regions, taken, alive)
        )

    def waiting_for(self, region: str, tiers: int) -> int:
        """Number of requests of the first ``tiers`` tiers that a replica of this region may serve."""
        return sum(admits(queued.request.regions, region) for line in self.tiers[:tiers] for queued in line.values())

    def is_full(self, request: PlacementRequest, queue_max: int) -> bool:
        """True if the queue takes no such request."""
        if len(self) >= queue_max:
            return True
        pinned = sum(bool(queued.request.regions) for line in self.tiers for queued in line.values())
        return bool(request.regions) and pinned >= queue_max * PINNED_QUEUE_SHARE

    def push(self, request: PlacementRequest, cached: dict[ReplicaId, int], pin: str, *, first: bool) -> None:
        """Add a request. ``first``: before all others of its tier, and outside its tenant's share."""
        start, finish = 0.0, self.finish[request.tier]
        if not first:
            start = max(self.virtual[request.tier], finish.get(request.tenant, 0.0))
            finish[request.tenant] = (
                start + (request.prompt_tokens + request.output_tokens) * DEFAULT_SHARE / request.share
            )
        self.tiers[request.tier][request.stream] = QueuedRequest(request, start, cached, pin)

    def next_for(
        self,
        slot: ReplicaSlot,
        replica: ReplicaId,
        region: str,
        may_take: Callable[[PlacementRequest], bool],
        tiers: int,
    ) -> Next | None:
        """Find the request of the first ``tiers`` tiers that the replica takes next, by ``sort_key`` among the first.

        None: it may take none, or has no room in its KV cache for that one: then no smaller request overtakes it.
        """
        for number, tier in enumerate(self.tiers[:tiers]):
            line = _first_of_lanes(tier.values(), region)
            able = [queued for queued in line if may_take(queued.request)][:LOOK_AHEAD]
            if able:
                first = able[0]
                taken = first if first.passed >= PASSED_MAX else min(able, key=lambda queued: queued.sort_key(replica))
                request = taken.request
                if not slot.has_kv_for(request.prompt_tokens - taken.cached.get(replica, 0), request.output_tokens):
                    return None
                if taken is not first:
                    first.passed += 1
                return Next(number, first, taken)
        return None

    def pop(self, found: Next, now_ms: float) -> PlacementRequest:
        """Remove the request that ``next_for`` found."""
        tier, request = found.tier, found.taken.request
        self._remove(request.stream, tier)
        # Virtual time follows the first request, not one that overtook it: new requests start behind the first
        self.virtual[tier] = max(self.virtual[tier], found.first.start) if self.tiers[tier] else 0.0
        self.popped += 1
        if abs(now_ms - self.popped_since_ms) >= RATE_WINDOW_MS:
            if 0 < self.popped_since_ms < now_ms:  # the clock may have gone back
                self.rate_per_s = self.popped * 1000 / (now_ms - self.popped_since_ms)
            self.popped, self.popped_since_ms = 0, now_ms
        return request

    def remove(self, stream: StreamId) -> bool:
        """Remove a request that was cancelled or waited too long. False: it was not queued."""
        for number, tier in enumerate(self.tiers):
            if stream in tier:
                self._remove(stream, number)
                if not tier:
                    self.virtual[number] = 0.0
                return True
        return False

    def _remove(self, stream: StreamId, tier: int) -> None:
        del self.tiers[tier][stream]
        if not self.tiers[tier]:
            self.finish[tier].clear()

    def position(self, stream: StreamId) -> int:
        """Position in the queue, from 1; 0: not queued."""
        found = next((tier[stream] for tier in self.tiers if stream in tier), None)
        if found is None:
            return 0
        before, lane, start = 0, found.request.regions, found.start
        for tier in self.tiers:
            others = {other: queued for other, queued in tier.items() if queued.request.regions in (lane, ())}
            if stream in tier:
                for other, queued in others.items():
                    in_lane = queued.request.regions == lane
                    before += (queued.start, other) < (start, stream) if in_lane else queued.start < start
                break
            before += len(others)
        return before + 1

    def is_under_share(self, request: PlacementRequest) -> bool:
        """True if the tenant has less queued in the tier than the mean of the tenants since the tier was empty."""
        finish = self.finish[request.tier]
        mine = max(finish.get(request.tenant, 0.0) - self.virtual[request.tier], 0.0)
        tokens = sum(q.request.prompt_tokens + q.request.output_tokens for q in self.tiers[request.tier].values())
        return mine * len(finish) < tokens

    def retry_after_s(self) -> int:
        """Seconds until a place in the full queue is expected to be free."""
        return 1 if self.rate_per_s <= 0 else max(1, min(RETRY_S_MAX, -int(-(len(self) + 1) // self.rate_per_s)))

    def overdue(self, now_ms: float) -> list[StreamId]:
        """Streams that have waited in the queue as long as they may."""
        return sorted(s for tier in self.tiers for s, queued in tier.items() if queued.request.wait_until_ms <= now_ms)


def _first_of_lanes(tier: Iterable[QueuedRequest], region: str) -> list[QueuedRequest]:
    """Return the first requests of each lane of a tier that a replica of this region may serve, in order."""
    lanes: dict[Lane, list[QueuedRequest]] = {}
    for queued in tier:
        if admits(queued.request.regions, region):
            lanes.setdefault(queued.request.regions, []).append(queued)
    first = [queued for lane in lanes.values() for queued in sorted(lane, key=_order)[:SCAN_MAX]]
    return sorted(first, key=_order)


def _order(queued: QueuedRequest) -> tuple[float, StreamId]:
    return queued.start, queued.request.stream
