"""Checks of what Open Responses says: by the models that are made from its OpenAPI document of 2026-04-24, and closed
ones of ours, because the models pass over what they do not know: 24 events, their fields, the items, the 31 keys of a
response."""

from __future__ import annotations

from typing import Any

import openresponses_types as official
from pydantic import BaseModel

NULLABLE = (
    "completed_at", "incomplete_details", "previous_response_id", "instructions", "error", "reasoning", "usage",
    "max_output_tokens", "max_tool_calls", "safety_identifier", "prompt_cache_key",
)  # fmt: skip
REQUIRED: dict[str, type | tuple[type, ...]] = {
    "id": str, "object": str, "created_at": int, "status": str, "model": str, "output": list, "tools": list,
    "tool_choice": (str, dict), "truncation": str, "parallel_tool_calls": bool, "text": dict, "top_p": (int, float),
    "presence_penalty": (int, float), "frequency_penalty": (int, float), "top_logprobs": int,
    "temperature": (int, float), "store": bool, "background": bool, "service_tier": str, "metadata": dict,
}  # fmt: skip
assert len(REQUIRED) + len(NULLABLE) == 31
_PLACE = {"item_id": str, "output_index": int}
_PART = {**_PLACE, "content_index": int}
_SUMMARY = {**_PLACE, "summary_index": int}
EVENTS: dict[str, dict[str, Any]] = {
    **{
        f"response.{name}": {"response": dict}
        for name in ("created", "queued", "in_progress", "completed", "failed", "incomplete")
    },
    "response.output_item.added": {"output_index": int, "item": dict},
    "response.output_item.done": {"output_index": int, "item": dict},
    "response.content_part.added": {**_PART, "part": dict},
    "response.content_part.done": {**_PART, "part": dict},
    "response.output_text.delta": {**_PART, "delta": str, "logprobs": list},
    "response.output_text.done": {**_PART, "text": str, "logprobs": list},
    "response.output_text.annotation.added": {**_PART, "annotation_index": int, "annotation": dict},
    "response.refusal.delta": {**_PART, "delta": str},
    "response.refusal.done": {**_PART, "refusal": str},
    "response.reasoning.delta": {**_PART, "delta": str},
    "response.reasoning.done": {**_PART, "text": str},
    "response.reasoning_summary_part.added": {**_SUMMARY, "part": dict},
    "response.reasoning_summary_part.done": {**_SUMMARY, "part": dict},
    "response.reasoning_summary_text.delta": {**_SUMMARY, "delta": str},
    "response.reasoning_summary_text.done": {**_SUMMARY, "text": str},
    "response.function_call_arguments.delta": {**_PLACE, "delta": str},
    "response.function_call_arguments.done": {**_PLACE, "arguments": str},
    "error": {"error": dict},
}
assert len(EVENTS) == 24
OFFICIAL: dict[str, type[BaseModel]] = {
    str(kind.value): model
    for name, model in vars(official).items()
    if name.endswith("StreamingEvent")
    for kind in model.model_fields["type"].annotation
}
assert OFFICIAL.keys() == EVENTS.keys()
_ERROR_TYPES = ("server_error", "invalid_request", "not_found", "model_error", "too_many_requests")
_PARTS: dict[str, dict[str, Any]] = {
    "output_text": {"text": str, "annotations": list, "logprobs": list},
    "refusal": {"refusal": str},
    "reasoning_text": {"text": str},
    "summary_text": {"text": str},
}
_ITEMS: dict[str, dict[str, Any]] = {
    "message": {"role": str, "content": list},
    "function_call": {"call_id": str, "name": str, "arguments": str},
    "reasoning": {"summary": list},
}


def check_event(event: dict[str, Any]) -> None:
    """Fail for an event that the closed union does not hold."""
    assert event["type"] in EVENTS, event["type"]
    OFFICIAL[event["type"]].model_validate(event)
    assert isinstance(event["sequence_number"], int)
    _check_fields(event, EVENTS[event["type"]])
    if "response" in event:
        check_response(event["response"])
        name = event["type"].removeprefix("response.")
        assert event["response"]["status"] == name or name == "created"
    if "item" in event:
        check_item(event["item"])
    if "part" in event:
        _check_part(event["part"])
    if event["type"] == "error":
        assert set(event["error"]) == {"type", "code", "message", "param"} and event["error"]["type"] in _ERROR_TYPES


def check_response(response: dict[str, Any]) -> None:
    """Fail for a response without one of the required keys, or with a value of another type."""
    official.ResponseResource.model_validate(response)
    assert set(REQUIRED) | set(NULLABLE) <= set(response)
    _check_fields(response, REQUIRED)
    assert response["object"] == "response"
    for item in response["output"]:
        check_item(item)
    if response["usage"] is not None:
        usage = response["usage"]
        _check_fields(usage, dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), int))
        assert isinstance(usage["input_tokens_details"]["cached_tokens"], int)
        assert isinstance(usage["output_tokens_details"]["reasoning_tokens"], int)
    for tool in response["tools"]:
        assert {"type", "name", "description", "parameters", "strict"} <= set(tool)


def check_item(item: dict[str, Any]) -> None:
    assert isinstance(item["id"], str) and item["status"] in ("in_progress", "completed", "incomplete")
    assert item["type"] in _ITEMS, item["type"]
    _check_fields(item, _ITEMS[item["type"]])
    for part in (*item.get("content", ()), *item.get("summary", ())):
        _check_part(part)


def _check_part(part: dict[str, Any]) -> None:
    _check_fields(part, _PARTS[part["type"]])


def _check_fields(value: dict[str, Any], fields: dict[str, Any]) -> None:
    for name, type_ in fields.items():
        found = value[name]
        assert isinstance(found, type_) and (type_ is bool or not isinstance(found, bool)), (name, found)
