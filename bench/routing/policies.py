"""Who gets a request: the peers' ways, and the law of ``stream_fabric.placement``."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

from inference.simulate.world import Asked, Everyone, Policy

OURS = "ours"


class Random:
    takes_hints = False

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._replicas = replicas
        self._rng = rng

    def candidates(self, asked: Asked) -> Sequence[int]:
        return [self._rng.randrange(self._replicas)]


class RoundRobin:
    """Each gateway by itself, as gateways that share nothing do."""

    takes_hints = False

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._replicas = replicas
        self._begin = rng.randrange(replicas)
        self._next: dict[int, int] = {}

    def candidates(self, asked: Asked) -> Sequence[int]:
        turn = self._next.get(asked.gateway, self._begin + asked.gateway)
        self._next[asked.gateway] = turn + 1
        return [turn % self._replicas]


class LeastLoaded:
    takes_hints = False

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._rng = rng

    def candidates(self, asked: Asked) -> Sequence[int]:
        least = min(asked.in_flight)
        return [self._rng.choice([index for index, count in enumerate(asked.in_flight) if count == least])]


class Sticky:
    """A session's hash names its replica."""

    takes_hints = False

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._replicas = replicas
        self._salt = rng.randbytes(8)

    def candidates(self, asked: Asked) -> Sequence[int]:
        digest = hashlib.blake2b(asked.request.session.encode(), digest_size=8, salt=self._salt).digest()
        return [int.from_bytes(digest, "big") % self._replicas]


class Prefix:
    """The longest match, whatever the load; of equals one by chance."""

    takes_hints = True

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._rng = rng

    def candidates(self, asked: Asked) -> Sequence[int]:
        most = max(asked.matched_tokens)
        return [self._rng.choice([index for index, tokens in enumerate(asked.matched_tokens) if tokens == most])]


def ours(replicas: int, rng: random.Random) -> Policy:
    return Everyone()


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
