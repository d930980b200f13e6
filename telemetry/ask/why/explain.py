"""``why``: all events of one request, its cohort, and the likely cause."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from stream_fabric.errors import BadRequest, NotFound
from stream_fabric.stream.ids import is_stream_id
from telemetry.ask.port import Ask
from telemetry.ask.queries import EVER_US, HOUR_US
from telemetry.ask.why.causes import Finding, cause_sentence, findings
from telemetry.ask.why.story import MEMBERS_MIN, CohortFigures, Story, assemble, prompt_band

DAY_US = 24 * HOUR_US
_DIGITS = re.compile(r"(?:^|[_-])([0-9a-f]{32})(?:$|[_-])")
_NEAR_US = 60_000_000


@dataclass(frozen=True)
class Answer:
    """A request's story, and the causes found in it."""

    story: Story
    findings: list[Finding]

    @property
    def cause(self) -> str:
        """Name of the likely cause; empty: nothing is unusual."""
        return self.findings[0].cause if self.findings else ""

    @property
    def likely(self) -> str:
        """Sentence about the likely cause."""
        return cause_sentence(self.findings)


async def why(ask: Ask, id: str) -> Answer:
    """Explain a request by the id of its stream, request, trace, message or completion.

    Raises BadRequest for an empty id, NotFound.
    """
    story = await load_story(ask, id)
    story = await _with_cohort(ask, story)
    return Answer(story, findings(story))


async def load_story(ask: Ask, id: str) -> Story:
    """Load a request's events, without its cohort. Raises BadRequest for an empty id, NotFound."""
    id = id.strip()
    if not id:
        raise BadRequest("the id is empty; give the id of a stream, request, trace or completion")
    stream = stream_id_in(id)
    found: list[dict[str, Any]] = []
    for window in filter(None, (_search_window(stream), {"from_us": 0, "until_us": EVER_US})):
        found = found or await ask.query("find", {"id": id, "stream": stream, **window})
    if not found:
        raise NotFound(
            f"there are no events of {id}: the id is unknown, the events have not arrived yet (they take seconds), or "
            "they are older than the retention"
        )
    streams = [str(row["stream"]) for row in found if row["stream"]]
    chosen = stream if stream in streams else streams[0] if streams else ""
    bounds = {
        "from_us": min(int(row["from_us"]) for row in found) - DAY_US,
        "until_us": max(int(row["until_us"]) for row in found) + DAY_US,
    }
    readers = await ask.query("readers", {"stream": chosen, "id": id, **bounds})
    attempts = await ask.query("attempts", {"stream": chosen, **bounds}) if chosen else []
    story = assemble(id, chosen, readers, attempts)
    return replace(story, other_streams=tuple(other for other in streams if other != chosen))


def stream_id_in(id: str) -> str:
    """Return the stream's id from the id of a message or completion; empty: ``id`` has none."""
    match = _DIGITS.search(id)
    return f"resp_{match[1]}" if match else ""


def _search_window(stream: str) -> dict[str, int]:
    """Return the time window to search, from the time in a stream's id. Empty: the id has no time."""
    made_us = int(stream[5:17], 16) * 1000 if is_stream_id(stream) else 0
    return {"from_us": made_us - DAY_US, "until_us": made_us + 7 * DAY_US} if 0 < made_us < EVER_US else {}


async def _with_cohort(ask: Ask, story: Story) -> Story:
    """Load what the story is compared with: its cohort, its session, and the pool's fleet events."""
    at_us = story.until_us
    usual = await _load_cohort(ask, story, at_us)
    share, members = 0.0, 0
    session = str(story.fact("session_hash"))
    if session:
        row = (
            await ask.query(
                "session",
                {
                    "session": session,
                    "tenant": str(story.fact("tenant")),
                    "stream": story.stream,
                    "from_us": at_us - DAY_US,
                    "until_us": at_us,
                },
            )
        )[0]
        members = int(row["members"])
        share = float(row["cached_share"]) if members else 0.0
    fleet: list[dict[str, Any]] = []
    if story.fact("pool"):
        window = {"from_us": story.began_us - _NEAR_US, "until_us": at_us + _NEAR_US}
        fleet = await ask.query("fleet_near", {"pool": str(story.fact("pool")), **window})
    return replace(story, cohort=usual, session_share=share, session_members=members, fleet=tuple(fleet))


async def _load_cohort(ask: Ask, story: Story, at_us: int) -> CohortFigures:
    """Load the narrowest cohort that is large enough, else the largest."""
    model = str(story.fact("model"))
    low, high = prompt_band(story.prompt_tokens)
    hour = at_us - at_us % HOUR_US
    sized = {"prompt_from": low, "prompt_until": high}
    size = f"prompts of {low} to {high - 1} tokens" if high < 1 << 40 else f"prompts from {low} tokens on"
    ladder: list[tuple[str, dict[str, Any]]] = [
        (f"{model}, {size}, the same hour", {**sized, "from_us": hour, "until_us": hour + HOUR_US}),
        (f"{model}, {size}, a day around", {**sized, "from_us": at_us - DAY_US, "until_us": at_us + DAY_US}),
        (f"{model}, a day around", {"from_us": at_us - DAY_US, "until_us": at_us + DAY_US}),
        (f"{model}, a week around", {"from_us": at_us - 7 * DAY_US, "until_us": at_us + 7 * DAY_US}),
    ]
    if not story.prompt_tokens:
        ladder = ladder[2:]
    best = CohortFigures("")
    for what, window in ladder if model else ():
        row = (await ask.query("cohort", {"model": model, "stream": story.stream, **window}))[0]
        if row["members"] > best.members:
            best = CohortFigures.of(what, row)
        if best.members >= MEMBERS_MIN:
            break
    return best
