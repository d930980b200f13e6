"""The schema's migrations, and the lock that lets one process apply them. Blocking calls."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from typing import TYPE_CHECKING

from stream_fabric.ports import Random
from telemetry.store.errors import SchemaTooNew, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

log = logging.getLogger(__name__)

_LOCK_S = 120
"""Time after which another process may take over the migration of a process that died, in seconds."""
_RENEWALS = 4
"""Renewals of the lock in ``_LOCK_S``."""


@dataclass(frozen=True)
class Migration:
    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return sha256(self.sql.encode()).hexdigest()

    def statements(self) -> list[str]:
        """Return the statements of the file. Each can run twice, because a process may die between two of them."""
        bare = "\n".join(line for line in self.sql.splitlines() if not line.startswith("--"))
        return [statement for part in re.split(r";[ \t]*(?:\n|$)", bare) if (statement := part.strip())]


def migrations() -> list[Migration]:
    """Return all migrations that this release has, in order."""
    found = []
    for entry in resources.files("telemetry.store.schema").iterdir():
        match = re.fullmatch(r"(\d{4})_(\w+)\.sql", entry.name)
        if match:
            found.append(Migration(int(match[1]), match[2], entry.read_text("utf-8")))
    found.sort(key=lambda migration: migration.version)
    assert [migration.version for migration in found] == list(range(1, len(found) + 1))
    return found


def check_schema(client: Client, where: str) -> None:
    """Raise StoreUnavailable or StoreRefused unless the schema is exactly this release's. Needs SELECT only."""
    known = migrations()
    tables = client.query("SELECT name FROM system.tables WHERE database = currentDatabase() AND name = 'migrations'")
    applied = _applied(client) if tables.result_rows else {}
    _check_applied(known, applied, where)
    if len(applied) < len(known):
        raise schema_too_old(len(applied), where)


_MADE = re.compile(r"CREATE (?:TABLE|MATERIALIZED VIEW) IF NOT EXISTS (\w+)")


def missing_tables(client: Client) -> list[str]:
    """Return the tables and views of this release's schema that the database lacks. Without a view bills are lost."""
    made = [name for migration in migrations() for name in _MADE.findall(migration.sql)]
    rows = client.query("SELECT name FROM system.tables WHERE database = currentDatabase()").result_rows
    there = {str(row[0]) for row in rows}
    return [name for name in made if name not in there]


def schema_too_old(version: int, where: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"the schema at {where} has version {version} and this release needs {len(migrations())}; "
        "start stream-gw telemetry, which migrates it"
    )


def migrate(client: Client, where: str, random: Random, connect: Callable[[], Client]) -> None:
    """Apply the missing migrations. Blocks. Raises StoreRefused for a schema that is newer or differs.

    ``connect``: opens another client, which renews the lock while a statement runs.
    """
    known = migrations()
    client.command(_MIGRATIONS_TABLE)
    if len(_applied(client)) >= len(known):
        _check_applied(known, _applied(client), where)
        if missing := missing_tables(client):
            raise StoreRefused(
                f"ClickHouse at {where} lacks {', '.join(missing)} of this schema: somebody dropped or renamed it. "
                "Bring it back, or set STREAM_GW_CLICKHOUSE to another database, which then begins empty"
            )
        return
    with _lock(client, random, connect):
        applied = _applied(client)
        _check_applied(known, applied, where)
        for migration in known[len(applied) :]:
            for statement in migration.statements():
                client.command(statement)
            client.insert(
                "migrations",
                [[migration.version, migration.name, migration.checksum]],
                column_names=["version", "name", "checksum"],
                settings={"insert_deduplication_token": f"migration:{migration.version}"},
            )


_MIGRATIONS_TABLE = (
    "CREATE TABLE IF NOT EXISTS migrations (version Int64, name String, checksum String, "
    "applied_at DateTime64(3, 'UTC') DEFAULT now64(3)) ENGINE = MergeTree ORDER BY version "
    "SETTINGS non_replicated_deduplication_window = 10000"
)


def _applied(client: Client) -> dict[int, tuple[str, str]]:
    """Read the applied migrations: version → (name, checksum)."""
    rows = client.query("SELECT version, name, checksum FROM migrations ORDER BY version").result_rows
    return {int(version): (str(name), str(checksum)) for version, name, checksum in rows}


def _check_applied(known: Sequence[Migration], applied: Mapping[int, tuple[str, str]], where: str) -> None:
    """Raise StoreRefused or SchemaTooNew unless the applied migrations are this release's first ones."""
    newest = max(applied, default=0)
    if newest > len(known):
        raise SchemaTooNew(
            f"the schema at {where} has version {newest} and this release knows {len(known)}; upgrade stream-gw"
        )
    for migration in known[:newest]:
        name, checksum = applied.get(migration.version, ("", ""))
        if checksum != migration.checksum:
            raise StoreRefused(
                f"migration {migration.version} at {where} is {name or 'missing'} and differs from this release's "
                f"({migration.name}); another build made it, or its file was edited"
            )


_LOCK_COLUMNS = ("round", "holder", "done", "until")


@contextlib.contextmanager
def _lock(client: Client, random: Random, connect: Callable[[], Client]) -> Iterator[None]:
    """Let one process migrate while the others wait.

    ClickHouse has no locks, but it keeps only one of two inserts with the same deduplication token. The first process
    to insert the row of a round holds the lock, until it inserts that it is done or no longer renews its time.
    """
    client.command(
        "CREATE TABLE IF NOT EXISTS migration_lock (round Int64, holder String, done Bool, until DateTime64(3, 'UTC')) "
        "ENGINE = MergeTree ORDER BY round SETTINGS non_replicated_deduplication_window = 10000"
    )
    me = random.token_hex(8)
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
        _insert_lock(client, last + 1, me, f"lock:{last + 1}")
    try:
        with _renewed(connect, last, me):
            yield
    finally:
        _insert_lock(client, last, me, f"lock:{last}:done", done=True)


def _insert_lock(client: Client, number: int, me: str, token: str, *, done: bool = False) -> None:
    until = client.query(f"SELECT now64(3) + toIntervalSecond({_LOCK_S})").result_rows[0][0]
    settings = {"insert_deduplication_token": token}
    client.insert("migration_lock", [[number, me, done, until]], column_names=_LOCK_COLUMNS, settings=settings)


@contextlib.contextmanager
def _renewed(connect: Callable[[], Client], number: int, me: str) -> Iterator[None]:
    """Renew the lock from a thread: a statement may take an hour, and its client answers nothing meanwhile."""
    from clickhouse_connect.driver import exceptions

    ended = threading.Event()

    def renew() -> None:
        renewals = 0
        while not ended.is_set():
            try:
                with contextlib.closing(connect()) as client:
                    while not ended.is_set():
                        renewals += 1
                        _insert_lock(client, number, me, f"lock:{number}:{renewals}")
                        ended.wait(_LOCK_S / _RENEWALS)
            except (StoreUnavailable, exceptions.Error, OSError) as error:
                log.warning("migration lock not renewed, another process may take over: error=%s", error)
                ended.wait(_LOCK_S / _RENEWALS)

    thread = threading.Thread(target=renew, name="migration-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
