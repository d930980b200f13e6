"""Translates UI messages and the SDK's tools into a chat of OpenAI's format, which engines read. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.errors import BadRequest, Unsupported
from stream_fabric.limits import MESSAGES_MAX
from stream_gw.dialects.files import file_part
from stream_gw.dialects.prompt import in_turns
from stream_gw.dialects.ui.replay import tool_name

Json = dict[str, Any]

_RESULTS = ("output-available", "output-error", "output-denied")
"""States of a tool part that has its result."""


def chat_messages(system: Any, messages: list[Json]) -> list[Json]:
    """Return the messages of a chat. ``messages``: checked by ``checked_messages``. Raises BadRequest, Unsupported."""
    made: list[Json] = []
    if system is not None:
        if not isinstance(system, str):
            raise BadRequest("system must be a string", param="system")
        made.append({"role": "system", "content": system})
    for number, message in enumerate(messages):
        place, parts = f"messages.{number}.parts", message["parts"]
        match message["role"]:
            case "system":
                made.append({"role": "system", "content": _joined_text(parts)})
            case "user":
                made.append({"role": "user", "content": _user_content(parts, place)})
            case _:
                made += _assistant(parts, place)
    if not any(message["role"] != "system" for message in made):
        raise BadRequest("messages must have a message of the user", param="messages")
    if len(made) > MESSAGES_MAX:
        raise BadRequest(f"messages become {len(made)} of the engine; the limit is {MESSAGES_MAX}", param="messages")
    return in_turns(made)


def checked_messages(messages: Any) -> list[Json]:
    """Check that each message has an id, a role and parts with the fields that are read. Raises BadRequest."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise BadRequest(f"{place} must be an object whose role is user, assistant or system", param="messages")
        if not isinstance(message.get("parts"), list):
            raise BadRequest(f"{place}.parts must be a list: the body has messages of useChat", param="messages")
        if not isinstance(message.setdefault("id", ""), str):
            raise BadRequest(f"{place}.id must be a string", param="messages")
        for at, part in enumerate(message["parts"]):
            _check_part(part, f"{place}.parts.{at}")
    return messages


def _check_part(part: Any, place: str) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise BadRequest(f"{place} must be an object with a type", param="messages")
    kind = part["type"]
    if kind in ("text", "reasoning"):
        needed: tuple[str, ...] = ("text",)
    elif kind == "file":
        needed = ("mediaType", "url")
    elif kind == "dynamic-tool":
        needed = ("toolCallId", "toolName")
    elif kind.startswith("tool-"):
        needed = ("toolCallId",)
    else:
        needed = ()
    if kind == "steering-message":
        if not isinstance(part.get("parts"), list):
            raise BadRequest(f"{place}.parts must be a list", param="messages")
        for at, each in enumerate(part["parts"]):
            _check_part(each, f"{place}.parts.{at}")
    for name in needed:
        if not isinstance(part.get(name), str):
            raise BadRequest(f"{place}.{name} must be a string", param="messages")


def _joined_text(parts: list[Json]) -> str:
    return "".join(part["text"] for part in parts if part["type"] == "text")


# --- the user's parts --------------------------------------------------------------------------------------------


def _user_content(parts: list[Json], place: str) -> Any:
    """Return the content; one text as a string, as clients of OpenAI's API write it."""
    made: list[Json] = []
    for number, part in enumerate(parts):
        if part["type"] == "text":
            made.append({"type": "text", "text": part["text"]})
        elif part["type"] == "file":
            made.append(_file(part, f"{place}.{number}"))
    if not made:
        return ""
    return made[0]["text"] if len(made) == 1 and made[0]["type"] == "text" else made


def _file(part: Json, place: str) -> Json:
    media, url = part["mediaType"], part["url"]
    if part.get("providerReference") is not None:
        raise Unsupported(f"{place} is an uploaded file, which is not known here; send its data URL", param="messages")
    if media == "image" or media.startswith("image/"):  # version 7 allows the first half alone
        return {"type": "image_url", "image_url": {"url": url}}
    if not url.startswith("data:"):
        raise Unsupported(f"{place}.url must be a data URL; only images may be at another URL", param="messages")
    return file_part(url, str(part.get("filename") or ""), place, param="messages", media=media)


