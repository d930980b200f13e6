"""Runs recorded traffic against fleets that differ in their scaler, and sums up the outcomes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from inference.control.policy.arrival_profile import ArrivalProfile
from inference.control.policy.scale_policy import ScalePolicy
from inference.simulate.batch_host import BatchHost, HostPlan, Reclaim
from inference.simulate.elastic import Death, Elastic, Sample, Scaler, Step
from inference.simulate.engine import work_s
from inference.simulate.hardware import Hardware
from inference.simulate.history import TODAY_S
from inference.simulate.scalers import ControllerScaler, Fixed, GpuUtilisation, Oracle, Waiting
from inference.simulate.traces import Request
from inference.simulate.world import Fate, RequestLife
from stream_fabric.pool.placement import BATCH_TIER
from stream_fabric.process.stats import percentile

WITH_HOST = " + host"
"""End of the name of an outcome with a batch host."""
POLICIES = ("ours", "ours:known", "hpa", "waiting", "oracle", "fixed:N")
BINS_MAX = 180
_BINS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
REPLICAS_MOST = 10_000
"""Most replicas of a fixed fleet, and at the start."""


class Objective(NamedTuple):
    """Latency objective of a request."""

    ttft_s: float
    """Longest time to first token."""
    ttft_s_per_token: float
    """Additional time for each prompt token."""
    itl_s: float
    """Longest mean gap between tokens."""

    def is_met(self, life: RequestLife) -> bool:
        """Whether the request ended, with TTFT and mean inter-token latency within the objective."""
        allowed_s = self.ttft_s + life.request.prompt_tokens * self.ttft_s_per_token
        return life.fate == "done" and life.ttft_s <= allowed_s and life.mean_itl_s <= self.itl_s


@dataclass(frozen=True)
class Study:
    """Traffic, hardware and policy of a simulation."""

    requests: Sequence[Request]
    hardware: Hardware
    policy: ScalePolicy
    objective: Objective
    fill: float = 0.6
    """Utilisation to which the oracle fills a replica; it also defines the needed replicas."""
    begin: int = 0
    """Replicas at the start; 0: the needed ones."""
    kills_s: Sequence[float] = ()
    """Times at which a replica dies."""
    seed: int = 0
    known: ArrivalProfile | None = None
    """Arrival profile that the controller has learned, for ``ours:known``."""
    host: HostPlan | None = None
    """Batch host of the pool, with replicas of the same hardware."""

    @property
    def span_s(self) -> float:
        """Time of the last arrival."""
        return self.requests[-1].at_s


class Bin(NamedTuple):
    """One interval of the timeline. Replicas, queued requests and utilisation are means."""

    at_s: float
    arrived: int
    unserved: int
    """Arrived requests that were rejected, timed out or lost."""
    met: int
    """Arrived requests that met the objective."""
    ready: float
    resting: float
    warm: float
    coming: float
    needed: float
    """Replicas that the arrived work fills to the study's ``fill``."""
    waiting: float
    utilisation: float
    """Share of the ready replicas' slots in use."""
    ttft_p50_s: float
    """TTFT of arrived requests; infinite: not served; NaN: none arrived."""
    ttft_p99_s: float


@dataclass(frozen=True)
class Outcome:
    """Summary of one policy's run."""

    policy: str
    requests: int
    slo: float
    replica_h: float
    gpu_h: float
    dollars: float
    replicas_most: int
    ttft_p50_s: float
    """Infinite: not served."""
    ttft_p99_s: float
    done: int
    refused: int
    """Requests rejected: the queue was full, or the backlog was too long."""
    expired: int
    """Requests that timed out in the queue."""
    impossible: int
    """Requests too large for any replica."""
    rescued: int
    """Requests completed although their replica died."""
    lost: int
    """Requests not completed because their replica died."""
    pause_s_max: float
    """Longest pause that a death caused within an answer."""
    end_s: float
    deaths: Sequence[Death]
    bins: Sequence[Bin]
    reasons: Sequence[tuple[float, str]]
    """Decisions of our controller: time and reason."""
    batch: int
    """Requests of tier batch."""
    batch_done: int
    slo_interactive: float
    """Share of the requests of higher tiers that met the objective."""
    hosted: int
    """Batch requests that the batch host took."""
    went_home: int
    """Batch requests that a reclaim sent from the host to the home pool."""
    host_gpu_h: float
    """GPU hours of the batch host; ``gpu_h`` and ``dollars`` are the home pool's alone."""
    host_dollars: float
    reclaims: int
    """Replicas of the batch host that were taken away."""


