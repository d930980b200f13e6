"""A study: what is asked of it in words, and what it tells of a fleet."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from inference.control.policy.scale_policy import ScalePolicy
from inference.simulate import study
from inference.simulate.elastic import stepped
from inference.simulate.history import history
from inference.simulate.output import plot, report
from inference.simulate.output.page import page
from inference.simulate.study import Objective, Outcome, Study
from tests.client.browser import chromium
from tests.simulate.traffic import chats, slow

STEP = study.parse_step("4x@40%-60%", 300.0)
STUDY = Study(
    stepped(chats(300, 3.0), STEP, 0),
    slow(),
    ScalePolicy(replicas_max=12, cold_start_s=40.0, low_s=60.0),
    Objective(2.0, 1e-3, 0.1),
    kills_s=(60.0, 130.0),
)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [study.run(STUDY, name) for name in ("ours", "fixed:3")]


# --- what is asked -----------------------------------------------------------------------------------------------


def test_moments_are_seconds_minutes_hours_or_shares() -> None:
    assert [study.parse_moment(text, 7200.0) for text in ("90", "90s", "1.5m", "1h", "25%", "100%")] == [
        90.0, 90.0, 90.0, 3600.0, 1800.0, 7200.0
    ]  # fmt: skip
    for wrong in ("", "soon", "-5", "3d", "5%%"):
        with pytest.raises(ValueError, match="is no moment"):
            study.parse_moment(wrong, 7200.0)
    with pytest.raises(ValueError, match="after the last request"):
        study.parse_moment("3h", 7200.0)


def test_a_step_has_a_size_a_beginning_and_an_end() -> None:
    step = study.parse_step("5x@50%-75%", 400.0)
    assert (step.times, step.at_s, step.for_s) == (5.0, 200.0, 100.0)
    for wrong in ("5x", "5@1-2", "x@1-2", "5x@75%-50%", "1x@10-20", "5x@10-10", "5x@10-9h"):
        with pytest.raises(ValueError):
            study.parse_step(wrong, 400.0)


def test_policies_are_told_apart_and_each_is_run_once() -> None:
    assert study.parse_policies(["ours,hpa", "fixed:3", "hpa"]) == ["ours", "hpa", "fixed:3"]
    for wrong in ("keda", "fixed", "fixed:0", "fixed:x", "", "ours,"):
        with pytest.raises(ValueError, match="there are ours, ours:known, hpa, waiting, oracle, fixed:N"):
            study.parse_policies([wrong])


# --- what is told ------------------------------------------------------------------------------------------------


def test_every_request_is_counted_once_and_the_bins_add_up(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        ends = outcome.done + outcome.refused + outcome.expired + outcome.impossible + outcome.lost
        assert ends == outcome.requests == len(STUDY.requests)
        assert sum(one.arrived for one in outcome.bins) == outcome.requests
        assert sum(one.unserved for one in outcome.bins) == outcome.requests - outcome.done
        assert sum(one.met for one in outcome.bins) == pytest.approx(outcome.slo * outcome.requests)
        width_s = outcome.bins[1].at_s
        assert len(outcome.bins) <= study.BINS_MAX + 120 / width_s
        hours = sum(one.ready + one.resting + one.warm + one.coming for one in outcome.bins) * width_s / 3600
        assert hours == pytest.approx(outcome.replica_h, rel=0.03)
        assert outcome.gpu_h == 2 * outcome.replica_h
        assert outcome.dollars == pytest.approx(5.0 * outcome.replica_h)
        assert len(outcome.deaths) == 2 and outcome.rescued > 0


def test_ours_serves_the_step_that_a_fixed_fleet_does_not(outcomes: list[Outcome]) -> None:
    ours, fixed = outcomes
    assert ours.slo > fixed.slo + 0.1
    assert fixed.replicas_most == 3 < ours.replicas_most
    assert ours.reasons and not fixed.reasons
    assert max(one.needed for one in ours.bins) > 3


def test_what_other_days_taught_is_there_in_time() -> None:
    step = study.parse_step("4x@40%-60%", 600.0)
    base = chats(600, 3.0)
    policy = ScalePolicy(replicas_max=20, cold_start_s=60.0, low_s=60.0)
    asked = Study(stepped(base, step, 0), slow(), policy, Objective(2.0, 1e-3, 0.1), known=history(base, step))
    new, known = (study.run(asked, name) for name in ("ours", "ours:known"))
    assert 1 - known.slo < (1 - new.slo) / 4, (known.slo, new.slo)


def test_where_too_much_is_ahead_ours_refuses_and_the_others_are_served_in_time() -> None:
    """Nine times the traffic that a fleet of one can serve, which may not grow."""
    served = {}
    for mark_s in (0.0, 2.0):
        policy = ScalePolicy(replicas_max=1, cold_start_s=60.0, shed_standard_s=mark_s, ttft_objective_s=4.0)
        asked = Study(chats(120, 9.0), slow(), policy, Objective(4.0, 1e-3, 1.0), begin=1)
        served[mark_s] = study.run(asked, "ours")
    assert served[2.0].refused > 100 and served[2.0].slo > 2 * served[0.0].slo, served
    assert served[2.0].expired < served[0.0].expired / 4


def test_quantiles_of_what_was_not_served_are_infinite() -> None:
    flood = replace(STUDY, requests=chats(80, 20.0), kills_s=())
    outcome = study.run(flood, "fixed:1")
    assert outcome.expired > 0
    assert math.isinf(outcome.ttft_p99_s)
    assert report.summary([outcome])[1][report.summary([outcome])[0].index("TTFT p99")] == "never"
    (row,) = csv.DictReader(io.StringIO(report.summary_csv([outcome])))
    assert row["ttft_p99_s"] == ""
    assert report.outcome_json(outcome)["ttft_p99_s"] is None
    assert "line at the top: not served" in page("t", (), flood, None, [outcome])


def test_a_seed_replays_a_study_and_another_is_another(outcomes: list[Outcome]) -> None:
    again = [study.run(STUDY, name) for name in ("ours", "fixed:3")]
    assert report.timeline_csv(again) == report.timeline_csv(outcomes)
    assert page("t", ("f",), STUDY, STEP, again) == page("t", ("f",), STUDY, STEP, outcomes)
    other = study.run(replace(STUDY, seed=1), "fixed:3")
    assert report.timeline_csv([other]) != report.timeline_csv(outcomes[1:])


def test_the_tables_have_a_row_for_each_policy(outcomes: list[Outcome]) -> None:
    rows = list(csv.DictReader(io.StringIO(report.summary_csv(outcomes))))
    assert [(row["policy"], int(row["deaths"])) for row in rows] == [("ours", 2), ("fixed:3", 2)]
    assert float(rows[0]["slo"]) == pytest.approx(outcomes[0].slo, abs=1e-5)
    times = list(csv.DictReader(io.StringIO(report.timeline_csv(outcomes))))
    assert len(times) == sum(len(outcome.bins) for outcome in outcomes)
    lines = report.table(report.summary(outcomes)).splitlines()
    assert [line.split()[0] for line in lines] == ["policy", "-" * 7, "ours", "fixed:3"]
    assert max(map(len, lines)) <= 140


# --- the page ----------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


NASTY = "<script>alert(1)</script>\"'&"


def test_the_page_fetches_nothing_runs_nothing_and_escapes_what_it_is_given(outcomes: list[Outcome]) -> None:
    nasty = replace(outcomes[0], policy=NASTY, reasons=[(1.0, NASTY)])
    text = page(NASTY, (NASTY,), STUDY, STEP, [nasty, outcomes[1]])
    found = Tags()
    found.feed(text)
    assert not {"script", "link", "img", "iframe", "object", "style2"} & set(found.tags)
    assert not {"src", "href", "onload", "onclick", "xlink:href"} & {name for name, _ in found.attributes}
    assert "alert(1)" in text and "<script" not in text
    assert "://" not in text and "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text
    assert found.tags.count("svg") == 4 + 2 * 4


@pytest.mark.parametrize(("end_s", "times"), [(120, ["0:00:00", "0:00:30", "0:01:00"]), (600, ["0:00", "0:02"])])
def test_times_of_one_axis_have_one_form(end_s: float, times: list[str]) -> None:
    drawn = plot.Plot("requests", str, end_s / 10, end_s, 1.0, lines=[plot.Line("began", "a", [1.0] * 10)]).svg()
    assert re.findall(r">(\d:[\d:]+)</text>", drawn)[: len(times)] == times


def test_every_plot_is_well_formed_and_inside_its_box(outcomes: list[Outcome]) -> None:
    text = page("t", (), STUDY, STEP, outcomes)
    for part in text.split("<svg")[1:]:
        svg = ElementTree.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>")
        for rect in svg.iter("rect"):
            x, width = float(rect.attrib["x"]), float(rect.attrib["width"])
            assert x >= 0 and x + width <= plot.WIDTH
        assert svg.findall(".//path[@class='grid']") and svg.findall("text")
    assert text.count('class="death"') == 2 * 4 * 2, "two deaths in each of four plots of two policies"


@pytest.mark.parametrize("top", [0.7, 1.0, 3.0, 9.9, 10.0, 47.0, 100.0, 5300.0])
def test_an_axis_has_a_few_round_values(top: float) -> None:
    values = plot.round_levels(top)
    assert 3 <= len(values) <= 6
    assert values[0] == 0 and values[-1] <= top * 1.0001
    assert any(math.log10(values[1] / k) == pytest.approx(round(math.log10(values[1] / k))) for k in (1, 2, 5))


async def test_a_browser_shows_it_without_asking_anybody(outcomes: list[Outcome]) -> None:
    text = page("t", ("f",), STUDY, STEP, outcomes)
    seen: list[str] = []
    async with chromium() as browser:
        colours = set()
        for scheme, width in (("light", 1280), ("dark", 1280), ("light", 400)):
            tab = await browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
            tab.on("console", lambda message: seen.append(message.text))
            tab.on("pageerror", lambda error: seen.append(str(error)))
            tab.on("request", lambda request: seen.append(request.url))
            await tab.set_content(text)
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width
            assert await tab.locator("figure").count() == 4 + 2 * 4
            colours.add(await tab.evaluate("getComputedStyle(document.body).backgroundColor"))
            areas = "[...document.querySelectorAll('.area')].map(p => p.getBBox().height)"
            assert max(await tab.evaluate(areas)) > 20
    assert len(colours) == 2, "light and dark"
    assert not seen
