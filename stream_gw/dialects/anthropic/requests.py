"""Parses ``POST /v1/messages`` and its ``count_tokens``, and derives the engine's body: a chat in OpenAI's format."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from stream_fabric.errors import BadRequest, Unsupported
from stream_fabric.limits import USER_CHARS_MAX
from stream_gw.dialects.anthropic.translate import Json, chat_messages, chat_tool_choice, chat_tools
from stream_gw.dialects.prompt import chat_prompt
from stream_gw.dialects.requests import (
    STOPS_MAX,
    CreateRequest,
    bounded,
    check_one_choice,
    field,
    read_common,
    read_fields,
    read_repairs,
)
from stream_gw.dialects.whole import count_request

DIALECT = "anthropic.messages"
_TOKENS_MAX = 1 << 31
_TRANSLATED = (
    "max_tokens", "messages", "metadata", "output_config", "output_format", "service_tier", "stop_sequences", "system",
    "thinking", "tool_choice", "tools",
)  # fmt: skip
_IGNORED = (
    "betas", "billing_policy", "cache_control", "compaction", "context_management", "diagnostics",
    "fallback_credit_token", "fallbacks", "inference_geo", "speed", "user_profile_id", "workspace_id",
)  # fmt: skip
"""Fields of Anthropic's own service. Without them the whole history goes to the model that was asked for."""
_UNSUPPORTED = {
    "container": "no code runs here; run it in your client, as a tool",
    "mcp_servers": "connect your client to the MCP server, and send its tools with an input_schema",
    "thread": "messages are not stored here; send the whole history",
}
"""Fields that need what is not here, with what to do."""
_LIMIT_OF_A_CHAT = "max_completion_tokens"
"""An engine would take it instead of ``max_tokens``, which limits and budgets have reserved."""
_encode = msgspec.json.encode


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class _Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None


class _Format(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


def parse_messages(body: bytes) -> CreateRequest:
    """Parse and check a create body. Raises BadRequest that names the field, its value and what is allowed."""
    fields = read_fields(body, "messages")
    limit = bounded(fields, "max_tokens", 0, _TOKENS_MAX)
    if limit is None:
        raise BadRequest("max_tokens is missing", param="max_tokens")
    made, messages = _chat(fields)
    made["max_tokens"] = Raw(_encode(limit or 1))  # engines make one token at least
    if not limit and "response_format" in made:
        raise BadRequest("max_tokens 0 makes no answer; leave output_config.format out", param="max_tokens")
    stops = field(fields, "stop_sequences", list[str] | None)
    if stops:
        if len(stops) > STOPS_MAX:
            raise BadRequest(
                f"stop_sequences must have at most {STOPS_MAX} strings, got {len(stops)}", param="stop_sequences"
            )
        made["stop"] = Raw(_encode(stops))
    request = read_common(made, "chat")
    check_one_choice(request, "a message")
    return msgspec.structs.replace(
        request,
        max_tokens=limit,
        repairs=read_repairs(made, request),
        prompt=chat_prompt(messages, field(made, "tools", Any)),
        dialect=DIALECT,
    )


def parse_count_tokens(body: bytes) -> CreateRequest:
    """Parse and check the body of a request to count the tokens of a prompt. Raises like ``parse_messages``."""
    made, _ = _chat(read_fields(body, "messages"))
    return msgspec.structs.replace(count_request(made), dialect="anthropic.count_tokens")


def _chat(fields: dict[str, Raw]) -> tuple[dict[str, Raw], list[Json]]:
    """Return the fields of the body in OpenAI's format, and its messages: what both kinds of request share, and what is
    unknown."""
    for name, instead in _UNSUPPORTED.items():
        if field(fields, name, Any) not in (None, []):
            raise Unsupported(f"{name} is not supported: {instead}", param=name)
    skipped = (*_TRANSLATED, *_IGNORED, *_UNSUPPORTED, _LIMIT_OF_A_CHAT)
    made = {name: raw for name, raw in fields.items() if name not in skipped}
    messages, is_begun = chat_messages(field(fields, "system", Any), field(fields, "messages", Any, required=True))
    made["messages"] = Raw(_encode(messages))
    if is_begun:  # the last message begins the answer
        made |= {"add_generation_prompt": Raw(b"false"), "continue_final_message": Raw(b"true")}
    tools = chat_tools(field(fields, "tools", Any))
    if tools:
        made["tools"] = Raw(_encode(tools))
    choice, parallel = chat_tool_choice(field(fields, "tool_choice", Any))
    if choice is not None and tools:
        made["tool_choice"] = Raw(_encode(choice))
    if not parallel:
        made["parallel_tool_calls"] = Raw(b"false")
    _add_reasoning(fields, made)
    _add_settings(fields, made)
    return made, messages


def _add_reasoning(fields: dict[str, Raw], made: dict[str, Raw]) -> None:
    """Translate ``thinking`` and ``output_config`` into what chat templates and vLLM read."""
    config = field(fields, "output_config", _OutputConfig | None) or _OutputConfig()
    if config.effort is not None:
        made.setdefault("reasoning_effort", Raw(_encode(config.effort)))
    older = field(fields, "output_format", _Format | None)
    if older is not None and config.format is not None:
        raise BadRequest("send output_config.format or output_format, not both", param="output_format")
    form = config.format or older
    if form is not None:
        schema = {"name": "output", "schema": form.schema, "strict": True}
        made["response_format"] = Raw(_encode({"type": "json_schema", "json_schema": schema}))
    thinking = field(fields, "thinking", _Thinking | None)
    if thinking is not None:
        is_on = thinking.type != "disabled"
        own = field(fields, "chat_template_kwargs", dict[str, Any] | None) or {}
        # Models name their switch differently; a template passes over a name that it does not know
        made["chat_template_kwargs"] = Raw(_encode({"enable_thinking": is_on, "thinking": is_on, **own}))


def _add_settings(fields: dict[str, Raw], made: dict[str, Raw]) -> None:
    metadata = field(fields, "metadata", _Metadata | None)
    if metadata is not None and metadata.user_id:
        user = metadata.user_id
        made["user"] = Raw(_encode(user if len(user) <= USER_CHARS_MAX else hashlib.sha256(user.encode()).hexdigest()))
    tier = field(fields, "service_tier", str | None)
    if tier is not None:
        made["service_tier"] = Raw(_encode("default" if tier == "standard_only" else tier))
