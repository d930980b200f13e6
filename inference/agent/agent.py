"""The agent: takes requests from its replica's inbox, runs them on the engine, and appends their frames to the log.

It only dials out. Its parts depend on each other in one direction:

    replica ← lease ← streams ← handover ← requests ← log_check
                    ↖ sleep_controller     ↖ lifecycle

A stream that the engine fails goes to another replica (``handover``); one that comes from another replica is continued
from its log (``requests``, ``continuation``).
"""

from __future__ import annotations

import asyncio

from inference.agent.budgets.extender import BudgetExtender
from inference.agent.handover import BatchYield, Handover
from inference.agent.lease import Lease
from inference.agent.lifecycle import Lifecycle
from inference.agent.log_check import Doorbell, LogCheck
from inference.agent.observe.attempt_events import AttemptEvents
from inference.agent.observe.load_tracker import LoadTracker
from inference.agent.observe.meter import BreakerState
from inference.agent.observe.replica_events import ReplicaEvents
from inference.agent.replica import AgentPolicy, AgentPorts, ReplicaStatus
from inference.agent.requests import Requests
from inference.agent.running import RunningStream
from inference.agent.sleep_controller import SleepController
from inference.agent.steering.steering import Steering
from inference.agent.streams import Streams
from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.placement import ReplicaState
from stream_fabric.ports import Engine
from stream_fabric.process.budget_events import BudgetEvents
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.recovery.failover import Failover
from stream_fabric.recovery.failover_reporter import FailoverReporter
from stream_fabric.stream.ids import ReplicaId, StreamId


class Agent:
    """One replica's agent. ``run`` serves; ``drain`` makes it finish running streams, hand over the rest and return."""

    def __init__(self, policy: AgentPolicy, replica: ReplicaId, engine: Engine, ports: AgentPorts) -> None:
        self.policy = policy
        self.replica = replica
        self.ready = asyncio.Event()
        self._engine = engine
        self._inbox = ports.inbox
        self._tasks = tasks = asyncio.TaskGroup()
        events = ReplicaEvents(
            FleetEventReporter(ports.events, ports.clock, "agent"),
            pool_of(policy.lease.pool),
            replica,
            policy.lease.ttl_s,
            standby=policy.standby,
        )
        running: dict[StreamId, RunningStream] = {}
        self.status = status = ReplicaStatus(engine, events, standby=policy.standby, bills=ports.bills)
        self.load = load = LoadTracker(engine, running, events)
        self.lease = lease = Lease(policy.lease, replica, ports.pools, running, status, load, events, tasks)
        self._reporter = reporter = FailoverReporter(ports.events, ports.clock, ports.log, ports.unbilled)
        self.streams = streams = Streams(
            running, lease, load, AttemptEvents(ports.events, ports.clock, replica, policy.lease)
        )
        failover = Failover(ports.pools, ports.log, ports.clock, ports.random, reporter)
        self._handover = Handover(policy.lease, replica, engine, ports, failover, status, streams, tasks)
        budgets = BudgetExtender(
            ports.accounts, BudgetEvents(FleetEventReporter(ports.events, ports.clock, "agent")), tasks
        )
        self._requests = Requests(
            policy, replica, engine, ports, status, lease, load, streams, self._handover, budgets, tasks
        )
        self._sleep = SleepController(engine, status, lease, events)
        self._lifecycle = Lifecycle(policy, engine, status, lease, streams, self._handover)
        self._batch_yield = BatchYield(engine, status, streams, self._handover)
        self._log_check = LogCheck(ports.log, streams, self._requests)
        doorbell = Doorbell(lease, streams, self._handover, self._requests)
        self._subscription = ports.subscribe(replica, doorbell.receive, self._log_check.check_soon)

    async def run(self) -> None:
        """Serve until drained.

        Raises FabricUnavailable when the fabric is out of reach at the start, and EngineLost when the engine serves no
        more: then its streams are on other replicas, or have been ended.
        """
        try:
            async with self._tasks as tasks:
                background = [tasks.create_task(self._subscription.run(), name="doorbell")]
                await self._subscription.wait_ready()
                await self._lifecycle.start()
                background += [
                    tasks.create_task(self._lifecycle.keep_lease(), name="lease"),
                    tasks.create_task(self._log_check.run(), name="log check"),
                    tasks.create_task(self._requests.run(), name="inbox"),
                    tasks.create_task(self._lifecycle.watch_engine(), name="engine"),
                    tasks.create_task(self._sleep.run(), name="sleep"),
                    tasks.create_task(self._batch_yield.run(), name="batch yield"),
                    tasks.create_task(self._reporter.run(), name="bills"),
                ]
                self.ready.set()
                await self.status.draining.wait()
                await self._lifecycle.drain()
                self._requests.stop_retries()
                for task in background:
                    task.cancel()
        finally:
            self._inbox.close()
            await self._engine.close()
        if self.status.failure is not None:
            raise self.status.failure

    def drain(self, asked_by: str = "SIGTERM") -> None:
        """Take no new requests, let running streams end within the grace period, hand over the rest, leave."""
        self.status.drain(asked_by)

    def end_grace_period(self) -> None:
        """End the grace period of a drain."""
        self.status.hurried.set()

    @property
    def steering(self) -> Steering:
        return self._requests.steering

    @property
    def running(self) -> dict[StreamId, RunningStream]:
        return self.streams.running

    @property
    def state(self) -> ReplicaState:
        return self.status.state

    @property
    def breaker_state(self) -> BreakerState:
        return self.load.breaker.state(asyncio.get_running_loop().time())
