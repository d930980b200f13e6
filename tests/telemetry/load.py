"""Events with known sums, a topic full of them, the consumer's process, and what ClickHouse must say in the end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.conn import create_conn
from aiokafka.errors import KafkaError
from aiokafka.protocol.admin import CreateAclsRequest_v1, DeleteAclsRequest_v1

from stream_fabric.events import (
    AttemptTrace,
    CandidateScore,
    Event,
    FleetEvent,
    Phases,
    RequestTrace,
    encode_event,
    event_key,
)
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId
from telemetry.kafka.dlq import KafkaDeadLetters
from telemetry.store.store import Store
from tests.support.server import spawn
from tests.support.waiting import eventually

AT_US = (int(time.time()) // 3600 - 2) * 3_600_000_000
"""A recent time, because ClickHouse drops rows beyond their retention at once."""
POISON = (
    b"",
    b"no event",
    b'{"kind":"request"}',
    b'{"kind":"fleet","id":"a","at_us":1,"what":"shed","source":"x","v":99}',
)


def events(count: int, seed: int = 1, at_us: int = AT_US) -> Iterator[Event]:
    """A request and its attempt, with every so often an event of the fleet."""
    draw = random.Random(seed)
    models, tenants, replicas = (
        [f"{word}{i}" for i in range(many)] for word, many in (("model", 4), ("tenant", 20), ("r", 8))
    )
    for i in range(count):
        at = at_us + (i // 2) * 1500
        stream = StreamId(f"resp_{seed:08x}{i // 2:024x}")
        model, tenant, replica = (names[crc32(stream.encode()) % len(names)] for names in (models, tenants, replicas))
        prompt, output = draw.randrange(1, 4000), draw.randrange(500)
        if i % 100 == 99:
            yield FleetEvent(
                id=f"f{seed}.{i}", at_us=at, what="lease", source="gw", pool=model, replica=ReplicaId(replica),
                state="ready", figures={"running": float(output)},
            )  # fmt: skip
        elif i % 2 == 0:
            phases = Phases(*(draw.randrange(200_000) for _ in range(6)), residual_us=draw.randrange(-50, 50))
            yield RequestTrace(
                id=f"q{seed}.{i}", at_us=at, gateway=GatewayId(f"gw{i % 3}"), role="created", ended="completed",
                tenant=TenantId(tenant), wall_us=phases.total_us, phases=phases, stream=stream,
                request_id=f"req_{i:024x}", trace_id=f"{draw.getrandbits(128):032x}", model=model, pool=model,
                replica=ReplicaId(replica), dialect="openai.chat", transport="sse", tier="standard",
                finish_reason="stop", placement="prefix",
                scores=(CandidateScore(ReplicaId(replica), 1.5, prompt // 2, 3, 0.5, ""),) * 2,
                prompt_tokens=prompt, cached_tokens=prompt // 2, output_tokens=output, streamed_tokens=output,
                last_seq=output, ttft_us=draw.randrange(1, 10**6), price_micro=prompt + output, weight=1 + i % 3,
            )  # fmt: skip
        else:
            yield AttemptTrace(
                id=f"a{seed}.{i}", at_us=at, stream=stream, tenant=TenantId(tenant), model=model, pool=model,
                replica=ReplicaId(replica), ended="completed" if i % 10 else "lost", engine="sim", tier="standard",
                prefill_us=draw.randrange(10**6), decode_us=draw.randrange(10**6), prompt_tokens=prompt,
                cached_tokens=prompt // 3, output_tokens=output, generated_tokens=output + 1,
                reasoning_tokens=output // 4, billed=i % 4 == 1, price_micro=prompt * 3 + output,
                itl_sketch=tuple(draw.randrange(9) for _ in range(40)),
                itl_max_us=draw.randrange(10**6), decoding_us=draw.randrange(1, 10**8),
            )  # fmt: skip


@dataclass
class Sums:
    """Totals of the log, counted while it is made."""

    rows: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    usage: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    lengths: Counter[str] = field(default_factory=Counter)
    speeds: Counter[str] = field(default_factory=Counter)
    poison: int = 0

    def count(self, event: Event) -> None:
        match event:
            case RequestTrace():
                self.rows["requests"] += 1
                self.requests["events"] += 1
                self.requests["requests"] += event.weight
                for name in ("prompt_tokens", "cached_tokens", "output_tokens", "price_micro", "wall_us"):
                    self.requests[name] += getattr(event, name) * event.weight
                self.lengths["requests"] += event.weight
                for name in ("prompt_tokens", "output_tokens"):
                    self.lengths[name] += getattr(event, name) * event.weight
            case AttemptTrace():
                self.rows["attempts"] += 1
                self.attempts["attempts"] += 1
                for name in ("prompt_tokens", "output_tokens", "generated_tokens", "decode_us"):
                    self.attempts[name] += getattr(event, name)
                self.attempts["gaps"] += sum(event.itl_sketch)
                if event.generated_tokens > 1 and event.decode_us:
                    self.speeds["attempts"] += 1
                    self.speeds["tokens"] += event.generated_tokens - 1
                    self.speeds["uncached_tokens"] += event.prompt_tokens - event.cached_tokens
                    for name in ("decode_us", "decoding_us", "prefill_us"):
                        self.speeds[name] += getattr(event, name)
                if event.billed:
                    usage = self.usage.setdefault((event.tenant, event.model), Counter())
                    usage["requests"] += 1
                    for name in _USAGE[1:]:
                        usage[name] += getattr(event, name)
            case FleetEvent():
                self.rows["fleet"] += 1

    @property
    def records(self) -> int:
        return self.rows.total() + self.poison


_USAGE = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "price_micro")


async def stored(store: Store) -> dict[str, int]:
    """Rows of each table."""
    answer = await store.query(
        "SELECT 'requests' AS name, count() AS n FROM requests UNION ALL SELECT 'attempts', count() FROM attempts "
        "UNION ALL SELECT 'fleet', count() FROM fleet"
    )
    return {str(name): int(count) for name, count in answer.rows if count}


async def check(store: Store, sums: Sums) -> None:
    """Rows, roll-ups and sums are exactly those of the log."""
    assert (found := await stored(store)) == dict(sums.rows), (found, sums.rows)
    for table in sums.rows:
        doubled = await store.query(
            f"SELECT _partition, _offset, count() AS n FROM {table} GROUP BY _partition, _offset HAVING n > 1"
        )
        assert doubled.rows == []
    answer = await store.query(
        f"SELECT {', '.join(f'toInt64(sum({name})) AS {name}' for name in sums.requests)} FROM requests_minute"
    )
    assert answer.dicts()[0] == dict(sums.requests), (answer.dicts()[0], sums.requests)
    names = [name for name in sums.attempts if name != "gaps"]
    answer = await store.query(
        f"SELECT {', '.join(f'toInt64(sum(attempts_minute.{name})) AS {name}' for name in names)}, "
        "toInt64(arraySum(sumForEachMerge(itl_sketch))) AS gaps FROM attempts_minute"
    )
    assert answer.dicts()[0] == dict(sums.attempts), (answer.dicts()[0], sums.attempts)
    for table, figures in (("lengths_hour", sums.lengths), ("speeds_hour", sums.speeds)):
        answer = await store.query(
            f"SELECT {', '.join(f'toInt64(sum({table}.{name})) AS {name}' for name in figures)} FROM {table}"
        )
        assert answer.dicts()[0] == dict(figures), (answer.dicts()[0], figures)
    answer = await store.query(
        f"SELECT tenant, model, {', '.join(f'sum(usage_hour.{name}) AS {name}' for name in _USAGE)} FROM usage_hour "
        "GROUP BY tenant, model"
    )
    told = {(row["tenant"], row["model"]): Counter({name: row[name] for name in _USAGE}) for row in answer.dicts()}
    assert told == sums.usage, [
        (key, told.get(key), sums.usage[key]) for key in sums.usage if told.get(key) != sums.usage[key]
    ]


async def make_topics(servers: str, *topics: str, partitions: int = 6) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        reply = await admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics])
        assert all(error[1] == 0 for error in reply.topic_errors), reply
    finally:
        await admin.close()


class _Plain:
    """A request whose version is chosen already."""

    def __init__(self, struct: Any) -> None:
        self.prepare = lambda versions: struct


async def _ask_broker(servers: str, struct: Any) -> Any:
    host, port = servers.split(":")
    connection = await create_conn(host, int(port))
    try:
        return await connection.send(_Plain(struct))
    finally:
        await connection.close()


Guarded = Literal["topic", "group"]
_RESOURCES: dict[Guarded, int] = {"topic": 2, "group": 3}
_LITERAL, _ANY, _DESCRIBE, _ALLOW = 3, 1, 8, 3


async def forbid(servers: str, what: Guarded, name: str) -> None:
    """Leave the right to describe a topic or a group alone. The broker must have an authorizer."""
    rule = (_RESOURCES[what], name, _LITERAL, "User:ANONYMOUS", "*", _DESCRIBE, _ALLOW)
    reply = await _ask_broker(servers, CreateAclsRequest_v1([rule]))
    assert [code for code, _ in reply.creation_responses] == [0], reply


async def allow(servers: str, what: Guarded, name: str) -> None:
    """Undo ``forbid``."""
    reply = await _ask_broker(
        servers, DeleteAclsRequest_v1([(_RESOURCES[what], name, _LITERAL, None, None, _ANY, _ANY)])
    )
    assert [code for code, *_ in reply.filter_responses] == [0], reply


async def produce(servers: str, topic: str, made: Iterable[Event], sums: Sums, *, poison_every: int = 0) -> None:
    """As gateways and agents do it: idempotent, acknowledged. With a record that is no event now and then."""
    producer = await _producer(servers)
    try:
        sent = []
        for number, event in enumerate(made):
            at_ms = event.at_us // 1000
            sums.count(event)
            sent.append(await producer.send(topic, encode_event(event), key=event_key(event), timestamp_ms=at_ms))
            if poison_every and number % poison_every == 0:
                bad = POISON[number // poison_every % len(POISON)]
                sums.poison += 1
                headers = [("from", b"a test"), ("n", b"%d" % number)]
                sent.append(await producer.send(topic, bad, key=b"bad", headers=headers, timestamp_ms=at_ms))
            if len(sent) >= 5000:
                await asyncio.gather(*sent)
                sent = []
        await asyncio.gather(*sent)
    finally:
        await producer.stop()


async def _producer(servers: str) -> AIOKafkaProducer:
    """One that has begun, also where Kafka is away just now."""
    producer = AIOKafkaProducer(
        bootstrap_servers=servers, acks="all", enable_idempotence=True, linger_ms=5, max_batch_size=256 << 10,
        retry_backoff_ms=50, request_timeout_ms=120_000,
    )  # fmt: skip

    async def begun() -> bool:
        try:
            await producer.start()
        except KafkaError:
            return False
        return True

    await eventually(begun, "Kafka to answer", 60)
    return producer


async def committed(servers: str, group: str, topic: str) -> tuple[int, int]:
    """(committed offset of the group, end of the log), summed over all partitions."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=servers)
    await admin.start()
    await consumer.start()
    try:
        ends = await consumer.end_offsets(sorted(consumer.assignment()))
        told = await admin.list_consumer_group_offsets(group)
        return sum(max(told[tp].offset, 0) for tp in ends if tp in told), sum(ends.values())
    finally:
        await consumer.stop()
        await admin.close()


