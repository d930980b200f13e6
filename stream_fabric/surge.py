"""What a pool does with requests that come faster than it begins them: who is refused, who may go elsewhere. Pure.

The figure is the backlog ahead of a request, in seconds: the time in which the replicas that take requests would begin
what has no first token yet, of the tiers that go before it or with it. Each tier has a mark. Above it requests of the
tier are refused, the more of them the longer the backlog, all at twice the mark: a share, not a switch, so that it
settles where as much comes in as goes out. A tier behind has all of the line ahead of it and a lower mark, so it gives
way first. Who waits for less than its tenant's share of the line has twice the mark.

``PoolState.place`` and ``place.lua`` decide by it in one step with the placement, so it is exact whatever the number of
gateways; these know no figure of their own.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import msgspec

SPAN: float = 2.0
"""At so many times its mark all of a tier is refused."""
UNDER_SHARE: float = 2.0
"""By so much the mark is higher for a tenant that has less in line than its share."""
MISS: float = 0.5
"""A request goes elsewhere only if what caches would spare it at home takes less than this share of the backlog."""
RETRY_S_MAX = 60
_PACKED = struct.Struct("<dddIB")


class Marks(msgspec.Struct, frozen=True):
    """What is declared of a pool, as its plan brings it to gateways. Backlogs in seconds."""

    shed_s: tuple[float, ...]
    """Of each tier, where its requests begin to be refused; 0: never."""
    shift_s: float = 0.0
    adjacent: tuple[str, ...] = ()
    """Pools that may take what tolerates a cache miss, in order."""
    shift_utilisation_max: float = 0.6


class Surge(NamedTuple):
    """What a gateway tells the pool with one request."""

    shed_s: float = 0.0
    """Its tier's mark; 0: it is not refused. Of a guest: the backlog from which the pool takes none."""
    shift_s: float = 0.0
    """From this backlog on it may go to another pool; 0: it may not."""
    guest_max: float = 0.0
    """Not 0: it is another pool's, and taken only at once and while so much of the slots is in use at most."""
    replicas: int = 0
    """Of the pool, where there are more than candidates."""
    again: bool = False
    """It was to go elsewhere and no other pool took it."""

    @property
    def counts(self) -> bool:
        """Whether it is demand of this pool that was not counted yet: a request is its home's, wherever it runs."""
        return not self.again and not self.guest_max

    def packed(self) -> bytes:
        return b"" if self == NO_SURGE else _PACKED.pack(*self)


NO_SURGE = Surge()


class Shift(NamedTuple):
    """Why a request runs in another pool than its own."""

    home: str
    to: str
    backlog_s: float
    """What was ahead of it at home; 0: no replica took requests there."""
    shift_s: float
    """What was allowed to be."""


def share_refused(backlog_s: float, mark_s: float) -> float:
    """Of a tier's requests, from 0 to 1."""
    return min(max((backlog_s - mark_s) / ((SPAN - 1) * mark_s), 0.0), 1.0) if mark_s else 0.0


def is_refused(backlog_s: float, mark_s: float, draw: float) -> bool:
    """``draw``: uniform in [0, 1), the request's own."""
    return backlog_s > mark_s and draw * (SPAN - 1) * mark_s < backlog_s - mark_s


def drawn(jitter: float) -> float:
    """Another uniform number from the request's: it decides about ties too, and must not do both the same way."""
    return (jitter * 1024) % 1


def retry_after_s(backlog_s: float, mark_s: float, draw: float) -> int:
    """Until the backlog is back at the mark if nothing more came in. Spread over half as long again, so that those who
    were refused together do not come back together."""
    return max(1, min(RETRY_S_MAX, math.ceil((backlog_s - mark_s) * (1 + draw / 2))))


def guest_backlog_s(home: Marks, host: Marks | None) -> float:
    """Where an adjacent pool takes no guest: half of where they leave, and before it refuses any of its own."""
    own = (*host.shed_s, host.shift_s) if host is not None else ()
    return min([home.shift_s / 2, *(mark for mark in own if mark)])
