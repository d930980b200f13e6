"""Transport of events through Kafka, and what every aiokafka client needs: options, topics, and a bounded log.

Some private parts of aiokafka are replaced here (``limit_metadata_requests``, ``keep_sent_batches``,
``end_producer``); ``tests/telemetry/test_kafka_private.py`` fails when a release renames them.
"""

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
from stream_fabric.ports import Clock
from stream_fabric.process.settings import EventSettings
from stream_fabric.stream.ids import spread_of
from telemetry.emit.transport import Record, TransportUnavailable
from telemetry.kafka.trouble import diagnose

log = logging.getLogger(__name__)

START_S_MAX = 10.0
_REQUEST_S_MAX = 30.0
_BACKOFF_MS = 200
_SAY_S = 30.0
_CLOSE_S_MAX = 1.0
_ALREADY_EXISTS = 36
_BATCH_BYTES_MAX = EVENTS_BATCH_BYTES_MAX * 3 // 2
"""Batch size of a partition. A whole batch of the sink must fit with keys and headers."""


class TopicMissing(Exception):
    """A topic does not exist or cannot be created. The message names the topic, and the remedy if we know one."""


class KafkaUnreachable(Exception):
    """No connection to Kafka. The message names the broker, the problem and the setting to change."""


def connection_options(settings: EventSettings) -> dict[str, Any]:
    """Return the options that every aiokafka client needs to connect. Raises ValueError for unusable files."""
    options: dict[str, Any] = {
        "bootstrap_servers": [server.strip() for server in settings.kafka_servers.split(",") if server.strip()],
        "request_timeout_ms": int(_REQUEST_S_MAX * 1000),
        "retry_backoff_ms": _BACKOFF_MS,
        "security_protocol": ("SASL_" if settings.kafka_sasl else "") + ("SSL" if settings.kafka_tls else "PLAINTEXT"),
    }
    if settings.kafka_tls:
        options["ssl_context"] = _tls_context(settings)
    if settings.kafka_sasl:
        options["sasl_mechanism"] = settings.kafka_sasl
        options["sasl_plain_username"] = settings.kafka_user
        options["sasl_plain_password"] = settings.kafka_password.get_secret_value()
    return options


def _tls_context(settings: EventSettings) -> ssl.SSLContext:
    """Load the certificates that the settings name. Raises ValueError."""
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


def limit_metadata_requests(client: Any) -> None:
    """Limit an aiokafka client to one metadata request in each backoff.

    Without it the client repeats the request at once while a partition has no leader. During an outage that takes a
    fifth of a core on the loop that serves requests.
    """
    update, loop, asked_at = client._metadata_update, asyncio.get_running_loop(), float("-inf")

    async def paced(*args: Any) -> Any:
        nonlocal asked_at
        await asyncio.sleep(max(0.0, asked_at + _BACKOFF_MS / 1000 - loop.time()))
        try:
            return await update(*args)
        finally:
            asked_at = loop.time()

    client._metadata_update = paced


def keep_sent_batches(producer: AIOKafkaProducer) -> None:
    """Let no batch expire that may have arrived.

    aiokafka fails a batch that waits longer than a request's time for a partition without a leader, also when a broker
    has written it and died before its reply. Sent again by another producer, its events would be there twice.
    """
    accumulator = producer._message_accumulator
    reenqueue = accumulator.reenqueue

    def kept(batch: Any) -> None:
        batch._ttl = float("inf")
        reenqueue(batch)

    accumulator.reenqueue = kept


async def ensure_topic(settings: EventSettings, topic: str) -> None:
    """Check that a topic exists, or create it. Raises TopicMissing or KafkaUnreachable."""
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
        raise KafkaUnreachable(await diagnose(settings, options) or _error_text(error)) from error
    finally:
        await admin.close()


def _error_text(error: BaseException) -> str:
    return str(error) or type(error).__name__


