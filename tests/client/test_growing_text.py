"""A reader works in a text that grows: selection, focus and scroll position stay where they are."""

from __future__ import annotations

import pytest
from playwright.async_api import Page

pytestmark = pytest.mark.platform

GROW = """async ([begun, rest]) => {
    const { MarkdownView } = await import("/static/markdown.js");
    const root = document.getElementById("log").appendChild(document.createElement("div"));
    root.className = "content";
    root.style.width = "20rem";
    const view = new MarkdownView(root);
    const look = () => LOOK;
    view.set(begun);
    USE;
    const before = look();
    for (let end = 1; end <= rest.length; end += 1) view.set(begun + rest.slice(0, end));
    return [before, look()];
}"""
LISTED = "- one **bold** and [a link](https://ok.example/)\n- two\n- thr"
SELECT = "getSelection().selectAllChildren(root.querySelector('%s'))"
FOCUSED = "document.activeElement.localName"
SELECTED = "getSelection().toString()"
SCROLLED = "root.querySelector('.table').scrollLeft"
WIDE = "| " + " | ".join(["a very wide column of it"] * 12) + " |\n"
TABLE = WIDE + "|" + " --- |" * 12 + "\n" + WIDE


@pytest.mark.parametrize(
    ("begun", "rest", "use", "look", "kept"),
    [
        ("The **first** words of a", " paragraph _that_ goes on", SELECT % "strong", SELECTED, "first"),
        (LISTED, "ee\n- four\n  - nested\n", SELECT % "li", SELECTED, "one bold and a link"),
        (LISTED, "ee\n  - nested\n", "root.querySelector('a').focus()", FOCUSED, "a"),
        ("> **quoted**\n> and", " more\n>\n> and", SELECT % "strong", SELECTED, "quoted"),
        (TABLE, WIDE * 2, f"{SCROLLED} = 90", SCROLLED, 90),
        ("```\na `tick`\nb", "c\n`d`\n```\n", "root.querySelector('.copy').focus()", FOCUSED, "button"),
    ],
    ids=["paragraph", "list", "link", "quote", "table", "code"],
)  # fmt: skip
async def test_what_a_reader_does_in_a_growing_text_stays(
    page: Page, begun: str, rest: str, use: str, look: str, kept: str | int
) -> None:
    script = GROW.replace("LOOK", look).replace("USE", use)
    assert await page.evaluate(script, [begun, rest]) == [kept, kept]
