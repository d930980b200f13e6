"""Bounds JSON of clients before it is decoded. Pure.

A decoder holds Python's lock (the GIL) for a whole document, so it stops the event loop from a thread too.
"""

from __future__ import annotations

import math
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
from stream_fabric.native import json_counts


def check_depth(text: bytes, containers_max: int = JSON_CONTAINERS_MAX) -> int:
    """Check the nesting of the JSON and the number of its values. Return its commas outside of strings.

    Raises TooDeep beyond a limit. A text that is not JSON fails later, in the decoder.
    """
    counts = json_counts(text, JSON_STRINGS_MAX)
    if counts is None:
        raise TooDeep(f"the JSON has more than {JSON_STRINGS_MAX} strings, the limit")
    members, commas, slow_numbers, brackets, depth = counts
    if members > JSON_MEMBERS_MAX:
        raise TooDeep(f"the objects of the JSON have more than {JSON_MEMBERS_MAX} members, the limit")
    if commas > JSON_VALUES_MAX:
        raise TooDeep(f"the JSON has more than {JSON_VALUES_MAX} values, the limit")
    if slow_numbers > JSON_SLOW_NUMBERS_MAX:
        raise TooDeep(
            f"the JSON has more than {JSON_SLOW_NUMBERS_MAX} numbers with over 63 digits or with an exponent of 3 "
            "digits, the limit"
        )
    if brackets > 2 * containers_max:
        raise TooDeep(f"the JSON has more than {containers_max} arrays and objects, the limit")
    if depth > JSON_DEPTH_MAX:
        raise TooDeep(f"the JSON is nested deeper than {JSON_DEPTH_MAX} levels, the limit")
    return commas


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
