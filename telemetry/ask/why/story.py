"""The story of one stream, put together from its events: readers in order, attempts, and its cohort. Pure.

Events may be missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from stream_fabric.events import PHASES

Row = Mapping[str, Any]

BANDS = (0, 128, 512, 2048, 8192, 32_768, 131_072, 1 << 40)
"""Bounds of the prompt sizes that are compared with each other, in tokens."""
MEMBERS_MIN = 30
"""Minimum size of a cohort."""


def prompt_band(prompt_tokens: int) -> tuple[int, int]:
    """Return the bounds of the prompt sizes that are compared with this one; the upper is excluded."""
    return next((low, high) for low, high in pairwise(BANDS) if low <= prompt_tokens < high)


@dataclass(frozen=True)
class Reader:
    """One reader, a row of ``requests``. The time of a reader that came back begins with the gap before it."""

    row: Row

    @property
    def role(self) -> str:
        return str(self.row["role"])

    @property
    def label(self) -> str:
        """Role as a user reads it."""
        return "retry by idempotency key" if self.role == "attached" else self.role

    @property
    def ended(self) -> str:
        """Outcome of the reader, for example ``completed`` or ``left``."""
        return str(self.row["ended"])

    @property
    def until_us(self) -> int:
        return int(self.row["at_us"])

    @property
    def from_us(self) -> int:
        return self.until_us - int(self.row["wall_us"])

    @property
    def came_us(self) -> int:
        """Unix time at which the reader connected, after its resume gap."""
        return self.from_us + int(self.row["resume_gap_us"])

    def phase(self, name: str) -> int:
        return int(self.row[name])

    @property
    def phases(self) -> list[tuple[str, int]]:
        """Phases in their likely order, the residual last. They add up to ``wall_us``."""
        ordered = [name for name in _IN_ORDER if self.row[name]]
        return [(name, int(self.row[name])) for name in ordered]


_IN_ORDER = (
    "resume_gap_us", "gateway_us", "admission_us", "pool_queue_us", "fabric_us", "engine_queue_us", "prefill_us",
    "decode_us", "steer_us", "recovery_us", "check_us", "client_stall_us", "residual_us",
)  # fmt: skip
assert sorted(_IN_ORDER) == sorted(PHASES)


@dataclass(frozen=True)
class Segment:
    """A part of the client's time. The segments of a stream add up to ``Story.wall_us``."""

    name: str
    us: int
    reader: int
    """Number of the reader in line, from 1; 0: between two readers, or the overlap of two (negative)."""


@dataclass(frozen=True)
class CohortFigures:
    """Figures of a cohort, each (p50, p95, p99)."""

    what: str
    members: int = 0
    figures: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    cached_share: float = 0.0
    """Median share of the prompt that was cached."""

    @property
    def enough(self) -> bool:
        """True when the cohort is large enough for a comparison."""
        return self.members >= MEMBERS_MIN

    def p50(self, name: str) -> float:
        return self.figures[name][0] if name in self.figures else 0.0

    def p95(self, name: str) -> float:
        return self.figures[name][1] if name in self.figures else 0.0

    def p99(self, name: str) -> float:
        return self.figures[name][2] if name in self.figures else 0.0

    @classmethod
    def of(cls, what: str, row: Row) -> CohortFigures:
        """Read a row of the query ``cohort``. ``what`` describes the cohort."""
        figures = {
            name.removesuffix("_q"): (figure(value[0]), figure(value[1]), figure(value[2]))
            for name, value in row.items()
            if name.endswith("_q") and len(value) == 3
        }
        return cls(what, int(row["members"]), figures, figure(row["cached_share_q"][1]))


def figure(value: float | None) -> float:
    """Return a quantile as a float; NaN and null, which an empty set gives, become 0."""
    return 0.0 if value is None or math.isnan(value) else float(value)


