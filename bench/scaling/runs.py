"""One policy in one scene: the fleet that it has, and what the requests get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.scaling.fluid import Fluid, fluid_bound, seen_s
from bench.scaling.scenes import (
    COLD_START_S,
    LIMITED,
    SETTINGS,
    SLO_ITL_S,
    SLO_TTFT_S,
    STEP_TIMES,
    Scene,
    scene,
    within_slo,
)
from inference.control.policy.scale_policy import ScalePolicy
from inference.engines.sim.settings import SimSettings
from inference.simulate.elastic import Elastic, Scaler
from inference.simulate.history import TODAY_S, history
from inference.simulate.scalers import (
    Concurrency,
    ControllerScaler,
    Fixed,
    GpuUtilisation,
    Oracle,
    Waiting,
    WithAdmission,
)
from inference.simulate.traces import load
from inference.simulate.world import RequestLife

MOST = 300
SURGE_S = 300.0
"""Time from the step's beginning in which no replica that was asked for at it can serve."""
ORACLE_SLO_LEAST = 0.99
_ORACLE_FILLED = (0.8, 0.7, 0.6, 0.5, 0.4)
_BEGIN_FILLED = 0.6

ORACLE, FIVE_TIMES = "oracle", "ours, five times the replicas"
NOTHING, WARM_10, WARM_25 = "ours, nothing known", "ours, 10 % warm", "ours, 25 % warm"
KNOWN, OTHER = "ours, the step known", "ours, another trace known"
INTERACTIVE = "half batch: interactive tier"
INTERACTIVE_RUNS_ON = "half batch: interactive, batch runs on"
INTERACTIVE_FIVE_TIMES = "half batch: interactive, five times"


class Job(NamedTuple):
    trace: str
    policy: str
    seed: int
    folder: Path


class Found(NamedTuple):
    """Result of one policy in one scene. Shares are from 0 to 1."""

    slo: float
    surge: float
    """Share of the requests of the step's first five minutes that were served within the objective."""
    admitted: float
    """Share of the requests that were not rejected that were served within the objective."""
    refused: float
    """Share of the requests of the step's first five minutes that were rejected."""
    ttft_p99_s: float
    """99th percentile of the requests that were served."""
    gpu_h: float
    gpu_h_outside: float
    """GPU hours before and after the step."""
    predicted: float
    """Share of the first tokens in the step's first five minutes that came within half a second of what placement
    expected."""
    fluid: Fluid
    """Bound with the replicas that were there at the step's beginning, warm ones included."""
    causal: float
    """Bound of a fleet that learns from its traffic alone: it begins with the replicas of the trace's beginning, and
    asks for those of the step when a window of 10 s has brought more work than each before."""


@dataclass(frozen=True)
class _Setup:
    scaler: Scaler
    begin: int
    settings: SimSettings = LIMITED


def policy(warm_share: float = 0.0, *, batch_yields: bool = True) -> ScalePolicy:
    """Our settings, the same on every trace. ``docs/scaling-bench.md`` says how ``low_s`` was chosen."""
    return ScalePolicy(
        replicas_max=MOST,
        cold_start_s=COLD_START_S,
        low_s=100.0,
        ttft_objective_s=SLO_TTFT_S,
        itl_objective_s=SLO_ITL_S,
        warm_share=warm_share,
        batch_yields=batch_yields,
    )


def _another(folder: Path) -> Callable[[Scene], ControllerScaler]:
    def made(at: Scene) -> ControllerScaler:
        other = "azure" if at.trace == "mooncake" else "mooncake"
        return ControllerScaler(policy(), history(load(other, folder).requests, None), TODAY_S)

    return made


