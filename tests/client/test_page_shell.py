"""The chat page before its modules are there: it shows, takes input, and recovers from a file that did not come."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
from playwright.async_api import BrowserContext, Page, Route, expect

from tests.client.fake_gateway import KEY, FakeGateway
from tests.client.test_chat_page import WHOLE, answer, ask, written

pytestmark = pytest.mark.platform


class Held:
    """A file that comes when the test lets it."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def __call__(self, route: Route) -> None:
        await self.released.wait()
        await route.continue_()


@pytest_asyncio.fixture(loop_scope="session")
async def script(context: BrowserContext) -> Held:
    held = Held()
    await context.route("**/chat/main.js", held)
    return held


async def begun(context: BrowserContext, path: str) -> Page:
    page = await context.new_page()
    await page.goto(path, wait_until="commit")
    return page


async def test_a_message_is_taken_before_the_modules_come(
    context: BrowserContext, fake: FakeGateway, script: Held
) -> None:
    page = await begun(context, f"/#key={KEY}")
    await expect(page.locator("#gate")).to_be_hidden()
    await ask(page, "Hello")
    await expect(page.locator("#notice")).to_contain_text("still loading")
    await expect(page.locator("#prompt")).to_have_value("Hello")
    script.released.set()
    await expect(answer(page)).to_have_text(WHOLE)
    await expect(page.locator("#notice")).to_have_text("")
    await expect(page.locator("#prompt")).to_have_value("")
    assert len(fake.streams) == 1


async def test_a_message_that_goes_on_is_not_sent(context: BrowserContext, fake: FakeGateway, script: Held) -> None:
    page = await begun(context, f"/#key={KEY}")
    await ask(page, "Hello")
    await page.locator("#prompt").press_sequentially(" and")
    await expect(page.locator("#notice")).to_have_text("")
    script.released.set()
    await expect(page.locator("#connection")).to_have_text("Connected")
    await expect(page.locator("#send")).to_be_enabled()
    await expect(page.locator("#prompt")).to_have_value("Hello and")
    assert not fake.streams


async def test_a_key_is_taken_before_the_modules_come(context: BrowserContext, script: Held) -> None:
    page = await begun(context, "/")
    await page.fill("#key", KEY)
    await page.press("#key", "Enter")
    await expect(page.locator("#sign-in-error")).to_contain_text("still loading")
    script.released.set()
    await expect(page.locator("#gate")).to_be_hidden()
    await ask(page, "Hello")
    await expect(answer(page)).to_have_text(WHOLE)


async def test_a_wrong_key_that_is_refused_while_other_tabs_are_asked_says_so(
    context: BrowserContext, script: Held
) -> None:
    await context.clock.install()
    page = await begun(context, "/")
    await page.fill("#key", "sk-wrong")
    await page.press("#key", "Enter")
    script.released.set()
    told = page.locator("#sign-in-error")
    await expect(told).to_have_text("This API key is unknown.")
    await context.clock.run_for(1_000)  # no tab lends its token
    assert await told.text_content() == "This API key is unknown."


async def test_a_conversation_shows_before_the_token_comes(page: Page, context: BrowserContext) -> None:
    await ask(page, "Hello")
    await written(page)
    held = Held()
    await context.route("**/v1/tokens", held)
    await page.reload()
    await expect(answer(page)).to_have_text(WHOLE)
    await ask(page, "say:Next")
    await expect(page.locator("article.user").last).to_have_text("say:Next")
    held.released.set()
    await expect(answer(page)).to_have_text("Next")


@pytest.mark.parametrize("path", ["/static/chat/view.js", "/static/chat/main.js", "/static/chat/chat.css"])
async def test_a_page_whose_files_do_not_all_come_loads_again(context: BrowserContext, path: str) -> None:
    is_lost = True

    async def lose(route: Route) -> None:
        await (route.abort() if is_lost else route.continue_())

    await context.route(f"**{path}", lose)
    page = await begun(context, f"/#key={KEY}")
    await expect(page.locator(".broken")).to_contain_text("Trying again")
    await page.fill("#prompt", "Hello")
    is_lost = False
    await expect(page.locator("#connection")).to_have_text("Connected")
    await expect(page.locator("#prompt")).to_have_value("Hello")
    await expect(page.locator(".broken")).to_have_count(0)
    await page.wait_for_load_state()
    assert await page.evaluate("sessionStorage.getItem('sgw.reloads')") is None


async def test_a_module_that_never_comes_is_not_asked_for_without_end(context: BrowserContext) -> None:
    await context.route("**/chat/main.js", lambda route: route.abort())
    await context.add_init_script("sessionStorage.setItem('sgw.reloads', '5')")
    page = await begun(context, f"/#key={KEY}")
    await expect(page.locator(".broken")).to_contain_text("Reload it to try again")
