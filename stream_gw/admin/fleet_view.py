"""Builds the feed's records of pools and replicas from the fabric's. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from stream_fabric.pool.placement import TIERS
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import ReplicaInfo, SlotUse, TierQueue
from stream_fabric.pool.replica_load import TTFT_BUCKETS_S
from stream_fabric.process.stats import add_counts, bucket_quantile
from stream_fabric.stream.ids import ReplicaId
from stream_gw.admin.load_history import reported_kv_ratio
from stream_gw.admin.records import LoadSample, Plan, Pool, Replica, Tier

_TTFT_BOUNDS_S = (0.0, *TTFT_BUCKETS_S, TTFT_BUCKETS_S[-1])
"""The last bucket has no upper bound: its values count as its lower one."""


def replica_records(
    uses: Iterable[SlotUse],
    infos: Mapping[ReplicaId, ReplicaInfo],
    recent: Callable[[ReplicaId], tuple[LoadSample, ...]],
) -> Iterator[Replica]:
    """Make the feed's records of a pool's replicas. The directory's ``infos`` may lack a replica."""
    for use in uses:
        info = infos.get(use.replica)
        if info is None:
            yield Replica(use.replica, "lost" if use.left_s < 0 else "new", round(use.left_s, 1), use.in_flight)
            continue
        load = info.load
        kv_used_ratio = reported_kv_ratio(load)
        queried = load.prefix_queries_tokens
        yield Replica(
            use.replica,
            "lost" if use.left_s < 0 else info.state,
            round(use.left_s, 1),
            use.in_flight,
            info.room,
            load.running,
            load.slots,
            load.waiting,
            round(info.tokens_per_s, 1),
            round(info.prefill_ms + info.decode_ms, 1),
            round(info.queue_p99_ms, 1),
            None if kv_used_ratio is None else round(kv_used_ratio, 4),
            round(load.prefix_hits_tokens / queried, 4) if queried else None,
            info.models,
            info.adapters,
            info.engine,
            info.hardware,
            info.region,
            info.revision,
            info.simulated,
            info.blocked,
            recent(use.replica),
        )


def pool_record(
    name: str,
    replicas: list[Replica],
    queues: Sequence[TierQueue],
    plan: PoolPlan | None,
    infos: Iterable[ReplicaInfo],
    replicas_max: int,
) -> Pool:
    """Make the feed's record of a pool, with at most ``replicas_max`` of its replicas."""
    ttft_counts = add_counts((info.ttft_counts for info in infos), len(TTFT_BUCKETS_S) + 1)
    states: dict[str, int] = {}
    for row in replicas:
        states[row.state] = states.get(row.state, 0) + 1
    shown = sorted(replicas, key=lambda row: row.state == "ready")[:replicas_max]
    return Pool(
        name,
        None
        if plan is None
        else Plan(plan.ready, plan.warm, plan.pods, plan.reason, plan.at_us // 1000, plan.is_yielding),
        states,
        sum(row.slots for row in replicas if row.state == "ready"),
        sum(row.running + row.waiting for row in replicas) + sum(queue.depth for queue in queues),
        round(sum(row.tokens_per_s for row in replicas), 1),
        _quantile_ms(ttft_counts, 0.5),
        _quantile_ms(ttft_counts, 0.99),
        [Tier(tier, queue.depth, round(queue.oldest_s, 1)) for tier, queue in zip(TIERS, queues, strict=True)],
        sorted(shown, key=attrgetter("replica")),
    )


def _quantile_ms(counts: Sequence[int], share: float) -> float | None:
    """Quantile ``share`` (0 to 1) of a histogram, in ms; None: the histogram is empty."""
    seconds = bucket_quantile(counts, _TTFT_BOUNDS_S, share)
    return None if seconds is None else round(1000 * seconds, 1)
