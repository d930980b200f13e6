"""Drains a replica that makes its requests wait far longer than its peers do.

``HealthState`` decides, pure; ``Health`` looks each second and passes the decision on. Every controller runs one: they
read the same figures, a claim in Redis lets one of them act on a pool at a time, and what it writes is a wish that
changes nothing when it is written twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from stream_fabric.errors import FabricUnavailable
from stream_fabric.herald import Herald
from stream_fabric.ids import ReplicaId
from stream_fabric.redis.pool import RedisPools, ReplicaInfo
from stream_fabric.redis.wire import ReplyError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
_CLAIM = ReplicaId("(health)")


class HealthPolicy(msgspec.Struct, frozen=True):
    ratio: float = 3.0
    """A queue time so many times its peers' median is too long."""
    floor_ms: float = 1000.0
    """And below this none is, whatever the median: an idle pool's is next to nothing."""
    looks: int = 5
    """So many in a row must find it."""
    peers_min: int = 3
    """Ready replicas that serve all it does, itself counted, below which nobody can say who is slow."""
    ready_min: int = 2
    """Of them, others with room that must stay."""
    rest_s: float = 60.0
    """After a drain its pool is left alone for as long as the figures tell of the time before."""
    gap_s: float = 5.0
    """Looks further apart than this are not in a row."""

    def __post_init__(self) -> None:
        assert self.ratio > 1 and self.looks >= 1
        assert self.peers_min >= 3, "the median of two is between them: neither would tell of the other"
        assert LOOK_EVERY_S < self.gap_s < self.rest_s


class Stuck(NamedTuple):
    """A replica to be drained, and why."""

    pool: str
    replica: ReplicaId
    queue_p99_ms: float
    median_ms: float
    peers: int
    """Ready, itself counted."""


class HealthState:
    def __init__(self, policy: HealthPolicy) -> None:
        self.policy = policy
        self._rows: dict[tuple[str, ReplicaId], int] = {}
        """Looks in a row that found it too slow."""
        self._rest_until: dict[str, float] = {}
        self._looked_at = float("-inf")

    def look(self, fleet: Mapping[str, Sequence[ReplicaInfo]], now: float) -> list[Stuck]:
        """``fleet``: the live replicas of every pool. At most one of each pool is to be drained."""
        if now - self._looked_at > self.policy.gap_s:
            self._rows.clear()
        self._looked_at = now
        self._rest_until = {pool: until for pool, until in self._rest_until.items() if until > now}
        rows: dict[tuple[str, ReplicaId], int] = {}
        found: list[Stuck] = []
        for pool, infos in fleet.items():
            # A pool that loses one already, whoever wanted that, does not lose another
            if pool in self._rest_until or any(info.state == "draining" for info in infos):
                continue
            slow = [stuck for info in infos if (stuck := self._judge(pool, info, infos))]
            for stuck in slow:
                rows[pool, stuck.replica] = self._rows.get((pool, stuck.replica), 0) + 1
            ripe = [stuck for stuck in slow if rows[pool, stuck.replica] >= self.policy.looks]
            if ripe:
                found.append(max(ripe, key=lambda stuck: (stuck.queue_p99_ms, stuck.replica)))
                self._rest_until[pool] = now + self.policy.rest_s
        self._rows = rows
        return found

    def _judge(self, pool: str, info: ReplicaInfo, infos: Sequence[ReplicaInfo]) -> Stuck | None:
        policy = self.policy
        # The figure is of the last minute: one that nobody waits for now was slow, perhaps with a single request
        waits = info.prefill_ms > 0 or info.load.waiting > 0
        if info.state != "ready" or not waits or info.queue_p99_ms <= policy.floor_ms:
            return None
        peers = [other for other in infos if other.state == "ready" and set(other.models) >= set(info.models)]
        stay = sum(other.room > 0 and other.replica != info.replica for other in peers)
        if len(peers) < policy.peers_min or stay < policy.ready_min:
            return None
        median_ms = statistics.median(other.queue_p99_ms for other in peers)
        if info.queue_p99_ms <= policy.ratio * median_ms:
            return None
        return Stuck(pool, info.replica, info.queue_p99_ms, median_ms, len(peers))


class Health:
    """Run beside the reaper."""

    def __init__(
        self,
        pools: RedisPools,
        policy: HealthPolicy,
        on_stuck: Callable[[], None] = lambda: None,
        herald: Herald | None = None,
    ) -> None:
        """``on_stuck`` is called for each that this process has drained."""
        self._herald = herald
        self._on_stuck = on_stuck
        self._pools = pools
        self._state = HealthState(policy)

    async def run(self) -> None:
        while True:
            # Jitter spreads the controllers
            await asyncio.sleep(LOOK_EVERY_S * random.uniform(0.9, 1.0))
            try:
                await self._look()
            except (FabricUnavailable, ReplyError) as error:
                log.warning("stuck replicas cannot be looked for: %s", error)

    async def _look(self) -> None:
        fleet = {pool: await self._pools.replicas(pool) for pool in await self._pools.pools()}
        policy = self._state.policy
        for stuck in self._state.look(fleet, asyncio.get_running_loop().time()):
            # Another controller may have drained one whose report has not come yet
            if not await self._pools.claim_rescue(stuck.pool, _CLAIM, policy.rest_s):
                continue
            await self._pools.desire(stuck.pool, stuck.replica, "draining", "health")
            self._on_stuck()
            if self._herald is not None:
                self._herald.tell(
                    "drain",
                    pool=stuck.pool,
                    replica=stuck.replica,
                    reason="its requests wait far longer than its peers'",
                    asked_by="health",
                    figures={
                        "queue_p99_ms": round(stuck.queue_p99_ms, 1),
                        "median_ms": round(stuck.median_ms, 1),
                        "peers": stuck.peers,
                        "ratio": policy.ratio,
                        "floor_ms": policy.floor_ms,
                    },
                )
            log.warning(
                "replica %s of pool %s is drained: its requests wait %.0f ms (99th percentile) and the median of its "
                "%d ready peers is %.0f ms; drained above %g times that and %.0f ms",
                stuck.replica,
                stuck.pool,
                stuck.queue_p99_ms,
                stuck.peers,
                stuck.median_ms,
                policy.ratio,
                policy.floor_ms,
            )
