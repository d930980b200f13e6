"""Recognises a chunk that differs from an earlier one only in its text and its token counts. Sans I/O.

Nearly all chunks of an answer are such. To compare their bytes and to cut the text out costs less than to decode them.
"""

from __future__ import annotations

import re
from typing import Final

from stream_fabric.native import read_chunk

_TEXT: Final = re.compile(rb'"(?:content|text|reasoning|reasoning_content)"\s*:\s*"')
_COUNT: Final = re.compile(rb'"(completion|total)_tokens"\s*:\s*(\d+)')


class ChunkTemplate:
    """The bytes of a chunk without its text and without its counts."""

    __slots__ = ("_after", "_between", "_head", "_own", "_tail")

    def __init__(self, head: bytes, after: bytes, between: bytes, tail: bytes, own: int) -> None:
        """``after``, ``between`` and ``tail`` follow the text, the first count and the last count.

        ``own``: position of the count of the tokens made so far; -1: there are no counts, and all bytes are ``after``.
        An empty ``between``: there is one count.
        """
        self._head, self._after, self._between, self._tail = head, after, between, tail
        self._own = own

    @classmethod
    def of(cls, data: bytes, text: str, made: int | None) -> ChunkTemplate | None:
        """Make the template of a chunk. None: its text and its count cannot be told from its other bytes.

        ``text``, ``made``: what the chunk says when it is decoded; None: it has no count.
        """
        starts = [match.end() for match in _TEXT.finditer(data)]
        end = data.find(b'"', starts[0]) if starts else -1
        if len(starts) != 1 or data[starts[0] : end] != text.encode():
            return None
        head, rest = data[: starts[0]], data[end:]
        if made is None:
            return cls(head, rest, b"", b"", -1)
        counts = list(_COUNT.finditer(rest))
        own = [at for at, count in enumerate(counts) if count[1] == b"completion"]
        if len(own) != 1 or len(counts) > 2 or int(counts[own[0]][2]) != made:
            return None
        first, last = counts[0], counts[-1]
        between = rest[first.end(2) : last.start(2)] if first is not last else b""
        return cls(head, rest[: first.start(2)], between, rest[last.end(2) :], own[0])

    def read(self, data: bytes) -> tuple[str, int | None] | None:
        """Return the text and the count of a chunk; None: the chunk is of another form, and must be decoded."""
        return read_chunk(self._head, self._after, self._between, self._tail, self._own, data)
