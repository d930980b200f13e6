"""The chat page adds to an answer that runs: the input stands in its place, over reloads, tabs and requests."""

from __future__ import annotations

import asyncio

import pytest
from playwright.async_api import BrowserContext, Page, expect

from tests.client.browser import open_page
from tests.client.fake_gateway import FakeGateway
from tests.client.test_chat_features import bodies, said
from tests.client.test_chat_page import ask
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

FIRST = "word1 word2 word3 word4 word5"


async def begun(page: Page, fake: FakeGateway) -> None:
    """An answer that has five words and waits."""
    fake.hold_at = 5
    await ask(page, "Hello")
    await expect(page.locator("article.assistant .content").first).to_have_text(FIRST)


async def whole(page: Page, *texts: str) -> None:
    """The answer's texts, each input after the one that it cut."""
    await expect(page.locator("article.assistant :is(.content, .inputs .input p)")).to_have_text(list(texts))


async def test_an_input_stands_where_it_was_applied_and_the_next_answer_follows(
    page: Page,
    fake: FakeGateway,
) -> None:
    await begun(page, fake)
    await expect(page.locator("#send")).to_be_hidden()
    await expect(page.locator("#prompt")).to_have_attribute("placeholder", "Add to this answer")
    await page.fill("#prompt", "say:Shorter then.")
    await expect(page.locator("#send")).to_be_visible()
    await expect(page.locator("#stop")).to_be_visible()
    await page.press("#prompt", "Enter")
    await whole(page, FIRST, "say:Shorter then.", "")
    assert await page.input_value("#prompt") == ""
    await expect(page.locator(".awaiting")).to_be_visible()
    await page.reload()
    await whole(page, FIRST, "say:Shorter then.", "")
    fake.release()
    await whole(page, FIRST, "say:Shorter then.", "Shorter then.")
    await expect(page.locator("#announce")).to_contain_text("The answer is complete")
    await page.reload()
    await whole(page, FIRST, "say:Shorter then.", "Shorter then.")
    assert len(fake.streams) == 1 and list(fake.inputs.values()) == ["say:Shorter then."]
    await ask(page, "say:Next")
    await expect(page.locator("article.assistant .content").last).to_have_text("Next")
    assert said(bodies(fake)[-1]) == [
        ("user", "Hello"),
        ("assistant", FIRST),
        ("user", "say:Shorter then."),
        ("assistant", "Shorter then."),
        ("user", "say:Next"),
    ]


async def test_an_input_before_a_reload_is_sent_once(page: Page, fake: FakeGateway) -> None:
    await begun(page, fake)
    fake.faults.drop_acks = 1
    await ask(page, "say:Once")
    await expect(page.locator(".input")).to_be_visible()
    await page.reload()
    await eventually(lambda: fake.inputs, "the input to come again")  # else it would cut the answer at a later word
    fake.release()
    await whole(page, FIRST, "say:Once", "Once")
    assert list(fake.inputs.values()) == ["say:Once"]


async def test_a_replay_has_the_input_in_its_place(page: Page, fake: FakeGateway) -> None:
    await begun(page, fake)
    await ask(page, "say:Two words")
    await whole(page, FIRST, "say:Two words", "")
    refusal = {"code": "cursor_gone", "message": "gone", "retriable": False}
    fake.faults.refuse_subs = [refusal]
    await page.reload()
    fake.release()
    await whole(page, FIRST, "say:Two words", "Two words")


async def test_several_inputs_and_another_tab(
    page: Page,
    context: BrowserContext,
    fake: FakeGateway,
) -> None:
    await begun(page, fake)
    other = await open_page(context)
    await other.click("#conversations button")
    await whole(other, FIRST)
    for text in ("say:One", "say:Two"):
        await ask(page, text)
        await expect(page.locator(".inputs .input p").last).to_have_text(text)
    fake.release()
    for tab in (page, other):
        await whole(tab, FIRST, "say:One", "say:Two", "Two")
    assert other.errors == []  # type: ignore[attr-defined]


async def test_an_input_that_is_refused_is_kept_and_can_be_sent_by_itself(
    page: Page,
    fake: FakeGateway,
) -> None:
    await begun(page, fake)
    fake.refuse_inputs = "waits_for_tools"
    await ask(page, "say:Later")
    left = page.locator(".unapplied .input")
    await expect(left).to_contain_text("Not added: the answer waits for the result of a tool.")
    await expect(left.locator("button")).to_have_count(0)
    fake.release()
    await left.locator("button").click()
    await expect(page.locator("article.user .content")).to_have_text(["Hello", "say:Later"])
    await expect(page.locator("article.assistant .content").last).to_have_text("Later")
    await expect(left).to_have_count(0)


async def test_an_input_that_comes_after_the_end_is_kept(page: Page, fake: FakeGateway) -> None:
    await begun(page, fake)
    fake.faults.silent = True  # the end does not reach the page
    fake.release()
    stream = next(iter(fake.streams.values()))
    while stream.status == "live":
        await asyncio.sleep(0.01)
    await ask(page, "say:Too late")
    await expect(page.locator(".input.sent")).to_contain_text("Adding to the answer")
    fake.faults.silent = False
    fake.cut_all()
    await expect(page.locator(".unapplied .input")).to_contain_text("Not added: the answer had ended.")
    await page.reload()
    await page.click("text=Send as a message")
    await expect(page.locator("article.assistant .content").last).to_have_text("Too late")
