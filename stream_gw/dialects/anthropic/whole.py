"""Collects a stream into one whole message, by adding up the events of its encoder."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.errors import EngineFailed
from stream_fabric.json_bounds import decode_text
from stream_fabric.stream.frames import CHOICE_END_PREFIX, coalesce
from stream_gw.dialects.anthropic.encoder import MessagesEncoder
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.whole import Document

_JOIN_EVERY = 512


class MessageCollector:
    """Collects frames. Memory is linear in the output: adjacent deltas are joined as they come."""

    def __init__(self, facts: StreamFacts) -> None:
        self._facts = facts
        self._joined: list[bytes] = []
        self._fresh: list[bytes] = []

    def add(self, line: bytes) -> None:
        """Add the next frame."""
        self._fresh.append(line)
        if len(self._fresh) >= _JOIN_EVERY:
            self._joined += coalesce(self._fresh)
            self._fresh.clear()

    @property
    def has_all_reasons(self) -> bool:
        """True if the message has its stop reason."""
        return any(line.startswith(CHOICE_END_PREFIX) for line in (*self._joined, *self._fresh))

    def result(self) -> bytes:
        """Return the message as JSON."""
        encoder = MessagesEncoder(self._facts)
        message: dict[str, Any] = {}
        texts: list[str] = []
        for event in encoder.chunks(coalesce(self._joined + self._fresh)):
            _add(message, texts, msgspec.json.decode(event))
        return msgspec.json.encode(message)


def _add(message: dict[str, Any], texts: list[str], event: dict[str, Any]) -> None:
    """Apply one event. ``texts``: pieces of the open block."""
    match event["type"]:
        case "message_start":
            message.update(event["message"])
        case "content_block_start":
            message["content"].append(event["content_block"])
            texts.clear()
        case "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                message["content"][-1]["signature"] = delta["signature"]
            else:
                texts.append(next(value for name, value in delta.items() if name != "type"))
        case "content_block_stop":
            _fill(message["content"][-1], "".join(texts))
        case "message_delta":
            message.update(event["delta"])
            message["usage"] |= event["usage"]
            if "structured_output" in event:
                message["structured_output"] = event["structured_output"]


def _fill(block: dict[str, Any], text: str) -> None:
    """Put the whole text into its block."""
    if block["type"] in ("text", "thinking"):
        block[block["type"]] = text
    elif block["type"] == "tool_use" and text:
        try:
            block["input"] = msgspec.convert(decode_text(text), dict[str, Any])
        except msgspec.MsgspecError:  # cut at the limit of tokens; an input must be an object
            block["partial_json"] = text


class _Count(msgspec.Struct):
    count: int


class TokenCount(Document):
    """Collects the answer of ``count_tokens``. ``more``: fields that another API has beside the number."""

    def __init__(self, **more: str) -> None:
        super().__init__()
        self._more = more

    def result(self) -> bytes:
        """Return the number of tokens as JSON. Raises EngineFailed when the engine gave none."""
        try:
            count = msgspec.json.decode(super().result(), type=_Count).count
        except msgspec.MsgspecError as error:
            raise EngineFailed("the engine answered without the number of tokens") from error
        return msgspec.json.encode({**self._more, "input_tokens": count})
