"""Markdown on the chat page: what it becomes, that nothing in it runs, and that a growing text stays cheap."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from tests.client.fake_gateway import STATIC, FakeGateway
from tests.client.test_chat_page import XSS

VENDOR = STATIC / "vendor"
MANIFEST = json.loads((VENDOR / "manifest.json").read_text())


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser, fake: FakeGateway) -> AsyncIterator[Page]:
    """The chat page under its own policy. Fails when anything was refused by the policy, or asked of another host."""
    page = await browser.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda line: troubles.append(line.text) if "Content Security Policy" in line.text else None)
    page.on("request", lambda request: None if request.url.startswith(fake.url) else troubles.append(request.url))
    page.on("dialog", lambda dialog: troubles.append(dialog.message))
    await page.goto(fake.url)
    page.troubles = troubles  # type: ignore[attr-defined]
    yield page
    assert troubles == []
    await page.close()


# --- the vendored libraries ------------------------------------------------------------------------------------


def _files() -> dict[str, str]:
    owners = [owner for package in MANIFEST["packages"] for owner in (package, *package.get("bundles", ()))]
    return {file["path"]: file["sha256"] for owner in owners for file in owner["files"]}


def test_vendored_files_are_the_pinned_packages() -> None:
    there = {str(path.relative_to(VENDOR)): path for path in VENDOR.rglob("*") if path.is_file()}
    there.pop("manifest.json")
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in there.items()} == _files()


def test_vendored_packages_have_a_version_an_integrity_and_a_permissive_licence() -> None:
    for package in MANIFEST["packages"]:
        for owner in (package, *package.get("bundles", ())):
            assert owner["license"] in ("MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause")
            assert owner["version"] and owner["integrity"].startswith("sha512-")
            assert any(file["path"].startswith("licenses/") for file in owner["files"])
    colours = (VENDOR / "highlight").iterdir()
    assert sum(path.stat().st_size for path in colours) < 60 << 10, "loaded with the first code"
    purify, markdown = (VENDOR / "purify.es.mjs").read_text(), (VENDOR / "markdown-it.esm.min.mjs").read_text()
    versions = {package["name"]: package["version"] for package in MANIFEST["packages"]}
    assert f"DOMPurify {versions['dompurify']}" in purify
    assert f"markdown-it {versions['markdown-it']}" in markdown


# --- nothing runs ----------------------------------------------------------------------------------------------

HTML = [
    "<script>window.owned = 1</script>",
    "<img src=x onerror='window.owned = 1'>",
    "<svg onload='window.owned = 1'><script>window.owned = 1</script></svg>",
    "<svg><animate onbegin='window.owned = 1' attributeName=x dur=1s>",
    "<svg><a xlink:href='javascript:window.owned = 1'><text>x</text></a></svg>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=window.owned=1&gt;'>",
    "<math href='javascript:window.owned = 1'>x</math>",
    "<iframe srcdoc='<script>parent.owned = 1</script>'></iframe>",
    "<iframe src='javascript:parent.owned = 1'></iframe>",
    "<object data='data:text/html,<script>parent.owned = 1</script>'></object><embed src='javascript:owned=1'>",
    "<details open ontoggle='window.owned = 1'><summary>x</summary></details>",
    "<input autofocus onfocus='window.owned = 1'><video><source onerror='window.owned = 1'></video>",
    "<style>@import 'https://elsewhere.example/x.css'; * { background: url(https://elsewhere.example/x) }</style>",
    "<p style='background: url(https://elsewhere.example/x)'>x</p><p class='gate' id='gate'>x</p>",
    "<link rel=stylesheet href='https://elsewhere.example/x.css'><meta http-equiv=refresh content='0;url=//x'>",
    "<base href='https://elsewhere.example/'><a href='x'>x</a>",
    "<form action='javascript:window.owned = 1'><button>x</button><input name=attributes></form>",
    "<a href='javascript:window.owned = 1'>x</a><a href=' java\tscript:window.owned = 1'>x</a>",
    "<a href='data:text/html,<script>opener.owned = 1</script>'>x</a><a href='vbscript:x'>x</a>",
    "<a href='https://ok.example' target='_self' rel='opener' onclick='window.owned = 1' data-x=1>x</a>",
    "<noscript><p title='</noscript><img src=x onerror=window.owned=1>'></noscript>",
    "<template><img src=x onerror='window.owned = 1'></template>",
    "<xmp><p title='</xmp><img src=x onerror=window.owned=1>'></xmp>",
    "<p is='x-y' slot=z nonce=n>x</p><x-y onclick='window.owned = 1'>x</x-y>",
]
MARKDOWN_ATTACKS = [
    "[x](javascript:window.owned=1) [x](JaVaScRiPt:window.owned=1) [x](&#106;avascript:window.owned=1)",
    "[x](java%0ascript:alert) [x](\\javascript:x) [x](//elsewhere.example/x) [x](/v1/tokens) [x](?x) [x](#key=x)",
    "[x](data:text/html;base64,PHNjcmlwdD4=) [x](vbscript:x) [x](blob:x) [x](file:///etc/passwd) [x](ws://x)",
    "![x](javascript:window.owned=1) ![x](data:image/svg+xml,<svg/onload=owned=1>) ![x](https://elsewhere.example/i)",
    "<javascript:window.owned=1> <https://ok.example/\"onmouseover='window.owned=1'> javascript:window.owned=1",
    "[![x](https://elsewhere.example/i)](https://ok.example) [a [b](https://ok.example) c](https://ok.example)",
    '[x](https://ok.example "onmouseover=window.owned=1") [x](https://ok.example/"onclick=x)',
    "[x]: javascript:window.owned=1\n\n[x] [x][x] ![x]",
    '```html"><script>window.owned=1</script>\n<script>window.owned=1</script>\n```',
    "~~~<img/src=x/onerror=window.owned=1>\n</code></pre><script>window.owned=1</script>",
    "`<img src=x onerror=window.owned=1>` **<script>window.owned=1</script>** ~~<svg onload=owned=1>~~",
    "| <img src=x onerror=window.owned=1> | b |\n| :-: | --: |\n| [x](javascript:owned=1) | <iframe src=x> |",
    "> - 1. > <script>window.owned=1</script>\n> - 1. > [x](javascript:window.owned=1)",
    "1. a\n\n   <div onclick=window.owned=1>\n\n   </div>\n\n2. <!-- <img src=x onerror=window.owned=1> -->",
    "# <svg onload=window.owned=1>\n\nSetext <b onclick=owned=1>\n===\n\n&lt;script&gt;window.owned=1&lt;/script&gt;",
    "a<br onload=window.owned=1>\u0000<script\u0000>window.owned=1</script>\u2028\u202e<scr\u00adipt>",
    "    <script>window.owned=1</script>\n\n<p>\n<script>\nwindow.owned=1\n</script>\n</p>",
]
CHECK = """
    const tags = new Set([
        "p", "h2", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "li", "hr", "pre", "code", "table", "thead",
        "tbody", "tr", "th", "td", "strong", "em", "s", "a", "br", "figure", "figcaption", "span", "button", "div",
    ]);
    const attributes = new Set(["class", "dir", "href", "rel", "start", "tabindex", "target", "type"]);
    const classes = /^(code|copy|table|right|center|language-.*)$/;
    const check = (root) => {
        for (const node of root.querySelectorAll("*")) {
            if (!tags.has(node.localName) || !(node instanceof HTMLElement)) return node.outerHTML;
            for (const { name, value } of node.attributes) {
                if (!attributes.has(name)) return node.outerHTML;
                if (name === "href" && !/^(https?:\\/\\/|mailto:)/.test(value)) return node.outerHTML;
                if (name === "class" && !classes.test(value)) return node.outerHTML;
            }
            if (node.localName === "a" && node.hasAttribute("href")) {
                if (node.target !== "_blank" || node.rel !== "noopener noreferrer") return node.outerHTML;
                if (node.querySelector("a")) return node.outerHTML;
            }
        }
        return null;
    };
    const settled = () => new Promise((resolve) => setTimeout(resolve, 30));
