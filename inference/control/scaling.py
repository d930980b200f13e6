"""How many replicas a pool needs, which of them rests, and when the count may fall. Pure: time is an argument.

Up on what leads (work that arrives, what waits, time to first token), at once and by as much as it takes; down on what
trails (utilisation low for long), by one, and only while the whole fleet is as it was wanted to be. A replica never
leaves with work: it rests first, is then warm and may be promoted again, and only one that has nothing left to do lets
the count fall. What is not seen is not zero: a look that came late, a fleet that is not whole, a rollout or a hold
take nothing away.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from inference.control.burn import LONG_S, SHORT_S, Burn
from inference.control.lessons import Snapshot
from inference.control.profile import ArrivalProfile
from stream_fabric.ids import ReplicaId
from stream_fabric.learned import Learned
from stream_fabric.metrics import TTFT_BUCKETS_S
from stream_fabric.placement import TIERS
from stream_fabric.plans import PoolPlan, Usual
from stream_fabric.redis.pool import Arrived, Line, ReplicaInfo
from stream_fabric.surge import Marks

GAP_S = 5.0
"""Looks further apart are not in a row: nothing is known of the time between."""
_RATE_S = 30.0
_LEVEL_S = 120.0
_KNOWN_S = 10.0
_SLOPE_S = 60.0
_SLOPE_EVERY_S = 5.0
_SIGMAS = 3.0
"""Standard deviations of counts that chance alone seldom makes."""
_KEPT_S = 600.0
_SMOOTH_S = 30.0
_SURPLUS_S = 2.0
"""A replica more than wanted takes requests for so long before one rests."""
_WAKING_S = 10.0
"""A replica that wakes is waited for so long; then another is promoted beside it."""
_LACKING_COLD_STARTS = 3.0
"""Replicas that have not come for so many cold starts will not: the pool is planned without them."""
_PATIENCE = 2.0
"""Cold starts, the longer of learned and declared, that a request waits for the first replica."""
_STEADY = 0.05
_SHARE_MOST = 2.0
_SHARE_S = 1800.0
"""How slowly it is believed that there is more or less than usual."""
_SAMPLES_MIN = 20
"""First tokens below which nobody can tell a 99th percentile."""


class ScalePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is declared of a pool. Shares are of 1, times in seconds."""

    models: tuple[str, ...] = ()
    """Also served while the pool has no replica."""
    replicas_min: int = 1
    replicas_max: int = 100
    """Warm ones counted."""
    warm_min: int = 0
    warm_share: float = 0.05
    """Of those that take requests, so many more are kept warm."""
    warm_max_share: float = 0.25
    """As many at most, where arrivals have jumped by more than those that take requests can bear."""
    ttft_objective_s: float = 1.0
    ttft_over: float = 1.2
    ttft_over_s: float = 60.0
    ttft_step: float = 0.10
    slo_share: float = 0.99
    """Of first tokens, so many are promised within the objective; it changes no decision."""
    backlog_s_max: float = 0.5
    backlog_over_s: float = 5.0
    backlog_step: float = 0.05
    utilisation_max: float = 0.85
    utilisation_over_s: float = 180.0
    utilisation_step: float = 0.05
    utilisation_aimed: float = 0.8
    """What a replica is to be filled to where so much arrives that chance evens out."""
    spare_sigmas: float = 4.0
    """Beyond that, room for so many standard deviations of what chance adds: to the prompts that arrive within one TTFT
    objective, to the streams that run at a time; at most as much again as the work."""
    utilisation_low: float = 0.4
    low_s: float = 900.0
    zero_s: float = 900.0
    """The last replica goes after so long without a request, where ``replicas_min`` is 0."""
    cold_start_s: float = 300.0
    """From asking for a replica until it takes requests: how far ahead arrivals are forecast."""
    growth_max: float = 1.5
    """A forecast is at most so many times what arrives now."""
    sleep_level: int = 0
    """At which warm replicas sleep; 0: they stay awake."""
    sleep_after_s: float = 300.0
    """Warm and idle for so long."""
    awake_min: int = 1
    """Of the warm ones so many do not sleep: they are there at once."""
    shed_batch_s: float = 0.5
    """Where requests of the tier begin to be refused, in seconds of what is ahead of them; 0: never."""
    shed_standard_s: float = 10.0
    shed_interactive_s: float = 20.0
    shift_backlog_s: float = 1.0
    """Where requests that tolerate a cache miss begin to go to an adjacent pool."""
    adjacent: tuple[str, ...] = ()
    """Pools that serve the same models and may take them, in order."""
    shift_utilisation_max: float = 0.6
    """Of an adjacent pool's slots, the most that are in use with a request that it takes."""

    def __post_init__(self) -> None:
        for name, well in (
            ("replicas_min must be 0 or more", self.replicas_min >= 0),
            (
                "replicas_max must be at least 1 and at least replicas_min",
                self.replicas_max >= max(self.replicas_min, 1),
            ),
            ("warm_min must be from 0 to replicas_max", 0 <= self.warm_min <= self.replicas_max),
            ("warm_share must be from 0 to 1", 0 <= self.warm_share <= 1),
            ("warm_max_share must be from 0 to 1", 0 <= self.warm_max_share <= 1),
            ("ttft_objective_s must be more than 0", self.ttft_objective_s > 0),
            ("ttft_over must be at least 1", self.ttft_over >= 1),
            ("slo_share must be more than 0 and less than 1", 0 < self.slo_share < 1),
            ("growth_max must be from 1 to 10", 1 <= self.growth_max <= 10),
            ("sleep_level must be 0, 1 or 2", self.sleep_level in (0, 1, 2)),
            ("awake_min must be 0 or more", self.awake_min >= 0),
            (
                "it must be 0 < utilisation_low < utilisation_aimed <= utilisation_max <= 1",
                0 < self.utilisation_low < self.utilisation_aimed <= self.utilisation_max <= 1,
            ),
            ("spare_sigmas must be 0 or more", self.spare_sigmas >= 0),
            ("steps must be from 0 to 1", all(0 <= step <= 1 for step in self._steps)),
            ("times must be 0 or more", all(time_s >= 0 for time_s in self._times)),
            (
                "it must be shed_batch_s <= shed_standard_s <= shed_interactive_s, but for those that are 0",
                sorted(self._sheds) == self._sheds,
            ),
            (
                "with adjacent pools shift_backlog_s must be more than 0, and the first of the tiers refused before it",
                not self.adjacent or self.shift_backlog_s >= max(min(self._sheds, default=0), 1e-9),
            ),
            ("shift_utilisation_max must be more than 0, at most 1", 0 < self.shift_utilisation_max <= 1),
        ):
            if not well:
                raise ValueError(name)

    @property
    def _steps(self) -> tuple[float, ...]:
        return self.ttft_step, self.backlog_step, self.utilisation_step

    @property
    def _times(self) -> tuple[float, ...]:
        return (
            self.ttft_over_s, self.backlog_s_max, self.backlog_over_s, self.utilisation_over_s, self.low_s, self.zero_s,
            self.cold_start_s, self.sleep_after_s,
            self.shift_backlog_s, self.shed_batch_s, self.shed_standard_s, self.shed_interactive_s,
        )  # fmt: skip

    @property
    def _sheds(self) -> list[float]:
        return [mark_s for mark_s in (self.shed_batch_s, self.shed_standard_s, self.shed_interactive_s) if mark_s]

    @property
    def marks(self) -> Marks:
        shed_s = {"interactive": self.shed_interactive_s, "standard": self.shed_standard_s, "batch": self.shed_batch_s}
        return Marks(
            tuple(shed_s[tier] for tier in TIERS), self.shift_backlog_s, self.adjacent, self.shift_utilisation_max
        )

    def warm_for(self, ready: int, filled: float = 0.0, jump: float = 0.0) -> int:
        """``jump``: replicas' worth of work by which more may arrive within a cold start. What those that are ready can
        take of it, filled as they are staffed for, needs no warm ones."""
        if not ready:
            return self.warm_min
        beyond = math.ceil((ready * filled + jump) / self.utilisation_max - ready - 1e-9)
        warm = max(self.warm_min, round(self.warm_share * ready), min(beyond, round(self.warm_max_share * ready)))
        return min(warm, self.replicas_max - ready)


