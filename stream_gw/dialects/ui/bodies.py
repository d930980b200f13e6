"""Bodies and answers of chats in the AI SDK's format as types, for the reference of the API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stream_fabric.limits import MESSAGES_MAX, USER_CHARS_MAX
from stream_gw.dialects.bodies import Common, Tokens
from stream_gw.dialects.requests import MODEL_CHARS_MAX, STOPS_MAX

_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "reasoning"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_FILE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "file"},
        "mediaType": {"type": "string", "pattern": "^image/[a-z]+$"},
        "url": {"type": "string"},
    },
    "required": ["type", "mediaType", "url"],
}
_TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "pattern": "^tool-[A-Za-z0-9_-]+$"},
        "toolCallId": {"type": "string"},
        "state": {"enum": ["input-available", "output-available", "output-error", "output-denied"]},
        "input": {},
        "output": {},
        "errorText": {"type": "string"},
    },
    "required": ["type", "toolCallId", "state"],
}
_STEP: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "step-start"}},
    "required": ["type"],
}
ChatName = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": USER_CHARS_MAX})]
"""Id of a chat. Checked where it is used, with an error that names the field."""
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class UiMessage(msgspec.Struct):
    """A message as `useChat` holds it."""

    role: Literal["user", "assistant", "system"]
    parts: Annotated[list[Any], Meta(extra_json_schema={"items": {"anyOf": [_TEXT, _FILE, _TOOL, _STEP]}})]
    """Text, files and tools with their results. `dynamic-tool` is accepted; `data-*` and sources are left out. A call
    without a result is left out."""
    id: Annotated[str, Meta(max_length=USER_CHARS_MAX)] = ""


class UiTool(msgspec.Struct, rename="camel"):
    input_schema: dict[str, Any]
    """JSON schema of the input."""
    description: str | None = None


class UiToolChoice(msgspec.Struct, tag_field="type", tag="tool", rename="camel"):
    tool_name: str


class UiChatBody(Common, kw_only=True, rename="camel"):
    """Body of `POST /v1/ui/chat`, as `useChat` sends it. Other fields go to the engine unchanged."""

    id: ChatName
    """Id of the chat: the stream is resumed and stopped by it. Unless `session_id` is given, it is the session."""
    messages: Annotated[list[UiMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    model: Annotated[str, Meta(min_length=1, max_length=MODEL_CHARS_MAX)] | None = None  # type: ignore[assignment]
    """Name of the model; needed by callers that may use several."""
    trigger: Literal["submit-message", "regenerate-message"] | None = None
    message_id: str | None = None
    """Message to regenerate, or that is sent again."""
    system: str | None = None
    """System prompt, before all messages."""
    tools: dict[str, UiTool] | None = None
    """Tools that the page runs, by name. OpenAI's list is accepted too."""
    tool_choice: Literal["auto", "none", "required"] | UiToolChoice | None = None
    max_output_tokens: Tokens | None = None
    """Maximum tokens of the answer; OpenAI's names are accepted for this and the other settings."""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=STOPS_MAX)] | None = None
    """Strings that end the answer."""
    stream: Annotated[bool | None, Meta(extra_json_schema={"type": ["boolean", "null"], "enum": [True, None]})] = None
    """The answer is always a stream; `false` is refused."""


# --- answers -----------------------------------------------------------------------------------------------------


class UiEvent(msgspec.Struct, omit_defaults=True):
    """One server-sent event of a UI message stream."""

    data: str
    """A chunk as JSON, or `[DONE]`."""
    id: str = ""
    """Cursor of the frame."""


class StopAnswer(msgspec.Struct):
    result: Literal["accepted", "already", "pending", "terminal", "none"]
    """As for a cancel; `none`: the chat has no stream to stop."""
    stream: str | None
    """Id of the stream that was stopped."""
    at: str | None
    """Cursor of the last frame that any reader gets."""
    status: Literal["live", "completed", "cancelled", "failed", "incomplete"] | None


class ChatQuery(msgspec.Struct):
    user: Annotated[str, Meta(min_length=1)] | None = None
    """User whose chat it is. A credential with a user needs none."""


class StopQuery(ChatQuery):
    stream: str | None = None
    """Stream to stop: a newer one of the chat goes on. Without it, the chat's newest."""
