"""Errors of the database of tenants."""

from __future__ import annotations

from stream_fabric.errors import NotFound, StreamGwError


class Conflict(StreamGwError):
    """The change contradicts what the database has."""

    code = "conflict"
    http_status = 409
    close_code = 1008
    type = "invalid_request_error"


class NoDatabase(NotFound):
    """This gateway has no database of tenants."""

    code = "no_database"


class DatabaseUnavailable(StreamGwError):
    """The database cannot be reached, or refused a statement. Requests of tenants are not affected."""

    code = "database_unavailable"
    http_status = 503
    retriable = True


class SchemaOutdated(DatabaseUnavailable):
    """The database's schema is older than this release needs."""

    code = "database_schema_outdated"
    retriable = False
