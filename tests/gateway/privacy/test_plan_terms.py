"""Terms of privacy in a keys file, and what follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from stream_fabric.accounts.records import PlanRecord, TenantRecord, contradiction, row_days
from stream_fabric.stream.ids import TenantId
from stream_gw.auth import KeyStore, read_keys_file

ACME = TenantId("acme")


def test_a_plan_that_keeps_nothing_stores_no_content(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[[tenant]]\nid = "a"\nplan = "p"\ntrace_content = true\n[plan.p]\nretention_s = 0\n')
    with pytest.raises(ValueError, match=r"keys\.toml.*retention_s is 0.*trace_content_bytes"):
        read_keys_file(path)


def test_a_published_record_that_contradicts_itself_stores_no_content() -> None:
    plan = PlanRecord("p", retention_s=0, trace_content_bytes=100)
    assert KeyStore([plan, TenantRecord("acme", "p")]).content_bytes(ACME) == 0


@pytest.mark.parametrize(("days", "told"), [(None, 0), (0, -1), (1, 1), (30, 30)])
def test_days_of_a_plan_in_events(days: int | None, told: int) -> None:
    assert row_days(PlanRecord("p", trace_retention_days=days)) == told


def test_a_plan_that_keeps_nothing_stores_no_responses() -> None:
    told = contradiction(PlanRecord("p", retention_s=0, response_days=1))
    assert told is not None and "set response_days to 0" in told
    assert contradiction(PlanRecord("p", retention_s=0, response_days=0)) is None
    assert contradiction(PlanRecord("p", response_days=1)) is None
