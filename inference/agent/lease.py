"""The replica's reports to its pool: its lease with everything it runs, streams that ended, cached prompt blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from inference.agent.observe.load_tracker import LoadTracker
from inference.agent.observe.replica_events import ReplicaEvents
from inference.agent.replica import LeasePolicy, ReplicaStatus
from inference.agent.running import RunningStream
from stream_fabric.errors import FabricError
from stream_fabric.pool.lease_changes import BlockChange, RoutingGeneration, encode_summary
from stream_fabric.pool.records import PREFIX_TTL_S, ReplicaInfo
from stream_fabric.ports import Pools
from stream_fabric.stream.ids import ReplicaId, StreamId

log = logging.getLogger(__name__)

_REPORT_SOON_S = 0.02
"""First tokens and ends within this time go into one report."""
_PUBLISH_AGAIN_S = PREFIX_TTL_S / 3
"""Interval of whole prefix summaries, also of unchanged ones: they expire, and Redis may have lost them."""
_RETRY_S = 0.05


class Lease:
    """Sends this replica's reports and renews its lease. ``running``: the streams that the lease reports as running."""

    def __init__(
        self,
        policy: LeasePolicy,
        replica: ReplicaId,
        pools: Pools,
        running: Mapping[StreamId, RunningStream],
        status: ReplicaStatus,
        load: LoadTracker,
        events: ReplicaEvents,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._policy = policy
        self._replica = replica
        self._pools = pools
        self._running = running
        self._status = status
        self._load = load
        self._events = events
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._generation = RoutingGeneration()
        self._published_version = 0
        """Version of the prefix ledger that gateways know; -1: of an unknown one."""
        self._summary_version = 0
        self._summary_at = float("-inf")
        """When the last whole summary was published."""
        self._unreported_ends: dict[StreamId, int] = {}
        """Streams whose end the pool has not acknowledged, each with the number of that end."""
        self._ends = 0
        self._report_scheduled = False
        self._reporting = asyncio.Lock()
        """One report at a time: a second one would repeat the end of a stream that the first one's reply gave back."""
        self._restoring = False

    def receive_start(self, stream: StreamId) -> None:
        """Drop an unreported end of the stream, because the stream runs here again."""
        self._unreported_ends.pop(stream, None)

    def report_end(self, stream: StreamId) -> None:
        """Report that the stream does not run here, even if the pool's lists still name this replica."""
        self._ends += 1
        self._unreported_ends[stream] = self._ends
        self.report_soon()

    def report_soon(self) -> None:
        """Send one report in 20 ms: queued requests get the free slots, and placement sees current figures."""
        if not self._report_scheduled:
            self._report_scheduled = True
            self._tasks.create_task(self._report_after_pause())

    async def _report_after_pause(self) -> None:
        await asyncio.sleep(_REPORT_SOON_S)
        try:
            async with self._reporting:
                self._report_scheduled = False
                await self._report(renew=False)
        except FabricError as error:  # the next renewal reports it
            log.warning("report to the pool failed: pool=%s error=%s", self._policy.pool, error)

    async def renew(self) -> None:
        """Renew the lease, and publish what changed in the prefix cache. Raises FabricError."""
        self._load.tick()
        try:
            await self._publish_prefixes()
        except FabricError as error:  # the lease matters more; gateways believe what they know until the next summary
            log.warning("cached prefixes not published: replica=%s error=%s", self._replica, error)
            self._published_version, self._summary_at = -1, float("-inf")
        deadline = self._loop.time() + self._policy.ttl_s / 3
        while True:
            try:
                async with self._reporting:
                    await self._report(renew=True)
                return
            except FabricError:
                if self._loop.time() >= deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def _publish_prefixes(self) -> None:
        """Publish the blocks that changed, and every 20 s, or when there are too many, a whole summary."""
        ledger, now = self._load.prefixes, self._loop.time()
        since, version = self._published_version, ledger.version
        is_due = now - self._summary_at > _PUBLISH_AGAIN_S
        if version == since and not (version and is_due):
            return
        changes = ledger.take_changes()
        if changes is None or is_due:
            await self._pools.put_prefix(self._policy.pool, self._replica, encode_summary(version, ledger.summary()))
            self._summary_at, self._summary_version = now, version
        added, removed = changes or (b"", b"")
        change = BlockChange(-1 if changes is None else since, version, added, removed, self._summary_at == now)
        await self._pools.put_block_change(self._policy.pool, self._replica, change)
        self._published_version = version

    async def try_renew(self) -> bool:
        """Renew the lease. False: the renewal failed and was logged; a later renewal is needed."""
        try:
            await self.renew()
        except FabricError as error:
            log.warning("lease renewal failed, retrying: pool=%s error=%s", self._policy.pool, error)
            return False
        return True

    async def has_no_requests(self) -> bool:
        """Whether nothing runs here and nothing is on its way here. Raises FabricError.

        Renews the lease first, so that the pool has heard that this replica takes nothing.
        """
        if self._running:
            return False
        await self.renew()
        return not self._running and not await self._pools.in_flight(self._policy.pool, self._replica)

    async def leave(self) -> None:
        """Give the lease up, and report the streams that could not be placed elsewhere."""
        try:
            await self.renew()
            if await self._pools.retire(self._policy.pool, self._replica, leaving=True):
                self._events.receive_left(len(self._running))
        except FabricError as error:
            log.warning("left the pool without a report: pool=%s error=%s", self._policy.pool, error)

    async def _report(self, *, renew: bool) -> None:
        """Report load and ended streams. ``renew``: also renew the lease, with all running streams."""
        ended = dict(self._unreported_ends)
        running = {stream.name: stream.work.session for stream in self._running.values()} if renew else None
        info = self._generation.stamp(self.info()) if renew else self.info()
        report = await self._pools.report(
            info, ttl_s=self._policy.ttl_s if renew else None, ended=list(ended), running=running
        )
        for name, number in ended.items():
            if self._unreported_ends.get(name) == number:  # else it was placed here again after this report was made
                del self._unreported_ends[name]
        if running is not None:
            now = self._loop.time()
            self._events.receive_renewal(info, len(running), now)
            self._events.receive_breaker(self._load.breaker, now)
        if report.lost and not self._restoring:
            self._restoring = True
            self._tasks.create_task(self._restore(report.lost))
        if report.yield_to is not None:
            self._status.request_yield(report.yield_to)
        if report.desired and self._status.request(report.desired, report.asked_by):
            self._tasks.create_task(self.try_renew())  # placement has to know the new state at once

    async def _restore(self, lost: Sequence[StreamId]) -> None:
        """Give the pool requests again that Redis has lost. Without them the streams would end with this replica."""
        try:
            for name in lost:
                stream = self._running.get(name)
                if stream is not None and not stream.closed:  # else it is leaving, with its request
                    await self._pools.restore(self._policy.pool, self._replica, stream.work)
        except FabricError as error:  # the next renewal's reply names them
            log.warning("requests that Redis lost not restored: pool=%s error=%s", self._policy.pool, error)
        finally:
            self._restoring = False

    def info(self) -> ReplicaInfo:
        """Return the record of this replica that the next report sends to the pool."""
        policy, meter, load = self._policy, self._load.meter, self._load.engine.load()
        loaded = self._load.engine.loaded()
        now = self._loop.time()
        blocked = self._status.bills.refusal(now) if self._status.bills is not None else ""
        blocked = blocked or self._load.breaker.refusal(now)
        decode_per_s = max(meter.sequence_per_s * load.slots, 1.0)
        return ReplicaInfo(
            self._replica,
            policy.pool,
            policy.engine,
            (*policy.models, *loaded.adapters),
            self._status.state,
            load,
            policy.simulated,
            room=0 if blocked else self._load.breaker.room(max(1, int(load.slots * policy.room_ratio)), now),
            prefill_ms=self._load.pending_prefill_s() * 1000,
            decode_ms=self._load.pending_output_tokens() / decode_per_s * 1000,
            prefill_per_s=meter.prefill.per_s,
            decode_per_s=decode_per_s,
            tokens_per_s=meter.tokens_per_s,
            output_tokens_mean=meter.typical_length.tokens,
            bytes_per_token=meter.bytes_per_token,
            prefix_version=self._summary_version,
            queue_p99_ms=max(meter.queue_p99_ms, self._load.standstill_s() * 1000),
            prefix_blocks=len(self._load.prefixes),
            region=policy.region,
            hardware=policy.hardware,
            revision=policy.revision,
            ttft_counts=meter.first_tokens.counts(now),
            adapters=loaded.adapters,
            artifact=loaded.artifact,
            wake_s=self._status.wake_s,
            sleepless=self._status.sleep_refused,
            blocked=blocked,
            yieldable=self._load.yieldable_streams(),
        )
