"""Demand of a pool: the requests that its clients have made. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stream_fabric.pool.overload import RETRIES_MS
from stream_fabric.pool.placement import FREE_TIER, TIERS, Choice, PlacementRequest


@dataclass
class Demand:
    """Totals of a pool's requests, which its size follows."""

    arrived: tuple[int, int, int] = (0, 0, 0)
    """Number of requests, their prompt tokens that no replica had cached, and their output tokens."""
    asked: list[int] = field(default_factory=lambda: [0 for _ in TIERS])
    """Number of all requests by tier, retries included."""
    refused_at_ms: float = -math.inf
    """Moment of the last refusal."""

    def count(self, request: PlacementRequest, choice: Choice, now_ms: float, *, retried: bool) -> None:
        """Add the request, without the prompt tokens that a cache saves.

        A retry was counted when it was refused. Where nothing was refused lately it is of something else, and counts.
        """
        self.asked[request.tier] += 1
        if request.tier == FREE_TIER or (retried and abs(now_ms - self.refused_at_ms) < RETRIES_MS):
            return
        hits = [candidate.matched_tokens for candidate in choice.candidates]
        hit = hits[choice.taken] if choice.taken >= 0 else max(hits, default=0)
        requests, prompt, output = self.arrived
        self.arrived = requests + 1, prompt + request.prompt_tokens - hit, output + request.output_tokens
