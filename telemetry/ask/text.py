"""Formatting of answers for a terminal of 100 columns. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from stream_fabric.events import PHASES
from telemetry.ask.compare import ATS, BYS, Diff
from telemetry.ask.reconcile import Report
from telemetry.ask.why.attempts import input_rows, inputs_without_times, token_times
from telemetry.ask.why.causes import duration
from telemetry.ask.why.explain import Answer
from telemetry.ask.why.story import Reader, Row, Segment, Story, candidates

WIDTH = 100
_BAR = 40
_NAMES = {
    "resume_gap_us": "no reader",
    "gateway_us": "gateway",
    "admission_us": "admission",
    "pool_queue_us": "pool queue",
    "engine_queue_us": "engine queue",
    "prefill_us": "prefill",
    "decode_us": "decode",
    "fabric_us": "fabric",
    "client_stall_us": "client stall",
    "recovery_us": "recovery",
    "check_us": "check and repair",
    "steer_us": "steering",
    "residual_us": "unaccounted",
    "between": "between readers",
    "overlap": "both readers",
    "unrecorded": "not recorded",
}


def time_text(us: int) -> str:
    """Format Unix time in µs as UTC, with milliseconds."""
    return datetime.fromtimestamp(us / 1e6, UTC).isoformat(" ", "milliseconds")[:23] + "Z"


def phase_label(phase: str) -> str:
    """Return the name of a phase as a user reads it."""
    return _NAMES.get(phase, phase.removesuffix("_us"))


def money_text(micro: int) -> str:
    """Format millionths of the price's currency unit as a decimal number."""
    whole, rest = divmod(abs(micro), 1_000_000)
    return f"{'-' if micro < 0 else ''}{whole}.{rest:06d}"


def why_text(answer: Answer) -> str:
    story = answer.story
    lines = [*_header_lines(story), "", *_wrapped("likely cause: " + answer.likely), "", *_waterfall_lines(story), ""]
    lines += _attempt_lines(story)
    lines += _placement_lines(story)
    lines += _cohort_lines(story)
    lines += _other_reader_lines(story)
    return "\n".join(lines).rstrip()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _header_lines(story: Story) -> list[str]:
    """Describe the request: outcome, place, tokens, ids and missing events."""
    fact = story.fact
    error = f" ({story.error_code})" if story.error_code else ""
    lines = [
        f"{story.stream or story.id}  {story.outcome}{error}  {time_text(story.began_us)}  {duration(story.wall_us)}"
    ]
    session = f", session {fact('session_hash')}" if fact("session_hash") else ""
    user = f", user {fact('user_hash')}" if fact("user_hash") else ""
    adapter = " (a LoRA adapter)" if fact("adapter") else ""
    artifact = f" loaded from {fact('artifact')}" if fact("artifact") else ""
    lines += _wrapped(
        f"tenant {fact('tenant')}{user}{session}: {fact('model')}{adapter} on {fact('replica') or 'no replica'} of "
        f"pool {fact('pool') or '-'}{artifact}, {fact('dialect') or '?'} over {fact('transport') or '?'}, "
        f"gateway {fact('gateway') or '?'}"
    )
    ttft = story.ttft_us
    price = int((story.bill or {}).get("price_micro", 0)) or int(fact("price_micro") or 0)
    lines += _wrapped(
        f"prompt {story.prompt_tokens} tokens, {story.cached_tokens} cached; output {story.output_tokens}"
        + (f"; first token after {duration(ttft)}" if ttft else "")
        + (f"; price {money_text(price)}" if price else "")
        + (f"; schema {fact('schema_check')}, {fact('repairs') or 0} repairs" if fact("schema_check") else "")
        + (f"; cancelled at {fact('cancel_point')}" if fact("cancel_point") else "")
    )
    if fact("request_id") or fact("trace_id"):
        lines.append(f"request {fact('request_id') or '?'}, trace {fact('trace_id') or '?'}")
    lines += [line for text in missing_events(story) for line in _wrapped("! " + text)]
    if story.other_streams:
        lines += _wrapped(f"! other streams of the same trace: {', '.join(story.other_streams)}")
    return lines


