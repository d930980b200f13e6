"""Texts about budgets for callers: the warning, the refusal, and the page of limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from stream_fabric.accounts.account import Spent
from stream_fabric.accounts.budgets import BudgetUse, Claim, Spend, Unit, used_percent
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
    reached = f"the {claim.kind} budget of {_limit_text(claim, reply.unit)} of {_WHOSE[claim.kind]}"
    used = _amount_text(_used(use, reply.unit), reply.unit)
    resets = resets_ms(claim.name)
    if not resets:
        remedy = "begin another session" if claim.kind == "session" else "shorten the prompt"
        return BudgetExceeded(
            f"{reached} has no room for this request ({used} used); {remedy}", headers=headers, may_retry=False
        )
    wait_s = max(1, math.ceil((resets - now_ms) / 1000))
    if wait_s > _CLIENT_WAIT_S_MAX:
        headers = (*headers, (b"x-should-retry", b"false"))
    return BudgetExceeded(
        f"{reached} has no room for this request ({used} used or reserved); it resets at {_iso(resets)}",
        retry_after_s=wait_s,
        headers=headers,
    )


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
    return f"{amount} tokens" if unit == "tokens" else f"{amount / _MILLION:.6f}".rstrip("0").rstrip(".") + " in money"


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
