"""Replaces secrets and personal data in text, in a thread: it is too slow for the event loop."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from stream_gw.privacy.redaction import MARGIN_BYTES
from stream_gw.privacy.redaction.patterns import PATTERNS


def redacted(text: str, bytes_max: int) -> str:
    """Return the text's first ``bytes_max`` bytes, with ``[kind]`` in place of each match that begins in them."""
    data = text.encode("utf-8", "replace")
    seen, kept = data[: bytes_max + MARGIN_BYTES], min(bytes_max, len(data))
    parts: list[bytes] = []
    at = 0
    for start, stop, kind in _spans(seen):
        if start >= kept:
            break
        if stop <= at:
            continue
        if start >= at:
            parts += (seen[at:start], b"[%b]" % kind.encode())
        at = stop
    parts.append(seen[at:kept])
    return b"".join(parts)[:bytes_max].decode("utf-8", "ignore")


def redacted_prompt(body: bytes | msgspec.Raw, fields: tuple[str, ...], bytes_max: int) -> str:
    """Return these fields of a request as JSON, redacted string by string, in at most ``bytes_max`` bytes."""
    parsed = msgspec.json.decode(body, type=dict[str, Any])
    budget = [bytes_max]
    prompt = {name: _redact_strings(parsed[name], budget) for name in fields if name in parsed}
    return msgspec.json.encode(prompt)[:bytes_max].decode("utf-8", "ignore")


def _spans(data: bytes) -> list[tuple[int, int, str]]:
    """Return start, stop and kind of what is to be replaced, by position; the longest first where several begin."""
    found: list[tuple[int, int, str]] = []
    for pattern in PATTERNS:
        for match in pattern.expression.finditer(data):
            start, stop = match.span(pattern.group)
            if pattern.check(data[start:stop].decode("utf-8", "replace")):
                found.append((start, stop, pattern.kind))
            time.sleep(0)  # gives the interpreter to the event loop, which else waits for its switch interval of 5 ms
    return sorted(found, key=lambda span: (span[0], -span[1]))


def _redact_strings(value: Any, budget: list[int]) -> Any:
    """Redact every string, until so many bytes of them are used; numbers as long as a card's number too."""
    match value:
        case str():
            text = redacted(value, max(budget[0], 0))
            budget[0] -= len(text)
            return text
        case list():
            return [_redact_strings(item, budget) for item in value if budget[0] > 0]
        case dict():
            return {name: _redact_strings(item, budget) for name, item in value.items() if budget[0] > 0}
        case int() | float() if abs(value) > 99_999_999:
            return "[number]"
    return value
