"""The items that a reader gets from a stream, and their text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from stream_gw.client.errors import StreamBroken


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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request waits for a replica: the place ``position`` of ``of`` in its pool's queue."""

    position: int
    of: int
    warming_s: float | None
    """Seconds until a replica that is starting is expected to be ready; None: none is starting."""


OnPlace: TypeAlias = Callable[["Place | None"], None]
Item: TypeAlias = Data | Gap | Reset | InputResult


@dataclass(frozen=True, slots=True)
class Create:
    """A request for a generation; ``key`` is its idempotency key."""

    body: msgspec.Raw
    """JSON made when the call came. It may be sent later and again, after the caller has changed its objects."""
    key: str
    on_place: OnPlace | None


class Waits:
    """Tells a caller the place of a request in the queue, where it asked for it and as often as the place changes."""

    def __init__(self, on_place: OnPlace | None) -> None:
        self._on_place = on_place
        self._place: Place | None = None

    def set(self, place: Place | None) -> None:
        """``place`` None: the request does not wait, or nobody knows."""
        if self._on_place is not None and place != self._place:
            self._place = place
            self._on_place(place)


async def texts(items: AsyncIterator[Item]) -> AsyncIterator[str]:
    """Yield the text that the items add. Raises StreamBroken at a gap or a reset."""
    async for item in items:
        if isinstance(item, Gap | Reset):
            kind = type(item).__name__.lower()
            raise StreamBroken(f"stream_{kind}", f"the text that was read is void or incomplete: a {kind} came")
        if isinstance(item, Data) and (text := text_of(item.chunks)):
            yield text


def text_of(chunks: list[Any]) -> str:
    """Return the text that chunks of openai.chat or openai.completions add to the first choice."""
    parts: list[str] = []
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            if choice.get("index", 0) == 0:
                parts.append((choice.get("delta") or {}).get("content") or choice.get("text") or "")
    return "".join(parts)
