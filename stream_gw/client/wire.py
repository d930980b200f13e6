"""The WebSocket messages of docs/protocol.md as types."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from stream_gw.client.errors import GatewayError

SUBPROTOCOL = "tokenstream.v1"


class ErrorBody(msgspec.Struct, frozen=True):
    """An error, as a stream's end or an ``error`` message carries it."""

    code: str = "internal_error"
    message: str = "the gateway reported an error"
    retriable: bool = False
    retry_after_s: float | None = None
    request_id: str | None = None

    def exception(self) -> GatewayError:
        return GatewayError(
            self.code,
            self.message,
            retriable=self.retriable,
            retry_after_s=self.retry_after_s,
            request_id=self.request_id,
        )


class Hi(msgspec.Struct, frozen=True, tag_field="t", tag="hi"):
    ping_ms: int = 15_000


class Ok(msgspec.Struct, frozen=True, tag_field="t", tag="ok"):
    ch: int
    stream: str
    epoch: str
    head: int = 0
    status: str = "live"


class D(msgspec.Struct, frozen=True, tag_field="t", tag="d"):
    ch: int
    s: int
    f: list[Any]
    a: int | None = None


class End(msgspec.Struct, frozen=True, tag_field="t", tag="end"):
    ch: int
    s: int
    status: str
    usage: dict[str, Any] | None = None
    error: ErrorBody | None = None
    structured_output: list[dict[str, Any]] | None = None


class GapMessage(msgspec.Struct, frozen=True, tag_field="t", tag="gap", rename={"first": "from", "last": "to"}):
    ch: int
    first: int
    last: int


class ResetMessage(msgspec.Struct, frozen=True, tag_field="t", tag="reset"):
    ch: int
    epoch: str
    to: int


class SteeredMessage(msgspec.Struct, frozen=True, tag_field="t", tag="steered"):
    ch: int
    s: int
    id: str
    result: str
    reason: str = ""


class QueuedMessage(msgspec.Struct, frozen=True, tag_field="t", tag="queued"):
    ch: int
    position: int
    of: int
    warming_s: float | None = None


class Ack(msgspec.Struct, frozen=True, tag_field="t", tag="ack"):
    """The answer to a cancel (accepted, already, pending, terminal) or an input (accepted, duplicate, terminal)."""

    id: str
    result: str
    at: str | None = None
    status: str | None = None


class Ping(msgspec.Struct, frozen=True, tag_field="t", tag="ping"):
    head: dict[int, int] = {}


class ReconnectHint(msgspec.Struct, frozen=True, tag_field="t", tag="reconnect"):
    after_ms: int = 0


class ErrorMessage(ErrorBody, frozen=True, tag_field="t", tag="error"):
    """An error of a channel (``ch``), of a request (``id``), or of the connection."""

    ch: int | None = None
    id: str | None = None


ChannelMessage: TypeAlias = Ok | D | End | GapMessage | ResetMessage | SteeredMessage | QueuedMessage
ServerMessage: TypeAlias = ChannelMessage | Hi | Ack | Ping | ReconnectHint | ErrorMessage

_TAGS = frozenset({"hi", "ok", "d", "end", "gap", "reset", "steered", "queued", "ack", "ping", "reconnect", "error"})


class _Tagged(msgspec.Struct):
    t: str


_decode = msgspec.json.Decoder(ServerMessage).decode
_decode_tag = msgspec.json.Decoder(_Tagged).decode
encode = msgspec.json.Encoder().encode


def decode(text: str | bytes) -> ServerMessage | None:
    """Decode a message; None: its type is unknown here, so a newer gateway sent it. Raises msgspec.DecodeError."""
    try:
        message: ServerMessage = _decode(text)
    except msgspec.ValidationError:
        if _decode_tag(text).t in _TAGS:
            raise
        return None
    return message
