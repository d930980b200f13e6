"""Budgets of one tenant: what its requests may use in a period, in tokens and in money. Pure.

A request claims from several budgets: its own, its session's, its user's day, its tenant's hour and month. Each budget
but the request's own has a counter, which holds what ended streams used and what running streams have reserved. Used
and reserved together never exceed the budget. A stream reserves its prompt, priced as uncached, and the output tokens
that it was granted. It may output no more than that, and asks for further tokens while it runs. When it has ended, its
counters hold what it used instead of what it reserved.

A stream that used more than it reserved (its prompt was longer than the gateway's estimate, or a failover lost an
extension) is counted as far as the budget has room.

``BudgetState`` is the whole algorithm. ``account_budget.lua`` implements it inside Redis; one contract suite runs on
both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from stream_fabric.events import Prices
from stream_fabric.stream.ids import StreamId

BUDGET_IDLE_MS = 24 * 3600 * 1000
"""Time that a session's counter is kept after the session's last request."""
OUTPUT_MIN = 16
"""Output tokens that a budget must have room for, or all that the request wants, so that a request is admitted."""
CHUNK_MIN = 256
"""Output tokens that a stream reserves at a time, or what it is expected to output if that is more."""
PROMPT_MARGIN = 16
"""Tokens that a chat template may add to a prompt."""
WARN_FIFTHS = 4
"""A budget of a period warns when four fifths (80 %) of it are used or reserved."""
REQUEST = "request"
"""Name of the claim on a request's own budget, which has no counter."""

Unit = Literal["tokens", "micro"]
Crossing = Literal["warning", "exceeded"]
_BIT: dict[Crossing, int] = {"warning": 1, "exceeded": 2}
_WARNS = frozenset({"user_day", "tenant_hour", "tenant_month"})
_MILLION = 1_000_000


class Claim(NamedTuple):
    """One budget that a request counts against. ``name``: its kind, then what tells it apart, after colons."""

    name: str
    tokens: int | None
    micro: int | None
    expires_ms: int = 0
    """Unix time until which its counter is kept; 0: ``BUDGET_IDLE_MS`` after the last admission."""

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def warns(self) -> bool:
        """True if it belongs to a period, and tells once in the period that it is nearly used up."""
        return self.kind in _WARNS


class Spend(NamedTuple):
    """A request's question to its budgets. ``output``: the most output tokens that it reserves at first."""

    claims: tuple[Claim, ...]
    prompt: int
    output: int
    prices: Prices = Prices()


class BudgetUse(NamedTuple):
    """Counter of a budget."""

    tokens: int = 0
    micro: int = 0
    reserved_tokens: int = 0
    reserved_micro: int = 0
    crossed: int = 0
    """Bits of what has been told: 1 the warning, 2 that it was exceeded."""

    @property
    def warned(self) -> bool:
        return bool(self.crossed & _BIT["warning"])

    @property
    def exceeded(self) -> bool:
        return bool(self.crossed & _BIT["exceeded"])


class Crossed(NamedTuple):
    """A budget that has crossed a mark for the first time in its period."""

    name: str
    what: Crossing


RESERVATION_LOST = -1
"""Grant of a stream whose reservation the account does not know, because Redis has lost it."""


class Extended(NamedTuple):
    """Reply to a stream that asked for more output tokens. ``granted``: in total; it may output no more than that.

    ``RESERVATION_LOST``: the account can hold the stream to nothing.
    """

    granted: int
    crossed: tuple[Crossed, ...] = ()


class OverBudget(NamedTuple):
    """The budget that has no room for a request."""

    claim: int
    """Index of the claim."""
    unit: Unit


class Used(NamedTuple):
    """Final usage of a stream."""

    prompt: int
    cached: int
    output: int


class _Grant(NamedTuple):
    """Reservation of a stream in its budgets."""

    claims: tuple[Claim, ...]
    prompt: int
    output: int
    prices: Prices

    @property
    def micro(self) -> int:
        return self.prices.of(self.prompt, 0, self.output)


