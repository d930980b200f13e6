"""Checks of the database of tenants."""

from __future__ import annotations

from stream_fabric.process.host import HostClock, HostRandom
from stream_gw.cli.checks.report import Report
from stream_gw.settings import DatabaseSettings
from stream_gw.tenancy import DatabaseUnavailable, open_tenancy


async def check_tenancy(report: Report, settings: DatabaseSettings) -> None:
    """Check that the database answers, that its schema is current, and that keys can be hashed."""
    if not settings.database_url:
        report.skipped("database of tenants", "set STREAM_GW_DATABASE_URL where tenants are in PostgreSQL or SQLite")
        return
    pepper = settings.key_pepper.get_secret_value()
    try:
        async with open_tenancy(settings.database_url, None, HostClock(), HostRandom(), pepper) as tenancy:
            where = tenancy.database.shown
            applied, known = await tenancy.database.schema()
    except ValueError as error:
        report.missing("a usable STREAM_GW_DATABASE_URL", str(error))
        return
    except DatabaseUnavailable as error:
        report.missing("database of tenants", f"{error}; start it, or correct STREAM_GW_DATABASE_URL")
        return
    if applied < known:
        found = f"version {applied}, this release needs {known}"
        is_server = not settings.database_url.startswith("sqlite")  # a file is migrated by its first use
        remedy = "run stream-gw tenants migrate"
        report.missing(f"the schema of database {where}", remedy, found=found, needed=is_server)
    else:
        report.ok(f"database of tenants {where} answers", f"schema version {applied}")
    if pepper:
        report.ok("STREAM_GW_KEY_PEPPER")
    else:
        remedy = (
            "set STREAM_GW_KEY_PEPPER to the fleet's secret: without it keys of the database are neither made nor found"
        )
        report.missing("STREAM_GW_KEY_PEPPER", remedy)
