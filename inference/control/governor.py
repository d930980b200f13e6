"""Plans the declared pools, on whichever controller leads, and tells replicas what the plan wants of them.

Every controller looks each second; one leads. What it decides is written in its term before anything is said to a
replica, so that who leads next goes on with it: no second victim, and nothing that is forgotten half way. A leader that
was paused finds its term over when it writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import tomllib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import msgspec

from inference.control.chronicle import Chronicle
from inference.control.desired import Desired
from inference.control.learner import Learner
from inference.control.metrics import ControllerMetrics
from inference.control.pods import Marker
from inference.control.scaling import Figures, Moves, PoolScaler, ScalePolicy, Seen
from inference.control.starts import Starts
from inference.control.surge import SurgeWatch, Turn, levels
from stream_fabric.errors import FabricUnavailable
from stream_fabric.ids import ReplicaId
from stream_fabric.placement import TIERS
from stream_fabric.plans import PoolPlan
from stream_fabric.ports import EventSink
from stream_fabric.redis.clock import FabricClock
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.pool import RedisPools
from stream_fabric.redis.wire import ReplyError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
PEEK_EVERY_S = 0.25
"""Between looks: whether somebody waits at a pool that has nobody."""
LEAD_S = 3.5
"""Who has not looked for so long leads no more; another does within the next look."""
_ADOPT_S = 10.0
"""A pool of which no plan is known is looked at for so long: after a loss of everything its replicas come back."""
_AT_ONCE = 32
_LEAVE_S = 1.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    pool: dict[str, dict[str, object]]
    defaults: dict[str, object] = {}


def load_policies(path: Path) -> dict[str, ScalePolicy]:
    """Of each declared pool. Raises ValueError or OSError that names the file and what is wrong."""
    where = f"{path}"
    try:
        parsed = msgspec.convert(tomllib.loads(path.read_text("utf-8")), _File)
        policies = {}
        for name, own in parsed.pool.items():
            where = f"{path}: pool {name!r}"
            policies[name] = policy = msgspec.convert({**parsed.defaults, **own}, ScalePolicy)
            if name in policy.adjacent:
                raise ValueError(f"{where}: adjacent names the pool itself")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{where}: {error}") from error
    return policies


class Governor:
    """Run beside the reaper. ``name`` is this controller's, and nobody else's."""

    def __init__(
        self,
        name: str,
        policies: Mapping[str, ScalePolicy],
        control: RedisControl,
        pools: RedisPools,
        sink: EventSink,
        clock: FabricClock,
        metrics: ControllerMetrics,
        marker: Marker,
        learner: Learner,
    ) -> None:
        self._name = name
        self._policies = policies
        self._control = control
        self._pools = pools
        self._chronicle = Chronicle(sink, clock, name)
        self._clock = clock
        self._metrics = metrics
        self._marker = marker
        self._learner = learner
        self.desired = Desired()
        self._peopled: Set[str] = frozenset()
        self._term = 0
        self._scalers: dict[str, PoolScaler] = {}
        self._starts: dict[str, Starts] = {}
        self._surges: dict[str, SurgeWatch] = {}
        self._levels: dict[str, Sequence[float]] = {}
        self._plans: dict[str, PoolPlan] = {}
        """As last read or written; kept when Redis has lost them."""
        self._unknown_since: dict[str, float] = {}
        self._marked: Set[ReplicaId] = frozenset()
        self._busy = asyncio.Semaphore(_AT_ONCE)
        self._led_at = 0.0
        metrics.receive_policies(policies)

    @property
    def leads(self) -> bool:
        return bool(self._term)

    async def run(self) -> None:
        marking = asyncio.create_task(self._mark(), name="marker")
        try:
            while not marking.done():
                try:
                    await self.look()
                except* (FabricUnavailable, ReplyError) as failed:
                    self._metrics.receive_failure()
                    if asyncio.get_running_loop().time() - self._led_at > LEAD_S:
                        self._metrics.receive_lost_lead()
                    log.warning("the pools cannot be planned: %s", failed.exceptions[0])
                await self._pause(LOOK_EVERY_S * random.uniform(0.9, 1.0))
            await marking  # its failure is ours
        finally:
            marking.cancel()
            self._chronicle.close()
            with contextlib.suppress(FabricUnavailable, ReplyError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._control.leave(self._name)

    async def _pause(self, seconds: float) -> None:
        """Until the next look, which comes early where a pool that is to have nobody has somebody who waits, or is to
        have its first replica."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left_s := until - loop.time()) > 0:
            await asyncio.sleep(min(left_s, PEEK_EVERY_S))
            empty = {pool for pool, plan in self._plans.items() if not plan.pods}
            if not empty or left_s <= PEEK_EVERY_S:
                continue
            with contextlib.suppress(FabricUnavailable, ReplyError):  # the look will say it
                if not self._term:
                    if any(plan.pods for pool, plan in (await self._control.plans()).items() if pool in empty):
                        return
                    continue
                before, self._peopled = self._peopled, frozenset(await self._pools.pools())
                if empty & (self._peopled - before):
                    return

    async def _mark(self) -> None:
        """Beside the looks: it may take longer than a term."""
        while True:
            if self._term:
                self._marked = await self._marker.settle({p.victim for p in self._plans.values() if p.victim})
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Lead if nobody does; then plan every declared pool, or read what the leader has planned."""
        asked_at = asyncio.get_running_loop().time()
        term = await self._control.lead(self._name, LEAD_S)
        self._led_at = asked_at
        written = await self._control.plans()
        if term != self._term:
            self._scalers.clear()
            self._starts.clear()
            self._surges.clear()
            self._unknown_since.clear()
            self._marked = frozenset()
            self._marker.forget()
            self._term = term
            if term:
                log.info("controller %s leads, term %d", self._name, term)
        self._plans |= written
        self._chronicle.catch_up()
        if not term:
            self._show(leads=False)
            self._metrics.receive_figures({})
            self._metrics.receive_levels({})
            return
        for pool in self._plans.keys() - self._policies.keys():
            if pool not in written or await self._control.decree(self._name, term, pool, None):
                del self._plans[pool]
        found: dict[str, Figures] = {}
        self._levels.clear()
        async with asyncio.TaskGroup() as tasks:
            for pool, policy in self._policies.items():
                tasks.create_task(self._govern(pool, policy, written.get(pool), found))
        self._show(leads=self.leads)
        self._metrics.receive_figures(found)
        self._metrics.receive_learned(self._learner.known, self._clock.now_us() / 1e6)
        self._metrics.receive_levels(self._levels)

    def _show(self, leads: bool) -> None:
        """To whoever starts and ends replicas, by Prometheus or by gRPC: the same."""
        self._metrics.receive_plans(self._plans, leads)
        self.desired.receive(self._plans, asyncio.get_running_loop().time())

    async def _govern(
        self, pool: str, policy: ScalePolicy, written: PoolPlan | None, found: dict[str, Figures]
    ) -> None:
        async with self._busy:
            now = asyncio.get_running_loop().time()
            known = self._plans.get(pool)
            seen = Seen(
                await self._pools.replicas(pool),
                await self._pools.lines(pool),
                await self._pools.arrived(pool),
                await self._control.held_s(pool) > 0,
                self._clock.now_us() / 1e6,
                next((victim for victim in self._marked if known and victim == known.victim), None),
            )
            surged = await self._pools.surged(pool)
            if known is None and now - self._unknown_since.setdefault(pool, now) < _ADOPT_S:
                return
            scaler = self._scalers.get(pool)
            if scaler is None:
                scaler = self._scalers[pool] = PoolScaler(policy, known)
                self._starts[pool] = Starts(known.asked if known else ())
                shedding, shifting = (known.shedding, known.shifting) if known else ((), False)
                self._surges[pool] = SurgeWatch(shedding, shifting)
            scaler.learn(self._learner.known.get(pool))
            plan, moves, found[pool] = scaler.look(seen, now)
            starts = self._starts[pool]
            self._learner.receive_starts(pool, starts.look(plan.pods, seen.infos, seen.at_unix_s))
            plan = scaler.plan = msgspec.structs.replace(plan, asked=starts.asked())
            self._levels[pool] = levels(seen.infos, seen.lines, plan.usual, policy.marks)
            surge = self._surges[pool]
            if surge.look(surged, policy.marks, now):
                scaler.plan = plan = msgspec.structs.replace(plan, shedding=surge.shedding, shifting=surge.shifting)
            changed = plan.reason != (known.reason if known else "")
            if plan != written:
                if changed:
                    plan = msgspec.structs.replace(plan, at_us=self._clock.now_us())
                    scaler.plan = plan
                if not await self._control.decree(self._name, self._term, pool, plan):
                    log.warning("controller %s leads no more", self._name)
                    self._term = 0
                    return
                self._plans[pool] = plan
            # On the timeline the layers stand in their order: refuse, give away, promote, ask for more
            for turn in surge.taken():
                self._tell_turn(pool, policy, turn, found[pool])
            try:
                await self._move(pool, plan, moves, policy)
            finally:
                if changed:
                    self._metrics.receive_decision(pool, known, plan)
                    self._tell(pool, plan)

    async def _move(self, pool: str, plan: PoolPlan, moves: Moves, policy: ScalePolicy) -> None:
        for replica in moves.promote:
            if await self._pools.desire(pool, replica, "ready", "controller"):
                log.info("replica %s of pool %s is to take requests", replica, pool)
                self._chronicle.tell(
                    "promote", pool, replica=replica, reason=plan.reason, figures=plan.figures, asked_by="controller"
                )
        if moves.rest is not None and await self._pools.desire(pool, moves.rest, "warm", "controller"):
            log.info("replica %s of pool %s is to rest", moves.rest, pool)
        for replica in moves.sleep:
            if await self._pools.desire(
                pool, replica, "sleeping:1" if policy.sleep_level == 1 else "sleeping:2", "controller"
            ):
                log.info("replica %s of pool %s is to sleep", replica, pool)

    def _tell(self, pool: str, plan: PoolPlan) -> None:
        log.info("pool %s: %s", pool, plan.reason)
        self._chronicle.tell(
            "scale",
            pool,
            replica=plan.victim or plan.resting or "",
            state=f"{plan.ready} ready, {plan.warm} warm, {plan.pods} in all",
            reason=plan.reason,
            figures=plan.figures,
        )

    def _tell_turn(self, pool: str, policy: ScalePolicy, turn: Turn, figures: Figures) -> None:
        reason, mark_s = told_of(turn, policy)
        log.info("pool %s: %s", pool, reason)
        lasted = {"lasted_s": round(turn.seconds, 1)} if turn.seconds else {}
        told = {"requests": turn.requests, "backlog_s": round(figures.backlog_s, 3), "mark_s": mark_s, **lasted}
        kind = f"shed {turn.tier}" if turn.tier else "shift"
        self._chronicle.tell(turn.what, pool, kind=kind, state=turn.tier, reason=reason, figures=told)


def told_of(turn: Turn, policy: ScalePolicy) -> tuple[str, float]:
    """In words, and the mark it is about."""
    marks = policy.marks
    mark_s = marks.shed_s[TIERS.index(turn.tier)] if turn.tier else marks.shift_s
    ahead = f"more than {mark_s:g} s of work is ahead of them"
    to = ", ".join(marks.adjacent)
    match turn.what:
        case "shed_begin":
            return f"requests of tier {turn.tier} are refused: {ahead}", mark_s
        case "shed_end":
            return f"requests of tier {turn.tier} are not refused any more", mark_s
        case "shift_begin":
            return f"requests that tolerate a cache miss go to {to}: {ahead}", mark_s
        case "shift_end":
            return f"no request goes to {to} any more", mark_s
