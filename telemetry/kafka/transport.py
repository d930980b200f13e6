"""Events by Kafka. The one module that knows aiokafka, with what every client of ours needs: how to reach the brokers,
a topic that is there, and a log that an outage does not flood."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, for_code

from stream_fabric.limits import EVENTS_BATCH_BYTES_MAX
from stream_fabric.settings import EventSettings
from telemetry.kafka_trouble import trouble
from telemetry.transport import Record, TransportUnavailable

log = logging.getLogger(__name__)

START_S_MAX = 10.0
_REQUEST_S_MAX = 30.0
_BACKOFF_MS = 200
_SAY_S = 30.0
_CLOSE_S_MAX = 1.0
_ALREADY_EXISTS = 36
_BATCH_BYTES_MAX = EVENTS_BATCH_BYTES_MAX * 3 // 2
"""Of one partition's: with keys and headers it must still hold a whole batch, as each is sent as one."""


class TopicMissing(Exception):
    """Names the topic and the remedy."""


class KafkaUnreachable(Exception):
    """Names the broker, what is wrong and the setting that mends it."""


def connection_options(settings: EventSettings) -> dict[str, Any]:
    """What every aiokafka client takes to reach the brokers. Raises ValueError for files that are not what they should
    be."""
    options: dict[str, Any] = {
        "bootstrap_servers": [server.strip() for server in settings.kafka_servers.split(",") if server.strip()],
        "request_timeout_ms": int(_REQUEST_S_MAX * 1000),
        "retry_backoff_ms": _BACKOFF_MS,
        "security_protocol": ("SASL_" if settings.kafka_sasl else "") + ("SSL" if settings.kafka_tls else "PLAINTEXT"),
    }
    if settings.kafka_tls:
        options["ssl_context"] = _tls(settings)
    if settings.kafka_sasl:
        options["sasl_mechanism"] = settings.kafka_sasl
        options["sasl_plain_username"] = settings.kafka_user
        options["sasl_plain_password"] = settings.kafka_password.get_secret_value()
    return options


def _tls(settings: EventSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.kafka_ca or None)
    except OSError as error:
        raise ValueError(
            f"STREAM_GW_KAFKA_CA: {settings.kafka_ca} cannot be read as certificates in PEM form"
        ) from error
    if settings.kafka_cert:
        try:
            # With a password given OpenSSL does not ask the terminal for one
            context.load_cert_chain(settings.kafka_cert, settings.kafka_key, password="")
        except OSError as error:
            raise ValueError(
                f"STREAM_GW_KAFKA_CERT and STREAM_GW_KAFKA_KEY: {settings.kafka_cert} and {settings.kafka_key} are not "
                "a certificate and its key in PEM form, without a passphrase"
            ) from error
    return context


def pace(client: Any) -> None:
    """Let an aiokafka client ask for news of the brokers once in a backoff. By itself it asks again at once for as long
    as a partition has no leader: while no broker answers that takes a fifth of a core, on the loop that serves
    requests."""
    update, loop, asked_at = client._metadata_update, asyncio.get_running_loop(), float("-inf")

    async def paced(*args: Any) -> Any:
        nonlocal asked_at
        await asyncio.sleep(max(0.0, asked_at + _BACKOFF_MS / 1000 - loop.time()))
        try:
            return await update(*args)
        finally:
            asked_at = loop.time()

    client._metadata_update = paced


async def ensure_topic(settings: EventSettings, topic: str) -> None:
    """See to it that a topic is there. Raises TopicMissing or KafkaUnreachable."""
    options = connection_options(settings)
    admin = AIOKafkaAdminClient(**options)
    try:
        async with asyncio.timeout(START_S_MAX):
            await admin.start()
            if topic in await admin.list_topics():
                return
            if not settings.telemetry_create_topics:
                raise TopicMissing(
                    f"Kafka at {settings.kafka_servers} has no topic {topic!r}, or does not show it to us; create it "
                    f"(kafka-topics.sh --create --topic {topic} --partitions 12), or set "
                    "STREAM_GW_TELEMETRY_CREATE_TOPICS=true"
                )
            reply = await admin.create_topics([NewTopic(topic, -1, -1, replica_assignments={})])
            for _, code, *message in reply.topic_errors:
                if code not in (0, _ALREADY_EXISTS):
                    raise TopicMissing(
                        f"Kafka does not let us create the topic {topic!r}: {for_code(code)()} {message}"
                    )
    except (KafkaError, TimeoutError, OSError) as error:
        raise KafkaUnreachable(await trouble(settings, options) or _text(error)) from error
    finally:
        await admin.close()


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


