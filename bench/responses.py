"""Cost of stored responses: the record at a create, the write to the database, and the history of a chain.

``python -m bench.responses [DATABASE_URL]`` on an empty database; without one an SQLite file is made.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time

from stream_fabric.redis.client import RedisClient
from stream_gw.responses import StorePolicy
from stream_gw.tenancy.sql.database import Database
from tests.responses.conftest import ACME, Gateway, Platform
from tests.support.redis import RedisServer

_COUNT = 300
_TEXT = "A question of some length about rivers, and what the weather does to them. " * 12
_ANSWER = "An answer of some length about rivers, and what the weather does to them. " * 24


async def measure(url: str) -> None:
    database = Database(url)
    await database.migrate()
    await database.close()
    with RedisServer() as server:
        client = RedisClient(server.url)
        await client.start()
        platform = Platform(client, url)
        gateway = Gateway(platform, url, StorePolicy(), 1 << 30)
        assert gateway.rows is not None and gateway.database is not None
        records, previous = [], None
        for _ in range(_COUNT):
            records.append(platform.response(_TEXT, previous_response_id=previous))
            previous = records[-1].id
        started = time.perf_counter()
        for record in records:
            await gateway.store.begun(ACME, record)
        print(f"record at a create: {(time.perf_counter() - started) / _COUNT * 1e6:.0f} µs")
        for record in records:
            await platform.create(record)
            await platform.end(record, _ANSWER)
        started = time.perf_counter()
        for record in records:
            await gateway.store.read(ACME, record.id)
        print(f"completed from its log: {(time.perf_counter() - started) / _COUNT * 1e6:.0f} µs")
        started = time.perf_counter()
        while await gateway.upkeep.save():
            pass
        print(f"written to the database: {_COUNT / (time.perf_counter() - started):.0f} a second")
        print(f"bytes of a row: {await gateway.rows.bytes(ACME) / _COUNT:.0f}")
        for where in ("Redis", "the database"):
            if where == "the database":
                for record in records:
                    await gateway.leaves_redis(record.id)
            started = time.perf_counter()
            items = await gateway.store.history(ACME, records[99].id, None)
            assert len(items) == 200
            print(f"history of 100 responses in {where}: {(time.perf_counter() - started) * 1e3:.1f} ms")
        await gateway.rows.close()
        await gateway.database.close()
        await client.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{folder}/bench.db"))
