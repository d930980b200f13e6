"""The fenced and indented blocks of the pages, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.house.tree import ROOT, files

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)((?: {4}.*\n)+)")
_PLACEHOLDER = re.compile(r"<[a-z ]+>|(?<=\S)…(?=\s|$)|(?<=-url )…|(?<=-token )…|(?<=--since )…")
"""Words that the reader replaces; a lone ``…`` stands for more flags."""
_OPEN_QUOTE = "No closing quotation"


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(*languages: str) -> list[Snippet]:
    """Blocks of all pages in these languages; the language of a block without a name is ``sh``."""
    found: list[Snippet] = []
    for page in files(".md"):
        if page.parts[0] != "README.md" and page.parts[0] not in ("docs", "CONTRIBUTING.md"):
            continue
        text = (ROOT / page).read_text()
        for match in _FENCED.finditer(text):
            language = match[1].replace("bash", "sh") or "sh"
            found.append(Snippet(page, text.count("\n", 0, match.start()) + 2, language, match[2]))
        plain = _FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
        for match in _INDENTED.finditer(plain):
            found.append(Snippet(page, plain.count("\n", 0, match.start()) + 1, "sh", match[1].replace("    ", "", 1)))
    return [snippet for snippet in found if snippet.language in languages]


def commands(snippet: Snippet) -> Iterator[tuple[int, list[str]]]:
    """(line number, words) of each simple command of a shell block; a pipeline or a list is several.

    A block that shows output marks its commands with ``$``; the other lines are output.
    """
    lines = snippet.text.split("\n")
    shown = any(line.lstrip().startswith("$ ") for line in lines)
    at = 0
    while at < len(lines):
        number, line = snippet.line + at, lines[at].strip()
        at += 1
        if shown and not line.startswith("$ "):
            continue
        line = line.removeprefix("$ ")
        while at < len(lines) and (line.endswith("\\") or _is_open(line)):
            line = line.removesuffix("\\") + " " + lines[at].strip()
            at += 1
        yield from ((number, words) for words in _simple_commands(line) if words)


def _is_open(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError as error:
        return str(error) == _OPEN_QUOTE
    return False


def _simple_commands(line: str) -> Iterator[list[str]]:
    try:
        words = shlex.split(_PLACEHOLDER.sub("x", line), comments=True)
    except ValueError:
        return
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    command: list[str] = []
    for word in words:
        if word in ("&&", "||", "|", ";"):
            yield command
            command = []
        elif word != "…":
            command.append(word)
    yield command
