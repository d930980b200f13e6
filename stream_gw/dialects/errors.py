"""Error objects in OpenAI's format, for responses and within streams."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.errors import StreamGwError
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.ids import StreamId


def error_body(
    error: StreamGwError, request_id: str | None, *, stream_id: StreamId | None = None, cursor: Cursor | None = None
) -> bytes:
    """Encode the error object as JSON. Within a stream it has the stream's id and the cursor to continue from."""
    body: dict[str, Any] = {
        "message": error.message,
        "type": error.type,
        "code": error.code,
        "param": error.param,
        "request_id": request_id,
        "retriable": error.retriable,
    }
    if stream_id is not None:
        body["stream_id"] = stream_id
    if cursor is not None:
        body["cursor"] = str(cursor)
    return msgspec.json.encode({"error": body})
