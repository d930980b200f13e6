"""Errors of a Responses socket, and their events."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.errors import BadRequest, StreamGwError
from stream_gw.dialects.responses.errors import error_object, open_error_object
from stream_gw.transport.sockets.base import headers_object

_encode = msgspec.json.Encoder().encode


class LaneLimit(BadRequest):
    """The socket has as many named lanes as it may."""

    code = "websocket_stream_limit_reached"


class ConnectionLimit(BadRequest):
    """The socket is as old as it may be."""

    code = "websocket_connection_limit_reached"


def error_event(error: StreamGwError, lane: str | None, name: str, *, is_open: bool, **more: Any) -> bytes:
    """Encode the event that refuses or ends a request.

    ``lane`` None: the default one. ``name``: the socket's. ``is_open``: in the words of Open Responses. ``more``:
    further fields of the error.
    """
    event: dict[str, Any] = {"type": "error", "status": error.http_status}
    if lane is not None:
        event["stream_id"] = lane
    if is_open:
        event["error"] = open_error_object(error)
        return _encode(event)
    event["error"] = inner = error_object(error) | {"request_id": name} | more
    headers = headers_object(error.headers)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if headers:
        inner["headers"] = headers
    return _encode(event)
