"""Messages of the chats' socket: those that a page sends, and as types for the reference those that it gets."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from stream_fabric.limits import USER_CHARS_MAX

RequestId = Annotated[str, Meta(max_length=USER_CHARS_MAX)]


# Decoded after a check of their size: an object of many members would hold the event loop
_Headers = Annotated[Raw, Meta(extra_json_schema={"type": "object", "additionalProperties": {"type": "string"}})]
_Body = Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


def _null() -> Raw:
    return Raw(b"null")  # as a default value, no schema could show it


def _nothing() -> Raw:
    return Raw(b"{}")


class Send(msgspec.Struct, tag_field="type", tag="send", rename="camel"):
    """A new turn: the body of ``POST /v1/ui/chat`` in parts."""

    request_id: RequestId
    id: str
    """The chat."""
    messages: Raw
    trigger: Raw = msgspec.field(default_factory=_null)
    message_id: Raw = msgspec.field(default_factory=_null)
    headers: _Headers = msgspec.field(default_factory=_nothing)
    """Such as `authorization`, `idempotency-key` and `traceparent`."""
    body: _Body = msgspec.field(default_factory=_nothing)
    """Further fields of the body, such as `model`."""


class Resume(msgspec.Struct, tag_field="type", tag="resume", rename="camel"):
    """Read the chat's running answer from its first chunk."""

    request_id: RequestId
    id: str
    """The chat."""
    last_sequence: int | None = None
    """Not supported: an answer is replayed from its first chunk."""
    headers: _Headers = msgspec.field(default_factory=_nothing)
    body: _Body = msgspec.field(default_factory=_nothing)


class Abort(msgspec.Struct, tag_field="type", tag="abort", rename="camel"):
    """Stop the answer of a request. It is not answered."""

    request_id: RequestId


class ChatStart(msgspec.Struct, tag_field="type", tag="start", rename="camel"):
    """The chunks of an answer follow."""

    request_id: RequestId


class ChatChunk(msgspec.Struct, tag_field="type", tag="chunk", rename="camel"):
    """One chunk of an answer, as the server-sent events of `POST /v1/ui/chat` have it."""

    request_id: RequestId
    sequence: Annotated[int, Meta(ge=0)]
    """Number of the chunk on this request, from 0."""
    chunk: dict[str, Any]


class ChatEnd(msgspec.Struct, tag_field="type", tag="end", rename="camel"):
    """An answer has ended."""

    request_id: RequestId


class ChatNotActive(msgspec.Struct, tag_field="type", tag="no-active", rename="camel"):
    """Nothing runs in the chat, so there is nothing to resume."""

    request_id: RequestId


class ChatError(msgspec.Struct, tag_field="type", tag="error", rename="camel"):
    """A request is refused, or its answer has failed. After an error that another gateway may not have, the socket
    closes instead, and the page resumes."""

    request_id: RequestId
    error_text: str
    """Cause, what it concerns, and what to do."""
    code: str
    """Stable name of the error."""
    retriable: bool | UnsetType = UNSET


CLIENT_MESSAGES: dict[str, type[msgspec.Struct]] = {"chat.send": Send, "chat.resume": Resume, "chat.abort": Abort}
SERVER_MESSAGES: dict[str, type[msgspec.Struct]] = {
    "chat.start": ChatStart,
    "chat.chunk": ChatChunk,
    "chat.end": ChatEnd,
    "chat.no-active": ChatNotActive,
    "chat.error": ChatError,
}
"""Messages by their name in the document."""
