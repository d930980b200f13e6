"""Overload of a pool: which requests are rejected, and which may overflow to an adjacent pool. Pure.

The measure is the backlog ahead of a request, in seconds: the time that the ready replicas need until they begin all
requests without a first token, of the same and higher tiers. Each tier has a mark. Above its mark a share of the tier's
requests is rejected, more of them the longer the backlog, and all at twice the mark. Because it is a share and not a
switch, it settles where arrivals equal departures. A lower tier has more of the queue ahead of it and a lower mark, so
it gives way first. A tenant with less than its share of the queue has twice the mark.

A replica that computes a prompt makes its other streams wait: a step with a chunk of prompt lasts many times a step of
tokens alone. A pool that promises a time between tokens therefore limits its prefill duty: the share of time that its
ready replicas spend on prompts, as far as admitted requests have caused it, forgotten with ``DUTY_MS``. Above a tier's
``duty_max`` its requests are rejected, whatever the backlog and however long their prompts.

A request that would be rejected for its wait at the chosen replica goes to one that begins it within the mark, if there
is one, and the pool is not short: a queue at one replica, where a prompt is cached, is no overload of the pool.

Batch work yields. It does so for ``YIELD_MS`` from each request of a higher tier whose wait is above its tier's mark,
while the pool is short (more than half of its replicas are above the mark) or no replica has room; or whose tier is
above its prefill duty. Meanwhile no batch request is handed to a replica, and agents put running batch streams back
into the queue.

``PoolState.place`` and ``place.lua`` decide in one step with the placement, so the decision is exact for any number of
gateways. Gateways keep no figures of their own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from stream_fabric.pool.placement import BATCH_TIER

SPAN: float = 2.0
"""All requests of a tier are rejected from SPAN times its mark on."""
UNDER_SHARE: float = 2.0
"""Factor on the mark for a tenant that has less than its share of the queue."""
MISS: float = 0.5
"""A request overflows only if the prefill that caches save at home takes less than this share of the backlog."""
RETRY_S_MAX = 60
"""OpenAI's clients do not follow a longer ``Retry-After``: Python's does not retry, Node's retries within seconds."""
RETRIES_MS = 90_000
"""Time from a pool's last refusal in which the retry of a request is no new demand: it was counted when it was refused.
Longer than any ``Retry-After``."""
RETRY_SPREAD = 1.5
"""Largest factor by which a ``Retry-After`` is lengthened at random."""
PROMOTION_S = 2.0
"""Time until gateways send requests to a warm replica that is needed: the controller's look, the promotion, and the
next read of the leases."""
DRAW_SCALE = 1024
"""Factor that makes a second uniform number of a request's jitter."""
DUTY_MS = 5_000
"""Time constant with which admitted prefill is forgotten: about as long as a short answer."""
YIELD_MS = 5_000
"""Time for which batch work yields after the last request of a higher tier that would wait too long. A batch stream
computes its prompt again when it goes on, so it does not go on at once."""
BATCH_AHEAD_MS = 2_000
"""Pending prefill above which a replica takes no batch request from the queue: its engine has work for two reports.
More would wait there for nothing, and yield with it."""
_PACKED = struct.Struct("<dddIBdd")


class OverloadMarks(
    msgspec.Struct,
    frozen=True,
    rename={
        "reject_s": "shed_s",
        "overflow_s": "shift_s",
        "overflow_utilisation_max": "shift_utilisation_max",
    },
):
    """Overload limits declared for a pool; its plan carries them to gateways. Backlogs are in seconds."""

    reject_s: tuple[float, ...]
    """Backlog above which a tier's requests begin to be rejected, by tier; 0: never."""
    overflow_s: float = 0.0
    """Backlog from which requests that tolerate a cache miss overflow to adjacent pools; 0: never."""
    adjacent: tuple[str, ...] = ()
    """Pools that may take overflow, in order of preference."""
    overflow_utilisation_max: float = 0.6
    """Share of an adjacent pool's slots in use above which it takes no overflow."""
    duty_max: tuple[float, ...] = ()
    """Prefill duty above which a tier's requests are rejected, by tier; 0 or missing: never."""
    batch_yields: bool = True
    """Batch work yields to requests of higher tiers that would wait longer than their mark."""
    batch_pools: tuple[str, ...] = ()
    """Batch hosts: pools on interruptible or off-peak capacity that batch requests try first, in this order."""

    def of_tier(self, tier: int) -> tuple[float, float]:
        """Return the backlog and the prefill duty above which the tier's requests are rejected; 0: never.

        A plan of an earlier release knows fewer tiers; the others get the marks of its last one.
        """
        last = min(tier, len(self.reject_s) - 1), min(tier, len(self.duty_max) - 1)
        return self.reject_s[last[0]] if self.reject_s else 0.0, self.duty_max[last[1]] if self.duty_max else 0.0


