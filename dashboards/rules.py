"""Prometheus' alerts and recording rules.

Each alert carries series that must fire it and series that must not; ``promtool test rules`` runs both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dashboards.objectives import (
    BACKLOG,
    BACKLOG_S_MAX,
    BAD_MIN,
    FAST,
    GPU_UTILIZATION,
    GPU_UTILIZATION_MAX,
    GPU_UTILIZATION_MIN,
    ITL_P99_S,
    KV_HIT_RATE,
    KV_HIT_RATE_MIN,
    OBJECTIVE,
    OBJECTIVES,
    SLOW,
    TTFT_P50_S,
    TTFT_P99_S,
    WINDOWS,
    Burn,
    Objective,
    beyond,
    by_install,
    error_ratio,
)
from stream_fabric.process import metric_names as listed

FOLDER = Path(__file__).parent / "alerts"
RUNBOOK = "docs/runbook.md"
_HEADER = "# Made by python -m dashboards\n"

Series = Mapping[str, str]
"""Name and labels → values, as promtool writes them, one minute apart."""


class Alert(NamedTuple):
    name: str
    severity: Literal["page", "ticket"]
    expr: str
    wait: str
    """Time for which the expression must hold."""
    summary: str
    fires: Series
    quiet: Series
    at: str = "20m"
    labels: Mapping[str, str] = {}
    """Labels of the alert that fires."""

    @property
    def anchor(self) -> str:
        return f"alert-{self.name.lower()}"


class Case(NamedTuple):
    """A further test of an alert."""

    alert: str
    series: Series
    fires: bool
    at: str = "20m"
    why: str = "by the pool's own objective"


def _burns(objective: Objective, burns: tuple[Burn, ...], *, pages: bool) -> str:
    def over(burn: Burn, window: str) -> str:
        ratio = f'{error_ratio(window)}{{slo="{objective.slo}"}}'
        return f"{objective.burn(ratio)} > {burn.rate:g}"

    def both(burn: Burn) -> str:
        enough = f" and on (pool) {objective.is_enough(burn.long)}" if pages else ""
        return f"({over(burn, burn.short)} and {over(burn, burn.long)}{enough})"

    return " or ".join(map(both, burns))


_LATENCIES = {
    "ttft": (listed.TTFT.name, TTFT_P99_S),
    "ttft_p50": (listed.TTFT.name, TTFT_P50_S),
    "itl": (listed.ITL.name, ITL_P99_S),
}


def _failing(slo: str, percent: float) -> Series:
    """Traffic of pool ``p`` in which this percentage of the events misses the objective."""
    bad = round(percent * 100)
    if slo not in _LATENCIES:
        labels = 'pool="p",role="created"'
        return {
            f'{listed.READS.name}{{{labels},ended="completed",fault="none"}}': f"0+{10_000 - bad}x200",
            f'{listed.READS.name}{{{labels},ended="failed",fault="platform"}}': f"0+{bad}x200",
        }
    name, bound_s = _LATENCIES[slo]
    return {
        f'{name}_bucket{{pool="p",le="{bound_s!r}"}}': f"0+{10_000 - bad}x200",
        f'{name}_count{{pool="p"}}': "0+10000x200",
    }


def _at_night(bad: int) -> Series:
    """Four requests in an hour that are served well, and ``bad`` ones that fail or are slow."""
    reads, ttft = f'{listed.READS.name}{{pool="p",role="created"', f"{listed.TTFT.name}"
    return {
        f'{reads},ended="completed",fault="none"}}': "0x70 4x20",
        f'{reads},ended="failed",fault="platform"}}': f"0x70 {bad}x20",
        f'{ttft}_bucket{{pool="p",le="{TTFT_P99_S!r}"}}': "0x70 4x20",
        f'{ttft}_count{{pool="p"}}': f"0x70 {4 + bad}x20",
    }


def _own(slo: str, value: float, bucket: bool = False) -> Series:
    le = f',le="{float(value)!r}"' if bucket else ""
    return {f'{OBJECTIVE}{{pool="p",slo="{slo}"{le}}}': f"{value:g}x200"}


_POOL_NAME = "{{ with $labels.pool }}Pool {{ . }}{{ else }}The platform{{ end }}"
"""A request that failed before its pool was known has none."""


def _burn_alerts(objective: Objective) -> list[Alert]:
    slo = objective.slo.capitalize()
    budget = objective.budget * 100
    labels = {"pool": "p", "slo": objective.slo}
    return [
        Alert(
            f"{slo}BurnsFast", "page", _burns(objective, FAST, pages=True), "2m",
            f"{_POOL_NAME} misses its objective ({objective.about}): at this rate the month's error budget is used up "
            "in days",
            _failing(objective.slo, 20 * budget), _failing(objective.slo, 4 * budget), "75m", labels,
        ),
        Alert(
            f"{slo}BurnsSlow", "ticket", _burns(objective, SLOW, pages=False), "15m",
            f"{_POOL_NAME} misses its objective ({objective.about}) more often than the error budget allows",
            _failing(objective.slo, 4 * budget), _failing(objective.slo, 0.5 * budget), "150m", labels,
        ),
    ]  # fmt: skip


def _median_alert(objective: Objective) -> Alert:
    slower = f'{error_ratio("30m")}{{slo="{objective.slo}"}} > {objective.budget:g}'
    now = f'{error_ratio("5m")}{{slo="{objective.slo}"}} > {objective.budget:g}'
    return Alert(
        "TtftMedianHigh", "ticket", f"{slower} and {now}", "5m",
        f"Pool {{{{ $labels.pool }}}}: more than half of the first tokens come later than {TTFT_P50_S:g} s, or than "
        "the pool's own objective",
        _failing(objective.slo, 60), _failing(objective.slo, 40), "60m", {"pool": "p", "slo": objective.slo},
    )  # fmt: skip


def _ttft_errors(early: int, within: int, count: int) -> dict[str, str]:
    """Series of a pool in which, of ``count`` first tokens a minute, ``within`` come at most half a second late, and
    ``early`` of them more than half a second early."""
    name = listed.TTFT_ERROR.name
    return {
        f'{name}_bucket{{pool="p",le="-0.5"}}': f"0+{early}x100",
        f'{name}_bucket{{pool="p",le="0.5"}}': f"0+{within}x100",
        f'{name}_count{{pool="p"}}': f"0+{count}x100",
    }


def _rises(name: str, by: str) -> str:
    """PromQL: the counter rose, or its series is new (``increase`` does not see a series' first sample)."""
    return f"sum by ({by}) (increase({name}[15m])) > 0 or sum by ({by}) ({name} unless {name} offset 15m) > 0"


def _share_of_replies(result: str, share: float) -> str:
    name = listed.STRUCTURED_REPLIES.name
    return f'sum by (pool) (rate({name}{{result="{result}"}}[15m])) > {share:g} * sum by (pool) (rate({name}[15m]))'


def _replies(result: str, percent: int) -> Series:
    """Structured replies of pool ``p``, of which this percentage has the result."""
    name = listed.STRUCTURED_REPLIES.name
    return {
        f'{name}{{pool="p",result="{result}"}}': f"0+{percent}x60",
        f'{name}{{pool="p",result="valid"}}': f"0+{100 - percent}x60",
    }


def _inputs_late(share: float) -> str:
    name = listed.INPUT_WAIT.name
    late = f'sum by (pool) (rate({name}_bucket{{le="1.0"}}[15m]))'
    return f"{late} < {1 - share:g} * sum by (pool) (rate({name}_count[15m]))"


def _inputs_waited(late_percent: int) -> Series:
    """Inputs of pool ``p``, of which this percentage waits longer than a second."""
    name = listed.INPUT_WAIT.name
    return {
        f'{name}_bucket{{pool="p",le="1.0"}}': f"0+{100 - late_percent}x60",
        f'{name}_count{{pool="p"}}': "0+100x60",
    }


def _inputs_refused(percent: int) -> Series:
    """Inputs of pool ``p``, of which this percentage is refused by the replicas."""
    name = listed.INPUTS_ANSWERED.name
    return {
        f'{name}{{pool="p",result="refused"}}': f"0+{percent}x60",
        f'{name}{{pool="p",result="applied"}}': f"0+{100 - percent}x60",
    }


def _readers(percent: int) -> Series:
    """Readers of one dialect, of which this percentage gets an error of the platform."""
    name, dialect = listed.READS_BY_DIALECT.name, 'dialect="openai.responses"'
    return {
        f'{name}{{{dialect},fault="platform"}}': f"0+{percent}x60",
        f'{name}{{{dialect},fault="none"}}': f"0+{100 - percent}x60",
    }


_POOL = '{pool="p"}'
_PART = '{topic="t",partition="0"}'
_AGENT = '{pool="p",instance="i"}'
_GPU = f'{listed.GPU_UTILIZATION.name}{{pool="p",instance="i",gpu="0"}}'
_HITS = f"{listed.PREFIX_HITS.name}{_AGENT}"
_QUERIES = f"{listed.PREFIX_QUERIES.name}{_AGENT}"
_ATTEMPTS = f'{listed.ATTEMPTS.name}{{pool="p",instance="i",ended="completed"}}'
_BACKLOG = f"{listed.BACKLOG.name}{_POOL}"
_P = {"pool": "p"}
_READY = f'{listed.POOL_REPLICAS.name}{{pool="p",state="ready"}}'
_DRAINING = f'{listed.POOL_REPLICAS.name}{{pool="p",state="draining"}}'
_READY_ELSEWHERE = f'{listed.POOL_REPLICAS.name}{{namespace="other",pool="p",state="ready"}}'
"""Pool of the same name in another install."""
_BATCH_AGE = f'{listed.QUEUE_AGE.name}{{pool="p",priority="batch"}}'
_INTERACTIVE = f'{listed.SHED_LEVEL.name}{{pool="p",tier="interactive"}}'
_TTFT_ERROR_SHARE = (
    f'1 - (sum by (pool) (rate({listed.TTFT_ERROR.name}_bucket{{le="0.5"}}[30m])) '
    f'- sum by (pool) (rate({listed.TTFT_ERROR.name}_bucket{{le="-0.5"}}[30m]))) '
    f"/ sum by (pool) (rate({listed.TTFT_ERROR.name}_count[30m]))"
)
_BY_SLO = {objective.slo: objective for objective in OBJECTIVES}

ALERTS: tuple[Alert, ...] = (
    *(alert for slo in ("ttft", "itl", "availability") for alert in _burn_alerts(_BY_SLO[slo])),
    _median_alert(_BY_SLO["ttft_p50"]),
    Alert(
        "KvHitRateLow", "ticket",
        f'{beyond(KV_HIT_RATE, "<", "kv_hit_rate", f"{KV_HIT_RATE_MIN:g}")} '
        # The first prompts of a quiet pool find nothing
        f"and on (pool) sum by (pool) (increase({listed.ATTEMPTS.name}[30m])) > 100", "15m",
        "Pool {{ $labels.pool }} finds {{ $value | humanizePercentage }} of its prompts' whole blocks in the KV cache, "
        "less than its objective",
        {_HITS: "0+50x100", _QUERIES: "0+260x100", _ATTEMPTS: "0+10x100"},
        {_HITS: "0+70x100", _QUERIES: "0+260x100", _ATTEMPTS: "0+10x100"}, "60m", labels=_P,
    ),
    Alert(
        "GpuUtilizationLow", "ticket", beyond(GPU_UTILIZATION, "<", "gpu_min", f"{GPU_UTILIZATION_MIN:g}"), "30m",
        "The GPUs of pool {{ $labels.pool }} are busy {{ $value | humanizePercentage }} of the time: there are more "
        "replicas than the load needs",
        {_GPU: "0.2x100"}, {_GPU: "0.6x100"}, "60m", labels=_P,
    ),
    Alert(
        "GpuUtilizationHigh", "ticket", beyond(GPU_UTILIZATION, ">", "gpu_max", f"{GPU_UTILIZATION_MAX:g}"), "15m",
        "The GPUs of pool {{ $labels.pool }} are busy {{ $value | humanizePercentage }} of the time: there is no room "
        "for a peak",
        {_GPU: "0.99x100"}, {_GPU: "0.9x100"}, "60m", labels=_P,
    ),
    Alert(
        "ObjectiveNotMeasured", "ticket",
        f'{OBJECTIVE}{{slo=~"ttft|ttft_p50"}} unless on (pool, le) {listed.TTFT.name}_bucket '
        f"and on (pool) {listed.TTFT.name}_count "
        f'or {OBJECTIVE}{{slo="itl"}} unless on (pool, le) {listed.ITL.name}_bucket '
        f"and on (pool) {listed.ITL.name}_count", "10m",
        "The objective {{ $labels.slo }} of pool {{ $labels.pool }} is no bound of a bucket, so it is not measured",
        {f'{OBJECTIVE}{{pool="p",slo="ttft",le="1.7"}}': "1.7x40", f"{listed.TTFT.name}_count{_POOL}": "0+9x40",
         f'{listed.TTFT.name}_bucket{{pool="p",le="1.5"}}': "0+9x40"},
        {f'{OBJECTIVE}{{pool="p",slo="ttft",le="1.5"}}': "1.5x40", f"{listed.TTFT.name}_count{_POOL}": "0+9x40",
         f'{listed.TTFT.name}_bucket{{pool="p",le="1.5"}}': "0+9x40"},
        labels={"pool": "p", "slo": "ttft"},
    ),
    Alert(
        "NoReplicaReady", "page",
        # A pool that was scaled to zero until now gets its cold start first: ReplicasDoNotCome
        f'max by (pool) ({listed.POOL_REPLICAS.name}{{state="ready"}}) == 0 '
        f"unless on (pool) min by (pool) (min_over_time({listed.DESIRED.name}[15m])) == 0 "
        # One without a declaration is taken down by draining its last replica
        f'unless on (pool) (max by (pool) ({listed.POOL_REPLICAS.name}{{state="draining"}}) > 0 '
        f"unless on (pool) max by (pool) ({listed.DESIRED.name})) "
        # A pool without a declaration has no figures when it is empty, and one that was taken down is not lost
        f"or max by (pool) ({listed.POOL_LOST.name}) == 1 unless on (pool) (max by (pool) ({listed.DESIRED.name}) "
        f'or max by (pool) ({listed.POOL_REPLICAS.name}{{state="ready"}}) > 0)', "1m",
        "Pool {{ $labels.pool }} has no ready replica",
        {_READY: "1 0x40", f"{listed.DESIRED.name}{_POOL}": "1x40", _READY_ELSEWHERE: "1x40"},
        {_READY: "0x40", f"{listed.DESIRED.name}{_POOL}": "0x10 1x40"}, labels=_P,
    ),
    Alert(
        "NoControllerLeads", "page",
        # Controllers that run tell within minutes that the last pool is declared no more; those that are gone never do
        f"(count by (job, namespace) (max_over_time({listed.MAX_REPLICAS.name}[15m])) "
        f"unless on (job, namespace) sum by (job, namespace) ({listed.LEADS.name}) > 0) "
        f"or (count by (job, namespace) (max_over_time({listed.MAX_REPLICAS.name}[1d])) "
        f"unless on (job, namespace) count by (job, namespace) ({listed.LEADS.name}))", "30s",
        "Pools are declared and no controller leads: the number of replicas does not change",
        {f"{listed.MAX_REPLICAS.name}{_POOL}": "5x10", listed.LEADS.name: "1x10"},
        {f"{listed.MAX_REPLICAS.name}{_POOL}": "5x80", f'{listed.LEADS.name}{{instance="a"}}': "0x80",
         f'{listed.LEADS.name}{{instance="b"}}': "1x10 0 1x80",
         f'{listed.MAX_REPLICAS.name}{{pool="last",namespace="n"}}': "5x10",
         f'{listed.LEADS.name}{{namespace="n"}}': "1x10 0x80"},
        "70m",
    ),
    Alert(
        "TwoControllersLead", "page",
        f"sum by (job, namespace) ({listed.LEADS.name}) > 1", "1m",
        "{{ $value | printf `%.0f` }} controllers report that they lead; only one may",
        {f'{listed.LEADS.name}{{instance="a"}}': "1x40", f'{listed.LEADS.name}{{instance="b"}}': "0x10 1x40"},
        {f'{listed.LEADS.name}{{instance="a"}}': "1x20 0x40", f'{listed.LEADS.name}{{instance="b"}}': "0x19 1x40"},
        "21m",
    ),
    Alert(
        "ReplicasDoNotCome", "ticket",
        f"max by (pool) ({listed.SHORT.name}) > on (pool) 2 * max by (pool) ({listed.COLD_START.name})", "0m",
        "Pool {{ $labels.pool }} has been short of replicas for {{ $value | humanizeDuration }} and none has come",
        {f"{listed.SHORT.name}{_POOL}": "0x5 60+60x40", f"{listed.COLD_START.name}{_POOL}": "300x60"},
        {f"{listed.SHORT.name}{_POOL}": "0x11 60+60x40", f"{listed.COLD_START.name}{_POOL}": "300x60"}, labels=_P,
    ),
    Alert(
        "PoolAtItsMost", "ticket",
        f"max by (pool) ({listed.NEEDED.name}) > on (pool) max by (pool) ({listed.DESIRED.name})", "5m",
        "Pool {{ $labels.pool }} needs {{ $value | printf `%.0f` }} replicas, more than its maximum",
        {f"{listed.NEEDED.name}{_POOL}": "4x5 7x40", f"{listed.DESIRED.name}{_POOL}": "4x5 5x40"},
        {f"{listed.NEEDED.name}{_POOL}": "4x15 7x3 5x40", f"{listed.DESIRED.name}{_POOL}": "5x60"}, labels=_P,
    ),
    Alert(
        "PoolBurnsFast", "page",
        " and ".join(
            f'max by (pool) ({listed.BURN.name}{{window="{window}"}}) > {FAST[0].rate:g}'
            for window in (FAST[0].short, FAST[0].long)
        ), "2m",
        "Pool {{ $labels.pool }} burns the error budget of its declared TTFT objective {{ $value | printf `%.1f` }} "
        "times too fast",
        {f'{listed.BURN.name}{{pool="p",window="{window}"}}': "0x5 20x40" for window in ("5m", "1h")},
        {f'{listed.BURN.name}{{pool="p",window="5m"}}': "50x40",
         f'{listed.BURN.name}{{pool="p",window="1h"}}': "5x40"}, labels=_P,
    ),
    Alert(
        "ProfileOld", "ticket", f"max by (pool) ({listed.PROFILE_AGE.name}) > 86400", "15m",
        "The traffic model of pool {{ $labels.pool }} is {{ $value | humanizeDuration }} old",
        {f"{listed.PROFILE_AGE.name}{_POOL}": "86500+60x40"}, {f"{listed.PROFILE_AGE.name}{_POOL}": "600x40"},
        labels=_P,
    ),
    Alert(
        "PoolBacklog", "page", beyond(BACKLOG, ">", "backlog", f"{BACKLOG_S_MAX:g}"), "3m",
        "Pool {{ $labels.pool }} needs {{ $value | humanizeDuration }} to begin the requests that wait for their "
        "first token",
        {_BACKLOG: "0.8x40"}, {_BACKLOG: "0.3x40"}, labels=_P,
    ),
    Alert(
        "InteractiveRefused", "page", f'max by (pool) ({listed.SHED_LEVEL.name}{{tier="interactive"}}) > 0', "2m",
        "Pool {{ $labels.pool }} refuses {{ $value | humanizePercentage }} of its interactive requests",
        {_INTERACTIVE: "0x5 0.2x40"}, {_INTERACTIVE: "0.2 0x40"}, labels=_P,
    ),
    Alert(
        "LimitsFailOpen", "ticket",
        f"sum by (job, namespace) (increase({listed.LIMITS_FAILED_OPEN.name}[5m])) > 0", "1m",
        "{{ $value | printf `%.0f` }} requests were admitted without their limits in 5 minutes: Redis does not answer "
        "for some tenants",
        {listed.LIMITS_FAILED_OPEN.name: "0x5 5+5x40"}, {listed.LIMITS_FAILED_OPEN.name: "5x40"},
    ),
    Alert(
        "TtftPredictionOff", "ticket",
        f"{_TTFT_ERROR_SHARE} > 0.2 and on (pool) sum by (pool) (increase({listed.TTFT_ERROR.name}_count[30m])) > 100",
        "15m",
        "Pool {{ $labels.pool }}: {{ $value | humanizePercentage }} of the first tokens come over half a second "
        "earlier or later than placement expects",
        _ttft_errors(100, 130, 200), _ttft_errors(5, 195, 200), "60m", labels=_P,
    ),
    Alert(
        "QueueAge", "ticket", f"max by (pool, priority) ({listed.QUEUE_AGE.name}) > 30", "2m",
        "A request of priority {{ $labels.priority }} has waited {{ $value | humanizeDuration }} in pool "
        "{{ $labels.pool }}",
        {_BATCH_AGE: "45x40"}, {_BATCH_AGE: "45 5x40"}, labels={"pool": "p", "priority": "batch"},
    ),
    Alert(
        "StuckReplica", "ticket", f"sum by (namespace) (increase({listed.STUCK.name}[15m])) > 0", "0m",
        "A replica was drained because its requests waited far longer than those of its peers",
        {listed.STUCK.name: "0x12 1x40"}, {listed.STUCK.name: "1x40"},
    ),
    Alert(
        # A controller that replaces one counts what died meanwhile within two seconds, before its first scrape
        "ReplicaDied", "ticket", _rises(listed.DEAD.name, "namespace"), "0m",
        "A replica's lease expired without a shutdown",
        {listed.DEAD.name: "_x12 1x40"}, {listed.DEAD.name: "1x40"},
    ),
    Alert(
        # It is open for at most a minute, and half open while the engine works on the request that it tries. Half open
        # alone is no failure: nobody may ask this replica for anything
        "BreakerOpen", "page",
        f"max by (pool, instance) (max_over_time({listed.BREAKER.name}[2m])) == 2 "
        f"and max by (pool, instance) ({listed.BREAKER.name}) > 0", "3m",
        "The circuit breaker of {{ $labels.instance }} is open: its engine fails every request",
        {f"{listed.BREAKER.name}{_AGENT}": "0x11 2 1 2 1 2 1 2 1 2 1 2 1"},
        {f"{listed.BREAKER.name}{_AGENT}": "0x14 2 2 2 2 0x40",
         f'{listed.BREAKER.name}{{pool="p",instance="idle"}}': "0x16 2 1x40"},
        labels={"pool": "p", "instance": "i"},
    ),
    Alert(
        "EngineMetricsMissing", "ticket", f"max by (pool, instance) ({listed.METRICS_MISSING.name}) > 0", "5m",
        "The vLLM of {{ $labels.instance }} does not export {{ $value | printf `%.0f` }} metrics that the agent needs",
        {f"{listed.METRICS_MISSING.name}{_AGENT}": "2x40"}, {f"{listed.METRICS_MISSING.name}{_AGENT}": "0x40"},
        labels={"pool": "p", "instance": "i"},
    ),
    Alert(
        "BillingFactsLost", "page", f"sum by (namespace) (increase({listed.BILLS_DROPPED.name}[1h])) > 0", "0m",
        "Billing events were dropped: the bill in ClickHouse is incomplete",
        {listed.BILLS_DROPPED.name: "0x12 1x40"}, {listed.BILLS_DROPPED.name: "0x40"},
    ),
    Alert(
        "BudgetVelocityTrip", "ticket",
        f'sum by (namespace) (increase({listed.BUDGET_EVENTS.name}{{event="velocity_trip"}}[15m])) > 0', "0m",
        "A tenant has used its budget of an hour; its requests are refused until the hour ends",
        {f'{listed.BUDGET_EVENTS.name}{{event="velocity_trip",budget="tenant_hour"}}': "0x12 1x40"},
        {f'{listed.BUDGET_EVENTS.name}{{event="budget_warning",budget="tenant_hour"}}': "0x12 1x40"},
    ),
    Alert(
        "BillsAtRisk", "page", f"max by (pool, instance) ({listed.BILLS_AT_RISK.name}) == 1", "1m",
        "The agent {{ $labels.instance }} of pool {{ $labels.pool }} can neither deliver nor spool bills",
        {f"{listed.BILLS_AT_RISK.name}{_AGENT}": "0x10 1x40"}, {f"{listed.BILLS_AT_RISK.name}{_AGENT}": "0x40"},
        labels={"pool": "p", "instance": "i"},
    ),
    Alert(
        "UsageDisagrees", "ticket", f"max by (namespace) ({listed.USAGE_DISAGREEMENTS.name}) > 0", "0m",
        "The last reconciliation found hours whose settled and billed usage differ",
        {listed.USAGE_DISAGREEMENTS.name: "0x10 2x40"}, {listed.USAGE_DISAGREEMENTS.name: "0x40"},
    ),
    Alert(
        "ReconciliationMissed", "ticket",
        # Controllers may restart each day, and who has reconciled may be gone. No night is missed in the first 28 hours
        f"time() - max by (job, namespace) (max_over_time({listed.RECONCILED_AT.name}[2d])) > 100000 "
        f"and on (job, namespace) max by (job, namespace) (max_over_time({listed.RECONCILED_AGE.name}[1h] offset 28h)) "
        "> 0", "5m",
        "Usage was not reconciled for more than a day",
        {f'{listed.RECONCILED_AT.name}{{instance="a"}}': "0x1440",
         f'{listed.RECONCILED_AGE.name}{{instance="a"}}': "0+60x1440",
         f'{listed.RECONCILED_AT.name}{{instance="b"}}': "_x1440 0x600",
         f'{listed.RECONCILED_AGE.name}{{instance="b"}}': "_x1440 0+60x600"},
        {f'{listed.RECONCILED_AT.name}{{instance="a"}}': "0x190 11400x1250",
         f'{listed.RECONCILED_AGE.name}{{instance="a"}}': "0+60x190 0+60x1250",
         f'{listed.RECONCILED_AT.name}{{instance="b"}}': "_x1440 0x600",
         f'{listed.RECONCILED_AGE.name}{{instance="b"}}': "_x1440 0+60x600",
         f'{listed.RECONCILED_AT.name}{{namespace="without"}}': "0x2000",
         f'{listed.RECONCILED_AGE.name}{{namespace="without"}}': "0x2000"},
        "29h",
    ),
    Alert(
        "EventsNotDelivered", "ticket",
        f"max by (instance) ({listed.EVENTS_AWAY.name}) == 1 or max by (instance) ({listed.SPOOL_OLDEST.name}) > 300",
        "3m", "Events of {{ $labels.instance }} are not delivered; they wait in memory or in the disk spool",
        {f'{listed.SPOOL_OLDEST.name}{{instance="i"}}': "0+60x40"},
        {f'{listed.EVENTS_AWAY.name}{{instance="i"}}': "0 1 0x40"}, labels={"instance": "i"},
    ),
    Alert(
        "EventsRoomShort", "page", f"max by (instance) ({listed.EVENTS_ROOM.name}) > 0.5", "0m",
        "The memory or spool of {{ $labels.instance }} for undelivered events is half full",
        {f'{listed.EVENTS_ROOM.name}{{instance="i"}}': "0+0.1x40"},
        {f'{listed.EVENTS_ROOM.name}{{instance="i"}}': "0.3x40"}, labels={"instance": "i"},
    ),
    Alert(
        "ModerationFails", "ticket",
        f'sum by (where) (rate({listed.MODERATION_CHECKS.name}{{outcome="failed"}}[5m])) > '
        f"0.05 * sum by (where) (rate({listed.MODERATION_CHECKS.name}[5m]))", "5m",
        "The moderation endpoint fails for more than 5 % of the checks of {{ $labels.where }}s",
        {f'{listed.MODERATION_CHECKS.name}{{where="prompt",outcome="failed"}}': "0+10x40",
         f'{listed.MODERATION_CHECKS.name}{{where="prompt",outcome="passed"}}': "0+100x40"},
        {f'{listed.MODERATION_CHECKS.name}{{where="prompt",outcome="failed"}}': "0+1x40",
         f'{listed.MODERATION_CHECKS.name}{{where="prompt",outcome="passed"}}': "0+100x40"},
        labels={"where": "prompt"},
    ),
    Alert(
        "ResponsesNotStored", "ticket",
        f'sum by (job, namespace) (increase({listed.RESPONSES_STORED.name}{{outcome="deferred"}}[5m])) > 0', "10m",
        "The database does not take stored responses; Redis keeps each for a day",
        {f'{listed.RESPONSES_STORED.name}{{outcome="deferred"}}': "0+2x60"},
        {f'{listed.RESPONSES_STORED.name}{{outcome="deferred"}}': "0 2x60"},
    ),
    Alert(
        "ResponsesBacklog", "ticket", f"max by (job, namespace) ({listed.RESPONSES_UNSAVED.name}) > 5000", "10m",
        "{{ $value | printf `%.0f` }} stored responses wait for the database; Redis keeps each for a day",
        {listed.RESPONSES_UNSAVED.name: "0+1000x60"}, {listed.RESPONSES_UNSAVED.name: "6000 300x60"},
    ),
    Alert(
        # The first gateway after a long absence of all counts what was lost before its first scrape
        "ResponsesLost", "ticket",
        _rises(f'{listed.RESPONSES_STORED.name}{{outcome=~"no_stream|unreadable"}}', "outcome"),
        "0m", "Stored responses were dropped, because their stream or their record was gone: {{ $labels.outcome }}",
        {f'{listed.RESPONSES_STORED.name}{{outcome="no_stream"}}': "_x10 1x40"},
        {f'{listed.RESPONSES_STORED.name}{{outcome="too_large"}}': "0x10 1x40",
         f'{listed.RESPONSES_STORED.name}{{outcome="no_stream"}}': "3x60"},
        labels={"outcome": "no_stream"},
    ),
    Alert(
        "StructuredRepliesInvalid", "ticket", _share_of_replies("invalid", 0.2), "15m",
        "More than 20 % of the structured replies of pool {{ $labels.pool }} do not fit their JSON schema",
        _replies("invalid", 30), _replies("invalid", 10), "40m", {"pool": "p"},
    ),
    Alert(
        "StructuredRepliesUnchecked", "ticket", _share_of_replies("unchecked", 0.05), "15m",
        "More than 5 % of the structured replies of pool {{ $labels.pool }} could not be checked",
        _replies("unchecked", 10), _replies("unchecked", 3), "40m", {"pool": "p"},
    ),
    Alert(
        "InputsWait", "ticket", _inputs_late(0.1), "15m",
        "More than 10 % of the inputs to running streams of pool {{ $labels.pool }} wait longer than a second",
        _inputs_waited(20), _inputs_waited(5), "40m", {"pool": "p"},
    ),
    Alert(
        "InputsRefused", "ticket",
        f'sum by (pool) (rate({listed.INPUTS_ANSWERED.name}{{result="refused"}}[15m])) > '
        f"0.25 * sum by (pool) (rate({listed.INPUTS_ANSWERED.name}[15m]))", "15m",
        "Replicas of pool {{ $labels.pool }} refuse more than 25 % of the inputs to running streams",
        _inputs_refused(40), _inputs_refused(10), "40m", {"pool": "p"},
    ),
    Alert(
        "DialectFails", "page",
        f'sum by (dialect) (rate({listed.READS_BY_DIALECT.name}{{fault="platform"}}[5m])) > '
        f"0.05 * sum by (dialect) (rate({listed.READS_BY_DIALECT.name}[5m])) and on (dialect) "
        f'sum by (dialect) (increase({listed.READS_BY_DIALECT.name}{{fault="platform"}}[1h])) >= {BAD_MIN}', "5m",
        "More than 5 % of the readers in dialect {{ $labels.dialect }} get an error of the platform",
        _readers(10), _readers(2), labels={"dialect": "openai.responses"},
    ),
    Alert(
        "FramesPassedOver", "ticket", f"sum by (job, namespace) (increase({listed.FRAMES_PASSED_OVER.name}[10m])) > 0",
        "1h", "For an hour processes have passed over frames of a newer release",
        {listed.FRAMES_PASSED_OVER.name: "0+5x100"}, {listed.FRAMES_PASSED_OVER.name: "0+5x40 200x60"}, "90m",
    ),
    Alert(
        "TelemetryDlq", "ticket", _rises(listed.POISON.name, "topic"), "0m",
        "Records of {{ $labels.topic }} that cannot be decoded were put into the dead letters",
        {f"{listed.POISON.name}{_PART}": "_x10 1x40"}, {f"{listed.POISON.name}{_PART}": "1x40"},
        labels={"topic": "t"},
    ),
    Alert(
        # A consumer that starts counts them before its first scrape
        "TelemetryExpired", "page", _rises(listed.EXPIRED.name, "topic"), "0m",
        "Kafka's retention has deleted events of {{ $labels.topic }} that were not inserted, bills among them",
        {f"{listed.EXPIRED.name}{_PART}": "_x10 700x40"}, {f"{listed.EXPIRED.name}{_PART}": "700x40"},
        labels={"topic": "t"},
    ),
    Alert(
        "TelemetryLag", "ticket", f"sum by (topic) ({listed.LAG.name}) > 100000", "5m",
        "The telemetry consumer is {{ $value | printf `%.0f` }} records behind in {{ $labels.topic }}",
        {f"{listed.LAG.name}{_PART}": "0+20000x40"}, {f"{listed.LAG.name}{_PART}": "500x40"}, labels={"topic": "t"},
    ),
    Alert(
        "NoTelemetryConsumer", "ticket",
        f"sum by (topic) (max_over_time({listed.LAG.name}[1d])) unless on (topic) sum by (topic) ({listed.LAG.name})",
        "10m", "No telemetry consumer reads {{ $labels.topic }}: bills and traces do not reach ClickHouse",
        {f"{listed.LAG.name}{_PART}": "5x10"}, {f"{listed.LAG.name}{_PART}": "5x10 _x3 5x60"}, "40m",
        labels={"topic": "t"},
    ),
    Alert(
        # Processes without telemetry (STREAM_GW_EVENTS=off) send nothing
        "EventsNotRead", "ticket",
        f"sum by (namespace) ({listed.EVENTS_SENT.name}) > 0 "
        f"unless on (namespace) sum by (namespace) (max_over_time({listed.LAG.name}[1d]))", "1h",
        "Events are sent and no telemetry consumer has read any for a day: bills and traces do not reach ClickHouse",
        {f'{listed.EVENTS_SENT.name}{{instance="i",kind="attempt"}}': "0x5 1+1x100"},
        {f'{listed.EVENTS_SENT.name}{{instance="i",kind="attempt"}}': "0+1x100",
         f'{listed.LAG.name}{_PART}': "_x50 5 _x60",
         f'{listed.EVENTS_SENT.name}{{namespace="without",instance="i",kind="attempt"}}': "0x100"}, "80m",
    ),
    Alert(
        "TelemetryStuck", "page", f"max by (topic, partition) ({listed.PENDING.name}) > 120", "1m",
        "The telemetry consumer has failed to insert a block of {{ $labels.topic }} for "
        "{{ $value | humanizeDuration }}",
        {f"{listed.PENDING.name}{_PART}": "0+60x40"}, {f"{listed.PENDING.name}{_PART}": "3x40"},
        labels={"topic": "t", "partition": "0"},
    ),
)  # fmt: skip


CASES: tuple[Case, ...] = (
    # Half of the first tokens come within 1.5 s and all within the pool's own 3 s
    Case("TtftBurnsFast", {**_failing("ttft", 50), **_own("ttft", 3.0, True),
                           f'{listed.TTFT.name}_bucket{{pool="p",le="3.0"}}': "0+10000x200"}, False, "75m"),
    Case("TtftBurnsFast", {**_failing("ttft", 0), **_own("ttft", 0.5, True),
                           f'{listed.TTFT.name}_bucket{{pool="p",le="0.5"}}': "0+5000x200"}, True, "75m"),
    # The same objective of another install's pool
    Case("TtftBurnsFast", {**_failing("ttft", 50), f'{listed.TTFT.name}_bucket{{pool="p",le="3.0"}}': "0+10000x200",
                           f'{OBJECTIVE}{{namespace="other",pool="p",slo="ttft",le="3.0"}}': "3x200"}, True, "75m"),
    Case("AvailabilityBurnsFast", {**_failing("availability", 1), **_own("availability", 0.99)}, False, "75m"),
    Case("AvailabilityBurnsFast", {**_failing("availability", 0.2), **_own("availability", 0.9999)}, True, "75m"),
    Case("NoReplicaReady", {f"{listed.POOL_LOST.name}{_POOL}": "_x10 1x40", _READY: "1x9"}, True,
         why="when the last replica of a pool without a declaration has died"),
    Case("NoReplicaReady", {_READY: "1x5 0x40", _DRAINING: "0x5 1x40"}, False,
         why="while a pool without a declaration is taken down"),
    Case("NoReplicaReady", {_READY: "1x5 0x40", _DRAINING: "0x5 1x40", f"{listed.DESIRED.name}{_POOL}": "1x50"}, True,
         why="while the only replica of a declared pool drains"),
    Case("NoReplicaReady", {f"{listed.POOL_LOST.name}{_POOL}": "1x40", _READY: "_x10 1x40"}, False,
         why="when another replica serves the pool"),
    Case("PoolBacklog", {_BACKLOG: "1.5x40", **_own("backlog", 2)}, False),
    Case("PoolBacklog", {_BACKLOG: "0.3x40", **_own("backlog", 0.2)}, True),
    Case("KvHitRateLow", {_HITS: "0+30x100", _QUERIES: "0+260x100", _ATTEMPTS: "0+10x100",
                          **_own("kv_hit_rate", 0.2)}, False, "60m"),
    Case("KvHitRateLow", {_HITS: "0+80x100", _QUERIES: "0+260x100", _ATTEMPTS: "0+10x100",
                          **_own("kv_hit_rate", 0.9)}, True, "60m"),
    Case("KvHitRateLow", {_HITS: "0x100", _QUERIES: "0+120x100", _ATTEMPTS: "0+10x100"}, False, "60m",
         "when prompts are shorter than a block"),
    Case("KvHitRateLow", {_HITS: "0x100", _QUERIES: "0+234x10 2340x60", _ATTEMPTS: "0+9x10 90x60"}, False, "30m",
         "after the first prompts of a quiet pool"),
    Case("GpuUtilizationLow", {_GPU: "0.2x100", **_own("gpu_min", 0.1)}, False, "60m"),
    Case("GpuUtilizationHigh", {_GPU: "0.9x100", **_own("gpu_max", 0.8)}, True, "60m"),
    *(
        Case(name, _at_night(bad), fires, "74m", f"when {bad} of the night's requests are bad")
        for name in ("TtftBurnsFast", "AvailabilityBurnsFast")
        for bad, fires in ((1, False), (6, True))
    ),
)  # fmt: skip


def recording() -> dict[str, Any]:
    rules = [
        {"record": error_ratio(window), "expr": by_install(objective.bad_in(window)), "labels": {"slo": objective.slo}}
        for objective in OBJECTIVES
        for window in WINDOWS
    ]
    return {"groups": [{"name": "stream-gw objectives", "rules": rules}]}


def alerting() -> dict[str, Any]:
    rules = [
        {
            "alert": alert.name,
            "expr": by_install(alert.expr),
            "for": alert.wait,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "runbook": f"{RUNBOOK}#{alert.anchor}"},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "stream-gw", "rules": rules}]}


