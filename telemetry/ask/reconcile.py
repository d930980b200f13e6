"""``usage reconcile``: what was settled in Redis, what gateways showed and what engines made must be the same tokens.

Settled: counted by the fabric in the step that ends a stream, by tenant, hour and model, and for as long as it holds
the stream also by itself. Billed: what the agent of the stream's last try told with its end. Shown: what readers saw
who, together and without overlap, saw all of its frames.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stream_fabric.frames import Usage
from stream_fabric.ids import StreamId, TenantId
from telemetry.ask.port import Ask
from telemetry.ask.queries import HOUR_US, Value

Row = Mapping[str, Any]

PAGE = 1500
DISAGREEMENTS_MAX = 1000
"""So many are listed; all are counted."""
_FIGURES = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")


class Settled(Protocol):
    """The fabric's own account: a RedisStreamLog."""

    async def usage(self, tenant: TenantId, hour: int) -> dict[str, tuple[int, Usage]]: ...
    async def settled(self, stream: StreamId) -> tuple[str, Usage] | None: ...


@dataclass(frozen=True)
class Disagreement:
    stream: str
    """Empty: of an hour of a tenant and model."""
    tenant: str
    model: str
    settled: int | None
    """Output tokens; None: not known."""
    streamed: int | None
    billed: int | None
    generated: int | None
    why: str
    hour_us: int = 0


@dataclass
class Report:
    from_us: int
    until_us: int
    streams: int = 0
    whole: int = 0
    """Of them, those that readers saw whole."""
    held: int = 0
    """Of them, those that the fabric still holds."""
    settled_output: int = 0
    billed_output: int = 0
    streamed_output: int = 0
    """Of those that were seen whole."""
    generated: int = 0
    found: int = 0
    disagreements: list[Disagreement] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return not self.found

    def add(self, disagreement: Disagreement) -> None:
        self.found += 1
        if len(self.disagreements) < DISAGREEMENTS_MAX:
            self.disagreements.append(disagreement)


async def reconcile(
    ask: Ask, settled: Settled | None, from_us: int, until_us: int, tenant: str = "", *, streams_held: bool = True
) -> Report:
    """From one whole hour to another. ``settled``: None where Redis is out of reach; then two ways."""
    from_us, until_us = from_us - from_us % HOUR_US, until_us + -until_us % HOUR_US
    report = Report(from_us, until_us)
    if settled is not None:  # first: they are few, and not to be pushed off the list by thousands of streams
        await _hours(ask, settled, report, tenant)
    await _streams(ask, settled if streams_held else None, report, tenant)
    return report


# --- stream by stream ------------------------------------------------------------------------------------------


async def _streams(ask: Ask, settled: Settled | None, report: Report, tenant: str) -> None:
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
            _one(report, bill, shown[stream], held)
        after = last
    after = ""
    while rows := await ask.query("unbilled", {**window, "after": after, "top": PAGE}):
        for row in rows:
            stream = str(row["stream"])
            held = await settled.settled(StreamId(stream)) if settled is not None else None
            used = held[1].output if held is not None and held[0] != "live" else None
            report.add(
                Disagreement(
                    stream, str(row["of_tenant"]), str(row["of_model"]), used, int(row["streamed"]), None, None,
                    "a reader saw its end, but no bill was told: the agent's events are not here yet, or were lost",
                )
            )  # fmt: skip
        after = str(rows[-1]["stream"])


def _one(report: Report, bill: Row, readers: Sequence[Row], held: tuple[str, Usage] | None) -> None:
    billed, generated = int(bill["billed_output"]), int(bill["generated"])
    streamed = seen_whole(readers)
    report.streams += 1
    report.billed_output += billed
    report.generated += generated
    if streamed is not None:
        report.whole += 1
        report.streamed_output += min(max(billed, streamed[0]), streamed[1])
    ended = held is not None and held[0] != "live"
    report.held += ended
    settled = held[1].output if held is not None and ended else None
    if why := judge(bill, settled, streamed):
        shown = None if streamed is None else streamed[1] if billed > streamed[1] else max(billed, streamed[0])
        report.add(
            Disagreement(
                str(bill["stream"]), str(bill["tenant"]), str(bill["model"]), settled, shown, billed, generated, why
            )
        )


def judge(bill: Row, settled: int | None, streamed: tuple[int, int] | None) -> str:
    """Why a stream's accounts disagree; empty: they agree. What an engine made beyond the bill is no disagreement:
    billed is what was streamed, and a cancel comes while the engine is at work."""
    billed = int(bill["billed_output"])
    if int(bill["bills"]) > 1:
        return f"{bill['bills']} bills were told: two processes believed that they had ended it"
    if settled is not None and settled != billed:
        return "the fabric has settled another count than was billed"
    if streamed is not None and not streamed[0] <= billed <= streamed[1]:
        lack = "fewer" if streamed[1] < billed else "more"
        return f"its readers were shown {lack} tokens than were billed"
    if int(bill["generated"]) < billed and not int(bill["silent"]):
        return "its engines made fewer tokens than were billed"
    return ""


