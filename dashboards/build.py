"""Rendering of a board as Grafana's JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableHide

from dashboards.objectives import OBJECTIVE, WINDOWS, error_ratio
from stream_fabric.process.metric_names import METRICS

_PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${prometheus}")
_CLICKHOUSE = DataSourceRef(type_val="grafana-clickhouse-datasource", uid="${clickhouse}")
_HEIGHT, _THIRD, _WHOLE = 8, 8, 24
_SERIES = [name for metric in METRICS.values() for name in metric.series]
_SERIES += [OBJECTIVE, *(error_ratio(window) for window in WINDOWS)]
_SELECTOR = re.compile(rf"\b({'|'.join(map(re.escape, _SERIES))})\b(?:\{{([^}}]*)\}})?")


def of_install(expr: str) -> str:
    """The expression with each of its selectors limited to the install that the board's reader chose."""
    return _SELECTOR.sub(
        lambda found: f'{found[1]}{{{found[2] + "," if found[2] else ""}namespace=~"$namespace"}}', expr
    )


class Prom(NamedTuple):
    expr: str
    legend: str = ""


class Sql(NamedTuple):
    sql: str
    """``$__fromTime`` and ``$__toTime`` bound it."""


Kind = Literal["lines", "number", "table"]


class Panel(NamedTuple):
    title: str
    queries: Sequence[Prom] | Sql
    unit: str = "short"
    kind: Kind = "lines"
    about: str = ""
    only: str = ""
    """When it has data, where a healthy platform on any machine has none."""


class Board(NamedTuple):
    uid: str
    title: str
    panels: Sequence[Panel]
    by_pool: bool = False
    """It has a choice of pools, ``$pool``."""


class _ClickHouse(Dataquery):
    """A query in the words of Grafana's ClickHouse plug-in, which the SDK does not know."""

    def __init__(self, sql: str, ref_id: str, series: bool) -> None:
        self._sql = sql
        self._ref_id = ref_id
        self._series = series

    def to_json(self) -> dict[str, object]:
        return {
            "datasource": {"type": _CLICKHOUSE.type_val, "uid": _CLICKHOUSE.uid},
            "editorType": "sql",
            "format": 0 if self._series else 1,
            "queryType": "timeseries" if self._series else "table",
            "rawSql": self._sql,
            "refId": self._ref_id,
        }


class _ClickHouseBuilder(Builder[Dataquery]):
    def __init__(self, query: _ClickHouse) -> None:
        self._query = query

    def build(self) -> Dataquery:
        return self._query


def _panel(panel: Panel) -> Any:
    made: Any
    match panel.kind:
        case "lines":
            legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
            made = timeseries.Panel().legend(legend.show_legend(True)).fill_opacity(8)
        case "number":
            made = stat.Panel()
        case "table":
            made = table.Panel()
    wide = _WHOLE if panel.kind == "table" else _THIRD
    about = " ".join(text for text in (panel.about, f"Only {panel.only}." if panel.only else "") if text)
    made = made.title(panel.title).unit(panel.unit).height(_HEIGHT).span(wide)
    if about:
        made = made.description(about)
    if isinstance(panel.queries, Sql):
        query = _ClickHouse(panel.queries.sql, "A", panel.kind == "lines")
        return made.datasource(_CLICKHOUSE).with_target(_ClickHouseBuilder(query))
    made = made.datasource(_PROMETHEUS)
    for number, one in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(of_install(one.expr)).ref_id(chr(ord("A") + number))
        if panel.kind == "number":
            target = target.instant()
        else:
            target = target.range().exemplar(one.expr.startswith("histogram_quantile"))
        if one.legend:
            target = target.legend_format(one.legend)
        made = made.with_target(target)
    return made


def render(board: Board) -> str:
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .tags(["stream-gw"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("utc")
        .readonly()
        .with_variable(dashboard.DatasourceVariable("prometheus").type("prometheus").label("Prometheus"))
    )
    if any(isinstance(panel.queries, Sql) for panel in board.panels):
        made = made.with_variable(
            dashboard.DatasourceVariable("clickhouse").type("grafana-clickhouse-datasource").label("ClickHouse")
        )
    if not all(isinstance(panel.queries, Sql) for panel in board.panels):
        names = dashboard.QueryVariable("namespace").datasource(_PROMETHEUS).label("Namespace")
        # ".*" and not the names: an install outside Kubernetes has no such label
        names = names.include_all(True).all_value(".*").multi(True)
        made = made.with_variable(names.query("label_values(pool_replicas, namespace)"))
    if board.by_pool:
        query = f"label_values({of_install('pool_replicas')}, pool)"
        pools = dashboard.QueryVariable("pool").datasource(_PROMETHEUS).query(query)
        made = made.with_variable(pools.include_all(True).multi(True).hide(VariableHide.DONT_HIDE).label("Pool"))
    for panel in board.panels:
        made = made.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"
