"""Declared events that need replicas: an hour of each week, or one launch. Pure: time is an argument."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError


class ScheduledEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of ``[[pool.<name>.schedule]]``."""

    replicas: int
    """Ready replicas to have during the event, at least."""
    for_s: float
    """Duration of the event."""
    cron: str = ""
    """Begin of a repeated event: five fields as in crontab, in ``timezone``."""
    at: datetime | None = None
    """Begin of an event that comes once. Without an offset it is in ``timezone``."""
    timezone: str = "UTC"
    """Name in the IANA database."""
    name: str = ""
    """Name in the reasons of plans; empty: the begin."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"schedule: replicas must be 1 or more, not {self.replicas}")
        if not 0 < self.for_s <= 31 * 86_400:
            raise ValueError(f"schedule: for_s must be more than 0 and at most 31 days, not {self.for_s:g}")
        if bool(self.cron) == (self.at is not None):
            raise ValueError("schedule: an entry needs either cron or at")
        try:
            ZoneInfo(self.timezone)
        except (KeyError, ValueError, OSError):
            raise ValueError(f"schedule: no time zone {self.timezone!r} in the IANA database") from None
        if self.cron:
            if (fields := len(self.cron.split())) != 5:  # the library takes a sixth for seconds, others for a year
                raise ValueError(
                    f"schedule: cron {self.cron!r} is not valid: {fields} fields instead of 5 (minute, hour, day, "
                    "month, weekday)"
                )
            try:
                first = next(CronSim(self.cron, datetime(2026, 1, 1, tzinfo=ZoneInfo(self.timezone))), None)
            except CronSimError as error:
                raise ValueError(f"schedule: cron {self.cron!r} is not valid: {error}") from None
            if first is None:
                raise ValueError(f"schedule: cron {self.cron!r} is not valid: such a day does not come in 50 years")

    @property
    def label(self) -> str:
        return self.name or self.cron or str(self.at)

    def is_near(self, now_unix_s: float, lead_s: float) -> bool:
        """True from ``lead_s`` before the event's begin to its end."""
        # Looked for once a minute: the search costs more than all else of a look
        minute_s = now_unix_s // 60 * 60
        begins = (_begin_s(self, minute_s), _begin_s(self, minute_s + 60))
        return any(begin_s - lead_s <= now_unix_s < begin_s + self.for_s for begin_s in begins)


@lru_cache(maxsize=1024)
def _begin_s(event: ScheduledEvent, now_unix_s: float) -> float:
    """Begin of the first occurrence that has not ended at this moment, as Unix time."""
    zone = ZoneInfo(event.timezone)
    if event.at is not None:
        return (event.at if event.at.tzinfo is not None else event.at.replace(tzinfo=zone)).timestamp()
    after_s = now_unix_s - event.for_s
    search = CronSim(event.cron, datetime.fromtimestamp(after_s, zone))
    # In the second pass of an hour that comes twice the search begins with what the first pass had
    return next(begin_s for begin in search if (begin_s := begin.timestamp()) > after_s)


def scheduled_event(events: tuple[ScheduledEvent, ...], now_unix_s: float, lead_s: float) -> ScheduledEvent | None:
    """Return the event that needs most replicas now or within ``lead_s``; None: there is none."""
    near = [event for event in events if event.is_near(now_unix_s, lead_s)]
    return max(near, key=lambda event: event.replicas, default=None)