class Seen(NamedTuple):
    """A pool at one look."""

    infos: Sequence[ReplicaInfo]
    lines: Sequence[Line]
    """Of each tier."""
    arrived: Arrived
    held: bool = False
    """An operator or a rollout forbids that anything is taken away."""
    at_unix_s: float = 0.0
    """What the profile is looked up by."""
    marked: ReplicaId | None = None
    """The victim that whoever ends replicas knows of."""


class Figures(msgspec.Struct, frozen=True):
    """What a decision rests on."""

    ready: int
    warm: int
    coming: int
    """Starting or warming up."""
    draining: int
    revisions: int
    running: int
    waiting: int
    """In the pool's queue."""
    utilisation: float
    """Of the ready replicas' slots; one whose engine lets sequences wait is full."""
    ttft_p99_s: float
    """Of the last minute, tier batch not counted; 0: too few to tell."""
    backlog_s: float
    """In which the ready replicas would begin all that has no first token."""
    to_free_s: float
    """In which they would have done all that is asked of them."""
    arrivals_per_s: float
    growth: float
    """What the forecast expects, as a multiple of what arrives now."""
    foreseen: float
    """Replicas' worth of work that usually comes within a cold start from now."""
    work: float
    """Replicas' worth of work that is expected to arrive by then, and that waits."""
    busy: float
    """Replicas that what runs fills, smoothed."""
    needed: int
    burn_5m: float
    """Of the first tokens, those over the objective, as a multiple of what may be; 0: too few to tell."""
    burn_1h: float
    jump: float = 0.0
    """Replicas' worth of work by which more arrives within a cold start than now, but for one time in a hundred."""
    cold_start_s: float = 0.0
    """As learned, or declared."""