def cases() -> dict[str, dict[str, Any]]:
    """Input of ``promtool test rules``: the contents of its files, by name."""
    tests = []
    for alert in ALERTS:
        tests.append(_case(alert, f"{alert.name} fires", alert.fires, alert.at, True))
        tests.append(_case(alert, f"{alert.name} is quiet", alert.quiet, alert.at, False))
    by_name = {alert.name: alert for alert in ALERTS}
    for case in CASES:
        name = f"{case.alert} {'fires' if case.fires else 'is quiet'} {case.why}"
        tests.append(_case(by_name[case.alert], name, case.series, case.at, case.fires))
    # Each evaluation computes all rules: once a minute, they took a minute of CPU
    files: dict[str, list[dict[str, Any]]] = {interval: [] for interval in _FILES}
    for test in tests:
        files[_interval(test["promql_expr_test"][0]["eval_time"])].append(test)
    return {
        _FILES[interval]: {
            "rule_files": ["recording.yaml", "alerts.yaml"], "evaluation_interval": interval, "tests": some,
        }
        for interval, some in files.items()
    }  # fmt: skip


_FILES = {"1m": "tests-minutes.yaml", "2m": "tests.yaml", "3m": "tests-hours.yaml", "15m": "tests-days.yaml"}
"""Test files by the interval at which they evaluate the rules."""


