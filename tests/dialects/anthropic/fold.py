"""A client that checks the grammar of a message's events, and adds them up."""

from __future__ import annotations

from typing import Any

import msgspec

_FILLED = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "input_json_delta": ("tool_use", "partial_json"),
}


def fold(chunks: list[bytes]) -> dict[str, Any]:
    """The message that the events of a completed stream add up to."""
    first, *rest = map(msgspec.json.decode, chunks)
    assert first["type"] == "message_start"
    message: dict[str, Any] = first["message"]
    content = message["content"]
    assert content == []
    is_open = is_over = has_delta = False
    for event in rest:
        assert not is_over, "nothing follows message_stop"
        match event["type"]:
            case "content_block_start":
                assert not is_open and not has_delta and event["index"] == len(content), "one block after the other"
                content.append({**event["content_block"], "pieces": []})
                is_open = True
            case "content_block_delta":
                assert is_open and event["index"] == len(content) - 1
                _add(content[-1], event["delta"])
            case "content_block_stop":
                assert is_open and event["index"] == len(content) - 1
                is_open = False
            case "message_delta":
                assert not is_open and not has_delta
                message |= event["delta"]
                message["usage"] |= event["usage"]
                has_delta = True
            case "message_stop":
                is_over = has_delta
    assert is_over
    for block in content:
        _fill(block)
    return message


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta["type"] == "signature_delta":
        assert block["type"] == "thinking" and not block["signature"]
        block["signature"] = delta["signature"]
        return
    assert not block.get("signature"), "the signature is the last delta"
    type_, name = _FILLED[delta["type"]]
    assert block["type"] == type_
    block["pieces"].append(delta[name])


def _fill(block: dict[str, Any]) -> None:
    text = "".join(block.pop("pieces"))
    if block["type"] == "tool_use":
        if text:
            try:
                block["input"] = msgspec.json.decode(text, type=dict[str, Any])
            except msgspec.MsgspecError:
                block["partial_json"] = text
    elif block["type"] in ("text", "thinking"):
        block[block["type"]] = text
