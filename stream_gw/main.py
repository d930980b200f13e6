"""Main of the gateway process: wires its parts, serves, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stream_fabric.accounts.records import Record, TenantRecord, row_days
from stream_fabric.errors import FabricError
from stream_fabric.moderation.moderator import Moderator, open_moderator
from stream_fabric.ports import EventSink, Random, Subscribe
from stream_fabric.process.addresses import url_of
from stream_fabric.process.budget_events import BudgetEvents
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.process.host import HostClock, HostRandom, raise_open_files
from stream_fabric.process.memory import prepare_memory
from stream_fabric.process.metrics_registry import CountingSink
from stream_fabric.recovery.failover import Failover
from stream_fabric.recovery.failover_reporter import FailoverReporter
from stream_fabric.recovery.late_bills import LateBills
from stream_fabric.recovery.lease_reaper import LeaseReaper
from stream_fabric.recovery.settlements import Settlements
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.clock import FabricClock, read_clock
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.divided_pools import DividedPools
from stream_fabric.redis.index import RedisChats, RedisIndex, RedisLinks
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import RedisStreamLog, check_partitions, held_partitions
from stream_fabric.redis.subscriber import Subscriber, partition_channels
from stream_fabric.redis.tenancy.accounts import RedisAccounts
from stream_fabric.redis.tenancy.responses import RedisResponses
from stream_fabric.redis.tenancy.tenants import RedisTenants
from stream_fabric.redis.tenancy.unbilled import RedisUnbilled
from stream_fabric.stream.ids import GatewayId
from stream_fabric.system_errors import reason
from stream_gw.auth import Authenticator, KeyStore, TenantFeed, dev_record, read_keys_file
from stream_gw.auth.tokens import TokenSigner
from stream_gw.delivery.hub import Hub
from stream_gw.delivery.watchdog import Watchdog
from stream_gw.observe.access import AccessLog
from stream_gw.observe.content import Contents
from stream_gw.observe.local_stats import LocalStatsWindow
from stream_gw.observe.metrics import Metrics
from stream_gw.observe.rejections import Rejections
from stream_gw.observe.trace import ReaderOutcome, Tracer
from stream_gw.privacy.redaction import can_redact
from stream_gw.privacy.zero_retention import ZeroRetention
from stream_gw.responses import ResponseStore, StorePolicy, open_responses
from stream_gw.routing.directory import Directory
from stream_gw.routing.queue_positions import QueuePositions
from stream_gw.settings import GatewaySettings
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.off_loop import share_gil
from stream_gw.streams.parts import GatewayParts
from stream_gw.tenancy import open_tenancy
from stream_gw.transport.app import Edge
from stream_gw.transport.connection import EdgeServer, make_server, most_connections
from telemetry.emit.open import open_sink
from telemetry.emit.spans import Spans, open_spans

if TYPE_CHECKING:
    from stream_gw.privacy.redaction.worker import Redactor
    from stream_gw.tenancy import Tenancy

log = logging.getLogger(__name__)

DEV_TENANT = "dev"
_PARTITIONS_S = 10.0
"""Interval at which the number of partitions in Redis is checked."""
_LAST_WORDS_S = 4.0
"""Time for a reader to take the end that a drain gave it, before its connection is cut: less than the server waits."""


def key_store(settings: GatewaySettings) -> KeyStore:
    """Make the store of API keys: those of the keys file or the development key, and with a pepper those of the
    database, as they are published. Raises ValueError when there are none, or the keys file is wrong."""
    dev_key, pepper = settings.dev_key.get_secret_value(), settings.key_pepper.get_secret_value()
    records: list[Record] = []
    dev: TenantRecord | None = None
    if settings.keys_file is not None:
        try:
            records = read_keys_file(settings.keys_file)
        except OSError as error:
            why = f"{settings.keys_file}: {reason(error)}"
            raise ValueError(f"--keys-file (STREAM_GW_KEYS_FILE): {why}") from error
        except ValueError as error:
            raise ValueError(f"--keys-file (STREAM_GW_KEYS_FILE): {error}") from error
    elif dev_key:
        dev = dev_record(DEV_TENANT, dev_key)
    elif not pepper:
        raise ValueError(
            "no keys: set STREAM_GW_KEY_PEPPER and add tenants with stream-gw tenants, or set STREAM_GW_KEYS_FILE to a "
            "TOML file of tenants (stream-gw key makes an entry)"
        )
    previous = settings.key_pepper_previous.get_secret_value()
    return KeyStore(records, dev=dev, pepper=pepper.encode(), previous=previous.encode(), published=bool(pepper))


def _token_secrets(settings: GatewaySettings, random: Random) -> list[bytes]:
    """Return the secret that signs, a random one if none is set, and then those that are accepted only."""
    accepted = settings.token_secrets_accepted.get_secret_value().split(",")
    signing = settings.token_secret.get_secret_value().encode() or random.token_bytes(32)
    return [signing, *(secret.strip().encode() for secret in accepted if secret.strip())]


@dataclass(frozen=True)
class _Process:
    """Everything that is open while a gateway serves."""

    settings: GatewaySettings
    name: GatewayId
    keys: KeyStore
    authenticator: Authenticator
    metrics: Metrics
    client: RedisClient
    partitions: Partitions
    host: HostClock
    clock: FabricClock
    random: Random
    spans: Spans
    sink: EventSink
    tenancy: Tenancy | None
    redactor: Redactor | None
    moderator: Moderator | None
    tasks: asyncio.TaskGroup
    stack: contextlib.AsyncExitStack


async def serve(settings: GatewaySettings, on_ready: Callable[[str], None]) -> None:
    """Run one gateway until SIGTERM. ``on_ready`` gets its URL.

    Raises ValueError for unusable settings, FabricUnavailable when Redis is out of reach at the start.
    """
    keys = key_store(settings)
    host, random = HostClock(), HostRandom()
    secret, *accepted = _token_secrets(settings, random)
    authenticator = Authenticator(keys, TokenSigner(secret, accepted))
    name = GatewayId(f"{settings.gateway or socket.gethostname()}-{os.getpid()}-{random.token_hex(4)}")
    metrics, client = Metrics(), RedisClient(settings.redis_url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        await client.start()
        partitions = await check_partitions(client, settings.partitions)
        clock = await read_clock(client, host, random)
        spans = open_spans(
            settings.otlp_endpoint, settings.otlp_names, name, metrics.spans_sent.inc, metrics.spans_dropped.inc, random
        )
        stack.push_async_callback(asyncio.to_thread, spans.close)
        # The sink closes after all that emits, and before the client that may carry its events
        sink = await stack.enter_async_context(open_sink(settings, client, metrics.registry, host, clock, random))
        tenancy = await stack.enter_async_context(_publish_tenants(settings, client, clock, random))
        redactor = await stack.enter_async_context(_redactor())
        moderator = await stack.enter_async_context(open_moderator(settings, metrics.moderation.receive, host))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        process = _Process(
            settings, name, keys, authenticator, metrics, client, partitions, host, clock, random, spans, sink,
            tenancy, redactor, moderator, tasks, stack,
        )  # fmt: skip
        await _run(process, on_ready)


async def _run(process: _Process, on_ready: Callable[[str], None]) -> None:
    """Wire the gateway's parts and serve."""
    settings, name, metrics, client = process.settings, process.name, process.metrics, process.client
    random, sink, tasks, on_skip = process.random, process.sink, process.tasks, metrics.receive_skipped_record
    feed = TenantFeed(RedisTenants(client), process.keys, on_skip) if process.keys.published else None
    if feed is not None:
        await feed.read()
        process.authenticator.catch_up = feed.catch_up
    accounts = RedisAccounts(client)
    settlements, clock = Settlements(accounts, random), process.clock
    log = RedisStreamLog(client, process.partitions, on_ended=settlements.add)
    cells, pools = RedisPools(client, settings.queue_max, on_skip), DividedPools(client, settings.queue_max, on_skip)
    directory = Directory(cells, RedisControl(client, on_skip).plans)
    # Its hot path needs durations only
    hub = Hub(name, log, process.host, _make_subscribe(client, process.partitions), tasks)
    hub.on_read = ZeroRetention(process.keys, log, name).deletion
    if process.partitions.new:
        hub.await_recreation()
    contents = Contents(
        sink, process.keys.content_bytes, log, hub.spawn, settings.trace_one_in,
        lambda tenant: process.keys.plan(tenant).redact, process.redactor,
    )  # fmt: skip
    access, local_stats = AccessLog(settings.access_log_one_in, clock), LocalStatsWindow(clock)
    rejections = Rejections(FleetEventReporter(sink, clock, name))
    receive = _make_receiver((metrics, access, rejections, contents, local_stats), directory)
    tracer = Tracer(
        contents, clock, name, settings.region, settings.trace_one_in, receive, directory.loaded, process.spans.receive,
        lambda tenant: row_days(process.keys.plan(tenant)),
    )  # fmt: skip
    positions = QueuePositions(pools, directory, clock.now_us, hub.local)
    parts = GatewayParts(
        name, settings, process.authenticator, log, pools, RedisIndex(client), accounts, clock, random, hub, directory,
        positions, tracer, contents,
        metrics.receive_limited,
        metrics.limits_failed_open.inc,
        BudgetEvents(FleetEventReporter(sink, clock, name), metrics.receive_budget_event).report,
        metrics.receive_input,
        await process.stack.enter_async_context(_open_responses(process, log, clock)),
        process.moderator,
        RedisChats(client),
        RedisLinks(client, process.partitions),
    )  # fmt: skip
    gateway = Gateway(parts)
    edge = Edge(gateway, metrics, access, local_stats, process.tenancy)
    sources = (hub.subscription, clock, settlements, directory, positions, rejections)
    unbilled = RedisUnbilled(client, process.partitions)
    reporter = FailoverReporter(CountingSink(metrics.receive, sink), clock, log, unbilled)
    upkeep = [
        *(source.run() for source in sources),
        Watchdog(hub, positions.holder_of, Failover(cells, log, clock, random, reporter)).run(),
        edge.sweep(),
        edge.end_recalled_links(),
        keep_partitions(client, process.partitions.count),
        LeaseReaper(cells, log, clock, random, reporter, metrics.receive_lost_pools).run(),
        reporter.run(),
        LateBills(log, unbilled, reporter, random).run(),
        *([] if feed is None else [feed.run(edge.receive_revoked)]),
    ]
    background = [tasks.create_task(work) for work in upkeep]
    await hub.subscription.wait_ready()
    most = most_connections(raise_open_files())
    server = make_server(edge.app, process.host, settings.host, settings.port, most, metrics.connections_cut.inc)
    await _listen(server, edge, settings, tasks, on_ready)
    for task in background:
        task.cancel()
    gateway.commands.stop_retries()
    await settlements.flush()


