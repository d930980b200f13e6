"""The database's schema: its version, and the migrations to this release's."""

from __future__ import annotations

from importlib.resources import files

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

_LOCK = 0x73677774
"""PostgreSQL's advisory lock of a migration."""


def known_version() -> int:
    """Return the version of the schema that this release has."""
    return int(ScriptDirectory.from_config(_config()).get_current_head() or 0)


def applied_version(connection: Connection) -> int:
    """Return the version of the database's schema; 0: it has none."""
    return int(MigrationContext.configure(connection).get_current_revision() or 0)


def migrate(connection: Connection) -> None:
    """Bring the schema to this release's version; processes that do it at the same time wait for each other."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # Python's sqlite3 begins none before it changes a schema
    else:
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    if applied_version(connection) < known_version():
        command.upgrade(_config(connection), "head")


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(files("stream_gw.tenancy.sql") / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
