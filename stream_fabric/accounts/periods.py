"""Periods of budgets: names of their counters, when they begin anew, and how long counters are kept. Pure; UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Literal

Period = Literal["hour", "day", "month"]

_KEPT: dict[Period, timedelta] = {"hour": timedelta(hours=2), "day": timedelta(days=2), "month": timedelta(days=7)}
"""Time that a counter is kept after its period. A stream is charged to the period in which it was admitted."""
_FORMATS: dict[Period, str] = {"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d", "month": "%Y-%m"}
_PERIODS: dict[str, Period] = {"tenant_hour": "hour", "user_day": "day", "tenant_month": "month"}


def counter_name(kind: str, now_ms: int, who: str = "") -> str:
    """Return the name of the counter of a budget now: ``tenant_month:2026-11``, ``user_day:<who>:2026-11-25``."""
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    return ":".join(part for part in (kind, who, now.strftime(_FORMATS[_PERIODS[kind]])) if part)


def resets_ms(name: str) -> int:
    """Return the Unix time in ms at which the counter's period ends; 0: it has none (a session's, a request's)."""
    end = _end(name)
    return 0 if end is None else int(end.timestamp() * 1000)


def expires_ms(name: str) -> int:
    """Return the Unix time in ms until which the counter is kept; 0: it has no period."""
    end = _end(name)
    return 0 if end is None else int((end + _KEPT[_PERIODS[name.partition(":")[0]]]).timestamp() * 1000)


def _end(name: str) -> datetime | None:
    """Return the end of the counter's period. Raises ValueError for a period's counter with a wrong name."""
    kind, _, rest = name.partition(":")
    period = _PERIODS.get(kind)
    if period is None:
        return None
    begin = datetime.strptime(rest.rpartition(":")[2], _FORMATS[period]).replace(tzinfo=UTC)
    if period == "hour":
        return begin + timedelta(hours=1)
    if period == "day":
        return begin + timedelta(days=1)
    return begin.replace(year=begin.year + begin.month // 12, month=begin.month % 12 + 1)
