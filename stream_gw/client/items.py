"""The items that a reader gets from a stream, and their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec


@dataclass(frozen=True, slots=True)
class Data:
    """Frames up to ``seq``. Persist ``cursor`` together with what you made of the chunks."""

    cursor: str
    seq: int
    chunks: list[Any]


@dataclass(frozen=True, slots=True)
class Gap:
    """The frames ``first`` to ``seq`` are lost; no retry brings them back."""

    cursor: str
    seq: int
    first: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Frames above ``seq`` are void: discard what you read of them. The next item continues after ``seq``."""

    cursor: str
    seq: int


@dataclass(frozen=True, slots=True)
class InputResult:
    """The input ``id`` was ``applied`` at ``seq``: the text after it is another answer, which takes the input into
    account. Or it was ``refused``, for ``reason``."""

    cursor: str
    seq: int
    id: str
    result: str
    reason: str = ""


Item: TypeAlias = Data | Gap | Reset | InputResult


@dataclass(frozen=True, slots=True)
class Create:
    """A request for a generation; ``key`` is its idempotency key."""

    body: msgspec.Raw
    """JSON made when the call came. It may be sent later and again, after the caller has changed its objects."""
    key: str


def text_of(chunks: list[Any]) -> str:
    """Return the text that chunks of openai.chat or openai.completions add to the first choice."""
    parts: list[str] = []
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            if choice.get("index", 0) == 0:
                parts.append((choice.get("delta") or {}).get("content") or choice.get("text") or "")
    return "".join(parts)
