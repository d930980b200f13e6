"""Texts of refusals by a budget: what the request needs, and what its caller can do about it."""

from __future__ import annotations

import pytest

from stream_fabric.accounts.account import Spent
from stream_fabric.accounts.budgets import BudgetUse, Claim, Spend
from stream_fabric.errors import BudgetExceeded
from stream_fabric.events import Prices
from stream_gw.streams.budgets.report import over_budget

NOW_MS = 1_796_000_000_000  # 2026-11-30, 00:53:20 UTC
MONTH, SESSION = "tenant_month:2026-11", "session:s"


def refusal(name: str, use: BudgetUse, prompt: int = 100) -> BudgetExceeded:
    """Refusal of a request of ``prompt`` and 16 tokens by a budget of 1,000 tokens."""
    spend = Spend((Claim(name, 1000, None),), prompt, 500)
    return over_budget(spend, Spent(0, "tokens", (), budgets=(use,)), NOW_MS, ())


@pytest.mark.parametrize("name", [MONTH, SESSION, "request"])
def test_a_request_that_alone_exceeds_a_budget_never_fits(name: str) -> None:
    error = refusal(name, BudgetUse(tokens=5), prompt=1000)
    assert "never allows this request, which needs about 1016 tokens; shorten the prompt" in error.message
    assert (error.retriable, error.retry_after_s) == (False, None), "neither a wait nor another session helps"
    assert (b"x-should-retry", b"false") in error.headers


@pytest.mark.parametrize("name", [MONTH, SESSION])
def test_what_running_streams_reserve_may_be_free_soon(name: str) -> None:
    error = refusal(name, BudgetUse(tokens=700, reserved_tokens=250))
    assert error.message.endswith(
        "no room for this request, which needs about 116 tokens (950 tokens used or reserved); retry when a stream "
        "that reserves a part has ended"
    )
    assert error.retriable and not error.headers
    assert error.retry_after_s in (None, 1)


def test_a_used_month_tells_its_end_and_a_used_session_has_none() -> None:
    use = BudgetUse(tokens=950, reserved_tokens=20)
    month, session = refusal(MONTH, use), refusal(SESSION, use)
    assert month.message.endswith("(970 tokens used or reserved); it resets at 2026-12-01T00:00:00Z")
    assert month.retriable and month.retry_after_s == 83_200
    assert session.message.endswith("(970 tokens used or reserved); begin another session")
    assert not session.retriable


def test_money_is_exact_at_any_size() -> None:
    spend = Spend((Claim(MONTH, None, 12_345_678_901_234_567),), 0, 16, Prices(0, 0, 1_000_000))
    use = BudgetUse(micro=12_345_678_901_234_561)
    error = over_budget(spend, Spent(0, "micro", (), budgets=(use,)), NOW_MS, ())
    assert "budget of 12345678901.234567 in money" in error.message
    assert "needs about 0.000016 in money (12345678901.234561 in money used or reserved)" in error.message
