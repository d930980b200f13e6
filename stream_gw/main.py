"""The gateway process: wires its parts, serves, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable

from stream_fabric.errors import Draining
from stream_fabric.herald import Herald
from stream_fabric.ids import GatewayId
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.clock import FabricClock
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.index import RedisIndex
from stream_fabric.redis.pool import RedisPools
from stream_fabric.redis.reaper import Reaper
from stream_fabric.redis.rescue import Witness
from stream_fabric.redis.streams import RedisStreamLog, check_partitions
from stream_fabric.redis.subscriber import Subscriber, partition_channels
from stream_gw.access import AccessLog
from stream_gw.app import Edge
from stream_gw.auth import Authenticator, KeyStore, TomlKeyStore
from stream_gw.content import Contents
from stream_gw.directory import Directory
from stream_gw.gateway import Gateway
from stream_gw.hub import Hub
from stream_gw.metrics import Metrics
from stream_gw.recent import Recent
from stream_gw.server import EdgeServer, make_server
from stream_gw.settings import GatewaySettings
from stream_gw.sheds import Sheds
from stream_gw.trace import Over, Tracer
from telemetry.emit import open_sink
from telemetry.spans import open_spans

log = logging.getLogger(__name__)

DEV_TENANT = "dev"


def key_store(settings: GatewaySettings) -> KeyStore:
    """Raises ValueError when no key is configured: nobody could use the gateway."""
    dev_key = settings.dev_key.get_secret_value()
    if settings.keys_file is not None:
        if dev_key:
            raise ValueError("set keys_file or dev_key, not both")
        try:
            return TomlKeyStore.load(settings.keys_file)
        except (OSError, ValueError) as error:
            raise ValueError(f"--keys-file (STREAM_GW_KEYS_FILE): {error}") from error
    if not dev_key:
        raise ValueError("no keys: set STREAM_GW_KEYS_FILE to a TOML file of tenants (stream-gw key makes an entry)")
    return TomlKeyStore.single(DEV_TENANT, dev_key)


async def serve(settings: GatewaySettings, on_ready: Callable[[str], None]) -> None:
    """Run one gateway until SIGTERM. ``on_ready`` gets its URL.

    Raises ValueError for unusable settings, FabricUnavailable when Redis is out of reach at the start.
    """
    keys = key_store(settings)
    authenticator = Authenticator(keys, settings.token_secret.get_secret_value().encode() or secrets.token_bytes(32))
    name = GatewayId(f"{settings.gateway or socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")
    client = RedisClient(settings.redis_url)
    try:
        await client.start()
        partitions = await check_partitions(client, settings.partitions)
        metrics = Metrics()
        clock = FabricClock(client)
        access = AccessLog(settings.access_log_one_in)
        recent = Recent(time.monotonic)

        def over(told: Over) -> None:
            metrics.receive_over(told)
            access.receive_over(told)
            sheds.receive_over(told)
            contents.receive_over(told)
            recent.receive_over(told)

        spans = open_spans(
            settings.otlp_endpoint, settings.otlp_names, name, metrics.spans_sent.inc, metrics.spans_dropped.inc
        )
        # Closed after all that emits, and before the client that may carry its events
        async with open_sink(settings, client, metrics.registry) as sink, asyncio.TaskGroup() as tasks:
            sheds = Sheds(Herald(sink, clock, name))
            streams = RedisStreamLog(client, partitions)
            pools = RedisPools(client, settings.queue_max)
            directory = Directory(pools, RedisControl(client).plans)
            hub = Hub(name, streams, directory, tasks)
            if partitions.new:
                hub.unsettle()
            subscriber = Subscriber(client, partition_channels(name, partitions.slots), hub.receive, hub.resubscribed)
            hub.subscriber = subscriber
            contents = Contents(sink, authenticator.content_bytes, streams, hub.spawn, settings.trace_one_in)
            tracer = Tracer(
                contents, clock, name, settings.region, settings.trace_one_in, over, directory.loaded, spans.told
            )
            index = RedisIndex(client)
            gateway = Gateway(name, settings, authenticator, hub, streams, pools, index, directory, tracer, contents)
            edge = Edge(gateway, metrics, access, recent)
            server = make_server(edge.app, settings.host, settings.port)
            background = [
                tasks.create_task(subscriber.run()),
                tasks.create_task(clock.run()),
                tasks.create_task(directory.run()),
                tasks.create_task(hub.watchdog()),
                tasks.create_task(gateway.lines.run()),
                tasks.create_task(edge.sweep()),
                tasks.create_task(server.sweep()),
                tasks.create_task(sheds.run()),
                tasks.create_task(Reaper(pools, streams, Witness(sink, clock, streams)).run()),
            ]
            await subscriber.wait_ready()
            serving = tasks.create_task(server.serve())
            stop = _on_signal()
            await _started(server, serving)
            on_ready(_url(server, settings))
            await asyncio.wait([serving, asyncio.ensure_future(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
            await _drain(edge, settings)
            server.should_exit = True
            await serving
            for task in background:
                task.cancel()
        await asyncio.to_thread(spans.close)
    finally:
        await client.close()


def _on_signal() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _started(server: EdgeServer, serving: asyncio.Task[None]) -> None:
    while not server.started:
        if serving.done():
            await serving
            raise OSError("the gateway cannot listen on its port; is another process there?")
        await asyncio.sleep(0.005)


def _url(server: EdgeServer, settings: GatewaySettings) -> str:
    port = server.servers[0].sockets[0].getsockname()[1]
    return f"http://{settings.host}:{port}"


async def _drain(edge: Edge, settings: GatewaySettings) -> None:
    """Invisible to readers: hints spread over a window, plain streams go on to their end within the grace."""
    gateway = edge.gateway
    gateway.draining = True
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.drain_s
    spread_s = min(settings.drain_spread_s, settings.drain_s / 2)
    edge.ops.send_on()
    for socket_ in tuple(edge.sockets):
        # Each comes back at its own moment, so that the others' accept queues see no burst
        socket_.send_on(random.uniform(0, spread_s))
    while loop.time() < deadline and edge.busy:  # noqa: ASYNC110  # readers come and go; this is a process's end
        await asyncio.sleep(0.05)
    for local in tuple(gateway.hub.local.values()):
        for sub in tuple(local.subs):
            remedy = f"continue with GET /v1/streams/{local.id}?after=<cursor>"
            local.fail(sub, Draining(f"this gateway is going away; {remedy}"))
    for socket_ in tuple(edge.sockets):
        socket_.close(1012, "this gateway drains; reconnect elsewhere")
    await asyncio.sleep(0.05)


def run(settings: GatewaySettings, on_ready: Callable[[str], None]) -> None:
    """The process's main."""
    import uvloop

    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, on_ready))
    sys.stdout.flush()
