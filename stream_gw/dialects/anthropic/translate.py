"""Translates messages and tools of Anthropic's format into those of OpenAI's, which engines read. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.errors import BadRequest, Unsupported
from stream_fabric.limits import MESSAGES_MAX
from stream_gw.dialects.files import file_part
from stream_gw.dialects.prompt import reminder

Json = dict[str, Any]
Placed = tuple[Json, str]
"""A block, and its place in the body."""
_BILLING = "x-anthropic-billing-header:"
"""Beginning of a system text that Claude Code sends for Anthropic's accounts. It differs with each conversation, so a
prompt that began with it would share no KV cache."""


def chat_messages(system: Any, messages: Any) -> tuple[list[Json], bool]:
    """Return the messages of a chat, and whether the last one begins the answer. Raises BadRequest, Unsupported."""
    told = [_text(*each) for each in _placed(system or "", "system")]
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    turns = _turns(messages)
    if turns[0][0] == "system":
        told += [_text(*each) for each in turns.pop(0)[1]]
    told = [part for part in told if part["text"] and not part["text"].startswith(_BILLING)]
    made: list[Json] = [{"role": "system", "content": _joined(told)}] if told else []
    for role, blocks in turns:
        if role == "user":
            made += _user(blocks)
        else:
            made.append(_assistant(blocks))
    if len(made) > MESSAGES_MAX:
        raise BadRequest(f"messages become {len(made)} of the engine; the limit is {MESSAGES_MAX}", param="messages")
    last = made[-1]
    return made, last["role"] == "assistant" and "tool_calls" not in last


def _turns(messages: list[Any]) -> list[tuple[str, list[Placed]]]:
    """Return role and blocks of each turn. Messages of the user that follow one another are one turn, as in Anthropic's
    API, and so are those of the assistant: many chat templates refuse two in a row. So are those of the system at the
    beginning; a later one is a reminder in the user's turn, because most templates refuse it there."""
    turns: list[tuple[str, list[Placed]]] = []
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise BadRequest(f"{place} must be an object whose role is user or assistant", param="messages")
        blocks = _placed(message.get("content"), f"{place}.content")
        if role == "system" and any(before != "system" for before, _ in turns):
            role = "user"
            blocks = [({"type": "text", "text": reminder(_text(*each)["text"])}, each[1]) for each in blocks]
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def chat_tools(tools: Any) -> list[Json]:
    """Return the tools as functions."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    return [_tool(tool, f"tools.{number}") for number, tool in enumerate(tools)]


def chat_tool_choice(choice: Any) -> tuple[Any, bool]:
    """Return ``tool_choice`` (None: not given), and whether several calls are allowed in one answer."""
    if choice is None:
        return None, True
    if not isinstance(choice, dict) or not isinstance(choice.get("disable_parallel_tool_use", False), bool):
        raise BadRequest("tool_choice must be an object with a type", param="tool_choice")
    parallel = not choice.get("disable_parallel_tool_use", False)
    match choice.get("type"):
        case "auto" | "none" as same:
            return same, parallel
        case "any":
            return "required", parallel
        case "tool" if isinstance(choice.get("name"), str):
            return {"type": "function", "function": {"name": choice["name"]}}, parallel
    raise BadRequest("tool_choice.type must be auto, any, none, or tool with a name", param="tool_choice")


def _tool(tool: Any, place: str) -> Json:
    if not isinstance(tool, dict):
        raise BadRequest(f"{place} must be an object", param="tools")
    type_ = tool.get("type") or "custom"
    if type_ != "custom":
        raise Unsupported(
            f"{place} is of type {str(type_)[:60]!r}; no tools run here, and engines know no built-in ones: "
            "send a tool with an input_schema, and run it in your client",
            param="tools",
        )
    schema = tool.get("input_schema")
    if not isinstance(tool.get("name"), str) or not isinstance(schema, dict):
        raise BadRequest(f"{place} must have a name and an input_schema", param="tools")
    function: Json = {"name": tool["name"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = schema
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


# --- content -----------------------------------------------------------------------------------------------------


def _blocks(content: Any, place: str) -> list[Json]:
    """Return the content as blocks with a type."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadRequest(f"{place} must be a string or a list of blocks", param=place.partition(".")[0])
    for number, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise BadRequest(f"{place}.{number} must be an object with a type", param=place.partition(".")[0])
    return content


