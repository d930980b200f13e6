"""Links between the pages: the file exists, and so does the heading that the link names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.house.tree import ROOT, files

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
_TEXT = re.compile(r"\[([^]]*)\]\([^)]*\)")


def prose(page: Path) -> str:
    return _FENCED.sub("", page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = (_TEXT.sub(r"\1", heading) for heading in _HEADING.findall(prose(page)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", files(".md"), ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in _LINK.findall(prose(ROOT / page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        to = (ROOT / page).parent / name if name else ROOT / page
        if not to.exists() or (anchor and anchor not in anchors(to.resolve())):
            wrong.append(link)
    assert not wrong, f"{page} links to what is not there: {wrong}"
