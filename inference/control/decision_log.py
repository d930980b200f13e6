"""Fleet events of the leading controller's decisions, limited per minute without losing the last one.

Above the limit the newest event is kept, in place of the one before, and sent when there is room again. Its figure
``untold`` counts the events that were replaced. Without this, a timeline could end with a reason that no longer holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from stream_fabric.events import FleetEvent, What
from stream_fabric.limits import DECISIONS_PER_MINUTE_MAX
from stream_fabric.ports import Clock, EventSink
from stream_fabric.stream.ids import ReplicaId

_MINUTE_US = 60_000_000


@dataclass
class _RateLimit:
    """Events of one pool and kind in the current minute."""

    minute: int = 0
    sent: int = 0
    replaced: int = 0
    kept: FleetEvent | None = None


class DecisionLog:
    """Sends at most ``DECISIONS_PER_MINUTE_MAX`` events per minute for each pool and kind."""

    def __init__(self, sink: EventSink, clock: Clock, source: str) -> None:
        self._sink = sink
        self._clock = clock
        self._source = source
        self._limits: dict[tuple[str, str], _RateLimit] = {}
        self._at_us = 0

    def report(
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
        """Send an event, or keep it. ``kind``: events that replace each other while kept; empty: those of ``what``."""
        # Events of one look keep their order on the timeline
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
        limit = self._limits.setdefault((pool, kind or what), _RateLimit())
        self._begin_minute(limit, at_us)
        if limit.sent >= DECISIONS_PER_MINUTE_MAX:
            limit.replaced += limit.kept is not None
            limit.kept = event
        else:
            limit.sent += 1
            self._sink.emit(event)

    def catch_up(self) -> None:
        """Send kept events that may be sent now."""
        now_us = self._clock.now_us()
        for limit in self._limits.values():
            self._begin_minute(limit, now_us)

    def close(self) -> None:
        """Send all kept events."""
        for limit in self._limits.values():
            self._send_kept(limit)

    def _begin_minute(self, limit: _RateLimit, now_us: int) -> None:
        """Reset the limit when a new minute has begun, and send its kept event."""
        if now_us // _MINUTE_US != limit.minute:
            limit.minute, limit.sent = now_us // _MINUTE_US, 0
            self._send_kept(limit)

    def _send_kept(self, limit: _RateLimit) -> None:
        event = limit.kept
        if event is not None:
            if limit.replaced:
                event = msgspec.structs.replace(event, figures=event.figures | {"untold": limit.replaced})
            limit.kept, limit.replaced = None, 0
            limit.sent += 1
            self._sink.emit(event)