class ConsumerProcess:
    """``stream-gw telemetry``. Its settings go by the environment."""

    def __init__(self, module: str = "stream_gw.cli", **settings: Any) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("STREAM_GW_")}
        env |= {f"STREAM_GW_{name.upper()}": str(value) for name, value in settings.items()}
        self.process = spawn(
            [sys.executable, "-m", module, "telemetry", "--json"],
            env=env, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.url = ""

    async def ready(self) -> ConsumerProcess:
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert line, f"it ended with {self.process.wait()}"
        self.url = json.loads(line)["url"]
        return self

    def kill(self) -> None:
        self.process.kill()
        self._ended()

    async def stop(self) -> int:
        self.process.terminate()
        await asyncio.to_thread(self.process.wait, 30)
        return self._ended()

    def _ended(self) -> int:
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait()


class Log:
    """A topic, what was put into it, and the consumers that were started on it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.sums = Sums()
        self.consumers: list[ConsumerProcess] = []
        self._seed = 0

    @property
    def servers(self) -> str:
        return str(self.settings["kafka_servers"])

    @property
    def topic(self) -> str:
        return str(self.settings["events_topic"])

    async def add(self, count: int, *, poison_every: int = 0) -> None:
        self._seed += 1
        await produce(self.servers, self.topic, events(count, self._seed), self.sums, poison_every=poison_every)

    async def consume(self, *, module: str = "stream_gw.cli", **settings: Any) -> ConsumerProcess:
        consumer = ConsumerProcess(module, **{**self.settings, **settings})
        self.consumers.append(consumer)
        return await consumer.ready()

    async def consumed(self, timeout_s: float = 60) -> None:
        async def all_of_it() -> bool:
            done, end = await committed(self.servers, str(self.settings["telemetry_group"]), self.topic)
            return done == end == self.sums.records

        await eventually(all_of_it, "everything to be committed", timeout_s)

    def dead_letters(self) -> KafkaDeadLetters:
        return KafkaDeadLetters({"bootstrap_servers": self.servers}, str(self.settings["telemetry_dlq_topic"]))