class BudgetState:
    """The budgets of one tenant. ``AccountState`` decides which streams hold a grant."""

    def __init__(self) -> None:
        self._counters: dict[str, BudgetUse] = {}
        self._expires_ms: dict[str, int] = {}
        self._grants: dict[StreamId, _Grant] = {}

    def use(self, name: str, now_ms: int) -> BudgetUse:
        """Read a counter; one that does not exist, or has expired, is empty."""
        if self._expires_ms.get(name, 0) <= now_ms:
            self._counters.pop(name, None)
        return self._counters.get(name, BudgetUse())

    def granted(self, stream: StreamId) -> int:
        """Output tokens that the stream was granted; 0: it has no budget."""
        grant = self._grants.get(stream)
        return 0 if grant is None else grant.output

    def refusal(self, spend: Spend, now_ms: int) -> tuple[OverBudget | None, tuple[Crossed, ...]]:
        """Return the first budget without room for the request (None: all have), and what that crosses."""
        least = min(spend.output, OUTPUT_MIN)
        for index, claim in enumerate(spend.claims):
            fits, unit = _fitting(claim, self._room(claim, now_ms), spend.prompt, least, spend.prices)
            if fits < least:
                return OverBudget(index, unit), self._cross([claim], "exceeded", now_ms)
        return None, ()

    def reserve(self, stream: StreamId, spend: Spend, now_ms: int) -> tuple[Crossed, ...]:
        """Reserve the prompt and as many output tokens as fit (``refusal`` found room); return what that crosses."""
        output = spend.output
        for claim in spend.claims:
            output, _ = _fitting(claim, self._room(claim, now_ms), spend.prompt, output, spend.prices)
        for claim in spend.claims:
            if claim.name != REQUEST:
                until = max(self._expires_ms.get(claim.name, 0), claim.expires_ms or now_ms + BUDGET_IDLE_MS)
                self._counters[claim.name] = self.use(claim.name, now_ms)
                self._expires_ms[claim.name] = until
        grant = self._grants[stream] = _Grant(spend.claims, spend.prompt, output, spend.prices)
        self._add(grant, grant.prompt + grant.output, grant.micro, now_ms)
        return self._warn(grant, now_ms)

    def extend(self, stream: StreamId, output: int, prompt: int, now_ms: int) -> Extended:
        """Grant the stream up to ``output`` output tokens in total. A repeated call changes nothing more.

        ``prompt``: tokens of the prompt, now that the engine has counted them; 0: as reserved.
        """
        grant = self._grants.get(stream)
        if grant is None:
            return Extended(RESERVATION_LOST)
        wanted, prompt = max(output, grant.output), prompt or grant.prompt
        fits, binding = wanted, None
        for claim in grant.claims:
            room = self._room(claim, now_ms)
            if claim.name != REQUEST and claim.name in self._counters:
                room = BudgetUse(
                    room.tokens, room.micro, room.reserved_tokens - grant.prompt - grant.output,
                    room.reserved_micro - grant.micro,
                )  # fmt: skip
            found, _ = _fitting(claim, room, prompt, fits, grant.prices)
            if found < fits:
                fits, binding = found, claim
        crossed = () if binding is None else self._cross([binding], "exceeded", now_ms)
        if fits < 0:  # not even the prompt fits
            return Extended(0, crossed)
        new = self._grants[stream] = grant._replace(prompt=prompt, output=fits)
        self._add(new, prompt + fits - grant.prompt - grant.output, new.micro - grant.micro, now_ms)
        return Extended(fits, self._warn(new, now_ms) + crossed)

    def reprice(self, stream: StreamId, prices: Prices, now_ms: int) -> None:
        """Charge the stream at other prices, none of them higher: it then fits where it fitted before."""
        grant = self._grants.get(stream)
        if grant is not None:
            new = self._grants[stream] = grant._replace(prices=prices)
            self._add(new, 0, new.micro - grant.micro, now_ms)

    def settle(self, stream: StreamId, used: Used, now_ms: int) -> None:
        """Count what the ended stream used instead of what it reserved."""
        grant = self._grants.pop(stream, None)
        if grant is None:
            return
        micro = grant.prices.of(*used)
        held_tokens, held_micro = grant.prompt + grant.output, grant.micro
        for claim in grant.claims:
            use = self.use(claim.name, now_ms)
            if claim.name not in self._counters:  # its period is over
                continue
            self._counters[claim.name] = use._replace(
                tokens=use.tokens
                + _counted(used.prompt + used.output, held_tokens, claim.tokens, use.tokens + use.reserved_tokens),
                micro=use.micro + _counted(micro, held_micro, claim.micro, use.micro + use.reserved_micro),
                reserved_tokens=max(0, use.reserved_tokens - held_tokens),
                reserved_micro=max(0, use.reserved_micro - held_micro),
            )

    def raise_to(self, name: str, tokens: int, micro: int, expires_ms: int, now_ms: int) -> None:
        """Raise what a counter says was used to at least this."""
        use = self.use(name, now_ms)
        self._counters[name] = use._replace(tokens=max(use.tokens, tokens), micro=max(use.micro, micro))
        self._expires_ms[name] = max(self._expires_ms.get(name, 0), expires_ms or now_ms + BUDGET_IDLE_MS)

    def _room(self, claim: Claim, now_ms: int) -> BudgetUse:
        """Return the counter that the claim's limits are compared with."""
        return BudgetUse() if claim.name == REQUEST else self.use(claim.name, now_ms)

    def _add(self, grant: _Grant, tokens: int, micro: int, now_ms: int) -> None:
        """Add to what is reserved in the counters of a grant."""
        for claim in grant.claims:
            use = self.use(claim.name, now_ms)
            if claim.name in self._counters:
                self._counters[claim.name] = use._replace(
                    reserved_tokens=max(0, use.reserved_tokens + tokens),
                    reserved_micro=max(0, use.reserved_micro + micro),
                )

    def _warn(self, grant: _Grant, now_ms: int) -> tuple[Crossed, ...]:
        return self._cross([c for c in grant.claims if nearly_used(c, self.use(c.name, now_ms))], "warning", now_ms)

    def _cross(self, claims: list[Claim], what: Crossing, now_ms: int) -> tuple[Crossed, ...]:
        """Note that the budgets have crossed a mark; return those that do so for the first time."""
        crossed = []
        for claim in claims:
            use = self.use(claim.name, now_ms)
            if claim.warns and not use.crossed & _BIT[what]:
                crossed.append(Crossed(claim.name, what))
                self._counters[claim.name] = use._replace(crossed=use.crossed | _BIT[what])
                until = claim.expires_ms or now_ms + BUDGET_IDLE_MS
                self._expires_ms[claim.name] = max(self._expires_ms.get(claim.name, 0), until)
        return tuple(crossed)


