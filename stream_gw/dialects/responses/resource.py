"""The response object: the request's settings, which do not change, and status, output and usage, which do."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.stream.frames import ChoiceEnd, End, ErrorInfo, Usage
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.responses.tools import called_tools

_json = msgspec.json.Encoder().encode
CARRIES_THOUGHTS = "carries_thoughts"
"""Setting that no response repeats: reasoning has its text in ``encrypted_content`` too."""
_DEFAULTS: dict[str, Any] = {
    "instructions": None,
    "previous_response_id": None,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_logprobs": 0,
    "truncation": "disabled",
    "max_output_tokens": None,
    "max_tool_calls": None,
    "store": True,
    "background": False,
    "service_tier": "default",
    "metadata": {},
    "safety_identifier": None,
    "prompt_cache_key": None,
}
"""Settings of a request that names none, or that was made in another dialect. Clients of the specification want every
key, with a value."""
_INCOMPLETE = {
    "length": "max_output_tokens",
    "budget": "max_output_tokens",
    "content_filter": "content_filter",
    "steered": "steered",
}
"""Reasons in the dialect's words. Clients fail at a reason that they do not know, such as the end of a budget."""


def settings_of(facts: StreamFacts) -> dict[str, Any]:
    """Return the settings that the request named."""
    return {} if facts.settings is None else msgspec.json.decode(facts.settings)


def cut_reason(finish: ChoiceEnd | None) -> str | None:
    """Return why the answer was cut; None: it was not."""
    return None if finish is None else _INCOMPLETE.get(finish.finish_reason)


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.written},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }


def completed_at(end: End) -> int | None:
    """Return the unix time in seconds at which the last token was there; None: the log does not tell."""
    timing = end.timing
    if timing is None:
        return None
    return (timing.taken_us + timing.queue_us + timing.prefill_us + timing.decode_us) // 1_000_000


class Resource:
    """Encodes the response object of one stream."""

    __slots__ = ("_after", "_before", "_model", "carries_thoughts", "is_background", "tools")

    def __init__(self, facts: StreamFacts) -> None:
        settings = settings_of(facts)
        self.is_background = settings.get("background") is True
        self.carries_thoughts = settings.pop(CARRIES_THOUGHTS, False) is True
        self.tools = called_tools(settings.get("tools", ()))
        """Tools of the request by the names that the engine knows."""
        self._before = b'{"id":%b,"object":"response","created_at":%d' % (_json(facts.stream), facts.created)
        self._model = _json(facts.model)
        self._after = _json(_DEFAULTS | settings)[1:]

    def encode(
        self,
        status: str,
        output: bytes = b"",
        *,
        completed: int | None = None,
        reason: str | None = None,
        error: ErrorInfo | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """Encode the object. ``output``: its items as JSON, separated by commas. ``reason``: why it is incomplete."""
        return (
            b'%b,"status":"%b","completed_at":%b,"error":%b,"incomplete_details":%b,"model":%b,"output":[%b],'
            b'"usage":%b,%b'
        ) % (
            self._before,
            status.encode(),
            _json(completed),
            _json(None if error is None else {"code": error.code, "message": error.message}),
            _json(None if reason is None else {"reason": reason}),
            self._model,
            output,
            _json(None if usage is None else usage_json(usage)),
            self._after,
        )
