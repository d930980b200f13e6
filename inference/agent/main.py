"""The agent process: wires an engine to the fabric, serves, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat

import uvloop

from inference.agent.agent import Agent
from inference.agent.make_engine import make_engine
from inference.agent.observe.bill_guard import BillGuard
from inference.agent.observe.health import health_server
from inference.agent.observe.metrics import AgentMetrics
from inference.agent.replica import AgentPolicy, AgentPorts, LeasePolicy
from inference.agent.settings import AgentSettings
from inference.agent.structured.checker import open_checker
from stream_fabric.moderation.moderator import open_moderator
from stream_fabric.pool.cells import cell_of, pool_of
from stream_fabric.ports import Clock, EventSink
from stream_fabric.process.host import HostClock, HostRandom, raise_open_files
from stream_fabric.process.memory import prepare_memory
from stream_fabric.process.metrics_registry import CountingSink
from stream_fabric.recovery.settlements import Settlements
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.clock import read_clock
from stream_fabric.redis.inbox import RedisInbox
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import OnEnded, RedisStreamLog, check_partitions, leave_to_check
from stream_fabric.redis.subscriber import subscriptions
from stream_fabric.redis.tenancy.accounts import RedisAccounts
from stream_fabric.redis.tenancy.unbilled import RedisUnbilled
from stream_fabric.stream.ids import ReplicaId, new_replica_id
from telemetry.emit.open import open_sink

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def check(settings: AgentSettings) -> None:
    """Check the engine's settings before anything is started. Raises ValueError that names the wrong setting."""
    make_engine(settings)


async def serve(settings: AgentSettings, on_ready: Callable[[ReplicaId, str], None]) -> None:
    """Run one agent until SIGTERM. A second signal hands running streams over at once.

    ``on_ready`` gets the replica's id and the URL of its metrics, which is empty when they are not served. Raises
    ValueError for unusable settings, EngineFailed or FabricUnavailable when a part is out of reach.
    """
    engine = make_engine(settings)
    client = RedisClient(settings.redis_url)
    loop = asyncio.get_running_loop()
    signalled = False
    try:
        # A model loads for minutes: a signal during that time ends the engine and this process
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
        clock = await read_clock(client, HostClock(), HostRandom())
        name = settings.replica or f"{socket.gethostname()}-{os.getpid()}"
        replica = new_replica_id(name, clock.now_us() // 1_000_000, HostRandom().token_hex(3))
        policy = _policy(settings, models, engine.loaded().adapters, replica)
        metrics = AgentMetrics(pool_of(policy.lease.pool), settings.kv_bytes_per_token)
        opened = open_sink(settings, client, metrics.registry, HostClock(), clock, HostRandom())
        async with (
            opened as sink,
            open_moderator(settings, metrics.moderation.receive, HostClock()) as moderator,
            open_checker(metrics.receive_checked) as checker,
        ):
            events = CountingSink(metrics.receive, sink)
            settlements = Settlements(RedisAccounts(client), HostRandom())
            ports = redis_ports(client, partitions, policy.lease.pool, replica, clock, events, settlements.add)
            guard = BillGuard(settings.serve_without_bills, lambda: opened.bills_at_risk)
            agent = Agent(
                policy,
                replica,
                engine,
                replace(ports, bills=guard, moderator=moderator, checker=checker, on_input=metrics.receive_input),
            )
            stops: Iterator[Callable[[], None]] = chain([agent.drain], repeat(agent.end_grace_period))
            for number in _SIGNALS:
                loop.add_signal_handler(number, lambda: next(stops)())
            server = health_server(agent, engine, settings.metrics_host, settings.metrics_port, metrics)
            async with server as url, asyncio.TaskGroup() as tasks:
                ticking = tasks.create_task(clock.run(), name="clock")
                settling = tasks.create_task(settlements.run(), name="settlements")
                running = tasks.create_task(agent.run())
                running.add_done_callback(lambda _: (ticking.cancel(), settling.cancel()))
                ready = tasks.create_task(agent.ready.wait())
                await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
                ready.cancel()
                if agent.ready.is_set():
                    on_ready(replica, url)
            await settlements.flush()
    finally:
        await engine.close()
        await client.close()


def _policy(settings: AgentSettings, models: Sequence[str], adapters: Sequence[str], replica: ReplicaId) -> AgentPolicy:
    return AgentPolicy(
        LeasePolicy(
            pool=cell_of(settings.pool or models[0], replica, settings.cells),
            engine=settings.engine,
            models=tuple(name for name in models if name not in adapters),
            simulated=settings.engine == "sim",
            ttl_s=settings.lease_ttl_s,
            room_ratio=settings.room_ratio,
            region=settings.region,
            hardware=settings.hardware,
            revision=settings.revision,
            gpu_hour_micro=settings.gpu_hour_micro,
        ),
        lease_renew_s=settings.lease_renew_s,
        drain_s=settings.drain_s,
        standby=settings.standby,
        trace_tokens_one_in=settings.trace_tokens_one_in,
        flush_floor_s=settings.flush_floor_ms / 1000,
        moderation_window_chars=settings.moderation_window_chars,
    )


def redis_ports(
    client: RedisClient,
    partitions: Partitions,
    pool: str,
    replica: ReplicaId,
    clock: Clock,
    events: EventSink,
    on_ended: OnEnded = leave_to_check,
) -> AgentPorts:
    """Return the ports of one agent on Redis. The caller keeps the clock running."""

    log = RedisStreamLog(client, partitions, replica, on_ended)
    inbox = RedisInbox(client, pool, replica)
    subscribe, accounts = subscriptions(client, partitions), RedisAccounts(client)
    unbilled = RedisUnbilled(client, partitions)
    return AgentPorts(log, RedisPools(client), inbox, subscribe, clock, HostRandom(), events, unbilled, accounts)


def run(settings: AgentSettings, on_ready: Callable[[ReplicaId, str], None]) -> None:
    """Run the agent process until it has drained."""

    def ready(replica: ReplicaId, url: str) -> None:
        prepare_memory()
        on_ready(replica, url)

    raise_open_files()  # a request by HTTP has a connection of its own to the model server
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, ready))
