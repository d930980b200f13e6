"""One suite for every ClickHouse: the engine in this process, the same behind HTTP, and a server when one is named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from importlib import resources
from urllib.parse import urlsplit
from uuid import uuid4

import pyarrow as pa
import pytest

from stream_fabric.events import AttemptTrace, FleetEvent, RequestTrace, encode_event
from telemetry.ask.sql.names import TABLES
from telemetry.consume.rows import Batch, build_batch, columns
from telemetry.emit.record import Part, PlainRecord
from telemetry.store import connection
from telemetry.store import migrations as migrations_module
from telemetry.store import store as store_module
from telemetry.store.errors import SchemaTooNew, StoreRefused, StoreUnavailable
from telemetry.store.migrations import Migration, migrations
from telemetry.store.store import Store
from tests.support.clickhouse import ClickHouseFront
from tests.support.redis import free_port
from tests.support.stores import make_store, own_store
from tests.support.waiting import eventually
from tests.telemetry.load import AT_US, Sums, check, events, stored

pytestmark = pytest.mark.platform

PART = Part("t", 0)


@pytest.fixture
async def opened(clickhouse_url: str) -> AsyncIterator[Store]:
    async with own_store(clickhouse_url) as store:
        yield store


def a_block(count: int = 400) -> tuple[Batch, Sums]:
    sums = Sums()
    records = []
    for offset, event in enumerate(events(count, 1)):
        sums.count(event)
        records.append(PlainRecord(offset, event.at_us // 1000, None, encode_event(event)))
    found = build_batch(PART, records)
    assert not found.poison
    return found, sums


async def insert(store: Store, found: Batch, name: str) -> None:
    for table, rows in found.tables.items():
        await store.insert(table, rows, name)


async def test_a_block_inserted_again_is_inserted_once(opened: Store) -> None:
    found, sums = a_block()
    for _ in range(3):
        await insert(opened, found, "t:0:0-399")
        await check(opened, sums)


async def test_a_block_half_inserted_is_made_whole(opened: Store) -> None:
    """A crash left the block in one table and not in another."""
    found, sums = a_block()
    await opened.insert("attempts", found.tables["attempts"], "t:0:0-399")
    await insert(opened, found, "t:0:0-399")
    await check(opened, sums)


async def test_a_block_of_many_days_is_one_block(opened: Store) -> None:
    """One partition a day, and more of them than ClickHouse takes in an insert by itself."""
    await opened.set_retention(1000, 1000)
    sums = Sums()
    records: list[PlainRecord] = []
    for day in range(102):
        for event in events(2, seed=day, at_us=AT_US - day * 86_400_000_000):
            sums.count(event)
            records.append(PlainRecord(len(records), event.at_us // 1000, None, encode_event(event)))
    found = build_batch(PART, records)
    for _ in range(2):
        await insert(opened, found, "t:0:0-203")
        await check(opened, sums)


async def test_without_the_roll_ups_window_they_count_twice(opened: Store) -> None:
    """Why each target of a view has a window of its own."""
    await opened.command("ALTER TABLE usage_hour MODIFY SETTING non_replicated_deduplication_window = 0")
    found, sums = a_block()
    await insert(opened, found, "t:0:0-399")
    await check(opened, sums)
    await insert(opened, found, "t:0:0-399")
    assert await stored(opened) == dict(sums.rows), "the raw table drops it"
    with pytest.raises(AssertionError):
        await check(opened, sums)


async def test_every_field_of_an_event_has_its_column(opened: Store) -> None:
    for kind, table in ((RequestTrace, "requests"), (AttemptTrace, "attempts"), (FleetEvent, "fleet")):
        described = await opened.query(f"DESCRIBE TABLE {table}")
        made = {str(row[0]) for row in described.rows if row[2] != "ALIAS"}
        assert made == {*columns(kind), "_topic", "_partition", "_offset"}


async def test_what_is_stored_is_what_was_told(opened: Store) -> None:
    found, _ = a_block(100)
    await insert(opened, found, "x")
    request, attempt, fleet = (
        next(e for e in events(100) if isinstance(e, k)) for k in (RequestTrace, AttemptTrace, FleetEvent)
    )
    (row,) = (
        await opened.query("SELECT *, scores.replica AS r FROM requests WHERE id = {id:String}", {"id": request.id})
    ).dicts()
    assert row["at"] == datetime.fromtimestamp(request.at_us // 1000 / 1000, UTC).replace(
        microsecond=request.at_us % 10**6
    )
    for name in ("stream", "model", "ended", "wall_us", "prompt_tokens", "weight", "http_status", "trace_id"):
        assert row[name] == getattr(request, name)
    assert [row["gateway_us"], row["residual_us"]] == [request.phases.gateway_us, request.phases.residual_us]
    assert row["r"] == [score.replica for score in request.scores]
    (row,) = (await opened.query("SELECT * FROM attempts WHERE id = {id:String}", {"id": attempt.id})).dicts()
    assert (row["itl_sketch"], row["billed"], row["queue_estimated"]) == (
        list(attempt.itl_sketch),
        attempt.billed,
        True,
    )
    (row,) = (await opened.query("SELECT * FROM fleet WHERE id = {id:String}", {"id": fleet.id})).dicts()
    assert row["figures"] == fleet.figures
    (row,) = (await opened.query("SELECT * FROM replicas_latest FINAL")).dicts()
    assert (row["replica"], row["state"]) == (fleet.replica, "ready")


async def test_quantiles_of_the_minute(opened: Store) -> None:
    found, _ = a_block(2000)
    await insert(opened, found, "x")
    raw = await opened.query("SELECT quantileExactWeighted(0.5)(wall_us, toUInt64(weight)) FROM requests")
    rolled = await opened.query(
        "SELECT quantilesTDigestWeightedMerge(0.5, 0.9, 0.95, 0.99)(wall_q)[1], "
        "quantilesTDigestWeightedIfMerge(0.5, 0.9, 0.95, 0.99)(ttft_q)[1] FROM requests_minute"
    )
    assert rolled.rows[0][0] == pytest.approx(raw.rows[0][0], rel=0.05)
    assert rolled.rows[0][1] > 0


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO fleet (id) VALUES ('x')",
        "CREATE TABLE mine (a Int8) ENGINE = Memory",
        "DROP TABLE requests",
        "SELECT * FROM file('/etc/passwd', LineAsString)",
        "SELECT * FROM url('http://127.0.0.1:1/', LineAsString)",
        "SET readonly = 0",
        "SELECT 1 SETTINGS max_execution_time = 0",
        "SELECT",
    ],
)
async def test_a_query_only_reads(opened: Store, sql: str) -> None:
    with pytest.raises(StoreRefused):
        await opened.query(sql)
    assert (await opened.query("SELECT 1")).rows == [(1,)]


async def test_a_query_has_its_limit_of_rows(opened: Store) -> None:
    assert (await opened.query("SELECT number FROM numbers(5)", rows_max=5)).truncated is False
    answer = await opened.query("SELECT number FROM numbers(1000000)", rows_max=5)
    assert (len(answer.rows), answer.truncated) == (5, True)


async def test_parameters_are_no_sql(opened: Store) -> None:
    text = "it's {x} \\ \"'); DROP TABLE requests; --"
    assert (await opened.query("SELECT {text:String}", {"text": text})).rows == [(text,)]


async def test_rows_are_kept_for_so_many_days(opened: Store) -> None:
    await opened.set_retention(7, 90)
    sql = "SELECT engine_full FROM system.tables WHERE database = currentDatabase() AND name = {t:String}"
    for table, days in (("requests", "if(retention_days = 0, 7, "), ("fleet", "7)"), ("requests_minute", "90)")):
        ((engine,),) = (await opened.query(sql, {"t": table})).rows
        assert f"toIntervalDay({days}" in engine
        assert "non_replicated_deduplication_window = 10000" in engine


async def test_a_plans_rows_are_kept_for_its_days(opened: Store) -> None:
    """A plan's days count, whatever the platform's; without any, the row is in the roll-ups and the bill alone."""
    await opened.set_retention(30, 400)
    aged = {"new": (0, 0), "old": (29, 0), "older": (32, 0), "short": (1, 2), "shorter": (3, 2), "long": (90, 100)}
    for id, (age, days) in {**aged, "none": (0, -1)}.items():
        for table, more in (("requests", "weight"), ("attempts", "billed")):
            await opened.command(
                f"INSERT INTO {table} (id, at, tenant, stream, {more}, price_micro, retention_days) "
                f"SELECT '{id}', now64(6) - INTERVAL {age} DAY, '{id}', 's', 1, 5, {days}"
            )
    for table in ("requests", "attempts"):
        await opened.command(f"OPTIMIZE TABLE {table} FINAL")
        left = await opened.query(f"SELECT id FROM {table} ORDER BY id")
        assert [id for (id,) in left.rows] == ["long", "new", "old", "short"], table
    bills = await opened.query("SELECT tenant, sum(price_micro) FROM usage_hour GROUP BY tenant ORDER BY tenant")
    assert bills.rows == [(tenant, 5) for tenant in sorted({*aged, "none"})]
    assert (await opened.query("SELECT sum(requests) FROM requests_minute")).rows == [(len(aged) + 1,)]


async def test_rows_of_one_part_expire_each_at_its_time(opened: Store) -> None:
    await opened.set_retention(30, 400)
    await opened.command(
        "INSERT INTO requests (id, at, retention_days) "
        "SELECT toString(number), now64(6) - INTERVAL 5 DAY, if(number % 2, 7, 0) FROM numbers(4)"
    )
    assert (await opened.query("SELECT count() FROM requests")).rows == [(4,)]
    await opened.command(
        "ALTER TABLE requests UPDATE retention_days = 3 WHERE retention_days = 7 SETTINGS mutations_sync = 2"
    )
    await opened.command("ALTER TABLE requests MATERIALIZE TTL SETTINGS mutations_sync = 2")
    await opened.command("OPTIMIZE TABLE requests FINAL")
    assert (await opened.query("SELECT id FROM requests ORDER BY id")).rows == [("0",), ("2",)]


async def test_what_was_asked_and_answered_goes_before_its_row(opened: Store) -> None:
    await opened.set_retention(30, 400, 3)
    await opened.set_retention(30, 400, 3)
    rows = {"old": 5, "new": 1}
    for id, days in rows.items():
        await opened.command(
            "INSERT INTO requests (id, at, stream, prompt, completion) "
            f"SELECT '{id}', now64(6) - INTERVAL {days} DAY, 's', 'asked', 'answered'"
        )
    await opened.command("OPTIMIZE TABLE requests FINAL")
    left = await opened.query("SELECT id, stream, prompt, completion FROM requests ORDER BY at")
    assert left.rows == [("old", "s", "", ""), ("new", "s", "asked", "answered")]
    ((made,),) = (
        await opened.query(
            "SELECT create_table_query FROM system.tables WHERE name = 'requests' AND database = currentDatabase()"
        )
    ).rows
    assert str(made).count("toDate(at) + toIntervalDay(3)") == 2


async def test_opened_twice_and_at_once(clickhouse_url: str) -> None:
    stores = [make_store(clickhouse_url) for _ in range(3)]
    await asyncio.gather(*(store.open() for store in stores))
    applied = await stores[0].query("SELECT version FROM migrations ORDER BY version")
    assert applied.rows == [(migration.version,) for migration in migrations()]
    await stores[1].open(migrate_schema=False)
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_schema_that_is_not_ours(clickhouse_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(clickhouse_url)
    with pytest.raises(StoreUnavailable, match="version 0 and this release needs"):
        await store.open(migrate_schema=False)
    await store.open()
    known = migrations()
    monkeypatch.setattr(migrations_module, "migrations", lambda: known[:-1])
    with pytest.raises(SchemaTooNew, match="upgrade stream-gw"):
        await store.open()
    monkeypatch.setattr(migrations_module, "migrations", lambda: [Migration(1, "raw", "SELECT 1"), *known[1:]])
    with pytest.raises(StoreRefused, match="another build"):
        await store.open()
    added = Migration(
        len(known) + 1, "more", "CREATE TABLE IF NOT EXISTS more (a Int8) ENGINE = MergeTree ORDER BY a;\n"
    )
    monkeypatch.setattr(migrations_module, "migrations", lambda: [*known, added])
    await store.open()
    await store.insert("more", pa.table({"a": pa.array([1], pa.int8())}), "x")
    await store.close()


async def test_a_migration_that_died_half_way_is_taken_over(
    clickhouse_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrations()
    broken = Migration(1, "raw", known[0].sql + "\nSELECT no_such_column;\n")
    monkeypatch.setattr(migrations_module, "migrations", lambda: [broken, *known[1:]])
    store = make_store(clickhouse_url)
    with pytest.raises(StoreRefused):
        await store.open()
    monkeypatch.setattr(migrations_module, "migrations", lambda: known)
    await store.open()
    await store.close()


async def test_a_migration_may_take_longer_than_an_insert(
    front: ClickHouseFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ANSWER_S_MAX", 1.0)
    monkeypatch.setattr(migrations_module, "migrations", lambda: [Migration(1, "slow", "SELECT sleep(2);\n")])
    store = make_store(front.url)
    await store.open()
    with pytest.raises(StoreUnavailable):
        await store.command("SELECT sleep(2)")
    await store.close()


async def test_the_lock_of_a_migration_is_renewed_while_a_statement_runs(
    front: ClickHouseFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations_module, "_LOCK_S", 1)
    ended = threading.Event()

    class Slow(Migration):
        def statements(self) -> list[str]:
            assert ended.wait(60)  # a statement that runs; a sleep in the engine would hold up the renewals
            return super().statements()

    monkeypatch.setattr(migrations_module, "migrations", lambda: [Slow(1, "slow", "SELECT 1;\n")])
    migrating, watching = make_store(front.url), make_store(front.url)
    opening = asyncio.create_task(migrating.open())

    async def outlasted() -> bool:
        with contextlib.suppress(StoreRefused):  # there is no table yet
            found = await watching.query("SELECT max(until) > min(until) + toIntervalSecond(1) FROM migration_lock")
            return bool(found.rows[0][0])
        return False

    try:
        await eventually(outlasted, "the lock to be held for longer than its time")
        assert (await watching.query("SELECT max(round) FROM migration_lock")).rows == [(1,)]
    finally:
        ended.set()
        await opening
        await migrating.close()
        await watching.close()


async def test_a_dead_migrators_lock_ends(clickhouse_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(clickhouse_url)
    monkeypatch.setattr(migrations_module, "migrations", list)
    await store.open()
    await store.command(
        "CREATE TABLE migration_lock (round Int64, holder String, done Bool, until DateTime64(3, 'UTC')) "
        "ENGINE = MergeTree ORDER BY round SETTINGS non_replicated_deduplication_window = 10000"
    )
    await store.command("INSERT INTO migration_lock SELECT 1, 'dead', false, now64(3) + toIntervalSecond(1)")
    monkeypatch.undo()
    await store.open()
    last = await store.query("SELECT max(round), max(until) > now64(3) FROM migration_lock")
    assert last.rows[0][0] == 2
    await store.close()


async def test_a_server_that_is_away(front: ClickHouseFront) -> None:
    store = make_store(front.url)
    await store.open()
    found, sums = a_block()
    front.fault("refuse")
    with pytest.raises(StoreUnavailable, match="Too many"):
        await insert(store, found, "x")
    front.fault("lose")
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await insert(store, found, "x")
    front.kill()
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await store.query("SELECT 1")
        with pytest.raises(StoreUnavailable):
            await insert(store, found, "x")
    front.start()
    await insert(store, found, "x")
    await check(store, sums)
    await store.close()


async def test_queries_of_a_server_that_hangs_end_before_their_callers_give_up(
    front: ClickHouseFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that wait for others: one connection serves all."""
    monkeypatch.setattr(connection, "QUERY_ANSWER_S_MAX", 1.0)
    monkeypatch.setattr(store_module, "QUERY_WAIT_S_MAX", 1.5)
    store = make_store(front.url)
    await store.open()
    await store.query("SELECT 1")
    front.freeze()
    try:
        asked = [store.query("SELECT 1") for _ in range(3)]
        async with asyncio.timeout(20):
            told = [str(error) for error in await asyncio.gather(*asked, return_exceptions=True)]
    finally:
        front.thaw()
    assert told[0] == f"ClickHouse at {store.shown} does not answer: timed out"
    assert all("has not answered for 1.5 s" in one for one in told[1:]), told
    await eventually(lambda: store.query("SELECT 1"), "it to answer")
    await store.close()


