"""A trace scaled to a fleet, with upper bounds of the hit rate."""

from __future__ import annotations

from dataclasses import dataclass

from bench.routing import bounds
from inference.simulate.engine import SETTINGS, work_s
from inference.simulate.traces import ENGINE_BLOCK_TOKENS, Trace, scaled


@dataclass(frozen=True)
class Scene:
    trace: Trace
    replicas: int
    infinite: float
    """Share of the prompts' tokens that one endless cache would hit."""
    reachable: float
    """Share that one LRU cache of the whole fleet's size would hit."""

    @property
    def duration_s(self) -> float:
        return self.trace.requests[-1].at_s


def duration_s(trace: Trace, replicas: int, utilisation: float) -> float:
    """Duration of the arrivals that gives the fleet this utilisation at the highest possible hit rate."""
    cached = bounds.cached_tokens(trace.requests, fleet_tokens(replicas))
    computed = sum(r.prompt_tokens for r in trace.requests) - sum(cached)
    return work_s(SETTINGS, computed, sum(r.output_tokens for r in trace.requests)) / replicas / utilisation


def fleet_tokens(replicas: int) -> int:
    return replicas * SETTINGS.num_blocks * ENGINE_BLOCK_TOKENS


def scene(trace: Trace, replicas: int, utilisation: float) -> Scene:
    requests = trace.requests
    cached = bounds.cached_tokens(requests, fleet_tokens(replicas))
    return Scene(
        scaled(trace, duration_s(trace, replicas, utilisation)),
        replicas,
        bounds.infinite(requests),
        sum(cached) / sum(r.prompt_tokens for r in requests),
    )
