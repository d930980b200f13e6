"""Moments and cohorts as people write them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from stream_fabric.errors import BadRequest
from telemetry.ask.compare import Cohort
from telemetry.ask.queries import COHORT, EVER_US, HOUR_US

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNIT_US = {"s": 1_000_000, "m": 60_000_000, "h": HOUR_US, "d": 24 * HOUR_US}


def moment_us(text: str, now_us: int) -> int:
    """``90s``, ``15m``, ``2h``, ``3d``: so long ago; ``now``; or an ISO 8601 moment, UTC where it names no zone.
    Raises BadRequest."""
    text = text.strip()
    if text == "now":
        return now_us
    if match := _AGO.fullmatch(text):
        return max(now_us - int(float(match[1]) * _UNIT_US[match[2]]), 0)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"{text[:40]!r} is no moment; write 15m, 2h, 3d, now or 2026-11-20T10:00:00Z") from None
    us = int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1_000_000)
    if not 0 <= us < EVER_US:
        raise BadRequest(f"{text[:40]!r} is out of the years that are taken")
    return us


def window(given: Mapping[str, str], now_us: int, since: str) -> tuple[int, int]:
    """From ``since`` (or as given) until ``until`` (or now). Raises BadRequest."""
    from_us, until_us = moment_us(given.get("since") or since, now_us), moment_us(given.get("until") or "now", now_us)
    if from_us >= until_us:
        raise BadRequest("the window ends before it begins")
    return from_us, until_us


def cohort_of(text: str, now_us: int) -> Cohort:
    """``since=2h,until=1h,model=llama-70b,replica=a``. Raises BadRequest."""
    given: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or key not in ("since", "until", *COHORT):
            raise BadRequest(
                f"{part[:60]!r} tells no cohort; write {', '.join(('since', 'until', *COHORT))}, each with ="
            )
        if key in given:
            raise BadRequest(f"{key} is given twice")
        given[key] = value
    from_us, until_us = window(given, now_us, "1h")
    return Cohort(from_us, until_us, {key: given[key] for key in COHORT if key in given})
