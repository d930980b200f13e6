"""A report for the terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stream_gw.cli.bench.measures import Quantiles
from stream_gw.cli.bench.results import Report

LAG_S_MAX = 0.01
"""A measuring process that is later than this measures itself."""

_LATENCIES = ["TTFT p50", "p95", "p99", "gap p50", "p95", "p99", "ITL p50", "p99", "e2e p50", "p95", "p99"]
_HEAD = ["load", "requests/s", "tokens/s", "failed", *_LATENCIES]


def format_time(time_s: float | None) -> str:
    if time_s is None:
        return "-"
    if time_s < 1:
        return f"{time_s * 1000:.1f} ms" if time_s < 0.1 else f"{time_s * 1000:.0f} ms"
    return f"{time_s:.2f} s" if time_s < 100 else f"{time_s:.0f} s"


def warnings(report: Report) -> list[str]:
    """Sentences about what makes the figures doubtful."""
    found = []
    if not report.is_whole:
        found.append(
            f"the run was interrupted after {report.took_s:.0f} of {report.wanted_s:.0f} s; {report.unfinished} "
            "requests had not ended and are in no latency and no count"
        )
    if report.client_lag_p99_s > LAG_S_MAX:
        found.append(
            f"the measuring process was late by {format_time(report.client_lag_p99_s)} (p99) and used "
            f"{report.client_cpu_share:.0%} of a core: the latencies contain its own delay; lower the load, or measure "
            "from a machine with more free CPU"
        )
    if any(not stage.requests for stage in report.stages):
        found.append("a stage has no request that counts: give it more time with --duration, or less to --ramp")
    return found


def table(report: Report) -> list[list[str]]:
    """Rows of cells, the head first."""
    rows = [_HEAD]
    for stage in report.stages:
        cells = [stage.name, f"{stage.requests_per_s:.2f}", f"{stage.output_tokens_per_s:,.0f}", str(stage.failed)]
        cells += _three(stage.ttft) + _three(stage.gap)
        cells += [format_time(stage.itl.p50_s), format_time(stage.itl.p99_s), *_three(stage.e2e)]
        rows.append(cells)
    return rows


def facts(report: Report) -> list[str]:
    """Sentences about what was measured and how."""
    target = report.target
    prompt = sum(stage.prompt_tokens for stage in report.stages)
    cached = sum(stage.cached_tokens for stage in report.stages)
    output = sum(stage.output_tokens for stage in report.stages)
    server = f", server {target.server}" if target.server else ""
    kind = "a stream-gw gateway" if target.is_gateway else "an OpenAI-compatible server"
    found = [
        f"{', '.join(target.urls)} is {kind}{server}; model {target.model}, transport {report.transport}",
        f"profile {report.profile}, seed {report.seed}; {prompt:,} prompt tokens ({cached:,} cached) and {output:,} "
        "output tokens in counted requests",
        f"stream-gw {report.version}, Python {report.python} on {report.machine}; prompts sha256 "
        f"{report.prompts_sha256[:16]}",
    ]
    for stage in report.stages:
        if stage.usd_per_session is not None:
            found.append(f"{stage.name}: {stage.usd_per_session:.6f} dollars a session of {stage.sessions:,}")
    return found


def disturbances(report: Report) -> list[str]:
    """Sentences about what became of disturbed requests; empty without any."""
    seen, found = report.disturbances, []
    if seen.cut:
        found.append(
            f"{seen.cut} cut off, {seen.resumed} resumed (p50 {format_time(seen.resume.p50_s)}, "
            f"p99 {format_time(seen.resume.p99_s)} to the first event), {seen.exact} equal to the replay byte for byte"
        )
    if seen.cancelled:
        found.append(
            f"{seen.cancelled} cancelled (p50 {format_time(seen.cancel.p50_s)}, p99 {format_time(seen.cancel.p99_s)} "
            f"to the end); of {seen.named_cancels} with a named last token {seen.exact_cancels} ended at it"
        )
    if seen.slow:
        found.append(f"{seen.slow} read slowly, {seen.slow_completed} of them came whole")
    return found


def errors(report: Report) -> list[str]:
    """One line for each kind of failure, with the first message of its kind."""
    counts: dict[str, int] = {}
    first: dict[str, str] = {}
    for one in report.requests:
        if one.status == "failed":
            counts[one.error] = counts.get(one.error, 0) + 1
            first.setdefault(one.error, one.message)
    return [f"{count} x {error}: {first[error]}" for error, count in sorted(counts.items(), key=lambda item: -item[1])]


def text(report: Report) -> str:
    """Return the whole report as lines for a terminal of 130 columns."""
    lines = [*facts(report), ""]
    rows = table(report)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += [_line(row, widths) for row in rows]
    if found := disturbances(report):
        lines += ["", *found]
    if failed := errors(report):
        lines += ["", "failed:", *(f"  {line}" for line in failed)]
    if doubts := warnings(report):
        lines += ["", *(f"WARNING: {doubt}" for doubt in doubts)]
    return "\n".join(lines)


def _three(found: Quantiles) -> list[str]:
    return [format_time(value) for value in (found.p50_s, found.p95_s, found.p99_s)]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = [
        cell.ljust(width) if number == 0 else cell.rjust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join([first, *rest])
