"""An analyst's own SQL: what reads our tables runs, nothing else does, and it ends. On the real engine, in the process
(where its read-only mode alone is no wall) and behind HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.errors import BadRequest
from telemetry import store as store_module
from telemetry.ask.http import HttpAsk
from telemetry.ask.port import StoreAsk
from telemetry.ask.sql import _FUNCTIONS, _TABLE_FUNCTIONS, SQL_CHARS_MAX, TABLES, checked
from telemetry.store import Store, StoreRefused, StoreUnavailable
from tests.support.clickhouse import ClickHouseFront
from tests.telemetry.asked import TOKEN, Asked

RUN = (
    "SELECT count() FROM requests",
    "select model, quantile(0.99)(ttft_us) as p99 from requests group by model order by p99 desc limit 5;",
    "WITH slow AS (SELECT stream FROM requests WHERE wall_us > 9) SELECT count() FROM attempts WHERE stream IN (slow)",
    "SELECT a.pool, sum(r.weight) FROM requests AS r INNER JOIN attempts AS a ON r.stream = a.stream GROUP BY a.pool",
    "SELECT r.stream, s.replica FROM requests AS r ARRAY JOIN r.scores AS s LIMIT 3",
    "SELECT toStartOfMinute(at) AS m, countIf(ended = 'failed') / count() FROM requests GROUP BY m ORDER BY m",
    "SELECT minute, quantilesTDigestWeightedMerge(0.5, 0.9, 0.95, 0.99)(wall_q) FROM requests_minute GROUP BY minute",
    "SELECT tenant, sum(price_micro) FROM usage_hour GROUP BY tenant -- the bill",
    "SELECT 'a; b -- c', '/* d */', 'it''s', 'x\\'y' /* a comment */",
    "SELECT max(number) FROM numbers(10)",
    "SELECT count() FROM requests, fleet WHERE requests.pool = fleet.pool",
)

REFUSED = {
    "two": "SELECT 1; SELECT 2",
    "two, hidden": "SELECT 1 /* ; */ ; DROP TABLE requests",
    "file": "SELECT file('/etc/passwd')",
    "file, quoted": "SELECT `file`('/etc/passwd')",
    "file, as its own alias": "SELECT 1 AS file, file('/etc/passwd')",
    "file, spaced": "SELECT file /* x */ ('/etc/passwd')",
    "file, table": "SELECT * FROM file('/etc/passwd', 'LineAsString', 'x String')",
    "file, in": "SELECT 1 IN file('/etc/passwd')",
    "file, joined": "SELECT * FROM requests JOIN file('/etc/passwd') AS f ON 1 = 1",
    "file, comma": "SELECT * FROM requests, file('/etc/passwd')",
    "file, mapped": "SELECT arrayMap(x -> file(x), ['/etc/passwd'])",
    "a path as a table": "SELECT * FROM '/etc/passwd'",
    "a path, quoted": "SELECT * FROM `/etc/passwd`",
    "url": "SELECT * FROM url('http://127.0.0.1:1/', 'CSV', 'x String')",
    "describe url": "DESCRIBE url('http://127.0.0.1:1/x.csv', 'CSV')",
    "s3": "SELECT * FROM s3('http://127.0.0.1:1/b/x', 'CSV')",
    "remote": "SELECT * FROM remote('127.0.0.1', system.one)",
    "mysql": "SELECT * FROM mysql('127.0.0.1:1', 'd', 't', 'u', 'p')",
    "executable": "SELECT * FROM executable('id', 'TabSeparated', 'x String')",
    "the process": "SELECT * FROM python(store)",
    "ai": "SELECT aiGenerate('x')",
    "outfile": "SELECT 1 INTO OUTFILE '{outfile}'",
    "outfile, split": "SELECT 1 INTO --\n OUTFILE '{outfile}'",
    "settings": "SELECT 1 SETTINGS max_execution_time = 1000",
    "format": "SELECT 1 FORMAT JSON",
    "system": "SELECT * FROM system.processes",
    "system, quoted": 'SELECT * FROM "system"."users"',
    "system, comma": "SELECT * FROM requests AS r, system.users",
    "system, alias": "SELECT 1 AS system FROM requests, system.users",
    "information_schema": "SELECT * FROM information_schema.tables",
    "another database": "SELECT * FROM elsewhere.secrets",
    "another table": "SELECT * FROM secrets",
    "insert": "INSERT INTO requests (id) VALUES ('x')",
    "drop": "DROP TABLE requests",
    "create": "CREATE TABLE x (a Int64) ENGINE = Kafka",
    "set": "SET readonly = 0",
    "explain": "EXPLAIN SELECT 1",
    "show": "SHOW CREATE TABLE requests",
    "sleep": "SELECT sleep(3)",
    "settings, read": "SELECT getSetting('max_execution_time')",
    "a heredoc": "SELECT $a$ x $a$",
    "a parameter": "SELECT {x:Int64}",
    "a parenthesis": "SELECT 1)",
    "nothing": " ;",
    "using": "SELECT * FROM requests JOIN attempts USING stream, secrets",
    "too long": "SELECT 1" + " " * SQL_CHARS_MAX,
}


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    with Asked() as running:
        yield running


@pytest.fixture
def ask(asked: Asked) -> HttpAsk:
    return HttpAsk(asked.url, TOKEN)


@pytest.mark.parametrize("sql", RUN)
async def test_reads_of_our_tables_run(ask: HttpAsk, sql: str) -> None:
    assert (await ask.sql(sql, 100)).rows


@pytest.mark.parametrize("name", REFUSED)
async def test_nothing_else_runs(ask: HttpAsk, name: str, tmp_path: Path) -> None:
    sql = REFUSED[name].replace("{outfile}", str(tmp_path / "out"))
    with pytest.raises(BadRequest):
        checked(sql)
    with pytest.raises(StoreRefused):
        await ask.sql(sql, 100)
    assert not list(tmp_path.iterdir())


async def test_why_the_engines_own_wall_is_not_enough(store: Store, tmp_path: Path) -> None:
    """Should these ever be refused by the engine itself, this wall may be thinner."""
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    rows = await store.query(f"SELECT file('{secret}')")
    assert rows.rows == [("hunter2",)]
    with pytest.raises(BadRequest):
        await StoreAsk(store).sql(f"SELECT file('{secret}')", 1)


async def test_an_answer_has_so_many_rows_at_most(ask: HttpAsk) -> None:
    rows = await ask.sql("SELECT number FROM numbers(1000000)", 50)
    assert (len(rows.rows), rows.truncated) == (50, True)
    rows = await ask.sql("SELECT number FROM numbers(50)", 50)
    assert (len(rows.rows), rows.truncated) == (50, False)
    with pytest.raises(StoreRefused, match="rows_max is 1 to 10000"):
        await ask.sql("SELECT 1", 10_001)


async def test_a_query_ends_at_its_time(front: ClickHouseFront, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store_module._READ_ONLY["max_execution_time"] == store_module.QUERY_S_MAX
    monkeypatch.setattr(store_module, "_READ_ONLY", {**store_module._READ_ONLY, "max_execution_time": 0.3})
    store = Store(front.url)
    await store.open()
    try:
        with pytest.raises(StoreUnavailable, match=r"(?i)timeout"):
            await StoreAsk(store).sql("SELECT count() FROM numbers(1000000000000) WHERE cityHash64(number) = 1", 1)
    finally:
        await store.close()


async def test_of_the_engines_functions_none_that_reaches_out_is_allowed(store: Store) -> None:
    rows = (await store.query("SELECT lower(name), categories FROM system.functions WHERE NOT is_aggregate")).rows
    allowed = {name: kind for name, kind in rows if _FUNCTIONS.fullmatch(name)}
    assert len(allowed) > 200
    kinds = {"AI", "Dictionary", "Embedded Dictionary", "Encryption", "Internal", "Introspection", "Machine Learning"}
    assert not {name for name, kind in allowed.items() if kind in kinds}
    # Of those under "Other" each by its name
    assert {name for name, kind in allowed.items() if kind == "Other"} <= {
        "bar", "finalizeaggregation", "formatreadabledecimalsize", "formatreadablequantity", "formatreadablesize",
        "formatreadabletimedelta", "identity", "ignore", "materialize", "runningdifference", "tocolumntypename",
        "totypename",
    }  # fmt: skip
    rows = (await store.query("SELECT lower(name) FROM system.table_functions")).rows
    assert {name for (name,) in rows} & (_TABLE_FUNCTIONS | TABLES) == {
        "numbers", "zeros", "values", "generateseries", "generate_series", "view",
    }  # fmt: skip
    reaching = {
        "file",
        "url",
        "s3",
        "remote",
        "cluster",
        "mysql",
        "executable",
        "python",
        "input",
        "dictionary",
        "merge",
    }
    assert not {name for name in reaching if _FUNCTIONS.fullmatch(name)}


@given(st.text(alphabet="SELECT FROMrequestsfile('/x\\')`\";,.-#*/ \n1$", max_size=60))
def test_what_comes_through_is_made_of_what_was_checked(text: str) -> None:
    try:
        sql = checked("SELECT " + text)
    except BadRequest:
        return
    assert checked(sql) == sql, "checked once or twice, the same"
    assert "file (" not in sql
    bare = sql.replace("''", "")
    assert ";" not in "".join(bare.split("'")[::2]), "outside of strings"
