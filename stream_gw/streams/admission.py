"""Checks a request against the limits of its tenant's plan, and tells the caller what is left of them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from stream_fabric.accounts.account import KINDS, MINUTE_MS, Admitted, Exceeded, LimitKind, Settlement, Subject, Use
from stream_fabric.accounts.ports import Accounts
from stream_fabric.accounts.records import Limits
from stream_fabric.errors import FabricUnavailable, RateLimited
from stream_fabric.limits import LIMITS_WAIT_S_MAX
from stream_fabric.ports import StreamLog
from stream_fabric.recovery.settlements import settle_overdue
from stream_fabric.stream.ids import StreamId, TenantId

_LOG_EVERY_S = 10.0
_log = logging.getLogger(__name__)

Headers = tuple[tuple[bytes, bytes], ...]

_UNITS: dict[LimitKind, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "streams": "running streams",
}


class Admission:
    """Admits requests to their tenants' accounts. ``spawn`` runs background work."""

    def __init__(
        self,
        accounts: Accounts,
        log: StreamLog,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_limited: Callable[[str, LimitKind], None],
        on_failed_open: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_limited`` is called with the kind of subject and of limit that refused a request; ``on_failed_open`` for
        each request that was admitted without its limits."""
        self._accounts = accounts
        self._log = log
        self._spawn = spawn
        self._on_limited = on_limited
        self._on_failed_open = on_failed_open
        self._log_at = 0.0

    async def admit(
        self, tenant: TenantId, stream: StreamId, subjects: Sequence[Subject], tokens: int, *, fail_open: bool = False
    ) -> Headers:
        """Reserve what the request will use about; return the headers with what is left. Raises RateLimited.

        ``fail_open``: while Redis does not answer for the account, admit without a reservation. Else that raises
        FabricUnavailable.
        """
        if fail_open:
            try:
                async with asyncio.timeout(LIMITS_WAIT_S_MAX):
                    reply = await self._accounts.admit(tenant, stream, subjects, tokens)
            except (FabricUnavailable, TimeoutError) as error:
                _log.warning(
                    "limits not checked, request admitted: tenant=%s stream=%s error=%s", tenant, stream, error
                )
                self._on_failed_open()
                return ()
        else:
            reply = await self._accounts.admit(tenant, stream, subjects, tokens)
        if reply.overdue:
            self._spawn(settle_overdue(self._accounts, self._log, tenant, reply.overdue))
        headers = rate_headers(subjects, reply.uses)
        if isinstance(reply, Admitted):
            return headers
        self._on_limited(subjects[reply.subject].name.partition(":")[0], reply.kind)
        raise _limited(subjects, reply, tokens, headers)

    def _report_failed_open(self, tenant: TenantId, error: Exception) -> None:
        """Count the request; log one of them every few seconds."""
        self._on_failed_open()
        now = asyncio.get_running_loop().time()
        if now >= self._log_at:
            self._log_at = now + _LOG_EVERY_S
            _log.warning("limits not checked, request admitted: tenant=%s error=%r", tenant, error)

    async def withdraw(self, tenant: TenantId, stream: StreamId) -> None:
        """Give a reservation back whose request was refused later; it counts as never sent."""
        await self._accounts.settle(tenant, [Settlement(stream, 0, 0)])

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


def rate_headers(subjects: Sequence[Subject], uses: Sequence[Use]) -> Headers:
    """Return the ``x-ratelimit-*`` headers that OpenAI's clients read: of each kind the limit with the least left."""
    headers: list[tuple[bytes, bytes]] = []
    for kind in ("requests", "tokens"):
        found = [
            (limit - getattr(use, kind), limit)
            for (_, limits), use in zip(subjects, uses, strict=True)
            for limit_kind, limit in _limits(limits)
            if limit_kind == kind
        ]
        if found:
            left, limit = min(found)
            reset_ms = (limit - left) / limit * MINUTE_MS if limit else 0
            headers += (
                (b"x-ratelimit-limit-" + kind.encode(), str(limit).encode()),
                (b"x-ratelimit-remaining-" + kind.encode(), str(max(0, math.floor(left))).encode()),
                (b"x-ratelimit-reset-" + kind.encode(), _duration(reset_ms).encode()),
            )
    return tuple(headers)


def _limits(limits: Limits) -> list[tuple[LimitKind, int]]:
    figures = (limits.requests_per_min, limits.tokens_per_min, limits.streams)
    return [(kind, limit) for kind, limit in zip(KINDS, figures, strict=True) if limit is not None]


def _duration(ms: float) -> str:
    """Render a duration as Go and OpenAI do: ``20ms``, ``1.5s``, ``2m10s``."""
    if ms < 1000:
        return f"{math.ceil(ms)}ms"
    minutes, seconds = divmod(ms / 1000, 60)
    return (f"{int(minutes)}m" if minutes else "") + f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def _limited(subjects: Sequence[Subject], reply: Exceeded, tokens: int, headers: Headers) -> RateLimited:
    """Make the error of a request that a limit refuses."""
    subject, use = subjects[reply.subject], reply.uses[reply.subject]
    kind, _, which = subject.name.partition(":")
    limit = dict(_limits(subject.limits))[reply.kind]
    whose = {"tenant": "your tenant", "key": "this API key", "user": "this user"}.get(kind, f"model {which!r}")
    needs = f", and this request needs about {tokens}" if reply.kind == "tokens" else ""
    limited = f"the limit of {limit} {_UNITS[reply.kind]} of {whose}"
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
