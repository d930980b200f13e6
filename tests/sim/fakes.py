"""What stands in production modules for one schedule: the world's time and chance, its Redis, and planted bugs."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import inference.agent.agent
import inference.agent.times
import stream_fabric.redis.clock
import stream_fabric.redis.reaper
import stream_fabric.redis.rescue
import stream_gw.gateway
import stream_gw.hub
import stream_gw.trace
from tests.sim.doors import InboxDoor, PoolsDoor, StreamDoor, SubscriberDoor
from tests.sim.fabric import EPOCH_S
from tests.sim.witness import Violation

Planted = Sequence[tuple[Any, str, Any]]
"""Bugs: (module or class, name, what stands there instead)."""


class _Clock:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def time(self) -> float:
        return EPOCH_S + self._now()

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def monotonic_ns(self) -> int:
        return int((1.0 + self._now()) * 1e9)


class _Entropy:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def token_hex(self, count: int) -> str:
        return self._rng.randbytes(count).hex()

    def urandom(self, count: int) -> bytes:
        return self._rng.randbytes(count)


@contextmanager
def stand_ins(seed: int, now: Callable[[], float], planted: Planted) -> Iterator[None]:
    rng = random.Random(seed)
    clock, entropy = _Clock(now), _Entropy(rng)
    gateway, hub, agent = stream_gw.gateway, stream_gw.hub, inference.agent.agent
    reaper, rescue = stream_fabric.redis.reaper, stream_fabric.redis.rescue
    places: list[tuple[Any, str, Any]] = [
        (gateway, "time", clock), (rescue, "time", clock), (agent, "time", clock), (hub, "time", clock),
        (stream_gw.trace, "time", clock), (stream_fabric.redis.clock, "time", clock),
        (inference.agent.times, "time", clock), (stream_fabric.redis.clock, "random", rng),
        (gateway, "random", rng), (rescue, "random", rng), (reaper, "random", rng),
        (gateway, "secrets", entropy), (hub, "secrets", entropy), (reaper, "secrets", entropy),
        (rescue, "secrets", entropy), (agent, "secrets", entropy), (gateway, "os", entropy),
        (agent, "RedisStreamLog", StreamDoor), (agent, "RedisPools", PoolsDoor), (agent, "Inbox", InboxDoor),
        (agent, "Subscriber", SubscriberDoor), *planted,
    ]  # fmt: skip
    before = [(where, name, getattr(where, name)) for where, name, _ in places]
    for where, name, what in places:
        setattr(where, name, what)
    try:
        with _errors_raised():
            yield
    finally:
        for where, name, what in reversed(before):
            setattr(where, name, what)


class _Raises(logging.Handler):
    """What production logs as an error is a bug found, but for what the schedule has done to an engine."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg != "the engine failed":
            error = record.exc_info[1] if record.exc_info else None
            if isinstance(error, Violation):
                raise error
            raise Violation(f"logged: {record.getMessage()}: {error!r}") from error


@contextmanager
def _errors_raised() -> Iterator[None]:
    disabled, handler = logging.root.manager.disable, _Raises()
    loggers = [logging.getLogger(name) for name in ("stream_fabric", "stream_gw", "inference")]
    logging.disable(logging.WARNING)
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        logging.disable(disabled)
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
