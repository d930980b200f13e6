"""Load, KV cache and queue of each replica in the last minutes, from the directory's copy of the pools.

A viewer sees them at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain, islice

from stream_fabric.limits import OPS_LOAD_EVERY_S, OPS_LOADS_MAX, OPS_RECENT_S
from stream_fabric.pool.records import EngineLoad, ReplicaInfo
from stream_fabric.stream.ids import ReplicaId
from stream_gw.admin.records import LoadSample

SAMPLES_MAX = int(OPS_RECENT_S / OPS_LOAD_EVERY_S)
_LOAD_MAX = 999
_EARLY_S = 0.5
"""A sample that comes this much too early still counts: the caller's interval is not exact."""


class LoadHistory:
    """A ring of samples for each live replica. Pure: the caller gives the time."""

    def __init__(self) -> None:
        self._rings: dict[ReplicaId, deque[LoadSample]] = {}
        self._sampled_at = float("-inf")

    def sample(self, by_pool: Mapping[str, Sequence[ReplicaInfo]], now_s: float) -> None:
        """Keep a sample of each replica, at most once an interval, and forget replicas that left."""
        if now_s - self._sampled_at < OPS_LOAD_EVERY_S - _EARLY_S:
            return
        self._sampled_at = now_s
        rings: dict[ReplicaId, deque[LoadSample]] = {}
        for info in islice(chain.from_iterable(by_pool.values()), OPS_LOADS_MAX):
            ring = self._rings.get(info.replica)
            rings[info.replica] = ring = deque(maxlen=SAMPLES_MAX) if ring is None else ring
            load = info.load
            percent = round(100 * (load.running + load.waiting) / max(load.slots, 1))
            kv_used_ratio = reported_kv_ratio(load)
            ring.append(
                LoadSample(
                    min(percent, _LOAD_MAX), None if kv_used_ratio is None else round(100 * kv_used_ratio), load.waiting
                )
            )
        self._rings = rings

    def of(self, replica: ReplicaId) -> tuple[LoadSample, ...]:
        """Return the replica's samples, the oldest first."""
        return tuple(self._rings.get(replica, ()))


def reported_kv_ratio(load: EngineLoad) -> float | None:
    """Return the share of the KV cache in use (0 to 1); None: the engine does not report it."""
    return load.kv_used_ratio if load.kv_capacity_tokens or load.kv_used_ratio else None
