"""The platform's objectives and how Prometheus measures them. Alerts and dashboards are made from this module.

Each objective has a default, and an operator may set another for a pool (``docs/runbook.md``, "Objectives of a model"):
a recording rule then gives the series ``slo_objective{namespace, pool, slo}``, for a latency with the label ``le`` of
its bucket.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from stream_fabric.process import metric_names as listed
from stream_fabric.process.metric_names import ITL, READS, TTFT

DAYS = 30
"""Days over which the error budget is counted."""
OBJECTIVE = "slo_objective"
"""Series of an operator's own objectives."""
TTFT_P50_S, TTFT_P99_S = 0.3, 1.5
ITL_P99_S = 0.049152
"""The histogram's bucket bound next to 50 ms."""
AVAILABILITY = 0.9995
KV_HIT_RATE_MIN = 0.6
KV_BLOCK_TOKENS = 16
"""Tokens of a KV block, vLLM's default on CUDA."""
GPU_UTILIZATION_MIN, GPU_UTILIZATION_MAX = 0.4, 0.95
BACKLOG_S_MAX = 0.5
assert {TTFT_P50_S, TTFT_P99_S} <= set(TTFT.buckets), "only a bucket's bound can be measured"
assert ITL_P99_S in ITL.buckets, "only a bucket's bound can be measured"
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
BAD_MIN = 5
"""Bad requests in the long window of a page."""
_NEW_REQUESTS = 'role=~"created|refused"'


def own(slo: str, by: str = "pool") -> str:
    """PromQL: the objectives that operators set, by pool."""
    return f'max by ({by}) ({OBJECTIVE}{{slo="{slo}"}})'


def beyond(value: str, sign: str, slo: str, default: str) -> str:
    """PromQL: ``value`` (one series a pool) is beyond the pool's own objective, or beyond ``default`` without one."""
    return f"({value} {sign} on (pool) {own(slo)} or ({value} unless on (pool) {own(slo)}) {sign} {default})"


def by_install(expr: str) -> str:
    """The expression with the label ``namespace`` in each aggregation and join.

    Several installs in one Prometheus may have pools of the same name; none of them hides another's failure.
    """
    return re.sub(r"\b(by|on) \((?![^)]*\bnamespace\b)", r"\1 (namespace, ", expr)


class Objective(NamedTuple):
    slo: str
    about: str
    target: float
    bad: str
    """PromQL: share of bad events by pool in a window ``{w}``."""
    events: str
    """Counter of all events."""
    bad_min: int
    """Bad events in the long window below which no page fires: at night one slow request is no outage."""

    @property
    def budget(self) -> float:
        return round(1 - self.target, 6)

    def bad_in(self, window: str) -> str:
        return self.bad.replace("{w}", window)

    def is_enough(self, window: str) -> str:
        """PromQL: pools with at least ``bad_min`` bad events in the window."""
        ratio = f'{error_ratio(window)}{{slo="{self.slo}"}}'
        events = f"sum by (pool) (increase({self.events}[{window}]))"
        return f"max by (pool) ({ratio}) * on (pool) {events} >= {self.bad_min}"

    def burn(self, ratio: str) -> str:
        """PromQL: ``ratio`` (share of bad events by pool and objective) as a multiple of the share that is allowed."""
        default = f"{ratio} / {self.budget:g}"
        if self.slo != "availability":  # a latency's own objective is another bound, of the same share
            return default
        its_own = own(self.slo, "pool, slo")
        return (
            f"({ratio} / on (pool, slo) (1 - {its_own}) or ({ratio} unless on (pool, slo) {its_own}) / {self.budget:g})"
        )


def _slower(name: str, slo: str, bound_s: float) -> str:
    """Share of a histogram above the bound, or above the bound that an operator set for the pool."""
    buckets = f"sum by (pool, le) (rate({name}_bucket[{{w}}]))"
    default = f'sum by (pool, le) (rate({name}_bucket{{le="{bound_s!r}"}}[{{w}}]))'
    within = (
        f'sum by (pool) ({buckets} and on (pool, le) {OBJECTIVE}{{slo="{slo}"}}'
        f' or ({default} unless on (pool) {OBJECTIVE}{{slo="{slo}"}}))'
    )
    # No sample without traffic: 0 / 0 would be NaN, and one NaN makes a mean over 30 days NaN
    return f"1 - {within} / (sum by (pool) (rate({name}_count[{{w}}])) > 0)"


OBJECTIVES = (
    Objective(
        "ttft", f"the first token comes within {TTFT_P99_S:g} s", 0.99, _slower(TTFT.name, "ttft", TTFT_P99_S),
        f"{TTFT.name}_count", BAD_MIN,
    ),
    Objective(
        "ttft_p50", f"the first token comes within {TTFT_P50_S:g} s", 0.5, _slower(TTFT.name, "ttft_p50", TTFT_P50_S),
        f"{TTFT.name}_count", BAD_MIN,
    ),
    Objective(
        "itl", f"the next token comes within {ITL_P99_S * 1000:.0f} ms", 0.99, _slower(ITL.name, "itl", ITL_P99_S),
        f"{ITL.name}_count", 200 * BAD_MIN,  # answers of 200 tokens
    ),
    Objective(
        "availability",
        "a request succeeds, or fails for a reason on the client's side",
        AVAILABILITY,
        f'(sum by (pool) (rate({READS.name}{{{_NEW_REQUESTS},fault="platform"}}[{{w}}]))'
        f" or 0 * sum by (pool) (rate({READS.name}{{{_NEW_REQUESTS}}}[{{w}}])))"
        f" / (sum by (pool) (rate({READS.name}{{{_NEW_REQUESTS}}}[{{w}}])) > 0)",
        f"{READS.name}{{{_NEW_REQUESTS}}}",
        BAD_MIN,
    ),
)  # fmt: skip

KV_HIT_RATE = (
    # Only whole blocks can be found: at most one block of each prompt is not, the whole of a short one
    f"sum by (pool) (rate({listed.PREFIX_HITS.name}[30m])) / (sum by (pool) (rate({listed.PREFIX_QUERIES.name}[30m]))"
    f" - on (pool) {KV_BLOCK_TOKENS} * sum by (pool) (rate({listed.ATTEMPTS.name}[30m])) > 0)"
)
GPU_UTILIZATION = f"avg by (pool) (avg_over_time({listed.GPU_UTILIZATION.name}[15m]))"
BACKLOG = f"max by (pool) ({listed.BACKLOG.name})"


def error_ratio(window: str) -> str:
    """Recorded series of a window, with the labels ``slo``, ``namespace`` and ``pool``."""
    assert window in WINDOWS
    return f"slo_error_ratio_{window}"


class Burn(NamedTuple):
    """A rate of burning the error budget, as a multiple of the allowed rate, over a short and a long window."""

    rate: float
    short: str
    long: str


FAST = (Burn(14.4, "5m", "1h"), Burn(6, "30m", "6h"))
"""2 % of the month's budget in one hour, 5 % in six hours."""
SLOW = (Burn(3, "2h", "1d"), Burn(1, "6h", "3d"))
