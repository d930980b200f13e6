"""The figures that a pool's size is decided by, estimated from one look after another. Pure: time is an argument."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import msgspec

from inference.control.policy.arrivals import RATE_S, Arrivals
from inference.control.policy.burn import LONG_S, SHORT_S, Burn
from inference.control.policy.fleet_view import FleetView, Observation, pending_work
from inference.control.policy.scale_policy import ScalePolicy
from inference.control.policy.schedule import scheduled_event
from inference.control.policy.traffic_model import PoolTrafficModel
from stream_fabric.pool.plan import ReplicaProfile
from stream_fabric.pool.records import DemandTotals, ReplicaInfo
from stream_fabric.pool.replica_load import TTFT_BOUNDS_S
from stream_fabric.process.stats import add_counts, bucket_quantile, percentile

_SMOOTH_S = 30.0
_SHARE_MAX = 2.0
"""The current level of arrivals is between the usual one divided by this and times this."""
_SHARE_S = 1800.0
"""Time constant with which that level follows the arrivals."""
_SAMPLES_MIN = 20
"""First tokens needed for a 99th percentile."""
PEAK_MEAN_S = 180.0
"""Time of the mean need that peaks are measured against."""
_REMEMBERED_S = 3600.0
"""Time for which a peak is remembered."""
_PEAKS_EVERY_S = 5.0


class Figures(msgspec.Struct, frozen=True):
    """Figures behind a decision. They are copied into the plan and into the decision's event."""

    ready: int
    warm: int
    coming: int
    """Replicas that start or warm up."""
    draining: int
    revisions: int
    running: int
    waiting: int
    """Requests in the pool's queue."""
    utilisation: float
    """Mean share of the ready replicas' slots in use."""
    ttft_p99_s: float
    """99th percentile of time to first token in the last minute, without tier batch; 0: too few samples."""
    backlog_s: float
    """Seconds until the ready replicas have begun everything that has no first token."""
    to_free_s: float
    """Seconds until the ready replicas have finished everything."""
    arrivals_per_s: float
    growth: float
    """Forecast of the arrival rate as a multiple of the current one."""
    foreseen: float
    """Replicas of work that usually arrive within a cold start."""
    work: float
    """Replicas of work expected to arrive within a cold start, and waiting."""
    busy: float
    """Replicas filled by what runs, smoothed."""
    needed: int
    burn_5m: float
    """Error-budget burn rate of the TTFT objective over 5 minutes; 1: exactly as many are slow as may be; 0: too few
    samples."""
    burn_1h: float
    jump: float = 0.0
    """Increase in arrivals within a cold start that warm replicas are kept for, in replicas of work."""
    cold_start_s: float = 0.0
    """Cold start in use: learned, or declared."""
    scheduled: int = 0
    """Ready replicas that a declared event needs, now or within a cold start."""
    peak: int = 0
    """Replicas that the pool's usual peaks bring back into use; 0: unknown."""


