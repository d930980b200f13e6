"""Questions by name for the command line and the HTTP API: each answers a JSON value and a text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stream_fabric.errors import BadRequest, NotFound
from telemetry.ask.compare import ATS, BYS, Diff, diff
from telemetry.ask.port import Ask
from telemetry.ask.queries import COHORT, PHASE_NAMES, SAVED, TOP, Value, saved
from telemetry.ask.reconcile import hour_rows
from telemetry.ask.text import (
    diff_text,
    missing_events,
    request_line,
    rows_text,
    time_text,
    timeline_text,
    why_text,
)
from telemetry.ask.times import cohort_of, window
from telemetry.ask.usage.page import is_long
from telemetry.ask.why.attempts import token_times
from telemetry.ask.why.explain import Answer, load_story, why

TOP_MAX = 1000
USAGE_ROWS_MAX = 100_000

Given = Mapping[str, str]


@dataclass(frozen=True)
class View:
    """An answer in its two forms: a JSON value, and text for a terminal."""

    value: Any
    text: str
    note: str = ""
    """Warning that the text has and the value lacks, such as rows that were cut off; empty: none."""


async def recent(ask: Ask, given: Given, now_us: int) -> View:
    """List the newest requests."""
    rows = await ask.query(
        "recent", {**_common_parameters(given, now_us, "1h", "ended"), "ended": given.get("ended", "")}
    )
    return View(rows, "\n".join(map(request_line, rows)) or "no requests in that time")


async def slow(ask: Ask, given: Given, now_us: int) -> View:
    """List the requests that spent the most time in a phase."""
    phase = given.get("phase") or "wall"
    if phase not in ("wall", "ttft", *PHASE_NAMES):
        raise BadRequest(f"there is no phase {phase[:40]!r}; choose wall, ttft, {', '.join(PHASE_NAMES)}")
    common = _common_parameters(given, now_us, "1h", "phase", "ended")
    rows = await ask.query("slow", {**common, "phase": phase, "ended": given.get("ended", "")})
    return View(rows, rows_text(rows))


async def show(ask: Ask, given: Given, now_us: int) -> View:
    """Show a request's events, field by field."""
    story = await load_story(ask, given.get("id", ""))
    value: dict[str, Any] = {
        "stream": story.stream,
        "requests": [reader.row for reader in (*story.line, *story.beside)],
        "attempts": list(story.attempts),
    }
    lines = []
    for kind in ("requests", "attempts"):
        for row in value[kind]:
            lines.append(kind[:-1])
            cells = {name: token_times(cell) if name == "token_us" else cell for name, cell in dict(row).items()}
            lines += [f"  {name:<24}{cell}" for name, cell in cells.items() if cell not in ("", 0)]
    return View(value, "\n".join(lines))


async def explain(ask: Ask, given: Given, now_us: int) -> View:
    """Explain where a request's time went and the likely cause."""
    answer = await why(ask, given.get("id", ""))
    return View(why_value(answer), why_text(answer))


async def compare(ask: Ask, given: Given, now_us: int) -> View:
    """Compare two cohorts."""
    if not given.get("a") or not given.get("b"):
        raise BadRequest("name the two cohorts: a=since=2h,until=1h&b=since=1h")
    found = await diff(ask, cohort_of(given["a"], now_us), cohort_of(given["b"], now_us))
    return View(diff_value(found), diff_text(found))


async def pool(ask: Ask, given: Given, now_us: int) -> View:
    """List the fleet events of one pool, in order."""
    if not given.get("pool"):
        raise BadRequest("name the pool: pool=NAME")
    taken = _common_parameters({"top": "1000", **given}, now_us, "1h", only=("pool",))
    top = int(taken["top"])
    rows = await ask.query("timeline", {**taken, "top": top + 1})
    note = ""
    if len(rows) > top:
        rows = rows[:top]
        note = f"only the first {top} events; continue with --since {time_text(rows[-1]['at_us']).replace(' ', 'T')}"
    return View(rows, "\n".join(filter(None, (timeline_text(rows), note))), note)


async def usage(ask: Ask, given: Given, now_us: int) -> View:
    """List billed usage by hour. It has all rows: a sum of the first ones would be less than the bill."""
    common = _common_parameters(given, now_us, "24h", only=("tenant", "model"))
    sums = is_long(int(common["from_us"]), int(common["until_us"]), str(common["tenant"]))
    rows = await hour_rows(ask, "usage_by_hour", {**common, "exact": int(not sums)}, USAGE_ROWS_MAX)
    return View(rows, rows_text(rows))


