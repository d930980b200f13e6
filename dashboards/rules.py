"""Prometheus' rules.

Each alert carries the series that it must fire on and those that it must not, which ``promtool test rules`` runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dashboards.objectives import FAST, OBJECTIVES, SLOW, WINDOWS, Burn, Objective, error_ratio
from stream_fabric import metrics as listed

FOLDER = Path(__file__).parent / "alerts"
RUNBOOK = "docs/runbook.md"
_MADE = "# Made by python -m dashboards\n"

Series = Mapping[str, str]
"""Name and labels → values, as promtool writes them; a minute apart."""


class Alert(NamedTuple):
    name: str
    severity: Literal["page", "ticket"]
    expr: str
    wait: str
    """For how long it must be so."""
    summary: str
    fires: Series
    quiet: Series
    at: str = "20m"
    labels: Mapping[str, str] = {}
    """Of the alert that fires."""

    @property
    def anchor(self) -> str:
        return f"alert-{self.name.lower()}"


def _burns(objective: Objective, burns: tuple[Burn, ...]) -> str:
    def over(burn: Burn, window: str) -> str:
        return f'{error_ratio(window)}{{slo="{objective.slo}"}} > {burn.rate:g} * {objective.budget:g}'

    return " or ".join(f"({over(burn, burn.short)} and {over(burn, burn.long)})" for burn in burns)


def _failing(objective: Objective, percent: float) -> Series:
    """Traffic of which so much is not as promised."""
    bad = round(percent * 100)
    match objective.slo:
        case "ttft":
            name, le = listed.TTFT.name, "1.0"
        case "itl":
            name, le = listed.ITL.name, "0.098304"
        case _:
            labels = 'pool="p",role="created"'
            return {
                f'{listed.READS.name}{{{labels},ended="completed",fault="none"}}': f"0+{10_000 - bad}x200",
                f'{listed.READS.name}{{{labels},ended="failed",fault="platform"}}': f"0+{bad}x200",
            }
    return {
        f'{name}_bucket{{pool="p",le="{le}"}}': f"0+{10_000 - bad}x200",
        f'{name}_count{{pool="p"}}': "0+10000x200",
    }


def _burn_alerts(objective: Objective) -> list[Alert]:
    slo = objective.slo.capitalize()
    budget = objective.budget * 100
    labels = {"pool": "p", "slo": objective.slo}
    return [
        Alert(
            f"{slo}BurnsFast", "page", _burns(objective, FAST), "2m",
            f"Pool {{{{ $labels.pool }}}}: too often not so that {objective.about}; the month's budget is gone in days",
            _failing(objective, 20 * budget), _failing(objective, 4 * budget), "75m", labels,
        ),
        Alert(
            f"{slo}BurnsSlow", "ticket", _burns(objective, SLOW), "15m",
            f"Pool {{{{ $labels.pool }}}}: more often than promised it is not so that {objective.about}",
            _failing(objective, 4 * budget), _failing(objective, 0.5 * budget), "150m", labels,
        ),
    ]  # fmt: skip


def _rises(name: str, by: str, window: str = "15m") -> str:
    """A counter has gone up, or is there for the first time: ``increase`` does not see the first sample of a series."""
    return f"sum by ({by}) (increase({name}[{window}])) > 0 or sum by ({by}) ({name} unless {name} offset {window}) > 0"


_POOL = '{pool="p"}'
_PART = '{topic="t",partition="0"}'
_AGENT = '{pool="p",instance="i"}'
_P = {"pool": "p"}
_READY = f'{listed.POOL_REPLICAS.name}{{pool="p",state="ready"}}'
_BATCH_AGE = f'{listed.QUEUE_AGE.name}{{pool="p",priority="batch"}}'
_INTERACTIVE = f'{listed.SHED_LEVEL.name}{{pool="p",tier="interactive"}}'

ALERTS: tuple[Alert, ...] = (
    *(alert for objective in OBJECTIVES for alert in _burn_alerts(objective)),
    Alert(
        "NoReplicaReady", "page",
        # One that was to be empty a moment ago has its cold start: ReplicasDoNotCome
        f'max by (pool) ({listed.POOL_REPLICAS.name}{{state="ready"}}) == 0 '
        f"unless on (pool) min by (pool) (min_over_time({listed.DESIRED.name}[15m])) == 0", "1m",
        "Pool {{ $labels.pool }} has no replica that takes requests",
        {_READY: "1 0x40", f"{listed.DESIRED.name}{_POOL}": "1x40"},
        {_READY: "0x40", f"{listed.DESIRED.name}{_POOL}": "0x10 1x40"}, labels=_P,
    ),
    Alert(
        "NoControllerLeads", "page",
        f"count by (job, namespace) (max_over_time({listed.MAX_REPLICAS.name}[15m])) "
        f"unless on (job, namespace) sum by (job, namespace) ({listed.LEADS.name}) > 0", "30s",
        "Pools are declared, and no controller plans them: their number stays as it is",
        {f"{listed.MAX_REPLICAS.name}{_POOL}": "5x10", listed.LEADS.name: "1x10"},
        {f"{listed.MAX_REPLICAS.name}{_POOL}": "5x40", f'{listed.LEADS.name}{{instance="a"}}': "0x40",
         f'{listed.LEADS.name}{{instance="b"}}': "1x10 0 1x40"},
        "18m",
    ),
    Alert(
        "TwoControllersLead", "page",
        f"sum by (job, namespace) ({listed.LEADS.name}) > 1", "1m",
        "{{ $value }} controllers say that they lead: only one can",
        {f'{listed.LEADS.name}{{instance="a"}}': "1x40", f'{listed.LEADS.name}{{instance="b"}}': "0x10 1x40"},
        {f'{listed.LEADS.name}{{instance="a"}}': "1x20 0x40", f'{listed.LEADS.name}{{instance="b"}}': "0x19 1x40"},
        "21m",
    ),
    Alert(
        "ReplicasDoNotCome", "ticket",
        f"max by (pool) ({listed.SHORT.name}) > on (pool) 2 * max by (pool) ({listed.COLD_START.name})", "0m",
        "Pool {{ $labels.pool }} has lacked replicas for {{ $value }} s, and none came",
        {f"{listed.SHORT.name}{_POOL}": "0x5 60+60x40", f"{listed.COLD_START.name}{_POOL}": "300x60"},
        {f"{listed.SHORT.name}{_POOL}": "0x11 60+60x40", f"{listed.COLD_START.name}{_POOL}": "300x60"}, labels=_P,
    ),
    Alert(
        "PoolAtItsMost", "ticket",
        f"max by (pool) ({listed.NEEDED.name}) > on (pool) max by (pool) ({listed.DESIRED.name})", "5m",
        "Pool {{ $labels.pool }} needs {{ $value }} replicas, more than it may have",
        {f"{listed.NEEDED.name}{_POOL}": "4x5 7x40", f"{listed.DESIRED.name}{_POOL}": "4x5 5x40"},
        {f"{listed.NEEDED.name}{_POOL}": "4x15 7x3 5x40", f"{listed.DESIRED.name}{_POOL}": "5x60"}, labels=_P,
    ),
    Alert(
        "PoolBurnsFast", "page",
        " and ".join(
            f'max by (pool) ({listed.BURN.name}{{window="{window}"}}) > {FAST[0].rate:g}'
            for window in (FAST[0].short, FAST[0].long)
        ), "2m",
        "Pool {{ $labels.pool }}: {{ $value }} times as many first tokens as may be come later than its objective",
        {f'{listed.BURN.name}{{pool="p",window="{window}"}}': "0x5 20x40" for window in ("5m", "1h")},
        {f'{listed.BURN.name}{{pool="p",window="5m"}}': "50x40",
         f'{listed.BURN.name}{{pool="p",window="1h"}}': "5x40"}, labels=_P,
    ),
    Alert(
        "ProfileOld", "ticket", f"max by (pool) ({listed.PROFILE_AGE.name}) > 86400", "15m",
        "What usually arrives at pool {{ $labels.pool }} was last learned {{ $value }} s ago",
        {f"{listed.PROFILE_AGE.name}{_POOL}": "86500+60x40"}, {f"{listed.PROFILE_AGE.name}{_POOL}": "600x40"},
        labels=_P,
    ),
    Alert(
        "PoolBacklog", "page", f"max by (pool) ({listed.BACKLOG.name}) > 60", "3m",
        "Pool {{ $labels.pool }} needs {{ $value }} s for what it has to do",
        {f"{listed.BACKLOG.name}{_POOL}": "90x40"}, {f"{listed.BACKLOG.name}{_POOL}": "20x40"}, labels=_P,
    ),
    Alert(
        "InteractiveRefused", "page", f'max by (pool) ({listed.SHED_LEVEL.name}{{tier="interactive"}}) > 0', "2m",
        "Pool {{ $labels.pool }} refuses {{ $value | humanizePercentage }} of its interactive requests",
        {_INTERACTIVE: "0x5 0.2x40"}, {_INTERACTIVE: "0.2 0x40"}, labels=_P,
    ),
    Alert(
        "QueueAge", "ticket", f"max by (pool, priority) ({listed.QUEUE_AGE.name}) > 30", "2m",
        "In pool {{ $labels.pool }} a request of priority {{ $labels.priority }} has waited for {{ $value }} s",
        {_BATCH_AGE: "45x40"}, {_BATCH_AGE: "45 5x40"}, labels={"pool": "p", "priority": "batch"},
    ),
    Alert(
        "StuckReplica", "ticket", f"sum(increase({listed.STUCK.name}[15m])) > 0", "0m",
        "A replica was drained because its requests waited far longer than its peers'",
        {listed.STUCK.name: "0x12 1x40"}, {listed.STUCK.name: "1x40"},
    ),
    Alert(
        "ReplicaDied", "ticket", f"sum(increase({listed.DEAD.name}[15m])) > 0", "0m",
        "A replica's lease ended while it had not left",
        {listed.DEAD.name: "0x12 1x40"}, {listed.DEAD.name: "1x40"},
    ),
    Alert(
        "BreakerOpen", "page", f"max by (pool, instance) ({listed.BREAKER.name}) == 2", "1m",
        "The engine of {{ $labels.instance }} fails request after request",
        {f"{listed.BREAKER.name}{_AGENT}": "2x40"}, {f"{listed.BREAKER.name}{_AGENT}": "0 2 0x40"},
        labels={"pool": "p", "instance": "i"},
    ),
    Alert(
        "EngineMetricsMissing", "ticket", f"max by (pool, instance) ({listed.METRICS_MISSING.name}) > 0", "5m",
        "{{ $labels.instance }}: its vLLM does not show {{ $value }} of the metrics that the agent relies on",
        {f"{listed.METRICS_MISSING.name}{_AGENT}": "2x40"}, {f"{listed.METRICS_MISSING.name}{_AGENT}": "0x40"},
        labels={"pool": "p", "instance": "i"},
    ),
    Alert(
        "BillingFactsLost", "page", f"sum(increase({listed.BILLS_DROPPED.name}[1h])) > 0", "0m",
        "Billing facts were dropped: the bill is no longer whole",
        {listed.BILLS_DROPPED.name: "0x12 1x40"}, {listed.BILLS_DROPPED.name: "0x40"},
    ),
    Alert(
        "EventsNotDelivered", "ticket",
        f"max by (instance) ({listed.EVENTS_AWAY.name}) == 1 or max by (instance) ({listed.SPOOL_OLDEST.name}) > 300",
        "3m", "Events of {{ $labels.instance }} are not delivered; they wait in memory or in its spool",
        {f'{listed.SPOOL_OLDEST.name}{{instance="i"}}': "0+60x40"},
        {f'{listed.EVENTS_AWAY.name}{{instance="i"}}': "0 1 0x40"}, labels={"instance": "i"},
    ),
    Alert(
        "EventsRoomShort", "page", f"max by (instance) ({listed.EVENTS_ROOM.name}) > 0.5", "0m",
        "Half of the room of {{ $labels.instance }} for events that are not delivered is taken; bills are next",
        {f'{listed.EVENTS_ROOM.name}{{instance="i"}}': "0+0.1x40"},
        {f'{listed.EVENTS_ROOM.name}{{instance="i"}}': "0.3x40"}, labels={"instance": "i"},
    ),
    Alert(
        "TelemetryDlq", "ticket", _rises(listed.POISON.name, "topic"), "0m",
        "Records of {{ $labels.topic }} that are no events were put aside",
        {f"{listed.POISON.name}{_PART}": "_x10 1x40"}, {f"{listed.POISON.name}{_PART}": "1x40"},
        labels={"topic": "t"},
    ),
    Alert(
        "TelemetryLag", "ticket", f"sum by (topic) ({listed.LAG.name}) > 100000", "5m",
        "The consumer is {{ $value }} records behind in {{ $labels.topic }}",
        {f"{listed.LAG.name}{_PART}": "0+20000x40"}, {f"{listed.LAG.name}{_PART}": "500x40"}, labels={"topic": "t"},
    ),
    Alert(
        "TelemetryStuck", "page", f"max by (topic, partition) ({listed.PENDING.name}) > 120", "1m",
        "The consumer has tried to insert a block of {{ $labels.topic }} for {{ $value }} s",
        {f"{listed.PENDING.name}{_PART}": "0+60x40"}, {f"{listed.PENDING.name}{_PART}": "3x40"},
        labels={"topic": "t", "partition": "0"},
    ),
)  # fmt: skip


def recording() -> dict[str, Any]:
    rules = [
        {"record": error_ratio(window), "expr": objective.bad_in(window), "labels": {"slo": objective.slo}}
        for objective in OBJECTIVES
        for window in WINDOWS
    ]
    return {"groups": [{"name": "stream-gw objectives", "rules": rules}]}


def alerting() -> dict[str, Any]:
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.wait,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "runbook": f"{RUNBOOK}#{alert.anchor}"},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "stream-gw", "rules": rules}]}


def cases() -> dict[str, Any]:
    """For ``promtool test rules``: each alert fires on the one, and stays quiet on the other. Without annotations in
    what is expected it would expect none."""
    tests = []
    for alert in ALERTS:
        # Whether it fires is asked of what promtool keeps of alerts, so that nothing hangs on the summary's figures
        query = f'count(ALERTS{{alertname="{alert.name}",alertstate="firing"}}) or vector(0)'
        labels = "".join(f',{name}="{value}"' for name, value in alert.labels.items())
        mine = f'count(ALERTS{{alertname="{alert.name}",alertstate="firing",severity="{alert.severity}"{labels}}})'
        for series, fires in ((alert.fires, True), (alert.quiet, False)):
            tests.append(
                {
                    "name": f"{alert.name} {'fires' if fires else 'is quiet'}",
                    "interval": "1m",
                    "input_series": [{"series": name, "values": values} for name, values in series.items()],
                    "promql_expr_test": [
                        {
                            "expr": mine if fires else query,
                            "eval_time": alert.at,
                            "exp_samples": [{"labels": "{}", "value": 1 if fires else 0}],
                        }
                    ],
                }
            )
    return {"rule_files": ["recording.yaml", "alerts.yaml"], "evaluation_interval": "1m", "tests": tests}


def files() -> dict[str, str]:
    """Name → contents."""
    made = {"recording.yaml": recording(), "alerts.yaml": alerting(), "tests.yaml": cases()}
    return {name: _MADE + "\n".join(_yaml(value)) + "\n" for name, value in made.items()}


def _yaml(value: Any, indent: str = "") -> list[str]:
    """Maps, lists and scalars; every scalar as JSON writes it, which YAML reads."""
    lines: list[str] = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, Mapping | list) and item:
                lines += [f"{indent}{key}:", *_yaml(item, indent + "  ")]
            else:
                lines.append(f"{indent}{key}: {json.dumps(item, ensure_ascii=False)}")
        return lines
    for item in value:
        if isinstance(item, Mapping | list):
            first, *rest = _yaml(item, indent + "  ")
            lines += [f"{indent}- {first.lstrip()}", *rest]
        else:
            lines.append(f"{indent}- {json.dumps(item, ensure_ascii=False)}")
    return lines
