"""The life of the replica in its pool: keeps its lease, watches its engine, and leaves without losing a stream."""

from __future__ import annotations

import asyncio
import logging

from inference.agent.handover import Handover
from inference.agent.lease import Lease
from inference.agent.replica import AgentPolicy, ReplicaStatus
from inference.agent.requests import INBOX_BLOCK_S
from inference.agent.streams import Streams
from stream_fabric.errors import EngineLost, ReplicaLost
from stream_fabric.ports import Engine

log = logging.getLogger(__name__)

_RETRY_S = 0.25
_POLL_S = 0.02


class Lifecycle:
    def __init__(
        self,
        policy: AgentPolicy,
        engine: Engine,
        status: ReplicaStatus,
        lease: Lease,
        streams: Streams,
        handover: Handover,
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._status = status
        self._lease = lease
        self._streams = streams
        self._handover = handover
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Join the pool. Raises FabricError."""
        self._status.started = True
        if asleep := self._engine.load().asleep:  # an earlier agent put this server to sleep
            self._status.request_sleep(None if self._status.active else (1 if asleep == 1 else 2))
        await self._lease.renew()

    async def keep_lease(self) -> None:
        """Renew the lease until cancelled."""
        pause_s = self._policy.lease_renew_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = self._policy.lease_renew_s
            self._status.sleep_check.set()  # streams may have ended, or the engine was restarted
            if not await self._lease.try_renew():
                pause_s = min(pause_s, _RETRY_S)  # a replica that renews late after an outage is declared dead

    async def watch_engine(self) -> None:
        """Wait until the engine as a whole fails, and then begin to drain the replica."""
        try:
            await self._engine.serving()
        except Exception as error:  # the engine is foreign code: whatever ends it, its streams are recovered
            log.exception("the engine failed")
            self._status.fail(EngineLost("the engine failed", detail=repr(error)))

    async def drain(self) -> None:
        """Leave the pool: running streams end within the grace period or go to other replicas."""
        await self._lease.try_renew()  # placement stops with this report
        failure = self._status.failure
        await self._wait_until_idle(0.0 if failure is not None else self._policy.drain_s, self._status.hurried)
        failed = self._status.failure is not None
        error = self._status.failure or ReplicaLost(
            "the replica that produced this stream left; send the request again"
        )
        for stream in list(self._streams.running.values()):
            if not stream.producer.status:
                # One with a token has not made this replica leave: a deploy may move it from each replica to the next
                self._handover.hand_over(stream, error, counts=failed or stream.first_at is None)
        await self._wait_until_idle(self._policy.lease.ttl_s)
        await self._lease.leave()

    async def _wait_until_idle(self, timeout_s: float, interrupted: asyncio.Event | None = None) -> None:
        """Wait until no stream has run for 0.25 s, because a request placed before the last report may still arrive."""
        idle_since = self._loop.time()
        deadline = idle_since + timeout_s
        while self._loop.time() < deadline and self._loop.time() - idle_since < INBOX_BLOCK_S / 4:
            if interrupted is not None and interrupted.is_set():
                break
            if self._streams.running:
                idle_since = self._loop.time()
            await asyncio.sleep(_POLL_S)
