"""Traffic model of a pool: statistics that controllers learn from traces and observation, kept in Redis. Pure.

There is one record per pool. A record of another version is ignored and learned again. All figures are validated here,
so that no impossible figure influences a decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec

from stream_fabric.pool.plan import ReplicaProfile, route_key
from stream_fabric.process.stats import percentile

VERSION = 2
STARTS_KEPT = 50
STARTS_MIN = 5
"""Minimum cold starts; with fewer, the declared duration is used."""
COLD_START_LEAST, COLD_START_MOST = 0.1, 3.0
"""Bounds of a learned cold start, relative to the declared duration."""
REQUESTS_MIN = 50
"""Minimum requests per route; with fewer, its length statistics are noise."""
ROUTES_TOLD = 16
"""Maximum number of routes in a plan, which gateways read every second."""
TRIES_MIN = 20
"""Minimum attempts before a speed is trusted."""
JUMP_SHARES = (0.5, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0)
"""Shares of the time for which a jump is known: within that share of the time arrivals rise by no more."""
_TOKENS_MAX = 1e8
_PER_S_MAX = 1e7
_START_S_MAX = 86_400.0
_BYTES_PER_TOKEN = 4.0


class Lengths(msgspec.Struct, frozen=True):
    """Percentiles and mean of a token count."""

    p50: float
    p90: float
    p99: float
    mean: float

    def __post_init__(self) -> None:
        if not 0 <= self.p50 <= self.p90 <= self.p99 < _TOKENS_MAX or not 0 <= self.mean < _TOKENS_MAX:
            raise ValueError(f"no lengths: {self.p50}, {self.p90}, {self.p99}, mean {self.mean}")


class Route(msgspec.Struct, frozen=True):
    """Statistics of one class of requests (``plan.route_key``)."""

    model: str
    dialect: str
    tier: str
    requests: float
    prompt: Lengths
    output: Lengths

    def __post_init__(self) -> None:
        if not 0 < self.requests < math.inf or not self.prompt.mean:
            raise ValueError(f"no route: {self.requests} requests, prompts of {self.prompt.mean} tokens")


class Speed(msgspec.Struct, frozen=True):
    """Decode speed of a replica at one batch size."""

    batch: float
    tokens_per_s: float
    """Output tokens per second of the whole batch."""

    def __post_init__(self) -> None:
        if not 1 <= self.batch < 1e6 or not 0 < self.tokens_per_s < _PER_S_MAX:
            raise ValueError(f"no speed: {self.tokens_per_s} tokens a second of {self.batch}")


class Jump(msgspec.Struct, frozen=True):
    """Distribution of the increase in arrivals within ``within_s`` seconds."""

    within_s: float
    rises: tuple[float, ...]
    """Increases in requests per second, one for each of ``JUMP_SHARES``."""
    prompt_tokens: float
    """Prompt tokens to compute per request."""
    output_tokens: float
    """Output tokens per request."""

    def __post_init__(self) -> None:
        tokens = self.prompt_tokens, self.output_tokens
        if not 0 < self.within_s < math.inf or not all(0 <= each < _TOKENS_MAX for each in tokens):
            raise ValueError(f"no jump: {tokens} tokens within {self.within_s} s")
        ordered = (0.0, *self.rises, _PER_S_MAX)
        if len(self.rises) != len(JUMP_SHARES) or not all(one <= other for one, other in pairwise(ordered)):
            raise ValueError(f"no jump: {self.rises} requests a second")

    def rise(self, share: float) -> float:
        """Increase in requests per second that is exceeded in at most ``1 - share`` of the time (0 < share <= 1)."""
        return next(rise for known, rise in zip(JUMP_SHARES, self.rises, strict=True) if known >= share)

    def in_replicas(self, share: float, profile: ReplicaProfile) -> float:
        """The same increase in replicas of work."""
        request = self.prompt_tokens / profile.prefill_per_s + self.output_tokens / profile.decode_per_s
        return self.rise(share) * request


class TrafficModel(msgspec.Struct, frozen=True):
    """Figures that a pool's telemetry taught. Subclasses add fields that only controllers read."""

    version: int = VERSION
    learned_s: float = 0.0
    """Unix time of the last traces used; 0: none yet."""
    routes: tuple[Route, ...] = ()
    """Routes, the most frequent first."""
    speeds: tuple[Speed, ...] = ()
    """Speeds by rising batch size."""
    prefill_per_s: float = 0.0
    """Prompt tokens per second of a replica; 0: unknown."""
    jumps: tuple[Jump, ...] = ()
    """Jumps by rising ``within_s``."""
    starts_s: tuple[float, ...] = ()
    """Durations of the last cold starts, the newest last."""

    def __post_init__(self) -> None:
        if self.version != VERSION or not 0 <= self.learned_s < math.inf:
            raise ValueError(f"version {self.version}, learned at {self.learned_s}")
        if not 0 <= self.prefill_per_s < _PER_S_MAX or not all(map(is_cold_start_s, self.starts_s)):
            raise ValueError(f"no speed of prompts, or no starts: {self.prefill_per_s}, {self.starts_s}")
        if any(one.batch >= other.batch for one, other in pairwise(self.speeds)):
            raise ValueError("speeds go by batch, rising")

    def cold_start_s(self, declared_s: float) -> float:
        """90th percentile of the last cold starts, within bounds around ``declared_s``; too few: ``declared_s``."""
        if len(self.starts_s) < STARTS_MIN:
            return declared_s
        slow_s = percentile(sorted(self.starts_s), 0.9)
        return min(max(slow_s, COLD_START_LEAST * declared_s), COLD_START_MOST * declared_s)

    def decode_per_s(self, batch: float) -> float:
        """Output tokens per second at a batch size, interpolated, at most the largest known size. 0: unknown."""
        below_batch = below_per_s = 0.0
        for speed in self.speeds:
            if speed.batch >= batch:
                share = (batch - below_batch) / (speed.batch - below_batch)
                return below_per_s + share * (speed.tokens_per_s - below_per_s)
            below_batch, below_per_s = speed.batch, speed.tokens_per_s
        return below_per_s

    @property
    def output_mean(self) -> float:
        """Mean output tokens per request over all routes; 0: no routes."""
        requests = sum(route.requests for route in self.routes)
        return sum(route.requests * route.output.mean for route in self.routes) / requests if requests else 0.0

    def typical_replica(self, known: ReplicaProfile | None) -> ReplicaProfile | None:
        """Expected profile of a replica, for a pool that has none. ``known``: the last measured profile."""
        output = self.output_mean
        if not self.speeds or not self.routes:
            return known
        slots = known.slots if known is not None else math.ceil(self.speeds[-1].batch)
        # Agents measure prompts apart from the step that was under way, and many in a row
        prefill_per_s = known.prefill_per_s if known is not None else self.prefill_per_s
        if not prefill_per_s or not output:
            return known
        bytes_per_token = known.bytes_per_token if known is not None else _BYTES_PER_TOKEN
        objective_ms = known.itl_objective_ms if known is not None else 0.0
        return ReplicaProfile(slots, prefill_per_s, self.decode_per_s(slots), output, bytes_per_token, objective_ms)

    def outputs(self) -> dict[str, float]:
        """Mean output tokens by ``plan.route_key``."""
        return {route_key(one.model, one.dialect, one.tier): one.output.mean for one in self.routes[:ROUTES_TOLD]}

    def jump(self, within_s: float) -> Jump | None:
        """Find the jump over ``within_s`` seconds, or over the next longer known time, or over the longest known."""
        return next((jump for jump in self.jumps if jump.within_s >= within_s), self.jumps[-1] if self.jumps else None)


def is_cold_start_s(seconds: float) -> bool:
    """True if ``seconds`` is a plausible duration of a cold start: above 0 and below one day."""
    return 0 < seconds < _START_S_MAX


def append_cold_starts(before: Sequence[float], took_s: Sequence[float]) -> tuple[float, ...]:
    """Append the plausible durations of new cold starts ``took_s`` and keep the last ``STARTS_KEPT``."""
    rounded = (round(one, 1) for one in took_s)  # first: what is rounded to 0 or to a day is not plausible
    return (*before, *filter(is_cold_start_s, rounded))[-STARTS_KEPT:]


class _Version(msgspec.Struct):
    version: int = 0


_version_decoder = msgspec.json.Decoder(_Version)
L = TypeVar("L", bound=TrafficModel)


def decode_traffic_model(record: bytes, decoder: msgspec.json.Decoder[L]) -> L | None:
    """Decode a traffic model; None if another version wrote it. Raises ValueError on impossible figures."""
    if _version_decoder.decode(record).version != VERSION:
        return None
    return decoder.decode(record)
