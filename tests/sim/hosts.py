"""The platform's processes, wired as their ``main.py`` wires them, on doors in place of Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from inference.agent.agent import Agent, AgentPolicy
from inference.agent.engines.sim.engine import SimEngine
from inference.agent.engines.sim.settings import SimSettings
from inference.agent.lease import LeasePolicy
from stream_fabric.errors import EngineFailed, EngineLost, FabricUnavailable
from stream_fabric.frames import ErrorInfo
from stream_fabric.ids import GatewayId, ReplicaId, StreamId
from stream_fabric.plans import PoolPlan
from stream_fabric.ports import EngineRequest, FrameSink, SleepLevel
from stream_fabric.redis.clock import FabricClock
from stream_fabric.redis.reaper import Reaper
from stream_fabric.redis.rescue import Witness
from stream_fabric.redis.subscriber import partition_channels
from stream_gw.auth import Authenticator, TomlKeyStore
from stream_gw.directory import Directory
from stream_gw.gateway import Gateway
from stream_gw.hub import Hub
from stream_gw.settings import GatewaySettings
from stream_gw.trace import Tracer
from tests.sim.doors import IndexDoor, PoolsDoor, StreamDoor, SubscriberDoor
from tests.sim.fabric import PARTITIONS, Link
from tests.sim.loop import Process

if TYPE_CHECKING:
    from tests.sim.world import World

MODEL = "m"
POOL = "m"
_ANYBODY = Authenticator(TomlKeyStore({}), bytes(16))
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

    def subscriber(
        self, on_message: Callable[[bytes], None], on_subscribed: Callable[[list[str]], None]
    ) -> SubscriberDoor:
        return SubscriberDoor(self.link, partition_channels(self.name, PARTITIONS.slots), on_message, on_subscribed)


class GatewayHost(Host):
    def __init__(self, world: World, name: str) -> None:
        self.gateway: Gateway | None = None
        super().__init__(world, name)

    async def main(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            name = GatewayId(self.name)
            streams, pools = StreamDoor(self.link, PARTITIONS), PoolsDoor(self.link)
            directory = Directory(pools, _no_plans)  # type: ignore[arg-type]
            hub = Hub(name, streams, directory, tasks)  # type: ignore[arg-type]
            subscriber = self.subscriber(hub.receive, hub.resubscribed)
            hub.subscriber = subscriber  # type: ignore[assignment]
            client: Any = self.link
            clock = FabricClock(client)
            tracer = Tracer(self.w.events, clock, name)
            index: Any = IndexDoor(self.link)
            gateway = Gateway(name, SETTINGS, _ANYBODY, hub, streams, pools, index, directory, tracer)  # type: ignore[arg-type]
            for work in (subscriber.run(), clock.run(), directory.run(), hub.watchdog(), gateway.lines.run()):
                tasks.create_task(work)
            tasks.create_task(Reaper(pools, streams, Witness(self.w.events, clock, streams)).run())  # type: ignore[arg-type]
            await subscriber.wait_ready()
            self.gateway = gateway


class ControllerHost(Host):
    async def main(self) -> None:
        client: Any = self.link
        clock, streams = FabricClock(client), StreamDoor(self.link, PARTITIONS)
        witness = Witness(self.w.events, clock, streams)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(clock.run())
            tasks.create_task(Reaper(PoolsDoor(self.link), streams, witness).run())  # type: ignore[arg-type]


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
        self.agent = Agent(policy, self.replica, engine, client, PARTITIONS, w.events)
        await self.agent.run()


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
        self._host.w.submitted(self._host, request)


def engine_settings(itl_ms: float, slots: int) -> SimSettings:
    return SimSettings(
        model=MODEL, itl_ms=itl_ms, ttft_ms=2 * itl_ms, max_num_seqs=slots, num_blocks=512, length_min=1, length_max=60
    )
