"""The budgets that a request counts against."""

from __future__ import annotations

import hashlib

from stream_fabric.accounts.budgets import CHUNK_MIN, REQUEST, Claim, Spend, reserved_prompt
from stream_fabric.accounts.periods import counter_name, expires_ms
from stream_fabric.accounts.records import Budget, Budgets
from stream_fabric.events import Prices
from stream_fabric.pool.records import Work
from stream_fabric.stream.ids import TenantId


def claims_of(budgets: Budgets, user: str | None, session: str, now_ms: int) -> tuple[Claim, ...]:
    """Return what a request claims now. ``session``: a hash of the session; empty: it has none.

    A request that names no user has no user's budget, and one without a session no session's.
    """
    claims: list[Claim] = []

    def add(name: str, budget: Budget) -> None:
        claims.append(Claim(name, budget.tokens, budget.micro, expires_ms(name)))

    if budgets.request.any:
        add(REQUEST, budgets.request)
    if budgets.session.any and session:
        add(f"session:{session}", budgets.session)
    if budgets.user_day.any and user is not None:
        add(counter_name("user_day", now_ms, user_key(user)), budgets.user_day)
    if budgets.tenant_hour.any:
        add(counter_name("tenant_hour", now_ms), budgets.tenant_hour)
    if budgets.tenant_month.any:
        add(counter_name("tenant_month", now_ms), budgets.tenant_month)
    return tuple(claims)


def user_key(user: str) -> str:
    """Return the hash of a user, as in the name of its counter."""
    return hashlib.sha256(user.encode()).hexdigest()[:16]


def session_key(tenant: TenantId, session: str | None) -> str:
    """Return a hash of tenant and session; empty: there is no session."""
    if session is None:
        return ""
    return hashlib.sha256(f"{tenant}\0{session}".encode()).hexdigest()[:24]


def spend_of(work: Work, claims: tuple[Claim, ...]) -> Spend | None:
    """Return what the request asks of its budgets; None: it has none.

    Its first grant is a chunk, so that a long answer does not reserve what others could use meanwhile.
    """
    if not claims:
        return None
    output = min(work.output_limit, max(CHUNK_MIN, work.output_tokens))
    return Spend(claims, reserved_prompt(work.prompt_tokens), output, work.prices or Prices())
