"""Errors of the store."""

from __future__ import annotations

from typing import ClassVar

from stream_fabric.errors import StreamGwError


class StoreUnavailable(StreamGwError):
    """ClickHouse cannot be reached, or refuses for now."""

    code = "store_unavailable"
    http_status = 503
    close_code = 1013
    retriable: ClassVar[bool] = True


class StoreRefused(StreamGwError):
    """ClickHouse rejected the request: wrong SQL, a limit, or a schema that is not ours."""

    code = "store_refused"
    http_status = 400
    close_code = 1008
    type = "invalid_request_error"


class SchemaTooNew(StoreRefused):
    """The schema is newer than this release."""

    code = "schema_too_new"
