"""Makes the whole response of an ended stream's frames."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, End, Open, Usage, coalesce, decode
from stream_fabric.stream.ids import StreamId, derived_id
from stream_gw.responses.records import Item, ResponseRecord

_REASONS = {"length": "max_output_tokens", "budget": "max_output_tokens", "content_filter": "content_filter"}


class Collect(Protocol):
    """Makes the whole response. ``meta``: the stream's, as its log holds it; ``lines``: all frames to the terminal."""

    def __call__(self, record: ResponseRecord, meta: bytes, lines: list[bytes]) -> dict[str, Any]: ...


def collect_response(record: ResponseRecord, meta: bytes, lines: list[bytes]) -> dict[str, Any]:
    """Make the response with the fields that the record knows."""
    blocks: dict[int, _Block] = {}
    finish, end = "", End("failed")
    for line in coalesce(lines):
        match decode(line):
            case Open() as frame:
                blocks[frame.block] = _Block(frame)
            case Delta(number, text):
                blocks[number].texts.append(text)
            case Close(number, opaque):
                blocks[number].opaque = opaque
            case ChoiceEnd(finish_reason=reason):
                finish = reason
            case End() as terminal:
                end = terminal
    status = "incomplete" if end.status == "completed" and finish in _REASONS else end.status
    items = [item for block in blocks.values() if (item := block.item(record.id, status)) is not None]
    response: dict[str, Any] = {
        "id": record.id,
        "object": "response",
        "created_at": record.created_at,
        "status": status,
        "model": record.model,
        "background": record.background,
        "instructions": record.instructions,
        "metadata": record.metadata,
        "previous_response_id": record.previous_response_id,
        "conversation": None if record.conversation is None else {"id": record.conversation},
        "store": True,
        "error": None,
        "incomplete_details": None,
        "output": items,
        "usage": usage_json(end.usage or Usage()),
    }
    if end.error is not None:
        response["error"] = {"code": end.error.code, "message": end.error.message}
    if status == "incomplete":
        response["incomplete_details"] = {"reason": _REASONS.get(finish, finish or "stopped")}
    return response


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the usage object of the Responses API."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }


class _Block:
    """One block of the answer, which becomes an item."""

    def __init__(self, frame: Open) -> None:
        self._frame = frame
        self.texts: list[str] = []
        self.opaque: str | None = None

    def item(self, stream: StreamId, status: str) -> Item | None:
        """Return the item; None: clients have no use for it."""
        frame, text = self._frame, "".join(self.texts)
        status = "completed" if status == "completed" else "incomplete"
        match frame.kind:
            case "text" | "refusal":
                part: Item = {"type": "output_text", "text": text, "annotations": []}
                if frame.kind == "refusal":
                    part = {"type": "refusal", "refusal": text}
                return {
                    "id": derived_id("msg_", stream, frame.block + 1),
                    "type": "message",
                    "role": "assistant",
                    "status": status,
                    "content": [part],
                }
            case "reasoning":
                return self._reasoning(stream, text)
            case "tool" if frame.form != "server":
                return self._call(stream, text, status)
            case "item" if frame.item is not None:
                found: Item = msgspec.json.decode(frame.item)
                return found
        return None

    def _reasoning(self, stream: StreamId, text: str) -> Item:
        is_summary = self._frame.form == "summary"
        part = {"type": "summary_text" if is_summary else "reasoning_text", "text": text}
        item: Item = {
            "id": derived_id("rs_", stream, self._frame.block + 1),
            "type": "reasoning",
            "summary": [part] if is_summary else [],
        }
        if not is_summary:
            item["content"] = [part]
        if self.opaque is not None:
            item["encrypted_content"] = self.opaque
        return item

    def _call(self, stream: StreamId, text: str, status: str) -> Item:
        frame = self._frame
        is_custom = frame.form == "custom"
        return {
            "id": derived_id("ctc_" if is_custom else "fc_", stream, frame.block + 1),
            "type": "custom_tool_call" if is_custom else "function_call",
            "call_id": frame.id or derived_id("call_", stream, frame.block + 1),
            "name": frame.name or "",
            "input" if is_custom else "arguments": text,
            "status": status,
        }
