"""One page of usage: sums of bills in groups, for the HTTP API and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stream_fabric.errors import BadRequest
from telemetry.ask.port import Ask
from telemetry.ask.queries import DIMENSIONS, HOUR_US, LONG_DIMENSIONS, Value
from telemetry.ask.times import moment_us

DAY_US = 24 * HOUR_US
_LONG_US = {True: 100 * DAY_US, False: 3 * DAY_US}
"""Ranges above which the sums by hour are read instead of single bills: of one tenant, and of the fleet."""
PAGE_MAX = 1000
_DATE_DIGITS = 8
"""Digits of a date without dashes, such as 20261101; as Unix seconds it would be a moment of the 1970s."""


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"from_": "from"}):
    """Query of one page. Times as in ``times.moment_us``, or Unix seconds."""

    from_: str = ""
    """Start; empty: of the current month in UTC."""
    to: str = ""
    """End; empty: now."""
    group_by: str = "model"
    """One or two dimensions, separated by a comma; ``none``: one sum."""
    bucket: str = "none"
    """``hour``, ``day`` or ``month``: one row for each of them."""
    tenant: str = ""
    model: str = ""
    key: str = ""
    user: str = ""
    """Hash of a user."""
    limit: int = 100
    after: str = ""
    """``last_id`` of the page before."""


def is_long(from_us: int, until_us: int, tenant: str) -> bool:
    """Return True if the range is answered from the sums by hour instead of single bills."""
    return until_us - from_us > _LONG_US[bool(tenant)]


async def usage_page(ask: Ask, query: UsageQuery, now_us: int, kept_days: int) -> dict[str, Any]:
    """Answer one page. Whole hours are counted: the start is rounded down, the end up.

    ``kept_days``: days that bills are kept. Raises BadRequest.
    """
    groups = _groups(query)
    from_us, until_us = _range(query, now_us)
    sums = (
        is_long(from_us, until_us, query.tenant)
        and not query.key
        and not query.user
        and set(groups) <= set(LONG_DIMENSIONS)
    )
    if not sums and from_us < now_us - kept_days * DAY_US:
        raise BadRequest(
            f"bills by key, user, session, endpoint and tier are kept for {kept_days} days; begin later, or group by "
            "model over a longer range"
        )
    if not 1 <= query.limit <= PAGE_MAX:
        raise BadRequest(f"limit is 1 to {PAGE_MAX}", param="limit")
    parameters: dict[str, Value] = {
        "from_us": from_us, "until_us": until_us, "tenant": query.tenant, "model": query.model,
        "group_1": groups[0] if groups else "", "group_2": groups[1] if len(groups) > 1 else "",
        "bucket": _bucket(query), "top": query.limit + 1, **_after(query),
    }  # fmt: skip
    if not sums:
        parameters |= {"key": query.key, "user": query.user}
    complete = await ask.query("complete_until", {})  # before the sums: they lack bills that arrive meanwhile
    rows = await ask.query("usage_groups_long" if sums else "usage_groups", parameters)
    data = [_shown(row, groups) for row in rows[: query.limit]]
    return {
        "from": from_us // 1_000_000,
        "to": until_us // 1_000_000,
        "complete_until": int(complete[0]["until_us"]) / 1e6 if complete else 0.0,
        "group_by": groups,
        "bucket": query.bucket,
        "data": data,
        "has_more": len(rows) > query.limit,
        "last_id": _cursor(rows[len(data) - 1]) if data else None,
    }


def _groups(query: UsageQuery) -> list[str]:
    groups = [] if query.group_by == "none" else list(dict.fromkeys(query.group_by.split(",")))
    if len(groups) > 2 or not set(groups) <= set(DIMENSIONS):
        raise BadRequest(f"group_by is none, or one or two of {', '.join(DIMENSIONS)}", param="group_by")
    return groups


def _bucket(query: UsageQuery) -> str:
    if query.bucket not in ("none", "hour", "day", "month"):
        raise BadRequest("bucket is none, hour, day or month", param="bucket")
    return "" if query.bucket == "none" else query.bucket


def _range(query: UsageQuery, now_us: int) -> tuple[int, int]:
    from_us = _moment(query.from_, now_us, "from") if query.from_ else month_start_us(now_us)
    until_us = _moment(query.to, now_us, "to") if query.to else now_us
    from_us, until_us = from_us - from_us % HOUR_US, until_us + -until_us % HOUR_US
    if from_us >= until_us:
        raise BadRequest("the range ends before it begins", param="to")
    return from_us, until_us


def _moment(text: str, now_us: int, name: str) -> int:
    if text.isdecimal() and len(text) <= 10 and len(text) != _DATE_DIGITS:
        return int(text) * 1_000_000
    try:
        return moment_us(text, now_us)
    except BadRequest as error:
        raise BadRequest(error.message, param=name) from None


def month_start_us(now_us: int) -> int:
    """Return the start of the month of a moment, in UTC."""
    from datetime import UTC, datetime

    now = datetime.fromtimestamp(now_us / 1e6, UTC)
    return int(now.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()) * 1_000_000


def _shown(row: Mapping[str, Any], groups: list[str]) -> dict[str, Any]:
    """Return a row as the API shows it: the start of its bucket in Unix seconds, its groups by name, its sums."""
    sums = {name: int(value) for name, value in row.items() if name not in ("bucket_us", "name_1", "name_2")}
    names = dict(zip(groups, (str(row["name_1"]), str(row["name_2"])), strict=False))
    begins = int(row["bucket_us"]) // 1_000_000
    return {**({"begins": begins} if begins else {}), **names, **sums}


def _cursor(row: Mapping[str, Any]) -> str:
    return msgspec.json.encode([int(row["bucket_us"]), str(row["name_1"]), str(row["name_2"])]).hex()


def _after(query: UsageQuery) -> dict[str, Value]:
    if not query.after:
        return {}
    try:
        at, first, second = msgspec.json.decode(bytes.fromhex(query.after), type=tuple[int, str, str])
    except ValueError:
        raise BadRequest("after is not the last_id of a page", param="after") from None
    return {"after_us": at, "after_1": first, "after_2": second}