"""


async def test_hostile_markdown_becomes_text(page: Page) -> None:
    script = f"""async (texts) => {{
        const {{ MarkdownView }} = await import("/static/markdown.js");
        {CHECK}
        for (const text of texts) {{
            const root = document.body.appendChild(document.createElement("div"));
            const view = new MarkdownView(root);
            for (let end = 0; end < text.length; end += 3) {{
                view.set(text.slice(0, end));
                if (check(root)) return [text, check(root)];
            }}
            view.set(text);
            for (const node of root.querySelectorAll("*")) {{
                for (const type of ["click", "mouseover", "focus"]) {{
                    if (node.localName !== "a") node.dispatchEvent(new Event(type));
                }}
            }}
            await settled();
            if (check(root) || window.owned) return [text, check(root) ?? "it ran"];
        }}
        return null;
    }}"""
    assert await page.evaluate(script, [*MARKDOWN_ATTACKS, *HTML, "\n\n".join([XSS, *MARKDOWN_ATTACKS, *HTML])]) is None


async def test_html_that_reached_the_sanitiser_loses_all_that_runs_or_loads(page: Page) -> None:
    """The second line of defence: as if markdown-it let HTML through."""
    script = f"""async (texts) => {{
        const {{ sanitize }} = await import("/static/markdown.js");
        {CHECK}
        for (const text of texts) {{
            const root = document.body.appendChild(document.createElement("div"));
            root.append(sanitize(text));
            await settled();
            if (check(root) || window.owned) return [text, check(root) ?? "it ran"];
        }}
        return null;
    }}"""
    assert await page.evaluate(script, [*HTML, "".join(HTML)]) is None
    # Chromium reports handlers and styles in the parser's inert document too; there they could not have run
    page.troubles[:] = [told for told in page.troubles if "Content Security Policy" not in told]  # type: ignore[attr-defined]


async def test_links_that_may_be_followed_stay_links(page: Page) -> None:
    script = """async (text) => {
        const { MarkdownView } = await import("/static/markdown.js");
        const root = document.createElement("div");
        new MarkdownView(root).set(text);
        return [...root.querySelectorAll("a")].map((a) => [a.getAttribute("href"), a.textContent]);
    }"""
    text = "[a](https://ok.example/x) <http://ok.example> [m](mailto:a@ok.example) ![i](https://ok.example/i.png)"
    assert await page.evaluate(script, text) == [
        ["https://ok.example/x", "a"],
        ["http://ok.example", "http://ok.example"],
        ["mailto:a@ok.example", "m"],
        ["https://ok.example/i.png", "i"],
    ]


# --- what it looks like ----------------------------------------------------------------------------------------

MARKDOWN = """# Title

