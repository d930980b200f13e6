"""Migrations: from empty, again, by several processes at once, and a schema that is behind or ahead."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from stream_fabric.process.host import HostClock, HostRandom
from stream_gw.settings import DatabaseSettings
from stream_gw.tenancy import DatabaseUnavailable, SchemaOutdated, open_tenancy
from stream_gw.tenancy.sql import tables
from stream_gw.tenancy.sql.database import Database
from stream_gw.tenancy.sql.schema import known_version
from stream_gw.tenancy.sql.tables import metadata
from stream_gw.tenancy.tenancy import Tenancy
from tests.gateway.processes import clean_env
from tests.tenancy.conftest import PEPPER, Opener
from tests.tenancy.test_changes import make_tenant


async def test_a_migration_makes_the_tables_of_the_code_and_repeats_without_effect(tenancy: Tenancy) -> None:
    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    await make_tenant(tenancy)
    found = await tenancy.database.migrate()
    assert found.applied == found.known
    async with tenancy.database.transaction() as connection:
        assert await connection.run_sync(differences) == []
    async with tenancy.read() as session:
        assert [tenant.id for tenant in await session.tenants.page()] == ["acme"]
        assert [plan.name for plan in await session.plans.page()] == ["default"]


def test_the_known_version_is_that_of_the_last_migration() -> None:
    folder = Path(tables.__file__).with_name("migrations")
    assert ScriptDirectory(folder).get_current_head() == f"{known_version():04}"


def test_a_gateway_starts_without_the_code_of_migrations() -> None:
    """Its import takes 0.2 s."""
    code = "import sys, stream_gw.tenancy.sql.database; sys.exit('alembic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


async def test_processes_that_migrate_at_once_wait_for_each_other(database_url: str) -> None:
    databases = [Database(database_url) for _ in range(4)]
    await asyncio.gather(*(database.migrate() for database in databases))
    assert {await database.schema() for database in databases} == {(known_version(), known_version())}
    for database in databases:
        await database.close()


async def test_a_schema_that_is_behind_is_migrated_in_a_file_and_refused_on_a_server(
    open_database: Opener, database_url: str
) -> None:
    async with open_database(None) as tenancy:
        if database_url.startswith("sqlite"):
            await make_tenant(tenancy)
            return
        with pytest.raises(SchemaOutdated, match="stream-gw tenants migrate"):
            await make_tenant(tenancy)
        await tenancy.database.migrate()
        await make_tenant(tenancy)


async def test_the_schema_of_the_next_release_is_accepted(tenancy: Tenancy, open_database: Opener) -> None:
    """During an upgrade gateways of both releases run."""
    async with tenancy.database.transaction() as connection:
        await connection.execute(text(f"UPDATE alembic_version SET version_num = '{known_version() + 1:04}'"))
    async with open_database(None) as next_one:
        await make_tenant(next_one)
        found = await next_one.database.migrate()
        assert found.applied == known_version() + 1


@pytest.mark.parametrize("url", ["postgresql://nobody:hunter2@127.0.0.1:1/x", "sqlite:////nowhere/at/all.db"])
async def test_a_database_that_is_not_there_is_told_without_its_password(url: str) -> None:
    async with open_tenancy(url, None, HostClock(), HostRandom(), PEPPER) as tenancy:
        with pytest.raises(DatabaseUnavailable) as raised:
            await make_tenant(tenancy)
    assert "hunter2" not in raised.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("database_url", "mysql://h/x"), ("database_url", "sqlite:///"), ("key_pepper", "too short")],
)
def test_settings_that_cannot_work_are_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match="must") as raised:
        DatabaseSettings(**{name: value})  # type: ignore[arg-type]
    assert "mysql" not in str(raised.value) and "short" not in str(raised.value)


async def test_a_gateway_imports_no_library_that_it_does_not_need(tmp_path: Path) -> None:
    """Nor the HTTP client that only an endpoint for moderation needs: both would make its start slow."""
    heavy = ("sqlalchemy", "alembic", "asyncpg", "aiohttp")
    code = f"import stream_gw.main, sys; print([name for name in {heavy} if name in sys.modules])"
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env=clean_env()
    )
    out, _ = await run.communicate()
    assert out.strip() == b"[]"


def test_the_migrations_are_modules_of_the_package() -> None:
    """The wheel has every package with an ``__init__``."""
    importlib.import_module("stream_gw.tenancy.sql.migrations.versions.v0001_tenants")
