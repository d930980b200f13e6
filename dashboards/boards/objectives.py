"""Error ratios and error budgets of the objectives."""

from __future__ import annotations

from dashboards.build import Board, Panel, Prom
from dashboards.objectives import DAYS, OBJECTIVES, Objective, by_install, error_ratio


def _ratio(objective: Objective, window: str) -> str:
    return f'{error_ratio(window)}{{slo="{objective.slo}",pool=~"$pool"}}'


def _mean_ratio(objective: Objective) -> str:
    return f"avg_over_time({_ratio(objective, '1h')}[{DAYS}d])"


SLO = Board(
    "stream-gw-slo",
    "stream-gw: objectives",
    [
        panel
        for objective in OBJECTIVES
        for panel in (
            Panel(
                f"{objective.slo}: share that misses the objective",
                [Prom(_ratio(objective, window), f"{{{{pool}}}} {window}") for window in ("5m", "1h", "6h")],
                "percentunit",
                about=f"Default objective: {objective.about}, for {objective.target * 100:g} % of the events.",
            ),
            Panel(
                f"{objective.slo}: burn rate",
                [
                    Prom(by_install(objective.burn(_ratio(objective, window))), f"{{{{pool}}}} {window}")
                    for window in ("1h", "6h")
                ],
                about="1: the error budget is used at the allowed rate. 14.4 over 1 h or 6 over 6 h pages.",
            ),
            Panel(
                f"{objective.slo}: error budget left",
                [
                    Prom(by_install(f"1 - {objective.burn(_mean_ratio(objective))}"), "{{pool}}"),
                ],
                "percentunit",
                "number",
                f"Over {DAYS} days; each hour counts the same.",
            ),
        )
    ],
    by_pool=True,
)
