"""Output of the command line without control characters: texts of clients and of foreign servers are in it.

A terminal obeys them: they set its title, move its cursor and erase what is on it.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All but tab and newline, with those that reverse the direction of a text."""


class _Plain:
    """A text stream that writes control characters as JSON does: ``\\u001b``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def plain_output() -> Iterator[None]:
    """Write stdout and stderr without control characters. ``sys.__stderr__`` still takes those of a command itself."""
    with (
        contextlib.redirect_stdout(cast(TextIO, _Plain(sys.stdout))),
        contextlib.redirect_stderr(cast(TextIO, _Plain(sys.stderr))),
    ):
        yield
