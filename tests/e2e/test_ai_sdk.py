"""Vercel's AI SDK, unmodified: ``useChat`` in a browser, the ``ai`` packages 6 and 7 and ``streamText`` in Node."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.async_api import Browser, BrowserContext, Page, Response, Route, expect

from tests.client.browser import PATIENCE_MS
from tests.e2e.conftest import NODE_FOLDER
from tests.e2e.test_node import result, script
from tests.gateway.processes import Running
from tests.gateway.wire import MODEL, Gate, chat, text_of_chunks
from tests.house.tree import ROOT
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

EXAMPLE = ROOT / "examples" / "ai-sdk"
LONG = {"maxOutputTokens": 250, "ignore_eos": True, "seed": 3}
"""An answer of about four seconds."""


@pytest.mark.parametrize("package", ["ai", "ai7"])
async def test_chats_without_a_framework(node: str, one: Gate, two: Gate, package: str) -> None:
    async with script(node, "ai_ui.mjs", one, PACKAGE=package) as process:
        told = await result(process)
    reply = await two.ask("POST", "/v1/chat/completions", {**chat(20, 1), "stream": False})
    assert reply.json["choices"][0]["message"]["content"] == told["text"]
    await two.until_status(told["stopped"], "cancelled")
    assert told["said"] == await text_in_the_log(two, told["stopped"]), "the cancel is exact"


async def test_stream_text(node: str, one: Gate, two: Gate) -> None:
    async with script(node, "ai_stream_text.mjs", one) as process:
        told = await result(process)
    for provider in ("openai", "anthropic"):
        await two.until_status(told[provider]["aborted"], "cancelled")


# --- useChat -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(node: str) -> str:
    """The example's page."""
    return bundled(EXAMPLE / "chat.jsx")


