"""Events by Redis: one consumer at a time, by lease; each event once, also into an engine that dies with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from stream_fabric.events import encode_event
from stream_fabric.limits import EVENTS_REDIS_BYTES_MAX
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from stream_fabric.redis.ingest import IngestState, RedisIngest
from telemetry.consume.blocks import Block
from telemetry.consume.dlq import Dead
from telemetry.consume.redis_dlq import RedisDeadLetters
from telemetry.consume.source import RedisSource, SourceUnavailable
from telemetry.emit.record import Part
from telemetry.store.store import Store
from tests.support.clickhouse import ClickHouseFront
from tests.support.redis import RedisServer
from tests.support.waiting import eventually
from tests.telemetry.load import AT_US, POISON, ConsumerProcess, Sums, check, events, stored

pytestmark = pytest.mark.platform

TOKEN = "a-token"


class RedisLog:
    """The event stream of a Redis, what was put into it, and the consumers that were started on it."""

    def __init__(self, url: str, client: RedisClient) -> None:
        self.url = url
        self.stream = RedisEvents(client)
        self.dead = RedisEvents(client, "dlq")
        self.sums = Sums()
        self.consumers: list[ConsumerProcess] = []
        self._batches = 0

    async def add(self, count: int, *, poison: int = 0) -> None:
        self._batches += 1
        records = []
        for event in events(count, self._batches):
            self.sums.count(event)
            records.append((encode_event(event), True))
        for i in range(poison):
            self.sums.poison += 1
            records.insert(i * 7, (POISON[1:][i % 3], True))
        for begin in range(0, len(records), 60):
            assert await self.stream.append(f"w{self._batches}", begin + 1, records[begin : begin + 60]) == []

    def start(self, clickhouse: str, **settings: Any) -> ConsumerProcess:
        consumer = ConsumerProcess(
            redis_url=self.url, clickhouse=clickhouse, telemetry_session_s=1.5, telemetry_linger_s=0.1,
            telemetry_block_rows=300, telemetry_token=TOKEN, **settings,
        )  # fmt: skip
        self.consumers.append(consumer)
        return consumer

    async def empty(self) -> bool:
        return await self.stream.read(0, 1) == []


@pytest.fixture
async def log(redis_server: RedisServer) -> AsyncIterator[RedisLog]:
    client = RedisClient(redis_server.url)
    await client.start()
    made = RedisLog(redis_server.url, client)
    yield made
    for consumer in made.consumers:
        consumer.kill()
    await client.close()


async def ask(consumer: ConsumerProcess, body: object, token: str = TOKEN) -> tuple[int, Any]:
    async with ClientSession() as session:
        headers = {"authorization": f"Bearer {token}"}
        async with session.post(f"{consumer.url}/query", data=json.dumps(body), headers=headers) as answer:
            return answer.status, await answer.json()


async def billed(consumer: ConsumerProcess) -> dict[tuple[str, str], Counter[str]]:
    at = datetime.fromtimestamp(AT_US / 1e6, UTC)
    window = {"since": f"{at - timedelta(hours=2):%F %T}", "until": f"{at + timedelta(hours=5):%F %T}"}
    status, answer = await ask(consumer, {"query": "usage", "parameters": window, "rows_max": 10_000})
    assert status == 200, answer
    found: dict[tuple[str, str], Counter[str]] = {}
    for row in answer["rows"]:
        told = dict(zip(answer["columns"], row, strict=True))
        del told["hour"]
        found.setdefault((told.pop("tenant"), told.pop("model")), Counter()).update(told)
    return found


async def test_a_crash_between_insert_and_commit(log: RedisLog, store: Store, front: ClickHouseFront) -> None:
    await log.add(60)
    front.fault("lose ingest_state")
    consumer = await log.start(front.url).ready()

    async def all_rows() -> bool:
        return await stored(store) == dict(log.sums.rows)

    await eventually(all_rows, "the first block to be inserted", 30)
    consumer.kill()
    front.fault("ok")
    assert not await log.empty(), "what is not committed is held"
    await log.add(1000)
    await log.start(front.url).ready()
    await eventually(log.empty, "everything to be committed", 60)
    await check(store, log.sums)


async def test_the_lag_is_a_number_of_records(log: RedisLog, front: ClickHouseFront) -> None:
    front.fault("refuse attempts")
    consumer = await log.start(front.url).ready()
    wanted = 0

    async def is_told() -> bool:
        async with ClientSession() as session, session.get(f"{consumer.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return f'telemetry_lag_events{{partition="0",topic="redis"}} {wanted}.0' in lines

    for count in (40, 60):
        wanted += count
        await log.add(count)
        await eventually(is_told, f"a lag of {wanted}")
    front.fault("ok")
    wanted = 0
    await eventually(is_told, "no lag")


async def test_another_takes_over_when_the_lease_ends(log: RedisLog, store: Store, front: ClickHouseFront) -> None:
    first = await log.start(front.url).ready()
    await log.add(1000)
    await eventually(log.empty, "everything to be committed", 60)
    second = await log.start(front.url).ready()
    first.kill()
    await log.add(1000)
    await eventually(log.empty, "everything to be committed", 60)
    third = await log.start(front.url).ready()
    assert await second.stop() == 0
    await log.add(1000)
    await eventually(log.empty, "everything to be committed", 60)
    assert await third.stop() == 0
    await check(store, log.sums)


async def test_the_embedded_engine_dies_with_its_consumer(log: RedisLog, tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}/data"
    draw = random.Random()
    consumer = await log.start(url).ready()
    for _ in range(4):
        await log.add(1500)
        await asyncio.sleep(draw.uniform(0, 0.6))  # anywhere in its work
        consumer.kill()
        consumer = await log.start(url).ready()
    await eventually(log.empty, "everything to be committed", 60)
    assert await billed(consumer) == log.sums.usage
    assert await consumer.stop() == 0


async def test_the_door(log: RedisLog, tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}/data"
    consumer = await log.start(url).ready()
    async with ClientSession() as session:
        async with session.get(f"{consumer.url}/healthz") as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")
        async with session.get(f"{consumer.url}/query") as answer:
            assert answer.status == 405
    assert (await ask(consumer, {"query": "ingest"}, token="another"))[0] == 401
    for body, status, says in (
        ("query", 400, "no valid query request"),
        ({"query": "ingest", "sql": "SELECT 1"}, 400, "unknown field"),
        ({"query": "SELECT 1"}, 404, "there is no query SELECT 1; there are "),
        ({"query": "ingest", "rows_max": 100_000}, 400, "rows_max"),
        ({"query": "usage", "parameters": {"since": "then", "until": "now"}}, 400, "DateTime"),
    ):
        assert (found := await ask(consumer, body))[0] == status
        assert says in found[1]["error"]["message"]
    assert (await ask(consumer, {"query": "ingest"}))[0] == 200
    other = ConsumerProcess(redis_url=log.url, clickhouse=url)
    assert await asyncio.to_thread(other.process.wait, 30) == 1, "the folder is open"
    other.kill()


@pytest.fixture
def cli(log: RedisLog) -> Iterator[Any]:
    def run(*flags: str) -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith("STREAM_GW_")}
        command = [sys.executable, "-m", "stream_gw.cli", "telemetry", *flags]
        done = subprocess.run(
            command, env={**env, "STREAM_GW_REDIS_URL": log.url}, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run


async def test_a_block_of_dead_letters_that_fits_in_part_goes_on_when_there_is_room(log: RedisLog) -> None:
    """The next try of the same block finds the room that was made meanwhile, and writes no letter twice."""
    client = RedisClient(log.url)
    await client.start()
    letters = RedisDeadLetters(client, EVENTS_REDIS_BYTES_MAX)
    letters._dead = stream = RedisEvents(client, "dlq", 1500)
    block = [Dead(f"redis:0:{number}", "redis", 0, number, 0, "no event", value=bytes(300)) for number in range(6)]
    for _ in range(2):
        with pytest.raises(SourceUnavailable, match="dlq replay"):
            await letters.put("a block", block)
    held = [letter.id for letter in await letters.waiting(10)]
    assert 0 < len(held) < 4, "a part fits, and each of the next two steps makes room for a part of the rest"
    seen = list(held)
    while len(seen) < 6:
        await stream.drop([offset for offset, _ in await stream.read(0, 10)])
        with contextlib.suppress(SourceUnavailable):
            await letters.put("a block", block)
        seen += [letter.id for letter in await letters.waiting(10)]
    assert seen == [letter.id for letter in block]
    await client.close()


async def test_dead_letters(log: RedisLog, store: Store, front: ClickHouseFront, cli: Any) -> None:
    assert "no dead letters" in await asyncio.to_thread(cli, "dlq", "list")
    await log.add(500, poison=5)
    consumer = await log.start(front.url).ready()
    await eventually(log.empty, "everything to be committed", 60)
    await check(store, log.sums)
    letters = json.loads(await asyncio.to_thread(cli, "dlq", "list", "--json"))
    assert len(letters) == len({letter["id"] for letter in letters}) == 5
    assert letters[0]["value"] == "no event" and "malformed" in letters[0]["reason"]
    assert letters[0]["id"] in await asyncio.to_thread(cli, "dlq", "list", "--count", "1")
    replayed = await asyncio.to_thread(cli, "dlq", "replay", letters[2]["id"], "--json")
    assert json.loads(replayed) == {"replayed": 1}

    async def back() -> set[str]:
        now = {letter["id"] for letter in json.loads(await asyncio.to_thread(cli, "dlq", "list", "--json"))}
        return now - {letter["id"] for letter in letters}

    await eventually(back, "it to come back, as it is no event still", 20)
    assert await consumer.stop() == 0


async def test_who_is_not_the_owner_writes_nothing(log: RedisLog, redis_client: RedisClient) -> None:
    client = log.stream._client
    one, other = RedisIngest(client, "one", 300), RedisIngest(client, "other", 60_000)
    assert await one.own() == IngestState(None, "")
    assert await one.commit(5, Block(5, 9, 1).encode())
    assert await other.own() is None
    assert not await other.commit(7, "")

    async def taken() -> IngestState | None:
        return await other.own()

    # Its lease ends, and with it its right, whoever comes next or nobody
    state = await eventually(taken, "the lease to end")
    assert state == IngestState(5, Block(5, 9, 1).encode())
    assert not await one.commit(10, "")
    assert await one.own() is None
    await other.leave()
    assert not await one.commit(10, ""), "it must read first what is written down"
    assert await one.own() == IngestState(5, Block(5, 9, 1).encode())


async def test_the_end_of_a_log_that_does_not_answer_is_not_known(log: RedisLog, redis_server: RedisServer) -> None:
    """Events may pile up in it, so nothing counts as complete."""
    client, part = RedisClient(redis_server.url), Part("redis", 0)
    await client.start()
    source, assigned = RedisSource(client, "c"), asyncio.Event()
    await source.start(lambda parts: assigned.set(), _nothing_revoked)
    await assigned.wait()
    source.seek(part, (await source.position(part)).next or 0)

    async def is_known() -> bool:
        with contextlib.suppress(SourceUnavailable, TimeoutError):
            async with asyncio.timeout(0.3):
                await source.read([part], 0.0)
        return source.end(part) is not None

    await eventually(is_known, "the first answer")
    redis_server.freeze()
    try:
        await eventually(lambda: _is_not(is_known), "the answer to be old")
    finally:
        redis_server.thaw()
    await eventually(is_known, "the next answer")
    await source.close()
    await client.close()


async def _nothing_revoked(parts: Collection[Part]) -> None:
    pass


async def _is_not(condition: Callable[[], Awaitable[bool]]) -> bool:
    return not await condition()
