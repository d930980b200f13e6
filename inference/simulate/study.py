"""Recorded traffic against fleets that differ in who decides how many replicas there are."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from inference.control.profile import ArrivalProfile
from inference.control.scaling import ScalePolicy
from inference.simulate.elastic import Death, Elastic, Sample, Scaler, Step
from inference.simulate.engine import work_s
from inference.simulate.hardware import Hardware
from inference.simulate.history import TODAY_S
from inference.simulate.scalers import Fixed, GpuUtilisation, Oracle, Ours, Waiting
from inference.simulate.traces import Request
from inference.simulate.world import Fate, Life

POLICIES = ("ours", "ours:known", "hpa", "waiting", "oracle", "fixed:N")
ROOM_RATIO = 1.25
"""The agents' default."""
BINS_MAX = 180
_BINS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_FIXED_MOST = 10_000


class Objective(NamedTuple):
    """What a request is to have."""

    ttft_s: float
    ttft_s_per_token: float
    """And so much for each token of its prompt."""
    itl_s: float
    """Between its tokens, on average."""

    def met(self, life: Life) -> bool:
        allowed_s = self.ttft_s + life.request.prompt_tokens * self.ttft_s_per_token
        return life.fate == "done" and life.ttft_s <= allowed_s and life.mean_itl_s <= self.itl_s


@dataclass(frozen=True)
class Study:
    requests: Sequence[Request]
    hardware: Hardware
    policy: ScalePolicy
    objective: Objective
    fill: float = 0.6
    """Of 1, what the oracle fills a replica to; so many are called needed."""
    begin: int = 0
    """Replicas at the start; 0: as many as are needed then."""
    kills_s: Sequence[float] = ()
    """When a replica dies."""
    seed: int = 0
    known: ArrivalProfile | None = None
    """What the controller has learned, for ``ours:known``."""

    @property
    def span_s(self) -> float:
        return self.requests[-1].at_s


class Bin(NamedTuple):
    """What was so for a while. Replicas, requests in the queue and utilisation are means."""

    at_s: float
    arrived: int
    unserved: int
    """Of those that arrived: turned away, not reached in time, or lost."""
    met: int
    """Of those that arrived, served as they are to be."""
    ready: float
    resting: float
    warm: float
    coming: float
    needed: float
    """As many as the work that arrived fills so far as the study says."""
    waiting: float
    utilisation: float
    """Slots in use of those that are ready, of 1."""
    ttft_p50_s: float
    """Of those that arrived; infinite: was not served. Not a number: nobody arrived."""
    ttft_p99_s: float


@dataclass(frozen=True)
class Outcome:
    policy: str
    requests: int
    slo: float
    replica_h: float
    gpu_h: float
    dollars: float
    replicas_most: int
    ttft_p50_s: float
    """Infinite: was not served."""
    ttft_p99_s: float
    done: int
    refused: int
    """The queue was full, or too much was ahead of it."""
    expired: int
    """Nobody had room in time."""
    impossible: int
    """Too large for any replica."""
    rescued: int
    """Done although a replica died under it."""
    lost: int
    """A replica died under it, and it was not done in the end."""
    pause_s_max: float
    """The longest that a death was felt, where it was in the middle of an answer."""
    end_s: float
    deaths: Sequence[Death]
    bins: Sequence[Bin]
    reasons: Sequence[tuple[float, str]]
    """Of ours: what it decided, and why."""


def parse_policies(texts: Sequence[str]) -> list[str]:
    """Each once, in order. Raises ValueError that names what there is."""
    found = [name.strip() for text in texts for name in text.split(",")]
    for name in found:
        fixed = re.fullmatch(r"fixed:(\d+)", name)
        if name not in POLICIES[:-1] and (fixed is None or not 1 <= int(fixed[1]) <= _FIXED_MOST):
            raise ValueError(f"no policy {name!r}; there are {', '.join(POLICIES)}")
    return list(dict.fromkeys(found))


