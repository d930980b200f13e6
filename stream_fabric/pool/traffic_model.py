"""What controllers have learned of a pool, from the traces and from their own looks, as it stands in Redis. Pure.

One record a pool, in one version: of another nothing is taken, it is learned anew. What is told of a pool is checked
here, whoever tells it, so that no figure that cannot be decides anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec

from stream_fabric.plans import Usual, route

VERSION = 1
STARTS_KEPT = 50
STARTS_MIN = 5
"""Fewer tell nothing: until then a cold start takes what was declared."""
COLD_START_LEAST, COLD_START_MOST = 0.1, 3.0
"""Bounds of what is believed of it, as shares of what was declared."""
REQUESTS_MIN = 50
"""Of a route, below which its lengths are chance."""
ROUTES_TOLD = 16
"""To gateways, which read them each second."""
TRIES_MIN = 20
"""So of a speed."""
_TOKENS_MAX = 1e8
_PER_S_MAX = 1e7
_START_S_MAX = 86_400.0
_BYTES_PER_TOKEN = 4.0


class Lengths(msgspec.Struct, frozen=True):
    """Tokens: percentiles and the mean."""

    p50: float
    p90: float
    p99: float
    mean: float

    def __post_init__(self) -> None:
        if not 0 <= self.p50 <= self.p90 <= self.p99 < _TOKENS_MAX or not 0 <= self.mean < _TOKENS_MAX:
            raise ValueError(f"no lengths: {self.p50}, {self.p90}, {self.p99}, mean {self.mean}")


class Route(msgspec.Struct, frozen=True):
    """Requests that are alike."""

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
    """A replica with so many sequences decoding at once."""

    batch: float
    tokens_per_s: float
    """Of all of them."""

    def __post_init__(self) -> None:
        if not 1 <= self.batch < 1e6 or not 0 < self.tokens_per_s < _PER_S_MAX:
            raise ValueError(f"no speed: {self.tokens_per_s} tokens a second of {self.batch}")


class Jump(msgspec.Struct, frozen=True):
    """By how much a second more arrives within so long than now, but for one time in a hundred at most so much."""

    within_s: float
    requests: float
    prompt_tokens: float
    output_tokens: float

    def __post_init__(self) -> None:
        each = self.requests, self.prompt_tokens, self.output_tokens
        if not 0 < self.within_s < math.inf or not all(0 <= rate < 1e12 for rate in each):
            raise ValueError(f"no jump: {each} within {self.within_s} s")


class Learned(msgspec.Struct, frozen=True):
    version: int = VERSION
    learned_s: float = 0.0
    """Unix time of what the traces told last; 0: nothing yet."""
    routes: tuple[Route, ...] = ()
    """The most asked first."""
    speeds: tuple[Speed, ...] = ()
    """By batch, rising."""
    prefill_per_s: float = 0.0
    """Prompt tokens a replica computes in a second; 0: unknown."""
    jumps: tuple[Jump, ...] = ()
    """By how long, rising."""
    starts_s: tuple[float, ...] = ()
    """How long the last replicas took to come, from when they were asked for; the youngest last."""

    def __post_init__(self) -> None:
        if self.version != VERSION or not 0 <= self.learned_s < math.inf:
            raise ValueError(f"version {self.version}, learned at {self.learned_s}")
        if not 0 <= self.prefill_per_s < _PER_S_MAX or not all(map(is_start, self.starts_s)):
            raise ValueError(f"no speed of prompts, or no starts: {self.prefill_per_s}, {self.starts_s}")
        if any(one.batch >= other.batch for one, other in pairwise(self.speeds)):
            raise ValueError("speeds go by batch, rising")

    def cold_start_s(self, declared_s: float) -> float:
        """The 90th percentile of the last ones, once there are enough, and never far from what was declared."""
        if len(self.starts_s) < STARTS_MIN:
            return declared_s
        rank = math.ceil(0.9 * len(self.starts_s)) - 1
        return min(max(sorted(self.starts_s)[rank], COLD_START_LEAST * declared_s), COLD_START_MOST * declared_s)

    def decode_per_s(self, batch: float) -> float:
        """Output tokens a second of a replica with so many sequences; of more than were ever seen those of the most.
        0: unknown."""
        below_batch = below_per_s = 0.0
        for speed in self.speeds:
            if speed.batch >= batch:
                share = (batch - below_batch) / (speed.batch - below_batch)
                return below_per_s + share * (speed.tokens_per_s - below_per_s)
            below_batch, below_per_s = speed.batch, speed.tokens_per_s
        return below_per_s

    @property
    def output_mean(self) -> float:
        requests = sum(route.requests for route in self.routes)
        return sum(route.requests * route.output.mean for route in self.routes) / requests if requests else 0.0

    def usual(self, known: Usual | None) -> Usual | None:
        """What one of the pool's replicas does, where none is there to tell it; ``known``: as one was last seen."""
        output = self.output_mean
        if not self.speeds or not self.routes:
            return known
        slots = known.slots if known is not None else math.ceil(self.speeds[-1].batch)
        # Agents measure prompts apart from the step that was under way, and many in a row
        prefill_per_s = known.prefill_per_s if known is not None else self.prefill_per_s
        if not prefill_per_s or not output:
            return known
        bytes_per_token = known.bytes_per_token if known is not None else _BYTES_PER_TOKEN
        return Usual(slots, prefill_per_s, self.decode_per_s(slots), output, bytes_per_token)

    def outputs(self) -> dict[str, float]:
        """Output tokens by ``plans.route``, on the mean."""
        return {route(one.model, one.dialect, one.tier): one.output.mean for one in self.routes[:ROUTES_TOLD]}

    def jump(self, within_s: float) -> Jump | None:
        """Of the shortest time that is not shorter, or of the longest."""
        return next((jump for jump in self.jumps if jump.within_s >= within_s), self.jumps[-1] if self.jumps else None)


def is_start(seconds: float) -> bool:
    """Whether a replica can have taken so long to come; NaN never did."""
    return 0 < seconds < _START_S_MAX


def started(before: Sequence[float], took_s: Sequence[float]) -> tuple[float, ...]:
    """The last starts with some more."""
    return (*before, *(round(one, 1) for one in took_s if is_start(one)))[-STARTS_KEPT:]


class _Version(msgspec.Struct):
    version: int = 0


_version_decoder = msgspec.json.Decoder(_Version)
L = TypeVar("L", bound=Learned)


def decode_learned(record: bytes, decoder: msgspec.json.Decoder[L]) -> L | None:
    """None: it is another version's. Raises ValueError on what cannot be."""
    if _version_decoder.decode(record).version != VERSION:
        return None
    return decoder.decode(record)