def _setup(job: Job, at: Scene) -> _Setup:
    begin = Oracle(at.requests, SETTINGS, _BEGIN_FILLED, COLD_START_S).needed_at(0)
    rivals: dict[str, Callable[[], Scaler]] = {
        "HPA, 80 % of GPU time": lambda: GpuUtilisation(1, MOST),
        "KEDA, 5 waiting a replica": lambda: Waiting(1, MOST),
        "Knative, 70 % concurrency": lambda: Concurrency(1, MOST),
    }
    rival, _, more = job.policy.partition(" + ")
    if rival in rivals:
        if more:
            return _Setup(WithAdmission(rivals[rival](), policy()), begin)
        return _Setup(rivals[rival](), begin, SETTINGS)
    match job.policy:
        case "ours, nothing known" | "half batch: interactive tier":
            return _Setup(ControllerScaler(policy()), begin)
        case "half batch: interactive, batch runs on":
            return _Setup(ControllerScaler(policy(batch_yields=False)), begin)
        case "ours, 10 % warm":
            return _Setup(ControllerScaler(policy(0.10)), begin)
        case "ours, 25 % warm":
            return _Setup(ControllerScaler(policy(0.25)), begin)
        case "ours, another trace known":
            return _Setup(_another(job.folder)(at), begin)
        case "ours, the step known":
            return _Setup(ControllerScaler(policy(), history(at.plain, at.step), TODAY_S), begin)
        case "ours, five times the replicas" | "half batch: interactive, five times":
            count = max(round(STEP_TIMES * begin), Oracle(at.requests, SETTINGS, 0.5, COLD_START_S).most)
            return _Setup(WithAdmission(Fixed(), policy()), count)
    raise ValueError(f"no policy {job.policy!r}")


POLICIES = (
    ORACLE,
    NOTHING,
    WARM_10,
    WARM_25,
    OTHER,
    KNOWN,
    FIVE_TIMES,
    "HPA, 80 % of GPU time",
    "HPA, 80 % of GPU time + our admission",
    "KEDA, 5 waiting a replica",
    "KEDA, 5 waiting a replica + our admission",
    "Knative, 70 % concurrency",
    "Knative, 70 % concurrency + our admission",
    INTERACTIVE,
    INTERACTIVE_RUNS_ON,
    INTERACTIVE_FIVE_TIMES,
)


def run(job: Job) -> Found:
    """Simulate one policy in one scene."""
    at = scene(job.trace, job.folder, job.seed, half_batch=job.policy.startswith("half batch"))
    if job.policy == ORACLE:
        for filled in _ORACLE_FILLED:  # the fullest that keeps the objective is the cheapest
            oracle = Oracle(at.requests, SETTINGS, filled, COLD_START_S)
            found = _simulate(at, _Setup(oracle, oracle.needed_at(0)), job.seed)
            if found.slo >= ORACLE_SLO_LEAST:
                break
        return found
    return _simulate(at, _setup(job, at), job.seed, only_tier=0 if job.policy.startswith("half batch") else None)


def _simulate(at: Scene, setup: _Setup, seed: int, only_tier: int | None = None) -> Found:
    world = Elastic(at.requests, setup.begin, setup.scaler, seed, setup.settings, cold_start_s=COLD_START_S)
    lives = [life for life in world.run().lives if only_tier is None or life.request.tier == only_tier]
    step, end_s = at.step, at.step.at_s + at.step.for_s
    surge = [life for life in lives if step.at_s <= life.request.at_s < step.at_s + SURGE_S]
    admitted = [life for life in lives if life.fate != "refused"]
    ttft_s = sorted(life.ttft_s for life in lives if life.fate == "done")
    before = next(sample for sample in world.samples if sample.at_s >= step.at_s)
    served = [life.request for life in lives]
    ready = before.ready + before.warm
    seen = seen_s(at.requests, SETTINGS, step.at_s)
    begin = fluid_bound(served, SETTINGS, setup.begin, 0.0, COLD_START_S)
    until_seen = fluid_bound(served, SETTINGS, ready, step.at_s, seen + COLD_START_S)
    outside = sum(count for at_s, _, count in world.counts if at_s < step.at_s or at_s >= end_s)
    return Found(
        _kept(lives),
        _kept(surge),
        _kept(admitted),
        sum(life.fate == "refused" for life in surge) / len(surge),
        ttft_s[len(ttft_s) * 99 // 100],
        world.gpu_s() / 3600,
        outside / 3600,
        _predicted(surge),
        fluid_bound(served, SETTINGS, ready, step.at_s, step.at_s + COLD_START_S),
        begin.random + until_seen.random - 1.0,
    )


def _predicted(lives: Sequence[RequestLife]) -> float:
    errors = [abs(life.ttft_s - life.expected_s) for life in lives if life.expected_s and life.fate == "done"]
    return sum(error <= 0.5 for error in errors) / len(errors) if errors else 0.0


def _kept(lives: Sequence[RequestLife]) -> float:
    return sum(map(within_slo, lives)) / len(lives)