class KafkaTransport:
    """``Transport`` by an idempotent producer: its sequence numbers let nothing arrive twice, however often a batch is
    sent. A producer that has failed a batch is thrown away: its numbers have a gap that brokers refuse."""

    name = "kafka"

    def __init__(self, settings: EventSettings) -> None:
        self._settings = settings
        self._topic = settings.events_topic
        connection_options(settings)  # raises for what cannot work
        self._producer: AIOKafkaProducer | None = None
        limit_logs()

    async def send(self, batch: Sequence[Record]) -> None:
        try:
            producer = self._producer or await self._start()
            partitions = sorted(await producer.partitions_for(self._topic))
        except (KafkaError, KafkaUnreachable, TopicMissing, TimeoutError, OSError) as error:
            raise TransportUnavailable(_text(error), batch) from error
        by_partition: dict[int, list[Record]] = {}
        for record in batch:
            by_partition.setdefault(partitions[crc32(record.key) % len(partitions)], []).append(record)
        results = await asyncio.gather(
            *(self._send_to(producer, partition, records) for partition, records in by_partition.items()),
            return_exceptions=True,
        )
        failed: list[tuple[list[Record], BaseException]] = []
        for records, result in zip(by_partition.values(), results, strict=True):
            if isinstance(result, BaseException):
                failed.append((records, result))
        if failed:
            await self._failed(failed)

    async def _send_to(self, producer: AIOKafkaProducer, partition: int, records: Sequence[Record]) -> None:
        """One record batch, acknowledged. It is tried for as long as it takes."""
        builder = producer.create_batch()
        now_ms = int(time.time() * 1000)
        for record in records:
            added = builder.append(timestamp=now_ms, key=record.key, value=record.value, headers=_headers(record))
            assert added is not None, "a batch holds what the sink sends at once"
        builder.close()
        await (await producer.send_batch(builder, self._topic, partition=partition))

    async def _failed(self, failed: Sequence[tuple[list[Record], BaseException]]) -> None:
        await self._abandon()
        unsent: list[Record] = []
        refused: list[Record] = []
        why = ""
        for records, error in failed:
            if not isinstance(error, KafkaError):
                raise error
            if not isinstance(error, MessageSizeTooLargeError):
                unsent += records
                why = f"{type(error).__name__}: {error}"
            elif len(records) == 1:
                refused += records
            else:
                for record in records:  # which of them is it?
                    try:
                        await self.send([record])
                    except TransportUnavailable as single:
                        unsent += single.unsent
                        refused += single.refused
        if unsent or refused:
            raise TransportUnavailable(why or "too large for the topic's max.message.bytes", unsent, refused)

    async def _start(self) -> AIOKafkaProducer:
        await ensure_topic(self._settings, self._topic)
        producer = AIOKafkaProducer(
            **connection_options(self._settings),
            client_id="stream-gw",
            acks="all",
            enable_idempotence=True,
            compression_type="zstd",
            max_batch_size=_BATCH_BYTES_MAX,
        )
        self._producer = producer
        pace(producer.client)
        try:
            async with asyncio.timeout(START_S_MAX):
                await producer.start()
        except BaseException:
            await self._abandon()
            raise
        return producer

    async def _abandon(self) -> None:
        """End a producer without waiting for what it still has to send, as its own ``stop`` does."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        producer._closed = True
        client, sender = producer.client, producer._sender.sender_task
        client._maybe_wait_metadata = _at_once  # requests that fail now must not wait for news of the brokers
        if sender is not None:
            sender.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S_MAX):
                await client.close()
        if client._md_update_fut is not None and not client._md_update_fut.done():
            client._md_update_fut.set_result(False)
        if sender is not None:
            await asyncio.wait({sender}, timeout=_CLOSE_S_MAX)

    async def close(self) -> None:
        await self._abandon()


async def _at_once() -> None: ...


def _headers(record: Record) -> list[tuple[str, bytes]]:
    headers = [("v", b"%d" % record.v)]
    if len(record.trace_id) == 32:
        span = f"{crc32(record.value):08x}{crc32(record.key) | 1:08x}"
        headers.append(("traceparent", f"00-{record.trace_id}-{span}-01".encode()))
    return headers


# --- its log -------------------------------------------------------------------------------------------------


class Limited(logging.Handler):
    """Passes on one record of each kind in a while; says how many it has kept to itself."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._now = now
        self._kinds: dict[tuple[str, int], tuple[float, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        kind = (record.pathname, record.lineno)
        at, kept = self._kinds.get(kind, (float("-inf"), 0))
        now = self._now()
        if now - at < _SAY_S:
            self._kinds[kind] = (at, kept + 1)
            return
        self._kinds[kind] = (now, 0)
        more = f" (and {kept} like it before)" if kept else ""
        log.log(min(record.levelno, logging.WARNING), "aiokafka: %s%s", record.getMessage(), more)


def limit_logs() -> None:
    """aiokafka tells of an outage a thousand times a second."""
    logger = logging.getLogger("aiokafka")
    if not any(isinstance(handler, Limited) for handler in logger.handlers):
        logger.addHandler(Limited())
        logger.propagate = False
        logger.setLevel(logging.WARNING)
