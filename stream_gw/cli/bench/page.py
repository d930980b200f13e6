"""A report as one HTML page without scripts or external resources. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from inference.simulate.output.document import document, figure, table_html
from inference.simulate.output.plot import Line, Plot
from stream_gw.cli.bench import text
from stream_gw.cli.bench.results import Report


def page(report: Report) -> str:
    notes = [f"WARNING: {doubt}" for doubt in text.warnings(report)] + text.disturbances(report) + text.errors(report)
    body = (
        table_html(text.table(report))
        + "".join(f"<p>{escape(note)}</p>" for note in notes)
        + f'<h2>Over time</h2><div class="plots">{_plots(report)}</div>'
        + f"<details><summary>The first prompt</summary><p>{escape(report.first_prompt)}</p></details>"
        + f"<details><summary>The command</summary><p>{escape(report.command)}</p></details>"
    )
    return document(f"Benchmark of {report.target.model}, {report.started_at}", text.facts(report), body)


def _plots(report: Report) -> str:
    bins, bin_s = report.bins, report.bin_s
    rate = [one.began / bin_s for one in bins]
    pieces = [one.pieces / bin_s for one in bins]
    ttft = [
        _line("p50", "p50", [one.ttft_p50_s for one in bins]),
        _line("p99", "p99", [one.ttft_p99_s for one in bins]),
    ]
    gap = [_line("p99", "p99", [one.gap_p99_s for one in bins])]
    began = [Line("began", "c0", rate), Line("failed", "bad", [one.failed / bin_s for one in bins])]
    return "".join(
        [
            _plot(report, "Requests a second", _number, began),
            _plot(report, "Requests that run", _number, [Line("running", "c2", [float(one.running) for one in bins])]),
            _plot(report, "Pieces of text a second", _number, [Line("pieces", "c0", pieces)]),
            _plot(report, "Time to first token", _seconds, ttft, logarithmic=True),
            _plot(report, "Gap between pieces, 99th percentile", _seconds, gap, logarithmic=True),
        ]
    )


def _line(label: str, colour: str, values: Sequence[float | None]) -> Line:
    return Line(label, colour, [math.nan if value is None else value for value in values])


def _plot(
    report: Report, title: str, says: Callable[[float], str], lines: Sequence[Line], *, logarithmic: bool = False
) -> str:
    values = [value for line in lines for value in line.values if not math.isnan(value)]
    end_s = max(len(report.bins), 1) * report.bin_s
    top, least = max([*values, 1e-9 if logarithmic else 1.0]) * 1.1, 0.0
    if logarithmic:
        least = 10.0 ** math.floor(math.log10(max(min(values, default=0.001), 1e-5)))
        top = max(top, least * 10)
    return figure(Plot(title, says, report.bin_s, end_s, top, lines=lines, least=least), legend=len(lines) > 1)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.1f}"


def _seconds(value: float) -> str:
    """Format a time for an axis, without digits that a round value does not need."""
    return f"{value * 1000:g} ms" if value < 1 and round(value * 1000, 3) % 1 == 0 else text.format_time(value)
