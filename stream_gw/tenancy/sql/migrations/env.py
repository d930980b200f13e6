"""Alembic's environment: runs the migrations on the connection that the caller made."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
