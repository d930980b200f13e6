"""Drains a replica whose requests wait far longer than those of its peers.

``HealthState`` decides and is pure. ``Health`` looks every second and requests the drain. Every controller runs one and
reads the same figures. A claim in Redis lets one of them act on a pool at a time, and a repeated request changes
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from stream_fabric.errors import FabricError, FabricUnavailable
from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.ports import Pools, Random
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.stream.ids import ReplicaId

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
_CLAIM = ReplicaId("(health)")
_AT_ONCE_MAX = 256
"""Concurrent reads of pools."""


class HealthPolicy(msgspec.Struct, frozen=True):
    """When a replica counts as stuck."""

    ratio: float = 3.0
    """Lowest p99 queue time of a stuck replica, as a multiple of its peers' median."""
    floor_ms: float = 1000.0
    """Queue time up to which no replica is stuck. The median of an idle pool is close to 0."""
    looks: int = 5
    """Consecutive looks that must find the replica stuck."""
    peers_min: int = 3
    """Ready replicas of the same models, the replica included, that a comparison needs."""
    ready_min: int = 2
    """Other ready replicas with room that must remain."""
    rest_s: float = 60.0
    """Pause after a drain: until then the figures include the time before it."""
    gap_s: float = 5.0
    """Longest time between two consecutive looks."""

    def __post_init__(self) -> None:
        assert self.ratio > 1 and self.looks >= 1
        assert self.peers_min >= 3, "the median of two replicas lies between them and singles out neither"
        assert LOOK_EVERY_S < self.gap_s < self.rest_s


class Stuck(NamedTuple):
    """A replica to drain, with the figures behind it."""

    pool: str
    replica: ReplicaId
    queue_p99_ms: float
    median_ms: float
    peers: int
    """Ready replicas it is compared with, itself included."""


class HealthState:
    """Finds stuck replicas. Keeps how often each replica was too slow, and the pause after a drain."""

    def __init__(self, policy: HealthPolicy) -> None:
        self.policy = policy
        self._slow_looks: dict[tuple[str, ReplicaId], int] = {}
        """Consecutive looks that found the replica too slow."""
        self._rest_until: dict[str, float] = {}
        self._looked_at = float("-inf")

    def find_stuck(self, fleet: Mapping[str, Sequence[ReplicaInfo]], now: float) -> list[Stuck]:
        """Return the replicas to drain, at most one of each pool. ``fleet``: live replicas by pool."""
        if now - self._looked_at > self.policy.gap_s:
            self._slow_looks.clear()
        self._looked_at = now
        self._rest_until = {pool: until for pool, until in self._rest_until.items() if until > now}
        slow_looks: dict[tuple[str, ReplicaId], int] = {}
        found: list[Stuck] = []
        for pool, infos in fleet.items():
            # A pool that is losing a replica already, for any reason, does not lose another
            if pool in self._rest_until or any(info.state == "draining" for info in infos):
                continue
            slow = [stuck for info in infos if (stuck := self._check_replica(pool, info, infos))]
            for stuck in slow:
                slow_looks[pool, stuck.replica] = self._slow_looks.get((pool, stuck.replica), 0) + 1
            confirmed = [stuck for stuck in slow if slow_looks[pool, stuck.replica] >= self.policy.looks]
            if confirmed:
                found.append(max(confirmed, key=lambda stuck: (stuck.queue_p99_ms, stuck.replica)))
                self._rest_until[pool] = now + self.policy.rest_s
        self._slow_looks = slow_looks
        return found

    def _check_replica(self, pool: str, info: ReplicaInfo, infos: Sequence[ReplicaInfo]) -> Stuck | None:
        """Compare a replica's queueing time with its peers'. None: not stuck, or no safe comparison."""
        policy = self.policy
        # The figure covers the last minute: without a waiting request now, a single request may have been slow
        waits = info.prefill_ms > 0 or info.load.waiting > 0
        if info.state != "ready" or not waits or info.queue_p99_ms <= policy.floor_ms:
            return None
        peers = [other for other in infos if other.state == "ready" and set(other.models) >= set(info.models)]
        remaining = sum(other.room > 0 and other.replica != info.replica for other in peers)
        if len(peers) < policy.peers_min or remaining < policy.ready_min:
            return None
        median_ms = statistics.median(other.queue_p99_ms for other in peers)
        if info.queue_p99_ms <= policy.ratio * median_ms:
            return None
        return Stuck(pool, info.replica, info.queue_p99_ms, median_ms, len(peers))


class Health:
    """Drains stuck replicas in all pools. Runs in every controller."""

    def __init__(
        self,
        pools: Pools,
        policy: HealthPolicy,
        random: Random,
        on_stuck: Callable[[], None] = lambda: None,
        fleet_events: FleetEventReporter | None = None,
    ) -> None:
        """``on_stuck`` is called for each replica that this process drains."""
        self._random = random
        self._fleet_events = fleet_events
        self._on_stuck = on_stuck
        self._pools = pools
        self._state = HealthState(policy)
        self._slots = asyncio.Semaphore(_AT_ONCE_MAX)

    async def run(self) -> None:
        while True:
            # Jitter spreads the controllers
            await asyncio.sleep(LOOK_EVERY_S * self._random.uniform(0.9, 1.0))
            try:
                await self._drain_stuck()
            except FabricError as error:
                log.warning("stuck replicas not looked for in all pools, retrying: error=%s", error)

    async def _drain_stuck(self) -> None:
        """Look at all pools, and drain their stuck replicas.

        Raises the FabricError of a pool that does not answer, after the others were looked at.
        """
        names = await self._pools.pools()
        read = await asyncio.gather(*map(self._read, names), return_exceptions=True)
        fleet = {pool: infos for pool, infos in zip(names, read, strict=True) if not isinstance(infos, BaseException)}
        failures = [infos for infos in read if isinstance(infos, BaseException)]
        for stuck in self._state.find_stuck(fleet, asyncio.get_running_loop().time()):
            try:
                await self._drain(stuck)
            except FabricError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    async def _read(self, pool: str) -> list[ReplicaInfo]:
        """Read the replicas of a pool. Raises FabricError, also for one that does not answer before the next look."""
        try:
            async with self._slots, asyncio.timeout(LOOK_EVERY_S):
                return await self._pools.replicas(pool)
        except TimeoutError:
            raise FabricUnavailable(f"pool {pool} did not answer in {LOOK_EVERY_S:g} s") from None

    async def _drain(self, stuck: Stuck) -> None:
        policy = self._state.policy
        # Another controller may have drained a replica that has not reported it yet
        if not await self._pools.claim_recovery(stuck.pool, _CLAIM, policy.rest_s, self._random.token_hex(4)):
            return
        await self._pools.request_state(stuck.pool, stuck.replica, "draining", "health")
        self._on_stuck()
        if self._fleet_events is not None:
            self._fleet_events.report(
                "drain",
                pool=stuck.pool,
                replica=stuck.replica,
                reason="its requests wait far longer than those of its peers",
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
            "replica drained, its requests wait too long: pool=%s replica=%s queue_p99_ms=%.0f median_ms=%.0f "
            "peers=%d ratio_max=%g floor_ms=%.0f",
            stuck.pool,
            stuck.replica,
            stuck.queue_p99_ms,
            stuck.median_ms,
            stuck.peers,
            policy.ratio,
            policy.floor_ms,
        )
