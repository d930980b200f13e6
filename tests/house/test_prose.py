"""Docstrings, comments and pages begin with their subject and keep to a line's width (CONTRIBUTING.md, "Words")."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.house.tree import docstrings, files, text

WIDTH = 120
HEADLESS = re.compile(r"(Of|What|Who|Whoever|So|That)\b")
"""First words of a sentence that leaves its subject out."""


def test_no_docstring_begins_without_its_subject() -> None:
    found = [
        f"{path}:{line}: {doc.strip().splitlines()[0]}"
        for path in files(".py")
        for line, doc in docstrings(path)
        if HEADLESS.match(doc.strip())
    ]
    assert not found, "begin with the subject:\n" + "\n".join(found)


def test_no_comment_begins_without_its_subject() -> None:
    found = [f"{path}:{line}: {comment}" for path in files(".py") for line, comment in comments(path)]
    found = [comment for comment in found if HEADLESS.match(comment.partition(": ")[2])]
    assert not found, "begin with the subject:\n" + "\n".join(found)


def comments(path: Path) -> list[tuple[int, str]]:
    """(line, text) of the first line of each comment."""
    found: list[tuple[int, str]] = []
    before = -1
    for token in tokenize.generate_tokens(io.StringIO(text(path)).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            alone = token.line.lstrip().startswith("#")
            if not (alone and before == line - 1):
                found.append((line, token.string.lstrip("#: ")))
            if alone:
                before = line
    return found


def test_no_line_of_prose_is_wider_than_a_page() -> None:
    found = [
        f"{path}:{number}: {len(line)} characters"
        for path in files(".md", ".lua", ".js", ".ts", ".sql", ".yaml", ".toml", ".sh", ".c")
        if path.parts[:2] != ("dashboards", "grafana") and not _is_hashed(path)
        for number, line in prose(path)
        if len(line) > WIDTH and not _is_one_long_word(line)
    ]
    assert not found, "wrap the line:\n" + "\n".join(found)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of what is read as a sentence: a page without code and tables, or a program's comments."""
    in_code = False
    for number, line in enumerate(text(path).splitlines(), 1):
        start = line.lstrip()
        if path.suffix == ".md":
            if start.startswith("```"):
                in_code = not in_code
            if not in_code and not start.startswith("|") and not line.startswith("    "):
                yield number, line
        elif start.startswith(("#", "--", "//", "/*", "* ")):
            yield number, line


def _is_hashed(path: Path) -> bool:
    """True for a file whose bytes have a checksum elsewhere: a migration of the schema, the versions of a build."""
    return (path.parent.name == "schema" and path.name[:4].isdigit()) or path.name == "versions.toml"


def _is_one_long_word(line: str) -> bool:
    return max(map(len, line.split()), default=0) > WIDTH - 20
