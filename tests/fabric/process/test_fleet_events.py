"""Fleet events of a process are bounded, and events over the bound are counted."""

from __future__ import annotations

from stream_fabric.events import decode_event, encode_event
from stream_fabric.limits import FLEET_EVENTS_PER_MINUTE_MAX
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.stream.ids import ReplicaId
from tests.support.events import Heard, SetClock


def test_an_event_says_who_what_and_why() -> None:
    heard, clock = Heard(), SetClock()
    fleet_events = FleetEventReporter(heard, clock, "agent")
    fleet_events.report(
        "drain", pool="p", replica=ReplicaId("r"), reason="slow", asked_by="health", source="health", figures={"p99": 5}
    )
    fleet_events.report("shed", pool="p", state="queue")
    drain, shed = heard.fleet
    assert (drain.what, drain.source, drain.pool, drain.replica) == ("drain", "health", "p", "r")
    assert (drain.reason, drain.asked_by, drain.figures, drain.at_us) == ("slow", "health", {"p99": 5}, clock.at_us)
    assert (shed.source, shed.replica, shed.state, shed.asked_by) == ("agent", "", "queue", "")
    assert decode_event(encode_event(drain)) == drain


def test_events_of_one_moment_have_names_of_their_own() -> None:
    heard = Heard()
    fleet_events = FleetEventReporter(heard, SetClock(), "agent")
    for _ in range(3):
        fleet_events.report("lease", pool="p", replica=ReplicaId("r"), state="ready")
    assert len({event.id for event in heard.fleet}) == 3


def test_of_what_happens_over_and_over_so_many_are_told_a_minute_and_the_rest_is_counted() -> None:
    heard, clock = Heard(), SetClock()
    fleet_events = FleetEventReporter(heard, clock, "agent")
    for _ in range(1000):
        fleet_events.report("breaker", pool="p", state="open")
    assert len(heard.fleet) == FLEET_EVENTS_PER_MINUTE_MAX
    clock.at_us += 60_000_000
    fleet_events.report("breaker", pool="p", state="closed", figures={"failures": 0})
    fleet_events.report("breaker", pool="p", state="open")
    *_, next_, after = heard.fleet
    assert next_.figures == {"failures": 0, "untold": 1000 - FLEET_EVENTS_PER_MINUTE_MAX}
    assert after.figures == {}
