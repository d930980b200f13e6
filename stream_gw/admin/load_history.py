"""Load of each replica in the last minutes, from the directory's copy of the pools: a viewer sees it at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain, islice

from stream_fabric.limits import OPS_LOAD_EVERY_S, OPS_LOADS_MAX, OPS_RECENT_S
from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.stream.ids import ReplicaId

SAMPLES_MAX = int(OPS_RECENT_S / OPS_LOAD_EVERY_S)
_LOAD_MAX = 999
_EARLY_S = 0.5
"""A sample that comes this much too early still counts: the caller's interval is not exact."""


class LoadHistory:
    """A ring of loads for each live replica. Pure: the caller gives the time."""

    def __init__(self) -> None:
        self._loads: dict[ReplicaId, deque[int]] = {}
        self._sampled_at = float("-inf")

    def sample(self, by_pool: Mapping[str, Sequence[ReplicaInfo]], now_s: float) -> None:
        """Keep a value for each replica, at most once an interval, and forget replicas that left."""
        if now_s - self._sampled_at < OPS_LOAD_EVERY_S - _EARLY_S:
            return
        self._sampled_at = now_s
        loads: dict[ReplicaId, deque[int]] = {}
        for info in islice(chain.from_iterable(by_pool.values()), OPS_LOADS_MAX):
            ring = self._loads.get(info.replica)
            loads[info.replica] = ring = deque(maxlen=SAMPLES_MAX) if ring is None else ring
            load = info.load
            ring.append(min(round(100 * (load.running + load.waiting) / max(load.slots, 1)), _LOAD_MAX))
        self._loads = loads

    def of(self, replica: ReplicaId) -> tuple[int, ...]:
        """Return the replica's loads in percent of its slots, the oldest first."""
        return tuple(self._loads.get(replica, ()))
