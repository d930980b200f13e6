"""A batch host on virtual time: a pool on capacity that may be taken away, which batch requests try first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from inference.simulate.elastic import Elastic
from inference.simulate.scalers import Fixed
from inference.simulate.traces import Request
from inference.simulate.world import Fate, RequestLife
from stream_fabric.pool.overload import BATCH_HOST_TERMS
from stream_fabric.pool.placement import BATCH_TIER
from stream_fabric.stream.ids import ReplicaId

HOST_MOST = 10_000
"""Most replicas of a batch host."""


class Reclaim(NamedTuple):
    """The busiest replica is taken away without a notice."""

    at_s: float
    back_s: float | None = None
    """Time from which the host has a replica more again, which starts cold; None: never."""


@dataclass(frozen=True)
class HostPlan:
    """Batch host of a simulated pool."""

    replicas: int
    reclaims: Sequence[Reclaim] = ()
    gpu_hour: float = 0.0
    """Dollars."""

    def replicas_at(self, at_s: float, cold_start_s: float) -> int:
        """Replicas that take requests at that time."""
        away = sum(one.at_s <= at_s and not (one.back_s and one.back_s + cold_start_s <= at_s) for one in self.reclaims)
        return max(self.replicas - away, 0)


class BatchHost(Elastic):
    """The batch host of the pool ``home``. Both have replicas of the same kind, and share clock and requests."""

    NAMES = "spot"

    def __init__(self, home: Elastic, plan: HostPlan, seed: int, *, cold_start_s: float) -> None:
        super().__init__((), plan.replicas, Fixed(), seed, home.settings, cold_start_s=cold_start_s, clock=home._clock)
        self._home = home
        self._lives, self._by_stream = home._lives, home._by_stream
        for gateway, same in zip(self.gateways, home.gateways, strict=True):
            gateway.typical = same.typical
        for reclaim in plan.reclaims:
            self._clock.schedule(reclaim.at_s, partial(self._reclaim, reclaim.back_s))
        home.batch_host = self

    def _reclaim(self, back_s: float | None) -> None:
        if self._kill_busiest() is not None and back_s is not None:
            self._clock.schedule(back_s, partial(self.request_replicas, 1))

    def _recover(self, life: RequestLife, others: Sequence[ReplicaId], instead: ReplicaId) -> bool:
        """Continue a stream of a reclaimed replica at another one, if one has a free slot, or in the home pool."""
        life.attempt += 1
        if others and self._take_over(life, others, instead, BATCH_HOST_TERMS):
            return True
        return self._home.take_back(life, instead)

    def _close_request(self, life: RequestLife, fate: Fate) -> None:
        self._home._close_request(life, fate)


def tiered(requests: Sequence[Request], batch_share: float, seed: int) -> tuple[Request, ...]:
    """Return the requests with this share of tier batch, drawn by chance; the others are interactive."""
    rng = random.Random(f"batch {seed}")
    return tuple(replace(request, tier=BATCH_TIER if rng.random() < batch_share else 0) for request in requests)