class Moves(NamedTuple):
    """What is to be said to replicas so that the plan comes about; saying it again changes nothing."""

    promote: tuple[ReplicaId, ...] = ()
    rest: ReplicaId | None = None
    sleep: tuple[ReplicaId, ...] = ()


class Arrivals:
    """Rates of what arrives, from counters that only grow until they are lost."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Arrived]] = deque()
        self._slopes: deque[tuple[float, float]] = deque()

    def clear(self) -> None:
        self._samples.clear()
        self._slopes.clear()

    def receive(self, now: float, arrived: Arrived) -> None:
        if self._samples and any(new < old for new, old in zip(arrived, self._samples[-1][1], strict=True)):
            self._samples.clear()
        self._samples.append((now, arrived))
        while now - self._samples[0][0] > _KEPT_S:
            self._samples.popleft()

    def per_s(self) -> Arrived | None:
        """Requests, prompt tokens and output tokens a second now; None: too little is known.

        Of the last two minutes, unless the last half minute has more than chance makes of that.
        """
        long, short = self._of(_LEVEL_S), self._of(_RATE_S)
        if long is None or short is None:
            return None
        return short if short.requests - long.requests > _SIGMAS * math.sqrt(long.requests / _RATE_S) else long

    def _of(self, span_s: float, ago_s: float = 0.0) -> Arrived | None:
        """Of the span that ended so long ago. Of now also where less than the span is known."""
        end = self._samples[-1][0] - ago_s
        after = next(((at, counts) for at, counts in reversed(self._samples) if at <= end), None)
        before = next(((at, counts) for at, counts in reversed(self._samples) if at <= end - span_s), None)
        if before is None and not ago_s:
            before = self._samples[0]
        if after is None or before is None or after[0] - before[0] < _KNOWN_S:
            return None
        passed_s = after[0] - before[0]
        return Arrived(*((new - old) / passed_s for new, old in zip(after[1], before[1], strict=True)))

    def growth(self, horizon_s: float, most: float) -> float:
        """How many times more will arrive at the horizon than now, if it goes on as it did; at least 1.

        What rose must have risen in both halves of a span, each by more than chance makes, and go on, as seen from each
        moment of the last minute: a step is no slope.
        """
        now = self._samples[-1][0]
        if not self._slopes or now - self._slopes[-1][0] >= _SLOPE_EVERY_S:
            self._slopes.append((now, self._growth(horizon_s)))
        while now - self._slopes[0][0] > _SLOPE_S:
            self._slopes.popleft()
        known_s = now - self._slopes[0][0]
        return min(min(grown for _, grown in self._slopes), most) if known_s >= _SLOPE_S - _SLOPE_EVERY_S else 1.0

    def _growth(self, horizon_s: float) -> float:
        now, found = self._of(_RATE_S), 1.0
        if now is None or now.requests <= 0:
            return 1.0
        for half_s in (60.0, 150.0):
            late, middle, then = (self._of(_RATE_S, ago_s) for ago_s in (half_s / 2, half_s, 2 * half_s))
            if late is None or middle is None or then is None:
                continue
            going_on = 4 * max(now.requests - late.requests, 0.0)
            slope = min(_risen(middle, now), _risen(then, middle), going_on) / half_s
            found = max(found, 1 + slope * (horizon_s + _RATE_S / 2) / now.requests)
        return found


def _risen(then: Arrived, now: Arrived) -> float:
    """Requests a second; 0: no more than chance makes."""
    risen = now.requests - then.requests
    return risen if risen > _SIGMAS * math.sqrt((now.requests + then.requests) / _RATE_S) else 0.0


class Need(NamedTuple):
    """What a pool has to do."""

    running: int
    waiting: int
    waits_s: float
    """Of one replica's time, for what is in the queue."""
    backlog_s: float
    to_free_s: float
    busy: float
    """Replicas whose slots are filled by what runs and waits."""


