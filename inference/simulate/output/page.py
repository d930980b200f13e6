"""A study as one HTML page without scripts or external resources, for light and dark mode. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from inference.simulate.elastic import Step
from inference.simulate.output.plot import Line, Plot, clock
from inference.simulate.output.report import format_seconds, summary
from inference.simulate.study import Outcome, Study

_REASONS_MAX = 500
_POLICY_COLOURS = ("c0", "c1", "c2", "c3", "c4", "c5")
_STYLE = """
:root{color-scheme:light dark;--bg:#fbfaf8;--raised:#fff;--line:#e4e0d8;--text:#1f1e1b;--muted:#6b675f;
--shade:#00000010;--ready:#79c3b4;--resting:#c3e4dc;--warm:#e0a030;--coming:#c4beb2;--needed:#1f1e1b;
--good:#1b8573;--bad:#bf3b22;--p50:#1b8573;
--p99:#c2571a;--c0:#1b8573;--c1:#c2571a;--c2:#5b62c4;--c3:#b08900;--c4:#b03a78;--c5:#5c7a8a}
@media(prefers-color-scheme:dark){:root{--bg:#171715;--raised:#20201d;--line:#33322d;--text:#ecebe6;--muted:#a19d93;
--shade:#ffffff12;--ready:#20796b;--resting:#17453e;--warm:#d99a2b;--coming:#57544c;--needed:#ecebe6;
--good:#4cbfaa;--bad:#f0806a;
--p50:#4cbfaa;--p99:#f09a5c;--c0:#4cbfaa;--c1:#f09a5c;--c2:#9aa0ff;--c3:#dcb93c;--c4:#ec7fb5;--c5:#9dbccb}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:28px 24px 48px;background:var(--bg);color:var(--text);
font:15px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
h1{font-size:22px;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:17px;margin:36px 0 10px}
p{margin:0 0 4px;color:var(--muted);max-width:110ch}
.table{overflow-x:auto;margin-top:18px;background:var(--raised);border:1px solid var(--line);border-radius:10px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:9px 14px;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
th{border-top:0;color:var(--muted);font-weight:500;font-size:13px}
th:first-child,td:first-child{text-align:left;font-weight:600}
i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px}
i.stroke{height:0;border-top:2px solid;border-radius:0;width:14px;vertical-align:4px;background:none}
i.dashed{border-top-style:dashed}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(430px,100%),1fr));gap:14px}
figure{margin:0;padding:12px 14px 6px;min-width:0;background:var(--raised);
border:1px solid var(--line);border-radius:10px}
figcaption{font-weight:600;font-size:14px}
figcaption span{font-weight:400;color:var(--muted);font-size:13px;margin-left:12px;white-space:nowrap}
svg{display:block;width:100%;height:auto;margin-top:6px}
svg text{font-size:11px;fill:var(--muted);font-variant-numeric:tabular-nums}
.grid{stroke:var(--line);fill:none}.tick{stroke:var(--muted);fill:none}
.shaded{fill:var(--shade)}.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.over{fill:none;stroke-width:4}
.rule{stroke:var(--muted);stroke-dasharray:2 3;fill:none}
.death{stroke:var(--bad);stroke-dasharray:4 3;fill:none}.cross{stroke:var(--bad);stroke-width:2;fill:none}
.hover{fill:transparent}.hover:hover{fill:var(--shade)}
details{margin-top:12px;color:var(--muted)}summary{cursor:pointer}
details ol{columns:2 420px;column-gap:32px;margin:8px 0 0;padding:0;list-style:none;font-size:13px}
details li{break-inside:avoid;padding:2px 0}details b{color:var(--text);font-weight:500;margin-right:8px}
"""


def page(title: str, facts: Sequence[str], study: Study, step: Step | None, outcomes: Sequence[Outcome]) -> str:
    """Return the page. ``facts``: sentences about the simulated setup."""
    head, *rows = summary(outcomes)
    colours = [_POLICY_COLOURS[i % len(_POLICY_COLOURS)] for i in range(len(outcomes))]
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f'<tr><td><i style="background:var(--{colour})"></i>{escape(row[0])}</td>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row, colour in zip(rows, colours, strict=True)
    )
    plots = _Plots(study, step, outcomes)
    sections = [
        f'<h2>Traffic and comparison of policies</h2><div class="plots">{plots.comparison(colours)}</div>',
        *(
            f'<h2>{escape(o.policy)}</h2><div class="plots">{plots.one_policy(o)}</div>{_reasons_html(o)}'
            for o in outcomes
        ),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        + "".join(f"<p>{escape(fact)}</p>" for fact in facts)
        + f'<div class="table"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
        + "".join(sections)
        + "</body></html>\n"
    )


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
        keys = [f'<span><i style="background:var(--{a.colour})"></i>{escape(a.label)}</span>' for a in areas]
        keys += [
            f'<span><i class="stroke{" dashed" if line.dashed else ""}" style="border-color:var(--{line.colour})"></i>'
            f"{escape(line.label)}</span>"
            for line in lines
        ]
        if any(math.isinf(value) for line in lines for value in line.values):
            keys.append("<span>line at the top: not served</span>")
        if deaths and areas:
            keys.append('<span><i class="stroke dashed" style="border-color:var(--bad)"></i>a replica dies</span>')
        shown = "".join(keys) if legend else ""
        return f"<figure><figcaption>{escape(title)}{shown}</figcaption>{plot.svg()}</figure>"


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.1f}"


def _format_time(value: float) -> str:
    return f"{value:.0f} s" if value >= 1 and value == round(value) else format_seconds(value)


def _format_share(value: float) -> str:
    return f"{value:.0%}"
