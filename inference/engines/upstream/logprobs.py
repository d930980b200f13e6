"""Logprobs in the two shapes of OpenAI's API: a list of tokens, and for completions the older object of lists."""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec

from stream_fabric.limits import FRAME_BYTES_MAX
from stream_fabric.stream.frames import BlockKind

_PART_BYTES_MAX = FRAME_BYTES_MAX // 2
"""Logprobs of one frame. The other half is for the text, which the logprobs repeat token by token."""


class _Token(msgspec.Struct):
    token: str


_token_decoder = msgspec.json.Decoder(_Token)


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


def drop_tokens(raw: msgspec.Raw, count: int) -> msgspec.Raw:
    """Return logprobs without those of the first ``count`` tokens."""
    if bytes(raw).startswith(b"["):
        return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(raw, type=list[msgspec.Raw])[count:]))
    lists = msgspec.json.decode(raw, type=dict[str, list[msgspec.Raw] | None])
    return msgspec.Raw(msgspec.json.encode({name: each and each[count:] for name, each in lists.items()}))


def split_logprobs(text: str, raw: msgspec.Raw, tokens: int) -> list[tuple[str, msgspec.Raw, int]]:
    """Split a text and its logprobs, of so many tokens, into parts that fit into a frame.

    vLLM puts all tokens since its last chunk into one. After a standstill of seconds they are many.
    """
    half = tokens // 2
    if len(bytes(raw)) <= _PART_BYTES_MAX or not half:
        return [(text, raw, tokens)]
    halves = slice(half), slice(half, None)
    cuts: list[Any]
    if bytes(raw).startswith(b"["):
        items = msgspec.json.decode(raw, type=list[msgspec.Raw])
        begin = "".join(_token_decoder.decode(item).token for item in items[:half])
        cuts = [items[part] for part in halves]
    else:
        lists = msgspec.json.decode(raw, type=dict[str, list[msgspec.Raw] | None])
        begin = "".join(msgspec.json.decode(token, type=str) for token in (lists["tokens"] or ())[:half])
        cuts = [{name: each and each[part] for name, each in lists.items()} for part in halves]
    if not text.startswith(begin):  # a token is a part of a character
        begin = text
    first, rest = (msgspec.Raw(msgspec.json.encode(cut)) for cut in cuts)
    return [*split_logprobs(begin, first, half), *split_logprobs(text[len(begin) :], rest, tokens - half)]
