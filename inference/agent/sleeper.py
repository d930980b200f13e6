"""Lets the engine sleep and wakes it, as the pool wants. One step at a time, and never with a stream.

Who wants it asleep or awake changes a wish; the steps follow it, also when it changes in the middle of one: an engine
that is falling asleep is woken once it sleeps. What goes wrong leaves the replica awake and warm, or not serving.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from stream_fabric.errors import EngineFailed, EngineLost, FabricUnavailable, Unsupported
from stream_fabric.placement import ReplicaState
from stream_fabric.ports import Engine, SleepLevel

log = logging.getLogger(__name__)


class Sleeper:
    """``is_free`` tells the pool that nothing may be placed here, then whether nothing is; ``tell`` lets it know of the
    state as it is; ``on_woken`` hears how long it took, ``on_lost`` of an engine that serves no more."""

    def __init__(
        self,
        engine: Engine,
        is_free: Callable[[], Awaitable[bool]],
        tell: Callable[[], Awaitable[None]],
        on_woken: Callable[[float], None],
        on_lost: Callable[[EngineLost], None],
    ) -> None:
        self._engine = engine
        self._is_free = is_free
        self._tell = tell
        self._on_woken = on_woken
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self.wanted: SleepLevel | None = None
        """The level at which the engine is to sleep; None: it is to be awake."""
        self.refused = ""
        """Why it does not sleep though it was to; once it did not, it is not asked again."""
        self.wake_s = 0.0
        """How long the engine took to wake, the last time."""
        self._wishes = 0
        self._step: ReplicaState | None = None
        self._asked = asyncio.Event()

    @property
    def state(self) -> ReplicaState | None:
        """What the replica is for its sleep's sake; None: its engine is awake."""
        return self._step or ("sleeping" if self._engine.load().asleep else None)

    def want(self, level: SleepLevel | None) -> None:
        if level != self.wanted:
            self.wanted = level
            self._wishes += 1
        self._asked.set()

    def look(self) -> None:
        """Something may have changed: streams have ended, the engine was started again."""
        self._asked.set()

    async def run(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                await self._settle()
            except FabricUnavailable as error:
                log.warning("the engine is left as it is, for the pool cannot be told: %s", error)

    async def _settle(self) -> None:
        load = self._engine.load()
        if self.wanted is not None and load.ready and not load.asleep and not self.refused:
            await self._fall_asleep(self.wanted)
        if self.wanted is None and self._engine.load().asleep:
            await self._wake()

    async def _fall_asleep(self, level: SleepLevel) -> None:
        wishes = self._wishes
        if not await self._is_free() or self._wishes != wishes:
            return
        self._step = "sleeping"
        try:
            if await self._engine.sleep(level):
                log.info("the engine sleeps at level %d", level)
        except Unsupported as cannot:
            self.refused = cannot.message
            log.warning("the replica stays warm, its engine does not sleep: %s", cannot.message)
        except EngineFailed as failed:
            self.refused = failed.message
            log.error("the replica is to stay warm, its engine did not fall asleep: %s", failed.message)
            await self._wake()
        finally:
            self._step = None
        await self._tell()

    async def _wake(self) -> None:
        self._step = "warming"
        began = self._loop.time()
        try:
            await self._engine.wake()
        except EngineLost as lost:
            log.error("%s", lost.message)
        except EngineFailed as failed:
            log.error("the replica ends: %s", failed.message)
            self._on_lost(EngineLost(failed.message))
        else:
            self.wake_s = self._loop.time() - began
            log.info("the engine is awake after %.2f s", self.wake_s)
            self._on_woken(self.wake_s)
        finally:
            self._step = None
        await self._tell()
