"""Error ratios and error budgets of the objectives."""

from __future__ import annotations

from dashboards.build import Board, Panel, Prom
from dashboards.objectives import DAYS, OBJECTIVES, error_ratio

SLO = Board(
    "stream-gw-slo",
    "stream-gw: objectives",
    [
        panel
        for objective in OBJECTIVES
        for panel in (
            Panel(
                f"{objective.slo}: share that misses the objective",
                [
                    Prom(f'{error_ratio(window)}{{slo="{objective.slo}",pool=~"$pool"}}', f"{{{{pool}}}} {window}")
                    for window in ("5m", "1h", "6h")
                ],
                "percentunit",
                about=f"Default objective: {objective.about}, for {objective.target * 100:g} % of the events.",
            ),
            Panel(
                f"{objective.slo}: burn rate",
                [
                    Prom(
                        f'{error_ratio("1h")}{{slo="{objective.slo}",pool=~"$pool"}} / {objective.budget:g}',
                        "{{pool}} 1h",
                    ),
                    Prom(
                        f'{error_ratio("6h")}{{slo="{objective.slo}",pool=~"$pool"}} / {objective.budget:g}',
                        "{{pool}} 6h",
                    ),
                ],
                about="1: the error budget is used at the allowed rate. 14.4 over 1 h or 6 over 6 h pages.",
            ),
            Panel(
                f"{objective.slo}: error budget left",
                [
                    Prom(
                        f'1 - avg_over_time({error_ratio("1h")}{{slo="{objective.slo}",pool=~"$pool"}}[{DAYS}d]) '
                        f"/ {objective.budget:g}",
                        "{{pool}}",
                    )
                ],
                "percentunit",
                "number",
                f"Over {DAYS} days; each hour counts the same.",
            ),
        )
    ],
    by_pool=True,
)
