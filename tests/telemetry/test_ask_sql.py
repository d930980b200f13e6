"""An analyst's own SQL: what reads our tables runs, nothing else does, and it ends. On the real engine, in the process
(where its read-only mode alone is no wall) and behind HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.errors import BadRequest
from telemetry.ask.http import HttpAsk
from telemetry.ask.sql import check as check_module
from telemetry.ask.sql.check import DEPTH_MAX, SQL_CHARS_MAX, CheckTimedOut, check_sql, checked
from telemetry.ask.sql.names import FUNCTIONS, TABLE_FUNCTIONS, TABLES
from telemetry.ask.store_ask import StoreAsk
from telemetry.store import connection as connection_module
from telemetry.store.errors import StoreRefused, StoreUnavailable
from telemetry.store.store import Store
from tests.support.clickhouse import ClickHouseFront
from tests.support.stores import make_store
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
    "merge, as a CTE's name": "WITH merge AS (SELECT 1) SELECT * FROM merge('system', '.*')",
    "settings, as a CTE's name": "WITH url AS (SELECT 1) SELECT * FROM url('http://127.0.0.1:1/', 'CSV', 'x String')",
    "python, as a CTE's name": "WITH python AS (SELECT 1) SELECT * FROM python(store)",
    "dictionary": "SELECT * FROM dictionary('d')",
    "dictionary, read": "SELECT dictGet('d', 'a', 1)",
    "join table, read": "SELECT joinGet('d', 'a', 1)",
    "merge, as an alias": "SELECT * FROM requests AS merge, merge('system', '.*')",
    "a CTE reads the table of its name": "WITH secrets AS (SELECT * FROM secrets) SELECT * FROM secrets",
    "a CTE out of scope": "SELECT * FROM (WITH secrets AS (SELECT 1) SELECT 1), secrets",
    "a CTE defined later": "WITH a AS (SELECT * FROM secrets), secrets AS (SELECT 1) SELECT * FROM a",
    "a CTE in another case": "WITH Secrets AS (SELECT 1) SELECT * FROM secrets",
    "a value is no table": "WITH 1 AS secrets SELECT * FROM secrets",
    "a CTE, recursive": "WITH RECURSIVE a AS (SELECT 1 UNION ALL SELECT * FROM a) SELECT * FROM a",
    "in, a table": "SELECT 1 IN secrets",
    "in, a table in parentheses": "SELECT 1 IN (secrets)",
    "in, a table with an alias": "SELECT 1 IN ((secrets AS s))",
    "in, a system table": "SELECT 'x' NOT IN system.users",
    "in, a bracketed table": "SELECT 1 IN [secrets]",
    "in, as a function": 'SELECT "in"(1, secrets)',
    "in, as another function": "SELECT globalIn(1, secrets)",
    "in, a subquery": "SELECT 1 IN (SELECT id FROM system.users)",
    "apply": "SELECT * APPLY(file) FROM requests",
    "apply, without parentheses": "SELECT COLUMNS('id') APPLY file FROM requests",
    "view": "SELECT * FROM view(SELECT * FROM system.users)",
    "values": "SELECT * FROM values('a Int8', 1)",
    "settings, in a union": "SELECT 1 UNION ALL SELECT 2 SETTINGS readonly = 0",
    "settings, in a subquery": "SELECT (SELECT 1 SETTINGS readonly = 0)",
    "limit": "SELECT 1 FROM requests LIMIT (SELECT count() FROM system.users)",
    "window": "SELECT count() OVER (ORDER BY (SELECT 1 FROM secrets)) FROM requests",
    "array join": "SELECT 1 FROM requests ARRAY JOIN file('/etc/passwd') AS line",
    "from first": "FROM secrets SELECT *",
    "table": "TABLE secrets",
    "insert, after a CTE": "WITH x AS (SELECT 1) INSERT INTO requests SELECT * FROM x",
    "deep": "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "deep, brackets": "SELECT " + "[" * (DEPTH_MAX + 1) + "1" + "]" * (DEPTH_MAX + 1),
    "deep, not": "SELECT " + "NOT " * 1000 + "1",
    "deep, minus": "SELECT " + "- " * 1000 + "1",
    "deep, in": "SELECT 1" + " IN (1)" * 500,
    "deep, cast": "SELECT 1" + "::Int64" * 800,
    "deep, lambda": "SELECT " + "x -> " * 800 + "1",
    "deep, case": "SELECT " + "CASE WHEN 1 THEN " * 200 + "1" + " END" * 200,
    "deep, subqueries": "SELECT * FROM " + "(SELECT * FROM " * 100 + "requests" + ")" * 100,
    "deep, joins": "SELECT * FROM requests" + " JOIN requests" * 900,
    "wide": "SELECT 1" + ", 1" * 5000,
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
    with pytest.raises(StoreRefused, match="rows_max must be 1 to 10000"):
        await ask.sql("SELECT 1", 10_001)


async def test_a_query_ends_at_its_time(front: ClickHouseFront, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connection_module.READ_SETTINGS["max_execution_time"] == connection_module.QUERY_S_MAX
    monkeypatch.setattr(
        connection_module, "READ_SETTINGS", {**connection_module.READ_SETTINGS, "max_execution_time": 0.3}
    )
    store = make_store(front.url)
    await store.open()
    try:
        with pytest.raises(StoreUnavailable, match=r"(?i)timeout"):
            await StoreAsk(store).sql("SELECT count() FROM numbers(1000000000000) WHERE cityHash64(number) = 1", 1)
    finally:
        await store.close()


async def test_of_the_engines_functions_none_that_reaches_out_is_allowed(store: Store) -> None:
    rows = (await store.query("SELECT lower(name), categories FROM system.functions WHERE NOT is_aggregate")).rows
    allowed = {name: kind for name, kind in rows if FUNCTIONS.fullmatch(name)}
    assert len(allowed) > 200
    kinds = {"AI", "Dictionary", "Embedded Dictionary", "Encryption", "Internal", "Introspection", "Machine Learning"}
    assert not {name for name, kind in allowed.items() if kind in kinds}
    # Functions of the category "Other" are listed one by one
    assert {name for name, kind in allowed.items() if kind == "Other"} <= {
        "bar", "finalizeaggregation", "formatreadabledecimalsize", "formatreadablequantity", "formatreadablesize",
        "formatreadabletimedelta", "identity", "ignore", "materialize", "runningdifference", "tocolumntypename",
        "totypename",
    }  # fmt: skip
    rows = (await store.query("SELECT lower(name) FROM system.table_functions")).rows
    assert {name for (name,) in rows} & (TABLE_FUNCTIONS | TABLES) == {
        "numbers", "zeros", "generateseries", "generate_series",
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
    assert not {name for name in reaching if FUNCTIONS.fullmatch(name)}


@given(st.text(alphabet="SELECT FROMrequestsfile('/x\\')`\";,.-#*/ \n1$", max_size=60))
def test_what_comes_through_is_made_of_what_was_checked(text: str) -> None:
    try:
        sql = checked("SELECT " + text)
    except BadRequest:
        return
    assert checked(sql) == sql, "checked once or twice, the same"
    assert "file(" not in sql
    bare = sql.replace("''", "")
    assert ";" not in "".join(bare.split("'")[::2]), "outside of strings"


FORBIDDEN = (
    "system.users", "`system`.`users`", "secrets", "migrations", "Requests", "merge('system', '.*')",
    "file('/etc/passwd')",
    "`file`('/etc/passwd')", "url('http://127.0.0.1:1/', 'CSV')", "python(store)", "remote('127.0.0.1', system.one)",
    "dictionary('d')", "s3('http://127.0.0.1:1/x')", "executable('id', 'CSV')", "view(SELECT * FROM system.users)",
)  # fmt: skip
PLACES = (
    "SELECT * FROM {0}", "SELECT * FROM requests, {0}", "SELECT * FROM requests AS r JOIN {0} AS s ON 1 = 1",
    "SELECT 1 IN {0}", "SELECT 1 NOT IN ({0})", "SELECT 1 WHERE 1 GLOBAL IN {0}", "SELECT (SELECT count() FROM {0})",
    "SELECT * FROM requests UNION ALL SELECT * FROM {0}", "SELECT * FROM requests ORDER BY (SELECT 1 FROM {0})",
    "SELECT * FROM requests LIMIT (SELECT 1 FROM {0})", "SELECT arrayMap(x -> (SELECT 1 FROM {0}), [1])",
    "SELECT if(EXISTS(SELECT 1 FROM {0}), 1, 2)", "SELECT count() OVER (ORDER BY (SELECT 1 FROM {0})) FROM fleet",
    "WITH a AS (SELECT * FROM {0}) SELECT * FROM a", "WITH (SELECT 1 FROM {0}) AS a SELECT a",
    "SELECT * FROM (SELECT * FROM (SELECT * FROM {0}))", "SELECT quantile(0.5)((SELECT 1 FROM {0})) FROM requests",
)  # fmt: skip
CTE_NAMES = ("merge", "file", "url", "python", "dictionary", "system", "users", "view", "a1", "Secrets", "MIGRATIONS")


@given(
    st.sampled_from(FORBIDDEN),
    st.sampled_from(PLACES),
    st.lists(st.sampled_from(PLACES), max_size=2),
    st.lists(st.sampled_from(CTE_NAMES), max_size=3, unique=True),
    st.sampled_from((" ", "\n", " /* x */ ", " -- x\n")),
    st.booleans(),
)
def test_a_forbidden_table_is_refused_in_every_place(
    forbidden: str, place: str, around: list[str], ctes: list[str], space: str, lower: bool
) -> None:
    sql = place.format(forbidden)
    for outer in around:
        sql = outer.format(f"({sql})")
    if ctes and not sql.startswith("WITH"):
        sql = "WITH " + ", ".join(f"{name} AS (SELECT 1)" for name in ctes) + " " + sql
    sql = sql.replace(" ", space)
    if lower:
        sql = sql.replace("SELECT", "select").replace("FROM", "from")
    with pytest.raises(BadRequest):
        checked(sql)


@given(st.sampled_from(sorted(TABLES)), st.sampled_from(PLACES[:4]), st.sampled_from(CTE_NAMES))
def test_an_allowed_table_passes_in_the_same_places(table: str, place: str, cte: str) -> None:
    assert table in checked(f"WITH {cte} AS (SELECT 1) " + place.format(table))
    assert cte in checked(f"WITH {cte} AS (SELECT 1) " + place.format(cte))


@given(st.text(max_size=30).filter(lambda text: "\0" not in text))
def test_a_string_stays_a_string(text: str) -> None:
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    sent = checked(f"SELECT '{quoted}'")
    assert checked(sent) == sent
    with pytest.raises(BadRequest):
        checked(f"SELECT '{quoted}' FROM secrets")


async def test_a_string_reaches_the_engine_unchanged(ask: HttpAsk) -> None:
    texts = [
        "it's",
        "a\\b",
        "\\",
        "\\\\'",
        "'",
        "''",
        "\n\t",
        "%_",
        "--",
        "/*",
        "*/",
        ";",
        "`",
        '"',
        "$a$",
        "{x:Int64}",
        "日本",
    ]
    quoted = [text.replace("\\", "\\\\").replace("'", "\\'") for text in texts]
    rows = await ask.sql("SELECT " + ", ".join(f"'{text}'" for text in quoted), 1)
    assert list(rows.rows[0]) == texts


async def test_the_check_runs_outside_the_loop_and_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(text: str) -> str:
        begun.set()
        go_on.wait(10)
        return text

    monkeypatch.setattr(check_module, "checked", slow)
    monkeypatch.setattr(check_module, "CHECK_S_MAX", 0.05)
    try:
        with pytest.raises(CheckTimedOut):
            await check_sql("SELECT 1")
        assert begun.is_set()
    finally:
        go_on.set()