async def keep_partitions(client: RedisClient, count: int, every_s: float = _PARTITIONS_S) -> None:
    """Set the number of partitions again when Redis has lost it, until cancelled.

    Commands read it, and a process with another number must not start. A gateway that starts soon after the loss still
    has to find the number missing, and then waits for the streams to be recreated.
    """
    while True:
        await asyncio.sleep(every_s)
        try:
            if await held_partitions(client) is None:
                await asyncio.sleep(every_s)
            await check_partitions(client, count)
        except FabricError as error:
            log.warning("number of partitions not checked, retrying: error=%s", error)


def _open_responses(
    process: _Process, log: RedisStreamLog, clock: FabricClock
) -> contextlib.AbstractAsyncContextManager[ResponseStore]:
    """Open the store of responses."""
    settings, random = process.settings, process.random
    return open_responses(
        RedisResponses(process.client, settings.response_held_bytes_max),
        log,
        process.tenancy,
        process.keys.plan,
        clock,
        random,
        StorePolicy(settings.response_days, settings.response_bytes_max, settings.response_stored_bytes_max),
        _token_secrets(settings, random),
        on_outcome=process.metrics.receive_stored,
        on_unsaved=process.metrics.receive_unsaved,
    )


def _redactor() -> contextlib.AbstractAsyncContextManager[Redactor | None]:
    """Open the redaction of content, if its packages are installed."""
    if not can_redact():
        return contextlib.nullcontext()
    from stream_gw.privacy.redaction.worker import open_redactor

    return open_redactor()


