"""Places a request in its home pool, in an adjacent pool when that is overloaded, or at a batch host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stream_fabric.errors import NoReplica, PoolBusy, PoolFull, TooMany
from stream_fabric.limits import REQUEST_BYTES_MAX, TENANT_REQUEST_BYTES_MAX
from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.overload import (
    BATCH_HOST_TERMS,
    NO_OVERLOAD_TERMS,
    BatchHosted,
    Fallback,
    Overflow,
    OverloadTerms,
    spread_retry_s,
)
from stream_fabric.pool.placement import BATCH_TIER, TIERS, Placed, Queued, Refused
from stream_fabric.pool.records import Candidate, Work
from stream_fabric.ports import Pools
from stream_gw.routing.directory import Directory


class Outcome(NamedTuple):
    """Reply of the pool that decided about a request."""

    placed: Placed | Queued | Refused
    cell: str
    """Cell, or undivided pool, that gave the reply."""
    elsewhere: Overflow | BatchHosted | Fallback | None = None
    """Why another pool has the request; None: its home pool has it."""
    work: Work | None = None
    """The request as another model answers it; None: the model answers that it names."""


async def place(
    pools: Pools,
    directory: Directory,
    work: Work,
    pool: str,
    candidates: Sequence[Candidate],
    hashes: Sequence[int],
    wait_s: float,
    jitter: float,
    *,
    at_once: bool = False,
    retried: bool = False,
) -> Outcome:
    """Place the request in ``pool``, its home, or let it overflow once to an adjacent pool. ``pool`` may be a cell.

    A batch request goes to a batch host first, if one starts it at once. A request may overflow when its home is
    overloaded and it tolerates a cache miss. An adjacent pool starts it at once or not at all; if none does, it returns
    to its home. ``at_once``: it is refused rather than queued. ``retried``: its client has sent it before.

    Raises FabricUnavailable: any of the pools may then have the request, so the caller must not place it again.
    """
    model = work.request.model
    if work.tier == BATCH_TIER:
        for host in directory.batch_hosts(pool, model, work.regions):
            guest = msgspec.structs.replace(work, home=pool)
            taken = await place_at_host(pools, directory, guest, host, hashes, jitter, BATCH_HOST_TERMS)
            if taken is not None:
                return Outcome(*taken, BatchHosted(pool_of(pool), host))
    terms = directory.overload_terms(pool, model, work.rank, candidates, work.regions)
    overflow_pools = directory.overflow_pools(pool, model, work.regions) if terms.overflow_s else []
    if not overflow_pools:
        terms = terms._replace(overflow_s=0.0)
    if at_once or retried:
        terms = terms._replace(at_once=at_once, retried=retried)
    placed = await pools.place(pool, work, candidates, wait_s=wait_s, jitter=jitter, terms=terms)
    if isinstance(placed, Queued):
        return await _move_to_other_cell(pools, directory, work, pool, placed, hashes, wait_s, jitter)
    if not (isinstance(placed, Refused) and placed.why == "elsewhere"):
        return Outcome(placed, pool)
    for adjacent in overflow_pools:
        try:
            terms_there = directory.overflow_terms(pool, adjacent)
        except NoReplica:  # the pool went away after overflow_pools
            continue
        taken = await place_at_host(pools, directory, work, adjacent, hashes, jitter, terms_there)
        if taken is not None:
            return Outcome(*taken, Overflow(pool_of(pool), adjacent, placed.backlog_s, terms.overflow_s))
    again = terms._replace(overflow_s=0.0, again=True)
    return Outcome(await pools.place(pool, work, candidates, wait_s=wait_s, jitter=jitter, terms=again), pool)


async def place_at_host(
    pools: Pools,
    directory: Directory,
    work: Work,
    host: str,
    hashes: Sequence[int],
    jitter: float,
    terms: OverloadTerms,
) -> tuple[Placed, str] | None:
    """Place the request in another pool, at once or not at all. Return the placement and the cell that has it."""
    model, regions = work.request.model, work.regions
    cell = directory.choose_cell(host, model, work.session, hashes, regions)
    try:
        candidates = directory.candidates(cell, model, hashes, regions)
    except NoReplica:  # its last replica has left
        return None
    placed = await pools.place(cell, work, candidates, wait_s=0.0, jitter=jitter, terms=terms)
    return (placed, cell) if isinstance(placed, Placed) else None


async def _move_to_other_cell(
    pools: Pools,
    directory: Directory,
    work: Work,
    cell: str,
    queued: Queued,
    hashes: Sequence[int],
    wait_s: float,
    jitter: float,
) -> Outcome:
    """Take a request out of its cell's queue to another cell of the pool that has room; once, since it may not have."""
    model, stream = work.request.model, work.request.stream
    other = directory.other_cell(cell, model, hashes, work.regions)
    if other is None or not await pools.remove_queued(cell, [stream]):  # a replica has taken it meanwhile
        return Outcome(queued, cell)
    there, terms = directory.candidates(other, model, hashes, work.regions), NO_OVERLOAD_TERMS._replace(moved=True)
    return Outcome(await pools.place(other, work, there, wait_s=wait_s, jitter=jitter, terms=terms), other)


def refusal(work: Work, refused: Refused, recovery_s: float, draw: float) -> PoolFull | PoolBusy | TooMany:
    """Make the API error of a refused placement.

    ``recovery_s``: ``PoolPlan.recovery_s`` of the pool, 0 without a plan. ``draw``: uniform in [0, 1), spreads the
    retries.
    """
    model, retry_after_s = work.request.model, refused.retry_after_s
    needs_kv = f"no KV cache has room for its {work.prompt_tokens + work.output_tokens} expected tokens"
    if refused.why == "shed":
        retry_after_s = max(retry_after_s, spread_retry_s(recovery_s, draw))
        return PoolBusy(
            f"pool of model {model!r} is overloaded for tier {TIERS[work.rank]!r} ({refused.backlog_s:.1f} s of work "
            f"ahead{f', and {needs_kv}' if refused.lacks_kv else ''}); retry after {retry_after_s} s",
            retry_after_s=retry_after_s,
        )
    if refused.why == "tenant_bytes":
        return TooMany(
            f"your requests for model {model!r} take {refused.backlog_s:.0f} bytes, and one more would exceed "
            f"{TENANT_REQUEST_BYTES_MAX}; retry after {retry_after_s} s",
            retry_after_s=retry_after_s,
        )
    if refused.why == "bytes":
        return PoolFull(
            f"requests in the pool of model {model!r} take {refused.backlog_s:.0f} bytes, and one more would exceed "
            f"{REQUEST_BYTES_MAX}; retry after {retry_after_s} s",
            retry_after_s=retry_after_s,
        )
    if refused.lacks_kv:
        return PoolFull(
            f"{needs_kv} on the replicas of model {model!r}, and the queue is full; retry after {retry_after_s} s",
            retry_after_s=retry_after_s,
        )
    return PoolFull(
        f"all replicas of model {model!r} are full and so is the queue; retry after {retry_after_s} s",
        retry_after_s=retry_after_s,
    )
