"""The functions in Python: what ``native.c`` must equal, byte for byte."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

import msgspec

_DIGITS_MAX: Final = 9
_LONG_DIGITS: Final = 64
_NO_BRACKETS = bytes(b for b in range(256) if b not in b"[]{}")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NUMERALS = bytes.maketrans(b"123456789.E", b"0000000000e")
_ESCAPES = (b"\\u005", b"\\u006", b"\\u007")  # of an underscore and of letters
_json = msgspec.json.Encoder().encode


def split_message(payload: bytes) -> list[tuple[bytes, bytes, int, int, bytes]]:
    """Split a published message into its parts: (stream, epoch, first seq, last seq, frames) each.

    Parts end with 0x1e, their first four fields with 0x1f; a seq is in digits. Raises ValueError for anything else.
    """
    parts = []
    for part in payload.split(b"\x1e"):
        stream, epoch, first, last, frames = part.split(b"\x1f", 4)
        parts.append((stream, epoch, int(first), int(last), frames))
    return parts


def text_event(
    before: bytes, blocks: dict[bytes, tuple[bytes, ...]], line: bytes, epoch: int, seq: int
) -> bytes | None:
    """Encode a text delta of one token as a complete SSE event with an id.

    ``before``: the event up to its data. ``blocks``: the constant parts around a block's text, by the block's number in
    digits. None: the line is another frame, or its block has no parts.
    """
    number, quote, text = line.partition(b'"')
    around = blocks.get(number) if quote else None
    return b"%b%b\nid: %d-%d\n\n" % (before, text.join(around), epoch, seq) if around else None


def chunk(data: bytes) -> bytes:
    """Encode bytes as a chunk of HTTP/1.1 chunked transfer coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def text_frame(block: int, text: str, tokens: int) -> bytes:
    """Encode a text delta in the short form. Raises UnicodeEncodeError for a text with a lone surrogate."""
    return b"%d%b" % (block, _json(text)) if tokens == 1 else b"%d:%d%b" % (block, tokens, _json(text))


def read_chunk(
    head: bytes, after: bytes, between: bytes, tail: bytes, own: int, data: bytes
) -> tuple[str, int | None] | None:
    """Return the text and the count of a chunk of an answer; None: it is of another form, or its text has an escape.

    ``head``, ``after``, ``between`` and ``tail``: the bytes before the text, after it, and after the first and the last
    count; an empty ``between``: there is one count. ``own``: position of the count to return; -1: there are no counts,
    and nothing follows ``after``.
    """
    if not data.startswith(head):
        return None
    begin = len(head)
    end = data.find(b'"', begin)
    raw = data[begin:end]
    if end <= begin or b"\\" in raw:
        return None
    made = None
    if own < 0:
        if data[end:] != after:
            return None
    else:
        if not (data.startswith(after, end) and data.endswith(tail)):
            return None
        middle = data[end + len(after) : len(data) - len(tail)]
        counts = middle.split(between) if between else [middle]
        if len(counts) != (2 if between else 1) or not all(map(_is_count, counts)):
            return None
        made = int(counts[own])
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    return (text, made) if text.isprintable() else None  # JSON has no control character in a string


def _is_count(digits: bytes) -> bool:
    """Whether these bytes are a JSON number from 0."""
    return digits.isdigit() and len(digits) <= _DIGITS_MAX and (digits[0] != 0x30 or len(digits) == 1)


def json_counts(text: bytes, strings_max: int) -> tuple[int, int, int, int, int] | None:
    """Count what a JSON text has outside of its strings; None: it has more strings than ``strings_max``.

    Returns the numbers of members, of commas, of slow numbers and of brackets, and the deepest nesting. A slow number
    takes a decoder a hundred times longer than another one: it has an exponent of 3 digits or more, or many digits,
    which are converted in quadratic time. A text that is not JSON is counted to any result.
    """
    # Without escapes every quote begins or ends a string, so every second piece between quotes is outside of strings.
    # Each step is linear in time and memory for any text.
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 2 * strings_max:
        return None
    outside = b"".join(unescaped.split(b'"')[::2])
    numerals = outside.translate(_NUMERALS, b"+-")
    slow = numerals.count(b"0e000") + numerals.count(b"0" * _LONG_DIGITS)
    steps = outside.translate(_STEPS, _NO_BRACKETS)
    depth = max(accumulate(memoryview(steps).cast("b"), initial=0))
    return outside.count(b":"), outside.count(b","), slow, len(steps), depth


def may_hold_url(text: bytes) -> bool:
    """Whether a string of a JSON text may end in ``_url``, as it is or with escapes. True may be wrong, False is not.

    A regular expression would take 30 times longer.
    """
    return b'_url"' in text or (b"\\u00" in text and any(escape in text for escape in _ESCAPES))
