"""ClickHouse: a server by URL, or the engine in this process on a folder. The only importer of clickhouse_connect.

    http://user:password@host:8123/database    a server; https:// with TLS
    chdb:///var/lib/stream-gw/telemetry        embedded; one process owns the folder, everybody else asks that process

The driver is synchronous and a client is one lock, so there is a client to write and one to read, each with its
thread. Traps of the embedded engine: a second process on the folder is refused, a second folder in a process too;
creating a table with the Kafka engine makes the folder unopenable for good, which is why ``command`` is for our own
statements alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from stream_fabric.errors import StreamGwError

if TYPE_CHECKING:
    import pyarrow as pa
    from clickhouse_connect.driver.client import Client

T = TypeVar("T")

_PINNED: Mapping[str, Any] = {
    # One insert is one block with its own name; the server does not gather several
    "async_insert": 0,
    "insert_deduplicate": 1,
    # A block that a raw table knows is still offered to the roll-ups, which may not: the process may have died between
    "deduplicate_blocks_in_dependent_materialized_views": 1,
    "materialized_views_ignore_errors": 0,
    # A block may hold events of many days, and must not be refused for it for ever
    "max_partitions_per_insert_block": 0,
    "date_time_input_format": "best_effort",
}
_SERVER_PINNED: Mapping[str, Any] = {
    # Over HTTP an error after the first byte of the answer would else look like success
    "wait_end_of_query": 1,
}
QUERY_ROWS_MAX = 10_000
"""Rows a query returns at most; the rest is cut off and said so."""
QUERY_S_MAX = 30.0
_QUERY_MEMORY_BYTES_MAX = 2 << 30
_CONTENT = ("prompt", "completion")
_LOCK_S = 120
"""A migration that has not ended after so long is another's to do again."""
_READ_ONLY: Mapping[str, Any] = {
    "max_execution_time": QUERY_S_MAX,
    "max_memory_usage": _QUERY_MEMORY_BYTES_MAX,
    "max_result_rows": QUERY_ROWS_MAX + 1,
    "result_overflow_mode": "break",
    # The last: after it no setting can be changed. It also forbids file(), url() and the like
    "readonly": 1,
}


class StoreUnavailable(StreamGwError):
    """ClickHouse cannot be reached, or refuses for now."""

    code = "store_unavailable"
    http_status = 503
    close_code = 1013
    retriable: ClassVar[bool] = True


class StoreRefused(StreamGwError):
    """ClickHouse understood and said no: wrong SQL, a limit, a schema that is not ours."""

    code = "store_refused"
    http_status = 400
    close_code = 1008
    type = "invalid_request_error"


class SchemaTooNew(StoreRefused):
    code = "schema_too_new"


