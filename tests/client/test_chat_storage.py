"""The chat page where the browser's storage is full or denied."""

from __future__ import annotations

import pytest
from playwright.async_api import BrowserContext, Page, expect

from tests.client.browser import open_page
from tests.client.fake_gateway import KEY
from tests.client.test_chat_page import WHOLE, answer, ask

pytestmark = pytest.mark.platform

FILL = """() => {
    localStorage.removeItem("other");
    let size = 5 << 20;
    for (let step = size; step >= 1; step = Math.floor(step / 2)) {
        try { localStorage.setItem("other", "x".repeat(size)); size += step; } catch { size -= step; }
    }
}"""


FIREFOX = """
    const real = Storage.prototype.setItem;
    Storage.prototype.setItem = function (...entry) {
        try { real.apply(this, entry); }
        catch (error) { throw new DOMException(error.message, "NS_ERROR_DOM_QUOTA_REACHED"); }
    };
"""


@pytest.mark.parametrize("script", ["", FIREFOX], ids=["chromium", "firefox"])
async def test_a_full_storage_ends_no_conversation(script: str, context: BrowserContext) -> None:
    await context.add_init_script(script)
    page = await open_page(context, "/")
    await page.evaluate(FILL)
    await page.fill("#key", KEY)
    await page.press("#key", "Enter")
    for n in (1, 2):
        await ask(page, f"say:Answer {n} in a full browser")
        await expect(answer(page)).to_have_text(f"Answer {n} in a full browser")
        await expect(page.locator("#send")).to_be_visible()
    await expect(page.locator("#announce")).to_contain_text("The answer is complete")
    await expect(page.locator("#notice")).to_contain_text("This browser's storage is full")
    await expect(page.locator("article")).to_have_count(4)
    assert page.errors == []  # type: ignore[attr-defined]


async def test_a_full_storage_gives_up_another_conversation_than_the_one_written(page: Page) -> None:
    for question in ("Oldest", "Middle", "Newest"):
        await page.click("#new")
        await ask(page, question)
        await expect(answer(page)).to_have_text(WHOLE)
    await page.click("text=Oldest")
    await page.evaluate(FILL)
    await ask(page, "say:More")
    await expect(answer(page)).to_have_text("More")
    await expect(page.locator("#send")).to_be_visible()
    await page.reload()
    await expect(page.locator("article.user .content")).to_have_text(["Oldest", "say:More"])
    await expect(page.locator("#conversations li")).to_have_text(["Newest", "Oldest"])


DENIED = """
    for (const name of ["localStorage", "sessionStorage"]) {
        Object.defineProperty(window, name, {
            get() { throw new DOMException("Access is denied for this document.", "SecurityError"); },
        });
    }
"""


async def test_without_a_storage_the_page_works_until_it_is_left(context: BrowserContext) -> None:
    await context.add_init_script(DENIED)
    page = await open_page(context)
    await expect(page.locator("#notice")).to_contain_text("stores nothing")
    await ask(page, "Hello")
    await expect(answer(page)).to_have_text(WHOLE)
    await expect(page.locator("#conversations li")).to_have_text(["Hello"])
    await page.click("#theme")
    await page.reload()
    await expect(page.locator("#gate")).to_be_visible()
    assert page.errors == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/ops", "/docs", "/watch"])
async def test_other_pages_need_no_storage(path: str, context: BrowserContext) -> None:
    await context.add_init_script(DENIED)
    page = await open_page(context, path)
    await page.wait_for_load_state("networkidle")
    assert page.errors == []  # type: ignore[attr-defined]
