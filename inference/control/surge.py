"""When a pool begins to refuse or to give away requests, and when that is over. Pure: time is an argument.

Told from what the pool itself has counted, so there is one beginning and one end however many gateways there are. What
has begun stands in the pool's plan: who leads next tells of the end, and of no second beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from inference.control.scaling import need
from stream_fabric.placement import TIERS
from stream_fabric.plans import Usual
from stream_fabric.redis.pool import Line, ReplicaInfo, Surged
from stream_fabric.surge import Marks, share_refused

QUIET_S = 15.0
"""It is over when nothing was refused, or nothing shifted, for so long: a share that is small refuses seldom."""


Layered = Literal["shed_begin", "shed_end", "shift_begin", "shift_end"]


class Turn(NamedTuple):
    """A layer of the response has begun, or is over."""

    what: Layered
    tier: str
    """Empty: of no tier."""
    requests: int
    """At a beginning since the look before, at an end since the beginning, as far as this controller saw."""
    seconds: float
    """At an end: how long it lasted."""


_SHED: tuple[Layered, Layered] = ("shed_begin", "shed_end")
_SHIFT: tuple[Layered, Layered] = ("shift_begin", "shift_end")


class _Layer:
    """One that counts."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._count: int | None = None
        self._since = self._last = 0.0
        self._requests = 0

    def look(self, count: int, now: float) -> tuple[bool, int, float] | None:
        """Whether it is on from now, with how many requests and for how long it was; None: as before."""
        if self._count is None:
            self._since = self._last = now
            self._count = count
        came = count - self._count if count >= self._count else count  # the pool was lost, and counts anew
        self._count = count
        if came:
            self._requests += came
            self._last = now
            if not self.is_on:
                self.is_on, self._since, self._requests = True, now, came
                return True, came, 0.0
        elif self.is_on and now - self._last >= QUIET_S:
            self.is_on = False
            return False, self._requests, self._last - self._since
        return None


class SurgeWatch:
    """One pool's, looked at each second."""

    def __init__(self, shedding: Sequence[str] = (), shifting: bool = False) -> None:
        """As the plan says."""
        self._tiers = [_Layer(tier in shedding) for tier in TIERS]
        self._shift = _Layer(shifting)
        self._turns: list[Turn] = []

    @property
    def shedding(self) -> tuple[str, ...]:
        return tuple(tier for tier, layer in zip(TIERS, self._tiers, strict=True) if layer.is_on)

    @property
    def shifting(self) -> bool:
        return self._shift.is_on

    def taken(self) -> list[Turn]:
        """What is to be told: what was seen since this was asked last."""
        turns, self._turns = self._turns, []
        return turns

    def look(self, surged: Surged, marks: Marks, now: float) -> bool:
        """Whether something began or is over."""
        layers: list[tuple[float, str, _Layer, int]] = [
            (marks.shed_s[number], tier, self._tiers[number], surged.shed[number]) for number, tier in enumerate(TIERS)
        ]
        layers.append((marks.shift_s, "", self._shift, surged.shifted))
        before = len(self._turns)
        for _, tier, layer, count in sorted(layers, key=lambda of: of[0]):  # within a look they came in this order
            turn = layer.look(count, now)
            if turn is not None:
                is_on, requests, seconds = turn
                begin, end = _SHED if tier else _SHIFT
                self._turns.append(Turn(begin if is_on else end, tier, requests, seconds))
        return len(self._turns) > before


def levels(infos: Sequence[ReplicaInfo], lines: Sequence[Line], usual: Usual | None, marks: Marks) -> list[float]:
    """Of each tier's new requests, the share that is refused, as far as what agents last said of themselves tells."""
    return [
        share_refused(need(infos, lines[: tier + 1], usual).backlog_s, mark_s)
        for tier, mark_s in enumerate(marks.shed_s)
    ]
