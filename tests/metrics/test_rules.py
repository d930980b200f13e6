"""The committed rules are the made ones; Prometheus takes them; each alert fires when it should, and only then."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from dashboards import boards, rules
from dashboards.build import Sql, of_install
from dashboards.objectives import OBJECTIVE, OBJECTIVES, WINDOWS, error_ratio
from stream_fabric.process.metric_names import ITL, METRICS, TTFT
from tests.metrics.conftest import VERSIONS, of_version

ROOT = Path(__file__).parents[2]
OURS = {name for metric in METRICS.values() for name in metric.series}
RECORDED = {OBJECTIVE, *(error_ratio(window) for window in WINDOWS)}
WORDS = {
    "sum", "max", "min", "avg", "count", "by", "rate", "increase", "or", "and", "unless", "offset", "without",
    "histogram_quantile", "avg_over_time", "max_over_time", "min_over_time", "le", "on", "time",
}  # fmt: skip


def names_in(expr: str) -> set[str]:
    """Words of a PromQL expression that may be metrics: those outside labels, ranges and strings."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|(?:by|on) \([^)]*\)", " ", expr)
    words = re.findall(r"[a-z_:][a-z0-9_:]*", re.sub(r"\b\d+[smhd]\b", " ", bare))
    return {word for word in words if word not in WORDS}


def expressions() -> list[tuple[str, str]]:
    asked = [
        (f"{board.title}: {panel.title}", query.expr)
        for board in boards.BOARDS
        for panel in board.panels
        if not isinstance(panel.queries, Sql)
        for query in panel.queries
    ]
    asked += [(alert.name, alert.expr) for alert in rules.ALERTS]
    return asked + [(objective.slo, objective.bad_in("5m")) for objective in OBJECTIVES]


@pytest.mark.parametrize(("where", "expr"), expressions())
def test_every_name_in_a_query_is_in_the_list(where: str, expr: str) -> None:
    names = names_in(expr)
    assert names
    assert names <= OURS | RECORDED, names - OURS - RECORDED


def wrong_labels(expr: str) -> set[str]:
    """Labels of a PromQL expression that its metrics do not have: in a selector, or in a by or on clause."""
    having = {name: {*metric.labels, "le"} for metric in METRICS.values() for name in metric.series}
    having |= {name: {"pool", "slo", "le"} for name in RECORDED}
    of_targets = {"job", "instance", "namespace"}
    selected = [
        f"{name}.{label}"
        for name, selector in re.findall(r"([a-z_:][a-z0-9_:]*)\{([^}]*)\}", expr)
        for label in re.findall(r'([a-z_]+)(?:=~|!~|!=|=)"', selector)
        if label not in having[name] | of_targets
    ]
    known = of_targets.union(*(having[name] for name in names_in(expr)))
    clauses = re.findall(r"\b(?:by|on|without|ignoring) \(([^)]*)\)", expr)
    grouped = {label.strip() for clause in clauses for label in clause.split(",")}
    return {*selected, *(grouped - known)}


@pytest.mark.parametrize(("where", "expr"), expressions())
def test_every_label_in_a_query_is_one_of_its_metrics(where: str, expr: str) -> None:
    assert not wrong_labels(expr)


def test_a_wrong_label_would_be_found() -> None:
    expr = 'sum by (pool, kind) (rate(reads_total{pol="p",fault!="none"}[5m])) / on (tenant) slo_objective{slo="ttft"}'
    assert wrong_labels(expr) == {"reads_total.pol", "kind", "tenant"}


def test_a_wrong_name_would_be_found() -> None:
    assert names_in('sum by (pool) (rate(reads_totals{pool="p"}[5m] offset 1h)) > 14.4 * 0.01') == {"reads_totals"}


@pytest.mark.parametrize(("folder", "made"), [(rules.FOLDER, rules.files()), (boards.FOLDER, boards.files())])
def test_what_is_committed_is_what_the_code_makes(folder: Path, made: dict[str, str]) -> None:
    assert {path.name: path.read_text() for path in folder.iterdir()} == made, "run: python -m dashboards"


