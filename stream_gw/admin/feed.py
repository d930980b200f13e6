"""``GET /v1/admin/ops``: a live view of the fleet for operators, as server-sent events. Not on the token path.

While there are viewers, the feed makes a snapshot every two seconds and sends the same bytes to all. Each snapshot is
complete: a slow viewer gets the newest one without a queue, and a reconnecting viewer may use another gateway. Redis
and telemetry are read in their own tasks. While one does not answer, the feed shows its last figures, their age and
the error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from stream_fabric.errors import Draining, StreamGwError, TooMany
from stream_fabric.limits import (
    OPS_EVERY_S,
    OPS_HISTORY_S,
    OPS_HISTORY_WAIT_S_MAX,
    OPS_POOLS_MAX,
    OPS_REPLICAS_MAX,
    OPS_VIEWERS_MAX,
    OPS_WAIT_S_MAX,
)
from stream_fabric.native import chunk
from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import ReplicaInfo, SlotUse, TierQueue
from stream_fabric.ports import Clock, Pools
from stream_gw.admin.fleet_view import pool_record, replica_records
from stream_gw.admin.load_history import LoadHistory
from stream_gw.admin.records import Fleet, GatewayStats, Minutes, Replica, Snapshot, Source
from stream_gw.admin.traces import Traces
from stream_gw.admin.viewer import Viewer
from stream_gw.observe.local_stats import LocalStats

log = logging.getLogger(__name__)

_HISTORY_SINCE = "15m"
_CONCURRENT_READS_MAX = 16
_REPLICAS_PER_TURN = 100
"""Replicas processed before other tasks of the loop get a turn."""

_T = TypeVar("_T")
_encoder = msgspec.json.Encoder()
_minutes = msgspec.json.Decoder(list[Minutes])


class OpsSources(Protocol):
    """The directory's view of the fleet."""

    @property
    def by_pool(self) -> Mapping[str, Sequence[ReplicaInfo]]: ...

    @property
    def plans(self) -> Mapping[str, PoolPlan]: ...


class CachedQuery(Generic[_T]):
    """Repeats a query that may be slow, one run at a time in its own task, and keeps the last value."""

    def __init__(self, query: Callable[[], Coroutine[Any, Any, _T]], now: Callable[[], float]) -> None:
        """``now`` gives seconds of a monotonic clock."""
        self._query = query
        self._now = now
        self._task: asyncio.Task[None] | None = None
        self.value: _T | None = None
        self.started_at = float("-inf")
        self._answered_at = now()
        self._error = ""

    async def repeat(self, wait_s: float) -> None:
        """Start the query, unless one is running, and wait up to ``wait_s`` for it."""
        if self._task is None or self._task.done():
            self.started_at = self._now()
            self._task = asyncio.create_task(self._run_query())
        done, _ = await asyncio.wait([self._task], timeout=wait_s)
        for task in done:
            task.result()

    async def _run_query(self) -> None:
        """Run the query once and keep its value, or the text of its error."""
        try:
            self.value = await self._query()
        except (StreamGwError, msgspec.MsgspecError) as error:
            self._error = str(error)
        else:
            self._answered_at, self._error = self._now(), ""

    def source(self, late_s: float) -> Source:
        """Return the source's state for the feed. A query that runs longer than ``late_s`` counts as failed."""
        age_s = self._now() - self._answered_at
        late = self._task is not None and not self._task.done() and self._now() - self.started_at >= late_s
        message = f"no answer within {late_s:g} s" if late else self._error
        return Source("away" if message else "ok", round(age_s, 1), message)

    def forget(self) -> None:
        """Drop the value: the feed has no viewer any more."""
        self.value = None
        self.started_at = float("-inf")
        self._answered_at, self._error = self._now(), ""


