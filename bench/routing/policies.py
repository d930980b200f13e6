"""Routing policies: those of peers, and our ``stream_fabric.pool.placement``."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

from inference.simulate.world import AllReplicas, PlacementView, Policy

OURS = "ours"


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


def ours(replicas: int, rng: random.Random) -> Policy:
    return AllReplicas()


POLICIES: dict[str, Callable[[int, random.Random], Policy]] = {
    "random": Random,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "sticky": Sticky,
    "prefix": Prefix,
    OURS: ours,
}


def policy(name: str, replicas: int, seed: int) -> Policy:
    return POLICIES[name](replicas, random.Random(f"policy {seed}"))
