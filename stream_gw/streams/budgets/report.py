"""Texts about budgets for callers: the warning, the refusal, and the page of limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from stream_fabric.accounts.account import Spent
from stream_fabric.accounts.budgets import BudgetUse, Claim, Spend, Unit, has_room, least_spend, used_percent
from stream_fabric.accounts.periods import resets_ms
from stream_fabric.errors import BudgetExceeded

Headers = tuple[tuple[bytes, bytes], ...]

_WHOSE = {
    "request": "each request",
    "session": "this session",
    "user_day": "this user in this day (UTC)",
    "tenant_hour": "your tenant in this hour",
    "tenant_month": "your tenant in this month (UTC)",
}
_CLIENT_WAIT_S_MAX = 60
"""Longest ``Retry-After`` that OpenAI's clients follow; with a longer one they would retry at once."""
_MILLION = 1_000_000


def warning_headers(claims: Sequence[Claim], uses: Sequence[BudgetUse]) -> Headers:
    """Return the header that names each budget that has warned, with its use in percent."""
    warned = [
        f"{claim.kind} {used_percent(claim, use)}%" for claim, use in zip(claims, uses, strict=True) if use.warned
    ]
    return ((b"x-budget-warning", ", ".join(warned).encode()),) if warned else ()


def over_budget(spend: Spend, reply: Spent, now_ms: int, headers: Headers) -> BudgetExceeded:
    """Make the error of a request that a budget refuses. ``now_ms``: Unix time."""
    claim, use = spend.claims[reply.claim], reply.budgets[reply.claim]
    budget = f"the {claim.kind} budget of {_limit_text(claim, reply.unit)} of {_WHOSE[claim.kind]}"
    needs = f"which needs about {_amount_text(least_spend(spend, reply.unit), reply.unit)}"
    if not has_room(claim, BudgetUse(), spend):
        told = (
            f"{budget} never allows this request, {needs}; shorten the prompt or ask the operator to raise the budget"
        )
        return BudgetExceeded(told, headers=headers, may_retry=False)
    used = _amount_text(_used(use, reply.unit), reply.unit)
    reached = f"{budget} has no room for this request, {needs} ({used} used or reserved)"
    if has_room(claim, use._replace(reserved_tokens=0, reserved_micro=0), spend):
        return BudgetExceeded(f"{reached}; retry when a stream that reserves a part has ended", headers=headers)
    resets = resets_ms(claim.name)
    if not resets:
        return BudgetExceeded(f"{reached}; begin another session", headers=headers, may_retry=False)
    wait_s = max(1, math.ceil((resets - now_ms) / 1000))
    if wait_s > _CLIENT_WAIT_S_MAX:
        headers = (*headers, (b"x-should-retry", b"false"))
    return BudgetExceeded(f"{reached}; it resets at {_iso(resets)}", retry_after_s=wait_s, headers=headers)


def describe_budgets(claims: Sequence[Claim], uses: dict[str, BudgetUse]) -> list[dict[str, Any]]:
    """Describe budgets and what is used of them, for ``GET /v1/limits``."""
    described = []
    for claim in claims:
        use, resets = uses.get(claim.name, BudgetUse()), resets_ms(claim.name)
        entry: dict[str, Any] = {"budget": claim.kind}
        if claim.tokens is not None:
            entry["tokens"] = _entry(claim.tokens, _used(use, "tokens"))
        if claim.micro is not None:
            entry["micro"] = _entry(claim.micro, _used(use, "micro"))
        if resets:
            entry["resets_at"] = _iso(resets)
        described.append(entry)
    return described


def _entry(limit: int, used: int) -> dict[str, int]:
    return {"limit": limit, "used": used, "remaining": max(0, limit - used)}


def _used(use: BudgetUse, unit: Unit) -> int:
    """Return what is used or reserved."""
    return use.tokens + use.reserved_tokens if unit == "tokens" else use.micro + use.reserved_micro


def _limit_text(claim: Claim, unit: Unit) -> str:
    limit = claim.tokens if unit == "tokens" else claim.micro
    return _amount_text(limit or 0, unit)


def _amount_text(amount: int, unit: Unit) -> str:
    if unit == "tokens":
        return f"{amount} tokens"
    whole, micro = divmod(amount, _MILLION)
    return f"{whole}.{micro:06d}".rstrip("0").rstrip(".") + " in money"


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
