"""The database's schema: its version, and the migrations to this release's."""

from __future__ import annotations

import re
from importlib.resources import files

from sqlalchemy import Connection, inspect, text

_LOCK = 0x73677774
"""PostgreSQL's advisory lock of a migration."""
_MIGRATIONS = files("stream_gw.tenancy.sql") / "migrations"


def known_version() -> int:
    """Return the version of the schema that this release has: the number of its last migration."""
    names = (re.match(r"v(\d{4})_\w+\.py$", file.name) for file in (_MIGRATIONS / "versions").iterdir())
    return max(int(name[1]) for name in names if name)


def applied_version(connection: Connection) -> int:
    """Return the version of the database's schema; 0: it has none."""
    if not inspect(connection).has_table("alembic_version"):
        return 0
    return int(connection.scalar(text("SELECT version_num FROM alembic_version")) or 0)


def migrate(connection: Connection) -> None:
    """Bring the schema to this release's version; processes that do it at the same time wait for each other."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # Python's sqlite3 begins none before it changes a schema
    else:
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    if applied_version(connection) < known_version():
        # Its import takes 0.2 s of a start, and most starts migrate nothing
        from alembic import command
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
