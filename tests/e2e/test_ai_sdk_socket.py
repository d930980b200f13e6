"""``useChat`` of the AI SDK 7 on its ``WebSocketChatTransport``, unmodified, in Chromium."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from tests.client.browser import PATIENCE_MS
from tests.e2e.conftest import NODE_FOLDER
from tests.e2e.test_ai_sdk import Chat, bundled, chat_page, text_in_the_log
from tests.gateway.processes import Running
from tests.gateway.wire import Gate
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def bundle(node: str) -> str:
    return bundled(NODE_FOLDER / "use_chat_socket.jsx")


@asynccontextmanager
async def socket_page(
    browser: Browser, bundle: str, origin: str, key: str, more: str = "", **body: Any
) -> AsyncIterator[Chat]:
    """The page. Chromium does not know where a page of the test comes from, and asks before it may open a socket."""
    async with (
        await browser.new_context(permissions=["local-network-access"]) as context,
        chat_page(context, bundle, origin, key, more, **body) as page,
    ):
        yield page


async def stream_of(page: Chat) -> str:
    """The id of the last answer's stream, as its metadata has it."""

    async def found() -> str | None:
        count = await page.answers.count()
        return await page.answers.last.get_attribute("data-stream") if count else None

    return await eventually(found, "the metadata", PATIENCE_MS / 1000)  # type: ignore[no-any-return]


async def test_a_chat_lives_on_one_socket(browser: Browser, bundle: str, one: Gate, two: Gate) -> None:
    async with socket_page(browser, bundle, one.url, one.key, maxOutputTokens=40) as page:
        await page.ask("Tell me of rivers.")
        first = await stream_of(page)
        await page.until_said(await text_in_the_log(two, first))
        await expect(page.answers.last).to_have_attribute("data-tokens", "40")
        await page.page.click("#regenerate")
        await eventually(lambda: other_than(page, first), "another answer", PATIENCE_MS / 1000)
        await page.until_ready()
        assert await page.answers.count() == 1
        await page.page.set_input_files("#image", {"name": "dot.png", "mimeType": "image/png", "buffer": DOT})
        await page.ask("What is in the image?")
        await expect(page.answers).to_have_count(2)
        await page.until_ready()
        assert await page.page.locator("article img").count() == 1
        assert page.statuses == [] and len(page.sockets) == 1, "the socket of the first resume carries everything"


async def other_than(page: Chat, stream: str) -> bool:
    return await page.answers.count() == 1 and await page.answers.last.get_attribute("data-stream") not in (
        None,
        stream,
    )


async def test_a_reload_resumes_and_a_stop_ends_the_answer(browser: Browser, bundle: str, one: Gate, two: Gate) -> None:
    """React's strict mode resumes twice, and aborts the first: the answer must live."""
    async with socket_page(browser, bundle, one.url, one.key, maxOutputTokens=5000) as page:
        await page.ask("Tell me of rivers.")
        stream = await stream_of(page)
        for words in (5, 15):
            await page.until_words(words)
            await page.reload()
        await page.until_words(25)
        await expect(page.page.locator("#status")).to_have_text("streaming")  # the words may be those that it stored
        assert (await two.info(stream))["status"] == "live" and await page.answers.count() == 1
        await page.page.click("#stop")
        await two.until_status(stream, "cancelled")
        await page.until_ready()
        said = await page.said()
        assert (await text_in_the_log(two, stream)).startswith(said)
        await page.reload()
        await page.until_ready()
        assert await page.said() == said, "nothing is to resume"


async def test_an_answer_outlives_its_gateway(platform: Running, browser: Browser, bundle: str, one: Gate) -> None:
    first, second = await asyncio.gather(*(asyncio.to_thread(platform.gateway) for _ in range(2)))
    with first as killed, second as other:
        port, other_port = (int(each.facts["url"].rpartition(":")[2]) for each in (killed, other))
        async with (
            Proxy.before(port) as proxy,
            socket_page(browser, bundle, f"http://127.0.0.1:{proxy.port}", platform.key) as page,
        ):
            await page.ask("Tell me of rivers.")
            await page.until_words(5)
            stream = await stream_of(page)
            proxy.point_at(other_port)
            killed.kill()
            await page.until_said(await text_in_the_log(one, stream))
            assert await page.answers.count() == 1 and await stream_of(page) == stream


async def test_an_answer_outlives_a_deploy(platform: Running, browser: Browser, bundle: str, one: Gate) -> None:
    first, second = await asyncio.gather(
        *(asyncio.to_thread(platform.gateway, STREAM_GW_DRAIN_S="0.5") for _ in range(2))
    )
    with first as leaving, second as other:
        port, other_port = (int(each.facts["url"].rpartition(":")[2]) for each in (leaving, other))
        async with (
            Proxy.before(port) as proxy,
            socket_page(browser, bundle, f"http://127.0.0.1:{proxy.port}", platform.key) as page,
        ):
            await page.ask("Tell me of rivers.")
            await page.until_words(5)
            stream = await stream_of(page)
            proxy.point_at(other_port)
            leaving.terminate()
            await page.until_said(await text_in_the_log(one, stream))
            assert await page.answers.count() == 1 and await stream_of(page) == stream


async def test_a_tool_of_the_page_runs_once_and_its_message_goes_on(
    browser: Browser, bundle: str, one: Gate, two: Gate
) -> None:
    async with socket_page(browser, bundle, one.url, one.key, "&tools") as page:
        await page.ask("Ask local_time and tell me of rivers.")
        await page.until_words(5)
        assert await page.page.locator(".tool").all_text_contents() == ["tool-local_time noon"]
        await page.reload()
        await page.until_ready()  # also before the page has its answer again
        await expect(page.page.locator(".tool")).to_have_text(["tool-local_time noon"])
        assert await page.answers.count() == 1


async def test_a_refused_request_is_shown(browser: Browser, bundle: str, one: Gate) -> None:
    async with socket_page(browser, bundle, one.url, one.key, temperature=9) as page:
        await page.ask("Tell me of rivers.")
        # Its status is not looked at: a resume that is answered after the refusal, with nothing to resume, clears it
        await expect(page.page.locator("#error")).to_contain_text("temperature must be 0 to 2")