def missing_events(story: Story) -> list[str]:
    """List the events that are missing from the story."""
    said = []
    if not story.line:
        said.append("no event of a reader: its gateway died, or the request succeeded and was not sampled")
    elif story.created is None:
        said.append("no event of the request that created the stream: its gateway died or is cut off")
    if story.stream and not story.attempts and story.outcome != "refused":
        said.append(
            "no event of an attempt: the request never reached an engine, or the agent's events have not arrived yet"
        )
    elif story.stream and story.attempts and story.bill is None:
        said.append("no billing event: the stream still runs, or the agent's events have not arrived yet")
    told = {int(row["attempt"]) for row in story.attempts}
    gone = [str(number) for number in range(1, max(told, default=0)) if number not in told]
    if gone:
        said.append(f"no event of attempt {', '.join(gone)}")
    return said


def _waterfall_lines(story: Story) -> list[str]:
    """Draw the client's time by phase, as figures and bars."""
    wall = max(story.wall_us, 1)
    lines = [f"{'where the time went':<24}{'ms':>12}{'%':>7}"]
    at = previous = 0
    for segment in story.segments():
        if segment.reader != previous and segment.reader and len(story.line) > 1:
            lines.append(_reader_line(segment.reader, story.line[segment.reader - 1]))
        previous = segment.reader or previous
        lines.append(_bar_line(segment, at, wall))
        at += segment.us
    lines.append(f"  {'sum':<22}{at / 1000:>12.1f}{100 * at / wall:>7.1f}")
    return lines


def _reader_line(number: int, reader: Reader) -> str:
    row = reader.row
    frames = f", frames {row['first_seq']} to {row['last_seq']}" if row["last_seq"] else ""
    return f"reader {number}: {reader.label} at {row['gateway']}, {reader.ended}{frames}"


