"""``Control`` and ``Pools`` in memory, as far as controllers use them. Time is the event loop's.

``tests/control/test_memory_control.py`` holds them to the same cases as Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import COMMAND_TIMEOUT_S, QUEUE_MAX
from stream_fabric.pool.lease_changes import LeaseChanges
from stream_fabric.pool.placement import Placed, Queued, Refused
from stream_fabric.pool.plan import PoolPlan, decode_plan, encode_plan
from stream_fabric.pool.records import (
    Candidate,
    DemandTotals,
    DesiredState,
    LeaseReport,
    OverloadTotals,
    ReplicaInfo,
    TierQueue,
    Work,
)
from stream_fabric.ports import Clock
from stream_fabric.stream.ids import ReplicaId, StreamId
from tests.sim.memory_pools import MemoryPool


class MemoryRedis:
    """State that processes share. ``reachable`` is cleared to make it unreachable."""

    def __init__(self) -> None:
        self.reachable = asyncio.Event()
        self.reachable.set()
        self.flush()

    def flush(self) -> None:
        """Lose everything."""
        self.leader: tuple[str, int, float] | None = None
        """Name, term, and when the lease ends."""
        self.terms = 0
        self.plans: dict[str, bytes] = {}
        self.learned: dict[str, bytes] = {}
        self.held_until: dict[str, float] = {}
        self.pools: dict[str, MemoryPool] = {}

    def pool(self, name: str) -> MemoryPool:
        return self.pools.setdefault(name, MemoryPool(QUEUE_MAX))


class _Link:
    """One process's way to a ``MemoryRedis``. ``cut`` ends it for good, as the process's death does."""

    def __init__(self, redis: MemoryRedis) -> None:
        self._redis = redis
        self.cut = False

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _reach(self) -> MemoryRedis:
        if self.cut:
            raise FabricUnavailable("the process was killed")
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await self._redis.reachable.wait()
        except TimeoutError:
            raise FabricUnavailable(f"no answer within {COMMAND_TIMEOUT_S:g} s") from None
        return self._redis


class MemoryControl(_Link):
    """``Control``."""

    async def lead(self, controller: str, ttl_s: float) -> int:
        redis = await self._reach()
        held = redis.leader if redis.leader is not None and redis.leader[2] > self._now else None
        if held is not None and held[0] != controller:
            return 0
        if held is None:
            redis.terms += 1
        term = held[1] if held is not None else redis.terms
        redis.leader = controller, term, self._now + ttl_s
        return term

    async def leave(self, controller: str) -> None:
        redis = await self._reach()
        if redis.leader is not None and redis.leader[0] == controller:
            redis.leader = None

    async def leader(self) -> str:
        redis = await self._reach()
        return redis.leader[0] if redis.leader is not None and redis.leader[2] > self._now else ""

    async def write_plan(self, controller: str, term: int, pool: str, plan: PoolPlan | None) -> bool:
        redis = await self._reach()
        if redis.leader is None or redis.leader[2] <= self._now or redis.leader[:2] != (controller, term):
            return False
        if plan is None:
            redis.plans.pop(pool, None)
        else:
            redis.plans[pool] = encode_plan(plan)
        return True

    async def plans(self) -> dict[str, PoolPlan]:
        redis = await self._reach()
        return {pool: decode_plan(record) for pool, record in redis.plans.items()}

    async def put_learned(self, pool: str, record: bytes) -> None:
        (await self._reach()).learned[pool] = record

    async def learned(self, pool: str) -> bytes | None:
        return (await self._reach()).learned.get(pool)

    async def hold(self, pool: str, seconds: float) -> None:
        redis = await self._reach()
        redis.held_until[pool] = self._now + seconds

    async def held_s(self, pool: str) -> float:
        redis = await self._reach()
        return max(redis.held_until.get(pool, 0.0) - self._now, 0.0)


class MemoryPools(_Link):
    """``Pools``: replica leases, the queue and requested states."""

    async def report(
        self,
        info: ReplicaInfo,
        *,
        ttl_s: float | None,
        ended: Sequence[StreamId] = (),
        running: Mapping[StreamId, str] | None = None,
    ) -> LeaseReport:
        redis = await self._reach()
        return redis.pool(info.pool).report(info, self._now * 1000, ttl_s, ended, running)

    async def pools(self, timeout_s: float | None = None) -> list[str]:
        redis = await self._reach()
        return sorted(name for name, pool in redis.pools.items() if pool.leases or any(pool.law.queue.tiers))

    async def replicas(self, pool: str) -> list[ReplicaInfo]:
        return (await self._reach()).pool(pool).replicas(self._now * 1000)

    async def changes(self, pool: str, since: int, blocks_after: str) -> LeaseChanges:
        return (await self._reach()).pool(pool).changes(since, blocks_after, self._now * 1000)

    async def place(
        self, pool: str, work: Work, candidates: Sequence[Candidate], *, wait_s: float, jitter: float
    ) -> Placed | Queued | Refused:
        return (await self._reach()).pool(pool).place(work, candidates, self._now * 1000, wait_s, jitter)

    async def tier_queues(self, pool: str) -> list[TierQueue]:
        tiers = (await self._reach()).pool(pool).law.queue.tiers
        asks = [[waiting.request for waiting in tier.values()] for tier in tiers]
        return [
            TierQueue(len(tier), 0.0, sum(a.prompt_tokens for a in tier), sum(a.output_tokens for a in tier))
            for tier in asks
        ]

    async def demand_totals(self, pool: str) -> DemandTotals:
        return DemandTotals(*(await self._reach()).pool(pool).law.demand.arrived)

    async def overload_totals(self, pool: str) -> OverloadTotals:
        law = (await self._reach()).pool(pool).law
        return OverloadTotals(tuple(law.rejected), 0, tuple(law.demand.asked), law.yielded_to)

    async def request_state(
        self, pool: str, replica: ReplicaId, state: DesiredState, asked_by: str = "operator"
    ) -> bool:
        desired = (await self._reach()).pool(pool).desired
        if desired.get(replica) in ("draining", state):
            return False
        desired[replica] = state
        return True


class LoopClock(Clock):
    """``Clock`` from the running event loop's time."""

    offset_us = 0

    def now_us(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e6)

    def monotonic_us(self) -> int:
        return self.now_us()
