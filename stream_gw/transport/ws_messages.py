"""Messages that a WebSocket client sends: subprotocol ``tokenstream.v1``, described in ``docs/protocol.md``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from stream_fabric.limits import IDEMPOTENCY_KEY_CHARS_MAX

CHANNEL_MAX = (1 << 31) - 1
Mode = Literal["tokens", "coalesce", "snapshot"]


class Auth(msgspec.Struct, tag_field="t", tag="auth"):
    token: str


class Create(msgspec.Struct, tag_field="t", tag="create"):
    ch: int
    body: msgspec.Raw
    dialect: str = "openai.chat"
    key: str | None = None
    queued: bool = False
    """Send queue positions while the stream waits for a replica."""
    traceparent: str | None = None
    """W3C trace context."""
    retry: Annotated[int, Meta(ge=0)] = 0
    """How often this create was refused before."""


class Sub(msgspec.Struct, tag_field="t", tag="sub"):
    ch: int
    stream: str
    after: str = "1-0"
    dialect: str = "openai.chat"
    mode: Mode = "tokens"
    traceparent: str | None = None


class Unsub(msgspec.Struct, tag_field="t", tag="unsub"):
    ch: int


_Id = Annotated[str, Meta(max_length=IDEMPOTENCY_KEY_CHARS_MAX)]
"""Bounded, because the answer repeats it."""


class Cancel(msgspec.Struct, tag_field="t", tag="cancel"):
    id: _Id
    stream: str


class Input(msgspec.Struct, tag_field="t", tag="input"):
    id: _Id
    stream: str
    item: msgspec.Raw  # decoded after a check of its depth and of its number of objects
    """A string, or a message with role user."""


class Pong(msgspec.Struct, tag_field="t", tag="pong"):
    pass


class Asker(msgspec.Struct):
    """Channel or request of a malformed message, for the error that answers it."""

    ch: Annotated[int, Meta(ge=0, le=CHANNEL_MAX)] | None = None
    id: _Id | None = None


def asker_of(text: str) -> Asker:
    """Read who sent a malformed message; nothing where that is malformed too."""
    try:
        return _asker.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return Asker()


ClientMessage = Auth | Create | Sub | Unsub | Cancel | Input | Pong
decoder: msgspec.json.Decoder[ClientMessage] = msgspec.json.Decoder(ClientMessage)
_asker = msgspec.json.Decoder(Asker)
encode = msgspec.json.Encoder().encode
