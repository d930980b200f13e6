"""A client that checks the grammar of a response's events, and adds them up."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.dialects.fold import named_events

TERMINAL = ("response.completed", "response.incomplete", "response.failed")
PARTS = {
    "response.output_text": "output_text",
    "response.refusal": "refusal",
    "response.reasoning_text": "reasoning_text",
    "response.reasoning": "reasoning_text",
}
CALLS = {
    "response.function_call_arguments": ("function_call", "arguments"),
    "response.custom_tool_call_input": ("custom_tool_call", "input"),
}


def events(body: bytes) -> list[tuple[bytes, bytes | None]]:
    """An SSE body as (data, id) of each event, without the ``[DONE]`` of Open Responses; every line is checked."""
    return named_events(body.removesuffix(b"data: [DONE]\n\n"))


def fold(chunks: list[bytes], *, has_gaps: bool = False) -> dict[str, Any]:
    """The response that the events add up to. ``has_gaps``: deltas were joined."""
    told = [msgspec.json.decode(chunk) for chunk in chunks]
    numbers = [event["sequence_number"] for event in told]
    if has_gaps:
        assert numbers == sorted(set(numbers))
    else:
        assert numbers == list(range(len(numbers)))
    assert told[0]["type"] == "response.created" and told[-1]["type"] in TERMINAL
    assert told[1]["type"] == "response.queued" or told[1]["type"] == "response.in_progress"
    items: dict[int, _Item] = {}
    for event in told:
        type_ = event["type"]
        if type_.startswith("response.") and type_.count(".") == 1:
            assert event["response"]["id"] == told[0]["response"]["id"]
        elif type_ == "response.output_item.added":
            assert event["output_index"] == len(items), "items begin in order"
            items[event["output_index"]] = _Item(event["item"])
        elif type_ == "error":
            assert event is told[-2] and told[-1]["type"] == "response.failed"
        else:
            items[event["output_index"]].take(event)
    final: dict[str, Any] = told[-1]["response"]
    assert final["output"] == [items[index].done for index in range(len(items))]
    return final


class _Item:
    def __init__(self, item: dict[str, Any]) -> None:
        assert item["type"] == "compaction" or item["status"] == "in_progress"
        self._item = item
        self._pieces: list[str] = []
        self._logprobs: list[Any] = []
        self._whole: str | None = None
        self._part: dict[str, Any] | None = None
        self._ended: dict[str, Any] | None = None
        self.done: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> None:
        assert self.done is None, "nothing follows an item's end"
        stem, _, step = event["type"].rpartition(".")
        if step == "added":
            assert self._part is None and event["item_id"] == self._item["id"]
            self._part = event["part"]
        elif stem == "response.output_item":
            self._finish(event["item"])
        elif stem in ("response.content_part", "response.reasoning_summary_part"):
            self._ended = event["part"]
            assert self._text_of(self._ended) == self._whole
        elif step == "delta":
            assert self._whole is None and event["item_id"] == self._item["id"]
            assert self._part is not None or stem in CALLS
            if stem in PARTS:
                assert self._part is not None and self._part["type"] == PARTS[stem]
            self._pieces.append(event["delta"])
            self._logprobs += event.get("logprobs", [])
        else:
            assert step == "done"
            name = {"response.refusal": "refusal"}.get(stem, CALLS[stem][1] if stem in CALLS else "text")
            self._whole = event[name]
            assert self._whole == "".join(self._pieces) and event.get("logprobs", []) == self._logprobs

    def _text_of(self, part: dict[str, Any]) -> str:
        return part["refusal"] if part["type"] == "refusal" else part["text"]  # type: ignore[no-any-return]

    def _finish(self, item: dict[str, Any]) -> None:
        if item["type"] == "compaction":
            assert item == self._item
            self.done = item
            return
        assert item["id"] == self._item["id"] and item["status"] in ("completed", "incomplete")
        kept = ("id", "type", "role", "call_id", "name")
        assert all(item.get(name) == self._item.get(name) for name in kept)
        if item["type"] in ("function_call", "custom_tool_call"):
            said = item["arguments" if item["type"] == "function_call" else "input"]
            assert said == "".join(self._pieces) == self._whole
        elif self._part is not None:
            (part,) = item.get("content") or item["summary"]
            assert part == self._ended and self._text_of(part) == "".join(self._pieces)
        self.done = item