@pytest.mark.parametrize("dropped", ["fleet", "bills_feed"])
async def test_a_schema_without_one_of_its_tables_is_named(front: ClickHouseFront, dropped: str) -> None:
    store = make_store(front.url)
    await store.open()
    await store.command(f"DROP TABLE {dropped}")
    with pytest.raises(StoreRefused, match=f"lacks {dropped} of this schema"):
        await store.open()
    await store.close()


async def test_one_process_owns_a_folder(front: ClickHouseFront) -> None:
    code = (
        "import asyncio, sys\nfrom telemetry.store.errors import StoreUnavailable\n"
        "from tests.support.stores import make_store, own_store\n"
        "try:\n    asyncio.run(make_store(sys.argv[1]).open())\nexcept StoreUnavailable as error:\n    print(error)\n"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, f"chdb://{front.data}"], capture_output=True, text=True, timeout=60
    )
    assert "another process" in other.stdout, other.stdout + other.stderr[-500:]


@pytest.mark.parametrize(
    "url",
    [
        "clickhouse://host/db",
        "http://host/a-b",
        "http://host/a/b",
        "chdb:///x?database=a.b",
        "chdb://",
        "chdb:///",
        "chdb://folder/x",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="ClickHouse URL"):
        make_store(url)


async def test_a_server_that_is_away_is_named_in_words() -> None:
    store = make_store("http://me:secret@127.0.0.1:1/db")
    with pytest.raises(StoreUnavailable) as failed:
        await store.open()
    await store.close()
    assert str(failed.value) == "ClickHouse at http://127.0.0.1:1 does not answer: connection refused"


def test_a_url_is_shown_without_its_password() -> None:
    assert "secret" not in repr(make_store("http://me:secret@host:8123/db"))


# --- the role of readers ---------------------------------------------------------------------------------------


def _reader_sql() -> list[str]:
    text = resources.files("telemetry.store.schema").joinpath("reader.sql").read_text("utf-8")
    return Migration(0, "reader", text).statements()


async def test_the_readers_role_has_select_on_the_tables_of_the_sql_check_alone(store: Store) -> None:
    role, *grants = _reader_sql()
    assert role == "CREATE ROLE IF NOT EXISTS stream_gw_reader"
    assert set(grants) == {f"GRANT SELECT ON {table} TO stream_gw_reader" for table in (*TABLES, "migrations")}
    for statement in (role, *grants):
        # The embedded engine has no users, but its parser is the server's
        assert (await store.query("SELECT formatQuery({sql:String})", {"sql": statement})).rows


async def test_a_readers_url_is_checked() -> None:
    with pytest.raises(ValueError, match="the same database"):
        make_store("http://writer@host:8123/a", "http://reader@host:8123/b")
    with pytest.raises(ValueError, match="one user"):
        make_store("chdb:///a", "chdb:///b")


async def test_queries_run_as_the_reader(front: ClickHouseFront) -> None:
    nobody_listens = front.url.replace(str(front.port), str(free_port()))
    store = make_store(front.url, nobody_listens)
    await store.open()
    with pytest.raises(StoreUnavailable):
        await store.query("SELECT 1")
    await store.close()


async def test_the_role_reads_these_tables_and_nothing_else_on_a_server() -> None:
    url = os.environ.get("STREAM_GW_TEST_CLICKHOUSE")
    if not url:
        pytest.skip("no server: set STREAM_GW_TEST_CLICKHOUSE to http://user:password@host:8123")
    parts, database = urlsplit(url), f"t{uuid4().hex}"
    owner = make_store(f"{parts.scheme}://{parts.netloc}/{database}")
    await owner.open()
    for statement in _reader_sql():
        await owner.command(statement)
    await owner.command(f"CREATE USER {database} IDENTIFIED BY 'reader' DEFAULT ROLE stream_gw_reader")
    await owner.command("CREATE TABLE secrets (a Int8) ENGINE = MergeTree ORDER BY a")
    reader = make_store(f"{parts.scheme}://{database}:reader@{parts.netloc.rpartition('@')[2]}/{database}")
    try:
        await reader.open(migrate_schema=False)
        for table in TABLES:
            await reader.query(f"SELECT count() FROM {table}")
        for refused in (
            "SELECT * FROM secrets",
            "SELECT * FROM merge('system', '.*')",
            "SELECT * FROM url('http://127.0.0.1:1/', 'CSV', 'x String')",
            "SELECT * FROM file('/etc/passwd', 'LineAsString', 'x String')",
            "SELECT * FROM remote('127.0.0.1', system.one)",
        ):
            with pytest.raises(StoreRefused):
                await reader.query(refused)
    finally:
        await owner.command(f"DROP USER {database}")
        await owner.command(f"DROP DATABASE {database}")
        await reader.close()
        await owner.close()
