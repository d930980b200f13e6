"""``usage reconcile``: compares the tokens that were settled, billed, streamed and generated.

- Settled: Redis counts usage in the step that ends a stream, by tenant, hour and model. While Redis holds the stream,
  it also keeps the stream's own count.
- Billed: the agent of the last attempt sends the usage with the stream's end.
- Streamed: the tokens sent to readers that together received all frames of the stream without overlap.
- Generated: the tokens that the engines made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stream_fabric.errors import BadRequest
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import StreamId, TenantId
from telemetry.ask.port import Ask
from telemetry.ask.queries import HOUR_US, Value
from telemetry.store.connection import QUERY_ROWS_MAX

Row = Mapping[str, Any]

PAGE = 1500
DISAGREEMENTS_MAX = 1000
"""Maximum disagreements that are listed; all are counted."""
_FIGURES = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")


class Settled(Protocol):
    """Settled usage in Redis; RedisStreamLog implements it."""

    async def usage(self, tenant: TenantId, hour: int) -> dict[str, tuple[int, Usage]]:
        """Return a tenant's usage in an hour of Unix time: model → (streams, usage)."""

    async def settled(self, stream: StreamId) -> tuple[str, Usage] | None:
        """Return (status, usage) of a stream. None: Redis does not hold the stream."""


@dataclass(frozen=True)
class Disagreement:
    """A stream, or an hour of a tenant and model, whose accounts disagree."""

    stream: str
    """Empty: the disagreement is about an hour of a tenant and model."""
    tenant: str
    model: str
    settled: int | None
    """Output tokens, as in the next three fields. None: unknown."""
    streamed: int | None
    billed: int | None
    generated: int | None
    why: str
    hour_us: int = 0


@dataclass
class Report:
    """Totals of one reconciliation, and the disagreements found."""

    from_us: int
    until_us: int
    streams: int = 0
    whole: int = 0
    """Streams that readers received whole."""
    held: int = 0
    """Streams that Redis still holds."""
    settled_output: int = 0
    billed_output: int = 0
    streamed_output: int = 0
    """Output tokens sent, of streams received whole."""
    generated: int = 0
    found: int = 0
    drift_tokens: int = 0
    """Prompt and output tokens by which settled and billed usage differ in the hours that disagree."""
    disagreements: list[Disagreement] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return not self.found

    def add(self, disagreement: Disagreement) -> None:
        """Count a disagreement, and list it unless the list is full."""
        self.found += 1
        if len(self.disagreements) < DISAGREEMENTS_MAX:
            self.disagreements.append(disagreement)


async def reconcile(ask: Ask, settled: Settled | None, from_us: int, until_us: int, tenant: str = "") -> Report:
    """Compare the accounts of all whole hours that the range touches.

    ``settled`` None: Redis is not asked, and settled usage is not compared.
    """
    from_us, until_us = from_us - from_us % HOUR_US, until_us + -until_us % HOUR_US
    report = Report(from_us, until_us)
    if settled is not None:  # first, so that thousands of streams do not push the few hours off the list
        await _compare_hours(ask, settled, report, tenant)
    await _compare_streams(ask, settled, report, tenant)
    return report


async def reconcile_hours(ask: Ask, settled: Settled, from_us: int, until_us: int) -> Report:
    """Compare settled with billed usage of whole hours, for one tenant after another. Streams are not compared."""
    report = Report(from_us - from_us % HOUR_US, until_us - until_us % HOUR_US)
    for tenant in await _tenant_names(ask, report):
        await _compare_hours(ask, settled, report, tenant)
    return report


# --- stream by stream ------------------------------------------------------------------------------------------


