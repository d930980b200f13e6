"""A study's outcomes and a capacity's arithmetic as text, CSV and JSON."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from inference.simulate.capacity import Answer
from inference.simulate.hardware import GIB
from inference.simulate.reserve import Reserve
from inference.simulate.study import Bin, Outcome

COLUMNS = 118


def format_seconds(value: float) -> str:
    """Format a duration with its unit; infinite is ``never``."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "never"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def summary(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return the summary table: a header and a row per policy. Columns that are 0 everywhere are left out."""
    columns: list[tuple[str, Sequence[str]]] = [
        ("policy", [o.policy for o in outcomes]),
        ("SLO", [f"{o.slo:.1%}" for o in outcomes]),
        ("interactive SLO", [f"{o.slo_interactive:.1%}" if o.batch else "" for o in outcomes]),
        ("GPU hours", [f"{o.gpu_h:,.1f}" for o in outcomes]),
        ("dollars", [f"{o.dollars:,.2f}" if o.dollars else "" for o in outcomes]),
        ("host GPU hours", [f"{o.host_gpu_h:,.1f}" if o.host_gpu_h else "" for o in outcomes]),
        ("host dollars", [f"{o.host_dollars:,.2f}" if o.host_dollars else "" for o in outcomes]),
        ("batch done", [_format_count(o.batch_done) for o in outcomes]),
        ("host took", [_format_count(o.hosted) for o in outcomes]),
        ("back home", [_format_count(o.went_home) for o in outcomes]),
        ("most replicas", [f"{o.replicas_most}" for o in outcomes]),
        ("TTFT p50", [format_seconds(o.ttft_p50_s) for o in outcomes]),
        ("TTFT p99", [format_seconds(o.ttft_p99_s) for o in outcomes]),
        ("refused", [_format_count(o.refused) for o in outcomes]),
        ("timed out", [_format_count(o.expired) for o in outcomes]),
        ("too large", [_format_count(o.impossible) for o in outcomes]),
        ("rescued", [_format_count(o.rescued) for o in outcomes]),
        ("longest pause", [format_seconds(o.pause_s_max) if o.pause_s_max else "-" for o in outcomes]),
        ("lost", [_format_count(o.lost) for o in outcomes]),
    ]
    always = ("refused", "timed out", *(("rescued", "lost") if any(o.deaths or o.reclaims for o in outcomes) else ()))
    shown = [(head, cells) for head, cells in columns if set(cells) - {"", "-"} or head in always]
    return [[head for head, _ in shown], *([cells[i] or "0" for _, cells in shown] for i in range(len(outcomes)))]


def _format_count(number: int) -> str:
    return f"{number:,}" if number else ""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format a table: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome without its bins, as JSON values. Infinite values become null."""
    found: dict[str, Any] = msgspec.to_builtins(outcome)
    found["deaths"] = [death._asdict() for death in outcome.deaths]
    found["reasons"] = [{"at_s": at_s, "reason": reason} for at_s, reason in outcome.reasons]
    del found["bins"]
    return {name: _finite_or_none(value) for name, value in found.items()}


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary_csv(outcomes: Sequence[Outcome]) -> str:
    """Return a CSV with one row per policy; an empty cell is an infinite value."""
    rows = []
    for outcome in outcomes:
        found = outcome_json(outcome)
        found["deaths"] = len(outcome.deaths)
        del found["reasons"]
        rows.append(found)
    return _to_csv(list(rows[0]), ([row[name] for name in row] for row in rows))


def timeline_csv(outcomes: Sequence[Outcome]) -> str:
    """Return a CSV with one row per policy and bin: the data of the plots."""
    rows = ([o.policy, *(_finite_or_none(value) for value in one)] for o in outcomes for one in o.bins)
    return _to_csv(["policy", *Bin._fields], rows)


def _to_csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([round(cell, 6) if isinstance(cell, float) else cell for cell in row] for row in rows)
    return out.getvalue()


def wrapped(lines: Iterable[str], indent: str = "") -> list[str]:
    """Wrap lines; continuation lines are indented further."""
    further = indent + "    "
    return [
        part
        for line in lines
        for part in textwrap.wrap(
            line, COLUMNS, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False
        )
    ]


def capacity_text(answer: Answer, name: str) -> str:
    """Return the capacity's arithmetic and then the result as text."""
    out = [f"one replica: {name}", ""]
    for topic, lines in answer.arithmetic.items():
        out.append(topic)
        out += wrapped(lines, "  ")
    cells = [
        ("replicas", f"{answer.replicas}"),
        ("GPUs", f"{answer.gpus}"),
        ("requests/s", f"{answer.requests_per_s:,.1f}"),
        ("prompt tokens/s", f"{answer.prompt_tokens_per_s:,.0f}"),
        ("output tokens/s", f"{answer.output_tokens_per_s:,.0f}"),
        ("KV in use", f"{answer.kv_bytes / GIB:,.1f} GiB" if answer.kv_bytes else f"{answer.kv_tokens:,.0f} tokens"),
    ]
    if answer.dollars_per_month:
        cells.append(("a month", f"${answer.dollars_per_month:,.0f}"))
        cells.append(("following the load", f"${answer.dollars_per_month_elastic:,.0f}"))
    head, row = zip(*cells, strict=True)
    return "\n".join([*out, "", table([head, row])])


def reserve_text(curve: Sequence[Reserve], cold_start_s: float) -> str:
    """Return the curve of a warm reserve's risk and price as text."""
    if not curve:
        return "warm reserve: the trace is not longer than a cold start, so its jumps are unknown"
    said = (
        f"by the risk: in jump_share of the time arrivals rise within a cold start ({cold_start_s:g} s) by no more "
        "than given; beyond: share of the requests for which neither ready nor warm replicas have room, if nothing was "
        "known before",
    )
    columns: list[tuple[str, list[str]]] = [
        ("jump_share", [f"{row.jump_share:g}" for row in curve]),
        ("rise", [f"{row.rise_per_s:,.2f}/s" for row in curve]),
        ("warm", [f"{row.warm}" for row in curve]),
        ("GPUs", [f"{row.gpus}" for row in curve]),
        ("beyond", [f"{row.beyond_share:.2%}" for row in curve]),
    ]
    if any(row.dollars_per_month for row in curve):
        columns.append(("a month", [f"${row.dollars_per_month:,.0f}" for row in curve]))
    rows = [[head for head, _ in columns], *([cells[i] for _, cells in columns] for i in range(len(curve)))]
    return "\n".join(["warm reserve", *wrapped(said, "  "), "", table(rows)])
