"""The platform's processes, wired as their ``main.py`` wires them, on doors in place of Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from inference.agent.agent import Agent
from inference.agent.replica import AgentPolicy, AgentPorts, LeasePolicy
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from stream_fabric.errors import EngineFailed, EngineLost, FabricUnavailable
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import EngineRequest
from stream_fabric.ports import FrameSink, SleepLevel
from stream_fabric.recovery.failover import Failover
from stream_fabric.recovery.failover_reporter import FailoverReporter
from stream_fabric.recovery.late_bills import LateBills
from stream_fabric.recovery.lease_reaper import LeaseReaper
from stream_fabric.recovery.settlements import Settlements
from stream_fabric.redis.clock import FabricClock
from stream_fabric.redis.subscriber import partition_channels
from stream_fabric.stream.frames import ErrorInfo
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId
from stream_gw.auth import Authenticator
from stream_gw.auth.tokens import TokenSigner
from stream_gw.delivery.hub import Hub
from stream_gw.delivery.watchdog import Watchdog
from stream_gw.observe.trace import Tracer
from stream_gw.privacy.zero_retention import ZeroRetention
from stream_gw.routing.directory import Directory
from stream_gw.routing.queue_positions import QueuePositions
from stream_gw.settings import GatewaySettings
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.parts import GatewayParts
from tests.sim.accounts import AccountsDoor, keys_of
from tests.sim.fabric import PARTITIONS, Link
from tests.sim.loop import Process
from tests.sim.ports import InboxDoor, IndexDoor, PoolsDoor, StreamDoor, SubscriberDoor, UnbilledDoor

if TYPE_CHECKING:
    from tests.sim.world import World

MODEL = "m"
POOL = "m"
_SIGNER = TokenSigner(bytes(16))
SETTINGS = GatewaySettings.model_construct(queue_wait_s=8.0, plain_grace_s=2.0, kept_grace_s=6.0)


async def _no_plans() -> dict[str, PoolPlan]:
    """Nobody has declared a pool."""
    return {}


class Host:
    """One process. ``ended``: it has left by itself."""

    def __init__(self, world: World, name: str) -> None:
        self.w = world
        self.name = f"{name}.{world.unique()}"
        self.process = Process(self.name)
        self.link = Link(world, self.process)
        self.ended = False
        self._main = world.loop.spawn(self.process, self.main())
        self._main.add_done_callback(self._left)

    async def main(self) -> None:
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        return self.process.alive and not self.ended

    def serve(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something in this process."""
        self.w.loop.spawn(self.process, work).add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        error = None if self.w.loop.closing else task.exception()
        if error is not None:
            self.w.fail(error)

    def _left(self, main: asyncio.Task[None]) -> None:
        if self.w.loop.closing:
            return
        self.ended = True
        self.process.alive = False
        self.w.gone(self)
        error = main.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is None or isinstance(error, FabricUnavailable | EngineLost):
            self.w.note(f"{self.name} leaves: {error!r}")
        else:
            self.w.fail(error)

    def subscribe(
        self, peer: str, on_message: Callable[[bytes], None], on_subscribed: Callable[[list[str]], None]
    ) -> SubscriberDoor:
        assert peer == self.name
        return SubscriberDoor(self.link, partition_channels(peer, PARTITIONS.slots), on_message, on_subscribed)


