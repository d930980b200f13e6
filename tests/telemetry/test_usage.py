"""Usage on the real engine: sums of bills in groups, each bill once."""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from stream_fabric.errors import BadRequest
from stream_fabric.events import AttemptTrace, encode_event
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId, hashed_user, new_stream_id
from telemetry.ask.command import show_usage
from telemetry.ask.flags import add_usage
from telemetry.ask.port import Row
from telemetry.ask.queries import USAGE_SUMS, Value
from telemetry.ask.reconcile import reconcile, reconcile_hours
from telemetry.ask.store_ask import StoreAsk
from telemetry.ask.usage import UsageQuery, usage_page
from telemetry.ask.usage.hour_sums import correct_hour_sums
from telemetry.ask.usage.page import month_start_us
from telemetry.ask.usage.rebuild import rebuild
from telemetry.ask.usage.text import usage_csv, usage_text
from telemetry.ask.views import usage as usage_by_hour
from telemetry.consume.rows import build_batch
from telemetry.emit.record import Part, PlainRecord
from telemetry.store.connection import QUERY_ROWS_MAX
from telemetry.store.store import Store
from tests.support.stores import make_store, own_store
from tests.telemetry.load import AT_US

HOUR_US = 3_600_000_000
NOW_US = AT_US + 50 * HOUR_US
KEPT_DAYS = 400
SUMS = (
    "requests", "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "price_micro", "gpu_us",
    "gpu_cost_micro",
)  # fmt: skip
GROUPS = {
    "model": "model",
    "key": "key",
    "user": "user_hash",
    "session": "session_hash",
    "endpoint": "endpoint",
    "tier": "tier",
}


@pytest.fixture
async def opened(engine_url: str) -> AsyncIterator[Store]:
    async with own_store(engine_url) as store:
        yield store


def attempts(count: int = 300) -> list[AttemptTrace]:
    """Attempts of two tenants within two days: each fifth stream lost its first one."""
    rng, made = random.Random(7), []
    for number in range(count):
        stream = StreamId(f"resp_{number:032x}")
        common: dict[str, Any] = {
            "stream": stream, "tenant": TenantId(rng.choice("ab")), "model": rng.choice(["m", "n"]), "pool": "p",
            "replica": ReplicaId("r"), "key": rng.choice(["k1", "k2", ""]), "user_hash": rng.choice(["u1", "u2", ""]),
            "session_hash": f"s{rng.randrange(40)}", "endpoint": rng.choice(["chat", "completions"]),
            "tier": rng.choice(["standard", "batch"]), "prompt_tokens": rng.randrange(1, 900),
            "cached_tokens": rng.randrange(300),
        }  # fmt: skip
        at_us = AT_US + rng.randrange(48 * HOUR_US)
        if number % 5 == 0:
            made.append(
                AttemptTrace(
                    f"{stream}:1.a", at_us - HOUR_US, ended="handed_over", output_tokens=3, gpu_us=900,
                    gpu_cost_micro=2, **common,
                )
            )  # fmt: skip
        made.append(
            AttemptTrace(
                f"{stream}:2.a", at_us, ended=rng.choice(["completed", "cancelled"]), billed=True,
                output_tokens=rng.randrange(500), reasoning_tokens=rng.randrange(9), price_micro=rng.randrange(10_000),
                gpu_us=rng.randrange(1, 9_000_000), gpu_cost_micro=rng.randrange(5_000), **common,
            )
        )  # fmt: skip
    return made


