"""Writes the screenshots of README: ``python -m tests.support.screenshots``."""

from __future__ import annotations

import asyncio

from aiohttp import ClientSession
from playwright.async_api import Browser

from tests.client.browser import chromium
from tests.gateway.processes import Process
from tests.house.tree import ROOT

_FLAGS = ["up", "--port", "0", "--telemetry", "--state-folder", "fresh", "--sim", "itl_ms=12,max_num_seqs=16"]
_REQUESTS = 1500
_PAUSE_S = 0.12
_WATCHED_S = 170
"""Time until the charts by minute have some minutes."""


async def _ask(session: ClientSession, url: str, number: int) -> None:
    body = {"model": "sim-small", "max_tokens": 60 + number % 7 * 40, "messages": [{"role": "user", "content": "Hi"}]}
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        await answer.read()


async def _load(url: str, key: str) -> None:
    async with ClientSession(headers={"authorization": f"Bearer {key}"}) as session, asyncio.TaskGroup() as group:
        for number in range(_REQUESTS):
            group.create_task(_ask(session, url, number))
            await asyncio.sleep(_PAUSE_S)


async def _chat(browser: Browser, url: str, key: str) -> None:
    page = await browser.new_page(viewport={"width": 1100, "height": 680})
    await page.goto(f"{url}/#key={key}")
    await page.click("text=Compare SSE and WebSocket in a table")
    await page.wait_for_selector("#send:visible")
    for module in ("highlight.js", "vendor/highlight/python.min.js"):
        await page.evaluate(f"import('/static/{module}').then(() => true)")  # or the answer has gone on when they come
    await page.click("#new")
    await page.click("text=Write a Python function that merges sorted iterators")
    await page.mouse.move(0, 0)
    await page.wait_for_selector(".hl-keyword >> nth=0")  # it is still running
    await page.screenshot(path=ROOT / "docs" / "chat.png")


async def main() -> None:
    with Process(*_FLAGS) as up:
        url, key = up.facts["gateways"][0]["url"], up.facts["key"]
        async with chromium() as browser:
            await _chat(browser, url, key)
            load = asyncio.create_task(_load(url, key))
            page = await browser.new_page(viewport={"width": 1280, "height": 1050}, timezone_id="Europe/Berlin")
            await page.goto(f"{url}/ops#key={key}")
            await page.wait_for_timeout(_WATCHED_S * 1000)
            await page.screenshot(path=ROOT / "docs" / "ops.png")
            await load


if __name__ == "__main__":
    asyncio.run(main())
