"""The pages and their files: compressed and tagged once, and kept by browsers under the release's version."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from stream_gw.transport.pages import Site
from stream_gw.transport.pages.served import takes
from tests.gateway.wire import Gate

STATIC = Path(__file__).parents[2] / "stream_gw/static"
MARKDOWN = (STATIC / "markdown.js").read_bytes()
FOR_GOOD = "public, max-age=31536000, immutable"
SITE = Site(STATIC)


async def test_a_file_is_sent_as_the_client_takes_it(one: Gate) -> None:
    plain = await one.ask("GET", "/static/markdown.js")
    compressed = await one.ask("GET", "/static/markdown.js", headers={"accept-encoding": "br, gzip"})
    assert plain.body == gzip.decompress(compressed.body) == MARKDOWN
    assert len(compressed.body) < len(MARKDOWN) / 2
    assert "content-encoding" not in plain.headers and compressed.headers["content-encoding"] == "gzip"
    for reply in (plain, compressed):
        assert reply.headers["content-type"] == "text/javascript; charset=utf-8"
        assert reply.headers["vary"] == "accept-encoding"
        assert int(reply.headers["content-length"]) == len(reply.body)
    assert plain.headers["etag"] != compressed.headers["etag"], "a strong tag names one sequence of bytes"


@pytest.mark.parametrize("path", ["/", "/ops", "/docs", "/watch", "/static/base.css", "/openapi.json"])
@pytest.mark.parametrize("coding", ["gzip", "identity"])
async def test_what_the_client_has_is_not_sent_again(one: Gate, path: str, coding: str) -> None:
    headers = {"authorization": "", "accept-encoding": coding}
    reply = await one.ask("GET", path, headers=headers)
    again = await one.ask("GET", path, headers=headers | {"if-none-match": reply.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert again.headers["etag"] == reply.headers["etag"] and again.headers["vary"] == "accept-encoding"
    assert again.headers["cache-control"] == reply.headers["cache-control"] == "no-cache"
    if path != "/openapi.json":
        assert again.headers["content-security-policy"] == reply.headers["content-security-policy"]
    other = await one.ask("GET", path, headers=headers | {"if-none-match": '"other"'})
    assert (other.status, other.body) == (200, reply.body)


async def test_a_page_names_its_files_by_their_version(one: Gate) -> None:
    for path in ("/", "/ops", "/docs", "/watch"):
        page = (await one.ask("GET", path)).body.decode()
        assert set(re.findall(r'"/static/([^/"]*)/', page)) == {f"v-{SITE.version}"}
    kept = await one.ask("GET", f"/static/v-{SITE.version}/markdown.js")
    assert (kept.body, kept.headers["cache-control"]) == (MARKDOWN, FOR_GOOD)


async def test_a_gateway_of_another_release_has_its_own_file_which_nobody_keeps(one: Gate) -> None:
    """In a rolling upgrade one gateway sends the page and another one its files."""
    reply = await one.ask("GET", "/static/v-0123456789abcdef/markdown.js")
    assert (reply.status, reply.body, reply.headers["cache-control"]) == (200, MARKDOWN, "no-cache")
    assert (await one.ask("GET", "/static/v-0123456789abcdef/nothing.js")).status == 404


def test_a_page_names_each_module_that_its_script_imports() -> None:
    modules = SITE.modules("chat/main.js")
    assert len(modules) == len(set(modules)) and modules[0] == "vendor/markdown-it.esm.min.mjs", "the largest first"
    assert {"chat/view.js", "client/stream.js", "storage.js", "vendor/purify.es.mjs"} < set(modules)
    assert "highlight.js" not in modules, "loaded with the first code block"


def test_another_file_makes_another_version(tmp_path: Path) -> None:
    versions = set()
    for name, text in (("a.js", "1"), ("a.js", "2"), ("b.js", "2"), ("b.js", "")):
        for old in tmp_path.iterdir():
            old.unlink()
        (tmp_path / name).write_text(text)
        versions.add(Site(tmp_path).version)
    assert len(versions) == 4


@pytest.mark.parametrize(
    ("accept", "is_taken"),
    [
        ("", False),
        ("gzip", True),
        ("br, GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("*", True),
        ("*;q=0", False),
        ("gzip, *;q=0", True),
        ("identity", False),
        ("x-gzip", False),
    ],
)
def test_a_client_says_whether_it_takes_gzip(accept: str, is_taken: bool) -> None:
    assert takes(accept, "gzip") is is_taken