async def put(store: Store, events: Sequence[AttemptTrace], name: str) -> None:
    records = [PlainRecord(n, event.at_us // 1000, None, encode_event(event)) for n, event in enumerate(events)]
    batch = build_batch(Part("t", 0), records)
    assert not batch.poison
    await store.insert("attempts", batch.tables["attempts"], name)


def expected(events: Sequence[AttemptTrace], *fields: str, tenant: str = "a") -> dict[tuple[str, ...], Counter[str]]:
    found: dict[tuple[str, ...], Counter[str]] = {}
    for event in events:
        if tenant in ("", event.tenant):
            sums = found.setdefault(tuple(getattr(event, field) for field in fields), Counter())
            sums["requests"] += event.billed
            for name in SUMS[1:]:
                sums[name] += getattr(event, name) if event.billed or name.startswith("gpu_") else 0
    return found


def query(**more: Any) -> UsageQuery:
    given = {"from_": str((AT_US - 2 * HOUR_US) // 10**6), "to": str(NOW_US // 10**6), "tenant": "a", "limit": 1000}
    return UsageQuery(**{**given, **more})


async def rows_of(store: Store, asked: UsageQuery) -> list[dict[str, Any]]:
    page = await usage_page(StoreAsk(store), asked, NOW_US, KEPT_DAYS)
    assert not page["has_more"]
    return list(page["data"])


async def test_the_sums_of_each_grouping_are_those_of_the_bills(opened: Store) -> None:
    events = attempts()
    await put(opened, events, "first")
    for group, field in GROUPS.items():
        rows = await rows_of(opened, query(group_by=group))
        assert {(row[group],): Counter({name: row[name] for name in SUMS}) for row in rows} == expected(events, field)
    rows = await rows_of(opened, query(group_by="user,model"))
    found = {(row["user"], row["model"]): Counter({name: row[name] for name in SUMS}) for row in rows}
    assert found == expected(events, "user_hash", "model")
    rows = await rows_of(opened, query(group_by="none"))
    assert [Counter({name: row[name] for name in SUMS}) for row in rows] == list(expected(events).values())


def test_price_cost_and_margin_are_told_in_one_unit() -> None:
    row = {"model": "m", "price_micro": 2_500_000, "gpu_cost_micro": 1_200_000, "margin_micro": 1_300_000}
    told = usage_text({"from": 0, "to": 3600, "complete_until": None, "has_more": False}, [row])
    heads, cells = told.splitlines()[-2:]
    assert heads.split() == ["model", "price", "gpu_cost", "margin"], "no millionths stand under these"
    assert cells.split() == ["m", "2.500000", "1.200000", "1.300000"]


async def test_a_bill_that_arrives_twice_is_counted_once(opened: Store) -> None:
    events = attempts(60)
    await put(opened, events, "first")
    await put(opened, events[20:50], "a process died and another one sent its spool")
    (row,) = await rows_of(opened, query(group_by="none"))
    assert {name: row[name] for name in SUMS} == dict(expected(events)[()])
    by_hour = (await usage_by_hour(StoreAsk(opened), {"tenant": "a", "since": "60h"}, NOW_US)).value
    assert {name: sum(hour[name] for hour in by_hour) for name in SUMS[:6]} == {name: row[name] for name in SUMS[:6]}


class BillsArriveMeanwhile(StoreAsk):
    """A store in which bills are inserted, and reported as complete, between two queries of one answer."""

    def __init__(self, store: Store, events: Sequence[AttemptTrace]) -> None:
        super().__init__(store)
        self._inserted, self._events = store, events
        self._asked = 0

    async def query(self, name: str, parameters: Mapping[str, Value]) -> list[Row]:
        self._asked += 1
        if self._asked == 2:
            await put(self._inserted, self._events, "meanwhile")
            until = pa.array([NOW_US], pa.timestamp("us", "UTC"))
            progress = {"topic": ["t"], "partition": pa.array([0], pa.int32()), "complete_until": until}
            await self._inserted.insert("ingest_progress", pa.table(progress), "meanwhile")
        return await super().query(name, parameters)


async def test_an_answer_has_all_bills_before_the_moment_until_which_it_is_complete(opened: Store) -> None:
    events = attempts(20)
    page = await usage_page(BillsArriveMeanwhile(opened, events), query(group_by="none"), NOW_US, KEPT_DAYS)
    counted = sum(row["output_tokens"] for row in page["data"])
    assert page["complete_until"] * 1e6 < AT_US or counted == expected(events)[()]["output_tokens"]


async def test_a_bill_that_arrives_twice_is_no_second_bill_to_the_reconciliation(opened: Store) -> None:
    events = attempts(60)
    await put(opened, events, "first")
    await put(opened, events[20:50], "a process died and another one sent its spool")
    report = await reconcile(StoreAsk(opened), None, AT_US - 2 * HOUR_US, NOW_US)
    assert report.billed_output == sum(event.output_tokens for event in events if event.billed)
    assert not [found for found in report.disagreements if "bills arrived" in found.why]


@pytest.mark.parametrize("has_more", [True, False])
def test_a_table_that_is_cut_says_so(has_more: bool) -> None:
    page = {"from": 0, "to": 3600, "complete_until": 0.0, "has_more": has_more}
    text = usage_text(page, [{"session": "s1", "requests": 2}])
    assert ("only the first 1 rows" in text) is has_more


async def test_filters_and_buckets(opened: Store) -> None:
    events = attempts()
    await put(opened, events, "first")
    rows = await rows_of(opened, query(group_by="key", key="k1", user="u2"))
    mine = [event for event in events if (event.key, event.user_hash) == ("k1", "u2")]
    assert [row["output_tokens"] for row in rows] == [expected(mine)[()]["output_tokens"]]
    rows = await rows_of(opened, query(group_by="none", bucket="hour"))
    by_hour = {row["begins"]: row["requests"] for row in rows if row["requests"]}
    assert by_hour == Counter(event.at_us // HOUR_US * 3600 for event in events if event.billed and event.tenant == "a")
    days = await rows_of(opened, query(group_by="none", bucket="day"))
    assert sum(row["price_micro"] for row in days) == sum(row["price_micro"] for row in rows)
    assert all(row["begins"] % 86_400 == 0 for row in days)


@pytest.mark.parametrize("tenant", ["a", ""], ids=["bills", "sums by hour"])
async def test_months_are_those_of_utc(opened: Store, tenant: str) -> None:
    ends_us = month_start_us(AT_US)
    moments = [ends_us - HOUR_US, ends_us - 1, ends_us, ends_us + HOUR_US]
    events = [
        msgspec.structs.replace(event, at_us=at_us, tenant=TenantId("a"), billed=True, price_micro=10**number)
        for number, (event, at_us) in enumerate(zip(attempts(), moments, strict=False))
    ]
    await put(opened, events, "first")
    asked = query(group_by="none", bucket="month", tenant=tenant, from_=str(ends_us // 10**6 - 10 * 86_400))
    before, after = await rows_of(opened, asked)
    assert (before["price_micro"], after["price_micro"]) == (11, 1100)
    assert after["begins"] * 10**6 == ends_us
    assert before["begins"] * 10**6 == month_start_us(ends_us - 1)


def test_csv_has_exact_money_and_a_head_without_rows() -> None:
    sums = {"requests": 2, "prompt_tokens": 3, "cached_tokens": 1, "output_tokens": 4, "reasoning_tokens": 0}
    cost = {"price_micro": 9_007_199_254_740_993, "gpu_us": 5, "gpu_cost_micro": 7, "margin_micro": -1_500_000}
    page = {"bucket": "month", "group_by": ["tenant", "model"]}
    row = {"begins": 1_793_491_200, "tenant": "acme", "model": "a,b", **sums, **cost}
    head, line = usage_csv(page, [row]).splitlines()
    assert head == (
        "begins,tenant,model,requests,prompt_tokens,cached_tokens,output_tokens,reasoning_tokens,price,gpu_us,gpu_cost,"
        "margin"
    )
    assert line == '2026-11-01T00:00:00Z,acme,"a,b",2,3,1,4,0,9007199254.740993,5,0.000007,-1.500000'
    assert usage_csv(page, []) == head


@pytest.mark.parametrize("model", ['=HYPERLINK("https://e.example")', "+1", "-1", "@a", " =1", "\uff1d1"])
def test_csv_has_no_formula_that_a_spreadsheet_runs(model: str) -> None:
    sums = dict.fromkeys([*USAGE_SUMS, "gpu_us", "gpu_cost_micro", "margin_micro"], 0)
    page = {"bucket": "none", "group_by": ["model"]}
    (row,) = csv.DictReader(usage_csv(page, [{"model": model, **sums}]).splitlines())
    assert row["model"] == f"'{model}"


async def test_a_user_is_named_or_given_by_its_hash(opened: Store) -> None:
    parser, told = argparse.ArgumentParser(), list[str]()
    add_usage(parser)

    async def show(*flags: str) -> dict[str, Any]:
        await show_usage(
            StoreAsk(opened), parser.parse_args(["show", "--json", "--from", str(AT_US // 10**6), *flags]), told.append
        )
        found: dict[str, Any] = json.loads(told[-1])
        return found

    ann = hashed_user(TenantId("a"), "ann")
    billed = msgspec.structs.replace(attempts()[1], at_us=AT_US, tenant=TenantId("a"), billed=True, user_hash=ann)
    await put(opened, [*attempts(), billed], "first")
    by_name = await show("--tenant", "a", "--user", "ann")
    assert [row["requests"] for row in by_name["data"]] == [1]
    assert (await show("--user", ann))["data"] == by_name["data"]
    with pytest.raises(BadRequest, match="name the tenant of the user: --tenant"):
        await show("--user", "ann")


async def test_pages_follow_each_other_without_a_gap(opened: Store) -> None:
    await put(opened, attempts(), "first")
    whole = await rows_of(opened, query(group_by="session,model"))
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        page = await usage_page(
            StoreAsk(opened), query(group_by="session,model", limit=7, after=after), NOW_US, KEPT_DAYS
        )
        found += page["data"]
        assert len(page["data"]) <= 7
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert found == whole
    assert len(whole) > 14


async def test_long_ranges_by_model_and_tenant_have_the_same_sums(opened: Store) -> None:
    events = attempts()
    await put(opened, events, "first")
    long = query(group_by="tenant,model", tenant="", from_=str(NOW_US // 10**6 - 1000 * 86_400))
    rows = await rows_of(opened, long)
    found = {(row["tenant"], row["model"]): Counter({name: row[name] for name in SUMS}) for row in rows}
    assert found == expected(events, "tenant", "model", tenant="")


class NothingBilled(StoreAsk):
    async def query(self, name: str, parameters: Mapping[str, Value]) -> list[Row]:
        return []


@pytest.mark.parametrize("first", ["20261101", "2026-11-01", "1793491200"])
async def test_a_date_without_dashes_is_no_moment_of_1970(first: str) -> None:
    ask = NothingBilled(make_store("http://127.0.0.1:1/usage"))
    page = await usage_page(ask, query(from_=first, to="20261201"), NOW_US, KEPT_DAYS)
    assert (page["from"], page["to"]) == (1_793_491_200, 1_793_491_200 + 30 * 86_400)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"group_by": "model,key,user"}, "one or two"),
        ({"group_by": "prompt"}, "one or two"),
        ({"bucket": "week"}, "bucket"),
        ({"from_": "yesterday"}, "no time"),
        ({"to": "1"}, "ends before"),
        ({"limit": 0}, "limit"),
        ({"after": "zz"}, "last_id"),
        ({"after": "5b5d"}, "last_id"),
        ({"group_by": "key", "from_": "2020-01-01"}, "kept for 400 days"),
    ],
)
async def test_a_wrong_query_is_refused_with_its_reason(wrong: dict[str, Any], says: str) -> None:
    """The store, which is nowhere, is not asked."""
    with pytest.raises(BadRequest, match=says):
        await usage_page(StoreAsk(make_store("http://127.0.0.1:1/usage")), query(**wrong), NOW_US, KEPT_DAYS)


async def test_earlier_bills_are_counted_after_the_migration(opened: Store) -> None:
    """A row of an earlier release has no key; the migration copies it, and may run twice."""
    events = attempts(40)
    await put(opened, events, "first")
    await opened.command("TRUNCATE TABLE bills")
    from telemetry.store.migrations import migrations

    copy = next(text for text in migrations()[7].statements() if text.startswith("INSERT INTO bills"))
    copy = copy.replace("INSERT INTO bills", "INSERT INTO bills (* EXCEPT(tier))")  # a column of a later migration
    for _ in range(2):
        await opened.command(copy)
    (row,) = await rows_of(opened, query(group_by="none"))
    assert row["requests"] == expected(events)[()]["requests"]
    assert row["output_tokens"] == expected(events)[()]["output_tokens"]


# --- lost bills ----------------------------------------------------------------------------------------------------


class SettledFigures:
    """Settled usage of Redis, by tenant, hour and model."""

    def __init__(self, events: Sequence[AttemptTrace]) -> None:
        self._sums: dict[tuple[str, int, str], Counter[str]] = {}
        for event in events:
            if event.billed:
                sums = self._sums.setdefault((event.tenant, event.at_us // HOUR_US, event.model), Counter())
                sums["requests"] += 1
                for name in SUMS[1:5]:
                    sums[name] += getattr(event, name)

    async def usage(self, tenant: TenantId, hour: int) -> dict[str, tuple[int, Usage]]:
        return {
            model: (
                s["requests"],
                Usage(s["prompt_tokens"], s["cached_tokens"], 0, s["output_tokens"], s["reasoning_tokens"]),
            )
            for (of, at, model), s in self._sums.items()
            if (of, at) == (tenant, hour)
        }

    async def settled(self, stream: StreamId) -> tuple[str, Usage] | None:
        return None


async def test_rebuilt_bills_make_usage_equal_to_what_was_settled(opened: Store) -> None:
    events = [event for event in attempts() if event.at_us % HOUR_US > 20_000_000]
    settled = SettledFigures(events)
    await put(opened, events[: len(events) // 2], "what arrived")
    window = AT_US - 2 * HOUR_US, NOW_US, NOW_US
    report = await reconcile_hours(StoreAsk(opened), settled, *window[:2])
    assert report.found and report.drift_tokens
    listed = await rebuild(opened, settled, *window, write=False)
    assert (await rebuild(opened, settled, *window, write=True)) == listed != []
    assert await rebuild(opened, settled, *window, write=True) == [], "a second run finds nothing to do"
    for group in ("none", "model"):
        rows = await rows_of(opened, query(group_by=group))
        wanted = expected(events, *([] if group == "none" else ["model"]))
        for row in rows:
            for name in SUMS[:5]:
                assert row[name] == wanted[() if group == "none" else (row["model"],)][name]
    long = query(group_by="tenant", tenant="", from_=str(NOW_US // 10**6 - 1000 * 86_400))
    assert sum(row["output_tokens"] for row in await rows_of(opened, long)) == sum(
        e.output_tokens for e in events if e.billed
    )
    assert (await reconcile_hours(StoreAsk(opened), settled, *window[:2])).agrees


@pytest.mark.parametrize("arrived", [0, 20])
async def test_a_bill_that_arrives_after_the_rebuild_is_balanced_by_the_next_one(opened: Store, arrived: int) -> None:
    events = [event for event in attempts(40) if event.at_us % HOUR_US > 20_000_000]
    settled = SettledFigures(events)
    window = AT_US - 2 * HOUR_US, NOW_US, NOW_US
    if arrived:
        await put(opened, events[:arrived], "what arrived")
    await rebuild(opened, settled, *window, tenant="a", write=True)
    await put(opened, events[arrived:], "the spool was found")
    late = await rebuild(opened, settled, *window, tenant="a", write=True)
    assert all(lost.output_tokens <= 0 for lost in late)
    (row,) = await rows_of(opened, query(group_by="none"))
    for name in SUMS[:6]:
        assert row[name] == expected(events)[()][name], name


async def test_bills_stay_where_redis_has_lost_a_part_of_its_account(opened: Store) -> None:
    events = [event for event in attempts(40) if event.at_us % HOUR_US > 20_000_000]
    await put(opened, events, "all arrived")
    window = AT_US - 2 * HOUR_US, NOW_US
    after_failover = SettledFigures(events[::2])
    assert await rebuild(opened, after_failover, *window, NOW_US, write=True) == []
    (row,) = await rows_of(opened, query(group_by="none"))
    assert {name: row[name] for name in SUMS} == dict(expected(events)[()])
    assert not (await reconcile_hours(StoreAsk(opened), after_failover, *window)).agrees, "it is told nevertheless"


async def test_bills_of_more_hours_and_models_than_one_answer_holds_are_not_taken_for_lost(opened: Store) -> None:
    """Each of 420 models has a bill in each of 24 hours: 10,080 sums, and a query returns 10,000 rows at most."""
    events = [
        AttemptTrace(
            f"resp_{number:032x}:1.a", AT_US + number % 24 * HOUR_US, stream=StreamId(f"resp_{number:032x}"),
            tenant=TenantId("a"), model=f"m{number // 24}", pool="p", replica=ReplicaId("r"), ended="completed",
            billed=True, prompt_tokens=7, output_tokens=5, price_micro=3,
        )
        for number in range(24 * 420)
    ]  # fmt: skip
    assert len(events) > QUERY_ROWS_MAX
    settled = SettledFigures(events)
    await put(opened, events, "all arrived")
    window = AT_US - HOUR_US, AT_US + 25 * HOUR_US
    assert await rebuild(opened, settled, *window, NOW_US, write=True) == []
    assert (await reconcile_hours(StoreAsk(opened), settled, *window)).agrees
    (row,) = await rows_of(opened, query(group_by="none"))
    assert row["output_tokens"] == 5 * len(events)


async def test_a_stream_over_the_end_of_a_month_counts_in_the_budget_of_its_start_alone(opened: Store) -> None:
    """The account charges it to the month in which it was admitted, so the nightly job must not raise the next one."""
    begin_ms = AT_US // HOUR_US * HOUR_US // 1000
    streams = [new_stream_id(begin_ms + off_ms, bytes(10)) for off_ms in (-1, 0, 60_000)]
    common: dict[str, Any] = {"tenant": TenantId("a"), "model": "m", "pool": "p", "replica": ReplicaId("r")}
    events = [
        AttemptTrace(
            f"{stream}:1.a", (begin_ms + 120_000) * 1000, stream=stream, ended="completed", billed=True,
            prompt_tokens=3, output_tokens=10**number, price_micro=7 * 10**number, **common,
        )
        for number, stream in enumerate(streams)
    ]  # fmt: skip
    await put(opened, events, "first")
    window = {"from_us": begin_ms * 1000, "until_us": begin_ms * 1000 + HOUR_US, "tenant": ""}
    (row,) = await StoreAsk(opened).query("billed_tenants", window)
    assert dict(row) == {"tenant": "a", "requests": 2, "tokens": 6 + 110, "price_micro": 770}


async def test_the_sums_by_hour_become_those_of_the_bills(opened: Store) -> None:
    """An event that arrived twice counts twice in them until the nightly comparison."""
    events = attempts()
    await put(opened, events, "first")
    await put(opened, events[100:200], "a replica died, and its rescuer sent the same bills")
    long = query(from_=str((AT_US - 120 * 24 * HOUR_US) // 10**6), group_by="none")
    (twice,) = await rows_of(opened, long)
    exact = expected(events)[()]
    assert twice["output_tokens"] > exact["output_tokens"] and twice["gpu_us"] > exact["gpu_us"]
    for _ in range(2):
        await correct_hour_sums(opened, AT_US - 4 * HOUR_US, NOW_US)
        (row,) = await rows_of(opened, long)
        assert {name: row[name] for name in SUMS} == dict(exact)
