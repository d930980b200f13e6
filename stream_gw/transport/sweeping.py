"""Sweeps over all connections of a gateway, and finds those whose readers do not take what they were sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from stream_fabric.limits import STALL_BYTES_MIN, STALL_S_MAX

_AT_ONCE = 500

T = TypeVar("T")


async def batches(items: Iterable[T]) -> AsyncIterator[tuple[T, ...]]:
    """Yield the items that there are now, ``_AT_ONCE`` a turn of the loop: tokens go first.

    Call it in a function that ends with the sweep. One that sleeps until the next keeps the last batch in memory, with
    what connections hold that have closed meanwhile.
    """
    now = tuple(items)
    for start in range(0, len(now), _AT_ONCE):
        yield now[start : start + _AT_ONCE]
        await asyncio.sleep(0)


class StallTimer:
    """Runs while a connection's buffer is full.

    A reader must take ``STALL_BYTES_MIN`` in every ``STALL_S_MAX``: a few bytes now and then do not hold the
    connection.
    """

    __slots__ = ("_since", "_unsent")

    def __init__(self) -> None:
        self._since = 0.0
        self._unsent = 0

    def is_stalled(self, unsent: int, now: float) -> bool:
        """Whether the reader took too little for too long.

        ``unsent``: bytes in the connection's buffer. ``now``: seconds of a monotonic clock.
        """
        if not self._since or unsent <= self._unsent - STALL_BYTES_MIN:
            self._since, self._unsent = now, unsent
        return now - self._since > STALL_S_MAX

    def sent(self, size: int) -> None:
        """Count bytes that were added to the connection's buffer since the last check."""
        self._unsent += size
