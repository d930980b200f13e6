"""The consumer's process on a real Kafka and the ClickHouse engine: every record once, whatever happens between."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientSession
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from telemetry.store.store import Store
from tests.support.clickhouse import ClickHouseFront
from tests.support.kafka import KafkaServer
from tests.support.waiting import eventually
from tests.telemetry.load import ConsumerProcess, Guarded, Log, allow, check, forbid, make_topics, stored

pytestmark = [pytest.mark.platform, pytest.mark.timeout(400)]


@pytest.fixture
async def log(settings: dict[str, Any]) -> AsyncIterator[Log]:
    await make_topics(settings["kafka_servers"], settings["events_topic"], settings["telemetry_dlq_topic"])
    made = Log(settings)
    yield made
    for consumer in made.consumers:
        consumer.kill()


async def test_consumed_stopped_and_consumed_on(log: Log, store: Store) -> None:
    await log.add(3000)
    consumer = await log.consume()
    await log.consumed()
    await check(store, log.sums)
    assert await consumer.stop() == 0
    await log.add(2000)
    await log.consume()
    await log.consumed()
    await check(store, log.sums)


async def crash_between_insert_and_commit(log: Log, store: Store, front: ClickHouseFront, module: str) -> None:
    """A block that was cut short by time is inserted, its owner dies before the commit, and more records come."""
    await log.add(60)
    front.fault("lose ingest_state")
    consumer = await log.consume(module=module)
    await eventually(lambda: _is(stored(store), dict(log.sums.rows)), "the first blocks to be inserted", 30)
    consumer.kill()
    front.fault("ok")
    await log.add(2000)
    await log.consume(module=module)
    await log.consumed()


async def _is(call: Any, wanted: object) -> bool:
    return bool(await call == wanted)


async def test_a_crash_between_insert_and_commit(log: Log, store: Store, front: ClickHouseFront) -> None:
    await crash_between_insert_and_commit(log, store, front, "stream_gw.cli")
    await check(store, log.sums)


async def test_the_same_without_the_pending_range_counts_twice(log: Log, store: Store, front: ClickHouseFront) -> None:
    """Proof that the test above can fail: the consumer ignores the claim of the dead one."""
    await crash_between_insert_and_commit(log, store, front, "tests.telemetry.forgetful")
    assert sum((await stored(store)).values()) > log.sums.rows.total()


async def test_the_same_without_the_roll_ups_window_bills_twice(log: Log, store: Store, front: ClickHouseFront) -> None:
    await store.command("ALTER TABLE usage_hour MODIFY SETTING non_replicated_deduplication_window = 0")
    await crash_between_insert_and_commit(log, store, front, "stream_gw.cli")
    assert await stored(store) == dict(log.sums.rows)
    billed = await store.query("SELECT sum(requests) FROM usage_hour")
    assert billed.rows[0][0] > sum(usage["requests"] for usage in log.sums.usage.values())


async def test_clickhouse_refuses_for_a_while(log: Log, store: Store, front: ClickHouseFront) -> None:
    front.fault("refuse")
    await log.add(20_000)
    consumer = await log.consume(telemetry_block_rows=500)

    async def held() -> float:
        return await metric(consumer, "telemetry_held_bytes")

    # Two blocks a partition are held, and reading rests
    await eventually(lambda: _over(held(), 6 * 500 * 800), "its memory to fill", 30)
    await eventually(lambda: _over(metric(consumer, "telemetry_pending_age_seconds"), 1), "the blocks to wait", 30)
    assert await held() < 12_000_000, "of 18"
    assert await stored(store) == {}
    front.fault("ok")
    await log.consumed()
    await check(store, log.sums)


async def _over(call: Any, least: float) -> bool:
    return bool(await call > least)


async def metric(consumer: ConsumerProcess, name: str) -> float:
    """A metric, summed over its labels."""
    async with ClientSession() as session, session.get(f"{consumer.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@pytest.mark.parametrize("what", ["topic", "group"])
async def test_a_log_that_may_not_be_read_has_no_lag_until_it_may(
    log: Log, store: Store, front: ClickHouseFront, what: Guarded
) -> None:
    """Alerts would otherwise see the figures from before, when nothing waited."""
    consumer = await log.consume()
    await log.add(500)
    await log.consumed()
    await eventually(lambda: _shown(consumer, "telemetry_lag_events"), "the lag to be known")
    front.fault("refuse")
    await log.add(500)
    await eventually(lambda: _over(metric(consumer, "telemetry_pending_age_seconds"), 0), "blocks to be claimed")
    await forbid(log.servers, what, log.topic)  # the group has the topic's name

    async def hidden(name: str) -> bool:
        return not await _shown(consumer, name)

    await eventually(lambda: hidden("telemetry_lag_events"), "the lag to be unknown", 30)
    age = "telemetry_pending_age_seconds"
    if what == "topic":
        old = await metric(consumer, age) + 2
        await eventually(lambda: _over(metric(consumer, age), old), "claims to grow old", 30)
    else:  # its heartbeat is refused, so it is no member of the group any more
        await eventually(lambda: hidden(age), "the partitions to be given back", 30)
    await allow(log.servers, what, log.topic)
    front.fault("ok")
    await log.consumed()
    await check(store, log.sums)
    await eventually(lambda: _shown(consumer, "telemetry_lag_events"), "the lag to be known again")


async def _shown(consumer: ConsumerProcess, name: str) -> bool:
    async with ClientSession() as session, session.get(f"{consumer.url}/metrics") as answer:
        return f"\n{name}{{" in await answer.text()


async def test_partitions_are_shared_and_handed_over(log: Log, store: Store) -> None:
    first = await log.consume()
    adding = asyncio.create_task(log.add(12_000))
    second = await log.consume()
    await adding
    await log.add(3000)
    await log.consumed()
    assert await metric(second, "telemetry_events_total") > 0
    assert await second.stop() == 0
    await log.add(3000)
    await log.consumed()
    first.kill()
    third = await log.consume()
    await log.add(3000)
    await log.consumed()
    assert await metric(third, "telemetry_events_total") > 0
    await check(store, log.sums)


@pytest.mark.parametrize("claimed", [False, True], ids=["before it claims", "after it has claimed"])
async def test_one_that_was_thought_dead_and_wakes(
    log: Log, store: Store, front: ClickHouseFront, claimed: bool
) -> None:
    """With a block in its hands whose offsets its successor has inserted, cut otherwise."""
    if claimed:
        front.fault("refuse")
    old = await log.consume(telemetry_linger_s=0.1 if claimed else 4)
    await log.add(300)
    waits = "telemetry_pending_age_seconds" if claimed else "telemetry_held_bytes"
    await eventually(lambda: _over(metric(old, waits), 0), "it to have a block", 30)
    old.process.send_signal(signal.SIGSTOP)
    front.fault("ok")
    await log.add(3000)
    new = await log.consume()
    await log.consumed()
    old.process.send_signal(signal.SIGCONT)
    await eventually(lambda: _over(metric(old, "telemetry_events_total"), -1), "it to answer again", 30)
    assert await new.stop() == 0
    await log.add(1000)
    await log.consumed()
    await check(store, log.sums)


async def test_what_is_no_event_is_listed_and_replayed(log: Log, store: Store) -> None:
    await log.add(1000, poison_every=100)
    consumer = await log.consume()
    await log.consumed()
    await check(store, log.sums)
    assert await metric(consumer, "telemetry_dlq_total") == log.sums.poison == 10
    dead = log.dead_letters()
    letters = await dead.waiting(100)
    assert len({letter.id for letter in letters}) == len(letters) == 10
    for letter in letters:
        assert (letter.topic, letter.key, dict(letter.headers)["from"]) == (log.topic, b"bad", b"a test")
        assert letter.reason and letter.offset >= 0
    assert await dead.replay(1, [letters[3].id]) == 1
    assert await dead.replay(1, [letters[3].id]) == 0, "it was replayed"
    # It is no event still: it comes back under the name of its new place

    async def back() -> list[bytes | None]:
        return [letter.value for letter in await dead.waiting(100) if letter.id not in {old.id for old in letters}]

    assert await eventually(back, "it to come back", 20) == [letters[3].value]
    assert letters[3].id not in {letter.id for letter in await dead.waiting(100)}
    await dead.close()


async def test_killed_again_and_again(log: Log, store: Store) -> None:
    draw = random.Random()
    consumer = await log.consume(telemetry_block_rows=300)
    for _ in range(5):
        adding = asyncio.create_task(log.add(3600, poison_every=1200))
        await asyncio.sleep(draw.uniform(0.1, 1.0))  # anywhere in its work
        consumer.kill()
        consumer = await log.consume(telemetry_block_rows=300)
        await adding
    await log.add(2000)
    await log.consumed()
    await check(store, log.sums)
    dead = log.dead_letters()
    assert len(await dead.waiting(1000)) == log.sums.poison == 15
    await dead.close()


async def test_what_retention_took_before_it_was_inserted_is_counted(
    log: Log, store: Store, front: ClickHouseFront
) -> None:
    """ClickHouse and the consumer are away for longer than the topic keeps its records; claims are among them."""
    front.fault("refuse")
    await log.add(3000)
    consumer = await log.consume(telemetry_block_rows=100)
    await eventually(lambda: _over(metric(consumer, "telemetry_pending_age_seconds"), 1), "blocks to be claimed", 30)
    consumer.kill()
    admin = AIOKafkaAdminClient(bootstrap_servers=log.servers)
    await admin.start()
    await admin.delete_records({TopicPartition(log.topic, k): RecordsToDelete(kept) for k, kept in ((0, 60), (1, 250))})
    await admin.close()
    front.fault("ok")
    consumer = await log.consume(telemetry_block_rows=100)
    await log.consumed()
    assert await metric(consumer, "telemetry_expired_events_total") == 60 + 250
    assert sum((await stored(store)).values()) == log.sums.records - 60 - 250


async def test_a_topic_that_is_not_there(kafka: KafkaServer, settings: dict[str, Any]) -> None:
    consumer = ConsumerProcess(**settings)
    assert await asyncio.to_thread(consumer.process.wait, 30) == 1
    consumer.kill()
