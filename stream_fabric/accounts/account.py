"""Limits of one tenant: which requests are admitted, and what they reserve until they are settled. Pure.

A request counts against several subjects: its tenant, key, user and model. Each subject has a token bucket for requests
and one for tokens, which refill within a minute, and a bound on the streams that run at the same time. A request is
admitted if every bucket and every bound has room, and then takes all of it in one step; otherwise it takes nothing.

An admitted stream holds a reservation: one request, its estimated tokens, and its place among the running streams. When
the stream ends, it is settled: the buckets then count what it used, and its place is free. Whoever ends the stream
settles it. A reservation that nobody settled is overdue after ``CHECK_MS``, and again after that: an admission returns
overdue streams, and its caller compares them with the log. So a lost settlement costs a tenant its place for that time.

A request may also have budgets, see ``accounts.budgets``: what its stream holds of them is a part of its reservation.

``AccountState`` is the whole algorithm. ``account_admit.lua``, ``account_add.lua``, ``account_extend.lua``,
``account_reprice.lua`` and ``account_settle.lua`` implement it inside Redis; one contract suite runs on both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from stream_fabric.accounts.budgets import BudgetState, BudgetUse, Crossed, Extended, Spend, Unit
from stream_fabric.accounts.budgets import Used as _Used
from stream_fabric.accounts.records import Limits
from stream_fabric.events import Prices
from stream_fabric.stream.ids import StreamId

MINUTE_MS = 60_000
CHECK_MS = 30_000
"""Time after which a reservation is compared with its stream, and again until it is settled."""
CHECKED_MAX = 16
"""Overdue reservations that one admission returns."""
KEPT_MS = 2 * 3600 * 1000
"""Time that reservations are kept without an admission."""

LimitKind = Literal["requests", "tokens", "streams"]
KINDS: tuple[LimitKind, ...] = ("requests", "tokens", "streams")


class Subject(NamedTuple):
    """One thing that limits apply to. ``name`` is unique within the tenant."""

    name: str
    limits: Limits


class Use(NamedTuple):
    """Use of one subject: the spent part of each bucket, and the running streams."""

    requests: float = 0.0
    tokens: float = 0.0
    streams: int = 0


class Admitted(NamedTuple):
    """Reply for a request that may run. ``uses``: of each subject, with this request. ``overdue``: see the module."""

    uses: tuple[Use, ...]
    overdue: tuple[StreamId, ...] = ()
    granted: int = 0
    """Output tokens that its budgets grant it at first; 0: it has no budgets."""
    budgets: tuple[BudgetUse, ...] = ()
    """Counter of each claim, with this request."""
    crossed: tuple[Crossed, ...] = ()


class Exceeded(NamedTuple):
    """Reply for a request that may not run: the limit with the longest wait."""

    subject: int
    """Index of the subject."""
    kind: LimitKind
    retry_ms: float
    """Time until the bucket has room. 0: unknown, because a stream must end. -1: never, the limit is too small."""
    uses: tuple[Use, ...]
    overdue: tuple[StreamId, ...] = ()


class Spent(NamedTuple):
    """Reply for a request that may not run, because a budget has no room for it."""

    claim: int
    """Index of the claim."""
    unit: Unit
    uses: tuple[Use, ...]
    overdue: tuple[StreamId, ...] = ()
    budgets: tuple[BudgetUse, ...] = ()
    crossed: tuple[Crossed, ...] = ()


class Settlement(NamedTuple):
    """Usage of an ended stream. ``requests`` 0: it was withdrawn and counts as never sent.

    ``cached`` and ``output``: which of the tokens have a price of their own.
    """

    stream: StreamId
    tokens: int
    requests: int = 1
    cached: int = 0
    output: int = 0


def drained(spent: float, at_ms: int, limit: int, now_ms: int) -> float:
    """Return the spent amount of a bucket at ``now_ms``, of which ``limit`` refills in a minute.

    After a failover to a host whose clock is behind, ``at_ms`` lies in the future: the bucket keeps its amount.
    """
    return max(0.0, spent - limit * max(now_ms - at_ms, 0) / MINUTE_MS)


class _Bucket:
    """Spent amount of a bucket that refills ``limit`` in a minute."""

    __slots__ = ("at_ms", "limit", "spent")

    def __init__(self) -> None:
        self.spent, self.at_ms, self.limit = 0.0, 0, 0

    def spent_at(self, now_ms: int) -> float:
        return drained(self.spent, self.at_ms, self.limit, now_ms)

    def add(self, amount: float, now_ms: int) -> None:
        self.spent, self.at_ms = max(0.0, self.spent_at(now_ms) + amount), now_ms


class _Reservation(NamedTuple):
    tokens: int
    subjects: tuple[str, ...]


class AccountState:
    """The account of one tenant."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, LimitKind], _Bucket] = {}
        self._streams: dict[str, set[StreamId]] = {}
        self.reservations: dict[StreamId, _Reservation] = {}
        self._check_at_ms: dict[StreamId, int] = {}
        self.budgets = BudgetState()

    def admit(
        self, stream: StreamId, subjects: Sequence[Subject], tokens: int, now_ms: int, spend: Spend | None = None
    ) -> Admitted | Exceeded | Spent:
        """Admit a request that will use about ``tokens``, or refuse it. A repeated call changes nothing more.

        ``spend``: what it asks of its budgets.
        """
        overdue = self._overdue(now_ms)
        names = {name for name, _ in subjects}
        for (name, _), bucket in self._buckets.items():
            if name in names:  # the clock may have gone back: its buckets drain from now on
                bucket.at_ms = min(bucket.at_ms, now_ms)
        if stream in self.reservations:
            return self._admitted(stream, subjects, overdue, spend, (), now_ms)
        if spend is not None:
            over, crossed = self.budgets.refusal(spend, now_ms)
            if over is not None:
                return Spent(*over, self.uses(subjects, now_ms), overdue, self._budget_uses(spend, now_ms), crossed)
        worst: tuple[float, int, LimitKind] | None = None
        for index, (name, limits) in enumerate(subjects):
            for kind, wait_ms in self._waits(name, limits, tokens, now_ms):
                if worst is None or _rank(wait_ms) > _rank(worst[0]):
                    worst = wait_ms, index, kind
        if worst is not None:
            return Exceeded(worst[1], worst[2], worst[0], self.uses(subjects, now_ms), overdue)
        for name, limits in subjects:
            for kind, limit, amount in _costs(limits, tokens):
                self._bucket(name, kind, limit, now_ms).add(amount, now_ms)
            if limits.streams is not None:
                self._streams.setdefault(name, set()).add(stream)
        self.reservations[stream] = _Reservation(tokens, tuple(name for name, _ in subjects))
        self._check_at_ms[stream] = now_ms + CHECK_MS
        crossed = () if spend is None else self.budgets.reserve(stream, spend, now_ms)
        return self._admitted(stream, subjects, overdue, spend, crossed, now_ms)

    def add(
        self, stream: StreamId, subjects: Sequence[Subject], requests: int, tokens: int, now_ms: int
    ) -> Admitted | Exceeded:
        """Add an input of a running stream to its reservation, or refuse it. Figures below 0 give one back.

        Subjects that the stream does not count against do not count here either.
        """
        reservation = self.reservations.get(stream)
        names = () if reservation is None else reservation.subjects
        uses = self._rates(subjects, now_ms)
        worst: tuple[float, int, LimitKind] | None = None
        for index, (name, limits) in enumerate(subjects):
            for kind, limit, amount in _costs(limits, tokens, requests) if name in names else ():
                over = self._spent(name, kind, limit, now_ms) + amount - limit
                wait_ms = -1.0 if amount > limit else over / limit * MINUTE_MS if limit else 0.0
                if amount > 0 and over > 0 and (worst is None or _rank(wait_ms) > _rank(worst[0])):
                    worst = wait_ms, index, kind
        if worst is not None:
            return Exceeded(worst[1], worst[2], worst[0], uses)
        if reservation is not None:
            self.reservations[stream] = reservation._replace(tokens=reservation.tokens + tokens)
            for name, limits in subjects:
                for kind, limit, amount in _costs(limits, tokens, requests) if name in names else ():
                    self._bucket(name, kind, limit, now_ms).add(amount, now_ms)
        return Admitted(self._rates(subjects, now_ms))

    def _rates(self, subjects: Sequence[Subject], now_ms: int) -> tuple[Use, ...]:
        return tuple(use._replace(streams=0) for use in self.uses(subjects, now_ms))

    def _admitted(
        self,
        stream: StreamId,
        subjects: Sequence[Subject],
        overdue: tuple[StreamId, ...],
        spend: Spend | None,
        crossed: tuple[Crossed, ...],
        now_ms: int,
    ) -> Admitted:
        uses = self.uses(subjects, now_ms)
        if spend is None:
            return Admitted(uses, overdue)
        return Admitted(uses, overdue, self.budgets.granted(stream), self._budget_uses(spend, now_ms), crossed)

    def _budget_uses(self, spend: Spend, now_ms: int) -> tuple[BudgetUse, ...]:
        return tuple(self.budgets.use(claim.name, now_ms) for claim in spend.claims)

    def extend(self, stream: StreamId, output: int, prompt: int, now_ms: int) -> Extended:
        """Grant a running stream up to ``output`` output tokens in total; see ``BudgetState.extend``."""
        return self.budgets.extend(stream, output, prompt, now_ms)

    def reprice(self, stream: StreamId, prices: Prices, now_ms: int) -> None:
        """Charge a stream at other prices; see ``BudgetState.reprice``."""
        self.budgets.reprice(stream, prices, now_ms)

    def settle(self, settlement: Settlement, now_ms: int) -> bool:
        """Count what an ended stream used instead of what it reserved. False: it holds no reservation."""
        reservation = self.reservations.pop(settlement.stream, None)
        if reservation is None:
            return False
        del self._check_at_ms[settlement.stream]
        _, tokens, _, cached, output = settlement
        self.budgets.settle(settlement.stream, _Used(tokens - output, cached, output), now_ms)
        for name in reservation.subjects:
            changes: dict[LimitKind, int] = {
                "requests": settlement.requests - 1,
                "tokens": settlement.tokens - reservation.tokens,
            }
            for kind, amount in changes.items():
                bucket = self._buckets.get((name, kind))
                if bucket is not None:
                    bucket.add(amount, now_ms)
            self._streams.get(name, set()).discard(settlement.stream)
        return True

    def uses(self, subjects: Sequence[Subject], now_ms: int) -> tuple[Use, ...]:
        """Return the use of each subject, as far as it has a limit."""
        return tuple(
            Use(
                self._spent(name, "requests", limits.requests_per_min, now_ms),
                self._spent(name, "tokens", limits.tokens_per_min, now_ms),
                0 if limits.streams is None else len(self._streams.get(name, ())),
            )
            for name, limits in subjects
        )

    def _overdue(self, now_ms: int) -> tuple[StreamId, ...]:
        """Return streams whose reservation is due for a look; the next look is ``CHECK_MS`` later."""
        due = sorted((at, stream) for stream, at in self._check_at_ms.items() if at <= now_ms)[:CHECKED_MAX]
        for _, stream in due:
            self._check_at_ms[stream] = now_ms + CHECK_MS
        return tuple(stream for _, stream in due)

    def _waits(self, name: str, limits: Limits, tokens: int, now_ms: int) -> list[tuple[LimitKind, float]]:
        """Return the limits of a subject without room, each with its wait as in ``Exceeded.retry_ms``."""
        found: list[tuple[LimitKind, float]] = []
        for kind, limit, amount in _costs(limits, tokens):
            spent = self._spent(name, kind, limit, now_ms)
            if amount > limit:
                found.append((kind, -1.0))
            elif spent + amount > limit:
                found.append((kind, (spent + amount - limit) / limit * MINUTE_MS))
        if limits.streams is not None and len(self._streams.get(name, ())) >= limits.streams:
            found.append(("streams", -1.0 if limits.streams == 0 else 0.0))
        return found

    def _bucket(self, name: str, kind: LimitKind, limit: int, now_ms: int) -> _Bucket:
        """Return the bucket, with its refill at the limit that holds now."""
        bucket = self._buckets.setdefault((name, kind), _Bucket())
        bucket.spent, bucket.at_ms, bucket.limit = self._spent(name, kind, limit, now_ms), now_ms, limit
        return bucket

    def _spent(self, name: str, kind: LimitKind, limit: int | None, now_ms: int) -> float:
        bucket = self._buckets.get((name, kind))
        if bucket is None or limit is None:
            return 0.0
        return drained(bucket.spent, bucket.at_ms, limit, now_ms)


def _costs(limits: Limits, tokens: int, requests: int = 1) -> list[tuple[LimitKind, int, int]]:
    """Return (bucket, its limit, what a request takes of it) for each bucket that the limits define."""
    costs: list[tuple[LimitKind, int | None, int]] = [
        ("requests", limits.requests_per_min, requests),
        ("tokens", limits.tokens_per_min, tokens),
    ]
    return [(kind, limit, amount) for kind, limit, amount in costs if limit is not None]


def _rank(wait_ms: float) -> float:
    """Order of waits: never is the longest."""
    return math.inf if wait_ms < 0 else wait_ms
