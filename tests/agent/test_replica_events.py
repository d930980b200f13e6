"""A replica's life as its agent tells it: each change once, with who wanted it."""

from __future__ import annotations

from inference.agent.observe.meter import Breaker
from inference.agent.observe.replica_events import ReplicaEvents
from stream_fabric.events import FleetEvent
from stream_fabric.pool.placement import ReplicaState
from stream_fabric.pool.records import EngineLoad, ReplicaInfo
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.stream.ids import ReplicaId
from tests.support.events import Heard, SetClock

ONE = ReplicaId("one")


class Life:
    def __init__(self, *, standby: bool = False) -> None:
        self.heard = Heard()
        self.replica_events = ReplicaEvents(
            FleetEventReporter(self.heard, SetClock(), "agent"), "p", ONE, 3.0, standby=standby
        )
        self.now = 100.0

    def renew(self, state: ReplicaState, after_s: float = 1.0) -> None:
        self.now += after_s
        info = ReplicaInfo(ONE, "p", "sim", ("m",), state, EngineLoad(2, 1, 8), room=10)
        self.replica_events.receive_renewal(info, 3, self.now)

    @property
    def states(self) -> list[tuple[str, str]]:
        return [(event.state, event.asked_by) for event in self.heard.fleet if event.what == "lease"]

    @property
    def last(self) -> FleetEvent:
        return self.heard.fleet[-1]


def test_each_state_is_told_once_and_what_came_by_itself_was_asked_for_by_nobody() -> None:
    life = Life()
    for state in ("warming", "warming", "ready", "ready", "warming", "ready"):
        life.renew(state)
    assert life.states == [("warming", ""), ("ready", ""), ("warming", ""), ("ready", "")]
    assert life.heard.fleet[0].reason.startswith("its first lease")
    assert not life.heard.fleet[1].reason.startswith("its first lease")
    assert life.last.figures == {
        "streams": 3, "running": 2, "waiting": 1, "slots": 8, "room": 10, "queue_p99_ms": 0,
    }  # fmt: skip


def test_who_asked_for_a_state_is_told_with_it() -> None:
    life = Life(standby=True)
    life.renew("warm")
    life.replica_events.receive_state_request("ready", "operator")
    life.renew("ready")
    life.replica_events.receive_state_request("draining", "health")
    life.replica_events.receive_state_request("draining", "SIGTERM")  # too late to be why
    life.renew("draining")
    life.replica_events.receive_left(0)
    assert life.states == [("warm", "standby"), ("ready", "operator"), ("draining", "health"), ("gone", "")]
    assert [event.what for event in life.heard.fleet] == ["lease"] * 4, "health tells of its own drains"


def test_an_operators_drain_is_told_when_it_is_heard() -> None:
    life = Life()
    life.renew("ready")
    life.replica_events.receive_state_request("draining", "operator")
    assert (life.last.what, life.last.source, life.last.asked_by) == ("drain", "operator", "operator")
    life.renew("draining")
    assert life.states[-1] == ("draining", "operator")


def test_a_failed_engine_is_the_reason_of_its_own_drain() -> None:
    life = Life()
    life.renew("ready")
    life.replica_events.receive_state_request("draining", "", "its engine failed")
    life.renew("draining")
    assert (life.last.state, life.last.reason, life.last.asked_by) == ("draining", "its engine failed", "")


def test_a_lease_that_had_ended_unrenewed_is_told_again() -> None:
    life = Life()
    life.renew("ready")
    life.renew("ready", after_s=2.9)
    assert len(life.heard.fleet) == 1
    life.renew("ready", after_s=12.0)
    assert len(life.heard.fleet) == 2
    assert life.last.figures["unrenewed_s"] == 12.0
    assert "ended unrenewed" in life.last.reason


def test_the_breakers_changes_are_told_with_their_figures() -> None:
    life = Life()
    breaker = Breaker(failures_max=2, open_s=2.0)

    def look(now: float, reason: str = "") -> None:
        life.replica_events.receive_breaker(breaker, now, reason)

    breaker.receive_failure(0.0, "engine_error")
    look(0.0, "engine_error")
    assert life.heard.fleet == []
    breaker.receive_failure(0.1, "engine_error")
    look(0.1, "engine_error")
    look(1.0)
    look(2.2)
    breaker.receive_success()
    look(2.3)
    look(3.0)
    assert [(event.what, event.state, event.reason, event.figures) for event in life.heard.fleet] == [
        ("breaker", "open", "engine_error", {"failures": 2, "open_s": 2.0}),
        ("breaker", "half_open", "one request may try", {"failures": 2, "open_s": 2.0}),
        ("breaker", "closed", "its engine has answered", {"failures": 0, "open_s": 2.0}),
    ]
