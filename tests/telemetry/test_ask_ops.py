"""Saved queries of the operations page, on an hour of which every request is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest

from dashboards.boards.streams import STREAMS
from dashboards.boards.tenants import TENANTS
from dashboards.build import Board, Sql
from stream_fabric.events import AttemptTrace, Phases, RequestTrace, encode_event
from stream_fabric.gap_histogram import itl_bounds_us
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId
from telemetry.ask.http import HttpAsk
from telemetry.ask.queries import HOUR_US, SAVED, Value
from telemetry.ask.store_ask import StoreAsk
from telemetry.ask.views import answer_path
from telemetry.ask.why.explain import why
from telemetry.consume.rows import build_batch
from telemetry.emit.record import Part, PlainRecord
from telemetry.store.store import Store
from tests.telemetry.asked import TOKEN, Asked
from tests.telemetry.fleet import START_US, fleet

END_US = START_US + HOUR_US
WINDOW: dict[str, Value] = {"from_us": START_US, "until_us": END_US}
STEP_S = 900
HOSTILE = ("' OR 1=1 -- ", "x\\' OR tenant != '", "acme' UNION ALL SELECT 1 -- ", "{tenant:String}", "acme\x00", "%")
NAMED = ("series", "series_of_tenant", "series_itl", "series_itl_of_tenant", "filters", "coverage")


@pytest.fixture(scope="module")
def ask() -> Iterator[HttpAsk]:
    with Asked() as running:
        yield HttpAsk(running.url, TOKEN)


def requests(**of: str) -> list[RequestTrace]:
    """Requests of the hour that are counted as such, with these fields."""
    return [
        row
        for row in fleet().of(RequestTrace)
        if START_US <= row.at_us < END_US
        and row.role in ("created", "refused")
        and all(getattr(row, name) == value for name, value in of.items())
    ]


def attempts(**of: str) -> list[AttemptTrace]:
    """Attempts of the hour that tell ITL, with these fields."""
    return [
        row
        for row in fleet().of(AttemptTrace)
        if START_US <= row.at_us < END_US
        and row.itl_sketch
        and all(getattr(row, name) == value for name, value in of.items())
    ]


def step_us(at_us: int) -> int:
    return at_us - at_us % (STEP_S * 1_000_000)


@pytest.mark.parametrize(
    "of",
    [
        {},
        {"model": "phi-4"},
        {"ended": "failed"},
        {"model": "llama-70b", "ended": "refused"},
        {"tenant": "acme"},
        {"tenant": "globex", "model": "qwen-7b"},
        {"tenant": "acme", "ended": "cancelled"},
    ],
)
async def test_series_counts_the_requests_of_its_filters_and_no_other(ask: HttpAsk, of: dict[str, str]) -> None:
    name = "series_of_tenant" if "tenant" in of else "series"
    rows = await ask.query(name, {**WINDOW, "step_s": STEP_S, **of})
    mine = requests(**of)
    parts: dict[str, list[dict[str, Any]]] = {"step": [], "pool": [], "all": []}
    for row in rows:
        parts[row["part"]].append(row)
    assert {row["step_us"]: row["requests"] for row in parts["step"]} == Counter(step_us(row.at_us) for row in mine)
    assert [row["step_us"] for row in parts["step"]] == sorted(row["step_us"] for row in parts["step"])
    assert {row["pool"]: row["requests"] for row in parts["pool"]} == Counter(row.pool for row in mine)
    (total,) = parts["all"]
    assert total["requests"] == len(mine)
    assert total["failed"] == sum(row.ended == "failed" for row in mine)
    assert total["refused"] == sum(row.ended == "refused" for row in mine)
    first = sorted(row.ttft_us / 1000 for row in mine if row.ttft_us)
    if first:
        assert first[0] * 0.99 <= total["ttft_p50_ms"] <= total["ttft_p95_ms"] <= total["ttft_p99_ms"]
        assert total["ttft_p99_ms"] <= first[-1] * 1.01
    else:
        assert total["ttft_p99_ms"] is None


@pytest.mark.parametrize("of", [{}, {"model": "phi-4"}, {"tenant": "acme"}, {"tenant": "globex", "model": "phi-4"}])
async def test_itl_is_that_of_the_attempts(ask: HttpAsk, of: dict[str, str]) -> None:
    name = "series_itl_of_tenant" if "tenant" in of else "series_itl"
    rows = await ask.query(name, {**WINDOW, "step_s": STEP_S, **of})
    mine = attempts(**of)
    assert {row["step_us"] for row in rows} == {step_us(row.at_us) for row in mine}
    for row in rows:
        inside = [one for one in mine if step_us(one.at_us) == row["step_us"]]
        counts = [sum(column) for column in zip_longest(*(one.itl_sketch for one in inside), fillvalue=0)]
        assert row["itl_max_ms"] == max(one.itl_max_us for one in inside) / 1000
        for share, field in ((0.5, "itl_p50_ms"), (0.95, "itl_p95_ms"), (0.99, "itl_p99_ms")):
            reached = next(b for b in range(len(counts)) if sum(counts[: b + 1]) >= share * sum(counts) and counts[b])
            assert row[field] == itl_bounds_us(reached)[0] / 1000, field


async def test_steps_of_less_than_a_minute_are_minutes(ask: HttpAsk) -> None:
    for name, more in (("series", {}), ("series_of_tenant", {"tenant": "acme"})):
        rows = await ask.query(name, {**WINDOW, "step_s": 0, **more})
        steps = [row["step_us"] for row in rows if row["part"] == "step"]
        assert steps and all(us % 60_000_000 == 0 for us in steps)


async def test_filters_are_the_tenants_and_models_of_the_window(ask: HttpAsk) -> None:
    rows = await ask.query("filters", WINDOW)
    mine = requests()
    assert {row["tenant"]: row["requests"] for row in rows if row["tenant"]} == Counter(row.tenant for row in mine)
    assert {row["model"]: row["requests"] for row in rows if row["model"]} == Counter(row.model for row in mine)


async def test_coverage_tells_the_oldest_and_the_newest(ask: HttpAsk) -> None:
    (row,) = await ask.query("coverage", {})
    times = [one.at_us for one in fleet().of(RequestTrace)]
    assert (row["requests"], row["oldest_us"], row["newest_us"]) == (len(times), min(times), max(times))
    assert row["rollups_oldest_us"] == min(times) - min(times) % 60_000_000


async def test_slow_is_filtered_by_its_outcome(ask: HttpAsk) -> None:
    given = {"since": "2026-11-20T10:00:00Z", "until": "2026-11-20T11:00:00Z", "top": "1000"}
    rows = (await answer_path(ask, "slow", {**given, "ended": "failed", "tenant": "globex"}, END_US)).value
    assert rows and {(row["ended"], row["tenant"]) for row in rows} == {("failed", "globex")}
    assert all((row["id"] or row["stream"]) and row["error_code"] for row in rows)


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_a_filter_is_never_read_as_sql(ask: HttpAsk, hostile: str) -> None:
    for name in ("series_of_tenant", "series_itl_of_tenant"):
        rows = await ask.query(name, {**WINDOW, "tenant": hostile})
        assert not [row for row in rows if row.get("part") != "all"]
    for field in ("model", "ended"):
        rows = await ask.query("series", {**WINDOW, field: hostile})
        assert [(row["part"], row["requests"]) for row in rows] == [("all", 0)]


def test_every_value_is_a_parameter() -> None:
    for name in NAMED:
        sql = SAVED[name].sql
        assert "$" not in sql
        used = set(SAVED[name].parameters)
        assert used <= {"from_us", "until_us", "step_s", "tenant", "model", "ended"}, name
    assert "tenant" not in SAVED["series"].parameters, "the roll-ups have no tenant: a filter would be ignored"


async def test_a_sampled_request_counts_for_those_that_it_represents(store: Store) -> None:
    """One completed request of 99 is in the sample, and the one that failed always is; both outlived their replica."""
    given: Any = {
        "gateway": GatewayId("g"),
        "tenant": TenantId("acme"),
        "model": "m",
        "region": "eu",
        "transport": "sse",
    }
    rows = [
        RequestTrace("a", START_US, role="created", ended="completed", wall_us=2_000_000, weight=99, ttft_us=100_000,
                     phases=Phases(decode_us=1_000_000, recovery_us=1_000_000), **given),
        RequestTrace("b", START_US, role="created", ended="failed", wall_us=10_000_000, ttft_us=5_000_000,
                     phases=Phases(recovery_us=9_000_000, residual_us=1_000_000), **given),
        RequestTrace("c", START_US, role="resumed", ended="completed", wall_us=8_000_000, weight=99,
                     phases=Phases(resume_gap_us=7_000_000, client_stall_us=1_000_000), **given),
    ]  # fmt: skip
    records = [PlainRecord(number, START_US // 1000, None, encode_event(row)) for number, row in enumerate(rows)]
    for table, block in build_batch(Part("t", 0), records).tables.items():
        await store.insert(table, block, "all")
    ask = StoreAsk(store)
    (recovered,) = await ask.query("recoveries", WINDOW)
    assert (recovered["completed"], recovered["failed"], recovered["requests"]) == (99, 1, 100)
    assert recovered["pause_p50_ms"] == pytest.approx(1000, rel=0.01)
    (resumed,) = await ask.query("resumes", WINDOW)
    assert (resumed["resumed"], resumed["created"]) == (99, 100)
    (stalled,) = await ask.query("stalls", WINDOW)
    assert (stalled["stalled"], stalled["readers"], stalled["total_ms"]) == (99, 199, 99_000)
    residuals = {row["role"]: row for row in await ask.query("residuals", WINDOW)}
    assert (residuals["created"]["readers"], residuals["created"]["p50_percent"]) == (100, 0)
    (phases,) = await _of_board(store, STREAMS, "Mean time by phase")
    assert (phases["decode"], phases["recovery"]) == (pytest.approx(0.99), pytest.approx(1.08))
    (tenant,) = await _of_board(store, TENANTS, "Failures and time to first token by tenant")
    assert (tenant["requests"], tenant["failed_share"]) == (100, 0.01), "who resumes makes no request"
    assert tenant["ttft_p50_ms"] == pytest.approx(100, rel=0.01)


async def test_an_event_that_arrives_twice_is_shown_once(store: Store) -> None:
    stream = StreamId("resp_" + "a" * 32)
    common: dict[str, Any] = {"tenant": TenantId("acme"), "model": "m", "pool": "p", "stream": stream}
    rows = [
        RequestTrace("r", START_US, GatewayId("g"), role="created", ended="left", wall_us=9, phases=Phases(), **common),
        AttemptTrace(f"{stream}:1", START_US, replica=ReplicaId("a"), ended="cancelled", billed=True, **common),
    ]
    records = [PlainRecord(number, START_US // 1000, None, encode_event(row)) for number, row in enumerate(rows)]
    for name in ("first", "a process died and another one sent its spool"):
        for table, block in build_batch(Part("t", 0), records).tables.items():
            await store.insert(table, block, name)
    ask = StoreAsk(store)
    found = (await why(ask, stream)).story
    assert (len(found.line), len(found.beside), len(found.attempts)) == (1, 0, 1)
    assert [len(await ask.query(name, WINDOW)) for name in ("recent", "slow")] == [1, 1]


async def _of_board(store: Store, board: Board, title: str) -> list[dict[str, Any]]:
    """Return the rows of a board's panel."""
    (sql,) = (panel.queries for panel in board.panels if panel.title == title)
    assert isinstance(sql, Sql)
    window = {"$__fromTime": f"toDateTime({START_US // 10**6})", "$__toTime": f"toDateTime({END_US // 10**6})"}
    text = sql.sql
    for name, moment in window.items():
        text = text.replace(name, moment)
    return (await store.query(text)).dicts()