class LoadEstimator:
    """Estimates one pool's figures. Keeps the state that needs several looks."""

    def __init__(self, policy: ScalePolicy, peak_rise: float = 0.0) -> None:
        """``peak_rise``: the last one of the leader before; 0: unknown."""
        self._arrivals = Arrivals()
        self._burn = Burn(policy.ttft_objective_s, policy.slo_share)
        self._model: PoolTrafficModel | None = None
        self._usual_share = 1.0
        """Current level of arrivals relative to the arrival profile."""
        self._busy = 0.0
        self._usual_peak = UsualPeak(peak_rise)
        self.filled = policy.utilisation_aimed
        """Planned utilisation of the needed replicas by the work that arrives."""

    def learn(self, model: PoolTrafficModel) -> None:
        """Use this traffic model from now on."""
        self._model = model

    def clear_arrivals(self) -> None:
        """Forget arrival rates and needs, after a gap in looking."""
        self._arrivals.clear()
        self._usual_peak.clear()

    def peak_rise(self, policy: ScalePolicy) -> float:
        """Return the usual peak as a multiple of the mean need, for the plan; 0: unknown."""
        return round(self._usual_peak.rise(policy.peak_share), 1)

    def lacks_mean(self, policy: ScalePolicy) -> bool:
        """Whether peaks are known, and the mean that they are a multiple of is not."""
        return self.peak_rise(policy) > 0 and not self._usual_peak.knows_mean()

    def estimate(
        self,
        seen: Observation,
        fleet: FleetView,
        profile: ReplicaProfile | None,
        policy: ScalePolicy,
        passed_s: float,
        now: float,
        *,
        is_first: bool,
    ) -> Figures:
        """Return the figures of one look.

        ``profile``: of the pool's replicas; None: unknown. ``passed_s``: time since the last look.
        """
        self._arrivals.receive(now, seen.arrived)
        self._burn.receive(seen.infos, passed_s, now)
        weight = 1.0 if is_first else min(passed_s / _SMOOTH_S, 1.0)
        pending = pending_work(seen.infos, seen.queues, profile)
        rates = self._arrivals.per_s() or DemandTotals(0, 0, 0)
        growth = self._arrivals.growth(policy.cold_start_s, policy.growth_max)
        work = foreseen = staffed = 0.0
        if profile is not None:
            usual = self._profile_arrivals(rates, seen.at_unix_s, weight, policy)
            forecast = DemandTotals(*(growth * rate for rate in rates))
            foreseen = sum(_work_in_replicas(usual, profile))
            queued = pending.queue_s / max(policy.cold_start_s, RATE_S)  # the queue is to be empty by then
            work = max(foreseen, sum(_work_in_replicas(forecast, profile))) + queued
            staffed = max(replicas_with_spare(each, profile, policy) for each in (usual, forecast))
            staffed += queued / policy.utilisation_aimed
            self.filled = work / staffed if staffed else policy.utilisation_aimed
        slots = profile.slots if profile is not None else max(pending.running, 1)
        self._busy += weight * (pending.running / slots - self._busy)
        needed = math.ceil(max(staffed, self._busy / policy.utilisation_max) - 1e-9)
        if pending.waiting or rates.requests:
            needed = max(needed, 1)
        self._usual_peak.receive(now, needed)
        event = scheduled_event(policy.schedule, seen.at_unix_s, policy.cold_start_s)
        scheduled = event.replicas if event is not None else 0
        return Figures(
            ready=len(fleet.ready),
            warm=len(fleet.rested),
            coming=len(fleet.coming),
            draining=len(fleet.draining),
            revisions=len({info.revision for info in seen.infos if info.state != "draining"}),
            running=pending.running,
            waiting=pending.waiting,
            utilisation=fleet.utilisation(),
            ttft_p99_s=_ttft_p99_s(fleet.ready),
            backlog_s=pending.backlog_s,
            to_free_s=pending.to_free_s,
            arrivals_per_s=rates.requests,
            growth=growth,
            foreseen=foreseen,
            work=work,
            busy=self._busy,
            needed=max(needed, scheduled),
            burn_5m=self._burn.rate(SHORT_S, now),
            burn_1h=self._burn.rate(LONG_S, now),
            jump=self._jump_in_replicas(profile, policy),
            cold_start_s=policy.cold_start_s,
            scheduled=scheduled,
            peak=self._usual_peak.replicas(policy.peak_share),
        )

    def _jump_in_replicas(self, profile: ReplicaProfile | None, policy: ScalePolicy) -> float:
        """Increase in arrivals within a cold start at ``jump_share``, in replicas of work; 0: unknown."""
        jump = self._model.jump(policy.cold_start_s) if self._model is not None else None
        if jump is None or profile is None:
            return 0.0
        return jump.in_replicas(policy.jump_share, profile)

    def _profile_arrivals(
        self, rates: DemandTotals, at_unix_s: float, weight: float, policy: ScalePolicy
    ) -> DemandTotals:
        """Highest rates of the arrival profile until a replica asked for now is ready, at the current level."""
        arrivals = self._model.arrivals if self._model is not None else None
        if arrivals is None:
            return DemandTotals(0.0, 0.0, 0.0)
        usual = arrivals.at(at_unix_s)
        if usual.requests > 0:
            share = min(max(rates.requests / usual.requests, 1 / _SHARE_MAX), _SHARE_MAX)
            self._usual_share += weight * _SMOOTH_S / _SHARE_S * (share - self._usual_share)
        until_s = at_unix_s + policy.cold_start_s + RATE_S
        return DemandTotals(*(self._usual_share * rate for rate in arrivals.highest(at_unix_s, until_s)))


def _work_in_replicas(rates: DemandTotals, profile: ReplicaProfile) -> tuple[float, float]:
    """Prefill work and decode work of these arrivals, each in replicas.

    Engines that limit their steps give all answers a token in each step with a prompt, which the prefill speed already
    includes. Only the other tokens are decode work.
    """
    prefill = rates.prompt_tokens / profile.prefill_per_s
    decode = rates.output_tokens / profile.decode_per_s
    if profile.itl_objective_ms:
        full_step_s = profile.slots / profile.decode_per_s
        decode -= prefill * min(full_step_s / profile.itl_objective_ms * 1000, 1.0)
    return prefill, max(decode, 0.0)


