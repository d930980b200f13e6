"""A browser's own EventSource and WebSocket, and the chat page, on a real platform."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, WebSocket, expect

from tests.client.browser import PATIENCE_MS
from tests.gateway.processes import Running
from tests.gateway.wire import Gate, chat, events, text_of_chunks
from tests.support.nginx import NginxServer
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

EVENT_SOURCE = """(url) => new Promise((resolve) => {
    const events = [];
    let opened = 0;
    const source = new EventSource(url, { withCredentials: true });
    source.onopen = () => { opened += 1; };
    source.onmessage = ({ data, lastEventId }) => {
        events.push([lastEventId, data]);
        window.seen = events.length;
    };
    source.onerror = () => {
        if (source.readyState === EventSource.CLOSED) resolve({ events, opened });
    };
})"""

COOKIE = """async (token) => {
    const headers = { Authorization: `Bearer ${token}` };
    return (await fetch("/v1/cookie", { method: "POST", headers })).status;
}"""

LOOK = """async (url) => {
    await fetch(url, { method: "HEAD", mode: "no-cors", credentials: "include" });
}"""

SOCKET = """({ url, token, body }) => new Promise((resolve, reject) => {
    const socket = new WebSocket(url, ["tokenstream.v1", `bearer.${token}`]);
    const messages = [];
    socket.onclose = ({ code }) => reject(new Error(`closed with ${code}`));
    socket.onmessage = ({ data }) => {
        const message = JSON.parse(data);
        messages.push(message);
        if (message.t === "hi") {
            const create = { t: "create", ch: 1, dialect: "openai.chat", body };
            socket.send(JSON.stringify(create));
        }
        if (message.t === "end") {
            socket.onclose = ({ code, wasClean }) => resolve({ messages, protocol: socket.protocol, code, wasClean });
            socket.close(1000);
        }
    };
})"""

RENDERED = """async (text) => {
    const { MarkdownView } = await import("/static/markdown.js");
    const root = document.createElement("div");
    new MarkdownView(root).set(text);
    return root.textContent;
}"""


async def whole_text(gate: Gate, tokens: int, seed: int) -> str:
    reply = await gate.ask("POST", "/v1/chat/completions", {**chat(tokens, seed), "stream": False})
    text: str = reply.json["choices"][0]["message"]["content"]
    return text


async def signed_in(browser: Browser | BrowserContext, origin: str, token: str) -> Page:
    """A page of the gateway whose script has had its token made a cookie."""
    page = await browser.new_page()
    await page.goto(f"{origin}/healthz")
    assert await page.evaluate(COOKIE, token) == 204
    assert await page.evaluate("document.cookie") == "", "no script can read it"
    return page


async def mint(gate: Gate, **asked: Any) -> str:
    reply = await gate.ask("POST", "/v1/tokens", asked)
    token: str = reply.json["token"]
    return token


BROWSER_RETRY_S = 3.0
"""Chromium's own pause before an EventSource reconnects; a gateway's ``retry`` field asks for less."""


async def check_whole(told: dict[str, Any], gate: Gate, stream: str) -> None:
    """The events are those of one uncut answer, byte by byte, and the 204 kept the browser away."""
    body = (await gate.ask("GET", f"/v1/streams/{stream}")).body
    assert told["events"] == [[event.id, event.data] for event in events(body)]
    assert told["opened"] == 2, "one connection was lost"


async def test_event_source_resumes_by_itself(browser: Browser, one: Gate, two: Gate) -> None:
    async with Proxy.before(two.port) as proxy:
        page = await signed_in(browser, f"http://127.0.0.1:{proxy.port}", await mint(one, scopes=["read"]))
        stream = await one.background(300, seed=7)
        reading = asyncio.create_task(page.evaluate(EVENT_SOURCE, f"/v1/streams/{stream}"))
        await page.wait_for_function("window.seen > 10")
        cut_at = asyncio.get_running_loop().time()
        proxy.cut_all()
        told = await reading
        await page.close()
    # When the browser dials, not when it is answered: a busy machine delays the answer
    assert min(at for at in proxy.accepted_at if at > cut_at) < cut_at + BROWSER_RETRY_S
    await check_whole(told, one, stream)


async def test_event_source_outlives_its_gateway(platform: Running, browser: Browser, one: Gate) -> None:
    env = {"STREAM_GW_TOKEN_SECRET": secrets.token_hex(16)}
    first, second = await asyncio.gather(*(asyncio.to_thread(platform.gateway, **env) for _ in range(2)))
    with first as killed, second as other:
        gates = [Gate(process.facts["url"], process.pid, platform.key) for process in (killed, other)]
        async with Proxy.before(gates[0].port) as proxy:
            page = await signed_in(browser, f"http://127.0.0.1:{proxy.port}", await mint(gates[1], scopes=["read"]))
            stream = await one.background(300, seed=9)  # once the page is there, or it might end before
            reading = asyncio.create_task(page.evaluate(EVENT_SOURCE, f"/v1/streams/{stream}"))
            await page.wait_for_function("window.seen > 10")
            killed_at = asyncio.get_running_loop().time()
            proxy.point_at(gates[1].port)
            killed.kill()
            told = await reading
            await page.close()
        assert min(at for at in proxy.accepted_at if at > killed_at) < killed_at + BROWSER_RETRY_S
        await check_whole(told, one, stream)


async def test_event_source_of_another_site_has_no_cookie(context: BrowserContext, one: Gate) -> None:
    stream = await one.background(10)
    where = f"{one.url}/v1/streams/{stream}"
    page = await signed_in(context, one.url, await mint(one, scopes=["read"]))

    async def status(page: Page) -> int:
        async with page.expect_response(where) as response:
            await page.evaluate(LOOK, where)
        return (await response.value).status

    assert await status(page) == 200
    elsewhere = await context.new_page()
    await elsewhere.goto(f"http://localhost:{one.port}/healthz")
    assert await status(elsewhere) == 401
    told = await elsewhere.evaluate(EVENT_SOURCE, where)
    assert (told["events"], told["opened"]) == ([], 0)
    assert await page.evaluate("async () => (await fetch('/v1/cookie', { method: 'DELETE' })).status") == 204
    assert await status(page) == 401


async def test_event_source_without_a_key_is_refused_and_stays_away(browser: Browser, one: Gate) -> None:
    stream = await one.background(10)
    page = await browser.new_page()
    await page.goto(f"{one.url}/healthz")
    told = await page.evaluate(EVENT_SOURCE, f"{one.url}/v1/streams/{stream}")
    assert (told["events"], told["opened"]) == ([], 0)
    await page.close()


async def test_web_socket_with_a_capability_token(browser: Browser, one: Gate, two: Gate) -> None:
    reply = await one.ask("POST", "/v1/tokens", {"scopes": ["create", "read"]})
    page = await browser.new_page()
    await page.goto(f"{two.url}/healthz")
    arguments = {"url": f"ws{two.url[4:]}/v1/stream", "token": reply.json["token"], "body": chat(30, 8)}
    told = await page.evaluate(SOCKET, arguments)
    await page.close()
    assert told["protocol"] == "tokenstream.v1" and told["code"] == 1000 and told["wasClean"]
    chunks = [chunk for message in told["messages"] if message["t"] == "d" for chunk in message["f"]]
    assert text_of_chunks(chunks) == await whole_text(one, 30, 8)


class Tab:
    """One tab of the chat page, and the streams that its sockets were told of."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.streams: list[str] = []
        self.sockets = 0
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda line: self.errors.append(line.text) if "Content Security" in line.text else None)
        page.on("websocket", self._socket)

    def _socket(self, socket: WebSocket) -> None:
        self.sockets += 1
        socket.on("framereceived", self._message)

    def _message(self, raw: str | bytes) -> None:
        message: dict[str, Any] = json.loads(raw)
        if message["t"] == "ok" and message["stream"] not in self.streams:
            self.streams.append(message["stream"])

    @property
    def answer(self) -> Any:
        return self.page.locator("article.assistant .content").last

    async def ask(self, text: str) -> None:
        await self.page.fill("#prompt", text)
        await self.page.press("#prompt", "Enter")

    async def until_words(self, count: int) -> None:
        async def so_many() -> bool:
            return len((await self.shown()).split()) > count

        await eventually(so_many, f"{count} words")

    async def until_done(self) -> None:
        await expect(self.page.locator("#send")).to_be_visible()

    async def shown(self) -> str:
        text: str = await self.answer.text_content()
        return text

    async def should_show(self, text: str) -> str:
        rendered: str = await self.page.evaluate(RENDERED, text)
        return rendered