def need(infos: Sequence[ReplicaInfo], lines: Sequence[Line], usual: Usual | None) -> Need:
    """``usual``: of its replicas; None: unknown, and the backlog is that of one which makes a token a second, so that
    it is never hidden."""
    ready = [info for info in infos if info.state == "ready"]
    running = sum(_streams(info) for info in infos)
    waiting = sum(line.depth for line in lines)
    usual = usual or Usual(max((info.load.slots for info in infos), default=1), 1.0, 1.0, 0.0, 0.0)
    waits_s = sum(line.prompt_tokens / usual.prefill_per_s + line.output_tokens / usual.decode_per_s for line in lines)
    count = max(len(ready), 1)
    backlog_s = (waits_s + sum(info.prefill_ms for info in ready) / 1000) / count
    to_free_s = backlog_s + sum(info.decode_ms for info in ready) / 1000 / count
    return Need(running, waiting, waits_s, backlog_s, to_free_s, (running + waiting) / max(usual.slots, 1))


class PoolScaler:
    """One declared pool, looked at each second by the controller that leads."""

    def __init__(self, policy: ScalePolicy, plan: PoolPlan | None = None) -> None:
        self.policy = policy
        self.plan = plan
        self._declared = policy
        self.profile: ArrivalProfile | None = None
        self._learned: Learned | None = None
        self._usual_share = 1.0
        """Of what the profile tells, how much comes these days."""
        self._arrivals = Arrivals()
        self._looked_at = -math.inf
        self._for_s: dict[str, float] = {}
        self._needs: deque[tuple[float, int]] = deque()
        """What was needed at the looks of the last ``low_s``."""
        self._busy = 0.0
        self._filled = policy.utilisation_aimed
        """By the work that arrives, of those that it needs."""
        self._quiet_s = 0.0
        self._burn = Burn(policy.ttft_objective_s, policy.slo_share)
        self._idle_since: dict[ReplicaId, float] = {}
        """Of those that are warm."""
        self._waking_since: dict[ReplicaId, float] = {}

    def learn(self, known: Snapshot | None) -> None:
        """What is known of the pool from now on."""
        if known is None or known is self._learned:
            return
        self._learned, self.profile, declared = known, known.arrivals, self._declared
        self.policy = msgspec.structs.replace(declared, cold_start_s=known.cold_start_s(declared.cold_start_s))

    def look(self, seen: Seen, now: float) -> tuple[PoolPlan, Moves, Figures]:
        """The plan from now on, with the reason of its last change; and what is to be said to replicas."""
        passed_s = now - self._looked_at
        if not 0 <= passed_s <= GAP_S:
            self._for_s.clear()
            self._arrivals.clear()
            self._needs.clear()
            self._idle_since.clear()
            passed_s = 0.0
        first = math.isinf(self._looked_at)
        self._looked_at = now
        self._arrivals.receive(now, seen.arrived)
        self._burn.receive(seen.infos, passed_s, now)
        fleet = _Fleet(seen.infos)
        old = self.plan or self._adopted(fleet)
        usual = usual_of(fleet.ready)
        if usual is None and self._learned is not None:
            usual = self._learned.usual(old.usual)
        usual = _steadied(usual, old.usual)
        figures = self._figures(seen, fleet, usual, 1.0 if first else min(passed_s / _SMOOTH_S, 1.0))
        self._quiet_s = (
            0.0 if figures.running or figures.waiting or figures.arrivals_per_s else self._quiet_s + passed_s
        )

        self._needs.append((now, figures.needed))
        while self._needs[0][0] < now - self.policy.low_s:
            self._needs.popleft()
        plan = msgspec.structs.replace(
            old,
            usual=usual,
            models=self.policy.models,
            cold_start_s=self.policy.cold_start_s,
            patience_s=_PATIENCE * max(self.policy.cold_start_s, self._declared.cold_start_s),
            outputs=old.outputs if self._learned is None else self._learned.outputs(),
            surge=self.policy.marks,
        )
        plan = self._forget_gone(plan, fleet)
        calm = self._calm(plan, fleet, seen, passed_s)
        plan = self._raised(plan, figures, passed_s)
        if plan.ready == old.ready:
            plan = self._lowered(plan, figures, calm, passed_s)
        plan = self._counted(plan, fleet, seen, calm)
        plan, moves = self._moved(plan, fleet, seen, calm, passed_s)
        sleepy = self._sleepy(plan, fleet)
        if not moves.promote and not seen.held:
            moves = moves._replace(sleep=sleepy)
        if plan.reason == old.reason or _wants(plan) == _wants(old):
            plan = msgspec.structs.replace(plan, reason=old.reason, figures=old.figures)
        else:
            plan = msgspec.structs.replace(
                plan, figures={k: float(v) for k, v in msgspec.structs.asdict(figures).items()}
            )
        self.plan = plan
        return plan, moves, figures

    # --- what is seen --------------------------------------------------------------------------------------

    def _adopted(self, fleet: _Fleet) -> PoolPlan:
        """Nothing is known of what was wanted: what is there is."""
        policy = self.policy
        ready = min(max(policy.replicas_min, len(fleet.ready) + len(fleet.coming)), policy.replicas_max)
        warm = policy.warm_for(ready)
        return PoolPlan(ready, warm, max(fleet.present, ready + warm), reason="what was there")

    def _figures(self, seen: Seen, fleet: _Fleet, usual: Usual | None, weight: float) -> Figures:
        policy = self.policy
        found = need(seen.infos, seen.lines, usual)
        rates = self._arrivals.per_s() or Arrived(0, 0, 0)
        growth = self._arrivals.growth(policy.cold_start_s, policy.growth_max)
        work = foreseen = staffed = 0.0
        if usual is not None:
            usually = self._foreseen(rates, seen.at_unix_s, weight)
            coming = Arrived(*(growth * rate for rate in rates))
            foreseen = sum(_work(usually, usual))
            waits = found.waits_s / max(policy.cold_start_s, _RATE_S)  # the queue is to be empty by then
            work = max(foreseen, sum(_work(coming, usual))) + waits
            staffed = max(self._staffed(rates, usual) for rates in (usually, coming)) + waits / policy.utilisation_aimed
            self._filled = work / staffed if staffed else policy.utilisation_aimed
        slots = usual.slots if usual is not None else max(found.running, 1)
        busy = found.running / slots
        self._busy += weight * (busy - self._busy)
        needed = math.ceil(max(staffed, self._busy / policy.utilisation_max) - 1e-9)
        if found.waiting or rates.requests:
            needed = max(needed, 1)
        return Figures(
            len(fleet.ready),
            len(fleet.rested),
            len(fleet.coming),
            len(fleet.draining),
            len({info.revision for info in seen.infos if info.state != "draining"}),
            found.running,
            found.waiting,
            fleet.utilisation(),
            _ttft_p99_s(fleet.ready),
            found.backlog_s,
            found.to_free_s,
            rates.requests,
            growth,
            foreseen,
            work,
            self._busy,
            needed,
            self._burn.rate(SHORT_S, self._looked_at),
            self._burn.rate(LONG_S, self._looked_at),
            self._jump(usual),
            policy.cold_start_s,
        )

    def _staffed(self, rates: Arrived, usual: Usual) -> float:
        """Replicas for what arrives, with room for what chance adds: the fewer requests it is, the more."""
        if not rates.requests:
            return 0.0
        prefill, decode = _work(rates, usual)
        prompts = rates.requests * self.policy.ttft_objective_s
        streams = decode * usual.slots  # that run at a time, where batches are full: Little's law
        spare = sum(
            work * min(self.policy.spare_sigmas / math.sqrt(count), 1.0)
            for work, count in ((prefill, prompts), (decode, streams))
            if work
        )
        return (prefill + decode) / self.policy.utilisation_aimed + spare

    def _jump(self, usual: Usual | None) -> float:
        jump = self._learned.jump(self.policy.cold_start_s) if self._learned is not None else None
        if jump is None or usual is None:
            return 0.0
        return jump.prompt_tokens / usual.prefill_per_s + jump.output_tokens / usual.decode_per_s

    def _foreseen(self, rates: Arrived, at_unix_s: float, weight: float) -> Arrived:
        """The most that usually comes from now until a replica asked for now has come and its slot is over."""
        if self.profile is None:
            return Arrived(0.0, 0.0, 0.0)
        usually = self.profile.at(at_unix_s)
        if usually.requests > 0:
            share = min(max(rates.requests / usually.requests, 1 / _SHARE_MOST), _SHARE_MOST)
            self._usual_share += weight * _SMOOTH_S / _SHARE_S * (share - self._usual_share)
        until_s = at_unix_s + self.policy.cold_start_s + _RATE_S
        return Arrived(*(self._usual_share * rate for rate in self.profile.most(at_unix_s, until_s)))

    def _calm(self, plan: PoolPlan, fleet: _Fleet, seen: Seen, passed_s: float) -> bool:
        """Whether something may be taken away: all is as it was wanted to be, and nobody is about to change it."""
        lacking = fleet.present < plan.pods
        lacking_s = self._held("lacking", lacking, passed_s)
        whole = not fleet.coming and (not lacking or lacking_s > _LACKING_COLD_STARTS * self.policy.cold_start_s)
        one_revision = len({info.revision for info in seen.infos}) <= 1
        return whole and one_revision and not fleet.draining and not seen.held

    def _held(self, what: str, so: bool, passed_s: float) -> float:
        """For how long it has been so, look after look."""
        self._for_s[what] = self._for_s.get(what, 0.0) + passed_s if so else 0.0
        return self._for_s[what]

    def _forget_gone(self, plan: PoolPlan, fleet: _Fleet) -> PoolPlan:
        """Who has rested is not resting any more, and a victim that is gone or has work again is none."""
        by_name = fleet.by_name
        if plan.resting is not None and (plan.resting not in by_name or fleet.is_idle(plan.resting)):
            plan = msgspec.structs.replace(plan, resting=None)
        if plan.victim is not None and not fleet.is_idle(plan.victim):
            plan = msgspec.structs.replace(plan, victim=None)
        return plan

    # --- how many --------------------------------------------------------------------------------------------

    def _raised(self, plan: PoolPlan, figures: Figures, passed_s: float) -> PoolPlan:
        policy, ready = self.policy, figures.ready
        slow = figures.ttft_p99_s > policy.ttft_over * policy.ttft_objective_s
        # Of a pool that is idle more replicas would be as slow: it is the prompts, or the objective
        slow_s = self._held("slow", slow and figures.utilisation >= policy.utilisation_low, passed_s)
        backlog_s = self._held("backlog", bool(ready) and figures.backlog_s > policy.backlog_s_max, passed_s)
        full_s = self._held("full", figures.utilisation > policy.utilisation_max, passed_s)
        asked = [
            (policy.replicas_min, f"replicas_min is {policy.replicas_min}"),
            (
                figures.needed,
                f"work for {figures.work:.2f} replicas waits or is to come, {figures.growth:.2f} times what comes now; "
                f"{figures.foreseen:.2f} usually come, {figures.busy:.2f} are filled",
            ),
        ]
        if slow_s and slow_s >= policy.ttft_over_s:
            told = f"p99 TTFT {figures.ttft_p99_s:.2f} s, over {policy.ttft_over:g} x {policy.ttft_objective_s:g} s"
            asked.append((_stepped(ready, policy.ttft_step), f"{told} for {slow_s:.0f} s"))
        if backlog_s and backlog_s >= policy.backlog_over_s:
            told = f"backlog {figures.backlog_s:.2f} s, over {policy.backlog_s_max:g} s for {backlog_s:.0f} s"
            asked.append((_stepped(ready, policy.backlog_step), told))
        if full_s and full_s >= policy.utilisation_over_s:
            told = f"utilisation {figures.utilisation:.0%}, over {policy.utilisation_max:.0%} for {full_s:.0f} s"
            asked.append((_stepped(ready, policy.utilisation_step), told))
        wanted, reason = max(asked, key=lambda ask: ask[0])
        wanted = min(wanted, policy.replicas_max)
        if wanted <= plan.ready:
            return plan
        for name in ("slow", "full"):  # what is coming has its time to show
            self._for_s[name] = 0.0
        return msgspec.structs.replace(plan, ready=wanted, reason=f"{plan.ready} to {wanted} ready: {reason}")

    def _lowered(self, plan: PoolPlan, figures: Figures, calm: bool, passed_s: float) -> PoolPlan:
        policy, ready = self.policy, plan.ready
        # One at a time; and those that are there must be those that were wanted, or their utilisation tells nothing of
        # one fewer
        done = plan.resting is None and plan.victim is None and plan.pods == ready + plan.warm
        as_wanted = calm and done and figures.ready == ready
        is_low = figures.ready > 0 and figures.utilisation < policy.utilisation_low
        low_s = self._held("low", is_low, passed_s)
        low = is_low and as_wanted
        came = max(figures.ready, figures.needed, policy.replicas_min)
        if calm and 0 < figures.ready < ready and came < ready and not figures.warm:
            return msgspec.structs.replace(plan, ready=came, reason=f"{ready} to {came} ready: none more came")
        if ready > policy.replicas_max and as_wanted:
            reason = f"replicas_max is {policy.replicas_max}"
        elif ready == 1 and not policy.replicas_min and low:
            if figures.needed or self._quiet_s < policy.zero_s:
                return plan
            reason = f"no request for {self._quiet_s:.0f} s"
        elif low and ready > 1 and low_s >= policy.low_s:
            # What was needed a minute ago may be again: one that goes and is asked for again costs a cold start
            if ready <= max(policy.replicas_min, *(needed for _, needed in self._needs)):
                return plan
            if figures.utilisation * ready / (ready - 1) > policy.utilisation_aimed:
                return plan
            reason = f"utilisation {figures.utilisation:.0%}, under {policy.utilisation_low:.0%} for {low_s:.0f} s"
        else:
            return plan
        return msgspec.structs.replace(plan, ready=ready - 1, reason=f"{ready} to {ready - 1} ready: {reason}")

    def _counted(self, plan: PoolPlan, fleet: _Fleet, seen: Seen, calm: bool) -> PoolPlan:
        """How many there are to be in all: more at once, fewer by one that has nothing left to do."""
        jump = self._jump(plan.usual)
        warm = self.policy.warm_for(plan.ready, self._filled, jump)
        plan = msgspec.structs.replace(plan, warm=warm)
        wanted = plan.ready + warm
        if wanted > plan.pods:
            reason = f"{plan.reason}; {plan.pods} to {wanted} in all"
            if warm > self.policy.warm_for(plan.ready):
                reason += f", {warm} warm for jumps by {jump:.2f} replicas' work"
            return msgspec.structs.replace(plan, pods=wanted, victim=None, reason=reason)
        rolls = len({info.revision for info in seen.infos}) > 1  # the one more that a rollout starts is not wanted
        if fleet.present > plan.pods and plan.victim is None and not rolls:
            reason = f"{fleet.present} are there in all, {plan.pods} were wanted"
            return msgspec.structs.replace(plan, pods=fleet.present, reason=reason)
        if wanted == plan.pods or not calm:
            return plan
        if fleet.present < plan.pods:  # they did not come in all that time, and are not missed
            pods = max(wanted, fleet.present)
            return msgspec.structs.replace(plan, pods=pods, reason=f"{plan.pods} to {pods} in all: none more came")
        spare = [name for name in fleet.idle if name != plan.resting]
        if plan.victim is None:
            if len(spare) > warm:
                victim = min(spare, key=fleet.worth)
                reason = f"{victim} may go: idle, and {len(spare)} are warm where {warm} are wanted"
                return msgspec.structs.replace(plan, victim=victim, reason=reason)
        elif fleet.present == plan.pods and seen.marked == plan.victim:
            reason = f"{plan.pods} to {plan.pods - 1} in all: {plan.victim} goes"
            return msgspec.structs.replace(plan, pods=plan.pods - 1, reason=reason)
        return plan

    # --- who -------------------------------------------------------------------------------------------------

    def _moved(self, plan: PoolPlan, fleet: _Fleet, seen: Seen, calm: bool, passed_s: float) -> tuple[PoolPlan, Moves]:
        taking = [info for info in fleet.ready if info.replica != plan.resting]
        short = plan.ready - len(taking)
        surplus_s = self._held("surplus", short < 0, passed_s)
        waking = self._waking(fleet)
        if short > 0:
            short -= waking
        if short > 0:
            # The one that is resting first: it is the warmest; the victim last
            rested = sorted(
                fleet.rested,
                key=lambda info: (
                    info.replica != plan.resting,
                    info.replica == plan.victim,
                    info.state == "sleeping",
                    info.wake_s if info.state == "sleeping" else 0.0,
                    -info.prefix_blocks,
                    info.replica,
                ),
            )
            names = [info.replica for info in rested]
            if plan.resting in fleet.by_name and plan.resting not in names:
                names.insert(0, plan.resting)  # it has not heard yet
            promoted = tuple(names[:short])
            if plan.resting in promoted:
                plan = msgspec.structs.replace(plan, resting=None)
            if plan.victim in promoted:
                plan = msgspec.structs.replace(plan, victim=None)
            return plan, Moves(promoted)
        one_revision = len({info.revision for info in seen.infos}) <= 1
        settled = calm or surplus_s > _SURPLUS_S
        if short < 0 and settled and plan.resting is None and one_revision and not fleet.draining and not seen.held:
            least = min(taking, key=fleet.worth_of)
            reason = f"{least.replica} rests: {len(taking)} take requests where {plan.ready} are wanted"
            plan = msgspec.structs.replace(plan, resting=least.replica, reason=reason)
        return plan, Moves(rest=plan.resting)

    def _waking(self, fleet: _Fleet) -> int:
        """How many wake, and are there before another could be."""
        now = self._looked_at
        waking = [info.replica for info in fleet.coming if info.load.asleep]
        self._waking_since = {name: self._waking_since.get(name, now) for name in waking}
        return sum(now - since <= _WAKING_S for since in self._waking_since.values())

    def _sleepy(self, plan: PoolPlan, fleet: _Fleet) -> tuple[ReplicaId, ...]:
        """Warm ones that have long had nothing to do, but for those that stay awake: the smallest caches first, for
        they are lost."""
        policy = self.policy
        warm = [
            info
            for info in fleet.rested
            if info.state == "warm" and not _streams(info) and info.replica not in (plan.resting, plan.victim)
        ]
        now = self._looked_at
        self._idle_since = {info.replica: self._idle_since.get(info.replica, now) for info in warm}
        due = [
            info
            for info in sorted(warm, key=fleet.worth_of)
            if not info.sleepless and now - self._idle_since[info.replica] >= policy.sleep_after_s
        ]
        most = max(len(warm) - policy.awake_min, 0) if policy.sleep_level else 0
        return tuple(info.replica for info in due[:most])


