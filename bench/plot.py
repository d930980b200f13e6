"""Draws what a change gave: figures of ``bench.tokens`` before and after, as one SVG.

    python -m bench.plot --before FILE ... --after FILE ... --out docs/performance.svg [--rows]

Each FILE is the ``--json`` of one run; let the runs before and after take turns. A bar is the median, its line the
range. ``--rows`` prints the same figures as a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from bench.harness import Figure, table

CPU = ("gateway_us", "redis_us", "agent_us")


@dataclass(frozen=True)
class Row:
    """``whats`` are added. ``over``: who made the yardstick of a ratio in the same run; empty: no ratio."""

    label: str
    unit: str
    who: str
    phase: str
    whats: tuple[str, ...]
    scale: float = 1.0
    over: str = ""


ROWS = (
    Row("Delay added, out of step, p50", "ms", "sse", "out of step", ("added_delay_us_p50",), 1e-3),
    Row("Delay added, out of step, p99", "ms", "sse", "out of step", ("added_delay_us_p99",), 1e-3),
    Row("Delay added, in step, p50", "ms", "sse", "in step", ("added_delay_us_p50",), 1e-3),
    Row("Delay added, in step, p99", "ms", "sse", "in step", ("added_delay_us_p99",), 1e-3),
    Row("ITL p99 added, out of step", "ms", "sse", "out of step", ("added_itl_us_p99",), 1e-3),
    Row("TTFT added, 40 streams begin in a second, p50", "ms", "sse", "arrivals", ("added_ttft_us_p50",), 1e-3),
    Row("TTFT added, 40 streams begin in a second, p99", "ms", "sse", "arrivals", ("added_ttft_us_p99",), 1e-3),
    Row("TTFT added, 500 streams begin in a second, p50", "ms", "sse", "out of step", ("added_ttft_us_p50",), 1e-3),
    Row("TTFT added, 500 streams begin in a second, p99", "ms", "sse", "out of step", ("added_ttft_us_p99",), 1e-3),
    Row("Gateway a token, in step", "x nginx", "sse", "in step", CPU[:1], over="nginx"),
    Row("Gateway a token, out of step", "x nginx", "sse", "out of step", CPU[:1], over="nginx"),
    Row("Gateway, Redis and agent a token, out of step", "x nginx", "sse", "out of step", CPU, over="nginx"),
    Row("Agent a token, in step", "us", "sse", "in step", CPU[2:]),
    Row("Agent a token, out of step", "us", "sse", "out of step", CPU[2:]),
    Row("Redis a token, out of step", "us", "sse", "out of step", CPU[1:2]),
    Row("Tokens a second, closed loop", "k", "sse", "closed loop", ("tokens_per_s",), 1e-3),
    Row("Gateway a short request", "ms", "sse", "short", ("gateway_ms",)),
    Row("Agent a short request", "ms", "sse", "short", ("agent_ms",)),
    Row("Redis a short request", "ms", "sse", "short", ("redis_ms",)),
)

WIDTH, LABEL, BAR, STEP, HEAD = 900, 330, 380, 40, 46
COLOURS = ("#9aa5b1", "#1f6feb")


def figure(row: Row, runs: Sequence[Path]) -> Figure:
    """Read a row's figure from each run."""
    values = []
    for run in runs:
        samples = json.loads(run.read_text())["samples"]

        def value(who: str, what: str, samples: dict[str, list[float]] = samples) -> float:
            return Figure(tuple(samples[f"{who} / {row.phase} / {what}"])).median

        total = sum(value(row.who, what) for what in row.whats) * row.scale
        values.append(total / value(row.over, row.whats[0]) if row.over else total)
    return Figure(tuple(values))


def draw(rows: Sequence[tuple[Row, Figure, Figure]], count: int) -> str:
    """Draw two bars a row, each row on a scale of its own."""
    height = HEAD + STEP * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="24" font-size="15" fill="#1b1f24">Before (grey) and after (blue): median and range of '
        f"{count} runs that took turns</text>",
    ]
    for at, (row, before, after) in enumerate(rows):
        top = HEAD + at * STEP
        most = max(*before.values, *after.values, 1e-9)
        parts.append(f'<text x="10" y="{top + 20}" fill="#1b1f24">{escape(row.label)}</text>')
        for number, (shown, colour) in enumerate(zip((before, after), COLOURS, strict=True)):
            y = top + 3 + number * 15
            low, high = (LABEL + BAR * max(end, 0) / most for end in (min(shown.values), max(shown.values)))
            length = BAR * max(shown.median, 0) / most
            parts += [
                f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="12" fill="{colour}"/>',
                f'<path d="M{low:.1f} {y + 6}H{high:.1f}" stroke="#1b1f24" stroke-width="1.5"/>',
                f'<text x="{LABEL + BAR + 10}" y="{y + 11}" font-size="12" fill="#1b1f24">'
                f"{escape(shown.spell(2))} {escape(row.unit)}</text>",
            ]
    return "\n".join([*parts, "</svg>", ""])


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.plot", description=__doc__, formatter_class=raw)
    parser.add_argument("--before", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--after", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rows", action="store_true", help="print the figures as a table")
    args = parser.parse_args(argv)
    rows = [(row, figure(row, args.before), figure(row, args.after)) for row in ROWS]
    args.out.write_text(draw(rows, len(args.after)))
    if args.rows:
        cells = [(row.label, row.unit, before.spell(2), after.spell(2)) for row, before, after in rows]
        print(table(("figure", "unit", "before", "after"), cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
