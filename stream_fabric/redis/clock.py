"""The fabric's clock: Redis's, so that moments told by different processes can be compared."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque

from stream_fabric.errors import FabricUnavailable
from stream_fabric.redis.client import RedisClient, slot_of
from stream_fabric.redis.wire import ReplyError

log = logging.getLogger(__name__)

_FIRST_SAMPLES = 5
_EVERY_S = 20.0
_SAMPLES = 16
"""As many are kept: five minutes of them."""


class ClockEstimate:
    """How far this process's monotonic clock is from the fabric's, from answered questions. Pure."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=_SAMPLES)
        """(round trip, offset), microseconds."""

    def receive(self, asked_us: int, told_us: int, answered_us: int) -> None:
        """Asked at ``asked_us`` of our clock, the fabric's told ``told_us``, which was here at ``answered_us``."""
        self._samples.append((answered_us - asked_us, told_us - (asked_us + answered_us) // 2))

    @property
    def offset_us(self) -> int | None:
        """That of the quickest answer: it is wrong by half a round trip at most. None: nothing has been answered."""
        return min(self._samples)[1] if self._samples else None


class FabricClock:
    """``now_us`` costs no round trip. Before the first answer, and where there is none, it is this host's clock."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._estimate = ClockEstimate()
        self.offset_us = (time.time_ns() - time.monotonic_ns()) // 1000
        """From this process's monotonic clock to the fabric's."""

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000 + self.offset_us

    async def run(self) -> None:
        """Keep asking."""
        asked = 0
        while True:
            try:
                await self._ask()
                asked += 1
            except (FabricUnavailable, ReplyError) as error:
                log.warning("the fabric's clock cannot be read: %s", error)
            await asyncio.sleep(0.05 if asked < _FIRST_SAMPLES else _EVERY_S * random.uniform(0.8, 1.0))

    async def _ask(self) -> None:
        asked_us = time.monotonic_ns() // 1000
        seconds, micros = await self._client.execute(slot_of("pools"), "TIME")
        self._estimate.receive(asked_us, int(seconds) * 1_000_000 + int(micros), time.monotonic_ns() // 1000)
        offset_us = self._estimate.offset_us
        assert offset_us is not None
        self.offset_us = offset_us