async def queries(ask: Ask, given: Given, now_us: int) -> View:
    """List the saved queries."""
    value = [
        {"name": q.name, "tells": q.about, "parameters": q.parameters, "defaults": dict(q.defaults), "sql": q.sql}
        for q in SAVED.values()
    ]
    return View(value, "\n".join(f"{q.name:<20} {q.about}" for q in SAVED.values()))


async def query(ask: Ask, given: Given, now_us: int) -> View:
    """Run any saved query. ``since`` and ``until`` give its window."""
    wanted = saved(given["name"])
    values: dict[str, Value] = {}
    from_us, until_us = window(given, now_us, "1h")
    times = {"from_us": from_us, "until_us": until_us}
    values.update({name: us for name, us in times.items() if name in wanted.parameters})
    for name, text in given.items():
        if name in ("name", "since", "until"):
            continue
        if wanted.parameters.get(name) == "Int64":
            try:
                values[name] = int(text)
            except ValueError:
                raise BadRequest(f"{name} is a whole number, got {text[:40]!r}") from None
        else:
            values[name] = text
    rows = await ask.query(wanted.name, values)
    return View(rows, rows_text(rows))


VIEWS: Mapping[str, Callable[[Ask, Given, int], Awaitable[View]]] = {
    "list": recent,
    "slow": slow,
    "show": show,
    "why": explain,
    "diff": compare,
    "pool": pool,
    "usage": usage,
    "queries": queries,
    "query": query,
}


async def answer_path(ask: Ask, path: str, given: Given, now_us: int) -> View:
    """Answer by the path below ``/traces``: ``""``, ``slow``, ``diff``, ``pool``, ``queries/<name>``, ``<id>/why``, …

    Raises NotFound, BadRequest and the store's errors.
    """
    match [part for part in path.split("/") if part]:
        case []:
            return await recent(ask, given, now_us)
        case ["slow" | "diff" | "pool" | "usage" | "queries" as name]:
            return await VIEWS[name](ask, given, now_us)
        case ["queries", name]:
            return await query(ask, {**given, "name": name}, now_us)
        case [id]:
            return await show(ask, {"id": id}, now_us)
        case [id, "why"]:
            return await explain(ask, {"id": id}, now_us)
    raise NotFound(f"there is no /{path[:100]} below traces")


def _common_parameters(
    given: Given, now_us: int, since: str, *more: str, only: tuple[str, ...] = COHORT
) -> dict[str, Value]:
    """Parse the filters that most views share: window, ``top`` and cohort. Raises BadRequest."""
    taken = {"since", "until", "top", *only, *more}
    if unknown := sorted(set(given) - taken):
        raise BadRequest(f"there is no {', '.join(unknown)[:100]} filter here; there are {', '.join(sorted(taken))}")
    from_us, until_us = window(given, now_us, since)
    try:
        top = int(given.get("top") or TOP)
    except ValueError:
        top = 0
    if not 1 <= top <= TOP_MAX:
        raise BadRequest(f"top is 1 to {TOP_MAX}")
    return {"from_us": from_us, "until_us": until_us, "top": top, **{name: given.get(name) or "" for name in only}}


def why_value(answer: Answer) -> dict[str, Any]:
    story = answer.story
    return {
        "id": story.id,
        "stream": story.stream,
        "outcome": story.outcome,
        "cause": answer.cause,
        "likely": answer.likely,
        "findings": [asdict(finding) for finding in answer.findings],
        "began_us": story.began_us,
        "wall_us": story.wall_us,
        "segments": [asdict(segment) for segment in story.segments()],
        "prompt_tokens": story.prompt_tokens,
        "cached_tokens": story.cached_tokens,
        "output_tokens": story.output_tokens,
        "readers": [reader.row for reader in story.line],
        "beside": [reader.row for reader in story.beside],
        "attempts": list(story.attempts),
        "cohort": {"what": story.cohort.what, "members": story.cohort.members, "figures": dict(story.cohort.figures)},
        "missing": missing_events(story),
        "other_streams": list(story.other_streams),
        "fleet": list(story.fleet),
    }


def diff_value(found: Diff) -> dict[str, Any]:
    return {
        "a": dict(found.a.profile),
        "b": dict(found.b.profile),
        **{
            f"{by}_{at}": {
                "says": found.sentence(by, at),
                "changes": [asdict(change) for change in found.changes(by, at)],
            }
            for by in BYS
            for at in ATS
        },
    }
