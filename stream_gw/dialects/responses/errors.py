"""Errors of the Responses API: as an event within the stream, and the bodies of the Open Responses specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stream_fabric.errors import StreamGwError
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.ids import StreamId

OPEN_PREFIX = "/v1/open/"
"""Base path of the Open Responses specification: a client of it knows a base URL and nothing else."""
_VERSION_HEADER = b"openresponses-version"


def is_open(path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request's caller expects the shapes of Open Responses; known before its body is read."""
    if path.startswith(OPEN_PREFIX):
        return True
    return _VERSION_HEADER in headers and (path == "/v1/responses" or path.startswith("/v1/responses/"))


def error_object(error: StreamGwError) -> dict[str, Any]:
    """Return the error of an event."""
    return {
        "type": error.type,
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "retriable": error.retriable,
    }


def open_error_object(error: StreamGwError) -> dict[str, Any]:
    """Return the error in the words of the specification."""
    return {"type": _open_type(error), "code": error.code, "message": error.message, "param": error.param}


def _open_type(error: StreamGwError) -> str:
    if error.http_status == 404:
        return "not_found"
    if error.http_status == 429:
        return "too_many_requests"
    if error.http_status < 500:
        return "invalid_request"
    return "model_error" if error.code in ("engine_error", "engine_lost", "replica_lost") else "server_error"


def open_error_body(
    error: StreamGwError, request_id: str | None, *, stream_id: StreamId | None = None, cursor: Cursor | None = None
) -> bytes:
    """Encode the body of an error's response."""
    return msgspec.json.encode({"error": open_error_object(error)})
