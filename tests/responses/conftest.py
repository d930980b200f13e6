"""Stored responses on a real Redis of the test's own and a real database, with streams that the test writes itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from stream_fabric.accounts.records import PlanRecord
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.tenancy.responses import RedisResponses
from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.frames import ChoiceEnd, Delta, End, Frame, Open, Usage, encode
from stream_fabric.stream.ids import StreamId, TenantId, new_stream_id
from stream_fabric.stream.log import Append, AppendCode, CreateCode
from stream_gw.dialects.facts import StreamFacts, StreamMeta
from stream_gw.responses import Item, Outcome, ResponseRecord, ResponseStore, StorePolicy
from stream_gw.responses.conversations import Conversations
from stream_gw.responses.database import ResponseRows
from stream_gw.responses.held import HeldRecords
from stream_gw.responses.job import ResponseUpkeep
from stream_gw.responses.seal import Seals
from stream_gw.tenancy.sql.database import Database
from tests.support.redis import RedisServer
from tests.tenancy.conftest import database_url, postgres_url

__all__ = ["database_url", "postgres_url"]

ACME, GLOBEX = TenantId("acme"), TenantId("globex")
EPOCH = Epoch(1, "aa")
SECRET = b"a secret of 16 bytes"
NOWHERE = "postgresql://nobody@127.0.0.1:1/x"
POLICY = StorePolicy()
RETRY_S = 0.2
"""Time after which another gateway takes what a gateway has not finished."""


class Platform:
    """The shared parts of a test's gateways: Redis, the database's URL, plans."""

    def __init__(self, client: RedisClient, url: str) -> None:
        self.client = client
        self.url = url
        self.plans: dict[TenantId, PlanRecord] = {}
        self.log = RedisStreamLog(client, Partitions(4))
        self.random = HostRandom()

    def plan(self, tenant: TenantId) -> PlanRecord:
        return self.plans.get(tenant, PlanRecord("default"))

    def response(self, text: str = "Hi", **fields: Any) -> ResponseRecord:
        """A record of a new response whose input is one message."""
        now_us = HostClock().now_us()
        stream = new_stream_id(now_us // 1000, self.random.token_bytes(10))
        items: list[Item] = [{"role": "user", "content": text}]
        made = {"id": stream, "created_at": now_us // 1_000_000, "model": "m", "input": items}
        return ResponseRecord(**(made | fields))

    async def create(self, record: ResponseRecord, tenant: TenantId = ACME, retention_s: int | None = None) -> None:
        """Create the response's stream."""
        facts = StreamFacts(record.id, record.created_at, record.model, dialect="openai.responses", encoder=3)
        meta = msgspec.json.encode(StreamMeta(facts))
        code = await self.log.create(record.id, EPOCH, tenant, meta, None, "m", retention_s=retention_s)
        assert code is CreateCode.CREATED

    async def end(self, record: ResponseRecord, answer: str = "Hello", status: Any = "completed") -> None:
        """Write the answer as one text, and the terminal."""
        frames: list[Frame] = [
            Open(0, 0, "text"),
            Delta(0, answer, 3),
            ChoiceEnd(0, "stop"),
            End(status, Usage(prompt=5, output=3)),
        ]
        await self.write(record, frames, status)

    async def write(self, record: ResponseRecord, frames: list[Frame], status: Any) -> None:
        lines = b"\n".join(encode(frame) for frame in frames)
        append = Append(record.id, str(EPOCH), 1, len(frames), lines, Usage(5, output=3), status=status)
        [reply] = await self.log.append(self.log.partition(record.id), [append])
        assert reply.code is AppendCode.OK


class Gateway:
    """One gateway's part of the store; its jobs run when the test calls them."""

    def __init__(self, platform: Platform, url: str | None, policy: StorePolicy, held_bytes_max: int) -> None:
        self.platform = platform
        self.database = None if url is None else Database(url)
        clock, random = HostClock(), HostRandom()
        rows = None if self.database is None else ResponseRows(self.database, lambda: clock.now_us() / 1e6)
        self.rows = rows
        self.outcomes: list[Outcome] = []
        self.held = RedisResponses(platform.client, held_bytes_max, RETRY_S)
        self.records = HeldRecords(self.held, platform.log, rows, clock, policy, self.outcomes.append)
        conversations = Conversations(self.records, platform.plan, clock, random)
        self.store = ResponseStore(self.records, platform.log, conversations, platform.plan, Seals([SECRET], random))
        self.upkeep = ResponseUpkeep(self.records, random)

    async def stored(self, tenant: TenantId = ACME, text: str = "Hi", answer: str = "Hello", **fields: Any) -> StreamId:
        """Make a response whose stream has ended; no job has seen it."""
        record = self.platform.response(text, **fields)
        assert await self.store.begun(tenant, record)
        await self.platform.create(record, tenant)
        await self.platform.end(record, answer)
        return record.id

    async def is_saved(self, response: str, tenant: TenantId = ACME) -> bool:
        """Do one round of the jobs; tell whether the database has the response."""
        await self.upkeep.look()
        await self.upkeep.save()
        assert self.rows is not None
        return await self.rows.find(tenant, response) is not None

    async def leaves_redis(self, response: str, tenant: TenantId = ACME) -> None:
        """Let Redis forget a response that the database has, as it does after its time."""
        await self.platform.client.execute(0, "DEL", f"{prefix_of(tenant)}r:{response}")
        await self.platform.log.delete(StreamId(response), tenant)


def prefix_of(tenant: TenantId) -> str:
    """Prefix of the keys of the tenant's shard."""
    from stream_fabric.redis.tenancy.responses import _tag

    return _tag(tenant)[1]


Opener = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def platform(redis_server: RedisServer, database_url: str) -> AsyncIterator[Platform]:
    client = RedisClient(redis_server.url)
    await client.start()
    database = Database(database_url)
    await database.migrate()
    await database.close()
    yield Platform(client, database_url)
    await client.close()


@pytest.fixture
async def open_gateway(platform: Platform) -> AsyncIterator[Opener]:
    """Open one more gateway."""
    opened: list[Gateway] = []

    async def open_(
        *, url: str | None = platform.url, policy: StorePolicy = POLICY, held_bytes_max: int = 1 << 20
    ) -> Gateway:
        opened.append(Gateway(platform, url, policy, held_bytes_max))
        return opened[-1]

    yield open_
    for gateway in opened:
        if gateway.rows is not None and gateway.database is not None:
            await gateway.rows.close()
            await gateway.database.close()


@pytest.fixture
async def gateway(open_gateway: Opener) -> Gateway:
    return await open_gateway()
