"""Details of an attempt: the times of its tokens, and of the inputs that it took. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stream_fabric.events import InputTimes
from telemetry.ask.why.causes import duration
from telemetry.ask.why.story import Row, Story

_GAPS_SHOWN = 3


def token_times(times: Sequence[int]) -> str:
    """Describe the gaps between an attempt's tokens, in µs, and name the longest."""
    if not times:
        return ""
    gaps = sorted(enumerate(times[1:], 1), key=lambda gap: (-gap[1], gap[0]))
    said = f"times of {len(times)} tokens: first token after {duration(times[0])}"
    if not gaps:
        return said
    longest = ", ".join(f"{duration(us)} between tokens {at} and {at + 1}" for at, us in gaps[:_GAPS_SHOWN])
    return f"{said}, median gap {duration(gaps[len(gaps) // 2][1])}, longest gaps {longest}"


def input_rows(story: Story) -> list[tuple[str, ...]]:
    """Return a table of the client's inputs, with its heads; empty: there were none."""
    found = [(row, times) for row in story.attempts for times in _inputs(row)]
    if not found:
        return []
    heads = ("input", "came at", "result", "waited", "next token", "total", "")
    return [heads, *(_input_row(number, story, *one) for number, one in enumerate(found, 1))]


def _input_row(number: int, story: Story, row: Row, times: InputTimes) -> tuple[str, ...]:
    came = f"+{duration(times.at_us - story.began_us)}" if times.at_us else "?"
    total_us = times.waited_us + times.answered_us
    answered = (duration(times.answered_us), duration(total_us)) if times.answered_us else ("-", "-")
    return f"{row['attempt']}.{number}", came, times.result, duration(times.waited_us), *answered, times.reason


def inputs_without_times(story: Story) -> int:
    """Return the number of inputs that readers saw and no attempt tells: their replica died."""
    seen = max((int(reader.row.get("inputs") or 0) for reader in (*story.line, *story.beside)), default=0)
    told = sum(times.result == "applied" for row in story.attempts for times in _inputs(row))
    return max(seen - told, 0)


def _inputs(row: Row) -> list[InputTimes]:
    text = row.get("inputs_json")
    return msgspec.json.decode(text, type=list[InputTimes]) if text else []