async def _compare_streams(ask: Ask, settled: Settled | None, report: Report, tenant: str) -> None:
    """Compare each billed stream, and report streams that readers received but no agent billed."""
    window: dict[str, Value] = {"from_us": report.from_us, "until_us": report.until_us, "tenant": tenant}
    after = ""
    while bills := await ask.query("bills", {**window, "after": after, "top": PAGE}):
        last = str(bills[-1]["stream"])
        shown: dict[str, list[Row]] = defaultdict(list)
        for row in await ask.query("shown", {**window, "after": after, "last": last}):
            shown[str(row["stream"])].append(row)
        for bill in bills:
            stream = str(bill["stream"])
            held = await settled.settled(StreamId(stream)) if settled is not None else None
            _compare_stream(report, bill, shown[stream], held)
        after = last
    after = ""
    while rows := await ask.query("unbilled", {**window, "after": after, "top": PAGE}):
        for row in rows:
            stream = str(row["stream"])
            held = await settled.settled(StreamId(stream)) if settled is not None else None
            if held is not None and held[0] == "live":
                continue  # it runs on; the gateway cut the reader off, for example because its key was revoked
            used = held[1].output if held is not None else None
            report.add(
                Disagreement(
                    stream, str(row["of_tenant"]), str(row["of_model"]), used, int(row["streamed"]), None, None,
                    "a reader received its end, but no bill arrived: the agent's events are late or lost",
                )
            )  # fmt: skip
        after = str(rows[-1]["stream"])


def _compare_stream(report: Report, bill: Row, readers: Sequence[Row], held: tuple[str, Usage] | None) -> None:
    """Add one billed stream to the report. ``held``: its status and usage in Redis."""
    billed, generated = int(bill["billed_output"]), int(bill["generated"])
    streamed = received_whole(readers, int(bill.get("last_seq", 0)))  # a telemetry of an earlier release lacks it
    report.streams += 1
    report.billed_output += billed
    report.generated += generated
    if streamed is not None:
        report.whole += 1
        report.streamed_output += min(max(billed, streamed[0]), streamed[1])
    ended = held is not None and held[0] != "live"
    report.held += ended
    settled = held[1].output if held is not None and ended else None
    if why := disagreement_reason(bill, settled, streamed):
        shown = None if streamed is None else streamed[1] if billed > streamed[1] else max(billed, streamed[0])
        report.add(
            Disagreement(
                str(bill["stream"]), str(bill["tenant"]), str(bill["model"]), settled, shown, billed, generated, why
            )
        )


def disagreement_reason(bill: Row, settled: int | None, streamed: tuple[int, int] | None) -> str:
    """Return the reason why a stream's accounts disagree. Empty: they agree.

    Tokens that an engine made beyond the bill are no disagreement: only streamed tokens are billed, and a cancel
    arrives while the engine is at work.
    """
    billed = int(bill["billed_output"])
    if int(bill["bills"]) > 1:
        return f"{bill['bills']} bills arrived: two processes each reported the stream's end"
    if settled is not None and settled != billed:
        return "Redis settled another count than was billed"
    if streamed is not None and not streamed[0] <= billed <= streamed[1]:
        lack = "fewer" if streamed[1] < billed else "more"
        return f"its readers received {lack} tokens than were billed"
    if int(bill["generated"]) < billed and not int(bill["silent"]):
        return "its engines made fewer tokens than were billed"
    return ""


_TO_THE_END = ("completed", "cancelled", "failed", "incomplete")


def received_whole(readers: Iterable[Row], last_seq: int = 0) -> tuple[int, int] | None:
    """Return the (least, most) tokens that a stream's readers together received, if no frame is missing.

    ``last_seq``: the stream's last frame; 0: it is not known, and the furthest reader that failed is believed. A reader
    that the gateway cut off, for example because its key was revoked, also failed, but before that frame.
    Both are equal when each reader continued with the frame after the last one's. They differ when a reader resumed
    before frames that were sent to the previous one: it received some tokens twice. None: frames are missing.
    """
    rows = sorted(readers, key=lambda row: (int(row["first_seq"]), -int(row["last_seq"])))
    end = max((int(row["last_seq"]) for row in rows if row["ended"] in _TO_THE_END), default=0)
    reached = most = least = 0
    overlap = False
    while end and reached < end:
        onward = [row for row in rows if int(row["first_seq"]) <= reached + 1 and int(row["last_seq"]) > reached]
        if not onward:
            return None
        # The reader that continues without an overlap, and reaches furthest
        best = max(onward, key=lambda row: (int(row["first_seq"]) == reached + 1, int(row["last_seq"])))
        overlap = overlap or int(best["first_seq"]) != reached + 1
        tokens = int(best["streamed_tokens"])
        most, least, reached = most + tokens, max(least, tokens), int(best["last_seq"])
    if not end or end < last_seq:
        return None
    return (least if overlap else most), most


# --- hour by hour ----------------------------------------------------------------------------------------------