class GatewayHost(Host):
    def __init__(self, world: World, name: str) -> None:
        self.gateway: Gateway | None = None
        super().__init__(world, name)

    async def main(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            name = GatewayId(self.name)
            accounts: Any = AccountsDoor(self.link)
            settlements = Settlements(accounts, self.w.entropy)
            streams = StreamDoor(self.link, PARTITIONS, on_ended=settlements.add)
            pools = PoolsDoor(self.link)
            directory = Directory(pools, _no_plans)  # type: ignore[arg-type]
            client: Any = self.link
            clock, index, entropy = (
                FabricClock(client, self.w.clock, self.w.entropy),
                IndexDoor(self.link),
                self.w.entropy,
            )
            hub = Hub(name, streams, clock, self.subscribe, tasks)  # type: ignore[arg-type]
            keys = keys_of(TenantId("t"), self.w.faults)
            hub.on_read = ZeroRetention(keys, streams, name).deletion
            tracer = Tracer(self.w.events, clock, name)
            lines = QueuePositions(pools, directory, clock.now_us, hub.local)  # type: ignore[arg-type]
            parts = GatewayParts(
                name,
                SETTINGS,
                Authenticator(keys, _SIGNER),
                streams,  # type: ignore[arg-type]
                pools,  # type: ignore[arg-type]
                index,  # type: ignore[arg-type]
                accounts,
                clock,
                entropy,
                hub,
                directory,
                lines,
                tracer,
                moderator=self.w.moderator,
            )
            gateway = Gateway(parts)
            unbilled = UnbilledDoor(self.link)
            reporter = FailoverReporter(self.w.events, clock, streams, unbilled)  # type: ignore[arg-type]
            failover = Failover(pools, streams, clock, entropy, reporter)  # type: ignore[arg-type]
            watchdog = Watchdog(hub, lines.holder_of, failover)
            for work in (hub.subscription.run(), clock.run(), directory.run(), watchdog.run(), lines.run()):
                tasks.create_task(work)
            tasks.create_task(LeaseReaper(pools, streams, clock, self.w.entropy, reporter).run())  # type: ignore[arg-type]
            tasks.create_task(settlements.run())
            tasks.create_task(reporter.run())
            tasks.create_task(LateBills(streams, unbilled, reporter, self.w.entropy).run())  # type: ignore[arg-type]
            await hub.subscription.wait_ready()
            self.gateway = gateway


class ControllerHost(Host):
    async def main(self) -> None:
        client: Any = self.link
        clock = FabricClock(client, self.w.clock, self.w.entropy)
        settlements = Settlements(AccountsDoor(self.link), self.w.entropy)  # type: ignore[arg-type]
        streams = StreamDoor(self.link, PARTITIONS, on_ended=settlements.add)
        unbilled = UnbilledDoor(self.link)
        reporter = FailoverReporter(self.w.events, clock, streams, unbilled)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(clock.run())
            tasks.create_task(settlements.run())
            tasks.create_task(LeaseReaper(PoolsDoor(self.link), streams, clock, self.w.entropy, reporter).run())  # type: ignore[arg-type]
            tasks.create_task(reporter.run())
            tasks.create_task(LateBills(streams, unbilled, reporter, self.w.entropy).run())  # type: ignore[arg-type]


class AgentHost(Host):
    def __init__(self, world: World, name: str) -> None:
        self.agent: Agent | None = None
        self.engine: WorldEngine | None = None
        self._standby = world.standby
        super().__init__(world, name)

    @property
    def replica(self) -> ReplicaId:
        return ReplicaId(self.name)

    @property
    def computes(self) -> bool:
        return self.engine is not None and not self.engine.replica.idle

    async def main(self) -> None:
        w = self.w
        engine = self.engine = WorldEngine(self)
        models = tuple(await engine.start())
        policy = AgentPolicy(
            LeasePolicy(POOL, "sim", models, True, w.lease_ttl_s, room_ratio=1.0),
            lease_renew_s=w.lease_ttl_s / 3,
            drain_s=w.drain_s,
            standby=self._standby,
        )
        client: Any = self.link
        clock = FabricClock(client, w.clock, w.entropy)
        accounts: Any = AccountsDoor(self.link)
        settlements = Settlements(accounts, w.entropy)
        ports = AgentPorts(
            log=StreamDoor(self.link, PARTITIONS, self.replica, settlements.add),
            pools=PoolsDoor(self.link),  # type: ignore[arg-type]
            inbox=InboxDoor(self.link, POOL, self.replica),
            subscribe=self.subscribe,
            clock=clock,
            random=w.entropy,
            events=w.events,
            unbilled=UnbilledDoor(self.link),
            accounts=accounts,
            moderator=w.moderator,
            checker=w.checker,
        )
        self.agent = Agent(policy, self.replica, engine, ports)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(clock.run()), tasks.create_task(settlements.run())]
            try:
                await self.agent.run()
            finally:
                for task in background:
                    task.cancel()


class WorldEngine(SimEngine):
    """The simulator, and what can befall a model server."""

    def __init__(self, host: AgentHost) -> None:
        super().__init__(host.w.engine)
        self._host = host
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serving(self) -> None:
        assert self._task is not None
        await asyncio.wait([self._task, self._death], return_when=asyncio.FIRST_COMPLETED)
        if self._death.done():
            raise EngineFailed("the model server died")

    def die(self) -> None:
        if self._task is not None and not self._death.done():
            self._task.cancel()
            self._death.set_result(None)

    def drop(self, stream: StreamId) -> None:
        """The server's answer to one request ends in the middle."""
        request = self._requests.get(stream)
        if request is not None:
            self.abort(stream)
            lost = EngineLost("the answer ended in the middle")
            request.sink.end("failed", ErrorInfo.of(lost))

    async def sleep(self, level: SleepLevel) -> bool:
        slept = await super().sleep(level)
        self._host.w.counts["slept"] = self._host.w.counts.get("slept", 0) + slept
        return slept

    def submit(self, request: EngineRequest, sink: FrameSink) -> None:
        if self._asleep:
            self._host.w.fail(AssertionError(f"{request.stream} was begun at {self._host.name}, which sleeps"))
        super().submit(request, sink)
        made = self._requests.get(request.stream)
        if made is not None:
            of_stream = self._host.w.made.setdefault(request.stream, [])
            of_stream.append((self._host.replica, made.prompt, made.answers))
        self._host.w.submitted(self._host, request)


def engine_settings(itl_ms: float, slots: int) -> SimSettings:
    return SimSettings(
        model=MODEL, itl_ms=itl_ms, ttft_ms=2 * itl_ms, max_num_seqs=slots, num_blocks=512, length_min=1, length_max=60
    )