def parse_policies(texts: Sequence[str]) -> list[str]:
    """Policy names, each once, in order. Raises ValueError that names the valid ones."""
    found = [name.strip() for text in texts for name in text.split(",")]
    for name in found:
        fixed = re.fullmatch(r"fixed:(\d+)", name)
        if name not in POLICIES[:-1] and (fixed is None or not 1 <= int(fixed[1]) <= REPLICAS_MOST):
            raise ValueError(f"no policy {name!r}; there are {', '.join(POLICIES)}")
    return list(dict.fromkeys(found))


def parse_moment(text: str, span_s: float) -> float:
    """Parse a time since the start: ``600``, ``10m``, ``1.5h``, or ``50%`` of the traffic. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(%|s|m|h|)", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no moment; write 600, 10m, 1.5h or 50%")
    value = float(found[1])
    at_s = value / 100 * span_s if found[2] == "%" else value * _UNITS_S[found[2]]
    if at_s > span_s:
        raise ValueError(f"{text} is after the last request, which comes at {span_s:,.0f} s")
    return at_s


def parse_step(text: str, span_s: float) -> Step:
    """Parse ``5x@50%-75%``: five times the traffic from half to three quarters of it. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)x@([^-]+)-([^-]+)", text)
    if found is None:
        raise ValueError(f"{text!r} is no step; write 5x@50%-75%")
    times, from_s, until_s = float(found[1]), parse_moment(found[2], span_s), parse_moment(found[3], span_s)
    if not 1 < times <= 100 or until_s <= from_s:
        raise ValueError(f"{text!r}: a step is from more than 1 to 100 times the traffic, and ends after it begins")
    return Step(times, from_s, until_s - from_s, min(30.0, (until_s - from_s) / 4))


def parse_reclaim(text: str, span_s: float) -> Reclaim:
    """Parse ``30%-60%``: a replica of the batch host is taken away, and there is another from 60 % of the traffic on.

    ``30%``: there is no other. Raises ValueError.
    """
    at, _, back = text.partition("-")
    found = Reclaim(parse_moment(at, span_s), parse_moment(back, span_s) if back else None)
    if found.back_s is not None and found.back_s <= found.at_s:
        raise ValueError(f"{text!r}: the replica comes back before it is taken away; write 30%-60%")
    return found


def run(study: Study, policy: str) -> Outcome:
    """Simulate one policy, as ``parse_policies`` returned it."""
    settings, cold_start_s = study.hardware.settings, study.policy.cold_start_s
    host_plan = study.host or HostPlan(0)
    hosts_at = partial(host_plan.replicas_at, cold_start_s=cold_start_s)
    oracle = Oracle(study.requests, settings, study.fill, cold_start_s, hosts_at)
    begin = study.begin or oracle.needed_at(0.0)
    least, most = max(study.policy.replicas_min, 1), study.policy.replicas_max
    scaler: Scaler
    match policy.partition(":"):
        case "ours", _, "known":
            scaler = ControllerScaler(study.policy, study.known, TODAY_S)
        case "ours", _, _:
            scaler = ControllerScaler(study.policy)
        case "hpa", _, _:
            scaler = GpuUtilisation(least, most)
        case "waiting", _, _:
            scaler = Waiting(least, most)
        case "oracle", _, _:
            scaler, begin = oracle, oracle.needed_at(0.0)
        case _, _, count:
            scaler, begin = Fixed(), int(count)
    world = Elastic(study.requests, begin, scaler, study.seed, settings, cold_start_s=cold_start_s)
    for at_s in study.kills_s:
        world.kill_at(at_s)
    host = None
    if study.host is not None:
        host = BatchHost(world, study.host, study.seed, cold_start_s=cold_start_s)
        policy += WITH_HOST
    return _outcome(study, policy, world, host, scaler.reasons if isinstance(scaler, ControllerScaler) else ())


