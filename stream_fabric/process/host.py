"""The clock and the randomness of this host: the only implementation of ``ports.Clock`` and ``ports.Random`` without
Redis. A lint refuses ``time``, ``random`` and ``secrets`` in every other module that streams pass through."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import time

OPEN_FILES_ANY = 1 << 30
"""Limit of open files where the host sets none."""


class HostClock:
    """A ``Clock`` from the host's own time."""

    @property
    def offset_us(self) -> int:
        return (time.time_ns() - time.monotonic_ns()) // 1000

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic_us(self) -> int:
        return time.monotonic_ns() // 1000


class HostRandom:
    """A ``Random`` from the operating system's entropy and Python's generator."""

    def random(self) -> float:
        return random.random()

    def uniform(self, low: float, high: float) -> float:
        return random.uniform(low, high)

    def token_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def token_hex(self, count: int) -> str:
        return os.urandom(count).hex()


def raise_open_files() -> int:
    """Raise this process's limit of open files to the most that the host allows, and return the limit.

    Many hosts give processes 1,024 unless they ask for more.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses its own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES_ANY if soft == resource.RLIM_INFINITY else soft
