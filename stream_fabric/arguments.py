"""Checked argument types that the command lines of several planes share."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole(low: int, high: int, unit: str = "") -> Callable[[str], int]:
    """Make the type of an argument that is a whole number from ``low`` to ``high``."""
    allowed = f"must be {low} to {high}{unit and ' '}{unit}"

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{allowed}, got {text!r}")
        return int(text)

    return parse
