"""The cookbook's page is what its commands print, and its answers are right: reckoned here from the same events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stream_fabric.events import AttemptTrace, RequestTrace
from stream_fabric.gap_histogram import itl_bounds_us, itl_bucket
from telemetry.ask.http import HttpAsk
from telemetry.ask.queries import HOUR_US
from tests.telemetry.asked import TOKEN, Asked
from tests.telemetry.cookbook import QUESTIONS, page
from tests.telemetry.fleet import DIED, DIED_US, SLOWED, SPARE, START_US, Fleet, fleet

PAGE = Path(__file__).parents[2] / "docs" / "traces.md"
WINDOW = {"from_us": START_US, "until_us": START_US + HOUR_US}

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    with Asked() as running:
        yield running


@pytest.fixture
def ask(asked: Asked) -> HttpAsk:
    return HttpAsk(asked.url, TOKEN)


class Hour:
    """The events of the hour's window."""

    def __init__(self, made: Fleet) -> None:
        self.made = made
        end = START_US + HOUR_US
        self.requests: list[RequestTrace] = [row for row in made.of(RequestTrace) if START_US <= row.at_us < end]
        self.attempts: list[AttemptTrace] = [row for row in made.of(AttemptTrace) if START_US <= row.at_us < end]

    def planted(self, kind: str) -> set[str]:
        return set(self.made.planted[kind])


@pytest.fixture(scope="module")
def hour() -> Hour:
    return Hour(fleet())


async def test_the_page_is_what_the_commands_print(ask: HttpAsk, hour: Hour) -> None:
    assert PAGE.read_text() == await page(ask, hour.made), "run: python -m tests.telemetry.cookbook > docs/traces.md"


def _time(rows: Rows, hour: Hour) -> bool:
    mine = [row for row in hour.requests if row.model == "llama-70b" and row.role != "refused"]
    told = next(row for row in rows if row["model"] == "llama-70b")
    share = 100 * sum(row.phases.decode_us for row in mine) / sum(row.wall_us for row in mine)
    return bool(told["requests"] == len(mine) and told["decode"] == round(share, 1))


def _slow(rows: Rows, hour: Hour) -> bool:
    worst = sorted(hour.requests, key=lambda row: -row.phases.engine_queue_us)[:20]
    return [row["stream"] for row in rows[:20]] == [row.stream for row in worst]


