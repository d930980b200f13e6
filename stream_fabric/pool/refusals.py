"""Conditions under which a pool refuses a request. Pure; ``state.PoolState`` calls them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stream_fabric.pool.overload import OverloadTerms, PrefillDuty, is_rejected, rejection_draw
from stream_fabric.pool.placement import Choice, PlacementRequest, Refused, ReplicaSlot
from stream_fabric.pool.queue import PoolQueue
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId


def requests_ahead(
    request: PlacementRequest, choice: Choice, queue: PoolQueue, regions: Mapping[ReplicaId, str]
) -> Iterator[PlacementRequest]:
    """Queued requests that go before this one. ``regions``: of the replicas."""
    of = [regions.get(scored.replica, "") for scored in choice.candidates]
    alive = [region for region, scored in zip(of, choice.candidates, strict=True) if scored.barred != "dead"]
    return queue.ahead(request.tier, None if choice.taken < 0 else of[choice.taken], alive)


def goes_first_in(
    request: PlacementRequest, choice: Choice, queue: PoolQueue, regions: Mapping[ReplicaId, str]
) -> bool:
    """True if no queued request goes before this one."""
    return next(requests_ahead(request, choice, queue, regions), None) is None


def check_bytes(
    request: PlacementRequest, sizes: Mapping[StreamId, tuple[TenantId, int]], bytes_max: int, tenant_bytes_max: int
) -> Refused | None:
    """Refuse the request if the pool or the tenant would exceed its limit in bytes; None: neither does."""
    total = sum(size for _, size in sizes.values())
    if total + request.size > bytes_max:
        return Refused(1, "bytes", float(total))
    mine = sum(size for tenant, size in sizes.values() if tenant == request.tenant)
    if mine + request.size > tenant_bytes_max:
        return Refused(1, "tenant_bytes", float(mine))
    return None


def own_prefill_ms(
    request: PlacementRequest, slots: Sequence[ReplicaSlot | None], choice: Choice, now_ms: float
) -> float:
    """Prefill that the request brings; one that is queued counts as on the pool's mean replica."""
    hits = [candidate.matched_tokens for candidate in choice.candidates]
    taken = slots[choice.taken] if choice.taken >= 0 else None
    if taken is not None:
        return (request.prompt_tokens - hits[choice.taken]) / taken.prefill_per_s * 1000
    alive = [slot.prefill_per_s for slot in slots if slot is not None and slot.takes_requests(now_ms)]
    if not alive:
        return 0.0
    per_s = sum(speed / len(alive) for speed in alive)
    return (request.prompt_tokens - max(hits)) / per_s * 1000


def least_wait_ms(alive: Sequence[ReplicaSlot], *, after_yield: bool = False) -> float:
    """Return the time until the first of the replicas begins one more request. ``after_yield``: batch work yields."""
    return min(slot.wait_after_yield_ms if after_yield else slot.wait_ms for slot in alive)


def called_to_yield(
    slots: Sequence[ReplicaSlot | None], choice: Choice, taken: ReplicaSlot | None, now_ms: float
) -> ReplicaId | None:
    """Return the replica that begins the request soonest once its batch streams have yielded; None: none would.

    ``taken``: the load of the replica that gets the request; None: the request is queued or refused.
    """
    best: tuple[float, ReplicaId] | None = None
    for candidate, slot in zip(choice.candidates, slots, strict=True):
        if slot is None or not slot.takes_requests(now_ms) or not slot.yieldable:
            continue
        if (taken is None or slot is taken) and (best is None or slot.wait_after_yield_ms < best[0]):
            best = slot.wait_after_yield_ms, candidate.replica
    return None if best is None else best[1]


def is_late(
    request: PlacementRequest, slots: Sequence[ReplicaSlot | None], choice: Choice, terms: OverloadTerms
) -> bool:
    """Return True if the request, before which none is queued, would be rejected for its wait at the chosen replica."""
    taken = slots[choice.taken] if choice.taken >= 0 else None
    if taken is None or not terms.reject_s or terms.overflow_in_max:
        return False
    return is_rejected(taken.wait_ms / 1000, terms.reject_s, rejection_draw(request.jitter))


def check_overflow_in(
    alive: Sequence[ReplicaSlot], choice: Choice, queued: int, duty: PrefillDuty, now_ms: float, terms: OverloadTerms
) -> Refused | None:
    """Refuse a request that overflows from another pool, unless this pool has room to spare; None: it has."""
    prefill_ms, slots, in_flight = 0.0, 0, 0
    for slot in alive:
        prefill_ms += slot.prefill_ms
        slots += slot.slots
        in_flight += slot.in_flight
    free = choice.taken >= 0 and not queued and in_flight + 1 <= terms.overflow_in_max * slots
    free = free and not (terms.duty_max and duty.share(now_ms, len(alive)) > terms.duty_max)
    if free and prefill_ms / len(alive) / 1000 < terms.reject_s:
        return None
    return Refused(0, "crowded", in_flight / slots if slots else 1.0)
