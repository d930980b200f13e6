"""Arrivals, report and plot of the surge benchmark, without a control plane."""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec
import pytest

from bench.surge import Plan
from bench.surge_plot import draw
from bench.surge_report import Pod, Run, Second, Try, faults_of, kind_of, phases, report

PLAN = Plan(rate=4, factor=5, ramp_s=3, before_s=100, step_s=200, after_s=100, seed=1)
FACTS = {
    "began": "today", "cores": 2, "rate": 4.0, "factor": 5.0, "ramp": 3.0, "slots": 16, "objective": 2.0, "seed": 1,
    "before": 100.0, "step": 200.0, "after": 100.0, "retries": 2, "late_s": [0.001, 0.002],
}  # fmt: skip


def made_up() -> Run:
    """The step is seen after 4 s; 9 new replicas are ready after 60 to 68 s. Every second client is refused until then,
    and served at its first retry."""
    tries = []
    for client, at_s in enumerate(PLAN.moments()):
        if 0 <= at_s < 60 and client % 2:
            tries.append(Try(client, 0, at_s, "refused", at_s + 0.005, 503, int(61 - at_s)))
            at_s += int(61 - at_s)
            tries.append(Try(client, 1, at_s, "token", at_s + 0.3, 200))
        else:
            waits = [(at_s + 1, ": queued 1 of 2")] if client % 3 == 0 else []
            tries.append(Try(client, 0, at_s, "token", at_s + (1.5 if waits else 0.2), 200, queued=waits))
    seconds = [
        Second(
            at_s=float(at), wanted=12 if at >= 4 else 3, planned_s=3.5 if at >= 4 else -90, reason="work",
            replicas=12 if at >= 6 else 3, ready=min(3 + max(at - 59, 0), 12), warm=0, registered=3,
            used_s=10.0 + at, stolen_s=0, own_s=1.0 * at,
        )
        for at in range(-100, 300)
    ]  # fmt: skip
    return Run(FACTS, tries, seconds, [Pod("one", 5.0, 60.0, 62.0), Pod("two", 5.0, None, None)])


def test_arrivals_are_seeded_and_follow_the_step() -> None:
    moments = list(PLAN.moments())
    assert moments == list(PLAN.moments()) == sorted(moments)
    rates = [sum(low <= at_s < low + 100 for at_s in moments) / 100 for low in (-100, 0, 100, 200)]
    assert rates == pytest.approx([4, 20, 20, 4], rel=0.25)


@pytest.mark.parametrize(
    ("one", "kind"),
    [
        (Try(1, 0, 5.0, "token", 5.5, 200), "in time"),
        (Try(1, 1, 5.0, "token", 5.5, 200), "again"),
        (Try(1, 0, 5.0, "token", 6.5, 200, queued=[(6.0, ": queued 1 of 1")]), "queued"),
        (Try(1, 0, 5.0, "token", 7.5, 200, queued=[(6.0, ": queued 1 of 1")]), "late"),
        (Try(1, 0, 5.0, "refused", 5.1, 503, 30), "refused"),
        (Try(1, 2, 5.0, "refused", 5.1, 503, 30), "refused again"),
        (Try(1, 0, 5.0, "failed", 5.1, 500), "failed"),
    ],
)
def test_each_client_is_told_one_thing(one: Try, kind: str) -> None:
    assert kind_of(one, 2.0) == kind


def test_phases_follow_the_replicas() -> None:
    run = made_up()
    assert (run.wanted_s, run.first_s, run.wanted, run.all_s) == (3.5, 60, 12, 68)
    assert [(one.from_s, one.to_s) for one in phases(run)] == [(-100, 0), (0, 60), (60, 68), (68, 200), (200, 300)]
    told = report(run)
    assert "more replicas were wanted 3.5 s after" in told and "57 to 57 s after it was bound" in told
    assert faults_of(run) == []


def test_a_run_that_is_read_again_is_reported_alike() -> None:
    run = made_up()
    again = msgspec.json.decode(msgspec.json.encode(run), type=Run)
    assert report(again) == report(run)
    picture = ElementTree.fromstring(draw(again))
    assert draw(again) == draw(run) and picture.tag.endswith("svg")


def test_what_is_no_measurement_is_named() -> None:
    run = made_up()
    run.tries += [Try(9000, 0, 7.0, "failed", 7.1, 500, said="broken"), Try(9001, 0, 8.0, "refused", 8.1, 503, 0)]
    for one in run.seconds:
        one.own_s *= 2
    assert [fault.partition(":")[0] for fault in faults_of(run)] == [
        "request of 7.0 s",
        "the refusal at 8.1 s named no Retry-After",
        "the run took nearly all of the machine in 100% of the seconds",
    ]
