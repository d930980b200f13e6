"""Local rules: categories with patterns, read from a TOML file and compiled once. RE2 takes linear time on any text."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import msgspec

from stream_fabric.limits import MODERATION_RULES_MAX


class _Pattern(Protocol):
    def search(self, text: str) -> Any: ...


class _Category(msgspec.Struct, forbid_unknown_fields=True):
    patterns: list[str] = []
    words: list[str] = []


class Rules:
    """Finds the category of a text."""

    def __init__(self, categories: dict[str, list[str]]) -> None:
        """``categories``: patterns of RE2 by category. Raises ValueError that names a pattern that is none."""
        self._categories = {name: _compile(name, patterns) for name, patterns in categories.items() if patterns}
        self._all = _compile("all", [pattern for patterns in categories.values() for pattern in patterns])

    def flagged(self, text: str) -> str | None:
        """Return the category of the first rule that the text breaks; None: it breaks none."""
        if not self._all.search(text):
            return None
        return next((name for name, pattern in self._categories.items() if pattern.search(text)), "rules")


def read_rules(path: Path) -> Rules:
    """Read a file of rules. Raises ValueError or OSError that names the file and what is wrong. The file::

    [violence]
    words = ["badword", "bad phrase"]   # whole words, in upper or lower case
    patterns = ["(?i)how to build a b.mb"]
    """
    if find_spec("re2") is None:
        raise ValueError(f"{path}: local rules need RE2; install stream-gw[privacy]")
    try:
        parsed = msgspec.convert(tomllib.loads(path.read_text("utf-8")), dict[str, _Category])
        categories = {
            name: [*category.patterns, *(rf"(?i)\b{_escaped(word)}\b" for word in category.words)]
            for name, category in parsed.items()
        }
        count = sum(map(len, categories.values()))
        if not 0 < count <= MODERATION_RULES_MAX:
            raise ValueError(f"it has {count} patterns and words; 1 to {MODERATION_RULES_MAX} are allowed")
        return Rules(categories)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _escaped(word: str) -> str:
    return "".join(char if char.isalnum() or char == " " else f"\\{char}" for char in word)


def _compile(name: str, patterns: list[str]) -> _Pattern:
    import re2  # an extra; a process without rules does not need it

    options = re2.Options()
    options.log_errors = False
    for pattern in patterns:
        try:
            found = re2.compile(pattern, options)
        except re2.error as error:
            raise ValueError(f"category {name!r}: {pattern[:80]!r} is no pattern of RE2: {error}") from error
        if found.search("") is not None:
            raise ValueError(f"category {name!r}: {pattern[:80]!r} matches the empty text, so it would flag everything")
    compiled: _Pattern = re2.compile("|".join(f"(?:{pattern})" for pattern in patterns), options)
    return compiled
