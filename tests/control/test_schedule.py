"""Declared events: their replicas are there when they begin, in every time zone, and leave after them."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from inference.control.policy.scale_policy import parse_policies
from inference.control.policy.schedule import ScheduledEvent, scheduled_event
from tests.control.scaled_pool import POLICY, World


def unix_s(moment: str) -> float:
    return datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp()


def near(event: ScheduledEvent, moment: str, lead_s: float = 0.0) -> bool:
    return event.is_near(unix_s(moment), lead_s)


def test_office_hours_begin_with_the_offices_clock_in_summer_and_in_winter() -> None:
    opening = ScheduledEvent(10, 3600, cron="0 9 * * mon-fri", timezone="Europe/Berlin")
    for begin, end in (("2026-07-06T07:00", "2026-07-06T08:00"), ("2026-12-07T08:00", "2026-12-07T09:00")):
        assert near(opening, begin) and not near(opening, end)
        assert near(opening, begin.replace(":00", ":59")) and not near(opening, begin.replace("T0", "T1"))
    assert not near(opening, "2026-07-05T07:30"), "a Sunday"
    assert near(opening, "2026-07-06T06:55", lead_s=300) and not near(opening, "2026-07-06T06:54:59", lead_s=300)


def test_an_event_that_lasts_into_the_day_of_a_change_of_time_lasts_as_long_as_declared() -> None:
    """On 2026-10-25 Berlin has 25 hours: eight hours from 22:00 end at 05:00 local time."""
    night = ScheduledEvent(3, 8 * 3600, cron="0 22 * * *", timezone="Europe/Berlin")
    assert near(night, "2026-10-25T03:59:59") and not near(night, "2026-10-25T04:00")


def test_an_event_after_the_hour_that_comes_twice_is_seen_a_whole_lead_before() -> None:
    """On 2026-10-25 it is 02:30 in Berlin at 00:30 UTC and again at 01:30 UTC; cron counts the first."""
    hourly = ScheduledEvent(3, 3600, cron="30 2,3 * * *", timezone="Europe/Berlin")
    assert near(hourly, "2026-10-25T00:30") and near(hourly, "2026-10-25T01:29:59")
    assert not near(hourly, "2026-10-25T01:30"), "the second 02:30 begins nothing"
    assert near(hourly, "2026-10-25T02:05", lead_s=1500), "03:30 is at 02:30 UTC"
    assert not near(hourly, "2026-10-25T02:04:59", lead_s=1500)


@pytest.mark.parametrize(
    "at", ["2026-11-27T18:00:00+01:00", "2026-11-27T18:00:00"], ids=["with an offset", "in its time zone"]
)
def test_an_event_that_comes_once_comes_once(at: str) -> None:
    launch = msgspec.convert({"replicas": 40, "for_s": 600, "at": at, "timezone": "Europe/Berlin"}, ScheduledEvent)
    assert [near(launch, f"2026-11-27T{time}") for time in ("16:59:59", "17:00", "17:09:59", "17:10")] == [
        False, True, True, False,
    ]  # fmt: skip
    assert near(launch, "2026-11-27T16:56", lead_s=240) and not near(launch, "2027-11-27T17:00")


def test_of_events_at_once_the_largest_counts_and_each_is_seen_from_its_first_second() -> None:
    short = ScheduledEvent(5, 30, cron="* * * * *")
    long = ScheduledEvent(2, 7200, cron="0 * * * *")
    assert scheduled_event((short, long), unix_s("2026-11-27T12:00:10"), 0.0) is short
    assert scheduled_event((short, long), unix_s("2026-11-27T12:00:45"), 0.0) is long
    assert scheduled_event((short, long), unix_s("2026-11-27T12:00:45"), 20.0) is short, "the next one"
    assert scheduled_event((), 0.0, 60.0) is None


def test_the_replicas_are_ready_when_the_event_begins_and_leave_after_it() -> None:
    begin_s = 1000.0 + 600
    event = ScheduledEvent(6, 300, at=datetime.fromtimestamp(begin_s, UTC), name="launch")
    world = World(lambda t: 0.1, msgspec.structs.replace(POLICY, schedule=(event,))).boot(1)
    while world.now < begin_s - POLICY.cold_start_s - 1:
        world.step()
    assert world.plans[-1][1].ready == 1
    world.run(3)
    assert world.plans[-1][1].ready == 6 and "event 'launch' begins" in world.plans[-1][1].reason
    assert world.figures is not None and world.figures.scheduled == 6
    while world.now < begin_s + 299:
        world.step()
        if world.now > begin_s + 3:
            assert sum(pod.info(world.now).state == "ready" for pod in world.pods) == 6
    world.run(600)
    assert world.plans[-1][1].ready == 1 and len(world.pods) == 1


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ('cron = "0 9 * *"', "not valid: 4 fields instead of 5"),
        ('cron = "0 9 * * 1 *"', r"not valid: 6 fields instead of 5 \(minute, hour, day, month, weekday\)"),
        ('cron = "0 9 */31 * 1#5"', "is not valid: such a day does not come"),
        ('cron = "0 0 30 2 *"', "is not valid: Bad day-of-month"),
        ('cron = "0 9 * * *"\ntimezone = "Europe/Atlantis"', "no time zone 'Europe/Atlantis'"),
        ('cron = "0 9 * * *"\nat = 2026-11-27T18:00:00Z', "either cron or at"),
        ("", "either cron or at"),
        ('cron = "0 9 * * *"\nfor_s = 0', "for_s must be more than 0"),
        ('cron = "0 9 * * *"\nreplicas = 0', "replicas must be 1 or more"),
        ('cron = "0 9 * * *"\nreplicas = 9', "at most replicas_max, which is 8"),
        ('cron = "0 9 * * *"\ntimes = 5', "unknown field"),
    ],
)
def test_an_entry_that_cannot_be_meant_is_an_error_that_names_pool_and_mistake(entry: str, error: str) -> None:
    rest = "".join(f"{line}\n" for line in ("for_s = 60", "replicas = 2") if line.split(" =")[0] not in entry)
    content = f"[pool.p]\nreplicas_max = 8\n[[pool.p.schedule]]\n{rest}{entry}\n"
    with pytest.raises(ValueError, match=error) as raised:
        parse_policies(content.encode(), "pools.toml")
    assert str(raised.value).startswith("pools.toml: pool 'p': ")


def test_a_pools_file_may_declare_both_kinds() -> None:
    content = (
        '[pool.p]\n[[pool.p.schedule]]\ncron = "0 9 * * mon-fri"\nfor_s = 60\nreplicas = 2\n'
        "[[pool.p.schedule]]\nat = 2026-11-27T18:00:00+01:00\nfor_s = 60\nreplicas = 3\n"
    )
    daily, once = parse_policies(content.encode(), "pools.toml")["p"].schedule
    assert near(once, "2026-11-27T17:00:30") and near(daily, "2026-11-27T09:00:30")
