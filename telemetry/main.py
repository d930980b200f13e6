"""The telemetry process: inserts events from the log into ClickHouse, and serves queries over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import uvloop

from stream_fabric.errors import BadRequest
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.redis.client import RedisClient
from telemetry.ask.api import api
from telemetry.ask.named_queries import QUERIES
from telemetry.ask.queries import SAVED
from telemetry.ask.usage.settled import open_settled
from telemetry.consume.blocks import BlockPolicy
from telemetry.consume.consumer import Consumer
from telemetry.consume.dlq import DeadLetters
from telemetry.consume.metrics import ConsumerMetrics
from telemetry.consume.progress import EVERY_S, report_progress
from telemetry.consume.redis_dlq import RedisDeadLetters
from telemetry.consume.source import RedisSource, Source, SourceUnavailable
from telemetry.settings import TelemetrySettings
from telemetry.store.store import Store


@asynccontextmanager
async def _open_log(settings: TelemetrySettings, metrics: ConsumerMetrics) -> AsyncIterator[tuple[Source, DeadLetters]]:
    """Open the log and the dead letters that the settings name; the log is not yet started."""
    if settings.events == "off":
        raise BadRequest("STREAM_GW_EVENTS is off: there is nothing to consume")
    if settings.events == "redis":
        client = RedisClient(settings.redis_url)
        try:
            await client.start()
            source = RedisSource(
                client, f"{socket.gethostname()}-{secrets.token_hex(6)}", lease_s=settings.telemetry_session_s
            )
            yield source, RedisDeadLetters(client, settings.events_redis_bytes_max)
        finally:
            await client.close()
        return
    # Only who uses Kafka needs its client
    try:
        from telemetry.kafka.dlq import KafkaDeadLetters
        from telemetry.kafka.source import KafkaSource
        from telemetry.kafka.transport import (
            KafkaUnreachable,
            TopicMissing,
            connection_options,
            ensure_topic,
            limit_logs,
        )
    except ImportError as error:
        raise SourceUnavailable(f"events travel by Kafka: pip install 'stream-gw[kafka]' ({error})") from None
    limit_logs()
    try:
        for topic in (settings.events_topic, settings.telemetry_dlq_topic):
            await ensure_topic(settings, topic)
    except (KafkaUnreachable, TopicMissing) as error:
        raise SourceUnavailable(f"Kafka at {settings.kafka_servers}: {error}") from error
    options = connection_options(settings)
    kafka = KafkaSource(
        options,
        settings.events_topic,
        settings.telemetry_group,
        session_s=settings.telemetry_session_s,
        on_expired=metrics.count_expired,
    )
    dead_letters = KafkaDeadLetters(options, settings.telemetry_dlq_topic)
    try:
        yield kafka, dead_letters
    finally:
        await dead_letters.close()


async def serve(settings: TelemetrySettings, on_ready: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT. ``on_ready`` gets the HTTP API's URL once the process has joined the group.

    Raises StoreUnavailable and StoreRefused when ClickHouse is out of reach or not ours at the start.
    """
    if not settings.clickhouse:
        raise BadRequest(
            "say where events go: STREAM_GW_CLICKHOUSE=http://user:password@host:8123/database, "
            "or chdb:///folder for the engine inside this process"
        )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    clock, random = HostClock(), HostRandom()
    store = Store(settings.clickhouse, settings.clickhouse_reader, clock=clock, random=random)
    metrics = ConsumerMetrics()
    policy = BlockPolicy(settings.telemetry_block_rows, settings.telemetry_block_mb << 20, settings.telemetry_linger_s)
    ready = asyncio.Event()
    try:
        await store.open()
        await store.set_retention(
            settings.telemetry_raw_days, settings.telemetry_rollup_days, settings.telemetry_content_days
        )
        async with _open_log(settings, metrics) as (source, dead_letters):
            consumer = Consumer(source, store, dead_letters, policy, metrics, settings.telemetry_drain_s, random)
            token = settings.telemetry_token.get_secret_value()
            port, host = settings.telemetry_port, settings.telemetry_host
            kept_days = settings.telemetry_rollup_days
            settled = partial(open_settled, settings.redis_url)
            queries = {**QUERIES, **SAVED}
            async with api(store, metrics, queries, ready.is_set, token, port, host, kept_days, settled) as url:

                def joined() -> None:
                    ready.set()
                    on_ready(url)

                progress = asyncio.create_task(report_progress(consumer, store, clock, random, EVERY_S))
                try:
                    await consumer.run(stop, joined)
                finally:
                    progress.cancel()
                    await asyncio.gather(progress, return_exceptions=True)
    finally:
        await store.close()


async def dlq(
    settings: TelemetrySettings, verb: str, count: int, ids: Sequence[str], as_json: bool, say: Callable[[str], None]
) -> None:
    """List or replay dead letters, for ``stream-gw telemetry dlq``."""
    async with _open_log(settings, ConsumerMetrics()) as (_, dead_letters):
        if verb == "replay":
            replayed = await dead_letters.replay(count, ids)
            say(json.dumps({"replayed": replayed}) if as_json else f"{replayed} replayed")
            return
        letters = await dead_letters.waiting(count)
        if as_json:
            say(json.dumps([letter.shown() for letter in letters]))
            return
        for letter in letters:
            shown = letter.shown()
            value = str(shown["value"])
            say(f"{shown['id']}\n  {shown['reason']}\n  {value[:200]}{'…' if len(value) > 200 else ''}")
        if not letters:
            say("no dead letters")


def run(settings: TelemetrySettings, on_ready: Callable[[str], None]) -> None:
    """Run the telemetry process on its own event loop until SIGTERM."""
    # A block is tens of thousands of objects without a cycle: looking for some halves the rate
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, on_ready))
