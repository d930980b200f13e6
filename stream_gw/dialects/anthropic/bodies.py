"""Bodies and answers in Anthropic's format as types, for the reference of the API.

A field that is not described goes to the engine unchanged, such as ``top_k``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stream_fabric.limits import MESSAGES_MAX, USER_CHARS_MAX
from stream_gw.dialects.bodies import Common, Repairs, Tier, TokensOrNone
from stream_gw.dialects.requests import MODEL_CHARS_MAX, STOPS_MAX

_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_IMAGE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "image"},
        "source": {
            "type": "object",
            "properties": {"type": {"const": "url"}, "url": {"type": "string"}},
            "required": ["type", "url"],
        },
    },
    "required": ["type", "source"],
}
_CALL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_use"},
        "id": {"type": "string"},
        "name": {"type": "string"},
        "input": {"type": "object"},
    },
    "required": ["type", "id", "name", "input"],
}
_RESULT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_result"},
        "tool_use_id": {"type": "string"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT}]},
    },
    "required": ["type", "tool_use_id"],
}


def _content(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {
        "anyOf": [{"type": "string"}, {"type": "array", "items": blocks[0] if len(blocks) == 1 else {"anyOf": blocks}}]
    }


class UserTurn(msgspec.Struct, tag_field="role", tag="user"):
    content: Annotated[Any, Meta(extra_json_schema=_content(_TEXT, _IMAGE, _RESULT))]
    """Text, or blocks. Images may also be base64; `search_result` and `document` (not by URL or id) are accepted."""


class AssistantTurn(msgspec.Struct, tag_field="role", tag="assistant"):
    content: Annotated[Any, Meta(extra_json_schema=_content(_TEXT, _CALL))]
    """Text, or blocks; also `thinking` and `redacted_thinking`. If it is the last message and calls no tool, the answer
    goes on from its text."""


class MessagesTool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None


class AutoChoice(msgspec.Struct, tag_field="type", tag="auto", omit_defaults=True):
    disable_parallel_tool_use: bool = False


class AnyChoice(msgspec.Struct, tag_field="type", tag="any", omit_defaults=True):
    disable_parallel_tool_use: bool = False


class NoChoice(msgspec.Struct, tag_field="type", tag="none"):
    pass


class ToolChoice(msgspec.Struct, tag_field="type", tag="tool", omit_defaults=True):
    name: str
    disable_parallel_tool_use: bool = False


MessagesToolChoice = AutoChoice | AnyChoice | NoChoice | ToolChoice


class MessagesThinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Accepted, but no limit: engines differ in how they take one."""


class MessagesFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class MessagesOutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessagesFormat | None = None


class MessagesMetadata(msgspec.Struct):
    user_id: str | None = None
    """Your user on whose behalf you ask. One of over 128 characters is stored as its SHA-256 in hex."""


_Turns = Annotated[list[UserTurn | AssistantTurn], Meta(min_length=1, max_length=MESSAGES_MAX)]
_System = Annotated[Any, Meta(extra_json_schema={"anyOf": [*_content(_TEXT)["anyOf"], {"type": "null"}]})]


class MessagesBody(Common, kw_only=True):
    """Body of `POST /v1/messages` in Anthropic's format. Other fields go to the engine unchanged."""

    max_tokens: TokensOrNone
    """Maximum tokens of the answer; 0: the prompt goes into the KV cache, and the message is empty."""
    messages: _Turns
    stream: bool | None = None
    """True: the answer is a stream of server-sent events."""
    system: _System = None
    """Text, or blocks of text."""
    stop_sequences: Annotated[list[str], Meta(max_length=STOPS_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    tools: list[MessagesTool] | None = None
    """Tools that the client runs. Tools of Anthropic's own types are refused."""
    tool_choice: MessagesToolChoice | None = None
    thinking: MessagesThinking | None = None
    output_config: MessagesOutputConfig | None = None
    output_format: MessagesFormat | None = None
    """The name that `output_config.format` had in the beta."""
    metadata: MessagesMetadata | None = None
    service_tier: Tier | Literal["standard_only"] | None = None  # type: ignore[assignment]
    """Tier in the queue, as in a chat; `standard_only` is `default`."""
    repair: Repairs | None = None
    """Replies to make again, at most, while they do not fit the schema of `output_config.format`. Only without
    `stream`; the plan may allow fewer."""


class CountTokensBody(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/messages/count_tokens` in Anthropic's format."""

    model: Annotated[str, Meta(min_length=1, max_length=MODEL_CHARS_MAX, examples=["sim-small"])]
    messages: _Turns
    user: Annotated[str, Meta(max_length=USER_CHARS_MAX)] | None = None
    system: _System = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: MessagesThinking | None = None


# --- answers -----------------------------------------------------------------------------------------------------


class MessagesUsage(msgspec.Struct, omit_defaults=True):
    input_tokens: int
    """Tokens of the prompt, without those read from the cache or written to it."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int] = {}
    """`thinking_tokens`, if there are any."""


class AnthropicMessage(msgspec.Struct, omit_defaults=True, kw_only=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Blocks `text`, `thinking`, `redacted_thinking` and `tool_use`. A call that was cut has `input` {} and its text in
    `partial_json`."""
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]
    stop_sequence: str | None
    stop_details: dict[str, Any] | None = None
    """With the stop reason `refusal`."""
    usage: MessagesUsage


class TokenCountAnswer(msgspec.Struct):
    input_tokens: int


class MessageEvent(msgspec.Struct, omit_defaults=True):
    """One server-sent event of a message."""

    event: str
    """Type of the event, as in its data."""
    data: str
    """The event as JSON."""
    id: str = ""
    """Cursor of the frame. An event without it is a part of the frame whose cursor follows, or a ping."""


class AnthropicModel(msgspec.Struct, omit_defaults=True):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    """The epoch: the date is not known."""
    max_input_tokens: int = 0
    """Maximum context in tokens, where it is known."""


class AnthropicModelList(msgspec.Struct):
    data: list[AnthropicModel]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class AnthropicErrorObject(msgspec.Struct, kw_only=True):
    type: str
    """Kind of error, as Anthropic's clients know it."""
    message: str
    """Cause, what it concerns, and what to do."""
    code: str
    """Stable name of the error."""
    param: str | None
    """Field or parameter that is at fault."""
    retriable: bool
    """True: the same request may succeed later."""
    stream_id: str = ""
    """Stream that can be resumed, if there is one."""
    cursor: str = ""
    """Cursor to resume the stream at."""


class AnthropicError(msgspec.Struct):
    """Body of every error of a path of Anthropic's, and of every path for a request with `anthropic-version`."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str
    """Id of the request, also in the headers `request-id` and `X-Request-Id`."""
