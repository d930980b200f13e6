"""Kafka behind TLS and logins: all that speaks to it, and what is said when a door stays shut."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stream_fabric.process.host import HostClock
from stream_fabric.process.settings import EventSettings
from telemetry.consume.blocks import Block
from telemetry.consume.dlq import Dead
from telemetry.emit.record import Part, Record
from telemetry.emit.transport import TransportUnavailable
from telemetry.kafka import transport as kafka_module
from telemetry.kafka.dlq import KafkaDeadLetters
from telemetry.kafka.source import KafkaSource
from telemetry.kafka.transport import KafkaTransport, connection_options, ensure_topic
from tests.gateway.processes import run_cli
from tests.support.kafka import Guarded, KafkaServer
from tests.support.tls import Authority
from tests.support.waiting import eventually
from tests.telemetry.test_transports import make_topic, records, values

pytestmark = pytest.mark.platform

USER, PASSWORD, SCRAM_PASSWORD = "stream-gw", "plain secret", "scram-secret"


@dataclass(frozen=True)
class Place:
    server: KafkaServer
    ours: Authority
    others: Authority
    """Whom the broker does not trust, nor we."""

    def options(self, name: str) -> dict[str, Any]:
        """Connection options of one listener, with all credentials that it needs."""
        ca = {"kafka_tls": True, "kafka_ca": str(self.ours.ca)}
        login = {**ca, "kafka_servers": f"127.0.0.1:{self.server.login_port}", "kafka_user": USER}
        match name:
            case "certificate":
                client = self.ours.client
                shown = {"kafka_cert": str(client.cert), "kafka_key": str(client.key)}
                return {**ca, **shown, "kafka_servers": f"127.0.0.1:{self.server.mutual_port}"}
            case "PLAIN":
                return {**login, "kafka_sasl": name, "kafka_password": PASSWORD}
            case "SCRAM-SHA-512":
                return {**login, "kafka_sasl": name, "kafka_password": SCRAM_PASSWORD}
        raise AssertionError(name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One broker with all doors."""
    folder: Path = tmp_path_factory.mktemp("kafka-tls")
    ours, others = Authority(folder), Authority(folder, "stranger")
    with KafkaServer(Guarded(ours, USER, PASSWORD, SCRAM_PASSWORD)) as server:
        yield Place(server, ours, others)


@pytest.fixture(autouse=True)
async def _close_connections() -> AsyncIterator[None]:
    """Abort the connections that aiokafka left to close by themselves: a TLS close waits 30 s for its answer."""
    yield
    loop = asyncio.get_running_loop()

    def open_transports() -> list[asyncio.Transport]:
        transports = [found for found in gc.get_objects() if issubclass(type(found), asyncio.Transport)]
        return [t for t in transports if getattr(t, "_loop", None) is loop and getattr(t, "_sock", None) is not None]

    for transport in open_transports():
        transport.abort()
    await eventually(lambda: not open_transports(), "connections to end")


def settings(topic: str, options: dict[str, Any]) -> EventSettings:
    return EventSettings(events="kafka", events_topic=topic, **options)


@pytest.mark.parametrize("way", ["certificate", "PLAIN", "SCRAM-SHA-512"])
async def test_producer_consumer_and_dead_letters_come_in(place: Place, way: str) -> None:
    topic, dead_topic = await make_topic(place.server.servers), await make_topic(place.server.servers)
    told = settings(topic, place.options(way))
    await ensure_topic(told, topic)
    transport = KafkaTransport(told, HostClock())
    sent = records(60)
    await transport.send(sent)
    await transport.close()

    source = KafkaSource(connection_options(told), topic, f"group-{topic}")
    parts: list[Part] = []

    async def revoked(gone: Collection[Part]) -> None: ...

    await source.start(parts.extend, revoked)
    await eventually(lambda: len(parts) == 3, "the partitions to be ours")
    for part in parts:
        position = await source.position(part)
        source.seek(part, position.begin)
    read: list[Record] = []
    while len(read) < len(sent):
        for found in (await source.read(parts, 0.2)).values():
            read += found
    assert sorted(record.value or b"" for record in read) == sorted(values(sent))
    await source.commit(parts[0], 0, Block(0, 5, 1))
    assert (await source.position(parts[0])).claim == Block(0, 5, 1)
    await source.close()

    letters = KafkaDeadLetters(connection_options(told), dead_topic)
    try:
        await letters.put("block", [Dead("id-1", topic, 0, 7, 1, "not JSON", b"k", b"no event", ())])
        assert [letter.id for letter in await letters.waiting(10)] == ["id-1"]
        assert await letters.replay(10, []) == 1
        assert await letters.waiting(10) == []
    finally:
        await letters.close()


