"""Puts the engine to sleep and wakes it, as ``ReplicaStatus`` asks; one transition at a time, never with a stream.

The requested level may change during a transition, which then completes: an engine that is falling asleep is woken once
it sleeps. After a failure the replica is awake and warm, or does not serve.
"""

from __future__ import annotations

import asyncio
import logging

from inference.agent.lease import Lease
from inference.agent.observe.replica_events import ReplicaEvents
from inference.agent.replica import ReplicaStatus
from stream_fabric.errors import EngineFailed, EngineLost, FabricError, Unsupported
from stream_fabric.ports import Engine, SleepLevel

log = logging.getLogger(__name__)


class SleepController:
    def __init__(self, engine: Engine, status: ReplicaStatus, lease: Lease, events: ReplicaEvents) -> None:
        self._engine = engine
        self._status = status
        self._lease = lease
        self._events = events
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        while True:
            await self._status.sleep_check.wait()
            self._status.sleep_check.clear()
            try:
                await self._apply_sleep_level()
            except FabricError as error:
                log.warning("engine sleep postponed, the pool cannot be reached: error=%s", error)

    async def _apply_sleep_level(self) -> None:
        """Put the engine to sleep or wake it, if its state differs from the requested level."""
        status, load = self._status, self._engine.load()
        if status.sleep_level is not None and load.ready and not load.asleep and not status.sleep_refused:
            await self._fall_asleep(status.sleep_level)
        if status.sleep_level is None and self._engine.load().asleep:
            await self._wake()

    async def _fall_asleep(self, level: SleepLevel) -> None:
        status, changes = self._status, self._status.sleep_level_changes
        if not await self._lease.has_no_requests() or status.sleep_level_changes != changes:
            return
        status.sleep_transition = "sleeping"
        try:
            if await self._engine.sleep(level):
                log.info("engine sleeps: level=%d", level)
        except Unsupported as error:
            status.sleep_refused = error.message
            log.warning("engine cannot sleep, the replica stays warm: error=%s", error.message)
        except EngineFailed as error:
            status.sleep_refused = error.message
            log.error("engine failed to fall asleep, the replica stays warm: error=%s", error.message)
            await self._wake()
        finally:
            status.sleep_transition = None
        await self._lease.try_renew()

    async def _wake(self) -> None:
        status, began = self._status, self._loop.time()
        status.sleep_transition = "warming"
        try:
            await self._engine.wake()
        except EngineLost as error:
            log.error("engine failed to wake and is being restarted: error=%s", error.message)
        except EngineFailed as error:
            log.error("engine failed to wake, the replica leaves: error=%s", error.message)
            status.fail(EngineLost(error.message))
        else:
            status.wake_s = self._loop.time() - began
            log.info("engine is awake: took_s=%.2f", status.wake_s)
            self._events.receive_wake(status.wake_s)
        finally:
            status.sleep_transition = None
        await self._lease.try_renew()
