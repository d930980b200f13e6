"""Hands a request to its pool, or in a surge to an adjacent one."""

from __future__ import annotations

from collections.abc import Sequence

from stream_fabric.errors import NoReplica, PoolBusy, PoolFull
from stream_fabric.placement import TIERS, Placed, Queued, Refused
from stream_fabric.redis.pool import Candidate, RedisPools, Work
from stream_fabric.surge import Shift
from stream_gw.directory import Directory


async def place(
    pools: RedisPools,
    directory: Directory,
    work: Work,
    pool: str,
    candidates: Sequence[Candidate],
    hashes: Sequence[int],
    wait_s: float,
    jitter: float,
) -> tuple[Placed | Queued | Refused, Shift | None]:
    """In its home pool; or, where that has too much to begin and the request tolerates a cache miss, in an adjacent
    one, which takes it at once or not at all. Then it is its home's again: from pool to pool it goes no further.

    Raises FabricUnavailable: then it may be in any of them, and is not to be placed again."""
    model = work.request.model
    surge = directory.surge(pool, model, work.tier, candidates)
    hosts = directory.hosts(pool, model) if surge.shift_s else []
    if not hosts:
        surge = surge._replace(shift_s=0.0)
    placed = await pools.place(pool, work, candidates, wait_s=wait_s, jitter=jitter, surge=surge)
    if not (isinstance(placed, Refused) and placed.why == "elsewhere"):
        return placed, None
    for host in hosts:
        try:
            found, guest = directory.candidates(host, model, hashes), directory.guest(pool, host)
        except NoReplica:  # it has gone meanwhile
            continue
        taken = await pools.place(host, work, found, wait_s=0.0, jitter=jitter, surge=guest)
        if isinstance(taken, Placed):
            return taken, Shift(pool, host, placed.backlog_s, surge.shift_s)
    again = surge._replace(shift_s=0.0, again=True)
    return await pools.place(pool, work, candidates, wait_s=wait_s, jitter=jitter, surge=again), None


def refusal(work: Work, refused: Refused) -> PoolFull | PoolBusy:
    model, retry_after_s = work.request.model, refused.retry_after_s
    if refused.why == "shed":
        ahead = f"{refused.backlog_s:.1f} s of work are ahead of a request of tier {TIERS[work.tier]} for {model!r}"
        return PoolBusy(f"{ahead}, more than may be; ask again later", retry_after_s=retry_after_s)
    return PoolFull(
        f"every replica of {model!r} is full, and as many wait as may; ask again later", retry_after_s=retry_after_s
    )
