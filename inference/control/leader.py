"""One of the controllers leads and plans the declared pools; the others read its plans and stand by.

Every controller looks each second. The leader writes each plan in its term, so a leader that was paused finds its term
over when it writes, and requests nothing of any replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence, Set

from inference.control.decision_log import DecisionLog
from inference.control.desired import DesiredReplicas
from inference.control.metrics import ControllerMetrics
from inference.control.pods import Marker
from inference.control.policy.figures import Figures
from inference.control.policy.scale_policy import ScalePolicy
from inference.control.pool_planner import PoolPlanner
from inference.control.traffic_model_job import TrafficModelJob
from stream_fabric.errors import FabricError
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.ports import Clock, Control, EventSink, Pools, Random
from stream_fabric.stream.ids import ReplicaId

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
PEEK_EVERY_S = 0.25
"""Time between two checks, within a look's interval, for requests at a pool without replicas."""
LEASE_S = 3.5
"""Leadership of a controller that has not looked for this long ends; another one leads at its next look."""
_CONCURRENT_POOLS = 32
_LEAVE_S = 1.0


class Leader:
    """Competes for leadership and plans the pools. Runs in every controller; ``name`` is unique to each."""

    def __init__(
        self,
        name: str,
        policies: Mapping[str, ScalePolicy],
        control: Control,
        pools: Pools,
        sink: EventSink,
        clock: Clock,
        random: Random,
        metrics: ControllerMetrics,
        marker: Marker,
        models: TrafficModelJob,
    ) -> None:
        self._name = name
        self._policies = policies
        self._control = control
        self._pools = pools
        self._decisions = DecisionLog(sink, clock, name)
        self._clock = clock
        self._random = random
        self._metrics = metrics
        self._marker = marker
        self._models = models
        self.desired = DesiredReplicas()
        self._term = 0
        """0: another controller leads."""
        self._planners: dict[str, PoolPlanner] = {}
        self._plans: dict[str, PoolPlan] = {}
        """Plans as last read or written. Those of declared pools stay when Redis has lost them."""
        self._announced: Set[ReplicaId] = frozenset()
        """Scale-down targets that the platform knows of."""
        self._active_pools: Set[str] = frozenset()
        self._unanswered: set[str] = set()
        """Pools that could not be planned at the last look."""
        self._slots = asyncio.Semaphore(_CONCURRENT_POOLS)
        self._led_at = 0.0
        metrics.receive_policies(policies)

    async def run(self) -> None:
        marking = asyncio.create_task(self._announce_targets(), name="marker")
        try:
            while not marking.done():
                try:
                    await self.plan_pools()
                except* FabricError as failed:
                    self._metrics.receive_failure()
                    if asyncio.get_running_loop().time() - self._led_at > LEASE_S:
                        self._metrics.receive_lost_lead()
                    log.warning("pools not planned, retrying: error=%s", failed.exceptions[0])
                await self._wait_for_next_look(LOOK_EVERY_S * self._random.uniform(0.9, 1.0))
            await marking  # raises what ended it
        finally:
            marking.cancel()
            self._decisions.close()
            with contextlib.suppress(FabricError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._control.leave(self._name)

    async def plan_pools(self) -> None:
        """Become or stay leader if no other controller is, then plan every pool; else read the leader's plans."""
        asked_at = asyncio.get_running_loop().time()
        term = await self._control.lead(self._name, LEASE_S)
        self._led_at = asked_at
        written = await self._control.plans()
        if term != self._term:
            self._begin_term(term)
        self._plans = {pool: plan for pool, plan in self._plans.items() if pool in self._policies} | written
        self._decisions.catch_up()
        if not term:
            self._publish(leads=False)
            self._metrics.receive_lost_lead()
            return
        for pool in written.keys() - self._policies.keys():
            if await self._write_plan(pool, None):
                del self._plans[pool]
        figures: dict[str, Figures] = {}
        shares: dict[str, Sequence[float]] = {}
        deadline = asyncio.get_running_loop().time() + LOOK_EVERY_S
        async with asyncio.TaskGroup() as tasks:
            for pool in self._policies:
                tasks.create_task(self._try_pool(pool, written.get(pool), figures, shares, deadline))
        self._publish(leads=bool(self._term))
        self._metrics.receive_figures(figures)
        self._metrics.receive_models(self._models.known, self._clock.now_us() / 1e6)
        self._metrics.receive_reject_shares(shares)

    def _begin_term(self, term: int) -> None:
        """Forget what the last term knew, and take the new term. 0: another controller leads."""
        self._planners.clear()
        self._announced = frozenset()
        self._set_term(term)
        if term:
            log.info("leadership taken: controller=%s term=%d", self._name, term)

    def _set_term(self, term: int) -> None:
        self._term = term
        self._models.is_leading = bool(term)

    def _publish(self, *, leads: bool) -> None:
        """Show the plans to Prometheus and KEDA."""
        self._metrics.receive_plans(self._plans, leads)
        self.desired.receive(self._plans, asyncio.get_running_loop().time())

    async def _try_pool(
        self,
        pool: str,
        written: PoolPlan | None,
        figures: dict[str, Figures],
        shares: dict[str, Sequence[float]],
        deadline: float,
    ) -> None:
        """Plan one pool before the deadline. A pool that does not answer keeps its plan and delays no other."""
        # A pool that did not answer at the last look takes no slot from those that do
        slot = contextlib.nullcontext() if pool in self._unanswered else self._slots
        try:
            async with asyncio.timeout_at(deadline) as limit, slot:
                await self._plan_pool(pool, written, figures, shares, limit)
        except (FabricError, TimeoutError) as error:
            self._metrics.receive_failure()
            if pool not in self._unanswered:
                why = str(error) or f"it did not answer in {LOOK_EVERY_S:g} s"
                log.warning("pool not planned, retrying at each look: pool=%s error=%s", pool, why)
            self._unanswered.add(pool)
        else:
            self._unanswered.discard(pool)

    async def _plan_pool(
        self,
        pool: str,
        written: PoolPlan | None,
        figures: dict[str, Figures],
        shares: dict[str, Sequence[float]],
        limit: asyncio.Timeout,
    ) -> None:
        """Plan one pool, and add its figures and reject shares.

        ``written``: its plan in Redis. ``limit``: that of the pool's answers.
        """
        planner = self._planners.get(pool)
        if planner is None:
            planner = self._planners[pool] = self._make_planner(pool)
        now = asyncio.get_running_loop().time()
        decision = await planner.decide(self._plans.get(pool), self._announced, now)
        if decision is None or not self._term:  # another pool's plan was refused meanwhile
            return
        figures[pool], shares[pool] = decision.figures, decision.reject_shares
        if decision.plan != written:
            deadline = limit.when()
            limit.reschedule(None)  # plans are where the lead is, not with the pool, and this write must be known
            if not await self._write_plan(pool, decision.plan):
                return
            limit.reschedule(deadline)
            self._plans[pool] = decision.plan
        await planner.carry_out(decision, lambda: bool(self._term))

    async def _write_plan(self, pool: str, plan: PoolPlan | None) -> bool:
        """Write or remove a plan. False: the term is over, and another controller may lead."""
        written = await self._control.write_plan(self._name, self._term, pool, plan)
        if not written and self._term:
            log.warning("leadership lost: controller=%s", self._name)
            self._set_term(0)
        return written

    def _make_planner(self, pool: str) -> PoolPlanner:
        return PoolPlanner(
            pool,
            self._policies[pool],
            self._pools,
            self._control,
            self._clock,
            self._models,
            self._decisions,
            self._metrics,
        )

    async def _wait_for_next_look(self, seconds: float) -> None:
        """Wait until the next look.

        The look comes early when a pool planned with 0 replicas gets a request, or a first planned replica.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left_s := until - loop.time()) > 0:
            await asyncio.sleep(min(left_s, PEEK_EVERY_S))
            empty = {pool for pool, plan in self._plans.items() if not plan.pods}
            if not empty or left_s <= PEEK_EVERY_S:
                continue
            # The next look reports an error, and comes in time to keep the lead
            with contextlib.suppress(FabricError, TimeoutError):
                async with asyncio.timeout_at(until):
                    if not self._term:
                        if any(plan.pods for pool, plan in (await self._control.plans()).items() if pool in empty):
                            return
                        continue
                    before, self._active_pools = self._active_pools, frozenset(await self._pools.pools())
                    if empty & (self._active_pools - before):
                        return

    async def _announce_targets(self) -> None:
        """Tell the platform which replicas may go. Not part of a look, because it may take longer than a term."""
        marked_term = 0
        while True:
            if term := self._term:
                if term != marked_term:
                    self._marker.forget()
                    marked_term = term
                victims = {victim for plan in self._plans.values() for victim in plan.victims}
                marked = await self._marker.mark_only(victims)
                if term == self._term:  # else another controller may have marked others since
                    self._announced = marked
            await asyncio.sleep(LOOK_EVERY_S)
