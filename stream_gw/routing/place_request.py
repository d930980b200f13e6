"""Places a request in its home pool or, when that is overloaded, in an adjacent pool."""

from __future__ import annotations

from collections.abc import Sequence

from stream_fabric.errors import NoReplica, PoolBusy, PoolFull, TooMany
from stream_fabric.limits import REQUEST_BYTES_MAX, TENANT_REQUEST_BYTES_MAX
from stream_fabric.pool.overload import Overflow
from stream_fabric.pool.placement import TIERS, Placed, Queued, Refused
from stream_fabric.pool.records import Candidate, Work
from stream_fabric.ports import Pools
from stream_gw.routing.directory import Directory


async def place(
    pools: Pools,
    directory: Directory,
    work: Work,
    pool: str,
    candidates: Sequence[Candidate],
    hashes: Sequence[int],
    wait_s: float,
    jitter: float,
) -> tuple[Placed | Queued | Refused, Overflow | None]:
    """Place the request in ``pool``, its home, or let it overflow once to an adjacent pool.

    A request may overflow when its home is overloaded and it tolerates a cache miss. An adjacent pool starts it at once
    or not at all; if none does, it returns to its home.

    Raises FabricUnavailable: any of the pools may then have the request, so the caller must not place it again.
    """
    model = work.request.model
    terms = directory.overload_terms(pool, model, work.tier, candidates)
    overflow_pools = directory.overflow_pools(pool, model) if terms.overflow_s else []
    if not overflow_pools:
        terms = terms._replace(overflow_s=0.0)
    placed = await pools.place(pool, work, candidates, wait_s=wait_s, jitter=jitter, terms=terms)
    if not (isinstance(placed, Refused) and placed.why == "elsewhere"):
        return placed, None
    for other in overflow_pools:
        try:
            there = directory.candidates(other, model, hashes)
            terms_there = directory.overflow_terms(pool, other)
        except NoReplica:  # the pool went away after overflow_pools
            continue
        taken = await pools.place(other, work, there, wait_s=0.0, jitter=jitter, terms=terms_there)
        if isinstance(taken, Placed):
            return taken, Overflow(pool, other, placed.backlog_s, terms.overflow_s)
    again = terms._replace(overflow_s=0.0, again=True)
    return await pools.place(pool, work, candidates, wait_s=wait_s, jitter=jitter, terms=again), None


def refusal(work: Work, refused: Refused) -> PoolFull | PoolBusy | TooMany:
    """Make the API error of a refused placement."""
    model, retry_after_s = work.request.model, refused.retry_after_s
    if refused.why == "shed":
        return PoolBusy(
            f"pool of model {model!r} is overloaded for tier {TIERS[work.tier]!r} ({refused.backlog_s:.1f} s of work "
            f"ahead); retry after {retry_after_s} s",
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
    return PoolFull(
        f"all replicas of model {model!r} are full and so is the queue; retry after {retry_after_s} s",
        retry_after_s=retry_after_s,
    )
