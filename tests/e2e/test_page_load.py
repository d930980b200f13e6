"""How a browser loads the pages of a real gateway: every file at once, and none when it comes again."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser, Request

from tests.gateway.wire import Gate

pytestmark = pytest.mark.platform

PRELOADS = """() => [...document.querySelectorAll('link[rel="modulepreload"], script[src]')]
    .map((node) => node.src || node.href)"""
KEPT = """() => performance.getEntriesByType("resource").filter(({ name }) => name.includes("/static/"))
    .map(({ name, transferSize }) => [name, transferSize])"""


@pytest.mark.parametrize(("path", "shown"), [("/", "#key"), ("/ops", "#key"), ("/docs", "main"), ("/watch", "#about")])
async def test_a_page_names_the_modules_that_it_loads(browser: Browser, one: Gate, path: str, shown: str) -> None:
    asked: list[Request] = []
    context = await browser.new_context(base_url=one.url)
    page = await context.new_page()
    page.on("request", lambda request: asked.append(request))
    await page.goto(path)
    await page.locator(shown).wait_for(state="attached")
    await page.wait_for_load_state("networkidle")
    scripts = [request.url for request in asked if request.url.split("?")[0].endswith(("js", "mjs"))]
    assert sorted(scripts) == sorted(await page.evaluate(PRELOADS)), "each is named, and asked for once"
    again = await context.new_page()
    await again.goto(path)
    await again.wait_for_load_state("networkidle")
    files = await again.evaluate(KEPT)
    assert len(files) > len(scripts) and all(size == 0 for _, size in files), "all from the browser's cache"
    await context.close()
