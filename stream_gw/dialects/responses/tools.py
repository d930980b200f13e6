"""Translates tools of the Responses API into functions of a chat. Pure.

Engines know functions alone. A custom tool, whose input is free text, becomes a function with one string; the tools of
a namespace become functions whose names begin with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from stream_fabric.errors import BadRequest, Unsupported
from stream_fabric.json_bounds import decode_text

Json = dict[str, Any]
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's whole input, as free text."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of the function that a custom tool becomes."""
_CLIENTS = ("function", "custom")
"""Types of the tools that a client runs."""
_JOINT = "__"
"""Stands between namespace and name in the name of a function."""
_BEGUN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE = re.compile(r'(?:[^"\\]|\\(?:u[0-9a-fA-F]{4}|[^u]))*')
"""Beginning of a JSON string without a half escape."""
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
_HOSTED = {
    "mcp": "connect your client to the MCP server, and send its tools as functions",
    "tool_search": "send the tools themselves",
    "programmatic_tool_calling": "let your client run the program",
    "web_search": 'turn it off (Codex: web_search = "disabled"), or send a function and run it in your client',
}
"""Replacements for tools that OpenAI's servers run, beside the usual one."""


def own_tools(tools: Any) -> list[Json]:
    """Return the tools with every field that a response repeats. Raises Unsupported for tools that run elsewhere."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    return [_own_tool(tool, f"tools.{number}", (*_CLIENTS, "namespace")) for number, tool in enumerate(tools)]


def _own_tool(tool: Any, place: str, types: tuple[str, ...]) -> Json:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise BadRequest(f"{place} must be an object with a type", param="tools")
    type_ = tool["type"]
    if type_ not in types:
        instead = _HOSTED.get(type_, "send a function, and run it in your client")
        raise Unsupported(f"{place} is of type {type_[:60]!r}; no tools run here: {instead}", param="tools")
    about = tool.get("description")
    if not isinstance(tool.get("name"), str):
        raise BadRequest(f"{place} must have a name", param="tools")
    if type_ == "namespace":
        inner = tool.get("tools")
        if not isinstance(inner, list):
            raise BadRequest(f"{place}.tools must be a list", param="tools")
        held = [_own_tool(each, f"{place}.tools.{at}", _CLIENTS) for at, each in enumerate(inner)]
        return {"type": "namespace", "name": tool["name"], "description": about, "tools": held}
    if type_ == "custom":
        form = tool.get("format") or {"type": "text"}
        if not isinstance(form, dict) or form.get("type") != "text":
            raise Unsupported(
                f"{place}.format must be text: engines hold a tool's input to a JSON schema, not to a grammar; send a "
                "function, whose string may have a pattern",
                param="tools",
            )
        return {"type": "custom", "name": tool["name"], "description": about, "format": {"type": "text"}}
    parameters = tool.get("parameters")
    if not isinstance(parameters, dict | None):
        raise BadRequest(f"{place} must have an object as parameters", param="tools")
    kept = {"type": "function", "name": tool["name"], "description": about, "parameters": parameters}
    return kept | {"strict": tool.get("strict")}


def function_name(name: str, namespace: Any) -> str:
    """Return the name by which engines know a tool, whose functions have no namespaces."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return namespace + name if namespace.endswith(_JOINT) else f"{namespace}{_JOINT}{name}"


class Called(NamedTuple):
    """A tool as the response names it."""

    name: str
    namespace: str | None
    is_custom: bool


def called_tools(tools: Sequence[Json]) -> dict[str, Called]:
    """Return the tools by the names of their functions. ``tools``: from ``own_tools``."""
    return {
        function_name(tool["name"], space): Called(tool["name"], space, tool["type"] == "custom")
        for space, tool in _flat(tools)
    }


def _flat(tools: Sequence[Json]) -> Iterator[tuple[str | None, Json]]:
    """Yield each tool and its namespace."""
    for tool in tools:
        if tool["type"] == "namespace":
            yield from ((tool["name"], inner) for inner in tool["tools"])
        else:
            yield None, tool


def chat_tools(tools: list[Json]) -> list[Json]:
    """Return tools in the format of a chat."""
    return [
        {"type": "function", "function": _function(tool | {"name": function_name(tool["name"], space)})}
        for space, tool in _flat(tools)
    ]


def _function(tool: Json) -> Json:
    made = tool | {"parameters": _INPUT, "strict": None} if tool["type"] == "custom" else tool
    return {name: made[name] for name in ("name", "description", "parameters", "strict") if made[name] is not None}


def chat_tool_choice(choice: Any, functions: list[Json]) -> tuple[Any, list[Json]]:
    """Return ``tool_choice`` of a chat (None: not given), and those functions that the model may call."""
    match choice:
        case None | "auto" | "none" | "required":
            return choice, functions
        case {"type": "function" | "custom", "name": str(name)}:
            named = function_name(name, choice.get("namespace"))
            return {"type": "function", "function": {"name": named}}, functions
        case {"type": "allowed_tools", "mode": "auto" | "required" | "none" as mode, "tools": list(allowed)}:
            names, spaces = set(), []
            for each in allowed:
                match each:
                    case {"type": "namespace", "name": str(name)}:
                        spaces.append(function_name("", name))
                    case {"name": str(name)}:
                        names.add(function_name(name, each.get("namespace")))
            return mode, [each for each in functions if _is_allowed(each["function"]["name"], names, tuple(spaces))]
    raise BadRequest(
        "tool_choice must be auto, none, required, a function or custom tool with its name, or allowed_tools",
        param="tool_choice",
    )


def _is_allowed(name: str, names: set[str], spaces: tuple[str, ...]) -> bool:
    return name in names or name.startswith(spaces)


# --- inputs of custom tools --------------------------------------------------------------------------------------


def wrapped(text: str) -> str:
    """Return the input of a custom tool as the arguments of its function."""
    return msgspec.json.encode({"input": text}).decode()


def unwrapped(arguments: str) -> str:
    """Return the input of a custom tool that these arguments of its function hold.

    Arguments that were cut give the input as far as it came. Those of a model that wrote anything else are the input.
    """
    try:
        made = decode_text(arguments)
    except msgspec.DecodeError:
        begun = _BEGUN.match(arguments)
        whole = None if begun is None else _WHOLE.match(arguments, begun.end())
        if whole is None:
            return arguments
        try:
            return msgspec.json.decode(f'"{_HALF_PAIR.sub("", whole[0])}"', type=str)
        except msgspec.MsgspecError:
            return arguments
    return made["input"] if isinstance(made, dict) and isinstance(made.get("input"), str) else arguments