class _Observer(Protocol):
    def receive_outcome(self, outcome: ReaderOutcome) -> None:
        """Take the outcome of a reader that has ended."""


def _make_receiver(observers: Sequence[_Observer], directory: Directory) -> Callable[[ReaderOutcome], None]:
    """Make the function that passes each reader's outcome on."""

    def receive(outcome: ReaderOutcome) -> None:
        for observer in observers:
            observer.receive_outcome(outcome)
        if outcome.role == "created" and outcome.replica:
            directory.ended(outcome.replica)

    return receive


@contextlib.asynccontextmanager
async def _publish_tenants(
    settings: GatewaySettings, client: RedisClient, clock: FabricClock, random: Random
) -> AsyncIterator[Tenancy | None]:
    """Open the database of tenants, if one is configured, and publish its changes meanwhile."""
    if not settings.database_url:
        yield None
        return
    url, pepper = settings.database_url, settings.key_pepper.get_secret_value()
    previous = settings.key_pepper_previous.get_secret_value()
    async with (
        open_tenancy(url, RedisTenants(client), clock, random, pepper, previous) as tenancy,
        asyncio.TaskGroup() as tasks,
    ):
        publishing = tasks.create_task(tenancy.run())
        yield tenancy
        publishing.cancel()


def _make_subscribe(client: RedisClient, partitions: Partitions) -> Subscribe:
    """Make the function with which the hub subscribes to its channels."""

    def subscribe(
        peer: str, on_message: Callable[[bytes], None], on_subscribed: Callable[[list[str]], None]
    ) -> Subscriber:
        return Subscriber(client, partition_channels(peer, partitions.slots), on_message, on_subscribed)

    return subscribe


