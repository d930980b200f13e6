"""The fabric's clock: Redis's time, so that moments of different processes compare."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque

from stream_fabric.errors import FabricError
from stream_fabric.ports import Clock, Random
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.topology import slot_of

log = logging.getLogger(__name__)

_FIRST_SAMPLES = 5
_FIRST_EVERY_S = 0.05
_EVERY_S = 20.0
_LOOK_S = 0.5
"""Seconds between looks whether another server answers, after which its clock is read."""
_SLOT = slot_of("pools")
_SAMPLES = 16
"""Samples that are kept: five minutes of them."""


class ClockEstimate:
    """Estimate of the offset from this process's monotonic clock to the fabric's clock. Pure."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=_SAMPLES)
        """(round trip, offset), microseconds."""

    def receive(self, sent_us: int, fabric_us: int, received_us: int) -> None:
        """Add a reading of the fabric's clock, requested at ``sent_us`` and received at ``received_us``."""
        trip_us, offset_us = received_us - sent_us, fabric_us - (sent_us + received_us) // 2
        # A reading that contradicts this one is of another clock: Redis has failed over, or its host's clock was set
        held = [each for each in self._samples if abs(each[1] - offset_us) <= (each[0] + trip_us) // 2 + 1]
        self._samples = deque([*held, (trip_us, offset_us)], maxlen=_SAMPLES)

    @property
    def offset_us(self) -> int | None:
        """Offset by the reading with the shortest round trip; the error is at most half of it. None: none yet."""
        return min(self._samples)[1] if self._samples else None


class FabricClock:
    """A ``Clock``. ``now_us`` needs no round trip. Before the first reading it is the host's clock."""

    def __init__(self, client: RedisClient, host: Clock, random: Random) -> None:
        self._client = client
        self._host = host
        self._random = random
        self._estimate = ClockEstimate()
        self._offset_us = host.offset_us
        self.monotonic_us = host.monotonic_us  # not a method of ours: it is called for every token

    @property
    def offset_us(self) -> int:
        return self._offset_us

    def now_us(self) -> int:
        return self._host.monotonic_us() + self._offset_us

    async def run(self) -> None:
        """Read Redis's time periodically until cancelled, more often at first."""
        count = 0
        while True:
            try:
                await self.read()
                count += 1
            except FabricError as error:
                log.warning("fabric clock not read, retrying: error=%s", error)
            if count < _FIRST_SAMPLES:
                await asyncio.sleep(_FIRST_EVERY_S)
            else:
                await self._rest(_EVERY_S * self._random.uniform(0.8, 1.0))

    async def _rest(self, seconds: float) -> None:
        """Sleep, until another connection than now leads to Redis: it may have failed over to another clock."""
        connection = self._client.open_connection(_SLOT)
        for _ in range(math.ceil(seconds / _LOOK_S)):
            await asyncio.sleep(_LOOK_S)
            if self._client.open_connection(_SLOT) is not connection:
                break

    async def read(self) -> None:
        """Read Redis's time once and update the offset. Raises FabricError."""
        sent_us = self._host.monotonic_us()
        seconds, micros = await self._client.execute(_SLOT, "TIME")
        self._estimate.receive(sent_us, int(seconds) * 1_000_000 + int(micros), self._host.monotonic_us())
        offset_us = self._estimate.offset_us
        assert offset_us is not None
        self._offset_us = offset_us


async def read_clock(client: RedisClient, host: Clock, random: Random) -> FabricClock:
    """Make a clock that has read Redis's time, so that it takes no moment from the host's. Raises FabricError."""
    clock = FabricClock(client, host, random)
    await clock.read()
    return clock