@dataclass(frozen=True)
class Story:
    """One stream's events, and the cohort and session to compare them with."""

    id: str
    stream: str
    """Empty: the request was refused before a stream existed."""
    line: tuple[Reader, ...]
    """Readers that followed each other: one client's view."""
    beside: tuple[Reader, ...]
    """Readers at the same time as those in line."""
    attempts: tuple[Row, ...]
    cohort: CohortFigures = CohortFigures("")
    session_share: float = 0.0
    """Median share of the prompt that the session's earlier requests found cached."""
    session_members: int = 0
    fleet: tuple[Row, ...] = ()
    other_streams: tuple[str, ...] = ()
    """Other streams of the same trace."""

    @property
    def created(self) -> Reader | None:
        """The request that created the stream. None: its event is missing."""
        return next((reader for reader in self.line if reader.role in ("created", "refused")), None)

    @property
    def first(self) -> Reader | None:
        return self.line[0] if self.line else None

    @property
    def last(self) -> Reader | None:
        return self.line[-1] if self.line else None

    @property
    def bill(self) -> Row | None:
        """Last attempt with a billing event. None: no such event arrived."""
        return next((row for row in reversed(self.attempts) if row["billed"]), None)

    def fact(self, name: str) -> Any:
        """Return the first value of a field: from the creating request, another reader, or an attempt."""
        rows = [reader.row for reader in (*self.line, *self.beside)]
        if self.created is not None:
            rows.insert(0, self.created.row)
        for row in (*rows, *reversed(self.attempts)):
            if row.get(name):
                return row[name]
        return ""

    @property
    def prompt_tokens(self) -> int:
        return int(self.fact("prompt_tokens") or 0)

    @property
    def cached_tokens(self) -> int:
        source = self.bill or (self.created.row if self.created else {})
        return int(source.get("cached_tokens", 0))

    @property
    def output_tokens(self) -> int:
        source = self.bill or (self.last.row if self.last else {})
        return int(source.get("output_tokens", 0))

    @property
    def ttft_us(self) -> int:
        """Time to first token in microseconds; 0: no token, or the event is missing."""
        return int(self.created.row["ttft_us"]) if self.created else 0

    @property
    def error_code(self) -> str:
        source = self.last.row if self.last else self.bill or {}
        return str(source.get("error_code", ""))

    @property
    def outcome(self) -> str:
        """Outcome of the last reader in line; without readers, of the billed attempt."""
        if self.last is not None:
            return self.last.ended
        return str(self.bill["ended"]) if self.bill else "unknown"

    @property
    def began_us(self) -> int:
        """Start of the known time; without the creating request, when an attempt began to wait."""
        known = [reader.from_us for reader in self.line[:1]]
        if self.created is None and self.attempts:
            known.append(min(attempt_from_us(row) for row in self.attempts))
        return min(known, default=0)

    @property
    def until_us(self) -> int:
        """End of the known time: of the last reader in line, else of the latest attempt."""
        if self.last is not None:
            return self.last.until_us
        return max((int(row["at_us"]) for row in self.attempts), default=0)

    @property
    def wall_us(self) -> int:
        """Time from the client's request to the end of its last reader, in µs."""
        return self.until_us - self.began_us

    def segments(self) -> list[Segment]:
        """Return the client's time by phase, in order; it adds up to ``wall_us``."""
        found: list[Segment] = []
        at = self.began_us
        for number, reader in enumerate(self.line, 1):
            if reader.from_us != at:
                name = "unrecorded" if number == 1 else "overlap" if reader.from_us < at else "between"
                found.append(Segment(name, reader.from_us - at, 0))
            found += [Segment(name, us, number) for name, us in reader.phases]
            at = reader.until_us
        if not self.line and self.attempts:
            found.append(Segment("unrecorded", self.wall_us, 0))
        return found

    def spent(self, name: str) -> int:
        """Return the µs in a phase over all readers in line. Time between two readers counts as a resume gap."""
        total = sum(reader.phase(name) for reader in self.line)
        if name == "resume_gap_us":
            total += sum(segment.us for segment in self.segments() if segment.name == "between")
        return total


_OF_ATTEMPT = (
    "waited_us", "inbox_us", "engine_queue_us", "prefill_us", "decode_us", "steer_us", "check_us"
)  # fmt: skip


def attempt_from_us(row: Row) -> int:
    """Return the time at which an attempt began to wait; without its durations, when it was reported."""
    known = sum(int(row.get(name) or 0) for name in _OF_ATTEMPT)
    return int(row["at_us"]) - known


def assemble(id: str, stream: str, readers: Sequence[Row], attempts: Sequence[Row]) -> Story:
    """Assemble a story. Its line is the creating request, then each reader that continued.

    A reader that began while another still read is beside the line, unless it shows that the other connection was dead.
    """
    waiting = sorted(map(Reader, readers), key=lambda reader: (reader.role != "created", reader.came_us))
    line: list[Reader] = []
    beside: list[Reader] = []
    for reader in waiting:
        (line if not line or _continues(reader, line[-1]) else beside).append(reader)
    return Story(id, stream, tuple(line), tuple(beside), tuple(attempts))


_GONE = ("left", "stalled", "drained")


def _continues(reader: Reader, last: Reader) -> bool:
    """Return True if ``reader`` is the client of ``last``, which came back."""
    if last.ended in _GONE and reader.came_us >= last.until_us:
        return True
    # The client resumed, or sent its request again: its first connection was dead, though its gateway did not know
    again = reader.role == "attached" or reader.phase("first_seq") > 1
    outlasts = reader.until_us > last.until_us or (reader.ended == "completed" and last.ended in _GONE)
    return again and outlasts and last.ended != "completed"


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A replica that placement scored for the request."""

    replica: str
    score_ms: float = 0.0
    matched_tokens: int = 0
    in_flight: int = 0
    load_ms: float = 0.0
    barred: str = ""


def candidates(story: Story) -> list[Candidate]:
    """Return the replicas that placement scored; empty: the scores were not recorded."""
    text = story.fact("scores_json")
    return msgspec.json.decode(text, type=list[Candidate]) if text else []
