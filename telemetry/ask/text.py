"""Answers for a terminal of 100 columns. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from stream_fabric.events import PHASES
from telemetry.ask.causes import shown
from telemetry.ask.compare import ATS, BYS, Diff
from telemetry.ask.reconcile import Report
from telemetry.ask.story import Reader, Row, Segment, Story, candidates
from telemetry.ask.why import Answer

WIDTH = 100
_BAR = 40
_NAMES = {
    "resume_gap_us": "nobody reads",
    "gateway_us": "gateway",
    "admission_us": "admission",
    "pool_queue_us": "pool's queue",
    "engine_queue_us": "engine's queue",
    "prefill_us": "prefill",
    "decode_us": "decode",
    "fabric_us": "fabric",
    "client_stall_us": "client stall",
    "recovery_us": "recovery",
    "residual_us": "not accounted for",
    "between": "between readers",
    "unrecorded": "not recorded",
}


def moment(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).isoformat(" ", "milliseconds")[:23] + "Z"


def name_of(phase: str) -> str:
    return _NAMES.get(phase, phase.removesuffix("_us"))


def money(micro: int) -> str:
    return f"{micro / 1_000_000:.6f}"


def why_text(answer: Answer) -> str:
    story = answer.story
    lines = [*_head(story), "", *_wrapped("likely cause: " + answer.likely), "", *_waterfall(story), ""]
    lines += _attempts(story)
    lines += _placement(story)
    lines += _unusual(story)
    lines += _beside(story)
    return "\n".join(lines).rstrip()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _head(story: Story) -> list[str]:
    fact = story.fact
    error = f" ({story.error_code})" if story.error_code else ""
    lines = [f"{story.stream or story.id}  {story.outcome}{error}  {moment(story.began_us)}  {shown(story.wall_us)}"]
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
        + (f"; first token after {shown(ttft)}" if ttft else "")
        + (f"; price {money(price)}" if price else "")
        + (f"; cancelled at {fact('cancel_point')}" if fact("cancel_point") else "")
    )
    if fact("request_id") or fact("trace_id"):
        lines.append(f"request {fact('request_id') or '?'}, trace {fact('trace_id') or '?'}")
    lines += [line for text in missing(story) for line in _wrapped("! " + text)]
    if story.other_streams:
        lines += _wrapped(f"! of the same trace: {', '.join(story.other_streams)}")
    return lines


def missing(story: Story) -> list[str]:
    """What nobody told."""
    said = []
    if not story.line:
        said.append("no reader was told of: its gateway died with it, or it succeeded and is not in the sample")
    elif story.created is None:
        said.append("the request that made the stream was not told of: its gateway died with it, or is cut off")
    if story.stream and not story.attempts and story.outcome != "refused":
        said.append("no agent told of it: it never reached an engine, or its agent's events are not here yet")
    elif story.stream and story.attempts and story.bill is None:
        said.append("no bill was told: the stream still runs, or its agent's events are not here yet")
    told = {int(row["attempt"]) for row in story.attempts}
    gone = [str(number) for number in range(1, max(told, default=0)) if number not in told]
    if gone:
        said.append(f"nobody told of attempt {', '.join(gone)}")
    return said


def _waterfall(story: Story) -> list[str]:
    wall = max(story.wall_us, 1)
    lines = [f"{'where the time went':<24}{'ms':>12}{'%':>7}"]
    at = 0
    previous = 0
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
    return f"reader {number}: {reader.role} at {row['gateway']}, {reader.ended}{frames}"


def _bar_line(segment: Segment, at: int, wall: int) -> str:
    left = min(max(_BAR * at // wall, 0), _BAR - 1)
    width = max(round(_BAR * segment.us / wall), 0)
    bar = " " * left + ("█" * min(width, _BAR - left) or ("▏" if segment.us > 0 else ""))
    text = f"  {name_of(segment.name):<22}{segment.us / 1000:>12.1f}{100 * segment.us / wall:>7.1f}  {bar}"
    return text.rstrip()


def _attempts(story: Story) -> list[str]:
    if not story.attempts:
        return []
    rows: list[tuple[str, ...]] = [
        ("try", "replica", "ended", "waited", "inbox", "queue", "prefill", "decode", "tokens", "")
    ]
    for row in story.attempts:
        said = [str(row["error_code"])] if row["error_code"] else []
        if row["billed"]:
            said.append("billed")
        if row["ended"] == "lost":
            said.append("the replica died")
        rows.append(
            (
                f"{row['attempt']}.{row['epoch']}", str(row["replica"]), str(row["ended"]),
                *(shown(row[name]) for name in ("waited_us", "inbox_us", "engine_queue_us", "prefill_us", "decode_us")),
                f"{row['generated_tokens']}/{row['output_tokens']}", ", ".join(said),
            )
        )  # fmt: skip
    lines = ["attempts (tokens: generated/of the stream so far)", *table(rows)]
    for row in story.attempts:
        if times := token_times(row.get("token_us") or ()):
            lines += _wrapped(f"  try {row['attempt']}.{row['epoch']}: {times}")
    return [*lines, ""]


_GAPS_SHOWN = 3


def token_times(times: Sequence[int]) -> str:
    """Of a sampled try's tokens: how far apart they came, and between which of them it took longest."""
    if not times:
        return ""
    gaps = sorted(enumerate(times[1:], 1), key=lambda gap: (-gap[1], gap[0]))
    said = f"the times of {len(times)} tokens are told: the first after {shown(times[0])}"
    if not gaps:
        return said
    longest = ", ".join(f"{shown(us)} between tokens {at} and {at + 1}" for at, us in gaps[:_GAPS_SHOWN])
    return f"{said}, half of the others within {shown(gaps[len(gaps) // 2][1])}; longest {longest}"