def known_refusal(spend: Spend, uses: Sequence[BudgetUse]) -> OverBudget | None:
    """Return the first budget without room for the request, as far as it has been told; None: there is none.

    The first refusal of a budget's period is for ``BudgetState.refusal``, which tells that it was exceeded.
    """
    least = min(spend.output, OUTPUT_MIN)
    for index, (claim, use) in enumerate(zip(spend.claims, uses, strict=True)):
        fits, unit = _fitting(claim, use, spend.prompt, least, spend.prices)
        if fits < least and (use.exceeded or not claim.warns):
            return OverBudget(index, unit)
    return None


def has_room(claim: Claim, use: BudgetUse, spend: Spend) -> bool:
    """Return whether the budget has room for the request's prompt and its least output."""
    least = min(spend.output, OUTPUT_MIN)
    return _fitting(claim, use, spend.prompt, least, spend.prices)[0] >= least


def least_spend(spend: Spend, unit: Unit) -> int:
    """Return what a request reserves at least: its prompt and its least output."""
    least = min(spend.output, OUTPUT_MIN)
    return spend.prompt + least if unit == "tokens" else spend.prices.of(spend.prompt, 0, least)


def reserved_prompt(estimate: int) -> int:
    """Return how many tokens a budget reserves for a prompt whose length the gateway has estimated.

    It is somewhat more, because an estimate that is too low costs a second question before the first token.
    """
    return estimate + estimate // 4 + PROMPT_MARGIN


def nearly_used(claim: Claim, use: BudgetUse) -> bool:
    """Return whether 80 % of the budget are used or reserved."""
    return (claim.tokens is not None and (use.tokens + use.reserved_tokens) * 5 >= claim.tokens * WARN_FIFTHS) or (
        claim.micro is not None and (use.micro + use.reserved_micro) * 5 >= claim.micro * WARN_FIFTHS
    )


def used_percent(claim: Claim, use: BudgetUse) -> int:
    """Return how much of the budget is used or reserved, in percent, of the unit that has the least left."""
    shares = [
        100 * used // limit if limit else 100
        for used, limit in (
            (use.tokens + use.reserved_tokens, claim.tokens),
            (use.micro + use.reserved_micro, claim.micro),
        )
        if limit is not None
    ]
    return max(shares, default=0)


def _fitting(claim: Claim, use: BudgetUse, prompt: int, wanted: int, prices: Prices) -> tuple[int, Unit]:
    """Return how many of the wanted output tokens the budget has room for beside the prompt, and what limits them.

    Below 0: it has no room for the prompt.
    """
    fits: int = wanted
    unit: Unit = "tokens"
    if claim.tokens is not None:
        fits = min(fits, claim.tokens - use.tokens - use.reserved_tokens - prompt)
    if claim.micro is not None and fits >= 0:
        room = claim.micro - use.micro - use.reserved_micro
        if prices.of(prompt, 0, fits) > room:
            # The largest output whose price, rounded half up, is at most the room
            left = (room + 1) * _MILLION - _MILLION // 2 - 1 - prompt * prices.prompt
            fits, unit = (left // prices.output if prices.output and left >= 0 else -1), "micro"
    return max(fits, -1), unit


def _counted(used: int, held: int, limit: int | None, total: int) -> int:
    """Return how much of a stream's use its budget counts: all that it reserved, and more as far as there is room."""
    if used <= held or limit is None:
        return used
    return held + min(used - held, max(0, limit - total))
