"""Every query of every dashboard, asked of a real Prometheus and of ClickHouse's engine that a running platform feeds:
none fails, and none is empty but those that say when they have data."""

from __future__ import annotations

import asyncio
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from dashboards import boards, rules
from dashboards.build import Board, Panel, Sql, of_install
from tests.metrics.conftest import VERSIONS, Observed, of_version, some_load
from tests.support.server import ServerProcess, free_port, wait_for

pytestmark = pytest.mark.platform

ROUNDS = 12


class Prometheus(ServerProcess):
    """One that scrapes the platform each second and evaluates our rules."""

    def __init__(self, binary: str, targets: dict[str, list[str]]) -> None:
        super().__init__("prometheus")
        self._binary = binary
        jobs = [
            {
                "job_name": role,
                "static_configs": [
                    {"targets": [url.removeprefix("http://") for url in urls], "labels": {"namespace": "ours"}}
                ],
            }
            for role, urls in targets.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules.FOLDER / "recording.yaml"), str(rules.FOLDER / "alerts.yaml")],
            "scrape_configs": jobs,
        }
        (self.folder / "prometheus.yml").write_text(json.dumps(config))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> Prometheus:
        self.launch(
            [
                self._binary, f"--config.file={self.folder}/prometheus.yml", f"--storage.tsdb.path={self.folder}/data",
                f"--web.listen-address=127.0.0.1:{self.port}", "--enable-feature=exemplar-storage", "--log.level=error",
            ],
            start_new_session=True,
        )  # fmt: skip
        wait_for(self.ready, "Prometheus to answer", timeout_s=60)
        return self

    def ready(self) -> bool:
        assert self.process is not None and self.process.poll() is None, f"Prometheus has ended:\n{self.log}"
        with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)

    def ask(self, path: str, **parameters: str) -> Any:
        try:
            with urllib.request.urlopen(
                f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=20
            ) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None


@pytest.fixture(scope="module", params=VERSIONS)
def prometheus(request: pytest.FixtureRequest, observed: Observed) -> Iterator[Prometheus]:
    with Prometheus(of_version("prometheus", request.param), observed.targets()) as server:
        yield server


PROM = [
    (board, panel, query.expr)
    for board in boards.BOARDS
    for panel in board.panels
    if not isinstance(panel.queries, Sql)
    for query in panel.queries
]
SQL = [
    (board, panel, panel.queries.sql)
    for board in boards.BOARDS
    for panel in board.panels
    if isinstance(panel.queries, Sql)
]


def named(board: Board, panel: Panel, query: str) -> str:
    return f"{board.title} / {panel.title} / {query}"


def has_values(prometheus: Prometheus, expr: str, namespace: str = "ours") -> bool:
    """As Grafana would ask it, in a window that fits scrapes of a second."""
    asked = of_install(expr).replace("$__rate_interval", "20s").replace("$pool", ".*")
    asked = asked.replace("$namespace", namespace)
    found = prometheus.ask("query", query=asked)["result"]
    return any(math.isfinite(float(sample["value"][1])) for sample in found)


def test_every_panel_on_prometheus_has_data(observed: Observed, prometheus: Prometheus) -> None:
    empty = {(named(*query), query[2]) for query in PROM if not query[1].only}
    for _ in range(ROUNDS):
        asyncio.run(some_load(observed.platform.gates))
        empty = {one for one in empty if not has_values(prometheus, one[1])}
        if not empty:
            break
    assert not empty, "\n".join(sorted(name for name, _ in empty))
    for query in PROM:
        if query[1].only:
            has_values(prometheus, query[2])  # it may be empty, and must not fail
    of_others = [query for query in PROM if has_values(prometheus, query[2], "another")]
    assert not of_others, "a board of one install shows what another one does"


def test_no_alert_fires_on_a_healthy_platform_and_every_rule_is_evaluated(prometheus: Prometheus) -> None:
    def evaluated() -> list[dict[str, Any]]:
        every = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        return [] if any(rule["health"] == "unknown" for rule in every) else every

    every = wait_for(evaluated, "every rule to be evaluated", timeout_s=60, every_s=0.3)
    assert len(every) == len(rules.ALERTS) + len(rules.recording()["groups"][0]["rules"])
    assert {rule["health"] for rule in every} == {"ok"}, [rule for rule in every if rule["health"] != "ok"]
    assert not [rule["name"] for rule in every if rule.get("state") == "firing"]


def test_a_time_to_first_token_leads_to_its_trace(observed: Observed, prometheus: Prometheus) -> None:
    asyncio.run(some_load(observed.platform.gates))

    def trace_ids() -> set[str]:
        found = prometheus.ask("query_exemplars", query="ttft_seconds_bucket", start="0", end="4102444800")
        return {one["labels"]["trace_id"] for series in found for one in series["exemplars"]}

    ids = wait_for(trace_ids, "an exemplar", timeout_s=60, every_s=0.3)
    assert all(len(one) == 32 for one in ids)


@pytest.mark.parametrize(("board", "panel", "sql"), SQL, ids=[named(b, p, "SQL") for b, p, _ in SQL])
def test_every_panel_on_clickhouse_has_data(observed: Observed, board: Board, panel: Panel, sql: str) -> None:
    asked = sql.replace("$__fromTime", "(now() - INTERVAL 1 HOUR)").replace("$__toTime", "(now() + INTERVAL 1 HOUR)")

    def rows() -> list[Any]:
        query = urllib.parse.urlencode({"query": f"{asked} FORMAT JSONCompact"})
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{observed.store.port}/?{query}", timeout=30) as answer:
                return list(json.load(answer)["data"])
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None

    if panel.only:
        rows()  # it may be empty, and must not fail
    else:
        assert wait_for(rows, named(board, panel, sql), timeout_s=30)
