"""The connection to the database: PostgreSQL for a fleet, or an SQLite file for one machine."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import aiosqlite
import asyncpg
from sqlalchemy import event, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from stream_fabric.errors import BadRequest
from stream_fabric.system_errors import reason
from stream_gw.tenancy.errors import DatabaseUnavailable, SchemaOutdated
from stream_gw.tenancy.sql import schema

_CONNECT_S = 5.0
_STATEMENT_S = 10.0
_CONNECTIONS = 4
_ERRORS = (SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, sqlite3.Error, OSError, TimeoutError)
"""Errors of the drivers; the connection's own reach us as they are."""
_NO_CHARACTER = "22021"
"""SQLSTATE of PostgreSQL for a text with NUL."""
_READ_ONLY = "25006"
"""SQLSTATE of PostgreSQL for a change in a read-only transaction."""


class Schema(NamedTuple):
    """Versions of the schema. ``applied`` 0: the database has none."""

    applied: int
    known: int


class Database:
    """One database. Its methods raise DatabaseUnavailable when it cannot be reached or refuses.

    BadRequest: a text holds NUL, which PostgreSQL cannot store.
    """

    def __init__(self, url: str) -> None:
        """``url``: ``postgresql://…`` with the parameters of libpq, or ``sqlite:///path``. Raises ValueError."""
        parts = urlsplit(url)
        self._is_file = parts.scheme == "sqlite"
        host = parts.netloc.rpartition("@")[2] or "localhost"
        self.shown = parts.path[1:] if self._is_file else f"{host}{parts.path}"
        """The database without credentials."""
        self._engine = _file_engine(parts.path[1:]) if self._is_file else _server_engine(url)
        self._folder = Path(parts.path[1:]).parent
        self._usable = False
        self._checking = asyncio.Lock()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """Commit at the end, or roll back at an error. Raises SchemaOutdated."""
        if not self._usable:
            await self._check_schema()
        with self._translated():
            async with self._engine.begin() as connection:
                yield connection

    async def migrate(self) -> Schema:
        """Bring the schema to this release's version. Return the version before, and this one."""
        found = await self.schema()
        with self._translated():
            async with self._engine.connect() as connection:
                await connection.run_sync(schema.migrate)
                await connection.commit()
        return found

    async def schema(self) -> Schema:
        with self._translated():
            async with self._engine.connect() as connection:
                return Schema(await connection.run_sync(schema.applied_version), schema.known_version())

    async def takes_writes(self) -> bool:
        """Whether changes are possible: the server is no standby, and nobody has made it read-only."""
        if self._is_file:
            return True
        with self._translated():
            async with self._engine.connect() as connection:
                return bool(await connection.scalar(text("SELECT current_setting('transaction_read_only') = 'off'")))

    async def close(self) -> None:
        await self._engine.dispose()

    async def _check_schema(self) -> None:
        """Migrate a file; check a server's schema. A newer one is fine: migrations leave what a release back reads."""
        async with self._checking:
            if self._usable:
                return
            applied, known = await self.schema()
            if applied < known and not self._is_file:
                raise SchemaOutdated(
                    f"the schema of database {self.shown} has version {applied}, and this release needs {known}; "
                    "run stream-gw tenants migrate"
                )
            if applied < known:
                await self.migrate()
            self._usable = True

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the drivers' errors into ours."""
        # SQLite's own error does not name what is missing
        if self._is_file and not self._folder.is_dir():
            raise DatabaseUnavailable(f"the folder of database {self.shown} does not exist; create {self._folder}")
        try:
            yield
        except _ERRORS as error:
            cause = getattr(error, "orig", None) or error
            if getattr(cause, "sqlstate", None) == _NO_CHARACTER:
                raise BadRequest("a text holds NUL, which the database cannot store; leave it out") from error
            told = reason(cause).splitlines()[0][:200]
            if isinstance(cause, PoolTimeout):
                told = f"all {_CONNECTIONS} connections of this process wait for it; look for locks (pg_stat_activity)"
            raise DatabaseUnavailable(f"database {self.shown} does not answer or refuses: {told}") from error


def _server_engine(url: str) -> AsyncEngine:
    async def connect() -> asyncpg.Connection[Any]:
        dsn, context = _tls(url)
        return await asyncpg.connect(dsn, ssl=context, timeout=_CONNECT_S, command_timeout=_STATEMENT_S)

    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=connect,
        pool_size=_CONNECTIONS,
        max_overflow=0,
        pool_timeout=_CONNECT_S,
        pool_pre_ping=True,
    )

    @event.listens_for(engine.sync_engine, "handle_error")
    def leave_standby(failure: ExceptionContext) -> None:
        # The server answers pings, but only a new connection follows the name to the primary
        if getattr(failure.original_exception, "sqlstate", None) == _READ_ONLY:
            failure.is_disconnect = True

    return engine


def _tls(url: str) -> tuple[str, ssl.SSLContext | None]:
    """Return the URL for asyncpg, with a context for ``sslrootcert=system``: asyncpg takes that for a file's name.

    Raises OSError that names a certificate file of the URL which cannot be read.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    system = query.get("sslrootcert") == "system"
    for name in ("sslrootcert", "sslcert", "sslkey", "sslcrl"):
        if name in query and not (system and name == "sslrootcert"):
            try:
                open(query[name], "rb").close()
            except OSError as error:  # the driver's error does not say which file
                raise OSError(f"{name} of its URL: {query[name]}: {reason(error)}") from error
    if not system:
        return url, None
    context = ssl.create_default_context()  # as in libpq, the host's name is always verified then
    if "sslcert" in query:
        context.load_cert_chain(query["sslcert"], query.get("sslkey"), password=query.get("sslpassword", ""))
    kept = {name: value for name, value in query.items() if not name.startswith("ssl")}
    return urlunsplit(parts._replace(query=urlencode(kept))), context


def _file_engine(path: str) -> AsyncEngine:
    if not path:
        raise ValueError("an SQLite database needs a path: sqlite:///file, or sqlite:////absolute/file")

    def probe() -> None:
        sqlite3.connect(path).close()

    async def connect() -> aiosqlite.Connection:
        await asyncio.to_thread(probe)  # a connect that fails in aiosqlite leaves a thread that outlives the loop
        return await aiosqlite.connect(path, timeout=_STATEMENT_S)

    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", async_creator=connect)

    @event.listens_for(engine.sync_engine, "connect")
    def set_up(connection: Any, record: object) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    return engine
