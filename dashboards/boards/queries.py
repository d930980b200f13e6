"""PromQL of the boards. Metric names come from the list, so a wrong name is an error in Python."""

from __future__ import annotations

from dashboards.build import Prom
from stream_fabric.process.metric_names import Metric

RATE = "$__rate_interval"


def rate(metric: Metric, by: str = "", where: str = "") -> str:
    summed = f"sum by ({by})" if by else "sum"
    return f"{summed} (rate({metric.name}{where}[{RATE}]))"


def quantile(metric: Metric, share: float, by: str = "", where: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric.name}_bucket{where}[{RATE}])))"


def quantiles(metric: Metric, where: str = "") -> list[Prom]:
    return [
        Prom(quantile(metric, share, "", where), name) for share, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    ]


def highest(metric: Metric, by: str, where: str = "") -> str:
    """The highest value that several processes report of one thing."""
    return f"max by ({by}) ({metric.name}{where})"


IN_POOL = '{pool=~"$pool"}'
THERE = '{pool=~"$pool",state!="draining"}'
"""Draining replicas are left out."""
AGENT = "{{instance}}"
