"""Parts of a UI message's end: its finish reason and its usage."""

from __future__ import annotations

from typing import Any

from stream_fabric.stream.frames import ChoiceEnd, Usage
from stream_gw.dialects.base import finish_of

_REASONS = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool-calls",
    "function_call": "tool-calls",
    "content_filter": "content-filter",
}


def finish_reason(finish: ChoiceEnd | None, *, refused: bool) -> str:
    """Return the finish reason. ``refused``: the answer holds a refusal. Words of engines that the SDK does not know
    are ``other``, because it refuses a chunk with any other word."""
    if finish is None:
        return "content-filter" if refused else "other"
    reason = _REASONS.get(finish_of(finish)[0], "other")
    return "content-filter" if refused and reason == "stop" else reason


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the usage in the SDK's own shape, ``LanguageModelUsage``."""
    return {
        "inputTokens": usage.prompt,
        "inputTokenDetails": {
            "noCacheTokens": max(usage.prompt - usage.cached - usage.written, 0),
            "cacheReadTokens": usage.cached,
            "cacheWriteTokens": usage.written,
        },
        "outputTokens": usage.output,
        "outputTokenDetails": {
            "textTokens": max(usage.output - usage.reasoning, 0),
            "reasoningTokens": usage.reasoning,
        },
        "totalTokens": usage.prompt + usage.output,
    }