Some **bold**, *italic*, `code` and [a link](https://ok.example).

- one
- two
  - nested

1. first
2. second

```python
x = "`" * 3

print(x)
```

> quoted

| a | b |
| --- | ---: |
| 1 | 2 |

The end, snake_case_name and 2 * 3 * 4."""


async def test_a_streamed_answer_looks_like_the_same_answer_whole(page: Page) -> None:
    script = """async (text) => {
        const { MarkdownView } = await import("/static/markdown.js");
        const shown = (text) => {
            const root = document.createElement("div");
            new MarkdownView(root).set(text);
            return root.innerHTML;
        };
        for (const step of [1, 2, 3, 7]) {
            const root = document.createElement("div");
            const view = new MarkdownView(root);
            for (let end = step; end < text.length + step; end += step) {
                const part = text.slice(0, end);
                view.set(part);
                if (root.innerHTML !== shown(part)) return [step, part, root.innerHTML, shown(part)];
            }
        }
        return shown(text);
    }"""
    for text in (
        MARKDOWN,
        XSS,
        "- a\n\n- b\n\ntext\n- c",
        "```\nopen\n\nfence",
        "a\n-\n- b\n\n1. c\n\n    d",
        "para\n# title\npara\n```\ncode\n```\npara\n> quote\nlazy\n\n***\n- item\n\n  more\n\n      code\n",
        "para\na | b\n--|--\n1 | 2\n\nSetext\n---\n~~~\n`tilde` ~~\n~~~\n````\n```\n````\n",
        "windows\r\n\r\n- lines\r\n- here\r\n\r\n```\r\ncode\r\n\r\nmore\r\n```\r\nend",
        "  ```\n  indented\n    more\n\n  end",
        "- ```\n  in a list\n\n  more\n  ```\n- b\n\n[x]: https://ok.example\n\n[x]",
    ):
        html = await page.evaluate(script, text)
        assert isinstance(html, str), html
    html = str(await page.evaluate(script, MARKDOWN)).replace(' dir="auto"', "").replace("\n", "")
    for part in (
        "<h2>Title</h2>",
        "<strong>bold</strong>",
        "<em>italic</em>",
        "<ul><li>one</li><li>two<ul><li>nested</li></ul></li></ul>",
        "<ol><li>first</li>",
        "print(x)</code></pre>",
        "<blockquote><p>quoted</p></blockquote>",
        '<td class="right">2</td>',
        "snake_case_name and 2 * 3 * 4.",
    ):
        assert part in html, part


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# About C#", "<h2>About C#</h2>"),
        ("# Closed ##", "<h2>Closed</h2>"),
        ("# #", "<h2></h2>"),
        ("see https://w.example/a_(b).", 'see <a href="https://w.example/a_(b)">https://w.example/a_(b)</a>.'),
        ("(https://w.example/a)", '(<a href="https://w.example/a">https://w.example/a</a>)'),
        ("[a](https://w.example/a_(b))!", '<a href="https://w.example/a_(b)">a</a>!'),
        ("[a](https://w.example/(b) c)", '[a](<a href="https://w.example/(b)">https://w.example/(b)</a> c)'),
        ("[![i](https://i.example/)](https://b.example/)", '<a href="https://b.example/">i</a>'),
        ("![](https://i.example/a)", '<a href="https://i.example/a">https://i.example/a</a>'),
        ("one\ntwo", "one<br>\ntwo"),
        ("[https://a.example](https://b.example/)", '<a href="https://b.example/">https://a.example</a>'),
    ],
)
async def test_markdown_as_others_show_it(text: str, html: str, page: Page) -> None:
    script = """async (text) => {
        const { MarkdownView } = await import("/static/markdown.js");
        const view = new MarkdownView(document.createElement("div"));
        view.set(text);
        const html = view.root.innerHTML.replaceAll(/ target="_blank"| rel="noopener noreferrer"| dir="auto"/g, "");
        return html.replaceAll(/^<p>|<\\/p>$/g, "");
    }"""
    assert await page.evaluate(script, text) == html


