"""Routing policies: those of peers, and our ``stream_fabric.pool.placement``."""

from __future__ import annotations

import hashlib
import math
import random
from bisect import bisect
from collections.abc import Callable, Sequence

from inference.simulate.agents import Agent
from inference.simulate.traces import TRACE_BLOCK_TOKENS, Request
from inference.simulate.world import AllReplicas, PlacementView, Policy

OURS = "ours"
_POINTS = 64
"""Points of each replica on the ring."""
_BOUND = 1.25


class Random:
    """Any replica, by chance."""

    takes_hints = False

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._replicas = replicas
        self._rng = rng

    def candidates(self, view: PlacementView) -> Sequence[int]:
        return [self._rng.randrange(self._replicas)]


class RoundRobin:
    """Replicas in turn, for each gateway apart."""

    takes_hints = False

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._replicas = replicas
        self._begin = rng.randrange(replicas)
        self._next: dict[int, int] = {}

    def candidates(self, view: PlacementView) -> Sequence[int]:
        turn = self._next.get(view.gateway, self._begin + view.gateway)
        self._next[view.gateway] = turn + 1
        return [turn % self._replicas]


class LeastLoaded:
    """A replica with the fewest streams."""

    takes_hints = False

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._rng = rng

    def candidates(self, view: PlacementView) -> Sequence[int]:
        least = min(view.in_flight)
        return [self._rng.choice([index for index, count in enumerate(view.in_flight) if count == least])]


class Sticky:
    """The replica that the session's hash selects."""

    takes_hints = False

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._replicas = replicas
        self._salt = rng.randbytes(8)

    def candidates(self, view: PlacementView) -> Sequence[int]:
        digest = hashlib.blake2b(view.request.session.encode(), digest_size=8, salt=self._salt).digest()
        return [int.from_bytes(digest, "big") % self._replicas]


class Prefix:
    """A replica with the longest cached prefix, at any load."""

    takes_hints = True

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._rng = rng

    def candidates(self, view: PlacementView) -> Sequence[int]:
        most = max(view.matched_tokens)
        return [self._rng.choice([index for index, tokens in enumerate(view.matched_tokens) if tokens == most])]


class TwoChoices:
    """The replica with fewer streams, of two drawn by chance."""

    takes_hints = False

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._replicas = replicas
        self._rng = rng

    def candidates(self, view: PlacementView) -> Sequence[int]:
        drawn = self._rng.sample(range(self._replicas), min(self._replicas, 2))
        return [min(drawn, key=lambda index: view.in_flight[index])]


class BoundedRing:
    """The first replica after the session's place on a ring that has at most 1.25 times the mean streams (Mirrokni,
    Thorup, Zadimoghaddam: consistent hashing with bounded loads)."""

    takes_hints = False

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._salt = rng.randbytes(8)
        points = [(self._hash(f"{index} {point}"), index) for index in range(replicas) for point in range(_POINTS)]
        self._ring = sorted(points)

    def _hash(self, text: str) -> int:
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, salt=self._salt).digest(), "big")

    def candidates(self, view: PlacementView) -> Sequence[int]:
        most = math.ceil(_BOUND * (sum(view.in_flight) + 1) / len(view.in_flight))
        begin = bisect(self._ring, (self._hash(view.request.session), 0))
        along = (self._ring[(begin + step) % len(self._ring)][1] for step in range(len(self._ring)))
        return [next(index for index in along if view.in_flight[index] < most)]


class LeastTokens:
    """A replica with the fewest prompt tokens still to compute."""

    takes_hints = False

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._rng = rng

    def candidates(self, view: PlacementView) -> Sequence[int]:
        return [_best([agent.prefill_tokens for agent in view.agents], self._rng)]


class Weighted:
    """llm-d's scorers with the weights of its default profile: 3 for the share of the prompt that is cached, 2 for few
    requests that wait (the fewest get 1, the most 0). It knows of all replicas at this moment, without a delay."""

    takes_hints = True

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._rng = rng

    def candidates(self, view: PlacementView) -> Sequence[int]:
        waiting = [agent.waiting for agent in view.agents]
        most, spread = max(waiting), max(waiting) - min(waiting)
        queue = [(most - count) / spread if spread else 1.0 for count in waiting]
        cached = [min(tokens / view.request.prompt_tokens, 1.0) for tokens in view.matched_tokens]
        return [_best([-(3 * hit + 2 * room) for hit, room in zip(cached, queue, strict=True)], self._rng)]


class Cost:
    """Dynamo's cost with its default scales: prompt tokens that the replica would have to compute, and tokens that its
    streams would hold, this request included. It knows of all replicas at this moment, without a delay."""

    takes_hints = True

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._rng = rng

    def candidates(self, view: PlacementView) -> Sequence[int]:
        costs = [
            agent.prefill_tokens - matched + _held_tokens(agent, view.request)
            for agent, matched in zip(view.agents, view.matched_tokens, strict=True)
        ]  # the request's own tokens are the same for all
        return [_best(costs, self._rng)]


def _held_tokens(agent: Agent, more: Request) -> int:
    """Prompt tokens that the replica's streams would hold with one more; what several share counts once."""
    blocks, unnamed = set(more.ids), 0
    for request in agent.running.values():
        blocks.update(request.ids)
        unnamed += 0 if request.ids else request.prompt_tokens
    return len(blocks) * TRACE_BLOCK_TOKENS + unnamed


def _best(costs: Sequence[float], rng: random.Random) -> int:
    """Return a replica of the lowest cost, drawn by chance."""
    least = min(costs)
    return rng.choice([index for index, cost in enumerate(costs) if cost == least])


def ours(replicas: int, rng: random.Random) -> Policy:
    return AllReplicas()


POLICIES: dict[str, Callable[[int, random.Random], Policy]] = {
    "random": Random,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "sticky": Sticky,
    "prefix": Prefix,
    "two choices": TwoChoices,
    "bounded ring": BoundedRing,
    "least tokens": LeastTokens,
    "llm-d": Weighted,
    "dynamo": Cost,
    OURS: ours,
}


def policy(name: str, replicas: int, seed: int) -> Policy:
    return POLICIES[name](replicas, random.Random(f"policy {seed}"))
