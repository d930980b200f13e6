"""Parses ``POST /v1/ui/chat``, which ``useChat`` sends, and derives the engine's body: a chat in OpenAI's format."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from stream_fabric.errors import BadRequest, Unsupported
from stream_fabric.limits import CHAT_BEFORE_BYTES_MAX, USER_CHARS_MAX
from stream_gw.dialects.prompt import chat_prompt
from stream_gw.dialects.requests import (
    STOPS_MAX,
    CreateRequest,
    bounded,
    check_one_choice,
    field,
    read_common,
    read_fields,
)
from stream_gw.dialects.ui.translate import Json, chat_messages, chat_tool_choice, chat_tools, checked_messages

DIALECT = "vercel.ui"
_INTEGER_MAX = 1 << 31
_TRIGGERS = ("submit-message", "regenerate-message")
_TRANSLATED = ("id", "messages", "trigger", "messageId", "system", "tools", "toolChoice", "tool_choice", "stream")
_SETTINGS = {
    "maxOutputTokens": "max_tokens",
    "topP": "top_p",
    "topK": "top_k",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "stopSequences": "stop",
}
"""The SDK's names of settings. OpenAI's are accepted too."""
_SAMPLING = {
    "temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0),
}  # fmt: skip
_encode = msgspec.json.encode


class Turn(msgspec.Struct, frozen=True):
    """A valid request for the next answer of a chat."""

    request: CreateRequest
    chat: str
    before: bytes = b""
    """The assistant's message that the answer continues, as the client sent it; empty: it begins a message, or what it
    continues is above the limit."""


def parse_ui(body: bytes) -> CreateRequest:
    """Parse and check a create body. Raises BadRequest that names the field, its value and what is allowed."""
    return parse_turn(read_fields(body, "messages")).request


def parse_turn(fields: dict[str, Raw]) -> Turn:
    """Check the body's fields. Raises like ``parse_ui``."""
    chat = field(fields, "id", str, required=True)
    check_chat_id(chat)
    made = _settings(fields)
    sent = checked_messages(field(fields, "messages", Any, required=True))
    trigger = field(fields, "trigger", str | None) or "submit-message"
    if trigger not in _TRIGGERS:
        raise BadRequest(f"trigger must be one of {', '.join(_TRIGGERS)}; got {trigger[:60]!r}", param="trigger")
    named = field(fields, "messageId", str | None)
    messages = sent if trigger == "submit-message" else _before_regenerated(sent, named)
    chat_turns = chat_messages(field(fields, "system", Any), messages)
    made["messages"] = Raw(_encode(chat_turns))
    tools = chat_tools(field(fields, "tools", Any))
    choice = chat_tool_choice(field(fields, "toolChoice" if "toolChoice" in fields else "tool_choice", Any))
    if tools:
        made["tools"] = Raw(_encode(tools))
        if choice is not None:
            made["tool_choice"] = Raw(_encode(choice))
    last = messages[-1]
    continued = last["id"] if last["role"] == "assistant" and trigger == "submit-message" else ""
    if len(continued) > USER_CHARS_MAX:
        raise BadRequest(f"the id of a message must have at most {USER_CHARS_MAX} characters", param="messages")
    made.setdefault("session_id", Raw(_encode(chat)))
    common = read_common(made, "chat")
    check_one_choice(common, "a UI message")
    request = msgspec.structs.replace(
        common,
        stream=True,
        max_tokens=field(made, "max_completion_tokens", int | None) or field(made, "max_tokens", int | None),
        prompt=chat_prompt(chat_turns, tools),
        dialect=DIALECT,
        message_id=continued,
    )
    before = _encode(last) if continued else b""
    return Turn(request, chat, before if len(before) <= CHAT_BEFORE_BYTES_MAX else b"")


def check_chat_id(chat: str) -> None:
    """Raises BadRequest."""
    if not 0 < len(chat) <= USER_CHARS_MAX:
        raise BadRequest(f"the id of a chat must have 1 to {USER_CHARS_MAX} characters, got {len(chat)}", param="id")


def _before_regenerated(messages: list[Json], named: str | None) -> list[Json]:
    """Return the messages without the assistant's message that is regenerated, and without those after it.

    ``useChat`` has removed them already; other clients may send them.
    """
    at = next((number for number, message in enumerate(messages) if message["id"] == named), None)
    if at is None:
        return messages
    kept = messages[: at if messages[at]["role"] == "assistant" else at + 1]
    if not kept:
        raise BadRequest("no message is left before the one to regenerate", param="messageId")
    return kept


def _settings(fields: dict[str, Raw]) -> dict[str, Raw]:
    """Return the fields of the engine's body that are no messages and no tools, under OpenAI's names."""
    if field(fields, "stream", bool | None) is False:
        raise Unsupported("stream must be true: the answer of a chat is a stream", param="stream")
    if bytes(fields.get("logprobs", b"null")) not in (b"null", b"false"):
        raise Unsupported("logprobs must be false: a UI message has none", param="logprobs")
    made: dict[str, Raw] = {}
    for name, raw in fields.items():
        if name not in _TRANSLATED:
            engine_name = _SETTINGS.get(name, name)
            _check_setting(fields, name, engine_name)
            made[engine_name] = raw
    return made


def _check_setting(fields: dict[str, Raw], name: str, engine_name: str) -> None:
    """Check a setting under the client's name of it. Raises BadRequest."""
    if engine_name in ("max_tokens", "max_completion_tokens"):
        bounded(fields, name, 1, _INTEGER_MAX)
    elif engine_name == "stop":
        stops = field(fields, name, str | list[str] | None)
        if isinstance(stops, list) and len(stops) > STOPS_MAX:
            raise BadRequest(f"{name} must have at most {STOPS_MAX} strings, got {len(stops)}", param=name)
    elif engine_name in _SAMPLING:
        low, high = _SAMPLING[engine_name]
        value = field(fields, name, float | None)
        if value is not None and not low <= value <= high:
            raise BadRequest(f"{name} must be {low:g} to {high:g}, got {value:g}", param=name)
