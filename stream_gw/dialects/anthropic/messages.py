"""Parts of a message in Anthropic's format that streamed and whole answers share."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.stream.frames import ChoiceEnd, Usage

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "budget": "max_tokens",  # the tokens that the tenant has left, not the request's own limit
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}


def stop_reason(finish: ChoiceEnd | None, *, refused: bool, used_tool: bool) -> tuple[str, str | None]:
    """Return ``stop_reason`` and ``stop_sequence``. ``refused``, ``used_tool``: the answer holds such a block.

    Words of engines that the dialect does not know are ``end_turn``.
    """
    if finish is None:
        return "end_turn", None
    reason = _STOP_REASONS.get(finish.finish_reason, "end_turn")
    if reason != "end_turn":
        return reason, None
    if refused:
        return "refusal", None
    if used_tool:  # some servers end a forced call with `stop`
        return "tool_use", None
    if finish.detail is not None and bytes(finish.detail)[:1] == b'"':  # a stop string; else the id of a stop token
        return "stop_sequence", msgspec.json.decode(finish.detail)
    return "end_turn", None


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the usage. ``input_tokens`` leaves out what was read from the cache or written to it."""
    found: dict[str, Any] = {
        "input_tokens": max(usage.prompt - usage.cached - usage.written, 0),
        "cache_creation_input_tokens": usage.written,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }
    if usage.reasoning:
        found["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
    return found
