"""Checks of ClickHouse and of the telemetry consumer that gateways and controllers ask."""

from __future__ import annotations

import os
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from stream_fabric.ports import Clock
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.system_errors import reason
from stream_gw.cli.checks.report import Report
from telemetry.settings import TelemetrySettings
from telemetry.store.errors import StoreRefused, StoreUnavailable
from telemetry.store.migrations import migrations
from telemetry.store.store import Store

_TIMEOUT = aiohttp.ClientTimeout(total=5)
_CLOCK_S_MAX = 3.0
"""Seconds between the clocks of this host and of telemetry's from which the check warns; its answer has whole ones."""
_UNKNOWN_TABLE = "UNKNOWN_TABLE"
_UNKNOWN_DATABASE = "UNKNOWN_DATABASE"


async def check_clickhouse(report: Report, settings: TelemetrySettings) -> None:
    if not settings.clickhouse:
        report.skipped("ClickHouse", "set STREAM_GW_CLICKHOUSE where stream-gw telemetry runs")
        return
    store = Store(settings.clickhouse, clock=HostClock(), random=HostRandom())
    if store.embedded:
        _check_embedded(report, Path(urlsplit(settings.clickhouse).path))
        return
    try:
        rows = await store.query("SELECT version()")
        report.ok(f"ClickHouse at {store.shown} answers", f"version {rows.rows[0][0]}")
        applied = (await store.query("SELECT max(version) FROM migrations")).rows[0][0]
        missing = await store.missing_tables()
    except (StoreUnavailable, StoreRefused) as error:
        _report_refusal(report, store.shown, str(error))
        return
    finally:
        await store.close()
    _check_schema(report, int(applied), len(migrations()), missing)


def _report_refusal(report: Report, where: str, error: str) -> None:
    """Report ClickHouse's error: a missing schema, or a server that does not answer as it should."""
    if _UNKNOWN_TABLE in error or _UNKNOWN_DATABASE in error:
        report.missing(
            "ClickHouse's schema", "start stream-gw telemetry, which creates it", found="none yet", needed=False
        )
    else:
        report.missing(f"ClickHouse at {where}", f"{error}; start it, or correct STREAM_GW_CLICKHOUSE")


def _check_schema(report: Report, applied: int, known: int, missing: list[str]) -> None:
    found = f"version {applied}, this release has {known}"
    if applied == known and missing:
        report.missing(
            "a whole schema in ClickHouse",
            "bring back what was dropped or renamed; without it bills or traces are lost",
            found=f"{', '.join(missing)} is not there",
        )
    elif applied == known:
        report.ok("ClickHouse's schema", f"version {applied}")
    elif applied < known:
        report.missing("ClickHouse's schema", "start stream-gw telemetry, which migrates it", found=found, needed=False)
    else:
        report.missing("a release that knows ClickHouse's schema", "upgrade stream-gw", found=found)


def _check_embedded(report: Report, folder: Path) -> None:
    """Check that the embedded engine is installed and its folder can be written.

    The engine is not opened, because only one process at a time may open the folder.
    """
    if find_spec("chdb") is None or find_spec("clickhouse_connect") is None:
        report.missing("ClickHouse's engine", "pip install 'stream-gw[chdb]', or name a server by URL")
        return
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        report.ok("ClickHouse's engine", f"installed; its folder {folder} can be written")
    else:
        remedy = f"let this user write {there}, or correct STREAM_GW_CLICKHOUSE"
        report.missing(f"a folder for ClickHouse's engine, {folder}", remedy, found="it cannot be written")


async def check_consumer(report: Report, url: str, token: str, host: Clock) -> None:
    """Check that the consumer at the URL answers and accepts the token, and that its clock is this host's."""
    if not url:
        report.skipped("telemetry consumer", "set STREAM_GW_TELEMETRY_URL where gateways or controllers ask it")
        return
    url = url.rstrip("/")
    try:
        async with aiohttp.ClientSession(timeout=_TIMEOUT, headers={"authorization": f"Bearer {token}"}) as session:
            async with session.get(f"{url}/healthz") as answer:
                health, date, now_s = answer.status, answer.headers.get("date", ""), host.now_us() / 1e6
            # A query that does not exist: only the token decides between 401, 403 and 404
            async with session.post(f"{url}/query", json={"query": "doctor"}) as answer:
                asked = answer.status
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        remedy = f"{reason(error)}; start stream-gw telemetry, or correct STREAM_GW_TELEMETRY_URL"
        report.missing(f"telemetry consumer at {url}", remedy)
        return
    if health != 200:
        report.missing(
            f"a healthy telemetry consumer at {url}",
            "see its log: it has no event log",
            found=f"/healthz says {health}",
        )
    _check_clock(report, url, date, now_s)
    match asked:
        case 404:
            report.ok(f"telemetry consumer at {url} answers", "and takes STREAM_GW_TELEMETRY_TOKEN")
        case 401:
            remedy = "set STREAM_GW_TELEMETRY_TOKEN to the token of the consumer"
            report.missing(f"a valid token for the telemetry consumer at {url}", remedy, found="refused, 401")
        case 403:
            remedy = "start the consumer with STREAM_GW_TELEMETRY_TOKEN, and give gateways the same"
            report.missing(f"a telemetry consumer at {url} that may be asked", remedy, found="it has no token, 403")
        case status:
            remedy = "correct STREAM_GW_TELEMETRY_URL: this is no stream-gw telemetry"
            report.missing(f"telemetry consumer at {url}", remedy, found=f"/query says {status}")


def _check_clock(report: Report, url: str, date: str, now_s: float) -> None:
    """Warn when the consumer's clock is not this host's: it says until when all bills are there."""
    try:
        ahead_s = parsedate_to_datetime(date).timestamp() - now_s
    except ValueError:  # not stream-gw telemetry, which the next check finds
        return
    if abs(ahead_s) > _CLOCK_S_MAX:
        report.missing(
            f"one time at the telemetry consumer at {url} and this host",
            "correct the clock that is wrong (chronyc tracking, timedatectl): telemetry's says which hours have all "
            "their bills, and what --since means",
            found=f"it is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}",
            needed=False,
        )