@dataclass(frozen=True)
class Rows:
    """A query's answer."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    truncated: bool

    def dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(frozen=True)
class Migration:
    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return sha256(self.sql.encode()).hexdigest()

    def statements(self) -> list[str]:
        """Each can be run again: a process may die between two of them."""
        bare = "\n".join(line for line in self.sql.splitlines() if not line.startswith("--"))
        return [statement for part in re.split(r";[ \t]*(?:\n|$)", bare) if (statement := part.strip())]


def migrations() -> list[Migration]:
    """All that this code knows, ascending."""
    found = []
    for entry in resources.files("telemetry.schema").iterdir():
        match = re.fullmatch(r"(\d{4})_(\w+)\.sql", entry.name)
        if match:
            found.append(Migration(int(match[1]), match[2], entry.read_text("utf-8")))
    found.sort(key=lambda migration: migration.version)
    assert [migration.version for migration in found] == list(range(1, len(found) + 1))
    return found


class Store:
    """Call ``open`` first, ``close`` last. Every method raises StoreUnavailable or StoreRefused."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "chdb"):
            raise ValueError("a ClickHouse URL begins with http://, https:// or chdb:///")
        self.embedded = parts.scheme == "chdb"
        named = dict(parse_qsl(parts.query)).get("database", "") if self.embedded else parts.path.strip("/")
        self.database = named or "default"
        if not re.fullmatch(r"[A-Za-z_]\w{0,63}", self.database):
            raise ValueError("a ClickHouse URL's path is the name of a database: letters, digits and _")
        self._writer = _Lane(self._connect_writer)
        self._reader = _Lane(self._connect_reader)

    def __repr__(self) -> str:
        return f"Store({self.shown})"

    @property
    def shown(self) -> str:
        """The URL without its password."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit((parts.scheme, host, parts.path, "", ""))

    async def open(self, *, migrate: bool = True) -> None:
        """Connect; bring the schema to this code's, or, without ``migrate``, check that it is this code's."""
        await self._writer.run(self._migrate if migrate else self._check)

    async def close(self) -> None:
        """Waits for what runs."""
        await self._writer.close()
        await self._reader.close()

    async def insert(self, table: str, rows: pa.Table, name: str) -> float:
        """Insert a block under a name. Under a name that the table has had it changes nothing, also in the roll-ups.
        Returns the seconds that it took, without those that it waited for others."""

        def put(client: Client) -> float:
            began = time.monotonic()
            client.insert_arrow(table, rows, settings={"insert_deduplication_token": f"{name}:{table}"})
            return time.monotonic() - began

        return await self._writer.run(put)

    async def query(
        self, sql: str, parameters: Mapping[str, Any] | None = None, *, rows_max: int = QUERY_ROWS_MAX
    ) -> Rows:
        """Read. ``{name:Type}`` in the SQL are parameters. Nothing can be written or reached but our tables; it ends
        after ``QUERY_S_MAX``."""
        assert 0 < rows_max <= QUERY_ROWS_MAX

        def ask(client: Client) -> Rows:
            result = client.query(sql, parameters=dict(parameters or {}))
            rows = [tuple(row) for row in result.result_rows[:rows_max]]
            types = tuple(kind.name for kind in result.column_types)
            return Rows(tuple(result.column_names), types, rows, len(result.result_rows) > rows_max)

        return await self._reader.run(ask)

    async def command(self, sql: str) -> None:
        """Run a statement of our own. Never one that somebody wrote."""
        await self._writer.run(lambda client: client.command(sql))

    async def keep(self, raw_days: int, rollup_days: int, content_days: int = 7) -> None:
        """Set how long rows are kept, and prompts and completions in them. The bill (usage_hour) is kept for good."""
        wanted = [(table, "toDateTime(at)", raw_days) for table in ("requests", "attempts", "fleet")]
        wanted += [(table, "minute", rollup_days) for table in ("requests_minute", "attempts_minute")]
        wanted += [(table, "hour", rollup_days) for table in ("lengths_hour", "speeds_hour")]

        def alter(client: Client) -> None:
            sql = "SELECT name, engine_full FROM system.tables WHERE database = currentDatabase()"
            tables = {str(row[0]): str(row[1]) for row in client.query(sql).result_rows}
            for table, column, days in wanted:
                if f"toIntervalDay({days})" not in tables[table]:
                    client.command(
                        f"ALTER TABLE {table} MODIFY TTL {column} + INTERVAL {days} DAY",
                        settings={"materialize_ttl_after_modify": 0},
                    )
            sql = (
                "SELECT create_table_query FROM system.tables WHERE database = currentDatabase() AND name = 'requests'"
            )
            made = str(client.query(sql).result_rows[0][0])
            for column in _CONTENT:
                if not re.search(rf"`{column}` [^`]*TTL [^`]*toIntervalDay\({content_days}\)", made):
                    client.command(
                        f"ALTER TABLE requests MODIFY COLUMN {column} String CODEC(ZSTD(3)) "
                        f"TTL toDate(at) + INTERVAL {content_days} DAY",
                        settings={"materialize_ttl_after_modify": 0},
                    )

        await self._writer.run(alter)

    # --- connections, in their threads ---------------------------------------------------------------------

    def _connect(self, settings: Mapping[str, Any]) -> Client:
        try:
            import clickhouse_connect

            for noisy in ("clickhouse_connect", "urllib3"):
                # What they warn of is raised too, or tried again by them
                logging.getLogger(noisy).setLevel(logging.ERROR)
        except ImportError:
            raise StoreUnavailable(
                "clickhouse-connect is not installed: pip install 'stream-gw[clickhouse]', "
                "or with the engine itself: pip install 'stream-gw[chdb]'"
            ) from None
        if self.embedded:
            try:
                return clickhouse_connect.get_client(dsn=self.url, settings=dict(settings), tz_mode="aware")
            except ImportError:
                raise StoreUnavailable(
                    "the embedded ClickHouse is not installed: pip install 'stream-gw[chdb]', or name a server by URL"
                ) from None
            except clickhouse_connect.driver.exceptions.ProgrammingError as error:
                raise StoreUnavailable(
                    f"the embedded ClickHouse cannot open {urlsplit(self.url).path}: another process has it open (ask "
                    f"that one), or this process has another folder open, or it cannot be written ({_told(error)})"
                ) from error
        return clickhouse_connect.get_client(
            dsn=self.url,
            # A session would let only one query run at a time
            autogenerate_session_id=False,
            settings={**_SERVER_PINNED, **settings},
            tz_mode="aware",
            connect_timeout=5,
            send_receive_timeout=60,
        )

    def _connect_writer(self) -> Client:
        if self.database != "default":
            parts = urlsplit(self.url)
            path, query = (parts.path, "") if self.embedded else ("", parts.query)
            outside = Store(urlunsplit((parts.scheme, parts.netloc, path, query, "")))
            client = outside._connect(_PINNED)
            try:
                client.command(f"CREATE DATABASE IF NOT EXISTS {self.database}")
            finally:
                client.close()
        return self._connect(_PINNED)

    def _connect_reader(self) -> Client:
        return self._connect(_READ_ONLY)

    # --- schema, in the writer's thread --------------------------------------------------------------------

    def _check(self, client: Client) -> None:
        known = migrations()
        applied = _applied(client)
        _compare(known, applied, self.shown)
        if len(applied) < len(known):
            raise StoreUnavailable(
                f"the schema at {self.shown} is at version {len(applied)}, this process needs {len(known)}; "
                "start stream-gw telemetry, which brings it there"
            )

    def _migrate(self, client: Client) -> None:
        known = migrations()
        if len(_applied(client)) >= len(known):
            _compare(known, _applied(client), self.shown)
            return
        with _lock(client):
            applied = _applied(client)
            _compare(known, applied, self.shown)
            for migration in known[len(applied) :]:
                for statement in migration.statements():
                    client.command(statement)
                client.insert(
                    "migrations",
                    [[migration.version, migration.name, migration.checksum]],
                    column_names=["version", "name", "checksum"],
                    settings={"insert_deduplication_token": f"migration:{migration.version}"},
                )


def _applied(client: Client) -> dict[int, tuple[str, str]]:
    client.command(
        "CREATE TABLE IF NOT EXISTS migrations (version Int64, name String, checksum String, "
        "applied_at DateTime64(3, 'UTC') DEFAULT now64(3)) ENGINE = MergeTree ORDER BY version "
        "SETTINGS non_replicated_deduplication_window = 10000"
    )
    rows = client.query("SELECT version, name, checksum FROM migrations ORDER BY version").result_rows
    return {int(version): (str(name), str(checksum)) for version, name, checksum in rows}


def _compare(known: Sequence[Migration], applied: Mapping[int, tuple[str, str]], where: str) -> None:
    newest = max(applied, default=0)
    if newest > len(known):
        raise SchemaTooNew(
            f"the schema at {where} is at version {newest}, this process knows {len(known)}; upgrade stream-gw"
        )
    for migration in known[:newest]:
        name, checksum = applied.get(migration.version, ("", ""))
        if checksum != migration.checksum:
            raise StoreRefused(
                f"migration {migration.version} at {where} is {name or 'missing'}, and not what this process has under "
                f"that number ({migration.name}); it was made by another build, or somebody edited it"
            )


@contextlib.contextmanager
def _lock(client: Client) -> Iterator[None]:
    """One migrates, the others wait. ClickHouse has no locks; but of two inserts under one name one is kept, so the
    first to insert the round's row holds it, until it says it is done or its time is over."""
    client.command(
        "CREATE TABLE IF NOT EXISTS migration_lock (round Int64, holder String, done Bool, until DateTime64(3, 'UTC')) "
        "ENGINE = MergeTree ORDER BY round SETTINGS non_replicated_deduplication_window = 10000"
    )
    me = secrets.token_hex(8)
    columns = ["round", "holder", "done", "until"]
    state = (
        "SELECT round, argMin(holder, done), max(done), max(until) < now64(3) FROM migration_lock "
        "GROUP BY round ORDER BY round DESC LIMIT 1"
    )
    while True:
        rows = client.query(state).result_rows
        last, holder, done, over = rows[0] if rows else (0, "", True, True)
        if holder == me and not done:
            break
        if not done and not over:
            time.sleep(0.1)
            continue
        until = client.query(f"SELECT now64(3) + toIntervalSecond({_LOCK_S})").result_rows[0][0]
        token = {"insert_deduplication_token": f"lock:{last + 1}"}
        client.insert("migration_lock", [[last + 1, me, False, until]], column_names=columns, settings=token)
    try:
        yield
    finally:
        token = {"insert_deduplication_token": f"lock:{last}:done"}
        client.insert("migration_lock", [[last, me, True, until]], column_names=columns, settings=token)


