"""Bodies and answers of the Responses API as types, for the reference of the API.

A field that is not described goes to the engine unchanged, such as ``top_k``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stream_fabric.limits import MESSAGES_MAX, METADATA_PAIRS_MAX
from stream_gw.dialects.bodies import Common, Tokens
from stream_gw.dialects.responses.requests import TOP_LOGPROBS_MAX

_NO_ITEMS: dict[str, Any] = {"type": "array", "maxItems": MESSAGES_MAX}


def _object(required: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **more}, "required": [*required]}


_STRING: dict[str, Any] = {"type": "string"}
_TEXT = _object({"type": {"enum": ["input_text", "output_text"]}, "text": _STRING})
_IMAGE = _object(
    {"type": {"const": "input_image"}, "image_url": _STRING}, detail={"enum": ["low", "high", "auto", "original"]}
)
_CONTENT: dict[str, Any] = {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": [_TEXT, _IMAGE]}}]}
_MESSAGE = _object(
    {"role": {"enum": ["user", "assistant", "system", "developer"]}, "content": _CONTENT}, type={"const": "message"}
)
_CALL = _object({"type": {"const": "function_call"}, "call_id": _STRING, "name": _STRING, "arguments": _STRING})
_RESULT = _object({"type": {"const": "function_call_output"}, "call_id": _STRING, "output": _CONTENT})
_CUSTOM_CALL = _object({"type": {"const": "custom_tool_call"}, "call_id": _STRING, "name": _STRING, "input": _STRING})
_CUSTOM_RESULT = _object({"type": {"const": "custom_tool_call_output"}, "call_id": _STRING, "output": _CONTENT})
_REFERENCE = _object({"type": {"const": "item_reference"}, "id": _STRING})
_ITEMS = [_MESSAGE, _CALL, _RESULT, _CUSTOM_CALL, _CUSTOM_RESULT, _REFERENCE]
_REASONING = _object(
    {"type": {"const": "reasoning"}},
    content={"type": "array", "items": _object({"type": {"const": "reasoning_text"}, "text": _STRING})},
    summary={"type": "array", "items": _object({"type": {"const": "summary_text"}, "text": _STRING})},
)
_INPUT: dict[str, Any] = {"anyOf": [_STRING, {**_NO_ITEMS, "minItems": 1, "items": {"anyOf": [*_ITEMS, _REASONING]}}]}
_CHOICE: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        {"enum": ["auto", "none", "required"]},
        _object({"type": {"enum": ["function", "custom"]}, "name": _STRING}),
        _object(
            {
                "type": {"const": "allowed_tools"},
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _object({"type": {"const": "function"}, "name": _STRING})},
            }
        ),
    ]
}
_FORMAT: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        _object({"type": {"enum": ["text", "json_object"]}}),
        _object({"type": {"const": "json_schema"}, "name": _STRING, "schema": {"type": "object"}}),
    ]
}
_METADATA: dict[str, Any] = {
    "type": ["object", "null"], "maxProperties": METADATA_PAIRS_MAX, "additionalProperties": {"type": "string"},
}  # fmt: skip


class ResponseTool(msgspec.Struct, tag_field="type", tag="function"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseCustomTool(msgspec.Struct, tag_field="type", tag="custom"):
    """A tool whose input is free text."""

    name: str
    description: str | None = None


class ResponseNamespaceTool(msgspec.Struct, tag_field="type", tag="namespace"):
    """Tools under a common name, which their calls have as `namespace`."""

    name: str
    tools: list[ResponseTool | ResponseCustomTool]
    description: str | None = None
    """Repeated in the response; the model reads the descriptions of the tools."""


class ResponseText(msgspec.Struct):
    format: Annotated[Any, Meta(extra_json_schema=_FORMAT)] = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Repeated in the response; engines know no such setting."""


class ResponseReasoning(msgspec.Struct):
    effort: str | None = None
    """`none` turns thinking off, where the model can."""
    summary: str | None = None
    """Repeated in the response; reasoning is shown as the model writes it."""


class ResponseConversation(msgspec.Struct):
    id: str


