"""Events on their way into ClickHouse while consumers, Kafka and ClickHouse are killed: each once, to the token."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable

import pytest

from tests.support.clickhouse import ClickHouseFront
from tests.support.figures import Tell
from tests.support.kafka import KafkaServer
from tests.support.stores import make_store
from tests.support.waiting import eventually
from tests.telemetry.load import ConsumerProcess, Log, check, make_topics

EVENTS = int(os.environ.get("STREAM_GW_CHAOS_EVENTS", "160000"))
KILLS = 20


@pytest.fixture
async def front() -> AsyncIterator[ClickHouseFront]:
    with ClickHouseFront() as front:
        yield front


@pytest.fixture
async def kafka() -> AsyncIterator[KafkaServer]:
    with KafkaServer(**{"group.min.session.timeout.ms": 1000}) as server:
        yield server


@pytest.mark.chaos
@pytest.mark.timeout(1500)
async def test_events_come_once_through_kills_a_reassignment_refusals_and_restarts(
    kafka: KafkaServer, front: ClickHouseFront, tell: Tell
) -> None:
    await make_topics(kafka.servers, "ev", "ev.dlq", partitions=6)
    log = Log(
        {
            "events": "kafka",
            "kafka_servers": kafka.servers,
            "events_topic": "ev",
            "telemetry_dlq_topic": "ev.dlq",
            "telemetry_group": "g",
            "clickhouse": front.url,
            "telemetry_session_s": 1.5,
            "telemetry_linger_s": 0.2,
            "telemetry_block_rows": 3000,
        }
    )
    store = make_store(front.url)
    await store.open()
    draw = random.Random()
    began = time.monotonic()
    kills = 0
    second: ConsumerProcess | None = None
    happened: list[str] = []

    async def away(what: str, begin: Callable[[], object], end: Callable[[], object], for_s: float) -> None:
        happened.append(what)
        await asyncio.to_thread(begin)
        await asyncio.sleep(for_s)  # how long the outage lasts
        await asyncio.to_thread(end)

    first = await log.consume()
    for round_ in range(KILLS):
        adding = asyncio.create_task(log.add(EVENTS // KILLS, poison_every=1000))
        outage: asyncio.Task[None] | None = None
        match round_:
            case 4:
                happened.append("another consumer joins")
                second = await log.consume()
            case 7 | 16:
                outage = asyncio.create_task(
                    away("ClickHouse refuses", lambda: front.fault("refuse"), lambda: front.fault("ok"), 4)
                )
            case 9:
                assert second is not None
                happened.append("the other consumer leaves")
                assert await second.stop() == 0
            case 10:
                outage = asyncio.create_task(
                    away("ClickHouse's answers are lost", lambda: front.fault("lose"), lambda: front.fault("ok"), 4)
                )
            case 12:
                outage = asyncio.create_task(away("Kafka is killed", kafka.kill, kafka.start, 2))
            case 14:
                outage = asyncio.create_task(away("ClickHouse is killed", front.kill, front.start, 2))
            case 18:
                outage = asyncio.create_task(away("Kafka is restarted", kafka.stop, kafka.start, 1))
        await asyncio.sleep(draw.uniform(0.2, 4.0))  # anywhere in its work
        first.kill()
        kills += 1
        if outage is not None:
            await outage
        first = await log.consume()
        await adding
    await log.consumed(timeout_s=300)
    took = time.monotonic() - began
    await check(store, log.sums)
    assert kills == KILLS and log.sums.rows.total() == EVENTS
    dead = log.dead_letters()

    async def all_dead() -> bool:
        return len(await dead.waiting(10**6)) == log.sums.poison

    await eventually(all_dead, "every record that is no event to be put aside", 20)
    await dead.close()
    assert await first.stop() == 0
    await store.close()
    billed = sum(usage["output_tokens"] for usage in log.sums.usage.values())
    tell(
        f"{EVENTS} events and {log.sums.poison} that are none in {took:.0f} s, {kills} kills, {', '.join(happened)}: "
        f"rows, roll-ups and {billed} billed tokens exact"
    )
