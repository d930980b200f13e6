"""Checks of ``stream-gw doctor`` for events: the transport, and the spool for outages."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Protocol

from stream_fabric.process.settings import EmitSettings
from telemetry.emit.open import no_spool_advice


class Report(Protocol):
    """Receives the result of each check."""

    def ok(self, what: str) -> None: ...

    def missing(self, what: str, remedy: str, *, needed: bool = True) -> None: ...


async def check_events(report: Report, settings: EmitSettings) -> None:
    """Check Kafka and the spool, if the settings name them."""
    if settings.events == "kafka":
        await _check_kafka(report, settings)
    if settings.events_spool:
        _check_spool(report, Path(settings.events_spool), settings.events_spool_bytes_max)
    elif settings.events == "kafka":
        report.missing("a spool for events", no_spool_advice(settings), needed=False)


async def _check_kafka(report: Report, settings: EmitSettings) -> None:
    try:
        from telemetry.kafka.transport import KafkaUnreachable, TopicMissing, ensure_topic, limit_logs
    except ModuleNotFoundError:
        report.missing("aiokafka, for events by Kafka", "pip install 'stream-gw[kafka]'")
        return
    limit_logs()
    topic = settings.events_topic
    try:
        await ensure_topic(settings.model_copy(update={"telemetry_create_topics": False}), topic)
    except KafkaUnreachable as error:
        report.missing("Kafka, for events", str(error))
    except TopicMissing as error:
        report.missing(f"Kafka's topic {topic}", str(error), needed=not settings.telemetry_create_topics)
    except ValueError as error:
        report.missing("usable settings of Kafka", str(error))
    else:
        report.ok(f"Kafka at {settings.kafka_servers} answers, and has the topic {topic}")


def _check_spool(report: Report, folder: Path, bytes_max: int) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        report.missing(
            f"a spool for events in {folder}", f"{there} cannot be written: let it be, or set STREAM_GW_EVENTS_SPOOL"
        )
        return
    free = shutil.disk_usage(there).free
    if free < bytes_max:
        report.missing(
            f"room for the spool in {folder}: {free >> 20} MiB are free, and each process may hold {bytes_max >> 20}",
            "give the disk more, or lower STREAM_GW_EVENTS_SPOOL_BYTES_MAX",
            needed=False,
        )
    else:
        report.ok(f"a spool for events, {folder}, with {free >> 20} MiB free")