def _minutes(rows: Rows, hour: Hour) -> bool:
    mine = [row for row in hour.requests if row.model == "phi-4" and row.role == "created"]
    counted = Counter(row.at_us - row.at_us % 60_000_000 for row in mine)
    late = [row["p99_ms"] for row in rows if row["minute_us"] >= START_US + HOUR_US // 2]
    early = [row["p99_ms"] for row in rows if row["minute_us"] < START_US + HOUR_US // 2]
    return {row["minute_us"]: row["requests"] for row in rows} == counted and max(late) > 400 > 100 > max(early)


def _errors(rows: Rows, hour: Hour) -> bool:
    counted = Counter((row.model, row.ended, row.error_code) for row in hour.requests if row.error_code)
    return {(r["model"], r["ended"], r["error_code"]): r["requests"] for r in rows} == counted


def _tenants(rows: Rows, hour: Hour) -> bool:
    asked = [row for row in hour.requests if row.role in ("created", "refused")]
    tokens = Counter[str]()
    for row in asked:
        tokens[row.tenant] += row.output_tokens
    return {row["tenant"]: row["output_tokens_sum"] for row in rows} == tokens and sum(
        row["requests"] for row in rows
    ) == len(asked)


def _replicas(rows: Rows, hour: Hour) -> bool:
    return max(rows, key=lambda row: row["queue_p99_ms"])["replica"] == SLOWED


def _gaps(rows: Rows, hour: Hour) -> bool:
    low, _ = itl_bounds_us(itl_bucket(14_000))
    return all(row["p50_from_ms"] * 1000 == low for row in rows if row["model"] == "llama-70b")


def _faults(rows: Rows, hour: Hour) -> bool:
    return (rows[0]["replica"], rows[0]["lost"]) == (DIED, len(hour.planted("killed replica"))) and sum(
        row["handed_over"] for row in rows
    ) == len(hour.planted("handed over"))


def _recoveries(rows: Rows, hour: Hour) -> bool:
    planted = len(hour.planted("killed replica") | hour.planted("handed over"))
    return sum(row["completed"] for row in rows) == planted and all(3000 <= row["pause_p50_ms"] <= 4000 for row in rows)


def _placements(rows: Rows, hour: Hour) -> bool:
    mine = [row for row in hour.requests if row.model == "llama-70b" and row.role == "created"]
    counted = Counter(row.placement for row in mine)
    queued = next(row for row in rows if row["placement"] == "queued")
    return {row["placement"]: row["requests"] for row in rows} == counted and queued["ttft_p50_ms"] > 4000


def _believed(rows: Rows, hour: Hour) -> bool:
    believed, found = Counter[str](), Counter[str]()
    for row in hour.attempts:
        if row.believed_cached_tokens and row.ended != "lost":
            believed[row.replica] += row.believed_cached_tokens
            found[row.replica] += row.cached_tokens
    return {r["replica"]: (r["believed"], r["found"]) for r in rows} == {r: (believed[r], found[r]) for r in believed}


def _cached(rows: Rows, hour: Hour) -> bool:
    top = rows[0]
    mine = [r for r in hour.requests if r.role == "created" and (r.tenant, r.model) == (top["tenant"], top["model"])]
    prompt = sum(row.prompt_tokens for row in mine)
    share = 100 * sum(row.cached_tokens for row in mine) / prompt
    return bool(top["prompt_sum"] == prompt and top["cached_percent"] == round(share, 1))


def _sessions(rows: Rows, hour: Hour) -> bool:
    first = rows[0]
    used = {row.replica for row in hour.requests if row.session_hash == first["session_hash"] and row.role == "created"}
    return bool(first["replicas_used"] == len(used - {""}))


def _stalls(rows: Rows, hour: Hour) -> bool:
    stalled = {row.stream for row in hour.requests if row.phases.client_stall_us}
    return stalled <= hour.planted("slow client") and sum(row["stalled"] for row in rows) == len(stalled)


def _structured(rows: Rows, hour: Hour) -> bool:
    kinds = [hour.planted(kind) for kind in ("reply checked", "repaired reply", "reply does not fit")]
    checked, repaired, misfits = map(len, kinds)
    return (
        sum(row["replies"] for row in rows) == checked + repaired + misfits
        and sum(row["repaired"] for row in rows) == repaired
        and sum(row["made_again"] for row in rows) == repaired + 2 * misfits
        and round(sum(row["invalid_percent"] * row["replies"] for row in rows) / 100) == misfits
        and all(row["check_p50_ms"] <= 4 and (not row["made_again"] or row["repair_p50_ms"] >= 2500) for row in rows)
    )


def _steered(rows: Rows, hour: Hour) -> bool:
    streams = len(hour.planted("steered"))
    return (
        sum(row["streams"] for row in rows) == streams
        and sum(row["applied"] for row in rows) == 2 * streams
        and sum(row["refused"] for row in rows) == streams
        and all(row["waited_p50_ms"] <= 20 < 800 <= row["next_token_p50_ms"] and not row["unanswered"] for row in rows)
    )


def _resumes(rows: Rows, hour: Hour) -> bool:
    return sum(row["resumed"] for row in rows) == sum(row.role == "resumed" for row in hour.requests) and all(
        10_000 <= row["gap_p50_ms"] <= 30_000 for row in rows
    )


def _queues(rows: Rows, hour: Hour) -> bool:
    mine = [row for row in hour.requests if row.pool == "llama"]
    return sum(row["queued"] for row in rows) == sum(
        row.placement == "queued" and row.role == "created" for row in mine
    ) and sum(row["refused"] for row in rows) == sum(row.ended == "refused" for row in mine)


def _refusals(rows: Rows, hour: Hour) -> bool:
    counted = Counter(row.tenant for row in hour.requests if row.ended == "refused")
    return {row["tenant"]: row["requests"] for row in rows} == counted and {row["error_code"] for row in rows} == {
        "pool_full"
    }


def _wasted(rows: Rows, hour: Hour) -> bool:
    cancelled = [row for row in hour.attempts if row.ended == "cancelled"]
    return sum(row["wasted"] for row in rows if row["ended"] == "cancelled") == 6 * len(cancelled) > 0


def _regions(rows: Rows, hour: Hour) -> bool:
    served = {row.stream: row.region for row in hour.attempts if row.billed}
    counted = Counter(
        (row.region, served[row.stream]) for row in hour.requests if row.role == "created" and row.stream in served
    )
    return {(row["from_region"], row["to_region"]): row["requests"] for row in rows} == counted


def _residuals(rows: Rows, hour: Hour) -> bool:
    return all(row["p99_percent"] < 2 for row in rows) and {row["role"] for row in rows} == {
        "created", "resumed", "attached",
    }  # fmt: skip


def _fleet(rows: Rows, hour: Hour) -> bool:
    told = [(row["what"], row["state"], row["replica"]) for row in rows]
    return told == [
        ("lease", "ready", SPARE), ("shed", "pool", ""), ("dead", "", DIED), ("breaker", "closed", DIED),
        ("breaker", "half_open", DIED), ("breaker", "open", DIED),
    ]  # fmt: skip


def _usage(rows: Rows, hour: Hour) -> bool:
    billed = [row for row in hour.attempts if row.billed]
    return sum(row["output_tokens"] for row in rows) == sum(row.output_tokens for row in billed) and sum(
        row["price_micro"] for row in rows
    ) == sum(row.price_micro for row in billed)


ANSWERS: dict[str, Callable[[Rows, Hour], bool]] = {
    "where_time_goes": _time,
    "slow": _slow,
    "ttft_by_minute": _minutes,
    "errors": _errors,
    "tenants": _tenants,
    "replicas": _replicas,
    "token_gaps": _gaps,
    "faults": _faults,
    "recoveries": _recoveries,
    "placements": _placements,
    "believed": _believed,
    "cached": _cached,
    "sessions": _sessions,
    "stalls": _stalls,
    "resumes": _resumes,
    "structured": _structured,
    "steered": _steered,
    "queues": _queues,
    "refusals": _refusals,
    "wasted": _wasted,
    "regions": _regions,
    "residuals": _residuals,
    "fleet": _fleet,
    "usage_by_hour": _usage,
}


@pytest.mark.parametrize(("name", "more"), [(name, more) for _, name, more in QUESTIONS], ids=lambda v: str(v))
async def test_the_answer_is_right(ask: HttpAsk, hour: Hour, name: str, more: dict[str, str]) -> None:
    rows = await ask.query(name, {**WINDOW, **more, "top": 1000})
    assert rows
    assert ANSWERS[name](rows, hour), rows[:5]


async def test_a_pools_timeline_tells_what_happened_in_order_and_what_requests_noticed(
    ask: HttpAsk, hour: Hour
) -> None:
    window = {"from_us": DIED_US - 5 * 60_000_000, "until_us": DIED_US + 5 * 60_000_000}
    rows = await ask.query("timeline", {**window, "pool": "llama"})
    assert [row["at_us"] for row in rows] == sorted(row["at_us"] for row in rows)
    fleet_rows = [row for row in rows if row["what"] != "requests"]
    assert [(row["what"], row["state"], row["replica"]) for row in fleet_rows] == [
        ("breaker", "open", DIED), ("breaker", "half_open", DIED), ("breaker", "closed", DIED), ("dead", "", DIED),
        ("shed", "pool", ""), ("lease", "ready", SPARE),
    ]  # fmt: skip
    assert fleet_rows[0]["rested_on"] == "failures 5, open_s 2"
    assert fleet_rows[-1]["asked_by"] == "operator"
    noticed = [row for row in rows if row["what"] == "requests"]
    mine = [
        row
        for row in hour.requests
        if row.pool == "llama" and row.role in ("created", "refused")
        and window["from_us"] <= row.at_us < window["until_us"]
    ]  # fmt: skip
    counted = Counter(row.at_us - row.at_us % 60_000_000 for row in mine if _noticed(row))
    assert [row["at_us"] for row in noticed] == sorted(counted)
    outlived = sum(row.attempts > 1 for row in mine)
    said = [row["rested_on"].split(", ") for row in noticed]
    told = [part for parts in said for part in parts if part.startswith("outlived a replica ")]
    assert outlived == sum(int(part.rpartition(" ")[2]) for part in told) > 0
    assert await ask.query("timeline", {**window, "pool": "nobody's"}) == []


def _noticed(row: RequestTrace) -> bool:
    return row.placement == "queued" or row.ended in ("refused", "failed") or row.attempts > 1
