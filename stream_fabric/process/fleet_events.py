"""Reporter of fleet events, for every process that acts on the fleet."""

from __future__ import annotations

from collections.abc import Mapping

from stream_fabric.events import FleetEvent, What
from stream_fabric.limits import FLEET_EVENTS_PER_MINUTE_MAX
from stream_fabric.ports import Clock, EventSink
from stream_fabric.stream.ids import ReplicaId

_MINUTE_US = 60_000_000


class FleetEventReporter:
    """Emits a process's fleet events, at most ``FLEET_EVENTS_PER_MINUTE_MAX`` per minute.

    If events were dropped, the next event has their number in its figures, as ``untold``.
    """

    def __init__(self, sink: EventSink, clock: Clock, source: str) -> None:
        self._sink = sink
        self._clock = clock
        self._source = source
        self._minute = 0
        self._emitted = 0
        self._number = 0
        self._dropped = 0

    def report(
        self,
        what: What,
        *,
        pool: str,
        replica: ReplicaId | None = None,
        state: str = "",
        reason: str = "",
        asked_by: str = "",
        source: str = "",
        figures: Mapping[str, float] | None = None,
        tenant: str = "",
    ) -> None:
        """Emit an event, unless this minute's limit is reached. ``source`` replaces the process's own."""
        now_us = self._clock.now_us()
        if now_us // _MINUTE_US != self._minute:
            self._minute, self._emitted = now_us // _MINUTE_US, 0
        if self._emitted >= FLEET_EVENTS_PER_MINUTE_MAX:
            self._dropped += 1
            return
        event_figures = dict(figures or {})
        if self._dropped:
            event_figures["untold"] = self._dropped
        self._emitted += 1
        self._number += 1
        self._dropped = 0
        source = source or self._source
        self._sink.emit(
            FleetEvent(
                id=f"{replica or source}:{what}:{now_us}:{self._number}",
                at_us=now_us,
                what=what,
                source=source,
                pool=pool,
                replica=replica or "",
                state=state,
                reason=reason,
                figures=event_figures,
                asked_by=asked_by,
                tenant=tenant,
            )
        )