def _interval(at: str) -> str:
    """Return the evaluation interval of a case that asks ``at`` this time. The time must be a multiple of it."""
    if at.endswith("h"):
        return "15m"
    minutes = int(at.removesuffix("m"))
    if minutes >= 60:
        return "3m" if minutes % 3 == 0 else "1m"
    return "2m" if minutes % 2 == 0 else "1m"


def _case(alert: Alert, name: str, series: Series, at: str, fires: bool) -> dict[str, Any]:
    # The series ALERTS is asked, so that nothing depends on the summary's figures
    any_firing = f'count(ALERTS{{alertname="{alert.name}",alertstate="firing"}}) or vector(0)'
    labels = "".join(f',{label}="{value}"' for label, value in alert.labels.items())
    firing = f'count(ALERTS{{alertname="{alert.name}",alertstate="firing",severity="{alert.severity}"{labels}}})'
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [
            {
                "expr": firing if fires else any_firing,
                "eval_time": at,
                "exp_samples": [{"labels": "{}", "value": 1 if fires else 0}],
            }
        ],
    }


def files() -> dict[str, str]:
    """Contents by file name."""
    made = {"recording.yaml": recording(), "alerts.yaml": alerting(), **cases()}
    return {name: _HEADER + "\n".join(_yaml(value)) + "\n" for name, value in made.items()}


def _yaml(value: Any, indent: str = "") -> list[str]:
    """YAML of maps, lists and scalars; scalars are written as JSON, which is YAML."""
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