_TO_THE_END = ("completed", "cancelled", "failed", "incomplete")


def seen_whole(readers: Iterable[Row]) -> tuple[int, int] | None:
    """The tokens of a stream as they were shown, at least and at most, where its readers together saw it from its first
    frame to its terminal. The same twice where each went on with the frame after the last one's; one that came back to
    frames which had been written and not applied was shown some twice. None: nobody saw it whole."""
    rows = sorted(readers, key=lambda row: (int(row["first_seq"]), -int(row["last_seq"])))
    end = max((int(row["last_seq"]) for row in rows if row["ended"] in _TO_THE_END), default=0)
    reached = most = least = 0
    overlap = False
    while end and reached < end:
        onward = [row for row in rows if int(row["first_seq"]) <= reached + 1 and int(row["last_seq"]) > reached]
        if not onward:
            return None
        # Who goes on without an overlap, and the furthest
        best = max(onward, key=lambda row: (int(row["first_seq"]) == reached + 1, int(row["last_seq"])))
        overlap = overlap or int(best["first_seq"]) != reached + 1
        tokens = int(best["streamed_tokens"])
        most, least, reached = most + tokens, max(least, tokens), int(best["last_seq"])
    if not end:
        return None
    return (least if overlap else most), most


# --- hour by hour ----------------------------------------------------------------------------------------------

_Key = tuple[int, str, str]
_Sums = tuple[int, ...]


async def _hours(ask: Ask, settled: Settled, report: Report, tenant: str) -> None:
    window: dict[str, Value] = {"from_us": report.from_us, "until_us": report.until_us, "tenant": tenant}
    # The hour after counts too: its first bills may be of streams that ended in ours
    wider = {**window, "until_us": report.until_us + HOUR_US}
    ledger = _by_key(await ask.query("usage_by_hour", window))
    edges = _by_key(await ask.query("billed_near_hours", wider))
    for name in [tenant] if tenant else await _tenants(ask, report):
        for hour_us in range(report.from_us, report.until_us, HOUR_US):
            counted = await settled.usage(TenantId(name), hour_us // HOUR_US)
            models = {*counted, *(key[2] for key in ledger if key[:2] == (hour_us, name))}
            for model in sorted(models):
                streams, used = counted.get(model, (0, Usage()))
                report.settled_output += used.output
                ours = (streams, used.prompt, used.cached, used.output)
                key = (hour_us, name, model)
                theirs = ledger.get(key, _NONE)
                if not within(ours, theirs, edges.get(key, _NONE), edges.get((hour_us + HOUR_US, name, model), _NONE)):
                    report.add(
                        Disagreement(
                            "", name, model, used.output, None, theirs[3], None, _hour_why(ours, theirs), hour_us
                        )
                    )


async def _tenants(ask: Ask, report: Report) -> list[str]:
    """Not those of the window's bills alone: one whose every bill was lost would look like one who asked nothing."""
    window: dict[str, Value] = {"from_us": report.from_us, "until_us": report.until_us + HOUR_US}
    found: list[str] = []
    while rows := await ask.query("tenant_names", {**window, "after": found[-1] if found else "", "top": PAGE}):
        found += [str(row["tenant"]) for row in rows]
    return found


_NONE: _Sums = (0, 0, 0, 0)


def _by_key(rows: Iterable[Row]) -> dict[_Key, _Sums]:
    return {
        (int(row["hour_us"]), str(row["tenant"]), str(row["model"])): tuple(int(row[name]) for name in _FIGURES)
        for row in rows
    }


def within(settled: _Sums, billed: _Sums, came_late: _Sums, went_late: _Sums) -> bool:
    """Whether an hour's tokens agree, but for bills told just after the hour in which their streams ended. Streams are
    not compared: one that ended before any producer had it is settled with nothing, and has no bill."""
    return all(
        theirs - late <= ours <= theirs + next_late
        for ours, theirs, late, next_late in zip(settled[1:], billed[1:], came_late[1:], went_late[1:], strict=True)
    )


def _hour_why(settled: _Sums, billed: _Sums) -> str:
    parts = [
        f"{name.removesuffix('_tokens')} {ours - theirs:+d}"
        for name, ours, theirs in zip(_FIGURES[1:], settled[1:], billed[1:], strict=True)
        if ours != theirs
    ]
    return f"settled against billed: {', '.join(parts)}; the streams of that hour that disagree tell which"
