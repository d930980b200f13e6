"""Reads the events that a client of the Responses API sends over a WebSocket. Pure."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from stream_fabric.errors import BadRequest, Unsupported
from stream_fabric.limits import LANE_NAME_CHARS_MAX
from stream_gw.dialects.requests import field, read_fields
from stream_gw.dialects.responses.requests import OPEN, Asked, asked_of

_LANE = re.compile(rf"[A-Za-z0-9_.\-]{{1,{LANE_NAME_CHARS_MAX}}}")
_HTTP_ONLY = ("stream", "stream_options", "background")
"""Fields of an HTTP body that say how it is answered."""
_OWN = ("type", "stream_id", "generate", "idempotency_key", "traceparent", *_HTTP_ONLY)


class InvalidStreamId(BadRequest):
    """The name of the lane is none."""

    code = "invalid_stream_id"


class Envelope(msgspec.Struct):
    """The part of every client event that says what it is and which lane it belongs to."""

    type: str
    stream_id: Raw | UnsetType = UNSET

    @property
    def lane(self) -> str | None:
        """Name of the lane; None: the default lane. Raises InvalidStreamId."""
        if self.stream_id is UNSET or bytes(self.stream_id) == b"null":
            return None
        try:
            name = msgspec.json.decode(self.stream_id, type=str)
        except msgspec.MsgspecError:
            name = ""
        if not _LANE.fullmatch(name):
            raise InvalidStreamId(
                f"stream_id must be 1 to {LANE_NAME_CHARS_MAX} characters of A-Z, a-z, 0-9, '_', '.' and '-'; leave it "
                "out for the default lane",
                param="stream_id",
            )
        return name


class CreateEvent(NamedTuple):
    """A ``response.create`` whose fields are valid."""

    asked: Asked
    generate: bool
    """False: the request is prepared, and the model makes nothing."""
    key: str | None
    """Idempotency key."""
    traceparent: str | None
    """W3C trace context."""


class Steer(msgspec.Struct):
    """The fields of a ``response.steer``."""

    previous_response_id: str
    input: Raw
    type: Literal["response.steer"] = "response.steer"


_envelopes = msgspec.json.Decoder(Envelope)
_steers = msgspec.json.Decoder(Steer)


def read_envelope(message: bytes) -> Envelope:
    """Read what a message is, on the event loop: its other fields are passed over. Raises BadRequest."""
    try:
        return _envelopes.decode(message)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"not an event of the Responses API: {str(error)[:200]}") from error


def read_create(message: bytes, dialect: str) -> CreateEvent:
    """Read a ``response.create``. Raises BadRequest and Unsupported, which name the field."""
    fields = read_fields(message, "input")
    for name in _HTTP_ONLY:
        value = field(fields, name, Any)
        if dialect == OPEN and name in fields:
            raise BadRequest(f"{name} must not be sent over a WebSocket", param=name)
        if name == "background" and value:
            raise Unsupported("background is not supported over a WebSocket; use POST /v1/responses", param=name)
    generate, key = field(fields, "generate", bool | None), field(fields, "idempotency_key", str | None)
    traceparent = field(fields, "traceparent", str | None)
    for name in _OWN:
        fields.pop(name, None)
    return CreateEvent(asked_of(fields), generate is not False, key, traceparent)


def read_steer(message: bytes) -> Steer:
    """Read a ``response.steer``. Raises BadRequest."""
    try:
        return _steers.decode(message)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"not a response.steer: {str(error)[:200]}") from error
