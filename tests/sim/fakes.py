"""Clock and randomness of one schedule, and bugs planted into production code."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.sim.fabric import EPOCH_S
from tests.sim.witness import Violation

Planted = Sequence[tuple[Any, str, Any]]
"""Bugs: (module or class, attribute, replacement)."""


class WorldClock:
    """A ``Clock`` on the world's virtual time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    @property
    def offset_us(self) -> int:
        return self.now_us() - self.monotonic_us()

    def now_us(self) -> int:
        return int((EPOCH_S + self._now()) * 1e9) // 1000

    def monotonic_us(self) -> int:
        return int((1.0 + self._now()) * 1e9) // 1000


class SeededRandom:
    """A ``Random`` whose every value follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.generator = random.Random(seed)

    def random(self) -> float:
        return self.generator.random()

    def uniform(self, low: float, high: float) -> float:
        return self.generator.uniform(low, high)

    def token_bytes(self, count: int) -> bytes:
        return self.generator.randbytes(count)

    def token_hex(self, count: int) -> str:
        return self.generator.randbytes(count).hex()


@contextmanager
def planted_bugs(planted: Planted) -> Iterator[None]:
    """Put the bugs into production code, and raise what it logs as an error."""
    before = [(where, name, getattr(where, name)) for where, name, _ in planted]
    for where, name, replacement in planted:
        setattr(where, name, replacement)
    try:
        with _errors_raised():
            yield
    finally:
        for where, name, original in reversed(before):
            setattr(where, name, original)


class _Raises(logging.Handler):
    """Raises on every error that production code logs, except failures of engines that the schedule caused."""

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
