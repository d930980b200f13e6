"""A study as one HTML page without scripts or external resources, for light and dark mode. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from inference.simulate.elastic import Step
from inference.simulate.output.document import document, figure, table_html
from inference.simulate.output.plot import Line, Plot, clock
from inference.simulate.output.report import format_seconds, summary
from inference.simulate.study import Outcome, Study

_REASONS_MAX = 500
_POLICY_COLOURS = ("c0", "c1", "c2", "c3", "c4", "c5")


def page(title: str, facts: Sequence[str], study: Study, step: Step | None, outcomes: Sequence[Outcome]) -> str:
    """Return the page. ``facts``: sentences about the simulated setup."""
    colours = [_POLICY_COLOURS[i % len(_POLICY_COLOURS)] for i in range(len(outcomes))]
    plots = _Plots(study, step, outcomes)
    sections = [
        f'<h2>Traffic and comparison of policies</h2><div class="plots">{plots.comparison(colours)}</div>',
        *(
            f'<h2>{escape(o.policy)}</h2><div class="plots">{plots.one_policy(o)}</div>{_reasons_html(o)}'
            for o in outcomes
        ),
    ]
    return document(title, facts, table_html(summary(outcomes), colours) + "".join(sections))


def _reasons_html(outcome: Outcome) -> str:
    """Collapsible list of the policy's decisions with their reasons; empty without decisions."""
    if not outcome.reasons:
        return ""
    shown = "".join(f"<li><b>{clock(at_s)}</b>{escape(reason)}</li>" for at_s, reason in outcome.reasons[:_REASONS_MAX])
    more = len(outcome.reasons) - _REASONS_MAX
    shown += f"<li>and {more} more</li>" if more > 0 else ""
    return f"<details><summary>Decisions and reasons ({len(outcome.reasons)})</summary><ol>{shown}</ol></details>"


class _Plots:
    """Plots of all policies, on the same scales."""

    def __init__(self, study: Study, step: Step | None, outcomes: Sequence[Outcome]) -> None:
        self._study, self._outcomes = study, outcomes
        bins = [one for outcome in outcomes for one in outcome.bins]
        first = max((outcome.bins for outcome in outcomes), key=len)
        self._bin_s = first[1].at_s if len(first) > 1 else 1.0
        self._end_s = len(first) * self._bin_s
        self._shaded_s = (step.at_s, step.at_s + step.for_s) if step is not None else None
        self._arrived_most = max(one.arrived for one in bins) / self._bin_s
        self._replicas_most = max(
            max(max(one.ready + one.resting + one.warm + one.coming, one.needed) for one in bins), 1.0
        )
        self._waiting_most = max(max(one.waiting for one in bins), 5.0)
        times = [s for one in bins for s in (one.ttft_p50_s, one.ttft_p99_s) if math.isfinite(s) and s > 0]
        least, most = min(times, default=0.1), max([*times, study.objective.ttft_s], default=1.0)
        self._ttft_least = 10.0 ** math.floor(math.log10(least))
        self._ttft_most = max(most, 10 * self._ttft_least) * 1.3

    def comparison(self, colours: Sequence[str]) -> str:
        """Plots with one line for each policy. ``colours``: one for each policy."""
        first = max((outcome.bins for outcome in self._outcomes), key=len)
        arrived = Line("arrivals", "c0", [one.arrived / self._bin_s for one in first])
        replicas = [
            Line(o.policy, colour, [one.ready + one.resting + one.warm + one.coming for one in o.bins])
            for o, colour in zip(self._outcomes, colours, strict=True)
        ]
        met = [
            Line(o.policy, colour, [one.met / one.arrived if one.arrived else math.nan for one in o.bins])
            for o, colour in zip(self._outcomes, colours, strict=True)
        ]
        slow = [
            Line(o.policy, colour, [one.ttft_p99_s for one in o.bins])
            for o, colour in zip(self._outcomes, colours, strict=True)
        ]
        return (
            self._figure_html("Requests a second", _format_number, self._arrived_most, lines=[arrived], legend=False)
            + self._figure_html("Replicas in total", _format_number, self._replicas_most, lines=replicas)
            + self._figure_html("Served within the objective", _format_share, 1.0, lines=met)
            + self._ttft("TTFT, 99th percentile", slow)
        )

    def one_policy(self, outcome: Outcome) -> str:
        """Plots of one policy's run."""
        bins = outcome.bins
        deaths = [death.at_s for death in outcome.deaths]
        return (
            self._figure_html(
                "Replicas",
                _format_number,
                self._replicas_most,
                areas=[
                    Line("ready", "ready", [one.ready for one in bins]),
                    Line("resting", "resting", [one.resting for one in bins]),
                    Line("warm", "warm", [one.warm for one in bins]),
                    Line("starting", "coming", [one.coming for one in bins]),
                ],
                lines=[Line("needed", "needed", [one.needed for one in bins], dashed=True)],
                deaths=deaths,
            )
            + self._ttft(
                "Time to first token",
                [
                    Line("p50", "p50", [one.ttft_p50_s for one in bins]),
                    Line("p99", "p99", [one.ttft_p99_s for one in bins]),
                ],
                deaths,
            )
            + self._figure_html(
                "Requests in the queue",
                _format_number,
                self._waiting_most,
                lines=[Line("waiting", "c2", [one.waiting for one in bins])],
                deaths=deaths,
                legend=False,
            )
            + self._figure_html(
                "Slots in use at ready replicas",
                _format_share,
                1.0,
                lines=[Line("slots in use", "c0", [one.utilisation for one in bins])],
                deaths=deaths,
                legend=False,
            )
        )

    def _ttft(self, title: str, lines: Sequence[Line], deaths: Sequence[float] = ()) -> str:
        """Plot of TTFT on a logarithmic scale, with the objective."""
        return self._figure_html(
            title, _format_time, self._ttft_most, lines=lines, deaths=deaths, least=self._ttft_least,
            rule=self._study.objective.ttft_s,
        )  # fmt: skip

    def _figure_html(
        self,
        title: str,
        says: Callable[[float], str],
        most: float,
        *,
        areas: Sequence[Line] = (),
        lines: Sequence[Line] = (),
        deaths: Sequence[float] = (),
        least: float = 0.0,
        rule: float | None = None,
        legend: bool = True,
    ) -> str:
        """One plot with its title and legend as HTML. ``says`` formats a value; ``rule`` draws a horizontal line."""
        top = most if least or most == 1.0 else most * 1.06
        plot = Plot(title, says, self._bin_s, self._end_s, top, areas, lines, least, rule, deaths, self._shaded_s)
        return figure(plot, legend=legend)


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.1f}"


def _format_time(value: float) -> str:
    return f"{value:.0f} s" if value >= 1 and value == round(value) else format_seconds(value)


def _format_share(value: float) -> str:
    return f"{value:.0%}"
