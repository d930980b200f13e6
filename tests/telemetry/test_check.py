"""The checks of ``stream-gw doctor`` for events."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stream_fabric.process.settings import EmitSettings
from telemetry.emit.check import check_events
from tests.gateway.processes import run_cli
from tests.telemetry.test_transports import make_topic


@dataclass
class Noted:
    fine: list[str] = field(default_factory=list)
    lacks: list[tuple[str, str, bool]] = field(default_factory=list)

    def ok(self, what: str) -> None:
        self.fine.append(what)

    def missing(self, what: str, remedy: str, *, needed: bool = True) -> None:
        self.lacks.append((what, remedy, needed))


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("STREAM_GW_")]:
        monkeypatch.delenv(name)


async def checked(monkeypatch: pytest.MonkeyPatch, **settings: object) -> Noted:
    for name, value in settings.items():
        monkeypatch.setenv(f"STREAM_GW_{name.upper()}", str(value))
    noted = Noted()
    await check_events(noted, EmitSettings())
    return noted


async def test_events_by_redis_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await checked(monkeypatch) == Noted()


async def test_a_kafka_that_answers_and_a_spool_are_well(
    kafka_servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await make_topic(kafka_servers)
    by_kafka = {"events": "kafka", "kafka_servers": kafka_servers, "events_topic": topic}
    folder = tmp_path / "not" / "yet"
    noted = await checked(monkeypatch, **by_kafka, events_spool=folder, events_spool_bytes_max=1 << 20)
    assert noted.lacks == []
    assert f"topic {topic}" in noted.fine[0] and str(folder) in noted.fine[1]
    assert not folder.exists()

    noted = await checked(monkeypatch, events_topic="missing", events_spool="")
    assert [(what, needed) for what, _, needed in noted.lacks] == [
        ("Kafka's topic missing", True),
        ("a spool for events", False),
    ]
    # It looks, and makes nothing
    noted = await checked(monkeypatch, telemetry_create_topics="true")
    again = await checked(monkeypatch)
    for found in (noted, again):
        assert (found.lacks[0][0], found.lacks[0][2]) == ("Kafka's topic missing", False)


async def test_a_spool_that_cannot_be_or_is_larger_than_its_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    noted = await checked(monkeypatch, events_spool=tmp_path / "file" / "spool")
    ((what, remedy, needed),) = noted.lacks
    assert needed and "cannot be written" in remedy
    noted = await checked(monkeypatch, events_spool=tmp_path, events_spool_bytes_max=1 << 40)
    ((what, remedy, needed),) = noted.lacks
    assert not needed and "room for the spool" in what and "STREAM_GW_EVENTS_SPOOL_BYTES_MAX" in remedy


def test_settings_that_do_not_go_together_are_told_once() -> None:
    done = run_cli("doctor", STREAM_GW_EVENTS="kafka")
    assert done.returncode == 1
    assert done.stdout.count("STREAM_GW_EVENTS=kafka needs brokers; set STREAM_GW_KAFKA_SERVERS") == 1


def test_the_command_tells_it() -> None:
    env = {"STREAM_GW_EVENTS": "kafka", "STREAM_GW_KAFKA_SERVERS": "127.0.0.1:1"}
    done = run_cli("doctor", **env)
    assert done.returncode == 1
    assert "127.0.0.1:1 refuses connections" in done.stdout and "STREAM_GW_EVENTS_SPOOL" in done.stdout
    assert "Traceback" not in done.stderr, done.stderr
