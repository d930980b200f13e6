"""The agent process: wires an engine to the fabric, serves, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from itertools import chain, repeat

import uvloop

from inference.agent.agent import Agent, AgentPolicy, new_replica_id
from inference.agent.engines import make_engine
from inference.agent.lease import LeasePolicy
from inference.agent.metrics import AgentMetrics
from inference.agent.monitor import monitor
from inference.agent.settings import AgentSettings
from stream_fabric.ids import ReplicaId
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.streams import check_partitions
from telemetry.emit import open_sink

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def check(settings: AgentSettings) -> None:
    """What can be known of the engine's settings before anything is started. Raises ValueError that says what to do."""
    make_engine(settings)


async def serve(settings: AgentSettings, on_ready: Callable[[ReplicaId, str], None]) -> None:
    """Run one agent until SIGTERM, which lets what runs finish; after a second one it goes elsewhere at once.
    ``on_ready`` gets its replica's id and where its metrics are; empty: nowhere.

    Raises ValueError for unusable settings, EngineFailed or FabricUnavailable when a part is out of reach.
    """
    engine = make_engine(settings)
    client = RedisClient(settings.redis_url)
    loop = asyncio.get_running_loop()
    signalled = False
    try:
        # A model loads for minutes: a signal meanwhile ends the engine with us
        starting = asyncio.ensure_future(engine.start())

        def stop() -> None:
            nonlocal signalled
            signalled = True
            starting.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, stop)
        try:
            models = tuple(await starting)
        except asyncio.CancelledError:
            if not starting.cancelled():
                raise
            return
        await client.start()
        partitions = await check_partitions(client, settings.partitions)
        if signalled:
            return
        policy = AgentPolicy(
            LeasePolicy(
                pool=settings.pool or models[0],
                engine=settings.engine,
                models=models,
                simulated=settings.engine == "sim",
                ttl_s=settings.lease_ttl_s,
                room_ratio=settings.room_ratio,
                region=settings.region,
                hardware=settings.hardware,
                revision=settings.revision,
                loaded=engine.loaded(),
            ),
            lease_renew_s=settings.lease_renew_s,
            drain_s=settings.drain_s,
            standby=settings.standby,
            trace_tokens_one_in=settings.trace_tokens_one_in,
        )
        replica = new_replica_id(settings.replica or f"{socket.gethostname()}-{os.getpid()}")
        metrics = AgentMetrics(policy.lease.pool, settings.kv_bytes_per_token)
        async with open_sink(settings, client, metrics.registry) as sink:
            agent = Agent(policy, replica, engine, client, partitions, metrics.of(sink))
            stops: Iterator[Callable[[], None]] = chain([agent.drain], repeat(agent.hurry))
            for number in _SIGNALS:
                loop.add_signal_handler(number, lambda: next(stops)())
            door = monitor(agent, engine, settings.metrics_host, settings.metrics_port, metrics)
            async with door as url, asyncio.TaskGroup() as tasks:
                running = tasks.create_task(agent.run())
                ready = tasks.create_task(agent.ready.wait())
                await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
                ready.cancel()
                if agent.ready.is_set():
                    on_ready(replica, url)
    finally:
        await engine.close()
        await client.close()


def run(settings: AgentSettings, on_ready: Callable[[ReplicaId, str], None]) -> None:
    """The process's main."""
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, on_ready))