class KafkaTransport:
    """``Transport`` by an idempotent producer: its sequence numbers let nothing arrive twice, however often a batch is
    sent. A producer that has failed a batch is thrown away: its numbers have a gap that brokers refuse.
    """

    name = "kafka"

    def __init__(self, settings: EventSettings, clock: Clock) -> None:
        self._clock = clock
        self._settings = settings
        self._topic = settings.events_topic
        connection_options(settings)  # raises for what cannot work
        self._producer: AIOKafkaProducer | None = None
        limit_logs()

    async def send(self, batch: Sequence[Record]) -> None:
        try:
            producer = self._producer or await self._start_producer()
            partitions = sorted(await producer.partitions_for(self._topic))
        except (KafkaError, KafkaUnreachable, TopicMissing, TimeoutError, OSError) as error:
            raise TransportUnavailable(_error_text(error), batch) from error
        by_partition: dict[int, list[Record]] = {}
        for record in batch:
            by_partition.setdefault(partitions[spread_of(record.key) % len(partitions)], []).append(record)
        results = await asyncio.gather(
            *(self._send_to(producer, partition, records) for partition, records in by_partition.items()),
            return_exceptions=True,
        )
        failed: list[tuple[list[Record], BaseException]] = []
        for records, result in zip(by_partition.values(), results, strict=True):
            if isinstance(result, BaseException):
                failed.append((records, result))
        if failed:
            await self._handle_failed(failed)

    async def _send_to(self, producer: AIOKafkaProducer, partition: int, records: Sequence[Record]) -> None:
        """Send records to a partition as one record batch, and wait for its acknowledgement without a time limit."""
        builder = producer.create_batch()
        now_ms = self._clock.now_us() // 1000
        for record in records:
            added = builder.append(timestamp=now_ms, key=record.key, value=record.value, headers=_headers(record))
            assert added is not None, "a batch holds what the sink sends at once"
        builder.close()
        await (await producer.send_batch(builder, self._topic, partition=partition))

    async def _handle_failed(self, failed: Sequence[tuple[list[Record], BaseException]]) -> None:
        """End the producer, and resend a too large batch record by record. Raises TransportUnavailable for the rest."""
        await self._end_producer()
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

    async def _start_producer(self) -> AIOKafkaProducer:
        await ensure_topic(self._settings, self._topic)
        producer = AIOKafkaProducer(
            **connection_options(self._settings),
            client_id="stream-gw",
            acks="all",
            enable_idempotence=True,
            compression_type="zstd",
            max_batch_size=_BATCH_BYTES_MAX,
        )
        keep_sent_batches(producer)
        await start_producer(producer)
        self._producer = producer
        return producer

    async def _end_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await end_producer(producer)

    async def close(self) -> None:
        await self._end_producer()


async def start_producer(producer: AIOKafkaProducer) -> None:
    """Start a producer within ``START_S_MAX``, or end it. Raises KafkaError and OSError."""
    limit_metadata_requests(producer.client)
    try:
        async with asyncio.timeout(START_S_MAX):
            await producer.start()
    except BaseException:  # a cancel, too, must leave no connection behind
        await end_producer(producer)
        raise


async def end_producer(producer: AIOKafkaProducer) -> None:
    """Close a producer at once; its own ``stop`` waits for everything that it still has to send."""
    producer._closed = True
    client, sender = producer.client, producer._sender.sender_task
    client._maybe_wait_metadata = _no_wait  # requests that fail now must not wait for news of the brokers
    if sender is not None:
        sender.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_S_MAX):
            await client.close()
    if client._md_update_fut is not None and not client._md_update_fut.done():
        client._md_update_fut.set_result(False)
    if sender is not None:
        await asyncio.wait({sender}, timeout=_CLOSE_S_MAX)


async def _no_wait() -> None:
    """Stand in for aiokafka's wait for metadata, and return at once."""


def _headers(record: Record) -> list[tuple[str, bytes]]:
    """Return Kafka headers: the schema version, and the W3C ``traceparent`` if the event has a trace."""
    headers = [("v", b"%d" % record.v)]
    if len(record.trace_id) == 32:
        span = f"{crc32(record.value):08x}{crc32(record.key) | 1:08x}"
        headers.append(("traceparent", f"00-{record.trace_id}-{span}-01".encode()))
    return headers


# --- its log -------------------------------------------------------------------------------------------------


class LogRateLimit(logging.Handler):
    """Passes on one log record of each kind per period, with the number of those left out."""

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
    """Limit the log lines of aiokafka, which writes a thousand a second during an outage."""
    logger = logging.getLogger("aiokafka")
    if not any(isinstance(handler, LogRateLimit) for handler in logger.handlers):
        logger.addHandler(LogRateLimit())
        logger.propagate = False
        logger.setLevel(logging.WARNING)