def bundled(page: Path) -> str:
    """The page with the packages of tests/node."""
    done = subprocess.run(
        [NODE_FOLDER / "node_modules/.bin/esbuild", page, "--bundle", "--jsx=automatic", "--format=esm"],
        env={**os.environ, "NODE_PATH": str(NODE_FOLDER / "node_modules")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Chat:
    """The example's page at a gateway, and the streams that the gateway answered it with."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self._url = url
        self.streams: list[str] = []
        self.statuses: list[tuple[str, int]] = []
        self.errors: list[str] = []
        self.sockets: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("websocket", lambda socket: self.sockets.append(socket.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("response", self._note)

    def _note(self, response: Response) -> None:
        if "/v1/ui/chat" in response.url:
            self.statuses.append((response.request.method, response.status))
            stream = response.headers.get("x-stream-id")
            if stream is not None and stream not in self.streams:
                self.streams.append(stream)

    async def load(self) -> None:
        await self.page.goto(self._url)

    async def reload(self) -> None:
        await self.page.reload()

    async def ask(self, words: str) -> None:
        await self.page.fill("#prompt", words)
        await self.page.click("#send")

    @property
    def answers(self) -> Any:
        return self.page.locator('article[data-role="assistant"]')

    async def said(self) -> str:
        return "".join(await self.answers.last.locator(".text").all_text_contents())

    async def until_words(self, count: int) -> None:
        async def so_many() -> bool:
            return await self.answers.count() > 0 and len((await self.said()).split()) > count

        await eventually(so_many, f"{count} words", PATIENCE_MS / 1000)

    async def until_ready(self) -> None:
        await expect(self.page.locator("#status")).to_have_text("ready")

    async def until_said(self, text: str) -> None:
        async def says_it() -> bool:
            return await self.said() == text

        await eventually(says_it, "the whole answer", PATIENCE_MS / 1000)
        await self.until_ready()

    async def resumes(self) -> list[int]:
        """Statuses of the page's attempts to resume; waits for one."""
        return await eventually(lambda: [status for method, status in self.statuses if method == "GET"])  # type: ignore[no-any-return]


@asynccontextmanager
async def chat_page(
    browser: Browser | BrowserContext, bundle: str, origin: str, key: str, more: str = "", **body: Any
) -> AsyncIterator[Chat]:
    """The page, on the gateway's own origin."""

    async def serve(route: Route) -> None:
        if route.request.url.endswith(".js"):
            await route.fulfill(body=bundle, content_type="text/javascript")
        else:
            await route.fulfill(path=EXAMPLE / "index.html", content_type="text/html")

    page = await browser.new_page()
    await page.route("**/ai-sdk/**", serve)
    settings = quote(json.dumps({"model": MODEL, **LONG, **body}))
    name = f"chat {secrets.token_hex(4)}/ü"
    url = f"{origin}/ai-sdk/?chat={quote(name)}&body={settings}{more}#key={key}"
    made = Chat(page, url)
    await made.load()
    await made.until_ready()
    yield made
    assert made.errors == []
    await page.close()


async def text_in_the_log(gate: Gate, stream: str) -> str:
    reply = await gate.ask("GET", f"/v1/streams/{stream}?dialect=openai.chat")
    lines = [line[6:] for line in reply.body.decode().splitlines() if line.startswith("data: {")]
    return text_of_chunks([chunk for chunk in map(json.loads, lines) if "choices" in chunk])


async def test_an_answer_streams_and_the_page_is_reloaded_just_after_its_end(
    browser: Browser, bundle: str, one: Gate
) -> None:
    # Long enough to be seen streaming on a machine that stands still for a second
    async with chat_page(browser, bundle, one.url, one.key, maxOutputTokens=200) as page:
        assert await page.resumes() in ([204], [204, 204]), "a new chat has nothing to resume"
        await page.ask("Tell me of rivers.")
        await expect(page.page.locator("#status")).to_have_text("streaming")
        text = await text_in_the_log(one, page.streams[0])
        await page.until_said(text)
        for _ in range(2):
            await page.reload()
            await page.until_said(text)
        assert await page.answers.count() == 1 and len(page.streams) == 1


async def test_a_page_that_kept_nothing_gets_the_answer_of_the_moment_before(
    browser: Browser, bundle: str, one: Gate, two: Gate
) -> None:
    """The stream ends between the unload and the load of the page."""
    async with chat_page(browser, bundle, one.url, one.key, maxOutputTokens=60) as page:
        await page.ask("Tell me of rivers.")
        await page.until_words(3)
        await page.page.goto("about:blank")
        await two.until_status(page.streams[0], "completed")
        await page.load()
        await page.until_said(await text_in_the_log(two, page.streams[0]))
        assert await page.answers.count() == 1


async def test_a_page_reloaded_in_the_middle_resumes_the_same_message(
    browser: Browser, bundle: str, one: Gate, two: Gate
) -> None:
    async with chat_page(browser, bundle, one.url, one.key) as page:
        await page.ask("Tell me of rivers.")
        for words in (5, 15):
            await page.until_words(words)
            await page.reload()
        await page.until_said(await text_in_the_log(two, page.streams[0]))
        assert await page.answers.count() == 1 and len(page.streams) == 1, "generated once, shown once"
        assert 200 in await page.resumes()
        await page.ask("And of lakes?")
        await expect(page.answers).to_have_count(2)


async def test_the_shortest_page_resumes_too(browser: Browser, node: str, one: Gate, two: Gate) -> None:
    async with chat_page(browser, bundled(NODE_FOLDER / "use_chat.jsx"), one.url, one.key) as page:
        await page.ask("Tell me of rivers.")
        for words in (5, 15):
            await page.until_words(words)
            await page.reload()
        await page.until_said(await text_in_the_log(two, page.streams[0]))
        assert await page.answers.count() == 1 and len(page.streams) == 1


async def test_an_answer_outlives_its_gateway(platform: Running, browser: Browser, bundle: str, one: Gate) -> None:
    first, second = await asyncio.gather(*(asyncio.to_thread(platform.gateway) for _ in range(2)))
    with first as killed, second as other:
        port, other_port = (int(each.facts["url"].rpartition(":")[2]) for each in (killed, other))
        async with (
            Proxy.before(port) as proxy,
            chat_page(browser, bundle, f"http://127.0.0.1:{proxy.port}", platform.key) as page,
        ):
            await page.ask("Tell me of rivers.")
            await page.until_words(5)
            proxy.point_at(other_port)
            killed.kill()
            await page.until_said(await text_in_the_log(one, page.streams[0]))
            assert await page.answers.count() == 1 and len(page.streams) == 1


async def test_an_answer_outlives_a_deploy(platform: Running, browser: Browser, bundle: str, one: Gate) -> None:
    """A gateway that has drained cuts what still runs: an error chunk would end the chat."""
    first, second = await asyncio.gather(
        *(asyncio.to_thread(platform.gateway, STREAM_GW_DRAIN_S="0.5") for _ in range(2))
    )
    with first as leaving, second as other:
        port, other_port = (int(each.facts["url"].rpartition(":")[2]) for each in (leaving, other))
        async with (
            Proxy.before(port) as proxy,
            chat_page(browser, bundle, f"http://127.0.0.1:{proxy.port}", platform.key) as page,
        ):
            await page.ask("Tell me of rivers.")
            await page.until_words(5)
            proxy.point_at(other_port)
            leaving.terminate()
            await page.until_said(await text_in_the_log(one, page.streams[0]))
            assert await page.answers.count() == 1 and len(page.streams) == 1
            assert 200 in await page.resumes()


async def test_a_stop_ends_the_stream_and_a_reload_leaves_what_was_said(
    browser: Browser, bundle: str, one: Gate, two: Gate
) -> None:
    async with chat_page(browser, bundle, one.url, one.key, maxOutputTokens=5000) as page:
        await page.ask("Tell me of rivers.")
        await page.until_words(5)
        await page.page.click("#stop")
        await two.until_status(page.streams[0], "cancelled")
        await page.until_said(await text_in_the_log(two, page.streams[0]))
        said = await page.said()
        page.statuses.clear()
        await page.reload()
        await page.until_said(said)
        assert set(await page.resumes()) == {204} and len(page.streams) == 1


async def test_a_resumed_answer_is_stopped_too(browser: Browser, bundle: str, one: Gate, two: Gate) -> None:
    async with chat_page(browser, bundle, one.url, one.key, maxOutputTokens=5000) as page:
        await page.ask("Tell me of rivers.")
        await page.until_words(5)
        await page.reload()
        await page.until_words(10)
        await page.page.click("#stop")
        await two.until_status(page.streams[0], "cancelled")
        await page.until_said(await text_in_the_log(two, page.streams[0]))


async def test_a_tool_of_the_page_runs_once_and_its_message_goes_on(
    browser: Browser, bundle: str, one: Gate, two: Gate
) -> None:
    async with chat_page(browser, bundle, one.url, one.key, "&tools") as page:
        await page.ask("Ask local_time and tell me of rivers.")
        await page.until_words(5)
        tool = page.page.locator(".tool")
        told = await tool.all_text_contents()
        assert len(told) == 1 and told[0].startswith("local_time(") and "output" not in told[0]
        await page.reload()
        await page.until_said(await text_in_the_log(two, page.streams[-1]))
        assert await tool.all_text_contents() == told, "the replay holds the step before"
        assert await page.answers.count() == 1 and len(page.streams) == 2


async def test_a_refused_request_is_shown(browser: Browser, bundle: str, one: Gate) -> None:
    async with chat_page(browser, bundle, one.url, one.key, temperature=9) as page:
        await page.ask("Tell me of rivers.")
        await expect(page.page.locator("#error")).to_contain_text("temperature must be 0 to 2")
        await expect(page.page.locator("#status")).to_have_text("error")