def _placement(story: Story) -> list[str]:
    reason, scored = story.fact("placement"), candidates(story)
    if not reason and not scored:
        return []
    position = int(story.fact("queue_position") or 0)
    lines = [f"placement: {reason or '?'}" + (f", place {position} in the queue" if position else "")]
    if host := story.fact("shifted_to"):
        ahead_s = int(story.fact("backlog_ms") or 0) / 1000
        why = f"{ahead_s:.1f} s of work were ahead of it" if ahead_s else "no replica took requests"
        lines += _wrapped(f"taken by adjacent pool {host}: in its own, {story.fact('pool')}, {why}")
    if scored:
        rows: list[tuple[str, ...]] = [("candidate", "score ms", "matched", "in flight", "load ms", "")]
        rows += [
            (one.replica, f"{one.score_ms:g}", str(one.matched_tokens), str(one.in_flight), f"{one.load_ms:g}",
             ("taken" if one.replica == story.fact("replica") else "") + one.barred)
            for one in scored
        ]  # fmt: skip
        lines += table(rows)
    return [*lines, ""]


def _unusual(story: Story) -> list[str]:
    usual = story.usual
    if not usual.members:
        return ["nothing to compare with: no finished request of the model is known", ""]
    few = "" if usual.enough else ", too few to say what is usual"
    lines = [f"against {usual.members} others ({usual.what}{few})"]
    rows: list[tuple[str, ...]] = [("", "here", "p50", "p99", "")]
    for name in (n for n in usual.figures if n.endswith("_us") and n not in ("wall_us", "ttft_us", "token_us")):
        rows.append(_compared(name_of(name), story.spent(name), usual.figures[name]))
    if story.ttft_us and "ttft_us" in usual.figures:
        rows.append(_compared("first token", story.ttft_us, usual.figures["ttft_us"]))
    rows.append(_compared("whole", story.wall_us, usual.figures["wall_us"]))
    if "output_tokens" in usual.figures:
        half, _, most = usual.figures["output_tokens"]
        mark = "above p99" if story.output_tokens > most else ""
        rows.append(("output tokens", str(story.output_tokens), f"{half:.0f}", f"{most:.0f}", mark))
    if story.prompt_tokens:
        share = story.cached_tokens / story.prompt_tokens
        rows.append(("prompt cached", f"{share:.0%}", f"{usual.cached_share:.0%}", "", ""))
    return [*lines, *table(rows), ""]


def _compared(name: str, value: int, figures: tuple[float, float, float]) -> tuple[str, ...]:
    half, _, most = figures
    mark = "above p99" if value > most and value - half >= 1000 else ""
    return name, shown(value), shown(half), shown(most), mark


def _beside(story: Story) -> list[str]:
    if not story.beside:
        return []
    lines = ["also read by"]
    for reader in story.beside:
        row = reader.row
        lines.append(f"  {reader.role} at {row['gateway']}, {reader.ended}, {shown(row['wall_us'])}")
    return lines


