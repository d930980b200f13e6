"""The clock and the randomness of this host: the only implementation of ``ports.Clock`` and ``ports.Random`` without
Redis. A lint refuses ``time``, ``random`` and ``secrets`` in every other module that streams pass through."""

from __future__ import annotations

import os
import random
import time


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
