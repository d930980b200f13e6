"""What the leading controller tells of its pools: each change, but of what changes over and over only so much a minute.

The last word is never lost: what is over the bound is kept, the newest in place of the one before, and told when there
is room again, with how many were not (``untold``). Were it left out as other events are, the timeline would end with a
reason that holds no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from stream_fabric.events import FleetEvent, What
from stream_fabric.herald import Clock
from stream_fabric.ids import ReplicaId
from stream_fabric.limits import DECISIONS_PER_MINUTE_MAX
from stream_fabric.ports import EventSink

_MINUTE_US = 60_000_000


@dataclass
class _Kind:
    minute: int = 0
    told: int = 0
    untold: int = 0
    kept: FleetEvent | None = None


class Chronicle:
    """Of each pool and kind of change so many events a minute."""

    def __init__(self, sink: EventSink, clock: Clock, source: str) -> None:
        self._sink = sink
        self._clock = clock
        self._source = source
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._at_us = 0

    def tell(
        self,
        what: What,
        pool: str,
        *,
        kind: str = "",
        replica: str = "",
        state: str = "",
        reason: str = "",
        figures: Mapping[str, float] | None = None,
        asked_by: str = "",
    ) -> None:
        """``kind``: what replaces each other while it is kept; empty: all of the pool's ``what``."""
        # What is told within a look stands on the timeline in the same order
        self._at_us = at_us = max(self._clock.now_us(), self._at_us + 1)
        event = FleetEvent(
            id=f"{self._source}:{what}:{pool}:{at_us}",
            at_us=at_us,
            what=what,
            source=self._source,
            pool=pool,
            replica=ReplicaId(replica) if replica else "",
            state=state,
            reason=reason,
            figures=dict(figures or {}),
            asked_by=asked_by,
        )
        of = self._kinds.setdefault((pool, kind or what), _Kind())
        self._turn(of, at_us)
        if of.told >= DECISIONS_PER_MINUTE_MAX:
            of.untold += of.kept is not None
            of.kept = event
        else:
            of.told += 1
            self._sink.emit(event)

    def catch_up(self) -> None:
        """Tell what was kept and may be told now."""
        now_us = self._clock.now_us()
        for of in self._kinds.values():
            self._turn(of, now_us)

    def close(self) -> None:
        """Tell all that was kept."""
        for of in self._kinds.values():
            self._tell_kept(of)

    def _turn(self, of: _Kind, now_us: int) -> None:
        if now_us // _MINUTE_US != of.minute:
            of.minute, of.told = now_us // _MINUTE_US, 0
            self._tell_kept(of)

    def _tell_kept(self, of: _Kind) -> None:
        if of.kept is not None:
            event = of.kept
            if of.untold:
                event = msgspec.structs.replace(event, figures=event.figures | {"untold": of.untold})
            of.kept, of.untold = None, 0
            of.told += 1
            self._sink.emit(event)