def test_every_alert_has_its_section_in_the_runbook() -> None:
    titles = re.findall(r"^## (.*)$", (ROOT / rules.RUNBOOK).read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert {alert.anchor for alert in rules.ALERTS} == {anchor for anchor in anchors if anchor.startswith("alert-")}


@pytest.mark.parametrize("alert", rules.ALERTS, ids=lambda alert: alert.name)
def test_a_summary_shows_no_figure_with_all_its_digits(alert: rules.Alert) -> None:
    figures = re.findall(r"\{\{([^}]*\$value[^}]*)\}\}", alert.summary)
    assert all("|" in figure for figure in figures), "a rate or an increase has sixteen digits"


def test_the_runbook_names_boards_that_exist() -> None:
    named = set(re.findall(r'\bboard "([^"]+)"', " ".join((ROOT / rules.RUNBOOK).read_text().split())))
    assert named and named <= {board.title.removeprefix("stream-gw: ") for board in boards.BOARDS}


def test_the_chart_takes_the_objectives_that_can_be_measured() -> None:
    schema = json.loads((ROOT / "infra/helm/stream-gw/values.schema.json").read_text())
    taken = schema["properties"]["monitoring"]["properties"]["objectives"]["additionalProperties"]["properties"]
    assert taken["ttft"]["enum"] == taken["ttft_p50"]["enum"] == list(TTFT.buckets)
    assert taken["itl"]["enum"] == list(ITL.buckets)
    alerts = json.dumps(rules.alerting()) + json.dumps(rules.recording())
    assert {slo for slo in taken if f'slo=\\"{slo}\\"' not in alerts} == set()


@pytest.mark.platform
@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", VERSIONS)
def test_prometheus_takes_the_rules_and_every_alert_fires_when_it_should(version: str) -> None:
    promtool = of_version("promtool", version)
    env = {**os.environ, "GOGC": "400"}  # a fifth less CPU
    files = [str(rules.FOLDER / name) for name in ("recording.yaml", "alerts.yaml")]
    tests = [str(rules.FOLDER / name) for name in rules.cases()]
    for command in (["check", "rules", *files], ["test", "rules", *tests]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, timeout=280, env=env)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.platform
@pytest.mark.parametrize("version", VERSIONS)
def test_panels_of_a_budget_use_the_pools_own_objective(version: str, tmp_path: Path) -> None:
    own, platforms, elsewhere = 'namespace="a",pool="own"', 'namespace="a",pool="platforms"', 'namespace="b",pool="own"'
    ratio = 0.0005
    series = [
        *(
            {"series": f'{error_ratio(window)}{{{labels},slo="availability"}}', "values": f"{ratio}x120"}
            for window in WINDOWS
            for labels in (own, platforms, elsewhere)
        ),
        {"series": f'{OBJECTIVE}{{{own},slo="availability"}}', "values": "0.999x120"},
    ]
    asked = {
        panel.title.removeprefix("availability: "): of_install(panel.queries[0].expr)
        for panel in boards.SLO.panels
        if panel.title.startswith("availability: ") and not isinstance(panel.queries, Sql)
    }
    expected = {"burn rate": (0.5, 1.0, 1.0), "error budget left": (0.5, 0.0, 0.0)}
    tests = [
        {
            # Rounded: the quotient of two binary fractions is not the decimal one
            "expr": f"round({asked[title].replace('$pool', '.*').replace('$namespace', '.*')}, 0.001)",
            "eval_time": "110m",
            "exp_samples": [
                {"labels": f'{{{labels},slo="availability"}}', "value": value}
                for labels, value in zip((own, platforms, elsewhere), values, strict=True)
            ],
        }
        for title, values in expected.items()
    ]
    (tmp_path / "panels.yaml").write_text(
        json.dumps({"rule_files": [], "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": tests}]})
    )
    done = subprocess.run(
        [of_version("promtool", version), "test", "rules", "panels.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