def _bar_line(segment: Segment, at: int, wall: int) -> str:
    left = min(max(_BAR * at // wall, 0), _BAR - 1)
    width = max(round(_BAR * segment.us / wall), 0)
    bar = " " * left + ("█" * min(width, _BAR - left) or ("▏" if segment.us > 0 else ""))
    text = f"  {phase_label(segment.name):<22}{segment.us / 1000:>12.1f}{100 * segment.us / wall:>7.1f}  {bar}"
    return text.rstrip()


def _attempt_lines(story: Story) -> list[str]:
    if not story.attempts:
        return []
    rows: list[tuple[str, ...]] = [
        ("attempt", "replica", "ended", "waited", "inbox", "queue", "prefill", "decode", "tokens", "")
    ]
    for row in story.attempts:
        said = [str(row["error_code"])] if row["error_code"] else []
        said += [f"check and repair {duration(row['check_us'])}"] if row.get("check_us") else []
        said += [f"steering {duration(row['steer_us'])}"] if row.get("steer_us") else []
        if row["billed"]:
            said.append("billed")
        if row["ended"] == "lost":
            said.append("the replica died")
        rows.append(
            (
                f"{row['attempt']}.{row['epoch']}", str(row["replica"]), str(row["ended"]),
                *(duration(row[name])
                  for name in ("waited_us", "inbox_us", "engine_queue_us", "prefill_us", "decode_us")),
                f"{row['generated_tokens']}/{row['output_tokens']}", ", ".join(said),
            )
        )  # fmt: skip
    lines = ["attempts (tokens: generated by it / of the stream so far)", *table(rows)]
    for row in story.attempts:
        if times := token_times(row.get("token_us") or ()):
            lines += _wrapped(f"  attempt {row['attempt']}.{row['epoch']}: {times}")
    return [*lines, *_input_lines(story), ""]


def _input_lines(story: Story) -> list[str]:
    """Describe the client's inputs: how long each waited, and the time from there to the next answer's first token."""
    rows = input_rows(story)
    lines = ["", "inputs (waited: for the replica; next token: from there on)", *table(rows)] if rows else []
    if gone := inputs_without_times(story):
        lines.append(f"  {gone} more applied by a replica that died, so without times")
    return lines


def _placement_lines(story: Story) -> list[str]:
    reason, scored = story.fact("placement"), candidates(story)
    if not reason and not scored:
        return []
    position = int(story.fact("queue_position") or 0)
    lines = [f"placement: {reason or '?'}" + (f", position {position} in the queue" if position else "")]
    host = story.fact("shifted_to")
    if host and reason == "batch_host":
        lines += _wrapped(
            f"placed at batch host {host} of pool {story.fact('pool')}; should it lose its replica there "
            "and no other has room, it goes back to that pool"
        )
    elif host and reason == "fallback":
        lines += _wrapped(f"model {story.fact('asked_model')} was saturated: the smaller one answered in pool {host}")
    elif host:
        ahead_s = int(story.fact("backlog_ms") or 0) / 1000
        why = f"{ahead_s:.1f} s of work were ahead of it" if ahead_s else "no replica was ready"
        lines += _wrapped(f"moved to adjacent pool {host}, because in pool {story.fact('pool')} {why}")
    if story.fact("regions"):
        lines.append(f"bound to regions: {story.fact('regions')}")
    if scored:
        rows: list[tuple[str, ...]] = [("candidate", "score ms", "matched", "in flight", "load ms", "")]
        rows += [
            (one.replica, f"{one.score_ms:g}", str(one.matched_tokens), str(one.in_flight), f"{one.load_ms:g}",
             ("taken" if one.replica == story.fact("replica") else "") + one.barred)
            for one in scored
        ]  # fmt: skip
        lines += table(rows)
    return [*lines, ""]


def _cohort_lines(story: Story) -> list[str]:
    """Compare the request's times and tokens with its cohort."""
    usual = story.cohort
    if not usual.members:
        return ["nothing to compare with: there is no finished request of this model", ""]
    few = "" if usual.enough else ", too few for a comparison"
    lines = [f"compared with {usual.members} requests ({usual.what}{few})"]
    rows: list[tuple[str, ...]] = [("", "this", "p50", "p99", "")]
    for name in (n for n in usual.figures if n.endswith("_us") and n not in ("wall_us", "ttft_us", "token_us")):
        rows.append(_comparison_row(phase_label(name), story.spent(name), usual.figures[name]))
    if story.ttft_us and "ttft_us" in usual.figures:
        rows.append(_comparison_row("first token", story.ttft_us, usual.figures["ttft_us"]))
    rows.append(_comparison_row("total", story.wall_us, usual.figures["wall_us"]))
    if "output_tokens" in usual.figures:
        half, _, most = usual.figures["output_tokens"]
        mark = "above p99" if story.output_tokens > most else ""
        rows.append(("output tokens", str(story.output_tokens), f"{half:.0f}", f"{most:.0f}", mark))
    if story.prompt_tokens:
        share = story.cached_tokens / story.prompt_tokens
        rows.append(("prompt cached", f"{share:.0%}", f"{usual.cached_share:.0%}", "", ""))
    return [*lines, *table(rows), ""]


def _comparison_row(name: str, value: int, figures: tuple[float, float, float]) -> tuple[str, ...]:
    half, _, most = figures
    mark = "above p99" if value > most and value - half >= 1000 else ""
    return name, duration(value), duration(half), duration(most), mark


def _other_reader_lines(story: Story) -> list[str]:
    """Describe the readers beside the client's own line."""
    if not story.beside:
        return []
    lines = ["other readers"]
    for reader in story.beside:
        row = reader.row
        lines.append(f"  {reader.label} at {row['gateway']}, {reader.ended}, {duration(row['wall_us'])}")
    return lines


def diff_text(found: Diff) -> str:
    a, b = found.a, found.b
    lines = [line for by in BYS for at in ATS for line in _wrapped(found.sentence(by, at))] + [""]
    rows: list[tuple[str, ...]] = [("", "A", "B", "", "A", "B", "", "A", "B")]
    for name in ("requests", "failed", "refused", "cancelled", "left_early"):
        rows.append((name.replace("_", " "), str(a.profile[name]), str(b.profile[name]), *[""] * 6))
    rows.append(("", "p50", "p50", "", "p95", "p95", "", "p99", "p99"))
    for name in ("ttft_us", "wall_us", *PHASES):
        cells: list[str] = []
        for index in range(3):
            cells += [duration(a.quantile(name, index)), duration(b.quantile(name, index)), ""]
        label = {"ttft_us": "first token", "wall_us": "total"}.get(name) or phase_label(name)
        rows.append((label, *cells[:-1]))
    lines += table(rows)
    lines.append("")
    for by, at in ((by, at) for by in BYS for at in ATS):
        lines.append(f"changes around the {at} of {by}")
        changes = [change for change in found.changes(by, at) if abs(change.us) >= 500][:6]
        lines += table(
            [
                (
                    phase_label(c.phase),
                    f"{'+' if c.us > 0 else ''}{c.us / 1000:.1f} ms",
                    f"on {c.replica}" if c.replica else "",
                )
                for c in changes
            ]
        ) or ["  nothing"]
    return "\n".join(lines)


def reconcile_text(report: Report) -> str:
    lines = [
        f"{report.streams} streams ended from {time_text(report.from_us)} to {time_text(report.until_us)}",
        f"  output tokens settled in Redis (whole hours)        {report.settled_output}",
        f"  output tokens billed by engines                    {report.billed_output}",
        f"  tokens generated by engines                        {report.generated}",
        f"  tokens sent to readers ({report.whole} streams read whole)".ljust(53) + str(report.streamed_output),
        f"  streams that Redis still holds                     {report.held}",
    ]
    if report.agrees:
        return "\n".join([*lines, "all figures agree"])
    lines += ["", f"{report.found} disagree"]

    def count_text(value: int | None) -> str:
        return "-" if value is None else str(value)

    rows: list[tuple[str, ...]] = [("stream", "tenant", "settled", "sent", "billed", "generated", "reason")]
    for one in report.disagreements:
        who = one.stream or f"{one.model}, the hour {time_text(one.hour_us)[:16]}"
        figures = map(count_text, (one.settled, one.streamed, one.billed, one.generated))
        rows.append((who, one.tenant, *figures, one.why))
    more = report.found - len(report.disagreements)
    return "\n".join([*lines, *table(rows), *([f"… and {more} more"] if more else [])])


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows: the first column and columns of words to the left, figures to the right."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells_of = zip(*rows[1:], strict=True)
    words = [not any(cell[:1].isdigit() or cell[:1] in _SIGNS for cell in column) for column in cells_of]
    words = words or [False] * len(widths)
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index == 0 or words[index] else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def timeline_text(rows: Sequence[Row]) -> str:
    """Format the fleet events of a pool in order; each day begins with its date."""
    lines: list[str] = []
    day = ""
    for row in rows:
        at = time_text(row["at_us"])
        if at[:10] != day:
            day = at[:10]
            lines.append(day)
        who = f"requested by {row['asked_by']}" if row["asked_by"] else f"reported by {row['told_by']}"
        what = f"{row['what']} {row['state']}".strip()
        why = f"{row['reason']}; {who}" if row["reason"] else who
        text = f"{at[11:]}  {what:<17} {row['replica'] or '-':<12} {why}"
        text += f" ({row['rested_on']})" if row["rested_on"] else ""
        lines += textwrap.wrap(text, WIDTH, subsequent_indent=" " * 15)
    return "\n".join(lines) or "no events of this pool in that time"


_SIGNS = ("-", "+")
_MOMENTS = ("at_us", "minute_us", "hour_us", "first_us", "last_us")


def rows_text(rows: Sequence[Row]) -> str:
    """Format rows of any query as a table, with durations in milliseconds."""
    if not rows:
        return "no rows"
    columns = [name for name in rows[0] if not isinstance(rows[0][name], list | tuple | dict)]
    return "\n".join(
        table(
            [
                tuple(map(_column_title, columns)),
                *(tuple(_cell_text(name, row[name]) for name in columns) for row in rows),
            ]
        )
    )


def _column_title(name: str) -> str:
    if name in _MOMENTS:
        return name.removesuffix("_us")
    # Money is shown in whole units of the currency
    return f"{name[:-3]} ms" if name.endswith("_us") else name.replace("_micro", "")


def _cell_text(name: str, value: Any) -> str:
    if name in _MOMENTS:
        return time_text(value)
    if name.endswith("_us"):
        return f"{value / 1000:.1f}"
    if "_micro" in name:
        return money_text(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).replace("\n", "\\n")


def request_line(row: Mapping[str, Any]) -> str:
    """Format a request as one line, for ``tail`` and ``list``."""
    error = f" {row['error_code']}" if row["error_code"] else ""
    first = duration(row["ttft_us"]) if row["ttft_us"] else "-"
    return (
        f"{time_text(row['at_us'])}  {row['ended'] + error:<12} {row['tenant']:<12} {row['model']:<16} "
        f"{row['replica'] or '-':<12} {row['prompt_tokens']:>6}+{row['output_tokens']:<5} {first:>8} "
        f"{duration(row['wall_us']):>8}  "
        f"{row['stream'] or row['id']}"
    )
