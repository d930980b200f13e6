"""A sink that keeps what it is told."""

from __future__ import annotations

from stream_fabric.events import AttemptTrace, Event, FleetEvent, RequestTrace


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    @property
    def attempts(self) -> list[AttemptTrace]:
        return [event for event in self.events if isinstance(event, AttemptTrace)]

    @property
    def requests(self) -> list[RequestTrace]:
        return [event for event in self.events if isinstance(event, RequestTrace)]

    @property
    def fleet(self) -> list[FleetEvent]:
        return [event for event in self.events if isinstance(event, FleetEvent)]


class SetClock:
    """A ``Clock`` that stands still until the test moves it."""

    def __init__(self) -> None:
        self.at_us = 1_795_168_800_000_000

    offset_us = 0

    def now_us(self) -> int:
        return self.at_us

    def monotonic_us(self) -> int:
        return self.at_us
