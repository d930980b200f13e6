"""Bounds JSON of clients before it is decoded. Pure.

A decoder holds Python's lock (the GIL) for a whole document, so it stops the event loop from a thread too.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import msgspec

from stream_fabric.errors import TooDeep
from stream_fabric.limits import (
    JSON_CONTAINERS_MAX,
    JSON_DEPTH_MAX,
    JSON_MEMBERS_MAX,
    JSON_SLOW_NUMBERS_MAX,
    JSON_STRINGS_MAX,
    JSON_VALUES_MAX,
)

_NO_BRACKETS = bytes(b for b in range(256) if b not in b"[]{}")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NUMERALS = bytes.maketrans(b"123456789.E", b"0000000000e")
_SLOW_BYTES_MIN = 5
"""Bytes of the shortest slow number: ``1e300``."""


def check_depth(text: bytes, containers_max: int = JSON_CONTAINERS_MAX) -> None:
    """Check the nesting of the JSON and the number of its values. Raises TooDeep beyond a limit.

    Most texts cost only a count. A text that is not JSON fails later, in the decoder.
    """
    if text.count(b"[") + text.count(b"{") <= JSON_DEPTH_MAX and not _may_be_slow(text):
        return
    # Without escapes every quote begins or ends a string, so every second piece between quotes is outside of strings.
    # Each step is linear in time and memory for any text.
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 2 * JSON_STRINGS_MAX:
        raise TooDeep(f"the JSON has more than {JSON_STRINGS_MAX} strings, the limit")
    outside = b"".join(unescaped.split(b'"')[::2])
    if outside.count(b":") > JSON_MEMBERS_MAX:
        raise TooDeep(f"the objects of the JSON have more than {JSON_MEMBERS_MAX} members, the limit")
    if outside.count(b",") > JSON_VALUES_MAX:
        raise TooDeep(f"the JSON has more than {JSON_VALUES_MAX} values, the limit")
    if _slow_numbers(outside) > JSON_SLOW_NUMBERS_MAX:
        raise TooDeep(
            f"the JSON has more than {JSON_SLOW_NUMBERS_MAX} numbers with over 63 digits or with an exponent of 3 "
            "digits, the limit"
        )
    steps = outside.translate(_STEPS, _NO_BRACKETS)
    if len(steps) > 2 * containers_max:
        raise TooDeep(f"the JSON has more than {containers_max} arrays and objects, the limit")
    if max(accumulate(memoryview(steps).cast("b")), default=0) > JSON_DEPTH_MAX:
        raise TooDeep(f"the JSON is nested deeper than {JSON_DEPTH_MAX} levels, the limit")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("number out of range")
    return value


_decoder = msgspec.json.Decoder(float_hook=_finite)
"""Python reads slow numbers 20 times faster than msgspec. One body may hold many texts with the most of them."""


def decode_text(text: str) -> Any:
    """Decode JSON that stands in a string: a client or a model wrote it, and no check of a body looks into strings.

    Raises DecodeError for a text that is no JSON or exceeds a limit.
    """
    data = text.encode()
    try:
        check_depth(data)
        return _decoder.decode(data)
    except (TooDeep, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def _may_be_slow(text: bytes) -> bool:
    """Whether the text, with its strings, has more of anything than JSON may have outside of strings."""
    return len(text) > _SLOW_BYTES_MIN * JSON_SLOW_NUMBERS_MAX and (
        text.count(b":") > JSON_MEMBERS_MAX
        or text.count(b",") > JSON_VALUES_MAX
        or text.count(b'"') > 2 * JSON_STRINGS_MAX
        or _slow_numbers(text) > JSON_SLOW_NUMBERS_MAX
    )


def _slow_numbers(text: bytes) -> int:
    """Count the numbers that take the decoder a hundred times longer than others: with exponents of 3 digits or more,
    and with many digits, which it converts in quadratic time."""
    numerals = text.translate(_NUMERALS, b"+-")
    return numerals.count(b"0e000") + numerals.count(b"0" * 64)