class OverloadTerms(NamedTuple):
    """Overload limits that a gateway sends with one request."""

    reject_s: float = 0.0
    """Backlog in seconds above which the request's tier is rejected; 0: never. For a request that overflows from
    another pool: the backlog from which this pool takes none."""
    overflow_s: float = 0.0
    """Backlog in seconds from which the request may go to an adjacent pool; 0: it may not."""
    overflow_in_max: float = 0.0
    """Not 0: the request overflows from another pool. It is placed at once or not at all, and only while at most this
    share of the slots is in use."""
    replicas: int = 0
    """Number of the pool's replicas, if there are more than candidates; otherwise 0."""
    again: bool = False
    """True: the request was to overflow, and no adjacent pool took it."""
    moved: bool = False
    """True: the request was queued in another cell of the pool, and this one has room."""
    duty_max: float = 0.0
    """Prefill duty above which the request is rejected; 0: never, and the pool does not count it."""
    relief: float = 0.0
    """Replicas that come up before the request's time is over (``relief``). They shorten the wait in the queue."""
    batch_yields: bool = False
    """True: batch work of the pool yields if the request is of a higher tier and would wait longer than its mark."""
    at_once: bool = False
    """True: the request is refused rather than queued, because a smaller model may answer it."""
    retried: bool = False
    """True: its client says that it has sent the request before."""

    @property
    def counts_as_demand(self) -> bool:
        """True if the pool has to add the request to its demand: it is the home pool, and asked for the first time."""
        return not self.again and not self.moved and not self.overflow_in_max

    def make_batch_yield(self, tier: int, wait_s: float, *, is_over: bool) -> bool:
        """Return True if batch work yields to the request, which would wait ``wait_s``; 0 while the pool is not short.

        ``is_over``: the prefill duty is above ``duty_max``.
        """
        late = is_over or (self.reject_s > 0 and wait_s > self.reject_s)
        return self.batch_yields and tier < BATCH_TIER and late

    def packed(self) -> bytes:
        """Encode the terms for ``place.lua``; empty: no limits."""
        flags = self.again + 2 * self.moved + 4 * self.batch_yields + 8 * self.at_once + 16 * self.retried
        return b"" if self == NO_OVERLOAD_TERMS else _PACKED.pack(*self[:4], flags, *self[6:8])


NO_OVERLOAD_TERMS = OverloadTerms()
BATCH_HOST_TERMS = OverloadTerms(math.inf, overflow_in_max=1.0)
"""Terms at a batch host: a request is placed at once, in a free slot, or not at all."""


class PrefillDuty:
    """Share of time that a pool's ready replicas spend on the prompts of admitted requests."""

    def __init__(self) -> None:
        self._total_ms = 0.0
        """Prefill of admitted requests, as far as it is not forgotten."""
        self._at_ms = 0.0

    def admit(self, own_ms: float, now_ms: float) -> None:
        """Count an admitted request with this much prefill."""
        self._total_ms, self._at_ms = self._left_ms(now_ms) + own_ms, now_ms

    def share(self, now_ms: float, replicas: float) -> float:
        """Return the duty. It may exceed 1."""
        return self._left_ms(now_ms) / (DUTY_MS * replicas)

    def _left_ms(self, now_ms: float) -> float:
        return self._total_ms * math.exp(-abs(self._at_ms - now_ms) / DUTY_MS)  # the clock may have gone back


class Overflow(NamedTuple):
    """Reason why a request runs in an adjacent pool."""

    home: str
    to: str
    backlog_s: float
    """Backlog ahead of the request at home; 0: no replica took requests there."""
    shift_s: float
    """Backlog from which the home pool lets requests overflow."""


class Fallback(NamedTuple):
    """Reason why a smaller model answers a request."""

    home: str
    to: str
    model: str
    """The model that answers."""
    asked: str
    """The model that the request names."""


class BatchHosted(NamedTuple):
    """Reason why a batch request runs at a batch host of its home pool."""

    home: str
    to: str


def duty_retry_after_s(duty: float, duty_max: float, draw: float) -> int:
    """Seconds after which a rejected request may try again: the time until a pool that admits nothing is back at
    ``duty_max``."""
    return spread_retry_s(DUTY_MS / 1000 * math.log(duty / duty_max), draw)


def relief(up_in_s: Iterable[float], horizon_s: float) -> float:
    """Replicas that take requests within ``horizon_s``, each as the share of that time that it has left.

    ``up_in_s``: of each replica that is on its way, the time until it takes requests.
    """
    return sum(1 - left_s / horizon_s for left_s in up_in_s if left_s < horizon_s)


def is_rejected(backlog_s: float, mark_s: float, draw: float) -> bool:
    """True if this request is rejected: none at the mark, all from ``SPAN`` times the mark on.

    ``mark_s``: the tier's mark, not 0. ``draw``: the request's ``rejection_draw``.
    """
    return backlog_s > mark_s and draw * (SPAN - 1) * mark_s < backlog_s - mark_s


def rejection_draw(jitter: float) -> float:
    """Derive a second uniform number in [0, 1) from a request's jitter; the two do not correlate."""
    return (jitter * DRAW_SCALE) % 1


def retry_after_s(backlog_s: float, mark_s: float, draw: float) -> int:
    """Seconds after which a rejected request may try again: the time until the backlog is back at the mark."""
    return spread_retry_s(backlog_s - mark_s, draw)


def spread_retry_s(after_s: float, draw: float) -> int:
    """Whole seconds of a ``Retry-After``: ``after_s``, lengthened at random, from 1 to ``RETRY_S_MAX``.

    ``draw``, uniform in [0, 1), spreads requests that were rejected together.
    """
    return max(1, math.ceil(min(after_s, RETRY_S_MAX / RETRY_SPREAD) * (1 + draw * (RETRY_SPREAD - 1))))


def overflow_in_backlog_s(home: OverloadMarks, host: OverloadMarks | None) -> float:
    """Backlog from which the adjacent pool ``host`` takes no overflow.

    Half of the home pool's mark, or the lowest of the adjacent pool's own marks if that is lower.
    """
    own = (*host.reject_s[: BATCH_TIER + 1], host.overflow_s) if host is not None else ()
    return min([home.overflow_s / 2, *(mark for mark in own if mark)])