def _wants(plan: PoolPlan) -> tuple[object, ...]:
    return plan.ready, plan.warm, plan.pods, plan.resting, plan.victim


def _stepped(ready: int, share: float) -> int:
    return math.ceil(ready * (1 + share) - 1e-9)


class _Fleet:
    """A pool's replicas by what they are."""

    def __init__(self, infos: Sequence[ReplicaInfo]) -> None:
        self.by_name = {info.replica: info for info in infos}
        self.ready = [info for info in infos if info.state == "ready"]
        self.rested = [info for info in infos if info.state in ("warm", "sleeping")]
        self.coming = [info for info in infos if info.state in ("starting", "warming")]
        self.draining = [info for info in infos if info.state == "draining"]
        self.idle = [info.replica for info in self.rested if not _streams(info)]

    @property
    def present(self) -> int:
        """One that drains is as good as gone, and counted no more by whoever ends it."""
        return len(self.ready) + len(self.rested) + len(self.coming)

    def is_idle(self, name: ReplicaId) -> bool:
        return name in self.idle

    def worth(self, name: ReplicaId) -> tuple[int, int, ReplicaId]:
        return self.worth_of(self.by_name[name])

    def worth_of(self, info: ReplicaInfo) -> tuple[int, int, ReplicaId]:
        """What would be lost without it: its streams, then its cache."""
        return _streams(info), info.prefix_blocks, info.replica

    def utilisation(self) -> float:
        if not self.ready:
            return 0.0
        return statistics.fmean(
            1.0 if info.load.waiting else min(info.load.running / max(info.load.slots, 1), 1.0) for info in self.ready
        )