async def _listen(
    server: EdgeServer, edge: Edge, settings: GatewaySettings, tasks: asyncio.TaskGroup, on_ready: Callable[[str], None]
) -> None:
    """Serve until a signal, then drain."""
    sweeping, serving = tasks.create_task(server.sweep()), tasks.create_task(server.serve())
    stop = _stop_on_signal()
    await _wait_until_started(server, serving)
    on_ready(_url(server, settings))
    await asyncio.wait([serving, asyncio.ensure_future(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
    server.end_keep_alive()
    await edge.drain(settings.drain_delay_s, settings.drain_s, settings.drain_spread_s)
    server.should_exit = True
    loop = asyncio.get_running_loop()
    cut_at = loop.time() + _LAST_WORDS_S
    while not serving.done():
        edge.end_readers()  # each time: a stream may have been opened meanwhile
        await asyncio.wait([serving], timeout=0.05)
        if loop.time() >= cut_at:
            server.abort()
    await serving
    sweeping.cancel()


def _stop_on_signal() -> asyncio.Event:
    """Return an event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _wait_until_started(server: EdgeServer, serving: asyncio.Task[None]) -> None:
    while not server.started:
        if serving.done():
            await serving
            raise OSError("the gateway cannot listen on its port; is another process there?")
        await asyncio.sleep(0.005)


def _url(server: EdgeServer, settings: GatewaySettings) -> str:
    return url_of((settings.host, server.servers[0].sockets[0].getsockname()[1]))


def run(settings: GatewaySettings, on_ready: Callable[[str], None]) -> None:
    """Run the gateway process until SIGTERM."""
    import uvloop

    def ready(url: str) -> None:
        prepare_memory()
        share_gil()
        on_ready(url)

    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, ready))
    sys.stdout.flush()
