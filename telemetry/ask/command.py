"""``stream-gw traces`` and ``stream-gw usage``."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import msgspec

from stream_fabric.errors import BadRequest
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.stream.ids import TenantId, hashed_user
from telemetry.ask.port import Ask
from telemetry.ask.queries import COHORT
from telemetry.ask.reconcile import Report, reconcile
from telemetry.ask.settings import AskSettings
from telemetry.ask.text import reconcile_text, request_line, rows_text
from telemetry.ask.times import window
from telemetry.ask.usage import LostBills, UsageQuery, usage_page
from telemetry.ask.usage.settled import open_settled
from telemetry.ask.usage.text import rebuild_text, usage_csv, usage_text
from telemetry.ask.views import VIEWS
from telemetry.store.connection import Address
from telemetry.store.store import Store

Say = Callable[[str], None]

DISAGREES = 3
"""Exit code of a reconciliation that found differences; 1 is an error."""
_TAIL_S = 1.0
_LATE_US = 60_000_000
"""Maximum delay of an event that ``tail`` still prints, in microseconds."""
_SLOW_S = 5.0
"""Time without an answer after which the command says for what it waits, in seconds."""
_SEEN_MAX = 20_000
_ROWS_MAX = 100_000


async def run(settings: AskSettings, args: argparse.Namespace, say: Say) -> int:
    """Run one ``traces`` or ``usage`` command and return its exit code. Raises StreamGwError and OSError."""
    named = getattr(args, "clickhouse", None) is not None and getattr(args, "telemetry_url", None) is None
    # A flag comes before a variable
    async with _told_when_slow(settings, named, args), _open_ask(settings, ask_clickhouse=named) as ask:
        if args.command == "usage":
            if args.verb == "reconcile":
                return await _reconcile(ask, settings, args, say)
            if args.verb == "show":
                return await show_usage(ask, args, say)
            if args.verb == "rebuild":
                return await _rebuild(ask, args, say)
            await _print_view(ask, "usage", _flags_given(args, "since", "until", "tenant", "model"), args, say)
        elif args.verb == "tail":
            await _tail(ask, _flags_given(args, *COHORT, "ended"), args, say)
        elif args.verb == "sql":
            text = sys.stdin.read() if args.statement == "-" else args.statement
            rows = await ask.sql(text, args.rows)
            found = rows.dicts()
            value = {"columns": rows.columns, "types": rows.types, "rows": rows.rows, "truncated": rows.truncated}
            say(_json(value) if args.json else rows_text(found) + ("\n… and more" if rows.truncated else ""))
        elif args.verb == "query":
            await _print_view(ask, "query", {**_parse_parameters(args.parameters), "name": args.name}, args, say)
        else:
            given = _flags_given(args, "id", "since", "until", "top", "phase", "ended", "a", "b", *COHORT)
            await _print_view(ask, args.verb, given, args, say)
    return 0


def _flags_given(args: argparse.Namespace, *names: str) -> dict[str, str]:
    """Return the values of the named flags, without those that are not set."""
    return {name: str(value) for name in names if (value := getattr(args, name, None))}


def _parse_parameters(parameters: list[str]) -> dict[str, str]:
    """Parse query parameters written as ``NAME=VALUE``. Raises BadRequest."""
    pairs = {}
    for text in parameters:
        name, equals, value = text.partition("=")
        if not equals or name == "name":
            raise BadRequest(f"write a parameter as NAME=VALUE, got {text[:60]!r}")
        pairs[name] = value
    return pairs


async def _print_view(ask: Ask, name: str, given: Mapping[str, str], args: argparse.Namespace, say: Say) -> None:
    view = await VIEWS[name](ask, given, _now_us())
    say(_json(view.value) if args.json else view.text)
    if args.json and view.note:
        sys.stderr.write(f"{view.note}\n")


async def _tail(ask: Ask, given: Mapping[str, str], args: argparse.Namespace, say: Say) -> None:
    """Print each request once when it ends, until the task is cancelled."""
    seen: OrderedDict[str, None] = OrderedDict()
    started_us = _now_us()
    while True:
        now_us = _now_us()
        rows = await ask.query(
            "recent",
            {**given, "from_us": max(started_us, now_us - _LATE_US), "until_us": now_us + _LATE_US, "top": 1000},
        )
        for row in reversed(rows):
            if row["id"] in seen:
                continue
            seen[str(row["id"])] = None
            say(_json(row) if args.json else request_line(row))
        while len(seen) > _SEEN_MAX:
            seen.popitem(last=False)
        await asyncio.sleep(_TAIL_S)


async def _reconcile(ask: Ask, settings: AskSettings, args: argparse.Namespace, say: Say) -> int:
    """Print the reconciliation and return its exit code: 0, or ``DISAGREES``."""
    from_us, until_us = window({"since": args.since, "until": args.until}, _now_us(), "24h")
    if args.no_redis:
        report = await reconcile(ask, None, from_us, until_us, args.tenant)
    else:
        async with open_settled(settings.redis_url) as settled:
            report = await reconcile(ask, settled, from_us, until_us, args.tenant)
    say(_json(_report_value(report)) if args.json else reconcile_text(report))
    return 0 if report.agrees else DISAGREES


async def show_usage(ask: Ask, args: argparse.Namespace, say: Say) -> int:
    """Print all pages of usage in groups; as JSON, one object with all rows. Raises BadRequest."""
    if args.csv and args.json:
        raise BadRequest("--json and --csv exclude each other")
    given = _flags_given(args, "to", "group_by", "bucket", "tenant", "model", "key")
    query = UsageQuery(from_=args.from_, limit=1000, user=_user_hash(args), **given)
    now_us = _now_us()  # one range for all pages
    page = first = await usage_page(ask, query, now_us, args.kept_days)
    rows = page["data"]
    while page["has_more"] and len(rows) < _ROWS_MAX:
        query = msgspec.structs.replace(query, after=page["last_id"])
        page = await usage_page(ask, query, now_us, args.kept_days)
        rows += page["data"]
    for row in rows:
        row["margin_micro"] = row["price_micro"] - row["gpu_cost_micro"]
    whole = {**page, "complete_until": first["complete_until"], "data": rows}
    if args.csv:
        if page["has_more"]:
            sys.stderr.write(f"only the first {len(rows)} rows; choose a shorter range or coarser groups\n")
        say(usage_csv(whole, rows))
    else:
        say(_json(whole) if args.json else usage_text(whole, rows))
    return 0


def _user_hash(args: argparse.Namespace) -> str:
    """Return the hash of the user that is named, or given by its hash; empty: no user is. Raises BadRequest."""
    user: str = args.user
    if not user or re.fullmatch("[0-9a-f]{16}", user):
        return user
    if not args.tenant:
        raise BadRequest("name the tenant of the user: --tenant")
    return hashed_user(TenantId(args.tenant), user)


async def _rebuild(ask: Ask, args: argparse.Namespace, say: Say) -> int:
    """Reconstruct lost bills of closed hours from Redis. The telemetry process does it, because it may write."""
    from telemetry.ask.http import HttpAsk

    if not isinstance(ask, HttpAsk):
        raise BadRequest("the process stream-gw telemetry writes bills: set STREAM_GW_TELEMETRY_URL to it")
    from_us, until_us = window({"since": args.since, "until": args.until}, _now_us(), "24h")
    body = {"from_us": from_us, "until_us": until_us, "tenant": args.tenant, "write": args.write}
    found = msgspec.convert((await ask.post("/rebuild", body))["lost"], list[LostBills])
    say(_json([asdict(each) for each in found]) if args.json else rebuild_text(found, written=args.write))
    return 0


def _report_value(report: Report) -> dict[str, Any]:
    return {**asdict(report), "agrees": report.agrees}


@asynccontextmanager
async def _told_when_slow(settings: AskSettings, ask_clickhouse: bool, args: argparse.Namespace) -> AsyncIterator[None]:
    """Say on stderr for what the command waits, once, if it takes long."""
    where = f"stream-gw telemetry at {settings.telemetry_url}"
    if ask_clickhouse or not settings.telemetry_url:
        where = f"ClickHouse at {Address.parse(settings.clickhouse).shown}" if settings.clickhouse else ""
    told = f"still waiting for {where}; it gives up after a minute without an answer\n"
    timer = asyncio.get_running_loop().call_later(_SLOW_S, sys.stderr.write, told)
    if args.verb == "tail":
        timer.cancel()  # it goes on for ever
    try:
        yield
    finally:
        timer.cancel()


@asynccontextmanager
async def _open_ask(settings: AskSettings, *, ask_clickhouse: bool) -> AsyncIterator[Ask]:
    """Open the source of answers that the settings name: the telemetry process, or ClickHouse directly.

    ``ask_clickhouse``: ClickHouse, though the settings name both.
    """
    if settings.telemetry_url and not ask_clickhouse:
        from telemetry.ask.http import HttpAsk

        yield HttpAsk(settings.telemetry_url, settings.telemetry_token.get_secret_value())
        return
    if not settings.clickhouse:
        raise BadRequest(
            "no source of traces: set STREAM_GW_TELEMETRY_URL=http://host:port of stream-gw telemetry with its "
            "STREAM_GW_TELEMETRY_TOKEN, or STREAM_GW_CLICKHOUSE"
        )
    from telemetry.ask.store_ask import StoreAsk

    store = Store(settings.clickhouse, clock=HostClock(), random=HostRandom())
    try:
        await store.open(migrate_schema=False)
        yield StoreAsk(store)
    finally:
        await store.close()


def _now_us() -> int:
    return time.time_ns() // 1000


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()
