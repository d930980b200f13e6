"""Logprobs in the two shapes of OpenAI's API: a list of tokens, and for completions the older object of lists."""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec

from stream_fabric.stream.frames import BlockKind


def read_logprobs(raw: msgspec.Raw, kind: BlockKind) -> tuple[msgspec.Raw, int]:
    """Return a chunk's logprobs (a list, or the older object) and the number of their tokens."""
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    if "tokens" in fields:
        return raw, len(msgspec.json.decode(fields["tokens"], type=list[msgspec.Raw]))
    items = fields.get("refusal" if kind == "refusal" else "content")
    if items is None or bytes(items) == b"null":
        items = msgspec.Raw(b"[]")
    return items, len(msgspec.json.decode(items, type=list[msgspec.Raw]))


def join_logprobs(parts: list[msgspec.Raw]) -> tuple[msgspec.Raw, int]:
    """Join the logprobs of several chunks of a choice, which have one shape; also return the number of their tokens."""
    if bytes(parts[0]).startswith(b"["):
        items = [item for raw in parts for item in msgspec.json.decode(raw, type=list[msgspec.Raw])]
        return msgspec.Raw(msgspec.json.encode(items)), len(items)
    objects = [msgspec.json.decode(raw, type=dict[str, Any]) for raw in parts]
    joined: dict[str, list[Any] | None] = {}
    for name in objects[0]:
        lists = [each[name] for each in objects if isinstance(each.get(name), list)]
        joined[name] = [*chain(*lists)] if len(lists) == len(objects) else None
    return msgspec.Raw(msgspec.json.encode(joined)), len(joined["tokens"] or ())