async def test_hostile_text_is_not_slow(page: Page) -> None:
    script = """async () => {
        const { MarkdownView } = await import("/static/markdown.js");
        const marks = ["*a ", "_a ", "**a ", "`a", "~~a ", "[", "[a](", "![", "https://"];
        const spread = `# a${" ".repeat(900)}x\\n`;
        const texts = [...marks, "# #", spread, "[a](b(", "[a](b()", "- ", "> ", "|-", "\\n- a", "\\n> a"];
        for (const text of texts) {
            const started = performance.now();
            new MarkdownView(document.createElement("div")).set(text.repeat(Math.ceil(50_000 / text.length)));
            const took = performance.now() - started;
            if (took > 3000) throw new Error(`${JSON.stringify(text)} took ${took} ms`);
        }
    }"""
    await page.evaluate(script)


async def test_a_long_answer_is_cheap_to_grow(page: Page) -> None:
    script = """async () => {
        const { MarkdownView } = await import("/static/markdown.js");
        const view = new MarkdownView(document.createElement("div"));
        const block = "A paragraph with **bold** text and `code` that goes on for a while.\\n\\n";
        const long = block.repeat(1500);
        view.set(long);
        const built = view.root.childElementCount;
        const kept = view.root.firstElementChild;
        view.set(long + "more");
        return [built, kept === view.root.firstElementChild, view.open.length];
    }"""
    assert await page.evaluate(script) == [1500, True, 2]
