"""Contract of every transport of events: Redis, Kafka and the tests' own."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiokafka.client
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.process.settings import EventSettings
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from telemetry.consume.dlq import Dead
from telemetry.emit.redis import RedisTransport
from telemetry.emit.transport import Record, Transport, TransportUnavailable
from telemetry.kafka.dlq import KafkaDeadLetters
from telemetry.kafka.transport import KafkaTransport, LogRateLimit, TopicMissing, connection_options, ensure_topic
from tests.support.kafka import KafkaServer
from tests.support.proxy import Proxy
from tests.support.redis import RedisServer
from tests.support.waiting import eventually
from tests.telemetry.fake import MemoryTransport

TRACE = "0af7651916cd43dd8448eb211c80319c"


@dataclass
class Carrier:
    """A transport and its other end."""

    transport: Transport
    arrived: Callable[[], Awaitable[list[bytes]]]
    away: Callable[[], None]
    """Nothing is answered any more."""
    back: Callable[[], None]
    cut: Callable[[], None]
    """Soon a connection ends, in the middle of something."""


def records(count: int, name: str = "event", size: int = 300, kept: bool = False) -> list[Record]:
    return [
        Record(f"{name}-{n}-".encode() + b"x" * size, f"key-{n % 17}".encode(), "request", kept, TRACE)
        for n in range(count)
    ]


def values(batch: Sequence[Record]) -> list[bytes]:
    return [record.value for record in batch]


@pytest.fixture
async def memory() -> Carrier:
    transport = MemoryTransport()

    async def arrived() -> list[bytes]:
        return transport.values

    return Carrier(transport, arrived, transport.well.clear, transport.well.set, lambda: None)


@pytest.fixture
async def redis() -> AsyncIterator[Carrier]:
    with RedisServer() as server:
        async with Proxy.before(server.port) as proxy:
            client = RedisClient(proxy.url, timeout_s=0.5)
            await client.start()
            events = RedisEvents(client)

            async def arrived() -> list[bytes]:
                return [record for _, record in await events.read(0, 100_000)]

            yield Carrier(
                RedisTransport(events, HostRandom()),
                arrived,
                proxy.pause,
                proxy.resume,
                lambda: proxy.cut_after_bytes(random.randrange(1, 30)),
            )
            await client.close()


def settings(servers: str, topic: str, **more: object) -> EventSettings:
    return EventSettings(events="kafka", kafka_servers=servers, events_topic=topic, **more)  # type: ignore[arg-type]


async def make_topic(servers: str, **config: str) -> str:
    name = f"events-{os.urandom(4).hex()}"
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    await admin.create_topics([NewTopic(name, 3, 1, topic_configs=config)])
    async with asyncio.timeout(30):
        while name not in await admin.list_topics():  # the broker follows the controller that has answered
            await asyncio.sleep(0.05)
    await admin.close()
    return name


async def read_topic(servers: str, topic: str) -> list[tuple[int, bytes, bytes, dict[str, bytes]]]:
    """All that is in a topic: partition, key, value, headers."""
    consumer = AIOKafkaConsumer(bootstrap_servers=servers, enable_auto_commit=False)
    await consumer.start()
    try:
        partitions = [TopicPartition(topic, n) for n in range(3)]
        consumer.assign(partitions)
        await consumer.seek_to_beginning()
        ends = await consumer.end_offsets(partitions)
        read: list[tuple[int, bytes, bytes, dict[str, bytes]]] = []
        while len(read) < sum(ends.values()):
            for got in (await consumer.getmany(timeout_ms=200)).values():
                read += [(one.partition, one.key, one.value, dict(one.headers)) for one in got]
        return read
    finally:
        await consumer.stop()


@pytest.fixture
async def kafka(kafka_server: KafkaServer) -> AsyncIterator[Carrier]:
    topic = await make_topic(kafka_server.servers)
    async with Proxy.before(kafka_server.behind_port, listen=kafka_server.proxy_port) as proxy:
        transport = KafkaTransport(settings(f"127.0.0.1:{proxy.port}", topic), HostClock())

        async def arrived() -> list[bytes]:
            return [value for _, _, value, _ in await read_topic(kafka_server.servers, topic)]

        yield Carrier(
            transport,
            arrived,
            proxy.pause,
            proxy.resume,
            lambda: proxy.cut_after_bytes(random.randrange(1, 120)),
        )
        await transport.close()


@pytest.fixture(params=["memory", "redis", "kafka"])
def carrier(request: pytest.FixtureRequest) -> Carrier:
    made: Carrier = request.getfixturevalue(request.param)
    return made


async def test_what_is_sent_has_arrived(carrier: Carrier) -> None:
    first, second = records(500, "first"), records(3, "second", kept=True)
    await carrier.transport.send(first)
    assert sorted(await carrier.arrived()) == sorted(values(first))
    await carrier.transport.send(second)
    assert sorted(await carrier.arrived()) == sorted(values([*first, *second]))


async def test_a_large_event_arrives(carrier: Carrier) -> None:
    large = records(1, size=500 << 10)
    await carrier.transport.send(large)
    assert await carrier.arrived() == values(large)


async def test_a_send_lasts_as_long_as_nothing_is_acknowledged(carrier: Carrier) -> None:
    await carrier.transport.send(records(1, "before"))
    carrier.away()
    late = records(200, "late")
    sending = asyncio.create_task(carrier.transport.send(late))
    done, _ = await asyncio.wait({sending}, timeout=1.2)
    assert not done
    carrier.back()
    await asyncio.wait_for(sending, 10)
    arrived = await carrier.arrived()
    assert sorted(arrived) == sorted(values([*records(1, "before"), *late]))


async def test_a_lost_acknowledgement_doubles_nothing(carrier: Carrier) -> None:
    sent = records(1, "before")
    await carrier.transport.send(sent)
    for number in range(12):
        batch = records(20, f"batch{number}")
        sent += batch
        carrier.cut()
        await asyncio.wait_for(carrier.transport.send(batch), 10)
    assert sorted(await carrier.arrived()) == sorted(values(sent))


async def test_a_send_that_is_cancelled_leaves_nothing_behind(carrier: Carrier) -> None:
    await carrier.transport.send(records(1, "before"))
    carrier.away()
    before = asyncio.all_tasks()
    sending = asyncio.create_task(carrier.transport.send(records(5)))
    await asyncio.sleep(0.05)
    sending.cancel()
    await asyncio.wait({sending}, timeout=10)
    assert sending.cancelled()
    await asyncio.wait_for(carrier.transport.close(), 10)
    carrier.back()
    assert asyncio.all_tasks() - before <= {asyncio.current_task()}


# --- Redis -------------------------------------------------------------------------------------------------


async def test_redis_keeps_its_last_room_for_what_must_not_be_dropped(redis_client: RedisClient) -> None:
    events = RedisEvents(redis_client, os.urandom(4).hex(), bytes_max=40_000)
    transport = RedisTransport(events, HostRandom())
    with pytest.raises(TransportUnavailable, match="STREAM_GW_EVENTS_REDIS_BYTES_MAX") as full:
        await transport.send([*records(150, "rest"), *records(20, "bill", kept=True)])
    arrived = [record for _, record in await events.read(0, 1000)]
    unsent = values(full.value.unsent)
    assert sorted(arrived + unsent) == sorted(values([*records(150, "rest"), *records(20, "bill")]))
    assert [value for value in arrived if value.startswith(b"bill")] == values(records(20, "bill"))
    assert len(unsent) > 50


@pytest.mark.parametrize("everything", [False, True])
async def test_bills_that_a_failover_of_redis_has_lost_are_sent_again(everything: bool) -> None:
    """Each once. Of other events as many are lost as with the former primary."""
    with RedisServer() as former, RedisServer() as primary:
        async with Proxy.before(former.port) as proxy:
            client = RedisClient(proxy.url)
            await client.start()
            events = RedisEvents(client)
            transport = RedisTransport(events, HostRandom())
            if not everything:
                primary.follow(former)
            bills = [records(20, f"bill{n}", kept=True) for n in range(4)]
            await transport.send(bills[0])
            if not everything:
                await eventually(lambda: primary("XLEN", "sg:{events}") == 20, "the replica to follow")
                primary("REPLICAOF", "NO", "ONE")
            await transport.send([*bills[1], *records(5, "rest")])
            await transport.send(bills[2])
            proxy.point_at(primary.port)
            former.kill()
            proxy.cut_all()
            await transport.send(bills[3])
            await transport.send(records(1, "last"))
            arrived = [record for _, record in await events.read(0, 1000)]
            await client.close()
    assert sorted(arrived) == sorted(values([*bills[0], *bills[1], *bills[2], *bills[3], *records(1, "last")]))


async def test_what_redis_refused_is_taken_when_it_comes_again_and_there_is_room(redis_client: RedisClient) -> None:
    """As a dead letter, which has the same number at each replay."""
    events = RedisEvents(redis_client, os.urandom(4).hex(), bytes_max=4000)
    assert await events.append("first", 1, [(b"x" * 3000, True)]) == []
    for _ in range(2):
        assert await events.append("letter", 1, [(b"y" * 3000, True)]) == [0]
    await events.trim(await events.head())
    for _ in range(2):  # the second one is the first one whose reply was lost
        assert await events.append("letter", 1, [(b"y" * 3000, True)]) == []
    assert [record for _, record in await events.read(0, 10)] == [b"y" * 3000]


# --- Kafka -------------------------------------------------------------------------------------------------


async def test_a_key_stays_in_its_partition_and_headers_tell_trace_and_version(kafka_servers: str) -> None:
    topic = await make_topic(kafka_servers)
    transport = KafkaTransport(settings(kafka_servers, topic), HostClock())
    await transport.send(records(60))
    await transport.send([*records(60, "again"), Record(b"{}", b"alone", "fleet", v=7)])
    await transport.close()
    read = await read_topic(kafka_servers, topic)
    places: dict[bytes, set[int]] = {}
    for partition, key, _, _ in read:
        places.setdefault(key, set()).add(partition)
    assert {len(found) for found in places.values()} == {1}
    assert len(set.union(*places.values())) > 1
    for _, key, _, headers in read:
        if key == b"alone":
            assert headers == {"v": b"7"}
        else:
            version, trace, span, flags = headers["traceparent"].decode().split("-")
            assert (headers["v"], version, trace, flags) == (b"1", "00", TRACE, "01")
            assert len(span) == 16 and int(span, 16)


async def test_a_topic_that_is_missing_is_named_with_the_remedy_or_made(kafka_servers: str) -> None:
    topic = f"missing-{os.urandom(4).hex()}"
    transport = KafkaTransport(settings(kafka_servers, topic), HostClock())
    with pytest.raises(TransportUnavailable, match=rf"{topic}.*STREAM_GW_TELEMETRY_CREATE_TOPICS") as missing:
        await transport.send(records(2))
    assert missing.value.unsent == records(2)
    assert isinstance(missing.value.__cause__, TopicMissing)
    making = settings(kafka_servers, topic, telemetry_create_topics=True)
    await asyncio.gather(*(ensure_topic(making, topic) for _ in range(3)))
    await transport.send(records(2))
    await transport.close()


async def test_what_a_topic_finds_too_large_does_not_hold_up_the_rest(kafka_servers: str) -> None:
    topic = await make_topic(kafka_servers, **{"max.message.bytes": "20000"})
    transport = KafkaTransport(settings(kafka_servers, topic), HostClock())
    noise = Record(os.urandom(60_000), b"key-1", "request")
    with pytest.raises(TransportUnavailable, match=r"max\.message\.bytes") as large:
        await transport.send([*records(30), noise])
    assert (list(large.value.unsent), list(large.value.refused)) == ([], [noise])
    await transport.send(records(5, "after"))
    await transport.close()
    arrived = sorted(value for _, _, value, _ in await read_topic(kafka_servers, topic))
    assert arrived == sorted(values([*records(30), *records(5, "after")]))


async def test_a_dead_letter_that_does_not_fit_its_topic_stops_no_other(kafka_servers: str) -> None:
    topic = await make_topic(kafka_servers, **{"max.message.bytes": "20000"})
    letters = KafkaDeadLetters({"bootstrap_servers": kafka_servers}, topic)

    def dead(offset: int, size: int) -> Dead:
        return Dead(f"t:0:{offset}@1", "t", 0, offset, 1, "it is no event", b"key", os.urandom(size))

    await letters.put("block-1", [dead(0, 10), dead(1, 60_000), dead(2, 10)])
    await letters.put("block-2", [dead(3, 5 << 20)])
    await letters.put("block-3", [dead(4, 10)])
    await letters.put("block-4", [Dead("t:0:5@1", "t", 0, 5, 1, "the record has no value")])
    found = {letter.offset: letter for letter in await letters.waiting(10)}
    await letters.close()
    assert {offset: len(letter.value or b"") for offset, letter in found.items()} == {
        0: 10,
        1: 0,
        2: 10,
        3: 0,
        4: 10,
        5: 0,
    }
    assert found[1].reason.startswith("it is no event; left out here")


async def test_without_a_broker_a_batch_is_unsent_and_the_log_is_not_flooded(
    kafka_server: KafkaServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    topic = await make_topic(kafka_server.servers)
    async with Proxy.before(kafka_server.behind_port, listen=kafka_server.proxy_port) as proxy:
        transport = KafkaTransport(settings(f"127.0.0.1:{proxy.port}", topic), HostClock())
        proxy.refuse = True
        for _ in range(2):
            with pytest.raises(TransportUnavailable) as away:
                await transport.send(records(2))
            assert away.value.unsent == records(2)
        proxy.refuse = False
        await transport.send(records(2, "before"))
        proxy.refuse = True
        proxy.cut_all()
        sending = asyncio.create_task(transport.send(records(2)))
        await asyncio.wait({sending}, timeout=3)
        assert not sending.done()
        said = [record.getMessage() for record in caplog.records if record.name == "telemetry.kafka.transport"]
        assert len(said) < 15, said
        assert not logging.getLogger("aiokafka").propagate
        proxy.refuse = False
        await asyncio.wait_for(sending, 10)
        await transport.close()


async def test_brokers_that_are_stopped_are_asked_for_now_and_then(
    kafka_server: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as fast as connections are refused, which would take the loop from requests."""
    asked = 0
    create_conn = aiokafka.client.create_conn

    async def counted(*args: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        return await create_conn(*args, **options)

    monkeypatch.setattr(aiokafka.client, "create_conn", counted)
    transport = KafkaTransport(settings(kafka_server.servers, await make_topic(kafka_server.servers)), HostClock())
    over = asyncio.Event()

    async def send() -> None:
        while not over.is_set():
            await transport.send(records(20))

    sending = asyncio.create_task(send())
    await asyncio.sleep(0.2)
    # As brokers are stopped for an upgrade: they tell first that they lead nothing any more
    await asyncio.to_thread(kafka_server.stop)
    asked = 0
    await asyncio.sleep(1.5)
    assert 0 < asked < 40
    await asyncio.to_thread(kafka_server.start)
    over.set()
    await asyncio.wait_for(sending, 20)
    await transport.close()


def test_of_what_aiokafka_says_each_kind_is_passed_on_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    limited = LogRateLimit(lambda: now)

    def say(line: int, text: str) -> None:
        limited.handle(logging.LogRecord("aiokafka.client", logging.ERROR, "client.py", line, text, None, None))

    for second in range(60):
        now = float(second)
        say(1, f"lost {second}")
    say(2, "another")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["aiokafka: lost 0", "aiokafka: lost 30 (and 29 like it before)", "aiokafka: another"]


def test_how_kafka_is_reached() -> None:
    plain = connection_options(settings("a:1, b:2", "t"))
    assert (plain["bootstrap_servers"], plain["security_protocol"]) == (["a:1", "b:2"], "PLAINTEXT")
    login = settings("a:1", "t", kafka_sasl="SCRAM-SHA-512", kafka_user="me", kafka_password="hunter2")
    options = connection_options(login)
    assert options["security_protocol"] == "SASL_PLAINTEXT"
    assert (options["sasl_mechanism"], options["sasl_plain_password"]) == ("SCRAM-SHA-512", "hunter2")
    assert "hunter2" not in repr(login)
    with pytest.raises(ValueError, match="STREAM_GW_KAFKA_CA: /nowhere"):
        connection_options(settings("a:1", "t", kafka_tls=True, kafka_ca="/nowhere"))
