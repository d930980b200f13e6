"""A client that adds up chunks as common SDK helpers do, and the expected result."""

from __future__ import annotations

from typing import Any

import msgspec


def events(body: bytes) -> list[tuple[bytes, bytes | None]]:
    """An SSE body as (data, id) of each event; every line is checked."""
    assert b"\r" not in body
    found = []
    for block in body.split(b"\n\n")[:-1]:
        lines = block.split(b"\n")
        assert lines[0].startswith(b"data: ") and len(lines) <= 2
        assert len(lines) == 1 or lines[1].startswith(b"id: ")
        found.append((lines[0][6:], lines[1][4:] if len(lines) == 2 else None))
    assert body.endswith(b"\n\n") or not body
    return found


def _add(acc: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key in ("index", "type") or acc.get(key) is None:
            acc[key] = value
        elif isinstance(value, str):
            acc[key] += value
        elif isinstance(value, dict):
            _add(acc[key], value)
        elif value is not None and key != "tool_calls":
            acc[key] = acc[key] + value
        elif key == "tool_calls":
            calls = {call["index"]: call for call in acc[key]}
            for call in value:
                if call["index"] in calls:
                    _add(calls[call["index"]], call)
                else:
                    assert call["index"] == len(acc[key]), "tool calls appear in order from 0"
                    acc[key].append(call)


def fold(chunks: list[bytes]) -> dict[str, Any]:
    """The content of all chunks by choice, and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        assert usage is None, "nothing follows the usage"
        parsed = msgspec.json.decode(chunk)
        usage = parsed.get("usage")
        for choice in parsed["choices"]:
            index = choice["index"]
            if index not in choices:
                assert "delta" not in choice or index == len(choices), "choices appear in order from 0"
                choices[index] = {"finish_reason": None, "logprobs": None, "delta": {}, "text": ""}
            known = choices[index]
            assert known["finish_reason"] is None, "nothing follows a finish"
            if "delta" in choice:
                _add(known["delta"], choice["delta"])
            else:
                known["text"] += choice["text"]
            _add(known, {key: choice[key] for key in ("logprobs", "finish_reason", "stop_reason") if key in choice})
    for choice in choices.values():
        choice["delta"] = _said(choice["delta"])
    return {"choices": [choices[index] for index in range(len(choices))], "usage": usage}


def _said(message: dict[str, Any]) -> dict[str, Any]:
    """Without null and empty fields, except ``content``."""
    return {"content": "", **{key: value for key, value in message.items() if value}}


def folded_answer(body: bytes) -> dict[str, Any]:
    """A whole response in the shape of ``fold``."""
    parsed = msgspec.json.decode(body)
    choices = []
    for number, choice in enumerate(parsed["choices"]):
        assert choice["index"] == number
        known = {
            "finish_reason": choice["finish_reason"],
            "logprobs": choice["logprobs"],
            "delta": _said({}),
            "text": "",
        }
        if "stop_reason" in choice:
            known["stop_reason"] = choice["stop_reason"]
        if "message" in choice:
            message = choice["message"]
            known["delta"] = _said(message)
            for index, call in enumerate(message.get("tool_calls", ())):
                call["index"] = index
        else:
            known["text"] = choice["text"]
        choices.append(known)
    return {"choices": choices, "usage": parsed["usage"]}


def named_events(body: bytes) -> list[tuple[bytes, bytes | None]]:
    """An SSE body whose events are named by their type, as (data, id) of each; every line is checked."""
    assert b"\r" not in body and (not body or body.endswith(b"\n\n"))
    found = []
    for block in body.split(b"\n\n")[:-1]:
        lines = block.split(b"\n")
        assert 2 <= len(lines) <= 3 and lines[0].startswith(b"event: ") and lines[1].startswith(b"data: ")
        assert msgspec.json.decode(lines[1][6:])["type"].encode() == lines[0][7:], "the name is the type"
        assert len(lines) == 2 or lines[2].startswith(b"id: ")
        found.append((lines[1][6:], lines[2][4:] if len(lines) == 3 else None))
    return found
