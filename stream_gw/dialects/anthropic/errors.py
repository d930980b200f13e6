"""Error objects in Anthropic's format, for responses and within streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stream_fabric.errors import (
    ContextLengthExceeded,
    FabricFull,
    GatewayFull,
    NoReplica,
    PoolBusy,
    PoolFull,
    StreamGwError,
)
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.ids import StreamId

OVERLOADED_STATUS = 529
"""Anthropic's own status of an overload; its clients take 503 for a fault."""
_OVERLOADS = {kind.code for kind in (NoReplica, PoolFull, PoolBusy, GatewayFull, FabricFull)}
_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def is_anthropic(path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request's caller expects Anthropic's shapes; known before its body is read."""
    return path == "/v1/messages" or path.startswith("/v1/messages/") or b"anthropic-version" in headers


def http_status(error: StreamGwError | type[StreamGwError]) -> int:
    """Return the status of an error's response: 529 where the platform is overloaded, else the error's own."""
    return OVERLOADED_STATUS if error.code in _OVERLOADS else error.http_status


def error_body(
    error: StreamGwError,
    request_id: str | None,
    *,
    stream_id: StreamId | None = None,
    cursor: Cursor | str | None = None,
) -> bytes:
    """Encode the error object as JSON. Our own fields follow Anthropic's ``type`` and ``message``.

    ``request_id`` None: the error is the stream's own, and the same for every reader.
    """
    status = http_status(error)
    inner: dict[str, Any] = {
        "type": _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error"),
        "message": _message(error),
        "code": error.code,
        "param": error.param,
        "retriable": error.retriable,
    }
    if stream_id is not None:
        inner["stream_id"] = stream_id
    if cursor is not None:
        inner["cursor"] = str(cursor)
    body: dict[str, Any] = {"type": "error", "error": inner}
    if request_id is not None:
        body["request_id"] = request_id
    return msgspec.json.encode(body)


def _message(error: StreamGwError) -> str:
    """Return the message; a prompt that is too long begins with Anthropic's words, by which clients shorten it."""
    is_prompt = error.code == ContextLengthExceeded.code and error.param != "max_tokens"
    return f"prompt is too long: {error.message}" if is_prompt else error.message