def diff_text(found: Diff) -> str:
    a, b = found.a, found.b
    lines = [line for by in BYS for at in ATS for line in _wrapped(found.says(by, at))] + [""]
    rows: list[tuple[str, ...]] = [("", "A", "B", "", "A", "B", "", "A", "B")]
    for name in ("requests", "failed", "refused", "cancelled", "left_early"):
        rows.append((name.replace("_", " "), str(a.profile[name]), str(b.profile[name]), *[""] * 6))
    rows.append(("", "p50", "p50", "", "p95", "p95", "", "p99", "p99"))
    for name in ("ttft_us", "wall_us", *PHASES):
        cells: list[str] = []
        for index in range(3):
            cells += [shown(a.quantile(name, index)), shown(b.quantile(name, index)), ""]
        label = {"ttft_us": "first token", "wall_us": "whole"}.get(name) or name_of(name)
        rows.append((label, *cells[:-1]))
    lines += table(rows)
    lines.append("")
    for by, at in ((by, at) for by in BYS for at in ATS):
        lines.append(f"around the {at} of {by}: what changed")
        changes = [change for change in found.changes(by, at) if abs(change.us) >= 500][:6]
        lines += table(
            [
                (
                    name_of(c.phase),
                    f"{'+' if c.us > 0 else ''}{c.us / 1000:.1f} ms",
                    f"on {c.replica}" if c.replica else "",
                )
                for c in changes
            ]
        ) or ["  nothing"]
    return "\n".join(lines)


def reconcile_text(report: Report) -> str:
    lines = [
        f"{report.streams} streams that ended from {moment(report.from_us)} to {moment(report.until_us)}",
        f"  output tokens settled in Redis (all of the hours)  {report.settled_output}",
        f"  output tokens billed by engines                    {report.billed_output}",
        f"  tokens made by engines                             {report.generated}",
        f"  tokens shown ({report.whole} streams were seen whole)".ljust(53) + str(report.streamed_output),
        f"  streams that Redis still holds                     {report.held}",
    ]
    if report.agrees:
        return "\n".join([*lines, "all agree"])
    lines += ["", f"{report.found} disagree"]

    def cell(value: int | None) -> str:
        return "-" if value is None else str(value)

    rows: list[tuple[str, ...]] = [("stream", "tenant", "settled", "shown", "billed", "made", "why")]
    for one in report.disagreements:
        who = one.stream or f"{one.model}, the hour {moment(one.hour_us)[:16]}"
        figures = map(cell, (one.settled, one.streamed, one.billed, one.generated))
        rows.append((who, one.tenant, *figures, one.why))
    more = report.found - len(report.disagreements)
    return "\n".join([*lines, *table(rows), *([f"… and {more} more"] if more else [])])


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column and columns of words begin at the left, figures end at the right."""
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
    """A pool's life; a day is said where it begins."""
    lines: list[str] = []
    day = ""
    for row in rows:
        at = moment(row["at_us"])
        if at[:10] != day:
            day = at[:10]
            lines.append(day)
        who = f"asked by {row['asked_by']}" if row["asked_by"] else f"told by {row['told_by']}"
        what = f"{row['what']} {row['state']}".strip()
        why = f"{row['reason']}; {who}" if row["reason"] else who
        text = f"{at[11:]}  {what:<17} {row['replica'] or '-':<12} {why}"
        text += f" ({row['rested_on']})" if row["rested_on"] else ""
        lines += textwrap.wrap(text, WIDTH, subsequent_indent=" " * 15)
    return "\n".join(lines) or "nothing was told of such a pool in that time"


_SIGNS = ("-", "+")
_MOMENTS = ("at_us", "minute_us", "hour_us", "first_us", "last_us")


def rows_text(rows: Sequence[Row]) -> str:
    """Any query's answer; moments as such, durations in milliseconds."""
    if not rows:
        return "nothing"
    columns = [name for name in rows[0] if not isinstance(rows[0][name], list | tuple | dict)]
    return "\n".join(
        table([tuple(map(_column, columns)), *(tuple(_cell(name, row[name]) for name in columns) for row in rows)])
    )


def _column(name: str) -> str:
    if name in _MOMENTS:
        return name.removesuffix("_us")
    return f"{name[:-3]} ms" if name.endswith("_us") else name


def _cell(name: str, value: Any) -> str:
    if name in _MOMENTS:
        return moment(value)
    if name.endswith("_us"):
        return f"{value / 1000:.1f}"
    if name.startswith("price_micro"):
        return money(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def request_line(row: Mapping[str, Any]) -> str:
    """One line of ``tail`` and ``list``."""
    error = f" {row['error_code']}" if row["error_code"] else ""
    first = shown(row["ttft_us"]) if row["ttft_us"] else "-"
    return (
        f"{moment(row['at_us'])}  {row['ended'] + error:<12} {row['tenant']:<12} {row['model']:<16} "
        f"{row['replica'] or '-':<12} {row['prompt_tokens']:>6}+{row['output_tokens']:<5} {first:>8} "
        f"{shown(row['wall_us']):>8}  "
        f"{row['stream'] or row['id']}"
    )
