"""A PostgreSQL that takes no writes (a standby after a failover, or a primary that somebody made so), or is locked."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from stream_gw.cli.checks.report import Finding
from stream_gw.tenancy import DatabaseUnavailable
from stream_gw.tenancy.tenancy import Tenancy
from tests.tenancy.conftest import administer
from tests.tenancy.test_changes import make_tenant
from tests.tenancy.test_doctor_check import check

pytestmark = [pytest.mark.platform, pytest.mark.parametrize("database_url", ["postgres"], indirect=True)]


@contextlib.asynccontextmanager
async def read_only(server: str, url: str) -> AsyncIterator[None]:
    """Make each connection read-only that is opened meanwhile. It stays so, as one that led to a standby does."""
    name = url.rpartition("/")[2]
    await administer(server, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    yield
    await administer(server, f"ALTER DATABASE {name} RESET ALL")


async def test_a_connection_that_led_to_a_standby_is_replaced(
    tenancy: Tenancy, database_url: str, postgres_url: str
) -> None:
    """Its server answers each ping, so it would stay in the pool, and no change would succeed until a restart."""
    await tenancy.database._engine.dispose()
    async with read_only(postgres_url, database_url):
        with pytest.raises(DatabaseUnavailable, match="read-only"):
            await make_tenant(tenancy)
    await make_tenant(tenancy)


async def test_doctor_says_that_a_database_takes_no_writes(
    tenancy: Tenancy, database_url: str, postgres_url: str
) -> None:
    async with read_only(postgres_url, database_url):
        found: list[Finding] = await check(database_url)
    (finding, _) = found
    assert finding.status == "missing" and finding.what.startswith("writes to database"), finding
    assert "target_session_attrs=read-write" in finding.remedy
    assert {finding.status for finding in await check(database_url)} == {"ok"}


async def test_connections_that_all_wait_are_named(tenancy: Tenancy) -> None:
    """A lock that somebody holds in the database: SQLAlchemy's text tells of its pool and of its website."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(tenancy.database.transaction())
        with pytest.raises(DatabaseUnavailable, match="all 4 connections of this process wait"):
            await make_tenant(tenancy)
