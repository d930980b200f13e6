"""What ``stream-gw doctor`` looks at of telemetry: whether events can leave, and where they wait while they cannot."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from stream_fabric.settings import EmitSettings
from telemetry.emit import without_spool


class Report(Protocol):
    def ok(self, what: str) -> None: ...

    def missing(self, what: str, remedy: str, *, needed: bool = True) -> None: ...


async def check_events(report: Report) -> None:
    """As the environment sets them."""
    given: dict[str, Any] = {}
    try:
        settings = EmitSettings(**given)
    except ValidationError as error:
        said = ("_".join(["STREAM_GW", *map(str, item["loc"])]).upper() + f": {item['msg']}" for item in error.errors())
        report.missing("usable settings of events", "; ".join(said))
        return
    if settings.events == "kafka":
        await _kafka(report, settings)
    if settings.events_spool:
        _spool(report, Path(settings.events_spool), settings.events_spool_bytes_max)
    elif settings.events == "kafka":
        report.missing("a spool for events", without_spool(settings), needed=False)


async def _kafka(report: Report, settings: EmitSettings) -> None:
    try:
        from telemetry.kafka import KafkaUnreachable, TopicMissing, ensure_topic, limit_logs
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


def _spool(report: Report, folder: Path, bytes_max: int) -> None:
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
