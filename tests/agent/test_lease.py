"""A replica's reports to its pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from inference.agent.lease import Lease
from inference.agent.observe.attempt_timing import AttemptTiming
from inference.agent.observe.load_tracker import LoadTracker
from inference.agent.observe.replica_events import ReplicaEvents
from inference.agent.replica import LeasePolicy, ReplicaStatus
from inference.agent.running import RunningStream
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from stream_fabric.errors import FabricUnavailable
from stream_fabric.events import NoEvents
from stream_fabric.pool.records import EngineRequest, LeaseReport, ReplicaInfo, Work
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.redis.pools import RedisPools
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId
from tests.support.events import SetClock


class Pools(RedisPools):
    """``fails``: what happens while a renewal is on its way, of those that are lost."""

    def __init__(self, fails: list[Callable[[], None]]) -> None:
        self.fails = fails
        self.heard: list[list[StreamId]] = []
        self.ended: list[list[StreamId]] = []
        self.meanwhile: list[Callable[[], None]] = []
        """Actions during the round trip of a report."""

    async def report(
        self,
        info: ReplicaInfo,
        *,
        ttl_s: float | None,
        ended: Sequence[StreamId] = (),
        running: Mapping[StreamId, str] | None = None,
    ) -> LeaseReport:
        if self.fails:
            self.fails.pop(0)()
            raise FabricUnavailable("lost")
        self.heard.append(list(running or ()))
        self.ended.append(list(ended))
        if self.meanwhile:
            self.meanwhile.pop(0)()
        return LeaseReport("", 0, 0)


def lease_of(pools: Pools, running: dict[StreamId, RunningStream], tasks: asyncio.TaskGroup | None = None) -> Lease:
    engine, policy = SimEngine(SimSettings()), LeasePolicy("p", "sim", ("m",), True, 0.3, 1.0)
    events = ReplicaEvents(FleetEventReporter(NoEvents(), SetClock(), "agent"), "p", ReplicaId("r"), 0.3)
    status, load = ReplicaStatus(engine, events, standby=False), LoadTracker(engine, running, events)
    return Lease(policy, ReplicaId("r"), pools, running, status, load, events, tasks or asyncio.TaskGroup())


def stream(name: str, **more: Any) -> RunningStream:
    request = EngineRequest(StreamId(name), "chat", "m", msgspec.Raw(b"{}"))
    work = Work(request, "1.aa", TenantId("t"), b"", None, **more)
    owner: Any = None
    return RunningStream(work, 0, lambda stream, urgent: None, owner, 0.0, AttemptTiming(SetClock(), 0, 0))


async def test_a_renewal_that_was_lost_is_composed_again() -> None:
    """The stream that came meanwhile is on the list that arrives, or its pool would forget it."""
    running: dict[StreamId, RunningStream] = {}
    pools = Pools([lambda: running.update(s=stream("s"))])
    await lease_of(pools, running).renew()
    assert pools.heard == [[StreamId("s")]]
    pools.fails = [lambda: None] * 100
    with pytest.raises(FabricUnavailable):
        await lease_of(pools, running).renew()


async def test_an_end_that_is_reported_again_while_a_report_is_in_flight_is_sent_again() -> None:
    """The report in flight is older than the second end: the stream may have been placed here after it."""
    pools = Pools([])
    async with asyncio.TaskGroup() as tasks:
        lease = lease_of(pools, {}, tasks)
        lease.report_end(StreamId("s"))
        pools.meanwhile = [lambda: lease.report_end(StreamId("s"))]
        for _ in range(3):
            await lease.renew()
        assert pools.ended == [[StreamId("s")], [StreamId("s")], []]


async def test_pending_output_is_the_typical_length_of_such_outputs_within_the_limit() -> None:
    long, short = stream("long", output_tokens=1000), stream("short", output_tokens=20)
    limited = stream("limited", output_tokens=1000, output_limit=50)
    running = {one.name: one for one in (long, short)}
    lease = lease_of(Pools([]), running)
    per_ms = lease.info().decode_per_s / 1000
    assert lease.info().decode_ms * per_ms == pytest.approx(1020)
    running[limited.name] = limited
    limited.tokens = 40
    long.tokens = 5000  # it is no nearer to its end
    assert lease.info().decode_ms * per_ms == pytest.approx(1030)
