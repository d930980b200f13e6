"""The sink: never in the way, bounded, and nothing is lost that it could keep."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from prometheus_client import CollectorRegistry, generate_latest

from stream_fabric.events import AttemptTrace, Event, FleetEvent, Phases, RequestTrace, decode_event
from stream_fabric.limits import EVENT_BYTES_MAX, EVENTS_BATCH_MAX
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.process.settings import EmitSettings
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.clock import read_clock
from stream_fabric.redis.events import RedisEvents
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId
from telemetry.emit.delivery import SinkPolicy
from telemetry.emit.open import open_sink
from telemetry.emit.sink import Sink
from telemetry.emit.spool import Spool
from telemetry.emit.transport import Transport
from telemetry.kafka.transport import KafkaTransport
from tests.support.kafka import KafkaServer
from tests.support.waiting import eventually
from tests.telemetry.fake import MemoryTransport
from tests.telemetry.sinks import make_sink, make_spool
from tests.telemetry.test_transports import make_topic, read_topic, settings

MB = 1 << 20
QUICK = SinkPolicy(linger_s=0.001, stuck_s=0.05, close_s_max=0.5, spool_per_s=1e6)


def request(name: str, prompt: str = "", completion: str = "") -> RequestTrace:
    return RequestTrace(
        id=name,
        at_us=1_795_000_000_000_000,
        gateway=GatewayId("gw"),
        role="created",
        ended="completed",
        tenant=TenantId("acme"),
        wall_us=1_200_000,
        phases=Phases(gateway_us=300, prefill_us=90_000, decode_us=1_000_000),
        stream=StreamId(f"resp_{name}"),
        model="llama",
        prompt=prompt,
        completion=completion,
    )


def attempt(name: str, billed: bool = True) -> AttemptTrace:
    return AttemptTrace(
        id=name,
        at_us=1_795_000_000_000_000,
        stream=StreamId(f"resp_{name}"),
        tenant=TenantId("acme"),
        model="llama",
        pool="llama",
        replica=ReplicaId("r"),
        ended="completed",
        billed=billed,
        output_tokens=100,
    )


def ids(transport: MemoryTransport) -> list[str]:
    return [decode_event(record.value).id for record in transport.arrived]


Made = Callable[..., Awaitable[Sink]]


@pytest.fixture
async def made() -> object:
    async with AsyncExitStack() as stack:

        async def make(transport: Transport, spool: Spool | None = None, policy: SinkPolicy = QUICK) -> Sink:
            return await stack.enter_async_context(make_sink(transport, spool, policy))

        yield make


async def test_what_is_emitted_arrives_with_its_key_kind_and_trace(made: Made) -> None:
    transport = MemoryTransport()
    sink = await made(transport)
    fleet = FleetEvent(id="3", at_us=1, what="drain", source="health", pool="llama")
    sink.emit(request("1"))
    sink.emit(attempt("2"))
    sink.emit(fleet)
    await eventually(lambda: len(transport.arrived) == 3)
    assert [(one.key, one.kind, one.kept) for one in transport.arrived] == [
        (b"resp_1", "request", False),
        (b"resp_2", "attempt", True),
        (b"llama", "fleet", False),
    ]
    assert decode_event(transport.arrived[2].value) == fleet
    assert sink.backlog.emitted == sink.backlog.sent == {"request": 1, "attempt": 1, "fleet": 1}


async def test_batches_are_bounded_and_gather_what_comes_together(made: Made) -> None:
    transport = MemoryTransport()
    sink = await made(transport)
    for n in range(EVENTS_BATCH_MAX * 2 + 10):
        sink.emit(request(str(n)))
    await eventually(lambda: len(transport.arrived) == EVENTS_BATCH_MAX * 2 + 10)
    assert transport.batches == [EVENTS_BATCH_MAX, EVENTS_BATCH_MAX, 10]
    for n in range(5):
        sink.emit(request(f"large{n}", completion="x" * (200 << 10)))
    await eventually(lambda: len(transport.batches) > 5)
    assert transport.batches[3:] == [2, 2, 1]


async def test_a_text_that_is_too_large_goes_without_it(made: Made) -> None:
    transport = MemoryTransport()
    sink = await made(transport)
    sink.emit(request("1", prompt="p" * EVENT_BYTES_MAX, completion="c"))
    await eventually(lambda: transport.arrived)
    got = decode_event(transport.arrived[0].value)
    assert isinstance(got, RequestTrace)
    assert (got.id, got.prompt, got.completion) == ("1", "", "")
    sink.emit(FleetEvent(id="2", at_us=1, what="shed", source="x" * EVENT_BYTES_MAX))
    assert sink.backlog.dropped == {("fleet", "too_large"): 1}


@pytest.mark.parametrize(
    "event",
    [None, "event", request("\ud800"), attempt("1", billed=object())],  # type: ignore[arg-type]
)
async def test_emit_raises_nothing_whatever_it_is_given(made: Made, event: Event) -> None:
    transport = MemoryTransport()
    sink = await made(transport)
    sink.emit(event)
    sink.emit(request("2"))
    await eventually(lambda: transport.arrived)
    assert ids(transport) == ["2"]
    assert sum(sink.backlog.dropped.values()) == 1 and all(
        reason == "unencodable" for _, reason in sink.backlog.dropped
    )


# --- the transport is away ---------------------------------------------------------------------------------


async def test_without_a_spool_events_wait_in_bounded_memory_with_a_share_for_bills(made: Made) -> None:
    transport = MemoryTransport()
    transport.well.clear()
    policy = SinkPolicy(memory_bytes_max=MB, linger_s=0.001, stuck_s=0.05)
    sink = await made(transport, None, policy)
    for n in range(3000):
        sink.emit(request(f"r{n}"))
    assert sink.backlog.bytes <= MB * 3 // 4
    dropped = sink.backlog.dropped["request", "memory_full"]
    assert dropped > 1000
    for n in range(300):
        sink.emit(attempt(f"b{n}"))
    assert sink.backlog.bills_dropped == {}
    assert sink.backlog.bytes <= MB
    assert 0.75 < sink.room_used <= 1
    transport.well.set()
    await eventually(lambda: len(transport.arrived) == 3300 - dropped)
    assert {f"b{n}" for n in range(300)} <= set(ids(transport))
    await eventually(lambda: sink.backlog.bytes == 0 and sink.room_used == 0, "the room to be free")


async def test_a_bill_that_is_lost_is_told_of_loudly(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    transport = MemoryTransport()
    transport.well.clear()
    sink = await made(transport, None, SinkPolicy(memory_bytes_max=100_000, linger_s=0.001, close_s_max=0.05))
    for n in range(1000):
        sink.emit(attempt(f"b{n}"))
    lost = sink.backlog.bills_dropped["memory_full"]
    assert lost > 500
    (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "billing events dropped" in said.getMessage() and "docs/runbook.md" in said.getMessage()
    await sink.close()
    # At the end all that could not be delivered is said
    assert sink.backlog.bills_dropped["closed"] == 1000 - lost
    assert f"'closed': {1000 - lost}" in caplog.records[-1].getMessage()
    assert sink.backlog.dropped == {("attempt", "memory_full"): lost, ("attempt", "closed"): 1000 - lost}


@pytest.mark.parametrize("how", ["stuck", "failing"])
async def test_with_a_spool_all_arrive_once_the_transport_is_back(made: Made, tmp_path: Path, how: str) -> None:
    transport = MemoryTransport()
    sink = await made(transport, make_spool(tmp_path, 64 * MB))
    sink.emit(request("before"))
    await eventually(lambda: transport.arrived)
    transport.failing = how == "failing"
    if how == "stuck":
        transport.well.clear()
    expected = {"before"}
    for n in range(2000):
        expected |= {f"r{n}", f"b{n}"}
        sink.emit(request(f"r{n}"))
        sink.emit(attempt(f"b{n}"))
        if n % 100 == 0:
            await asyncio.sleep(0.005)
    await eventually(lambda: sink.away and sink.depth == 0 and sink.spool_bytes > 1000)
    transport.failing = False
    transport.well.set()
    await eventually(lambda: len(transport.arrived) == 4001)
    assert set(ids(transport)) == expected
    await eventually(lambda: not sink.away and sink.spool_bytes == 0)
    assert sum(sink.backlog.dropped.values()) == 0
    assert sink.backlog.spooled.total() > 3000
    assert sink.spool_oldest_s == 0


async def test_a_spool_that_is_full_loses_no_bill_while_anything_else_can_go(made: Made, tmp_path: Path) -> None:
    transport = MemoryTransport()
    transport.well.clear()
    sink = await made(transport, make_spool(tmp_path, MB))
    bills = 0
    for n in range(6000):
        sink.emit(request(f"r{n}"))
        if n % 5 == 0:
            bills += 1
            sink.emit(attempt(f"b{n}"))
        if n % 200 == 0:
            await asyncio.sleep(0.01)
    await eventually(
        lambda: sink.backlog.spooled.total() + sink.backlog.dropped.total() >= 6000 + bills - EVENTS_BATCH_MAX
    )
    assert sink.spool_bytes <= MB
    assert 0.5 < sink.room_used <= 1
    assert sink.backlog.bills_dropped == {}
    dropped = sum(sink.backlog.dropped.values())
    assert dropped > 1000
    assert set(sink.backlog.dropped) <= {("request", "spool_full"), ("request", "evicted")}
    transport.well.set()
    await eventually(lambda: len(transport.arrived) == 6000 + bills - dropped)
    assert sum(one.startswith("b") for one in ids(transport)) == bills


async def test_events_that_come_faster_than_they_leave_go_to_the_spool(made: Made, tmp_path: Path) -> None:
    transport = MemoryTransport()
    transport.seconds = 0.02
    policy = SinkPolicy(memory_bytes_max=4 * MB, linger_s=0.001, spool_per_s=1e6)
    sink = await made(transport, make_spool(tmp_path, 64 * MB), policy)
    for n in range(20_000):
        sink.emit(request(str(n)))
        if n % 200 == 0:  # the spool's thread keeps up with these, where it gets the CPU
            await asyncio.sleep(0.001)
            await eventually(lambda: sink.backlog.bytes < 3 * MB, "the spool to take events")
    assert sum(sink.backlog.dropped.values()) == 0
    assert sink.backlog.spooled["request"] > 0
    transport.seconds = 0
    await eventually(lambda: len(transport.arrived) == 20_000)
    assert len(set(ids(transport))) == 20_000


async def test_a_disk_that_takes_nothing_leaves_events_in_memory(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport = MemoryTransport()
    transport.well.clear()
    sink = await made(transport, make_spool(tmp_path, MB))

    def full(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", full)
    for n in range(100):
        sink.emit(attempt(str(n)))
    await eventually(lambda: "Input/output error" in caplog.text)
    for n in range(100, 200):
        sink.emit(attempt(str(n)))
    assert sink.depth == 100
    monkeypatch.undo()
    transport.well.set()
    await eventually(lambda: len(transport.arrived) == 200)
    assert set(ids(transport)) == {str(n) for n in range(200)}
    assert sum(sink.backlog.dropped.values()) == 0


async def test_live_events_do_not_wait_for_the_spool(made: Made, tmp_path: Path) -> None:
    left = make_spool(tmp_path, 64 * MB)
    transport = MemoryTransport()
    transport.well.clear()
    async with make_sink(transport, left, QUICK) as sink:
        for n in range(5000):
            sink.emit(request(f"old{n}"))
    transport = MemoryTransport()
    sink = await made(transport, make_spool(tmp_path, 64 * MB), SinkPolicy(linger_s=0.001, spool_per_s=5000))
    began = time.monotonic()
    for n in range(40):
        sink.emit(request(f"live{n}"))
        await eventually(lambda n=n: f"live{n}" in ids(transport)[-EVENTS_BATCH_MAX * 3 :])
        await asyncio.sleep(0.01)
    took_s = time.monotonic() - began
    old = sum(one.startswith("old") for one in ids(transport))
    # Not at once, and not never
    assert 0 < old <= 5000 * took_s + EVENTS_BATCH_MAX
    await eventually(lambda: len(transport.arrived) == 5040)


# --- the end of a process ----------------------------------------------------------------------------------


async def test_close_delivers_what_is_there(tmp_path: Path) -> None:
    transport = MemoryTransport()
    async with make_sink(transport, make_spool(tmp_path, MB)) as sink:
        for n in range(1200):
            sink.emit(request(str(n)))
    assert len(transport.arrived) == 1200
    assert transport.closed
    assert list(tmp_path.iterdir()) == []
    sink.emit(attempt("late"))
    assert sink.backlog.dropped == {("attempt", "closed"): 1} and sink.backlog.bills_dropped["closed"] == 1


async def test_what_close_cannot_deliver_the_next_process_does(made: Made, tmp_path: Path) -> None:
    transport = MemoryTransport()
    transport.well.clear()
    began = time.monotonic()
    async with make_sink(transport, make_spool(tmp_path, MB), QUICK) as sink:
        for n in range(300):
            sink.emit(attempt(str(n)))
        await eventually(lambda: sink.away)
        for n in range(300, 600):
            sink.emit(attempt(str(n)))
    assert time.monotonic() - began < 8
    assert transport.arrived == [] and sum(sink.backlog.dropped.values()) == 0
    transport = MemoryTransport()
    await made(transport, make_spool(tmp_path, MB))
    await eventually(lambda: len(transport.arrived) == 600)
    assert set(ids(transport)) == {str(n) for n in range(600)}


# --- what it tells -----------------------------------------------------------------------------------------


async def test_metrics_tell_of_every_fate(tmp_path: Path) -> None:
    transport, registry = MemoryTransport(), CollectorRegistry()
    async with make_sink(transport, make_spool(tmp_path, MB), QUICK, registry) as sink:
        sink.emit(request("1"))
        await eventually(lambda: transport.arrived)
        transport.well.clear()
        sink.emit(attempt("2"))
        sink.emit(FleetEvent(id="3", at_us=1, what="shed", source="x" * EVENT_BYTES_MAX))
        await eventually(lambda: sink.away and sink.spool_bytes)
        text = generate_latest(registry).decode()
        for line in (
            'events_emitted_total{kind="request"} 1.0',
            'events_emitted_total{kind="attempt"} 1.0',
            'events_sent_total{kind="request"} 1.0',
            'events_sent_total{kind="attempt"} 0.0',
            'events_dropped_total{kind="fleet",reason="too_large"} 1.0',
            "events_billing_dropped_total 0.0",
            "events_transport_away 1.0",
            f"events_spool_bytes {float(sink.spool_bytes)}",
            f"events_room_used_ratio {sink.room_used}",
        ):
            assert f"{line}\n" in text, text
        transport.well.set()
        await eventually(lambda: not sink.spool_bytes)
        assert "events_transport_away 0.0\n" in generate_latest(registry).decode()


# --- on a real Kafka ---------------------------------------------------------------------------------------


async def load(sink: Sink, name: str, seconds: float) -> tuple[list[str], list[float]]:
    """A busy process's events, and how long each emit took."""
    names, took = [], []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            names.append(f"{name}{len(names)}")
            event = attempt(names[-1]) if len(names) % 4 == 0 else request(names[-1])
            began = time.perf_counter()
            sink.emit(event)
            took.append(time.perf_counter() - began)
        await asyncio.sleep(0.01)
    return names, took


