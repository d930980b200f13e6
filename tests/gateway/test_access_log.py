"""The access log: failures are logged, and a flood of them is not."""

from __future__ import annotations

import logging

import pytest

from stream_fabric.errors import BadRequest, RateLimited, StreamGwError, Unauthenticated
from stream_fabric.limits import FAILURES_LOGGED_PER_S
from stream_gw.observe.access import AccessLog
from tests.gateway.processes import Running
from tests.gateway.wire import Gate
from tests.support.events import SetClock


def refused(access: AccessLog, times: int, error: StreamGwError) -> None:
    for number in range(times):
        access.receive_refused(f"req_{number}", "/v1/models", None, error)


def test_a_flood_of_failures_takes_a_few_lines_a_second(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stream_gw.observe.access")
    clock = SetClock()
    access = AccessLog(0, clock)
    refused(access, 10_000, Unauthenticated("no"))
    assert len(caplog.records) == FAILURES_LOGGED_PER_S + 1
    assert "not logged" in caplog.records[-1].getMessage()
    caplog.clear()
    refused(access, FAILURES_LOGGED_PER_S, BadRequest("no"))
    assert len(caplog.records) == FAILURES_LOGGED_PER_S, "another error has lines of its own"
    caplog.clear()
    clock.at_us += 1_000_000
    refused(access, 1, Unauthenticated("no"))
    assert [record.getMessage() for record in caplog.records] == ["request"], "the next second has its own"


def test_a_moderate_rate_is_logged_whole(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stream_gw.observe.access")
    clock = SetClock()
    access = AccessLog(0, clock)
    for _ in range(5):
        refused(access, FAILURES_LOGGED_PER_S, RateLimited("no", retry_after_s=1))
        clock.at_us += 1_000_000
    assert len(caplog.records) == 5 * FAILURES_LOGGED_PER_S


async def test_input_that_is_no_http_leaves_no_line(platform: Running) -> None:
    with platform.gateway() as process:
        gate = Gate(process.facts["url"], process.pid, platform.key)
        for _ in range(20):
            async with gate.connection() as exchange:
                await exchange.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no TLS here\r\n\r\n")
                assert b"400 Bad Request" in await exchange.closed()
        assert "Invalid HTTP" not in process.log
