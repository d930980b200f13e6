"""A shared answer on a real platform: watched on another gateway, read only, ended with its key's tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import BrowserContext, Route, expect

from tests.client.test_qr_code import read
from tests.e2e.conftest import agent_of
from tests.e2e.test_browser import PROMPT, Tab, check, context, tab, text_in_the_log  # noqa: F401
from tests.gateway.processes import Running
from tests.gateway.wire import Gate, text_of_chunks
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

CALLS = """async ([token, stream, other]) => {
    const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
    const call = async (method, path, body) => (await fetch(path, { method, headers, body })).status;
    return [
        await call("POST", `/v1/streams/${stream}/cancel`),
        await call("POST", `/v1/streams/${stream}/input`, JSON.stringify({ id: "i", item: {} })),
        await call("HEAD", `/v1/streams/${other}`),
        await call("HEAD", `/v1/streams/${stream}`),
        await call("GET", "/v1/models"),
    ];
}"""


PIXELS = """async () => {
    const svg = document.querySelector("#share-code svg");
    const { width, height } = svg.getBoundingClientRect();
    const image = new Image();
    image.src = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}`;
    await image.decode();
    const canvas = new OffscreenCanvas(width * 2, height * 2);
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
    return Array.from({ length: canvas.height }, (_, y) =>
        Array.from({ length: canvas.width }, (_, x) => Number(data[4 * (y * canvas.width + x)] < 128)));
}"""
"""The QR code as it is drawn: rows of dark (1) and light (0) pixels."""


async def test_a_link_is_watched_live_on_another_gateway(context: BrowserContext, one: Gate, two: Gate) -> None:  # noqa: F811
    other = await one.background(10)
    async with tab(context, f"{one.url}/#key={one.key}") as page:
        await page.ask(PROMPT)
        await page.until_words(5)
        await page.page.click(".share")
        await expect(page.page.locator("#share-copy")).to_be_enabled()
        link = urlsplit(await page.page.input_value("#share-link"))
        assert await asyncio.to_thread(read, [await page.page.evaluate(PIXELS)]) == [[link.geturl()]]
        stream, token = page.streams[0], parse_qs(link.fragment)["token"][0]
        async with tab(context, f"{two.url}/watch#{link.fragment}") as watcher:
            await watcher.until_words(5)
            assert await watcher.page.evaluate(CALLS, [token, stream, other]) == [403, 403, 404, 200, 403]
            await page.page.keyboard.press("Escape")
            await check(page, two, stream)
            await expect(watcher.page.locator("#title")).to_have_text("The answer")
            whole = await page.shown()

            async def shows_all() -> bool:
                return await watcher.shown() == whole

            await eventually(shows_all, "the watcher's page to show the answer whole")
            kept: Any = await watcher.page.evaluate("Object.keys(localStorage).filter((key) => key !== 'sgw.theme')")
            assert kept == [], "a watcher's browser keeps nothing"


@pytest.fixture
def steady(platform: Running) -> Iterator[str]:
    """A model whose answers take half a minute and more."""
    with agent_of(platform, "sim-vast-shared", 8000, itl_ms=600):
        yield "sim-vast-shared"


async def test_the_owner_stops_sharing_and_the_watcher_is_told(
    context: BrowserContext,  # noqa: F811
    one: Gate,
    two: Gate,
    steady: str,
) -> None:
    async with tab(context, f"{one.url}/#key={one.key}") as page:
        await page.page.select_option("#model", steady)
        await page.ask(PROMPT)
        await page.until_words(5)
        await page.page.click(".share")
        await expect(page.page.locator("#share-stop")).to_be_enabled()
        link = urlsplit(await page.page.input_value("#share-link"))
        async with tab(context, f"{two.url}/watch#{link.fragment}") as watcher:
            await watcher.until_words(5)
            await page.page.click("#share-stop")
            await expect(page.page.locator("#share-until")).to_contain_text("Nobody can watch")
            assert await page.page.input_value("#share-link") == ""
            told = watcher.page.get_by_text("sharing was stopped", exact=False).first
            await expect(told).to_be_visible(timeout=6000)
            await watcher.page.reload()
            await expect(watcher.page.locator("#title")).to_have_text("Nothing to watch")
        await page.page.click("#share-leave")
        assert (await one.info(page.streams[0]))["status"] != "cancelled", "the answer itself goes on"
        await page.page.keyboard.press("Escape")


async def test_a_slow_link_is_not_shown_for_another_answer(context: BrowserContext, one: Gate) -> None:  # noqa: F811
    async with tab(context, f"{one.url}/#key={one.key}") as page:
        await page.ask(PROMPT)
        await page.until_words(5)
        arrives = asyncio.Event()

        async def hold(route: Route) -> None:
            if route.request.post_data_json.get("stream") == page.streams[0]:
                await arrives.wait()
            await route.continue_()

        await page.page.route("**/v1/tokens", hold)
        await page.page.click(".share")
        await page.page.keyboard.press("Escape")
        await page.page.click("#new")
        await page.ask(PROMPT)
        await page.until_words(5)
        await page.page.click(".share")
        await expect(page.page.locator("#share-copy")).to_be_enabled()
        async with page.page.expect_response("**/v1/tokens"):
            arrives.set()
        await page.page.evaluate("() => new Promise((done) => setTimeout(done, 100))")
        link = urlsplit(await page.page.input_value("#share-link"))
        assert parse_qs(link.fragment)["stream"] == [page.streams[1]]
        assert await page.page.locator("#share-code svg").count() == 1


async def test_another_gateway_and_the_figures_are_noted(context: BrowserContext, one: Gate, two: Gate) -> None:  # noqa: F811
    async with Proxy.before(one.port) as proxy, tab(context, f"http://127.0.0.1:{proxy.port}/#key={one.key}") as page:
        await _answers_have(page, 600)
        await page.ask(PROMPT)
        await page.until_words(5)
        proxy.point_at(two.port)
        proxy.cut_all()
        await check(page, two, page.streams[0])
        meta = page.page.locator("article.assistant .meta")
        await expect(meta).to_contain_text("resumed on another gateway")
        usage = (await two.ask("GET", f"/v1/streams/{page.streams[0]}")).body.decode()
        counted = [json.loads(line[6:]) for line in usage.splitlines() if '"completion_tokens"' in line]
        await expect(meta).to_contain_text(f"{counted[-1]['usage']['completion_tokens']} tokens")


async def test_settings_and_a_branch_reach_the_engine(context: BrowserContext, one: Gate, two: Gate) -> None:  # noqa: F811
    async with tab(context, f"{one.url}/#key={one.key}") as page:
        await page.page.click("#open-settings")
        await page.page.fill("#system", "Answer in verse.")
        await page.page.fill("#temperature", "0.4")
        await page.page.fill("#max-tokens", "12")
        await page.page.click("#settings .primary")
        await page.ask(PROMPT)
        note = page.page.locator("article.assistant .note").last
        await expect(note).to_have_text("Ended at the length limit")
        await page.page.click("button[aria-label='Answer again']")
        await expect(page.page.locator("article.assistant .pager")).to_have_text("2 / 2")

        async def two_streams() -> bool:
            return len(page.streams) == 2

        await eventually(two_streams, "a second stream")
        await page.until_done()
        for stream in page.streams:
            assert len((await text_in_the_log(two, stream)).split()) <= 12


async def test_an_addition_stands_in_its_place_for_its_author_and_a_watcher(
    context: BrowserContext,  # noqa: F811
    one: Gate,
    two: Gate,
) -> None:
    async with tab(context, f"{one.url}/#key={one.key}") as page:
        await _answers_have(page, 1500)
        await page.ask(PROMPT)
        await page.until_words(5)
        stream = page.streams[0]
        await page.ask("Rather of a lake, please")
        await expect(page.page.locator(".inputs .input p")).to_have_text("Rather of a lake, please")
        await page.until_words(5)
        await page.page.click(".share")
        await expect(page.page.locator("#share-copy")).to_be_enabled()
        link = urlsplit(await page.page.input_value("#share-link"))
        await page.page.reload()
        await page.until_words(5)
        await page.page.keyboard.press("Escape")
        await page.until_done()
        reply = await two.ask("GET", f"/v1/streams/{stream}")
        chunks = [json.loads(line[6:]) for line in reply.body.decode().splitlines() if line.startswith("data: {")]
        cut = next(place for place, chunk in enumerate(chunks) if "input" in chunk)
        expected = [await page.should_show(text_of_chunks(part)) for part in (chunks[:cut], chunks[cut:])]
        answers = page.page.locator("article.assistant .content")
        assert [text.strip() for text in await answers.all_text_contents()] == [text.strip() for text in expected]
        async with tab(context, f"{two.url}/watch#{link.fragment}") as watcher:
            seen = watcher.page.locator("article.assistant .content")
            await expect(seen).to_have_count(2)
            await expect(watcher.page.locator(".inputs .input")).to_have_text("Something was added to the answer here.")
            await eventually(lambda: _shows(seen, expected), "the watcher's page to show both answers")


async def _answers_have(page: Tab, tokens: int) -> None:
    """Let the page ask for answers of so many tokens, which last while a slow machine does the next steps."""
    await page.page.click("#open-settings")
    await page.page.fill("#max-tokens", str(tokens))
    await page.page.click("#settings .primary")


async def _shows(seen: Any, expected: list[str]) -> bool:
    return [text.strip() for text in await seen.all_text_contents()] == [text.strip() for text in expected]
