"""What a process tells of the fleet. Never on a stream's path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stream_fabric.events import FleetEvent, What
from stream_fabric.ids import ReplicaId
from stream_fabric.limits import FLEET_EVENTS_PER_MINUTE_MAX
from stream_fabric.ports import EventSink

_MINUTE_US = 60_000_000


class Clock(Protocol):
    def now_us(self) -> int: ...


class Herald:
    """One a process: its fleet events pass here. Of what happens over and over so many are told a minute; the next one
    says in its figures how many were not (``untold``)."""

    def __init__(self, sink: EventSink, clock: Clock, source: str) -> None:
        self._sink = sink
        self._clock = clock
        self._source = source
        self._minute = 0
        self._told = 0
        self._number = 0
        self._untold = 0

    def tell(
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
    ) -> None:
        """``source``: in place of the process's own."""
        now_us = self._clock.now_us()
        if now_us // _MINUTE_US != self._minute:
            self._minute, self._told = now_us // _MINUTE_US, 0
        if self._told >= FLEET_EVENTS_PER_MINUTE_MAX:
            self._untold += 1
            return
        rested_on = dict(figures or {})
        if self._untold:
            rested_on["untold"] = self._untold
        self._told += 1
        self._number += 1
        self._untold = 0
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
                figures=rested_on,
                asked_by=asked_by,
            )
        )