def _placed(content: Any, place: str) -> list[Placed]:
    return [(block, f"{place}.{number}") for number, block in enumerate(_blocks(content, place))]


def _joined(parts: list[Json]) -> Any:
    """Return one text as a string, as clients of OpenAI's API write it; else the parts."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _text(block: Json, place: str) -> Json:
    if block["type"] != "text" or not isinstance(block.get("text"), str):
        raise _unknown(block, place)
    return {"type": "text", "text": block["text"]}


def _user(blocks: list[Placed]) -> list[Json]:
    """Return a user's turn: a message of role ``tool`` for each tool's result, then what else the user says."""
    results: list[Json] = []
    parts: list[Json] = []
    for block, where in blocks:
        if block["type"] == "tool_result":
            texts, images = _tool_result(block, where)
            results.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": texts})
            parts += images
        else:
            parts.append(_user_part(block, where))
    if parts or not results:
        results.append({"role": "user", "content": _joined(parts)})
    return results


def _tool_result(block: Json, place: str) -> tuple[Any, list[Json]]:
    """Return a result's text, and its images, which chat templates allow only in a user's message."""
    content = block.get("content")
    if content is None:
        return "", []
    place += ".content"
    parts = [_user_part(one, f"{place}.{number}") for number, one in enumerate(_blocks(content, place))]
    images = [part for part in parts if part["type"] != "text"]
    return _joined([part for part in parts if part["type"] == "text"]), images


def _user_part(block: Json, place: str) -> Json:
    match block["type"]:
        case "image":
            return {"type": "image_url", "image_url": {"url": _image_url(block.get("source"), place)}}
        case "document":
            return _document(block, place)
        case "search_result":
            _check_citations(block, place)
            texts = [_text(one, place)["text"] for one in _blocks(block.get("content"), f"{place}.content")]
            return {"type": "text", "text": "\n".join([str(block.get("title") or ""), *texts])}
    return _text(block, place)


def _document(block: Json, place: str) -> Json:
    """Return a document as text after its title and context, or as a file."""
    _check_citations(block, place)
    told = [each for name in ("title", "context") if isinstance(each := block.get(name), str) and each]
    match block.get("source"):
        case {"type": "text", "data": str(data)}:
            return {"type": "text", "text": "\n".join([*told, data])}
        case {"type": "content", "content": content}:
            texts = [
                _text(one, f"{place}.source.content")["text"] for one in _blocks(content, f"{place}.source.content")
            ]
            return {"type": "text", "text": "\n".join([*told, *texts])}
        case {"type": "base64", "media_type": str(media), "data": str(data)}:
            return file_part(data, str(block.get("title") or ""), place, param="messages", media=media)
    raise Unsupported(
        f"{place}.source must be text, content of text blocks, or base64: documents are not fetched from a URL, and "
        "files are not stored here",
        param="messages",
    )


def _check_citations(block: Json, place: str) -> None:
    match block.get("citations"):
        case {"enabled": True}:
            raise Unsupported(
                f"{place}.citations must not be enabled: answers have no citations here", param="messages"
            )


def _image_url(source: Any, place: str) -> str:
    match source:
        case {"type": "base64", "media_type": str(media), "data": str(data)}:
            return f"data:{media};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
    raise Unsupported(
        f"{place}.source must be base64 with media_type and data, or a url: files are not stored here", param="messages"
    )


def _assistant(blocks: list[Placed]) -> Json:
    """Return an assistant's turn: its text, its thoughts and its calls."""
    texts: list[Json] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block, where in blocks:
        match block["type"]:
            case "thinking":
                thoughts.append(_string(block, "thinking", where))
            case "redacted_thinking":  # only the service that wrote it can read it
                pass
            case "tool_use":
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                function = {"name": _string(block, "name", where), "arguments": arguments}
                calls.append({"id": _string(block, "id", where), "type": "function", "function": function})
            case _:
                texts.append(_text(block, where))
    message: Json = {"role": "assistant", "content": _joined(texts)}
    if thoughts:  # servers differ in the field's name
        message["reasoning"] = message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message


def _string(block: Json, name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{place}.{name} must be a string", param="messages")
    return value


def _unknown(block: Json, place: str) -> BadRequest:
    if block["type"] == "text":
        return BadRequest(f"{place}.text must be a string", param=place.partition(".")[0])
    return Unsupported(
        f"{place} is a block of type {block['type'][:60]!r}, which is not supported here; leave it out, or send "
        "what it says as text",
        param=place.partition(".")[0],
    )
