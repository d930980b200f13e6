"""The beginning of an assistant's message that a stream continues, as chunks that build the same parts again.

``useChat`` empties a message when it resumes, and rebuilds it from the replay. A message that a stream has continued,
after the client ran a tool, would lose its earlier steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

Json = dict[str, Any]

_encode = msgspec.json.Encoder().encode
_COPIED = ("file", "source-url", "source-document")
"""Parts that are chunks of the same fields."""


class Before(msgspec.Struct, frozen=True):
    """The message so far. Empty: the stream began it."""

    message_id: str = ""
    metadata: Json = {}
    chunks: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, message: bytes) -> Before:
        """Read a message as the client sent it, which the parser of the request has checked."""
        told = msgspec.json.decode(message, type=Json)
        metadata = told.get("metadata")
        chunks = tuple(_encode(chunk) for chunk in _message_chunks(told["parts"]))
        return cls(told["id"], metadata if isinstance(metadata, dict) else {}, chunks)


def _message_chunks(parts: list[Json]) -> Iterator[Json]:
    for number, part in enumerate(parts):
        kind = part["type"]
        if kind == "step-start":
            yield {"type": "start-step"}
        elif kind in ("text", "reasoning"):
            yield from _text_chunks(kind, f"before-{number}", part)
        elif kind in _COPIED or kind.startswith("data-"):
            yield part
        elif kind.startswith("tool-") or kind == "dynamic-tool":
            yield from _tool_chunks(part)
    if parts:
        yield {"type": "finish-step"}


def _text_chunks(kind: str, id_: str, part: Json) -> Iterator[Json]:
    yield {"type": f"{kind}-start", "id": id_, **_metadata(part, "providerMetadata")}
    yield {"type": f"{kind}-delta", "id": id_, "delta": part["text"]}
    yield {"type": f"{kind}-end", "id": id_}


def _tool_chunks(part: Json) -> Iterator[Json]:
    """Yield a call and its result.

    A call with a result is told by deltas alone: after ``tool-input-available`` the page would run the tool again.
    """
    named: Json = {"toolCallId": part["toolCallId"], "toolName": tool_name(part)}
    if part["type"] == "dynamic-tool":
        named["dynamic"] = True
    for name in ("providerExecuted", "title"):
        if part.get(name) is not None:
            named[name] = part[name]
    named |= _metadata(part, "callProviderMetadata")
    state, call = part.get("state"), {"toolCallId": part["toolCallId"]}
    if state == "output-error" and part.get("input") is None:
        yield {"type": "tool-input-error", **named, "input": part.get("rawInput"), "errorText": _error_text(part)}
        return
    if state in ("input-available", "approval-requested", "approval-responded", "output-denied"):
        yield {"type": "tool-input-available", **named, "input": part.get("input")}
        approval = part.get("approval")
        if isinstance(approval, dict) and isinstance(approval.get("id"), str):
            yield {"type": "tool-approval-request", "approvalId": approval["id"], **call}
        if state == "output-denied":
            yield {"type": "tool-output-denied", **call}
        return
    yield {"type": "tool-input-start", **named}
    text = part.get("rawInput") if state == "input-streaming" else _encode(part.get("input")).decode()
    if isinstance(text, str) and text:
        yield {"type": "tool-input-delta", **call, "inputTextDelta": text}
    result = _metadata(part, "resultProviderMetadata")
    if state == "output-available":
        yield {"type": "tool-output-available", **call, "output": part.get("output"), **result}
    elif state == "output-error":
        yield {"type": "tool-output-error", **call, "errorText": _error_text(part), **result}


def _metadata(part: Json, name: str) -> Json:
    return {"providerMetadata": part[name]} if isinstance(part.get(name), dict) else {}


def _error_text(part: Json) -> str:
    text = part.get("errorText")
    return text if isinstance(text, str) else "the tool failed"


def tool_name(part: Json) -> str:
    """Return the name of a tool part's tool."""
    if part["type"] == "dynamic-tool":
        return str(part.get("toolName", ""))
    return str(part["type"]).removeprefix("tool-")