def _outcome(
    study: Study, policy: str, world: Elastic, host: BatchHost | None, reasons: Sequence[tuple[float, str]]
) -> Outcome:
    lives = world.run().lives
    batch = [life for life in lives if life.request.tier == BATCH_TIER]
    others = [life for life in lives if life.request.tier != BATCH_TIER]
    fates: dict[Fate, int] = {}
    for life in lives:
        fate: Fate = "lost" if life.attempt > 1 and life.fate != "done" else life.fate
        fates[fate] = fates.get(fate, 0) + 1
    ttft_s = sorted(life.ttft_s for life in lives)
    replica_h = world.gpu_s() / 3600
    host_gpu_h = host.gpu_s() / 3600 * study.hardware.gpus if host is not None else 0.0
    return Outcome(
        policy=policy,
        requests=len(lives),
        slo=sum(map(study.objective.is_met, lives)) / len(lives),
        replica_h=replica_h,
        gpu_h=replica_h * study.hardware.gpus,
        dollars=replica_h * study.hardware.gpus * study.hardware.gpu_hour,
        replicas_most=max(there for _, _, there in world.counts),
        ttft_p50_s=percentile(ttft_s, 0.5),
        ttft_p99_s=percentile(ttft_s, 0.99),
        done=fates.get("done", 0),
        refused=fates.get("refused", 0),
        expired=fates.get("expired", 0),
        impossible=fates.get("impossible", 0),
        rescued=sum(life.fate == "done" and life.attempt > 1 for life in lives),
        lost=fates.get("lost", 0),
        pause_s_max=max(life.paused_s for life in lives),
        end_s=world.outcome.end_s,
        deaths=world.deaths,
        bins=_bins(study, world, lives),
        reasons=reasons,
        batch=len(batch),
        batch_done=sum(life.fate == "done" for life in batch),
        slo_interactive=sum(map(study.objective.is_met, others)) / len(others) if others else 1.0,
        hosted=sum(life.hosted for life in lives),
        went_home=sum(life.went_home for life in lives),
        host_gpu_h=host_gpu_h,
        host_dollars=host_gpu_h * study.host.gpu_hour if study.host is not None else 0.0,
        reclaims=len(host.deaths) if host is not None else 0,
    )


def _bins(study: Study, world: Elastic, lives: Sequence[RequestLife]) -> list[Bin]:
    """Timeline in bins whose width depends only on the traffic, so that policies can be compared."""
    width_s = next((w for w in _BINS_S if study.span_s / w <= BINS_MAX), math.ceil(study.span_s / BINS_MAX))
    arrived: dict[int, list[RequestLife]] = {}
    for life in lives:
        arrived.setdefault(int(life.request.at_s // width_s), []).append(life)
    samples: dict[int, list[Sample]] = {}
    for sample in world.samples:
        samples.setdefault(int(sample.at_s // width_s), []).append(sample)
    found = []
    for number in range(max([*arrived, *samples]) + 1):
        came, seen = arrived.get(number, []), samples.get(number, [])
        ttft_s = sorted(life.ttft_s for life in came)
        work = sum(work_s(study.hardware.settings, r.prompt_tokens, r.output_tokens) for r in (c.request for c in came))
        slots = sum(s.slots for s in seen)
        found.append(
            Bin(
                at_s=float(number * width_s),
                arrived=len(came),
                unserved=sum(life.fate != "done" for life in came),
                met=sum(map(study.objective.is_met, came)),
                ready=_mean([s.ready for s in seen]),
                resting=_mean([s.resting for s in seen]),
                warm=_mean([s.warm for s in seen]),
                coming=_mean([s.coming for s in seen]),
                needed=work / width_s / study.fill,
                waiting=_mean([s.waiting for s in seen]),
                utilisation=min(sum(s.running for s in seen) / slots, 1.0) if slots else 0.0,
                ttft_p50_s=percentile(ttft_s, 0.5),
                ttft_p99_s=percentile(ttft_s, 0.99),
            )
        )
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
