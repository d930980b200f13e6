"""The database of tenants, on SQLite and on PostgreSQL. A running one is named by ``STREAM_GW_TEST_POSTGRES_URL``."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import asyncpg
import pytest

from stream_fabric.accounts.ports import TenantRecords
from stream_fabric.process.host import HostClock, HostRandom
from stream_gw.tenancy import open_tenancy
from stream_gw.tenancy.tenancy import Tenancy
from tests.support.memory_tenants import MemoryTenants
from tests.support.postgres import PostgresServer

PEPPER = "a pepper of sixteen bytes"
Opener = Callable[..., AbstractAsyncContextManager[Tenancy]]


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    url = os.environ.get("STREAM_GW_TEST_POSTGRES_URL")
    if url:
        yield url
        return
    with PostgresServer() as server:
        yield server.url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.platform)])
async def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """An empty database of this test's own."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'tenants.db'}"
        return
    server: str = request.getfixturevalue("postgres_url")
    name = f"test_{os.urandom(6).hex()}"
    await administer(server, f"CREATE DATABASE {name}")
    yield f"{server.rpartition('/')[0]}/{name}"
    await administer(server, f"DROP DATABASE {name} WITH (FORCE)")


async def administer(url: str, statement: str) -> None:
    """Run a statement on a connection of its own."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture
def records() -> MemoryTenants:
    return MemoryTenants()


@pytest.fixture
def open_database(database_url: str) -> Opener:
    """Open the test's database once more."""

    def open_(  # type: ignore[no-untyped-def]
        records: TenantRecords | None, url: str = database_url, pepper: str = PEPPER, previous: str = ""
    ):
        return open_tenancy(url, records, HostClock(), HostRandom(), pepper, previous)

    return open_


@pytest.fixture
async def tenancy(open_database: Opener, records: MemoryTenants) -> AsyncIterator[Tenancy]:
    """The migrated database, which publishes to ``records``."""
    async with open_database(records) as opened:
        await opened.database.migrate()
        yield opened