class _Lane:
    """One client with its one thread. It connects when first asked, and again after the connection was refused."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self._client: Client | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="clickhouse")
        self._closed = threading.Event()

    async def run(self, work: Callable[[Client], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._run, work)

    def _run(self, work: Callable[[Client], T]) -> T:
        if self._closed.is_set():
            raise StoreUnavailable("the store is closed")
        from clickhouse_connect.driver import exceptions

        try:
            if self._client is None:
                self._client = self._connect()
            return work(self._client)
        except (exceptions.OperationalError, exceptions.InterfaceError, OSError) as error:
            raise StoreUnavailable(_told(error)) from error
        except exceptions.Error as error:
            if getattr(error, "code", None) in _FOR_NOW:
                raise StoreUnavailable(_told(error)) from error
            raise StoreRefused(_told(error)) from error

    async def close(self) -> None:
        def end() -> None:
            self._closed.set()
            if self._client is not None:
                self._client.close()
                self._client = None

        await asyncio.get_running_loop().run_in_executor(self._pool, end)
        self._pool.shutdown()


_FOR_NOW = frozenset({159, 202, 209, 210, 241, 242, 243, 252, 279, 319, 425, 999})
"""ClickHouse's codes of what passes: limits of time and memory, too many queries or parts, network, disk."""


def _told(error: BaseException) -> str:
    # The client adds the request's whole URL
    text = " ".join(str(error).partition(" with url:")[0].split())
    return text if len(text) <= 500 else text[:500] + "…"
