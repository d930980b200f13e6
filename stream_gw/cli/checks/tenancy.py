"""Checks of the database of tenants."""

from __future__ import annotations

from collections import Counter

from stream_fabric.process.host import HostClock, HostRandom
from stream_gw.cli.checks.report import Report
from stream_gw.settings import DatabaseSettings
from stream_gw.tenancy import DatabaseUnavailable, open_tenancy
from stream_gw.tenancy.models import Pepper


async def check_tenancy(report: Report, settings: DatabaseSettings) -> None:
    """Check that the database answers, that its schema is current, and that keys can be hashed."""
    if not settings.database_url:
        report.skipped("database of tenants", "set STREAM_GW_DATABASE_URL where tenants are in PostgreSQL or SQLite")
        return
    pepper, previous = settings.key_pepper.get_secret_value(), settings.key_pepper_previous.get_secret_value()
    peppers: Counter[Pepper] = Counter()
    try:
        async with open_tenancy(settings.database_url, None, HostClock(), HostRandom(), pepper, previous) as tenancy:
            where = tenancy.database.shown
            applied, known = await tenancy.database.schema()
            takes_writes = await tenancy.database.takes_writes()
            if applied >= known:
                async with tenancy.read() as session:
                    peppers = await session.keys.peppers()
    except ValueError as error:
        report.missing("a usable STREAM_GW_DATABASE_URL", str(error))
        return
    except DatabaseUnavailable as error:
        report.missing("database of tenants", f"{error}; start it, or correct STREAM_GW_DATABASE_URL")
        return
    if not takes_writes:
        remedy = (
            "name the primary in STREAM_GW_DATABASE_URL, or all hosts: postgresql://user@one:5432,two:5432/name"
            "?target_session_attrs=read-write; on the primary itself see default_transaction_read_only"
        )
        found = "read-only: a standby, or a primary that somebody made so"
        report.missing(f"writes to database {where}", remedy, found=found)
    elif applied < known:
        found = f"version {applied}, this release needs {known}"
        is_server = not settings.database_url.startswith("sqlite")  # a file is migrated by its first use
        remedy = "run stream-gw tenants migrate"
        report.missing(f"the schema of database {where}", remedy, found=found, needed=is_server)
    else:
        report.ok(f"database of tenants {where} answers", f"schema version {applied}")
    if pepper:
        report.ok("STREAM_GW_KEY_PEPPER")
        _check_peppers(report, peppers, bool(previous))
    else:
        remedy = (
            "set STREAM_GW_KEY_PEPPER to the fleet's secret: without it keys of the database are neither made nor found"
        )
        report.missing("STREAM_GW_KEY_PEPPER", remedy)


def _check_peppers(report: Report, peppers: Counter[Pepper], has_previous: bool) -> None:
    """Report keys that another pepper than the current one has hashed."""
    remedy = "list them with stream-gw keys list, and run stream-gw keys rotate for each"
    if peppers["lost"]:
        found = f"{peppers['lost']} keys have a pepper that is not set, so gateways refuse them"
        report.missing("the pepper of every key", f"set STREAM_GW_KEY_PEPPER_PREVIOUS to it, or {remedy}", found=found)
    if peppers["previous"]:
        found = f"{peppers['previous']} keys have the previous pepper"
        report.missing("the current pepper for every key", remedy, found=found, needed=False)
    elif has_previous:
        remedy = "no key needs STREAM_GW_KEY_PEPPER_PREVIOUS any more: remove it from gateways and commands"
        report.missing("a fleet with one pepper", remedy, needed=False)
