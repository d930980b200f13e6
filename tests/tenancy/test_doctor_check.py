"""The check of ``stream-gw doctor`` on the database of tenants."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from stream_gw.cli.checks.report import Finding, Report
from stream_gw.cli.checks.tenancy import check_tenancy
from stream_gw.settings import DatabaseSettings
from stream_gw.tenancy.sql.database import Database
from stream_gw.tenancy.tenancy import Tenancy
from tests.tenancy.conftest import PEPPER
from tests.tenancy.test_changes import make_key, make_tenant


async def check(url: str, pepper: str = PEPPER, previous: str = "") -> list[Finding]:
    report = Report(lambda finding: None)
    peppers = {"key_pepper": SecretStr(pepper), "key_pepper_previous": SecretStr(previous)}
    await check_tenancy(report, DatabaseSettings(database_url=url, **peppers))  # type: ignore[arg-type]
    return report.findings


async def test_a_migrated_database_with_a_pepper_is_fine(database_url: str) -> None:
    (schema, _) = await check(database_url)
    assert schema.status == ("absent" if database_url.startswith("sqlite") else "missing")
    assert "stream-gw tenants migrate" in schema.remedy
    database = Database(database_url)
    await database.migrate()
    await database.close()
    assert {finding.status for finding in await check(database_url)} == {"ok"}
    (schema, pepper) = await check(database_url, pepper="")
    assert schema.status == "ok" and pepper.status == "missing" and "STREAM_GW_KEY_PEPPER" in pepper.remedy
    assert "hunter2" not in str(schema)


async def test_keys_of_another_pepper_are_counted(tenancy: Tenancy, database_url: str) -> None:
    await make_tenant(tenancy)
    key = await make_key(tenancy)
    other = "another pepper of many bytes"
    (_, _, old) = await check(database_url, other, PEPPER)
    assert (old.status, old.found) == ("absent", "1 keys have the previous pepper") and "keys rotate" in old.remedy
    (_, _, lost) = await check(database_url, other)
    assert lost.status == "missing" and "STREAM_GW_KEY_PEPPER_PREVIOUS" in lost.remedy
    async with tenancy.change("cli:test") as session:
        await session.keys.revoke(key.id)
    (_, _, done) = await check(database_url, other, PEPPER)
    assert "remove it" in done.remedy


@pytest.mark.parametrize("url", ["postgresql://u:hunter2@127.0.0.1:1/x", "sqlite:////nowhere/at/all.db"])
async def test_a_database_that_is_away_is_missing(url: str) -> None:
    (finding,) = await check(url)
    assert finding.status == "missing" and "STREAM_GW_DATABASE_URL" in finding.remedy
    assert "hunter2" not in str(finding)


async def test_without_a_database_nothing_is_checked() -> None:
    (finding,) = await check("")
    assert finding.status == "skipped"
