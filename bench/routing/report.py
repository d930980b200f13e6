"""Figures of a run, the tables, and whether the targets hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.routing.hot import Compared
from bench.routing.policies import OURS
from bench.routing.scene import Scene
from inference.simulate.world import RequestLife, Run

SLO_TTFT_S = 1.0
SLO_TTFT_S_PER_TOKEN = 1 / 8192
SLO_ITL_S = 0.050
HIT_SHARE_LEAST = 0.90
LOAD_RATIO_MOST = 1.25
HOT_RATIO_MOST = 1.20
P99_RATIO_MOST = 1.01
"""Our p99 TTFT relative to the best other policy's. Where nothing is shared, fewest tokens first is as good."""
FATES_UNSERVED = ("refused", "expired", "impossible")

HEAD = (
    "policy",
    "hit rate",
    "of reachable",
    "TTFT p50 s",
    "TTFT p99 s",
    "busy max/mean",
    "tokens max/mean",
    "SLO",
    "preempted",
    "queued",
    "not served",
)
HOT_HEAD = ("trace", "replicas", "policy", "beside", "others' p99 s", "control's p99 s", "ratio", "hot's p99 s")


@dataclass(frozen=True)
class Figures:
    policy: str
    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    busy_ratio: float
    """Largest busy time of a replica, relative to the mean."""
    tokens_ratio: float
    """Largest number of tokens that a replica computed, relative to the mean."""
    slo_share: float
    preemptions: int
    queued: int
    not_served: int


def figures(policy: str, run: Run) -> Figures:
    ttft_s = sorted(life.ttft_s for life in run.lives)
    engines = run.engines
    queries = sum(e.replica.prefix_queries for e in engines)
    return Figures(
        policy,
        sum(e.replica.prefix_hits for e in engines) / max(queries, 1),
        ttft_s[len(ttft_s) // 2],
        ttft_s[len(ttft_s) * 99 // 100],
        _most_beside_mean([e.busy_s for e in engines]),
        _most_beside_mean([float(e.computed_tokens + e.output_tokens) for e in engines]),
        sum(map(_within_slo, run.lives)) / len(run.lives),
        sum(e.replica.preemptions for e in engines),
        sum(life.waited for life in run.lives),
        sum(life.fate in FATES_UNSERVED for life in run.lives),
    )


def _most_beside_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values)


def _within_slo(life: RequestLife) -> bool:
    allowed_s = SLO_TTFT_S + life.request.prompt_tokens * SLO_TTFT_S_PER_TOKEN
    return life.fate == "done" and life.ttft_s <= allowed_s and life.mean_itl_s <= SLO_ITL_S


def row(found: Figures, scene: Scene) -> tuple[str, ...]:
    return (
        found.policy,
        f"{found.hit_rate:.1%}",
        f"{found.hit_rate / scene.reachable:.0%}" if scene.reachable else "-",
        f"{found.ttft_p50_s:.3f}",
        f"{found.ttft_p99_s:.3f}",
        f"{found.busy_ratio:.2f}",
        f"{found.tokens_ratio:.2f}",
        f"{found.slo_share:.1%}",
        str(found.preemptions),
        str(found.queued),
        str(found.not_served),
    )


def hot_row(found: Compared) -> tuple[str, ...]:
    return (
        found.trace,
        str(found.replicas),
        found.policy,
        found.control,
        f"{found.others_p99_s:.3f}",
        f"{found.others_control_p99_s:.3f}",
        f"{found.ratio:.2f}",
        f"{found.hot_p99_s:.3f}",
    )


@dataclass(frozen=True)
class Target:
    what: str
    reached: bool


def targets(scene: Scene, runs: Sequence[Figures]) -> list[Target]:
    """Targets of our policy in a scene, relative to the other policies."""
    ours = next((found for found in runs if found.policy == OURS), None)
    if ours is None:
        return []
    where = f"{scene.trace.name}, {scene.replicas} replicas"
    load = max(ours.busy_ratio, ours.tokens_ratio)
    out = [Target(f"{where}: load max/mean {load:.2f}, at most {LOAD_RATIO_MOST:.2f}", load <= LOAD_RATIO_MOST)]
    if scene.reachable:
        share = ours.hit_rate / scene.reachable
        out.append(
            Target(
                f"{where}: {share:.0%} of the reachable hits, at least {HIT_SHARE_LEAST:.0%}", share >= HIT_SHARE_LEAST
            )
        )
    others = [found for found in runs if found is not ours]
    if others:
        best = min(others, key=lambda found: found.ttft_p99_s)
        out.append(
            Target(
                f"{where}: p99 TTFT {ours.ttft_p99_s:.3f} s, at most {P99_RATIO_MOST:g} times {best.policy}'s "
                f"{best.ttft_p99_s:.3f} s",
                ours.ttft_p99_s <= P99_RATIO_MOST * best.ttft_p99_s,
            )
        )
    return out


def hot_targets(rows: Sequence[Compared]) -> list[Target]:
    return [
        Target(
            f"{row.trace}, {row.replicas} replicas: a hot prefix takes the others' p99 TTFT to {row.ratio:.2f} of that "
            f"beside {row.control}, at most {HOT_RATIO_MOST:.2f}",
            row.ratio <= HOT_RATIO_MOST,
        )
        for row in rows
        if row.policy == OURS
    ]
