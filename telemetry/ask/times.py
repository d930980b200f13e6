"""Parsing of points in time and of cohorts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from stream_fabric.errors import BadRequest
from telemetry.ask.compare import Cohort
from telemetry.ask.queries import COHORT, EVER_US, HOUR_US

_AGO = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)([smhd])")
_UNIT_US = {"s": 1_000_000, "m": 60_000_000, "h": HOUR_US, "d": 24 * HOUR_US}


def moment_us(text: str, now_us: int) -> int:
    """Parse ``now``, an age (``90s``, ``15m``, ``2h``, ``3d``) or an ISO 8601 time, by default in UTC.

    Raises BadRequest.
    """
    text = text.strip()
    if text == "now":
        return now_us
    if match := _AGO.fullmatch(text):
        return max(now_us - int(float(match[1]) * _UNIT_US[match[2]]), 0)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"{text[:40]!r} is no time; write 15m, 2h, 3d, now or 2026-11-20T10:00:00Z") from None
    us = int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1_000_000)
    if not 0 <= us < EVER_US:
        raise BadRequest(f"{text[:40]!r} is outside the supported years")
    return us


def window(given: Mapping[str, str], now_us: int, since: str) -> tuple[int, int]:
    """Parse the time window into Unix times in µs. Default: from ``since`` until now. Raises BadRequest."""
    from_us, until_us = moment_us(given.get("since") or since, now_us), moment_us(given.get("until") or "now", now_us)
    if from_us >= until_us:
        raise BadRequest("the time window ends before it begins")
    return from_us, until_us


def cohort_of(text: str, now_us: int) -> Cohort:
    """Parse a cohort such as ``since=2h,until=1h,model=llama-70b,replica=a``. Raises BadRequest."""
    given: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or key not in ("since", "until", *COHORT):
            raise BadRequest(
                f"{part[:60]!r} is no part of a cohort; write {', '.join(('since', 'until', *COHORT))}, each with ="
            )
        if key in given:
            raise BadRequest(f"{key} is given twice")
        given[key] = value
    from_us, until_us = window(given, now_us, "1h")
    return Cohort(from_us, until_us, {key: given[key] for key in COHORT if key in given})