def p99_us(took: list[float]) -> float:
    return sorted(took)[len(took) * 99 // 100] * 1e6


@pytest.mark.platform
async def test_kafka_away_under_load_or_at_the_start_costs_no_emit_and_no_event(
    kafka_server: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    topic = await make_topic(kafka_server.servers)
    transport = KafkaTransport(settings(kafka_server.servers, topic), HostClock())
    expected: list[str] = []
    policy = SinkPolicy(close_s_max=10)
    async with AsyncExitStack() as stack:
        sink = await stack.enter_async_context(make_sink(transport, make_spool(tmp_path, 64 * MB), policy))
        gc.collect()
        names, up = await load(sink, "up", 1.5)
        expected += names
        await eventually(lambda: sink.backlog.sent.total() == len(expected))
        kafka_server.kill()
        late = make_sink(
            KafkaTransport(settings(kafka_server.servers, topic), HostClock()), make_spool(tmp_path, 64 * MB), policy
        )
        await stack.enter_async_context(late)
        for n in range(50):
            late.emit(attempt(f"late{n}"))
        names, down = await load(sink, "down", 3.0)
        expected += names
        assert sink.away and sink.spool_bytes and late.away and late.spool_bytes
        starting = asyncio.create_task(asyncio.to_thread(kafka_server.start))
        names, _ = await load(sink, "starting", 1.0)
        expected += names
        await starting
        await eventually(lambda: sink.backlog.sent.total() == len(expected) and not sink.spool_bytes, timeout_s=20)
        await eventually(lambda: late.backlog.sent.total() == 50)
        assert sink.backlog.dropped == late.backlog.dropped == {}
        expected += [f"late{n}" for n in range(50)]
    print(f"emit p99: {p99_us(up):.1f} us with Kafka, {p99_us(down):.1f} us without; {len(expected)} events")
    # Microseconds both: what differs is the machine's noise, and not that anything is waited for
    assert p99_us(down) < p99_us(up) * 1.05 + 50
    arrived = Counter(decode_event(value).id for _, _, value, _ in await read_topic(kafka_server.servers, topic))
    assert set(arrived) == set(expected)
    assert max(arrived.values()) == 1, "an outage alone doubles nothing"
    assert len([record for record in caplog.records if record.name.startswith("telemetry")]) < 30


# --- as settings say ---------------------------------------------------------------------------------------


async def test_a_sink_by_redis_is_what_no_settings_say(redis_url: str, redis_client: RedisClient) -> None:
    events = RedisEvents(redis_client)
    before = await events.head()
    async with open_sink(
        EmitSettings(redis_url=redis_url), redis_client, CollectorRegistry(), HostClock(), HostClock(), HostRandom()
    ) as sink:
        sink.emit(attempt("by-redis"))
    assert [decode_event(record).id for _, record in await events.read(before, 1000)].count("by-redis") == 1


async def test_a_sink_that_is_off_takes_everything_and_says_nothing(redis_client: RedisClient) -> None:
    async with open_sink(
        EmitSettings(events="off"), redis_client, CollectorRegistry(), HostClock(), HostClock(), HostRandom()
    ) as sink:
        sink.emit(attempt("1"))
        assert not isinstance(sink, Sink)


async def test_kafka_without_a_spool_is_warned_of(
    redis_client: RedisClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_kafka = {"events": "kafka", "kafka_servers": "127.0.0.1:1"}
    async with open_sink(
        EmitSettings(**by_kafka, events_spool=str(tmp_path)),
        redis_client,
        CollectorRegistry(),
        HostClock(),
        HostClock(),
        HostRandom(),
    ):
        assert "spool" not in caplog.text
    async with open_sink(
        EmitSettings(**by_kafka), redis_client, CollectorRegistry(), HostClock(), HostClock(), HostRandom()
    ):
        assert "STREAM_GW_EVENTS_SPOOL" in caplog.text and "16 MiB" in caplog.text


async def test_a_record_has_the_time_of_the_fabric_also_on_a_host_whose_clock_is_wrong(
    redis_client: RedisClient, kafka_servers: str
) -> None:
    """The consumer refuses an event that is a day later than its record, and Kafka deletes old records."""
    topic = await make_topic(kafka_servers)
    clock = await read_clock(redis_client, At1970(), HostRandom())
    to_kafka = EmitSettings(events="kafka", kafka_servers=kafka_servers, events_topic=topic)
    async with open_sink(to_kafka, redis_client, CollectorRegistry(), At1970(), clock, HostRandom()) as sink:
        sink.emit(attempt("1"))
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka_servers)
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, n) for n in range(3)])
        await consumer.seek_to_beginning()
        assert abs((await consumer.getone()).timestamp / 1e3 - time.time()) < 3600
    finally:
        await consumer.stop()


class At1970(HostClock):
    """A host without a battery, soon after its start."""

    @property
    def offset_us(self) -> int:
        return 0

    def now_us(self) -> int:
        return self.monotonic_us()


async def test_settings_that_cannot_work_are_refused_with_the_remedy(
    redis_client: RedisClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="STREAM_GW_EVENTS_SPOOL"):
        open_sink(
            EmitSettings(events_spool=str(tmp_path / "file")),
            redis_client,
            CollectorRegistry(),
            HostClock(),
            HostClock(),
            HostRandom(),
        )
    with pytest.raises(ValueError, match="STREAM_GW_KAFKA_SERVERS"):
        EmitSettings(events="kafka")
    by_kafka = EmitSettings(events="kafka", kafka_servers="127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "telemetry.kafka.transport", None)
    with pytest.raises(ValueError, match=r"pip install 'stream-gw\[kafka\]'"):
        open_sink(by_kafka, redis_client, CollectorRegistry(), HostClock(), HostClock(), HostRandom())
