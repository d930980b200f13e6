"""When a pool begins and stops to reject requests, to pass them to adjacent pools, or to have batch work yield. Pure:
time is an argument.

The input is the pool's own counters, so there is one beginning and one end however many gateways there are. The plan
keeps what is active, so the next leader reports the end and no second beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from stream_fabric.pool.overload import OverloadMarks
from stream_fabric.pool.placement import BATCH_TIER, TIERS
from stream_fabric.pool.records import OverloadTotals

QUIET_S = 15.0
"""Time without a rejected request, without overflow, or without a request that batch work yields to, after which it
counts as over. A small share rejects seldom."""

OverloadEvent = Literal["shed_begin", "shed_end", "shift_begin", "shift_end", "yield_begin", "yield_end"]


class OverloadChange(NamedTuple):
    """Rejection of a tier, overflow, or yielding has begun or ended."""

    event: OverloadEvent
    tier: str
    """Empty: overflow and yielding are not by tier."""
    requests: int
    """At the beginning: since the look before. At the end: since the beginning, as far as this controller saw."""
    seconds: float
    """Duration, at the end; 0 at the beginning."""


_REJECT_EVENTS: tuple[OverloadEvent, OverloadEvent] = ("shed_begin", "shed_end")
_OVERFLOW_EVENTS: tuple[OverloadEvent, OverloadEvent] = ("shift_begin", "shift_end")
_YIELD_EVENTS: tuple[OverloadEvent, OverloadEvent] = ("yield_begin", "yield_end")


class _Action:
    """One counted reaction to overload: rejecting one tier, overflow, or yielding."""

    def __init__(self, events: tuple[OverloadEvent, OverloadEvent], is_active: bool, tier: str = "") -> None:
        """``events``: those of its beginning and its end."""
        self._events = events
        self._tier = tier
        self.is_active = is_active
        self._count: int | None = None
        self._since = self._last = 0.0
        self._requests = 0

    def update(self, count: int, now: float) -> OverloadChange | None:
        """Return whether the reaction has begun or ended; None: neither."""
        if self._count is None:
            self._since = self._last = now
            self._count = count
        added = count - self._count if count >= self._count else count  # the pool was lost and counts from 0
        self._count = count
        if added:
            self._requests += added
            self._last = now
            if not self.is_active:
                self.is_active, self._since, self._requests = True, now, added
                return OverloadChange(self._events[0], self._tier, added, 0.0)
        elif self.is_active and now - self._last >= QUIET_S:
            self.is_active = False
            return OverloadChange(self._events[1], self._tier, self._requests, self._last - self._since)
        return None


class OverloadWatch:
    """Detects in one pool, second by second, when rejection, overflow or yielding begins and ends."""

    def __init__(self, rejecting: Sequence[str] = (), overflowing: bool = False, yielding: bool = False) -> None:
        """``rejecting``, ``overflowing``, ``yielding``: what the pool's plan names as active."""
        self._tiers = [_Action(_REJECT_EVENTS, tier in rejecting, tier) for tier in TIERS]
        self._overflow = _Action(_OVERFLOW_EVENTS, overflowing)
        self._yield = _Action(_YIELD_EVENTS, yielding)
        self._changes: list[OverloadChange] = []
        self._looks: deque[tuple[float, OverloadTotals]] = deque()
        """Moments and totals of the last ``QUIET_S``."""

    @property
    def rejecting(self) -> tuple[str, ...]:
        """Tiers of which requests are rejected."""
        return tuple(tier for tier, action in zip(TIERS, self._tiers, strict=True) if action.is_active)

    @property
    def overflowing(self) -> bool:
        return self._overflow.is_active

    @property
    def yielding(self) -> bool:
        return self._yield.is_active

    @property
    def reject_shares(self) -> list[float]:
        """Share of each tier's requests that was rejected, in the last ``QUIET_S``."""
        if not self._looks:
            return [0.0 for _ in TIERS]
        (_, old), (_, new) = self._looks[0], self._looks[-1]
        rejected = [after - before for before, after in zip(old.rejected, new.rejected, strict=True)]
        asked = [after - before for before, after in zip(old.asked, new.asked, strict=True)]
        # A pool that was lost counts from 0
        return [max(no / all_, 0.0) if all_ > 0 else 0.0 for no, all_ in zip(rejected, asked, strict=True)]

    def take_changes(self) -> list[OverloadChange]:
        """Changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def update(self, totals: OverloadTotals, marks: OverloadMarks, now: float) -> bool:
        """Compare the counters with the last look. True: rejection, overflow or yielding has begun or ended."""
        actions = [  # batch work yields before a request of a higher tier is rejected
            (yield_mark_s(marks), self._yield, totals.yielded_to),
            *zip(marks.reject_s, self._tiers, totals.rejected, strict=True),
            (marks.overflow_s, self._overflow, totals.overflowed),
        ]
        self._looks.append((now, totals))
        while now - self._looks[0][0] > QUIET_S:
            self._looks.popleft()
        before = len(self._changes)
        for _, action, count in sorted(actions, key=lambda item: item[0]):  # in the order of the marks
            if change := action.update(count, now):
                self._changes.append(change)
        return len(self._changes) > before


def yield_mark_s(marks: OverloadMarks) -> float:
    """Return the lowest wait in seconds of a request that batch work yields to; 0: no higher tier has a mark."""
    return min((mark_s for mark_s in marks.reject_s[:BATCH_TIER] if mark_s), default=0.0)