def replicas_with_spare(rates: DemandTotals, profile: ReplicaProfile, policy: ScalePolicy) -> float:
    """Replicas for these arrivals with room for random variation: the fewer requests, the more room."""
    if not rates.requests:
        return 0.0
    prefill, decode = _work_in_replicas(rates, profile)
    prompts = rates.requests * policy.ttft_objective_s
    streams = decode * profile.slots  # concurrent streams in full batches: Little's law
    spare_prefill, spare_decode = (
        work * min(policy.spare_sigmas / math.sqrt(count), 1.0) if work else 0.0
        for work, count in ((prefill, prompts), (decode, streams))
    )
    # Time between tokens may leave less room for prompts than the slots do
    by_duty = (prefill + spare_prefill) / policy.prefill_share(profile)
    return max((prefill + decode) / policy.utilisation_aimed + spare_prefill, by_duty) + spare_decode


def _ttft_p99_s(infos: list[ReplicaInfo]) -> float:
    counts = add_counts((info.ttft_counts for info in infos), len(TTFT_BOUNDS_S) - 1)
    if sum(counts) < _SAMPLES_MIN:
        return 0.0
    return bucket_quantile(counts, TTFT_BOUNDS_S, 0.99) or 0.0


class UsualPeak:
    """Relates the replicas that a pool needs at a moment to their mean over three minutes.

    Uneven traffic needs many replicas for seconds and few for minutes. How long ago a peak was says little about when
    the next one comes. How far peaks rise above the mean says how high it will be, also when the mean has changed.
    """

    def __init__(self, inherited: float = 0.0) -> None:
        """``inherited``: the rise that an earlier leader knew; 0: none did.

        It counts less from minute to minute: after an hour it is forgotten, however often a leader inherits it.
        """
        self._inherited = inherited
        self._began: float | None = None
        """Moment of the first look."""
        self._needs: deque[tuple[float, int]] = deque()
        """Needed replicas at the looks of twice ``PEAK_MEAN_S``."""
        self._rises: deque[tuple[float, float]] = deque()
        """Every five seconds of the last hour: the need as a multiple of the mean before or after it.

        The larger mean counts: a step, up or down, is no peak.
        """
        self._ordered: list[float] = []
        """These multiples, the smallest first."""

    def clear(self) -> None:
        """Forget past needs, after a gap in looking. How peaks relate to the mean stays known."""
        self._needs.clear()

    def receive(self, now: float, needed: int) -> None:
        """Take the replicas that a look needs."""
        if self._began is None:
            self._began = now
        self._needs.append((now, needed))
        while self._needs[0][0] < now - 2 * PEAK_MEAN_S:
            self._needs.popleft()
        if self.knows_mean() and (not self._rises or now - self._rises[-1][0] >= _PEAKS_EVERY_S):
            before, after = self._halves()
            if mean := max(_mean(before), _mean(after)):
                self._rises.append((now, after[0] / mean))
                insort(self._ordered, after[0] / mean)
        while self._rises and self._rises[0][0] < now - _REMEMBERED_S:
            _, rise = self._rises.popleft()
            del self._ordered[bisect_left(self._ordered, rise)]

    def replicas(self, share: float) -> int:
        """Return the replicas that were enough for that share of the time, at the present mean.

        0: ``share`` is 0, nothing was needed, or needs were not looked at for ``PEAK_MEAN_S``.
        """
        return round(self.rise(share) * _mean(self._halves()[1])) if self.knows_mean() else 0

    def rise(self, share: float) -> float:
        """Return the multiple of the mean that was enough for that share of the time; 0: unknown, or ``share`` is 0."""
        if not share:
            return 0.0
        seen = percentile(self._ordered, share) if self._ordered else 0.0
        passed_s = self._needs[-1][0] - self._began if self._needs and self._began is not None else 0.0
        return max(seen, self._inherited * (1 - passed_s / _REMEMBERED_S))

    def knows_mean(self) -> bool:
        """Whether needs were looked at for ``PEAK_MEAN_S``."""
        return self._needs[-1][0] - self._needs[0][0] >= PEAK_MEAN_S if self._needs else False

    def _halves(self) -> tuple[list[int], list[int]]:
        """Needs until ``PEAK_MEAN_S`` before the last look, and those since."""
        middle = self._needs[-1][0] - PEAK_MEAN_S
        return [need for at, need in self._needs if at < middle], [need for at, need in self._needs if at >= middle]


def _mean(needs: Sequence[int]) -> float:
    return sum(needs) / len(needs) if needs else 0.0
