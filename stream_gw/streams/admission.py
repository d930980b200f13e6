"""Checks a request against the limits of its tenant's plan, and tells the caller what is left of them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from stream_fabric.accounts.account import (
    KINDS,
    MINUTE_MS,
    Exceeded,
    LimitKind,
    Settlement,
    Spent,
    Subject,
    Use,
)
from stream_fabric.accounts.budgets import Claim, Crossed, Spend, known_refusal, reserved_prompt
from stream_fabric.accounts.ports import Accounts
from stream_fabric.accounts.records import Limits
from stream_fabric.errors import FabricUnavailable, RateLimited
from stream_fabric.events import Prices
from stream_fabric.limits import LIMITS_WAIT_S_MAX
from stream_fabric.pool.records import Work
from stream_fabric.ports import StreamLog
from stream_fabric.recovery.settlements import settle_overdue
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId
from stream_gw.dialects.anthropic.limits import Left, limit_headers
from stream_gw.streams.budgets.claims import spend_of
from stream_gw.streams.budgets.report import describe_budgets, over_budget, warning_headers

_LOG_EVERY_S = 10.0
_STORED = ":stored"
_STORED_PER_REQUEST = 60
"""Calls for what is stored, for each request that a limit allows: a client asks each second whether one has ended."""
_log = logging.getLogger(__name__)

Headers = tuple[tuple[bytes, bytes], ...]

_UNITS: dict[LimitKind, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "streams": "running streams",
}


class Terms(NamedTuple):
    """The limits and budgets that a request counts against."""

    subjects: Sequence[Subject]
    claims: tuple[Claim, ...] = ()

    @property
    def any(self) -> bool:
        return bool(self.subjects or self.claims)


class Admission:
    """Admits requests to their tenants' accounts. ``spawn`` runs background work."""

    def __init__(
        self,
        accounts: Accounts,
        log: StreamLog,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_limited: Callable[[str, str], None],
        on_failed_open: Callable[[], None],
        on_crossed: Callable[[TenantId, Crossed, str], None],
        now_us: Callable[[], int],
        holder_of: Callable[[ReplicaId | None, StreamId], Awaitable[int]],
    ) -> None:
        """``on_limited`` is called with the kind of subject and of limit that refused a request; ``on_failed_open`` for
        each request that was admitted without its limits; ``on_crossed`` with a budget that has crossed a mark, and the
        model. ``holder_of``: as ``settle_overdue`` takes it."""
        self._accounts = accounts
        self._log = log
        self._spawn = spawn
        self._on_limited = on_limited
        self._on_failed_open = on_failed_open
        self._on_crossed = on_crossed
        self._now_us = now_us
        self._holder_of = holder_of
        self._log_at = 0.0

    async def admit(
        self, work: Work, terms: Terms, tokens: int, *, dialect: str, fail_open: bool
    ) -> tuple[Headers, int]:
        """Reserve what the request will use about.

        Returns the headers with what is left, and the output tokens that its budgets grant it (0: it has none). Raises
        RateLimited. ``fail_open``: while Redis does not answer for the account, a request without budgets is admitted
        without a reservation. Else that raises FabricUnavailable.
        """
        tenant, stream, subjects = work.tenant, work.request.stream, terms.subjects
        spend = spend_of(work, terms.claims)
        asking = self._accounts.admit(tenant, stream, subjects, tokens, spend)
        if fail_open and spend is None:
            try:
                async with asyncio.timeout(LIMITS_WAIT_S_MAX):
                    reply = await asking
            except (FabricUnavailable, TimeoutError) as error:
                self._report_failed_open(tenant, error)
                return (), 0
        else:
            reply = await asking
        if reply.overdue:
            self._spawn(settle_overdue(self._accounts, self._log, tenant, reply.overdue, self._holder_of))
        left = least_left(subjects, reply.uses)
        headers = rate_headers(left)
        if dialect.startswith("anthropic."):
            headers += limit_headers(left, self._now_us() // 1000)
        if isinstance(reply, Exceeded):
            self._on_limited(subjects[reply.subject].name.partition(":")[0], reply.kind)
            raise _limited(subjects, reply, tokens, headers)
        for crossed in reply.crossed:
            self._on_crossed(tenant, crossed, work.request.model)
        headers += warning_headers(terms.claims, reply.budgets)
        if spend is not None and isinstance(reply, Spent):
            self._on_limited(terms.claims[reply.claim].kind, "money" if reply.unit == "micro" else reply.unit)
            raise over_budget(spend, reply, self._now_us() // 1000, headers)
        return headers, 0 if isinstance(reply, Spent) else reply.granted

    async def check(
        self, tenant: TenantId, terms: Terms, prices: Prices | None, *, prepares: bool, fail_open: bool
    ) -> None:
        """Check that limits and budgets have room for a request, before work that one over them must not cause.

        Nothing is reserved: ``admit`` or, with ``prepares``, ``prepared`` decides. Raises RateLimited and, unless
        ``fail_open``, FabricUnavailable.
        """
        subjects = _prepared(terms.subjects) if prepares else terms.subjects
        await self._check_limits(tenant, subjects, fail_open=fail_open)
        if terms.claims and not prepares:
            spend = Spend(terms.claims, reserved_prompt(0), 1, prices or Prices())
            found = await self._accounts.budgets(tenant, [claim.name for claim in terms.claims])
            uses = tuple(found[claim.name] for claim in terms.claims)
            over = known_refusal(spend, uses)
            if over is not None:
                claim, unit = over
                self._on_limited(terms.claims[claim].kind, "money" if unit == "micro" else unit)
                raise over_budget(spend, Spent(claim, unit, (), budgets=uses), self._now_us() // 1000, ())

    async def _check_limits(self, tenant: TenantId, subjects: Sequence[Subject], *, fail_open: bool) -> None:
        if not any(each.limits.any for each in subjects):
            return
        try:
            async with asyncio.timeout(LIMITS_WAIT_S_MAX if fail_open else None):
                uses = await self._accounts.uses(tenant, subjects)
        except (FabricUnavailable, TimeoutError):
            if fail_open:
                return  # ``admit`` reports it
            raise
        for which, (subject, use) in enumerate(zip(subjects, uses, strict=True)):
            for kind, limit in _limits(subject.limits):
                over = getattr(use, kind) + 1 - limit
                if over > 0:
                    retry_ms = -1.0 if limit < 1 else 0.0 if kind == "streams" else over / limit * MINUTE_MS
                    self._on_limited(subject.name.partition(":")[0], kind)
                    raise limited_input(subjects, Exceeded(which, kind, retry_ms, uses), 1)

    def _report_failed_open(self, tenant: TenantId, error: Exception) -> None:
        """Count the request; log one of them every few seconds."""
        self._on_failed_open()
        now = asyncio.get_running_loop().time()
        if now >= self._log_at:
            self._log_at = now + _LOG_EVERY_S
            why = str(error) or f"Redis did not answer in {LIMITS_WAIT_S_MAX:g} s"
            _log.warning("limits not checked, request admitted: tenant=%s error=%s", tenant, why)

    @asynccontextmanager
    async def prepared(self, tenant: TenantId, stream: StreamId, subjects: Sequence[Subject]) -> AsyncIterator[None]:
        """Bound the requests that make no stream: as many a minute as of the others, which they leave alone.

        Raises RateLimited. One that fails counts as never sent.
        """
        own = _prepared(subjects)
        if not own:
            yield
            return
        requests = 0
        try:
            reply = await self._accounts.admit(tenant, stream, own, 0)
            if isinstance(reply, Exceeded):
                self._on_limited(own[reply.subject].name.partition(":")[0], reply.kind)
                raise _limited(own, reply, 0, rate_headers(least_left(own, reply.uses)))
            yield
            requests = 1
        finally:
            self._spawn(self._settle(tenant, Settlement(stream, 0, requests)))

    async def count_stored(
        self, tenant: TenantId, call: StreamId, subjects: Sequence[Subject], *, fail_open: bool
    ) -> None:
        """Count a call for stored responses or conversations, which has a limit of its own.

        Raises RateLimited and, unless ``fail_open``, FabricUnavailable.
        """
        own = _stored(subjects)
        if not own:
            return
        try:
            async with asyncio.timeout(LIMITS_WAIT_S_MAX if fail_open else None):
                reply = await self._accounts.admit(tenant, call, own, 0)
        except (FabricUnavailable, TimeoutError) as error:
            if not fail_open:
                raise
            self._report_failed_open(tenant, error)
            return
        finally:
            self._spawn(self._settle(tenant, Settlement(call, 0, 1)))
        if isinstance(reply, Exceeded):
            self._on_limited(own[reply.subject].name.partition(":")[0], reply.kind)
            raise _limited(own, reply, 0, rate_headers(least_left(own, reply.uses)))

    async def _settle(self, tenant: TenantId, settlement: Settlement) -> None:
        await self._accounts.settle(tenant, [settlement])

    async def withdraw(self, tenant: TenantId, stream: StreamId) -> None:
        """Give a reservation back whose request was refused later; it counts as never sent."""
        await self._settle(tenant, Settlement(stream, 0, 0))

    async def describe(self, tenant: TenantId, subjects: Sequence[Subject]) -> list[dict[str, Any]]:
        """Describe limits and what is used of them, for ``GET /v1/limits``."""
        uses = await self._accounts.uses(tenant, subjects)
        described = []
        for (name, limits), use in zip(subjects, uses, strict=True):
            kind, _, which = name.partition(":")
            entry: dict[str, Any] = {"applies_to": kind}
            if kind in ("key", "model"):
                entry[kind] = which
            for limit_kind, limit in _limits(limits):
                used = getattr(use, limit_kind)
                entry[_UNITS[limit_kind].replace(" ", "_")] = {
                    "limit": limit,
                    "used": math.ceil(used),
                    "remaining": max(0, math.floor(limit - used)),
                }
            described.append(entry)
        return described

    async def describe_budgets(self, tenant: TenantId, claims: Sequence[Claim]) -> list[dict[str, Any]]:
        """Describe budgets and what is used of them, for ``GET /v1/limits``."""
        return describe_budgets(claims, await self._accounts.budgets(tenant, [claim.name for claim in claims]))


def _prepared(subjects: Sequence[Subject]) -> list[Subject]:
    """Return what requests that make no stream count against."""
    return [
        Subject(f"{name}:prepared", Limits(requests_per_min=limits.requests_per_min))
        for name, limits in subjects
        if limits.requests_per_min is not None
    ]


def _stored(subjects: Sequence[Subject]) -> list[Subject]:
    """Return what calls for stored responses and conversations count against; they name no model."""
    return [
        Subject(f"{name}{_STORED}", Limits(requests_per_min=limits.requests_per_min * _STORED_PER_REQUEST))
        for name, limits in subjects
        if limits.requests_per_min is not None and not name.startswith("model:")
    ]


def least_left(subjects: Sequence[Subject], uses: Sequence[Use]) -> list[Left]:
    """Return of each kind the limit with the least left."""
    left = []
    for kind in ("requests", "tokens"):
        found = [
            (limit - getattr(use, kind), limit)
            for (_, limits), use in zip(subjects, uses, strict=True)
            for limit_kind, limit in _limits(limits)
            if limit_kind == kind
        ]
        if found:
            free, limit = min(found)
            reset_ms = (limit - free) / limit * MINUTE_MS if limit else 0
            left.append(Left(kind, limit, max(0, math.floor(free)), reset_ms))
    return left


def rate_headers(left: Sequence[Left]) -> Headers:
    """Return the ``x-ratelimit-*`` headers that OpenAI's clients read."""
    return tuple(
        (f"x-ratelimit-{figure}-{kind}".encode(), value.encode())
        for kind, limit, remaining, reset_ms in left
        for figure, value in (("limit", str(limit)), ("remaining", str(remaining)), ("reset", _duration(reset_ms)))
    )


def _limits(limits: Limits) -> list[tuple[LimitKind, int]]:
    figures = (limits.requests_per_min, limits.tokens_per_min, limits.streams)
    return [(kind, limit) for kind, limit in zip(KINDS, figures, strict=True) if limit is not None]


def _duration(ms: float) -> str:
    """Render a duration as Go and OpenAI do: ``20ms``, ``1.5s``, ``2m10s``."""
    if ms < 1000:
        return f"{math.ceil(ms)}ms"
    minutes, seconds = divmod(ms / 1000, 60)
    return (f"{int(minutes)}m" if minutes else "") + f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def limited_input(subjects: Sequence[Subject], reply: Exceeded, tokens: int) -> RateLimited:
    """Make the error of an input that a limit refuses."""
    return _limited(subjects, reply, tokens, rate_headers(least_left(subjects, reply.uses)))


def _limited(subjects: Sequence[Subject], reply: Exceeded, tokens: int, headers: Headers) -> RateLimited:
    """Make the error of a request that a limit refuses."""
    subject, use = subjects[reply.subject], reply.uses[reply.subject]
    kind, _, which = subject.name.removesuffix(":prepared").removesuffix(_STORED).partition(":")
    unit = "calls per minute for what is stored" if subject.name.endswith(_STORED) else _UNITS[reply.kind]
    limit = dict(_limits(subject.limits))[reply.kind]
    whose = {"tenant": "your tenant", "key": "this API key", "user": "this user"}.get(kind, f"model {which!r}")
    needs = f", and this request needs about {tokens}" if reply.kind == "tokens" else ""
    limited = f"the limit of {limit} {unit} of {whose}"
    reached = f"{limited} is reached ({math.ceil(getattr(use, reply.kind))} used{needs})"
    if reply.retry_ms < 0:
        remedy = "lower max_tokens or shorten the prompt" if reply.kind == "tokens" else "ask the operator to raise it"
        return RateLimited(f"{limited} never allows this request{needs}; {remedy}", headers=headers, may_retry=False)
    if reply.kind == "streams":
        return RateLimited(f"{reached}; retry when one of them has ended", headers=headers)
    wait_s = reply.retry_ms / 1000
    return RateLimited(
        f"{reached}; retry after {wait_s:.1f} s",
        retry_after_s=max(1, math.ceil(wait_s)),
        headers=(*headers, (b"retry-after-ms", str(math.ceil(reply.retry_ms)).encode())),
    )
