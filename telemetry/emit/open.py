"""Opens a process's sink as its settings say."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Protocol

from prometheus_client import CollectorRegistry

from stream_fabric.events import NoEvents
from stream_fabric.ports import Clock, EventSink, Random
from stream_fabric.process.settings import EmitSettings
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from telemetry.emit.delivery import SinkPolicy
from telemetry.emit.redis import RedisTransport
from telemetry.emit.sink import Sink
from telemetry.emit.spool import Spool
from telemetry.emit.transport import Transport

log = logging.getLogger(__name__)

_EVENT_BYTES_TYPICAL = 1200
"""Typical size of an event in memory, with its overhead."""


class OpenSink(EventSink, Protocol):
    """A sink to use as an async context manager."""

    @property
    def bills_at_risk(self) -> bool:
        """True when nearly no room for billing events is left."""

    async def __aenter__(self) -> EventSink: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _NoSink(NoEvents):
    """Sink for ``STREAM_GW_EVENTS=off``; it discards events."""

    bills_at_risk = False

    async def __aenter__(self) -> EventSink:
        return self

    async def __aexit__(self, *exc: object) -> None: ...


def open_sink(
    settings: EmitSettings, client: RedisClient, registry: CollectorRegistry, host: Clock, clock: Clock, random: Random
) -> OpenSink:
    """Make the process's sink. Its transport need not be reachable yet.

    ``host``: the host's clock, which file times use. ``clock``: the fabric's, which events and their records use.

    Raises ValueError for settings that cannot work on this machine.
    """
    if settings.events == "off":
        return _NoSink()
    transport = _transport(settings, client, clock, random)
    spool = None
    if settings.events_spool:
        spool = Spool(Path(settings.events_spool), settings.events_spool_bytes_max, host, random)
    elif settings.events == "kafka":
        log.warning("events go to Kafka without a spool: %s", no_spool_advice(settings))
    policy = SinkPolicy(memory_bytes_max=settings.events_memory_bytes_max)
    return Sink(transport, spool, policy, host, random, registry)


def no_spool_advice(settings: EmitSettings) -> str:
    """Describe the consequence of a missing spool, and the remedy."""
    about = settings.events_memory_bytes_max // _EVENT_BYTES_TYPICAL
    return (
        f"while Kafka is away {settings.events_memory_bytes_max >> 20} MiB of events wait in memory, about {about:,}; "
        "further events are lost, billing events too. Set STREAM_GW_EVENTS_SPOOL to a folder on disk, in a container "
        "on a volume"
    )


def _transport(settings: EmitSettings, client: RedisClient, clock: Clock, random: Random) -> Transport:
    if settings.events == "redis":
        return RedisTransport(RedisEvents(client, bytes_max=settings.events_redis_bytes_max), random)
    try:
        from telemetry.kafka.transport import KafkaTransport
    except ModuleNotFoundError as error:
        raise ValueError("STREAM_GW_EVENTS=kafka needs aiokafka; pip install 'stream-gw[kafka]'") from error
    return KafkaTransport(settings, clock)