def _work(rates: Arrived, usual: Usual) -> tuple[float, float]:
    """Prefill and decode, in replicas."""
    return rates.prompt_tokens / usual.prefill_per_s, rates.output_tokens / usual.decode_per_s


def usual_of(ready: Sequence[ReplicaInfo]) -> Usual | None:
    if not ready:
        return None
    mean = statistics.fmean
    return Usual(
        max(round(mean(info.load.slots for info in ready)), 1),
        max(mean(info.prefill_per_s for info in ready), 1.0),
        max(mean(info.decode_per_s for info in ready), 1.0),
        mean(info.output_tokens_mean for info in ready),
        mean(info.bytes_per_token for info in ready),
    )


def _steadied(usual: Usual | None, old: Usual | None) -> Usual | None:
    """Figures that differ by little are the same: a plan is not written each second for them."""
    if usual is None or old is None:
        return usual or old
    pairs = zip(msgspec.structs.astuple(usual), msgspec.structs.astuple(old), strict=True)
    return old if all(abs(new - was) <= _STEADY * was for new, was in pairs) else usual


def _streams(info: ReplicaInfo) -> int:
    return info.load.running + info.load.waiting


def _ttft_p99_s(infos: Sequence[ReplicaInfo]) -> float:
    """Within its bucket as if first tokens were spread evenly over it."""
    bounds = (0.0, *TTFT_BUCKETS_S, 2 * TTFT_BUCKETS_S[-1])
    counts = [0] * (len(bounds) - 1)
    for info in infos:
        for bucket, count in enumerate(info.ttft_counts[: len(counts)]):
            counts[bucket] += count
    total = sum(counts)
    if total < _SAMPLES_MIN:
        return 0.0
    wanted = 0.99 * total
    for (low, high), count in zip(pairwise(bounds), counts, strict=True):
        if count >= wanted:
            return low + (high - low) * wanted / count
        wanted -= count
    return bounds[-1]