_Key = tuple[int, str, str]
_Sums = tuple[int, ...]


async def _compare_hours(ask: Ask, settled: Settled, report: Report, tenant: str) -> None:
    """Compare settled with billed usage, for each tenant, hour and model."""
    window: dict[str, Value] = {"from_us": report.from_us, "until_us": report.until_us, "tenant": tenant}
    # The next hour is read too: its first bills may belong to streams that ended in this hour
    wider = {**window, "until_us": report.until_us + HOUR_US}
    ledger = _by_key(await hour_rows(ask, "bills_by_hour", window))
    edges = _by_key(await hour_rows(ask, "billed_near_hours", wider))
    for name in [tenant] if tenant else await _tenant_names(ask, report):
        for hour_us in range(report.from_us, report.until_us, HOUR_US):
            counted = await settled.usage(TenantId(name), hour_us // HOUR_US)
            models = {*counted, *(key[2] for key in ledger if key[:2] == (hour_us, name))}
            for model in sorted(models):
                streams, used = counted.get(model, (0, Usage()))
                report.settled_output += used.output
                ours = (streams, used.prompt, used.cached, used.output)
                key = (hour_us, name, model)
                theirs = ledger.get(key, _NONE)
                if not hour_agrees(
                    ours, theirs, edges.get(key, _NONE), edges.get((hour_us + HOUR_US, name, model), _NONE)
                ):
                    report.drift_tokens += abs(ours[1] - theirs[1]) + abs(ours[3] - theirs[3])
                    report.add(
                        Disagreement(
                            "", name, model, used.output, None, theirs[3], None, _hour_reason(ours, theirs), hour_us
                        )
                    )


async def _tenant_names(ask: Ask, report: Report) -> list[str]:
    """Return tenants with requests or bills in the window or the week before: a tenant may have lost every bill."""
    window: dict[str, Value] = {"from_us": report.from_us, "until_us": report.until_us + HOUR_US}
    found: list[str] = []
    while rows := await ask.query("tenant_names", {**window, "after": found[-1] if found else "", "top": PAGE}):
        found += [str(row["tenant"]) for row in rows]
    return found


async def hour_rows(ask: Ask, name: str, window: Mapping[str, Value], rows_max: int = 0) -> list[Row]:
    """Return all rows of a query by hour, tenant and model. A bill on a page that is not read would count as lost.

    Raises BadRequest for more than ``rows_max`` rows; 0: any number.
    """
    found: list[Row] = []
    after: dict[str, Value] = {}
    while rows := await ask.query(name, {**window, **after, "top": QUERY_ROWS_MAX}):
        found += rows
        if 0 < rows_max < len(found):
            raise BadRequest(f"usage has more than {rows_max} rows in this time; choose a shorter time or a tenant")
        if len(rows) < QUERY_ROWS_MAX:
            break
        last = rows[-1]
        after = {"after_us": int(last["hour_us"]), "after_1": str(last["tenant"]), "after_2": str(last["model"])}
    return found


_NONE: _Sums = (0, 0, 0, 0)


def _by_key(rows: Iterable[Row]) -> dict[_Key, _Sums]:
    """Index rows by (hour, tenant, model)."""
    return {
        (int(row["hour_us"]), str(row["tenant"]), str(row["model"])): tuple(int(row[name]) for name in _FIGURES)
        for row in rows
    }


def hour_agrees(settled: _Sums, billed: _Sums, came_late: _Sums, went_late: _Sums) -> bool:
    """Return True if an hour's tokens agree, apart from bills sent just after the hour in which their streams ended.

    ``came_late``: bills at the start of this hour. ``went_late``: bills at the start of the next hour. Numbers of
    streams are not compared: one that ended before its producer wrote anything is not settled, and may have a bill.
    """
    return all(
        theirs - late <= ours <= theirs + next_late
        for ours, theirs, late, next_late in zip(settled[1:], billed[1:], came_late[1:], went_late[1:], strict=True)
    )


def _hour_reason(settled: _Sums, billed: _Sums) -> str:
    parts = [
        f"{name.removesuffix('_tokens')} {ours - theirs:+d}"
        for name, ours, theirs in zip(_FIGURES[1:], settled[1:], billed[1:], strict=True)
        if ours != theirs
    ]
    return f"settled minus billed: {', '.join(parts)}; see the disagreeing streams of that hour"