class ContextManagement(msgspec.Struct, tag_field="type", tag="compaction"):
    compact_threshold: Tokens | None = None
    """Tokens of the prompt above which it is compacted; without it, three quarters of the model's context."""


class ResponsesBody(Common, kw_only=True):
    """Body of `POST /v1/responses` in OpenAI's format. Other fields go to the engine unchanged."""

    input: Annotated[Any, Meta(extra_json_schema=_INPUT)] = None
    """Text, or items. Required without `previous_response_id` and `conversation`."""
    instructions: str | None = None
    """The first system message; not carried over by `previous_response_id`."""
    stream: bool | None = None
    """True: the answer is a stream of server-sent events."""
    max_output_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    """Above 0, or with `message.output_text.logprobs` in `include`: texts have their logprobs."""
    include: list[str] | None = None
    """Values that this platform does not know are passed over."""
    tools: list[ResponseTool | ResponseCustomTool | ResponseNamespaceTool] | None = None
    """Functions and custom tools that the client runs, alone or in namespaces. Tools of other types, and grammars, are
    refused."""
    tool_choice: Annotated[Any, Meta(extra_json_schema=_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Tokens | None = None
    """Repeated in the response; no tools run here."""
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """`auto`: the oldest items are left out of a prompt that exceeds the model's context."""
    context_management: Annotated[list[ContextManagement], Meta(max_length=1)] | None = None
    """The older items are summarised before the answer."""
    previous_response_id: str | None = None
    """Response that this one continues."""
    conversation: str | ResponseConversation | None = None
    """Conversation that this response continues; its requests are one session."""
    prompt_cache_key: str | None = None
    """Requests with the same one go to the same replica."""
    store: bool | None = None
    """False: the response cannot be read again, nor continued."""
    metadata: Annotated[Any, Meta(extra_json_schema=_METADATA)] = None
    safety_identifier: str | None = None
    """Your user, where `user` is absent. One of over 128 characters is stored as its SHA-256 in hex."""


# --- answers -----------------------------------------------------------------------------------------------------


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    """`cached_tokens` and `cache_write_tokens`; both are part of `input_tokens`."""
    output_tokens: int
    output_tokens_details: dict[str, int]
    """`reasoning_tokens`, a part of `output_tokens`."""
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    """Id of the response and of its stream."""
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    """`reason`: `max_output_tokens` or `content_filter`."""
    model: str
    output: list[dict[str, Any]]
    """Items `message`, `reasoning`, `function_call` and `custom_tool_call`, after a `compaction` if there was one."""
    usage: ResponseUsage | None
    instructions: str | None
    previous_response_id: str | None
    conversation: ResponseConversation | None = None
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    truncation: str
    truncated_items: int | None = None
    """Items that `truncation` left out of the prompt; absent: none."""
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None


class ResponseEvent(msgspec.Struct, omit_defaults=True):
    """One server-sent event of a response."""

    event: str
    """Type of the event, as in its data."""
    data: str
    """The event as JSON; `sequence_number` counts events from 0."""
    id: str = ""
    """Cursor of the frame. An event without it is a part of the frame whose cursor follows."""


class OpenResponseEvent(msgspec.Struct, omit_defaults=True):
    """One server-sent event of a response as the Open Responses specification has it."""

    data: str
    """The event as JSON, or `[DONE]` after the last one."""
    event: str = ""


class InputTokensAnswer(msgspec.Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseDeleted(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class OpenErrorObject(msgspec.Struct):
    type: Literal["server_error", "invalid_request", "not_found", "model_error", "too_many_requests"]
    code: str
    """Stable name of the error."""
    message: str
    """Cause, what it concerns, and what to do."""
    param: str | None
    """Field or parameter that is at fault."""


class OpenError(msgspec.Struct):
    """Body of every error of `/v1/open/responses`, and of `/v1/responses` with the header `OpenResponses-Version`."""

    error: OpenErrorObject


class ReadResponseQuery(msgspec.Struct):
    stream: bool = False
    """True: the response's events, and those that follow while it runs."""
    starting_after: Annotated[int, Meta(ge=0, le=1 << 53)] | None = None
    """With `stream`: `sequence_number` of the last event that the client has. `Last-Event-ID` goes before it."""
