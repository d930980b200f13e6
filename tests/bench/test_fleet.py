"""The benchmarks of a large fleet and of a long load: they measure, and they find what is wrong."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench import fleet
from bench.soak import Churn, Minute, faults_of
from tests.gateway.processes import need_redis


def _run(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> dict[str, float]:
    need_redis()
    cores, out = os.sched_getaffinity(0), folder / "fleet.json"
    common = ["--replicas", "60", "--gateways", "2", "--seconds", "3", "--blocks", "200", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench.fleet", *common, *flags])
    monkeypatch.setattr(fleet.gc, "disable", lambda: None)  # this process has more to do
    try:
        fleet.main()
    finally:
        os.sched_setaffinity(0, cores)
    figures: dict[str, float] = json.loads(out.read_text())["figures"]
    return figures


def test_a_gateway_reads_what_changed_and_not_the_fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All leases are 40 kB and all summaries 50 kB."""
    idle = _run(monkeypatch, tmp_path, "--requests-per-s", "0")
    assert 0 < idle["gateway MB"] < 0.03, "loads move a little"
    busy = _run(monkeypatch, tmp_path, "--requests-per-s", "2", "--pools", "2", "--cells", "3")
    assert idle["gateway MB"] < busy["gateway MB"] < 0.06
    assert min(busy.values()) > 0


QUIET = {"gateway0": 50.0, "agent0": 60.0, "redis": 20.0}


def _minutes(**last: float) -> list[Minute]:
    return [Minute(QUIET, {}, 1000, 20.0, 10) for _ in range(9)] + [Minute({**QUIET, **last}, {}, 1000, 20.0, 10)]


def _report(late_ms: float = 100.0, **failed: object) -> dict[str, object]:
    """Ten minutes with ten requests each, of which the last minutes' take ``late_ms`` to their first token."""
    calm = {"cut_at": 0, "cancel_at": 0, "is_slow": False}
    requests = [
        {"ttft_s": late_ms / 1000 if second >= 480 else 0.1, "began_s": float(second), "disturbance": calm,
         "status": "completed", "is_exact": None, "stream": "resp_1", "error": "", **failed}
        for second in range(0, 600, 6)
    ]  # fmt: skip
    return {"requests": requests, "bins": [{"at_s": 60.0 * minute, "gap_p99_s": 0.02} for minute in range(10)]}


def test_a_soak_without_a_fault_has_none() -> None:
    faults, compared = faults_of(_minutes(gateway0=52.0, redis=90.0), Churn(), set(), _report(), 60.0)
    assert faults == [] and compared["TTFT p99"] == (100.0, 100.0)


@pytest.mark.parametrize(
    ("fault", "minutes", "churn", "left", "report"),
    [
        ("agent0 grew from 60.0 to 66.0 MiB", _minutes(agent0=66.0), Churn(), set(), _report()),
        ("key left: sg:x", _minutes(), Churn(), {"sg:x"}, _report()),
        ("TTFT p99 rose from 100.0 to 120.0 ms", _minutes(), Churn(), set(), _report(late_ms=120.0)),
        ("resp_1 of second 0: no answer", _minutes(), Churn(), set(), _report(status="failed", error="no answer")),
        ("resp_1 of second 0: not exact", _minutes(), Churn(), set(), _report(is_exact=False)),
        ("lost", _minutes(), Churn(faults=["lost"]), set(), _report()),
    ],
)
def test_a_soak_names_each_fault(
    fault: str, minutes: list[Minute], churn: Churn, left: set[str], report: dict[str, object]
) -> None:
    assert fault in faults_of(minutes, churn, left, report, 60.0)[0]