class Ops:
    """The operations feed of one gateway."""

    def __init__(
        self,
        pools: Pools,
        directory: OpsSources,
        traces: Traces,
        gateway: Callable[[int], GatewayStats],
        local_stats: Callable[[], LocalStats],
        clock: Clock,
    ) -> None:
        """``gateway`` gives the gateway's own figures for a number of viewers."""
        self._pools = pools
        self._directory = directory
        self._traces = traces
        self._gateway = gateway
        self._local_stats = local_stats
        self._clock = clock
        self._loads = LoadHistory()
        self._fleet = CachedQuery(self._read_fleet, self._now)
        self._history = CachedQuery(self._read_history, self._now)
        self.viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._newest: tuple[float, bytes] | None = None
        self._draining = False

    def check(self) -> None:
        """Check that a further viewer may be admitted. Raises TooMany or Draining."""
        if self._draining:
            raise Draining("this gateway is draining; retry on another one", retry_after_s=1)
        if len(self.viewers) >= OPS_VIEWERS_MAX:
            raise TooMany(
                f"this gateway has {OPS_VIEWERS_MAX} viewers, its limit; close a page and retry", retry_after_s=5
            )

    def watch(self, viewer: Viewer) -> None:
        """Add a viewer, show it a recent snapshot, and start the feed. Raises TooMany or Draining."""
        self.check()
        self.viewers.add(viewer)
        if self._newest is not None and self._now() - self._newest[0] < 2 * OPS_EVERY_S:
            viewer.show(self._newest[1])
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._report_failure)

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer; after the last one, drop the cached snapshot and figures."""
        self.viewers.discard(viewer)
        if not self.viewers:
            self._newest = None
            self._fleet.forget()
            self._history.forget()

    def sample_loads(self) -> None:
        """Keep the load of each replica, for viewers to come. Called every few seconds; costs no read of Redis."""
        self._loads.sample(self._directory.by_pool, self._now())

    def drain(self) -> None:
        """Ask all viewers at once to reconnect to another gateway, because this one drains."""
        self._draining = True
        for viewer in tuple(self.viewers):
            viewer.fail(Draining("this gateway is draining; reconnect to another one"))

    async def _run(self) -> None:
        """Send snapshots while there are viewers. Runs in its own task, so that a fault ends only the feed."""
        while self.viewers:
            piece = await self.snapshot_chunk()
            self._newest = (self._now(), piece)
            for viewer in tuple(self.viewers):
                viewer.expire(self._clock.now_us() / 1e6)
                viewer.show(piece)
            await asyncio.sleep(OPS_EVERY_S)

    def _report_failure(self, task: asyncio.Task[None]) -> None:
        """Log an exception that ended the feed, and send all viewers an error."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("operations feed failed", exc_info=error)
        for viewer in tuple(self.viewers):
            viewer.fail(StreamGwError("the operations feed failed; the gateway's log has the error"))

    async def snapshot_chunk(self) -> bytes:
        """Make a snapshot of the fleet, as an event in one HTTP chunk."""
        if self._traces.configured and self._now() - self._history.started_at >= OPS_HISTORY_S:
            await self._history.repeat(0.0)
        await self._fleet.repeat(OPS_WAIT_S_MAX)
        at_ms = self._clock.now_us() // 1000
        off = Source("off", 0.0, "")
        snapshot = Snapshot(
            at_ms,
            OPS_EVERY_S,
            self._gateway(len(self.viewers)),
            self._local_stats(),
            self._fleet.source(OPS_WAIT_S_MAX),
            self._fleet.value,
            self._history.source(OPS_HISTORY_WAIT_S_MAX) if self._traces.configured else off,
            self._history.value,
        )
        return chunk(b"id: %d\ndata: %b\n\n" % (at_ms, _encoder.encode(snapshot)))

    def _now(self) -> float:
        return self._clock.monotonic_us() / 1e6

    # --- queries -------------------------------------------------------------------------------------------

    async def _read_history(self) -> list[Minutes]:
        return _minutes.decode(await self._traces.query("pulse", _HISTORY_SINCE, OPS_HISTORY_WAIT_S_MAX))

    async def _read_fleet(self) -> Fleet:
        plans = self._directory.plans
        ready = {
            pool_of(cell)
            for cell, infos in self._directory.by_pool.items()
            if any(info.state == "ready" for info in infos)
        }
        names = sorted(
            {*await self._pools.pools(), *plans},
            key=lambda name: (name in ready, name),
        )
        busy = asyncio.Semaphore(_CONCURRENT_READS_MAX)

        async def read_pool(name: str) -> tuple[str, list[SlotUse], list[ReplicaInfo], list[TierQueue]]:
            read = self._pools.slot_uses(name), self._pools.replicas(name), self._pools.tier_queues(name)
            async with busy:
                return name, *await asyncio.gather(*read)

        pools = []
        left = OPS_REPLICAS_MAX
        for name, uses, live, queues in await asyncio.gather(*map(read_pool, names[:OPS_POOLS_MAX])):
            infos = {info.replica: info for info in live}
            replicas: list[Replica] = []
            for start in range(0, len(uses), _REPLICAS_PER_TURN):
                replicas += replica_records(uses[start : start + _REPLICAS_PER_TURN], infos, self._loads.of)
                await asyncio.sleep(0)
            pools.append(pool_record(name, replicas, queues, plans.get(name), infos.values(), left))
            left -= len(pools[-1].replicas)
        return Fleet(sorted(pools, key=attrgetter("pool")), len(names))