# --- the assistant's parts ---------------------------------------------------------------------------------------


def _assistant(parts: list[Json], place: str) -> list[Json]:
    """Return the messages of each step: what the model said and called, then the results.

    What the user said meanwhile stands between two steps.
    """
    made: list[Json] = []
    step: list[Json] = []
    for number, part in enumerate([*parts, {"type": "step-start"}]):
        if part["type"] not in ("step-start", "steering-message"):
            step.append(part)
            continue
        made += _step(step)
        step = []
        if part["type"] == "steering-message":
            made.append({"role": "user", "content": _user_content(part["parts"], f"{place}.{number}.parts")})
    return made


def _step(parts: list[Json]) -> list[Json]:
    """Return one step's messages. A call without a result is left out: no model may answer while one is open."""
    text, thoughts = _joined_text(parts), "".join(part["text"] for part in parts if part["type"] == "reasoning")
    tools = [part for part in parts if _is_tool(part) and part.get("state") in _RESULTS]
    if not text and not thoughts and not tools:
        return []
    message: Json = {"role": "assistant", "content": text or (None if tools else "")}
    if thoughts:  # servers differ in the field's name
        message["reasoning"] = message["reasoning_content"] = thoughts
    if tools:
        message["tool_calls"] = [_call(part) for part in tools]
    results = [{"role": "tool", "tool_call_id": part["toolCallId"], "content": _result(part)} for part in tools]
    return [message, *results]


def _is_tool(part: Json) -> bool:
    return part["type"] == "dynamic-tool" or str(part["type"]).startswith("tool-")


def _call(part: Json) -> Json:
    """Return the call. Chat templates read arguments as an object; the text of a call that was cut is none."""
    value = part["rawInput"] if part.get("input") is None and "rawInput" in part else part.get("input")
    if not isinstance(value, dict):
        value = {} if value is None else {"input": value}
    arguments = msgspec.json.encode(value).decode()
    return {
        "id": part["toolCallId"],
        "type": "function",
        "function": {"name": tool_name(part), "arguments": arguments},
    }


def _result(part: Json) -> str:
    state = part["state"]
    if state == "output-available":
        output = part.get("output")
        return output if isinstance(output, str) else msgspec.json.encode(output).decode()
    told: Any = part.get("errorText")
    if state == "output-denied":
        approval = part.get("approval")
        told = approval.get("reason") if isinstance(approval, dict) else None
        return told if isinstance(told, str) else "Tool call execution denied."
    return told if isinstance(told, str) else "The tool failed."


# --- tools -------------------------------------------------------------------------------------------------------


def chat_tools(tools: Any) -> list[Json]:
    """Return the tools as functions. They come as OpenAI's list, as a list with names, or as an object by name."""
    if tools is None:
        return []
    if isinstance(tools, dict):
        return [
            _tool({"name": name, **_object(tool, f"tools.{name}")}, f"tools.{name}") for name, tool in tools.items()
        ]
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list, or an object by name", param="tools")
    return [_tool(_object(tool, f"tools.{number}"), f"tools.{number}") for number, tool in enumerate(tools)]


def _object(tool: Any, place: str) -> Json:
    if not isinstance(tool, dict):
        raise BadRequest(f"{place} must be an object", param="tools")
    return tool


def _tool(tool: Json, place: str) -> Json:
    if isinstance(tool.get("function"), dict):
        return tool
    schema = next((tool[name] for name in ("inputSchema", "parameters", "input_schema") if name in tool), None)
    if isinstance(schema, dict) and isinstance(schema.get("jsonSchema"), dict):  # made by the SDK's ``jsonSchema``
        schema = schema["jsonSchema"]
    if not isinstance(tool.get("name"), str) or not isinstance(schema, dict):
        raise BadRequest(f"{place} must have a name and an inputSchema, which is a JSON schema", param="tools")
    function: Json = {"name": tool["name"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = schema
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def chat_tool_choice(choice: Any) -> Any:
    """Return ``tool_choice``; None: not given."""
    match choice:
        case None | "auto" | "none" | "required":
            return choice
        case {"type": "tool", "toolName": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "function", "function": dict()}:
            return choice
    raise BadRequest(
        "toolChoice must be auto, none, required, or an object with type tool and a toolName", param="toolChoice"
    )
