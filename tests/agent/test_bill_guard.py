"""The safety switch: a replica serves without bills only for as long as Redis can reconstruct them."""

from __future__ import annotations

import logging

import pytest

from inference.agent.observe.bill_guard import RECONSTRUCT_S, BillGuard
from stream_fabric.limits import USAGE_TTL_S


class Room:
    def __init__(self) -> None:
        self.full = False

    def __call__(self) -> bool:
        return self.full


def test_reconstruct_serves_while_redis_holds_the_account() -> None:
    room = Room()
    guard = BillGuard("reconstruct", room)
    assert guard.refusal(0.0) == "" and not guard.at_risk
    room.full = True
    assert guard.refusal(10.0) == "" and guard.at_risk
    assert guard.refusal(10.0 + RECONSTRUCT_S - 1) == ""
    assert "bills" in guard.refusal(10.0 + RECONSTRUCT_S)
    assert RECONSTRUCT_S < USAGE_TTL_S
    room.full = False
    assert guard.refusal(20.0 + RECONSTRUCT_S) == ""
    room.full = True
    assert guard.refusal(30.0 + RECONSTRUCT_S) == "", "a new outage has its own time"


def test_never_refuses_at_once_and_takes_requests_again(caplog: pytest.LogCaptureFixture) -> None:
    room = Room()
    guard = BillGuard("never", room)
    room.full = True
    with caplog.at_level(logging.WARNING):
        assert guard.refusal(1.0) and guard.refusal(2.0)
        assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"], "said once, not at each renewal"
        room.full = False
        assert guard.refusal(3.0) == ""
    assert not guard.at_risk
