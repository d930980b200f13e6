"""Translates tools of the Responses API into functions of a chat. Pure.

Engines know functions alone: a custom tool, whose input is free text, becomes a function with one string.
"""

from __future__ import annotations

import re
from typing import Any

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
_BEGUN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE = re.compile(r'(?:[^"\\]|\\(?:u[0-9a-fA-F]{4}|[^u]))*')
"""Beginning of a JSON string without a half escape."""
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
_HOSTED = {
    "mcp": "connect your client to the MCP server, and send its tools as functions",
    "namespace": "send its functions one by one",
    "tool_search": "send the tools themselves",
    "programmatic_tool_calling": "let your client run the program",
}
"""Replacements for tools that OpenAI's servers run, beside the usual one."""


def own_tools(tools: Any) -> list[Json]:
    """Return the tools with every field that a response repeats. Raises Unsupported for tools that run elsewhere."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    return [_own_tool(tool, f"tools.{number}") for number, tool in enumerate(tools)]


def _own_tool(tool: Any, place: str) -> Json:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise BadRequest(f"{place} must be an object with a type", param="tools")
    type_ = tool["type"]
    if type_ not in ("function", "custom"):
        instead = _HOSTED.get(type_, "send a function, and run it in your client")
        raise Unsupported(f"{place} is of type {type_[:60]!r}; no tools run here: {instead}", param="tools")
    about = tool.get("description")
    if not isinstance(tool.get("name"), str):
        raise BadRequest(f"{place} must have a name", param="tools")
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


def chat_tools(tools: list[Json]) -> list[Json]:
    """Return tools in the format of a chat."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: Json) -> Json:
    made = tool | {"parameters": _INPUT, "strict": None} if tool["type"] == "custom" else tool
    return {name: made[name] for name in ("name", "description", "parameters", "strict") if made[name] is not None}


def chat_tool_choice(choice: Any, tools: list[Json]) -> tuple[Any, list[Json]]:
    """Return ``tool_choice`` of a chat (None: not given), and those tools that the model may call."""
    match choice:
        case None | "auto" | "none" | "required":
            return choice, tools
        case {"type": "function" | "custom", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, tools
        case {"type": "allowed_tools", "mode": "auto" | "required" | "none" as mode, "tools": list(allowed)}:
            named = (each.get("name") for each in allowed if isinstance(each, dict))
            names = {name for name in named if isinstance(name, str)}
            return mode, [tool for tool in tools if tool["name"] in names]
    raise BadRequest(
        "tool_choice must be auto, none, required, a function or custom tool with its name, or allowed_tools",
        param="tool_choice",
    )


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
