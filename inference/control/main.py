"""The controller process: looks after the streams of dead replicas, drains replicas that are stuck, and plans how many
there are to be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable

import uvloop

from inference.control.governor import Governor, load_policies
from inference.control.health import Health, HealthPolicy
from inference.control.learner import Learner
from inference.control.metrics import ControllerMetrics
from inference.control.pods import NoMarker, PodMarker
from inference.control.settings import ControllerSettings
from stream_fabric.herald import Herald
from stream_fabric.monitor import served
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.clock import FabricClock
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.pool import RedisPools
from stream_fabric.redis.reaper import Reaper
from stream_fabric.redis.rescue import Witness
from stream_fabric.redis.streams import RedisStreamLog, check_partitions
from telemetry.emit import open_sink

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def _monitor(host: str, port: int, metrics: ControllerMetrics) -> AsyncIterator[str]:
    if port < 0:
        yield ""
        return
    async with served(host, port, lambda: True, metrics.scraped) as url:
        yield url


@contextlib.asynccontextmanager
async def _scaler(
    settings: ControllerSettings, governor: Governor | None, metrics: ControllerMetrics
) -> AsyncIterator[None]:
    if settings.scaler_port < 0 or governor is None:
        yield
        return
    # It writes by itself to stderr, of each handshake that failed: that is whoever's who may not ask
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        from inference.control.keda import KedaScaler, Tls
    except ImportError as error:
        raise ValueError(f"STREAM_GW_SCALER_PORT needs gRPC: pip install 'stream-gw[keda]' ({error})") from None
    cert, key, client_ca = settings.scaler_cert, settings.scaler_key, settings.scaler_client_ca
    tls = Tls(cert, key, client_ca) if cert is not None and key is not None and client_ca is not None else None
    scaler = KedaScaler(governor.desired, metrics)
    async with scaler.served(settings.scaler_host, settings.scaler_port, tls) as port:
        log.info("KEDA is told of the pools at %s:%d", settings.scaler_host, port)
        yield


async def serve(settings: ControllerSettings, on_ready: Callable[[str], None]) -> None:
    """Run until SIGTERM. ``on_ready`` gets where its metrics are; empty: nowhere.

    Raises FabricUnavailable when Redis is out of reach at the start, ValueError or OSError for what is set wrong.
    """
    policies = None if settings.pools_file is None else load_policies(settings.pools_file)
    client = RedisClient(settings.redis_url)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await client.start()
        partitions = await check_partitions(client, settings.partitions)
        metrics = ControllerMetrics()
        async with open_sink(settings, client, metrics.registry) as inner, asyncio.TaskGroup() as tasks:
            sink = metrics.of(inner)
            pools, streams = RedisPools(client), RedisStreamLog(client, partitions)
            clock = FabricClock(client)
            witness = Witness(sink, clock, streams)
            running = [
                tasks.create_task(clock.run(), name="clock"),
                tasks.create_task(Reaper(pools, streams, witness).run(), name="reaper"),
            ]
            governor: Governor | None = None
            if policies is not None:
                control = RedisControl(client)
                token = settings.telemetry_token.get_secret_value()
                learner = Learner(
                    settings.telemetry_url, token, policies, control, lambda: governor is not None and governor.leads
                )
                governor = Governor(
                    f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
                    policies,
                    control,
                    pools,
                    sink,
                    clock,
                    metrics,
                    PodMarker.in_cluster(settings.pod_account) if settings.pod_deletion_cost else NoMarker(),
                    learner,
                )
                running.append(tasks.create_task(governor.run(), name="governor"))
                running.append(tasks.create_task(learner.run(), name="learner"))
            if settings.drain_stuck:
                health = Health(
                    pools,
                    HealthPolicy(ratio=settings.stuck_ratio),
                    metrics.receive_stuck,
                    Herald(sink, clock, "health"),
                )
                running.append(tasks.create_task(health.run(), name="health"))
            async with (
                _monitor(settings.metrics_host, settings.metrics_port, metrics) as url,
                _scaler(settings, governor, metrics),
            ):
                if url:
                    running.append(tasks.create_task(metrics.watch(pools), name="metrics"))
                on_ready(url)
                await stop.wait()
            for task in running:
                task.cancel()
    finally:
        await client.close()


def run(settings: ControllerSettings, on_ready: Callable[[str], None]) -> None:
    """The process's main."""
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, on_ready))