def parse_moment(text: str, span_s: float) -> float:
    """Seconds from the start: as ``600``, ``10m``, ``1.5h``, or ``50%`` of the traffic. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(%|s|m|h|)", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no moment; write 600, 10m, 1.5h or 50%")
    value = float(found[1])
    at_s = value / 100 * span_s if found[2] == "%" else value * _UNITS_S[found[2]]
    if at_s > span_s:
        raise ValueError(f"{text} is after the last request, which comes at {span_s:,.0f} s")
    return at_s


def parse_step(text: str, span_s: float) -> Step:
    """``5x@50%-75%``: five times the traffic from half to three quarters of it. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)x@([^-]+)-([^-]+)", text)
    if found is None:
        raise ValueError(f"{text!r} is no step; write 5x@50%-75%")
    times, from_s, until_s = float(found[1]), parse_moment(found[2], span_s), parse_moment(found[3], span_s)
    if not 1 < times <= 100 or until_s <= from_s:
        raise ValueError(f"{text!r}: a step is from more than 1 to 100 times the traffic, and ends after it begins")
    return Step(times, from_s, until_s - from_s, min(30.0, (until_s - from_s) / 4))


def run(study: Study, policy: str) -> Outcome:
    """``policy``: one that ``parse_policies`` let through."""
    settings, cold_start_s = study.hardware.settings, study.policy.cold_start_s
    oracle = Oracle(study.requests, settings, study.fill, cold_start_s)
    begin = study.begin or oracle.at(0.0)
    least, most = max(study.policy.replicas_min, 1), study.policy.replicas_max
    scaler: Scaler
    match policy.partition(":"):
        case "ours", _, "known":
            scaler = Ours(study.policy, study.known, TODAY_S)
        case "ours", _, _:
            scaler = Ours(study.policy)
        case "hpa", _, _:
            scaler = GpuUtilisation(least, most)
        case "waiting", _, _:
            scaler = Waiting(least, most)
        case "oracle", _, _:
            scaler, begin = oracle, oracle.at(0.0)
        case _, _, count:
            scaler, begin = Fixed(), int(count)
    world = Elastic(
        study.requests, begin, scaler, study.seed, settings, cold_start_s=cold_start_s, room_ratio=ROOM_RATIO
    )
    for at_s in study.kills_s:
        world.kill_at(at_s)
    return _outcome(study, policy, world, scaler.reasons if isinstance(scaler, Ours) else ())


def _outcome(study: Study, policy: str, world: Elastic, reasons: Sequence[tuple[float, str]]) -> Outcome:
    lives = world.run().lives
    fates: dict[Fate, int] = {}
    for life in lives:
        fate: Fate = "lost" if life.attempt > 1 and life.fate != "done" else life.fate
        fates[fate] = fates.get(fate, 0) + 1
    ttft_s = sorted(life.ttft_s for life in lives)
    replica_h = world.gpu_s() / 3600
    return Outcome(
        policy=policy,
        requests=len(lives),
        slo=sum(map(study.objective.met, lives)) / len(lives),
        replica_h=replica_h,
        gpu_h=replica_h * study.hardware.gpus,
        dollars=replica_h * study.hardware.gpus * study.hardware.gpu_hour,
        replicas_most=max(there for _, _, there in world.counts),
        ttft_p50_s=_quantile(ttft_s, 0.5),
        ttft_p99_s=_quantile(ttft_s, 0.99),
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
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The least that so many do not exceed; of nothing, not a number."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else math.nan


def _bins(study: Study, world: Elastic, lives: Sequence[Life]) -> list[Bin]:
    """As wide as the traffic wants it, whoever decides, so that they can be laid over each other."""
    width_s = next((w for w in _BINS_S if study.span_s / w <= BINS_MAX), math.ceil(study.span_s / BINS_MAX))
    arrived: dict[int, list[Life]] = {}
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
                met=sum(map(study.objective.met, came)),
                ready=_mean([s.ready for s in seen]),
                resting=_mean([s.resting for s in seen]),
                warm=_mean([s.warm for s in seen]),
                coming=_mean([s.coming for s in seen]),
                needed=work / width_s / study.fill,
                waiting=_mean([s.waiting for s in seen]),
                utilisation=min(sum(s.running for s in seen) / slots, 1.0) if slots else 0.0,
                ttft_p50_s=_quantile(ttft_s, 0.5),
                ttft_p99_s=_quantile(ttft_s, 0.99),
            )
        )
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