def _wrong(place: Place, what: str) -> dict[str, Any]:
    server = place.server
    scram, plain, certificate = (place.options(name) for name in ("SCRAM-SHA-512", "PLAIN", "certificate"))
    stranger = place.others.client
    match what:
        case "password by PLAIN":
            return plain | {"kafka_password": SCRAM_PASSWORD}
        case "password by SCRAM":
            return scram | {"kafka_password": PASSWORD}
        case "user":
            return scram | {"kafka_user": "nobody"}
        case "mechanism":
            return scram | {"kafka_sasl": "SCRAM-SHA-256"}
        case "authority":
            return plain | {"kafka_ca": str(place.others.ca)}
        case "the system's authorities":
            return plain | {"kafka_ca": ""}
        case "host name":
            return plain | {"kafka_servers": f"localhost:{server.login_port}"}
        case "advertised name":
            return {"kafka_servers": f"127.0.0.1:{server.misnamed_port}", **_tls(place)}
        case "no certificate":
            return certificate | {"kafka_cert": "", "kafka_key": ""}
        case "a stranger's certificate":
            return certificate | {"kafka_cert": str(stranger.cert), "kafka_key": str(stranger.key)}
        case "no TLS":
            return {"kafka_servers": f"127.0.0.1:{server.mutual_port}"}
        case "TLS to the open door":
            return {"kafka_servers": server.servers, **_tls(place)}
        case "no login":
            return {"kafka_servers": f"127.0.0.1:{server.login_port}", **_tls(place)}
        case "nobody there":
            return {"kafka_servers": "127.0.0.1:1"}
        case "no such host":
            return {"kafka_servers": "kafka.invalid:9092"}
    raise AssertionError(what)


def _tls(place: Place) -> dict[str, Any]:
    return {"kafka_tls": True, "kafka_ca": str(place.ours.ca)}


WRONG = {
    "password by PLAIN": ("refuses the user 'stream-gw' by PLAIN", "STREAM_GW_KAFKA_PASSWORD"),
    "password by SCRAM": ("refuses the user 'stream-gw' by SCRAM-SHA-512", "STREAM_GW_KAFKA_PASSWORD"),
    "user": ("refuses the user 'nobody'", "STREAM_GW_KAFKA_USER"),
    "mechanism": ("has no login by SCRAM-SHA-256", "STREAM_GW_KAFKA_SASL"),
    "authority": ("is of an authority that is not trusted", "STREAM_GW_KAFKA_CA"),
    "the system's authorities": ("trusted are the system's", "STREAM_GW_KAFKA_CA"),
    "host name": ("the certificate of localhost:", "for another name", "STREAM_GW_KAFKA_SERVERS"),
    "advertised name": ("come to localhost:", "for another name", "advertised.listeners"),
    "no certificate": ("client certificate|our certificate", "STREAM_GW_KAFKA_CERT"),
    "a stranger's certificate": ("our certificate|client certificate", "STREAM_GW_KAFKA_CERT"),
    "no TLS": ("closed the connection", "STREAM_GW_KAFKA_TLS=true"),
    "TLS to the open door": ("does not speak TLS",),
    "no login": ("STREAM_GW_KAFKA_SASL",),
    "nobody there": ("127.0.0.1:1 refuses connections",),
    "no such host": ("kafka.invalid:9092: no such host", "STREAM_GW_KAFKA_SERVERS"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_shut_door_is_named_with_the_remedy(place: Place, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The admin client asks an advertised broker again and again until its time is over
    monkeypatch.setattr(kafka_module, "START_S_MAX", 2.0)
    told = settings("any", _wrong(place, what))
    transport = KafkaTransport(told, HostClock())
    with pytest.raises(TransportUnavailable) as shut:
        await transport.send(records(2))
    await transport.close()
    assert shut.value.unsent == records(2)
    for part in WRONG[what]:
        assert any(one in str(shut.value) for one in part.split("|")), str(shut.value)
    assert PASSWORD not in str(shut.value) and SCRAM_PASSWORD not in str(shut.value)


@pytest.mark.parametrize("flags", [("telemetry",), ("telemetry", "dlq", "list")], ids=["consumer", "dead letters"])
async def test_the_command_says_it_in_a_line_and_ends(place: Place, flags: tuple[str, ...], tmp_path: Path) -> None:
    wrong = _wrong(place, "password by SCRAM")
    env = {f"STREAM_GW_{name.upper()}": str(value) for name, value in wrong.items()}
    env |= {"STREAM_GW_EVENTS": "kafka", "STREAM_GW_CLICKHOUSE": f"chdb://{tmp_path / os.urandom(4).hex()}"}
    done = await asyncio.to_thread(run_cli, *flags, **env)
    assert done.returncode == 1
    assert "refuses the user 'stream-gw'" in done.stderr and "STREAM_GW_KAFKA_PASSWORD" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