@asynccontextmanager
async def tab(context: BrowserContext, url: str) -> AsyncIterator[Tab]:
    made = Tab(await context.new_page())
    await made.page.goto(url)
    yield made
    assert made.errors == []
    await made.page.close()


@pytest_asyncio.fixture(loop_scope="session")
async def context(browser: Browser, one: Gate) -> AsyncIterator[BrowserContext]:
    made = await browser.new_context()
    yield made
    await made.close()


async def text_in_the_log(gate: Gate, stream: str) -> str:
    reply = await gate.ask("GET", f"/v1/streams/{stream}")
    lines = [line[6:] for line in reply.body.decode().splitlines() if line.startswith("data: {")]
    return text_of_chunks(json.loads(line) for line in lines)


PROMPT = "Tell me a long story of a river"


async def check(tab: Tab, gate: Gate, stream: str) -> None:
    """The page shows the stream's text, whole and once."""
    await tab.until_done()
    text = await text_in_the_log(gate, stream)
    assert len(text.split()) > 30
    whole = await tab.should_show(text)

    async def shows_it() -> bool:
        return await tab.shown() == whole

    # A page that has just been loaded looks done before it has begun to resume
    await eventually(shows_it, "the page to show the stream whole")
    await tab.until_done()
    assert await tab.shown() == whole


