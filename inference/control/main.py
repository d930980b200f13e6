"""The controller process: recovers streams of dead replicas, drains stuck replicas, and plans the declared pools."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping

import uvloop

from inference.control.health import Health, HealthPolicy
from inference.control.leader import Leader
from inference.control.metrics import ControllerMetrics
from inference.control.pods import NoMarker, PodMarker
from inference.control.policy.scale_policy import ScalePolicy, parse_policies
from inference.control.pool_watch import watch_pools
from inference.control.reconcile_job import ReconcileJob
from inference.control.settings import ControllerSettings
from inference.control.traffic_model_job import TrafficModelJob
from stream_fabric.accounts.ports import Accounts
from stream_fabric.ports import Clock, Control, EventSink, Pools, Random
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.process.health_server import serve_health
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.process.metrics_registry import CountingSink
from stream_fabric.recovery.failover_reporter import FailoverReporter
from stream_fabric.recovery.late_bills import LateBills
from stream_fabric.recovery.lease_reaper import LeaseReaper
from stream_fabric.recovery.settlements import Settlements
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.clock import read_clock
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.divided_pools import DividedPools
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import RedisStreamLog, check_partitions
from stream_fabric.redis.tenancy.accounts import RedisAccounts
from stream_fabric.redis.tenancy.unbilled import RedisUnbilled
from telemetry.emit.open import open_sink

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def _metrics_server(host: str, port: int, metrics: ControllerMetrics) -> AsyncIterator[str]:
    """Serve the metrics and yield their URL; a negative port serves nothing and yields an empty URL."""
    if port < 0:
        yield ""
        return
    async with serve_health(host, port, lambda: True, metrics.scraped) as url:
        yield url


@contextlib.asynccontextmanager
async def _keda_server(
    settings: ControllerSettings, leader: Leader | None, metrics: ControllerMetrics, random: Random
) -> AsyncIterator[None]:
    """Serve the desired replicas to KEDA, if the settings ask for it."""
    if settings.scaler_port < 0 or leader is None:
        yield
        return
    # By default gRPC writes every failed handshake to stderr, and anyone can cause one
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        from inference.control.keda import KedaScaler, Tls
    except ImportError as error:
        raise ValueError(f"STREAM_GW_SCALER_PORT needs gRPC: pip install 'stream-gw[keda]' ({error})") from None
    cert, key, client_ca = settings.scaler_cert, settings.scaler_key, settings.scaler_client_ca
    tls = Tls(cert, key, client_ca) if cert is not None and key is not None and client_ca is not None else None
    scaler = KedaScaler(leader.desired, metrics, random)
    async with scaler.served(settings.scaler_host, settings.scaler_port, tls) as port:
        log.info("KEDA external scaler started: address=%s:%d", settings.scaler_host, port)
        yield


def _make_leader(
    settings: ControllerSettings,
    policies: Mapping[str, ScalePolicy],
    control: Control,
    pools: Pools,
    sink: EventSink,
    clock: Clock,
    random: Random,
    metrics: ControllerMetrics,
) -> tuple[Leader, TrafficModelJob]:
    """Make the leader and its traffic model job. Raises OSError or ValueError for deletion cost outside of a pod."""
    token = settings.telemetry_token.get_secret_value()
    models = TrafficModelJob(settings.telemetry_url, token, policies, control, clock, random)
    account, selector = settings.pod_account, settings.pod_selector
    marker = PodMarker.in_cluster(account, selector) if settings.pod_deletion_cost else NoMarker()
    name = f"{socket.gethostname()}-{os.getpid()}-{random.token_hex(3)}"
    return Leader(name, policies, control, pools, sink, clock, random, metrics, marker, models), models


def _reconcile_job(
    settings: ControllerSettings, models: TrafficModelJob, metrics: ControllerMetrics, clock: Clock, accounts: Accounts
) -> ReconcileJob:
    """Make the nightly job. It leads where the traffic models are learned."""
    token = settings.telemetry_token.get_secret_value()
    leads, hour = (lambda: models.is_leading), settings.reconcile_hour
    return ReconcileJob(settings.telemetry_url, token, leads, metrics, clock, accounts, hour_utc=hour)


async def serve(settings: ControllerSettings, on_ready: Callable[[str], None]) -> None:
    """Run until SIGTERM. ``on_ready`` gets the URL of the metrics; empty: they are not served.

    Raises FabricUnavailable when Redis cannot be reached at the start, ValueError or OSError for wrong settings.
    """
    path = settings.pools_file
    policies = None if path is None else parse_policies(path.read_bytes(), str(path))
    client = RedisClient(settings.redis_url)
    random = HostRandom()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await client.start()
        partitions = await check_partitions(client, settings.partitions)
        clock = await read_clock(client, HostClock(), random)
        metrics = ControllerMetrics()
        async with (
            open_sink(settings, client, metrics.registry, HostClock(), clock, random) as events,
            asyncio.TaskGroup() as tasks,
        ):
            sink = CountingSink(metrics.receive, events)
            settlements = Settlements(RedisAccounts(client), random)
            cells = RedisPools(client, on_skip=metrics.receive_skipped_record)
            streams = RedisStreamLog(client, partitions, on_ended=settlements.add)
            pools = DividedPools(client, on_skip=metrics.receive_skipped_record)
            unbilled = RedisUnbilled(client, partitions)
            reporter = FailoverReporter(sink, clock, streams, unbilled)
            running = [
                tasks.create_task(clock.run(), name="clock"),
                tasks.create_task(settlements.run(), name="settlements"),
                tasks.create_task(
                    LeaseReaper(cells, streams, clock, random, reporter, metrics.receive_lost_pools).run(),
                    name="reaper",
                ),
                tasks.create_task(reporter.run(), name="bills"),
                tasks.create_task(LateBills(streams, unbilled, reporter, random).run(), name="late bills"),
            ]
            leader: Leader | None = None
            if policies is not None:
                control = RedisControl(client, metrics.receive_skipped_record)
                leader, models = _make_leader(settings, policies, control, pools, sink, clock, random, metrics)
                running.append(tasks.create_task(leader.run(), name="leader"))
                running.append(tasks.create_task(models.run(), name="traffic models"))
                if settings.telemetry_url and settings.reconcile_hour >= 0:
                    job = _reconcile_job(settings, models, metrics, clock, RedisAccounts(client))
                    running.append(tasks.create_task(job.run(), name="reconciliation"))
            if settings.drain_stuck:
                policy = HealthPolicy(ratio=settings.stuck_ratio)
                fleet_events = FleetEventReporter(sink, clock, "health")
                health = Health(pools, policy, random, metrics.receive_stuck, fleet_events)
                running.append(tasks.create_task(health.run(), name="health"))
            async with (
                _metrics_server(settings.metrics_host, settings.metrics_port, metrics) as url,
                _keda_server(settings, leader, metrics, random),
            ):
                if url:
                    running.append(tasks.create_task(watch_pools(pools, metrics, random), name="metrics"))
                on_ready(url)
                await stop.wait()
            for task in running:
                task.cancel()
            await settlements.flush()
    finally:
        await client.close()


def run(settings: ControllerSettings, on_ready: Callable[[str], None]) -> None:
    """Run the controller process until SIGTERM."""
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, on_ready))