ALLOWED = """(url) => new Promise((resolve) => {
    document.addEventListener("securitypolicyviolation", ({ effectiveDirective }) => resolve(effectiveDirective));
    const socket = new WebSocket(url, ["tokenstream.v1"]);
    socket.onopen = socket.onclose = () => resolve("allowed");
})"""


async def test_the_page_connects_to_its_own_gateway_only(browser: Browser, one: Gate, two: Gate) -> None:
    for gate, outcome in ((one, "allowed"), (two, "connect-src")):
        page = await browser.new_page()
        await page.goto(f"{one.url}/")
        assert await page.evaluate(ALLOWED, f"ws://127.0.0.1:{gate.port}/v1/ws") == outcome
        await page.close()


async def test_the_chat_page_reloaded_in_the_middle(context: BrowserContext, one: Gate, two: Gate) -> None:
    async with tab(context, f"{one.url}/#key={one.key}") as page:
        assert await page.page.evaluate("location.hash") == ""
        await page.ask(PROMPT)
        for words in (5, 15):
            await page.until_words(words)
            await page.page.reload()
        await check(page, two, page.streams[0])
        assert len(page.streams) == 1, "generated once"
        await page.page.reload()
        await check(page, two, page.streams[0])


async def test_the_chat_page_offline_and_back(context: BrowserContext, one: Gate, two: Gate) -> None:
    async with Proxy.before(one.port) as proxy, tab(context, f"http://127.0.0.1:{proxy.port}/#key={one.key}") as page:
        await page.ask(PROMPT)
        await page.until_words(5)
        await context.set_offline(True)
        proxy.refuse = True
        proxy.cut_all()
        await expect(page.page.locator("#connection")).to_have_text("Offline")
        head = (await two.info(page.streams[0]))["head"]

        async def went_on() -> bool:
            info = await two.info(page.streams[0])
            return bool(info["head"] > head + 10 or info["status"] != "live")

        await eventually(went_on, "the answer to go on without its reader")
        assert page.sockets == 1, "nothing is tried while offline"
        proxy.refuse = False
        await context.set_offline(False)
        await check(page, two, page.streams[0])
        assert len(page.streams) == 1


async def test_the_chat_page_stops(context: BrowserContext, one: Gate, two: Gate) -> None:
    async with tab(context, f"{one.url}/#key={one.key}") as page:
        await page.ask(PROMPT)
        await page.until_words(5)
        await page.page.click("#stop")
        await expect(page.page.locator("article .note").last).to_have_text(re.compile(r"^Stopped at token \d+$"))
        await two.until_status(page.streams[0], "cancelled")
        assert await page.shown() == await page.should_show(await text_in_the_log(two, page.streams[0]))


async def test_two_tabs_follow_one_stream(context: BrowserContext, one: Gate, two: Gate) -> None:
    async with tab(context, f"{one.url}/#key={one.key}") as first:
        await first.ask(PROMPT)
        await first.until_words(5)
        async with tab(context, f"{one.url}/") as second:
            await second.until_words(5)
            for page in (first, second):
                await check(page, two, first.streams[0])
            assert first.streams == second.streams
            assert await first.shown() == await second.shown()


async def test_the_chat_page_survives_its_network(context: BrowserContext, one: Gate, two: Gate) -> None:
    async with Proxy.before(one.port) as proxy, tab(context, f"http://127.0.0.1:{proxy.port}/#key={one.key}") as page:
        # Bytes and not moments: a slow machine may deliver the answer's rest with one replay
        proxy.cut_after_bytes(1500, times=3)
        await page.ask(PROMPT)
        await eventually(lambda: proxy.cuts_left == 0, "three cuts in the answer's middle")
        await check(page, two, page.streams[0])
        assert page.sockets >= 4 and len(page.streams) == 1


async def test_a_proxy_that_passes_no_websockets_is_named(context: BrowserContext, one: Gate) -> None:
    plain = f"server {{ listen %s; location / {{ proxy_pass {one.url}; }} }}"
    with NginxServer(lambda address: plain % address) as nginx:
        async with tab(context, f"{nginx.url}/#key={one.key}") as page:
            await page.ask(PROMPT)
            await expect(page.page.locator("#connection")).to_have_text("WebSockets blocked")
            told = page.page.locator("article.assistant")
            await expect(told).to_contain_text("a proxy on the way does not pass them")
