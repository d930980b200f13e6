"""axe-core finds nothing on the chat page in any of its states: in both themes on a desktop, and on a phone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.client.browser import open_page
from tests.client.fake_gateway import KEY, FakeGateway
from tests.client.test_chat_features import PYTHON, file, png, settle, shared
from tests.client.test_chat_page import answer, ask

pytestmark = pytest.mark.platform

AXE = Path(__file__).parents[1] / "node" / "node_modules" / "axe-core" / "axe.min.js"
RUN = """async () => {
    const { violations } = await axe.run(document, { resultTypes: ["violations"] });
    return violations.map(({ id, nodes }) => [id, nodes.map(({ target, failureSummary }) => [target, failureSummary])]);
}"""
DEVICES: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1280, "height": 800}},
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "has_touch": True,
        "is_mobile": True,
        "device_scale_factor": 2,
    },
}
RIVER = (
    "Backpressure is how a **slow reader** tells a fast writer to wait.\n\n"
    "- A sink fills when the tap runs faster than the drain.\n- Somebody turns the tap down.\n\n"
)
STATES: dict[str, Callable[[Page, FakeGateway], Awaitable[None]]] = {}

State = Callable[[Page, FakeGateway], Awaitable[None]]


def state(show: State) -> State:
    STATES[show.__name__] = show
    return show


async def _begin(page: Page, fake: FakeGateway, text: str, frames: int) -> None:
    fake.hold_at = frames
    await ask(page, f"say:{text}")
    while not fake.streams or len(list(fake.streams.values())[-1].frames) < frames:
        await asyncio.sleep(0.01)


@state
async def empty(page: Page, fake: FakeGateway) -> None:
    await expect(page.locator("#empty")).to_be_visible()


@state
async def streaming(page: Page, fake: FakeGateway) -> None:
    await _begin(page, fake, RIVER * 2, 20)
    await expect(page.locator(".share")).to_be_visible()


@state
async def waiting(page: Page, fake: FakeGateway) -> None:
    await _begin(page, fake, RIVER, 0)
    await expect(page.locator("article.waiting")).to_be_visible()


@state
async def steered(page: Page, fake: FakeGateway) -> None:
    await _begin(page, fake, RIVER, 20)
    await ask(page, "say:Explain it for a child: what happens to the water?")
    await expect(page.locator(".inputs .input")).to_be_visible()
    while len(list(fake.streams.values())[-1].frames) < 21:
        await asyncio.sleep(0.01)
    fake.hold_at = 27
    list(fake.streams.values())[-1].steered.set()
    await expect(page.locator("article.assistant .content").last).to_contain_text("child: what")
    await page.fill("#prompt", "And in one sentence")


@state
async def unapplied(page: Page, fake: FakeGateway) -> None:
    await _begin(page, fake, RIVER, 20)
    fake.refuse_inputs = "waits_for_tools"
    await ask(page, "say:Later")
    await expect(page.locator(".unapplied .input")).to_contain_text("Not added")
    fake.release()
    await expect(page.locator(".unapplied button")).to_be_visible()


@state
async def complete(page: Page, fake: FakeGateway) -> None:
    await ask(page, "say:" + RIVER + PYTHON + "\n| a | b |\n| --- | --- |\n| 1 | 2 |")
    await expect(page.locator("#send")).to_be_visible()
    await expect(page.locator(".hl-keyword").first).to_be_visible()


@state
async def stopped(page: Page, fake: FakeGateway) -> None:
    await _begin(page, fake, RIVER * 2, 20)
    await page.click("#stop")
    await expect(answer(page).locator("xpath=../*[@class='note']")).to_have_text("Stopped at token 20")


@state
async def error(page: Page, fake: FakeGateway) -> None:
    refusal = {"code": "pool_full", "message": "The queue for model 'sim-7b' is full.", "retriable": False}
    fake.faults.refuse_create.append(refusal)
    await ask(page, "Hello")
    await expect(page.locator(".note.failed")).to_be_visible()


@state
async def offline(page: Page, fake: FakeGateway) -> None:
    await _begin(page, fake, RIVER * 2, 20)
    await page.context.set_offline(True)
    fake.cut_all()
    await expect(page.locator(".note.held")).to_be_visible()


@state
async def moved(page: Page, fake: FakeGateway) -> None:
    await _begin(page, fake, RIVER * 2, 20)
    await expect(answer(page)).to_contain_text("Backpressure")
    fake.name = "gw_2"
    fake.cut_all()
    stream = next(iter(fake.streams.values()))
    while stream.reads < 2:
        await asyncio.sleep(0.01)
    await fake.say_all({"t": "ok", "stream": stream.id, "epoch": "2.bb", "head": 20, "status": "live"})
    fake.release()
    await expect(page.locator(".assistant .meta")).to_contain_text("continued on another replica")


@state
async def editing(page: Page, fake: FakeGateway) -> None:
    await complete(page, fake)
    await page.hover("article.user")
    await page.click("article.user button[aria-label='Edit the message']")
    await expect(page.locator(".editor textarea")).to_be_focused()


@state
async def branches(page: Page, fake: FakeGateway) -> None:
    await ask(page, "say:" + RIVER)
    await page.click("button[aria-label='Answer again']")
    await expect(page.locator("article.assistant .pager")).to_have_text("2 / 2")
    await expect(page.locator("#send")).to_be_visible()


@state
async def settings(page: Page, fake: FakeGateway) -> None:
    await settle(page, system="Answer in verse.", temperature="0.3")
    await page.click("#open-settings")


@state
async def share(page: Page, fake: FakeGateway) -> None:
    await _begin(page, fake, RIVER * 2, 20)
    await shared(page, fake)


@state
async def images(page: Page, fake: FakeGateway) -> None:
    fake.modalities = ["text", "image"]
    await page.reload()
    await expect(page.locator("#attach")).to_be_visible()
    await page.set_input_files("#files", [file("grey.png", png(640, 360))])
    await ask(page, "say:A grey picture.")
    await expect(page.locator("article.user img")).to_be_visible()
    await expect(page.locator("#send")).to_be_visible()
    await page.set_input_files("#files", [file("b.png", png(64, 64)), file("c.png", png(64, 64)), file("d.txt", b"x")])
    await expect(page.locator("#attached li")).to_have_count(2)


@state
async def sidebar(page: Page, fake: FakeGateway) -> None:
    rivers = "say:All that I want to know of the longest rivers of Europe: the Rhine"
    for text in (rivers, "say:A very long title of a conversation about mountains", "say:Seas"):
        await page.evaluate("document.getElementById('new').click()")
        await ask(page, text)
        await expect(page.locator("#send")).to_be_visible()
    if await page.locator("#menu").is_visible():
        await page.click("#menu")
    await page.locator("#conversations li").first.hover()
    await page.locator(".remove").first.click()
    await expect(page.locator("#toast")).to_be_visible()
    await page.fill("#search", "rhine")
    await expect(page.locator("#conversations small").first).to_be_visible()


@state
async def watching(page: Page, fake: FakeGateway) -> None:
    await _begin(page, fake, RIVER * 2, 20)
    await page.goto(f"/watch#stream={next(iter(fake.streams))}&token={KEY}")
    await expect(answer(page)).to_contain_text("Backpressure")


@state
async def watched(page: Page, fake: FakeGateway) -> None:
    await watching(page, fake)
    fake.release()
    await expect(page.locator("#about")).to_contain_text("It has ended")


@state
async def expired(page: Page, fake: FakeGateway) -> None:
    await page.goto("/watch#stream=resp_1&token=cap_x")
    await expect(page.locator("#log .failed")).to_be_visible()


@state
async def signed_out(page: Page, fake: FakeGateway) -> None:
    await page.evaluate("document.getElementById('sign-out').click()")
    await expect(page.locator("#gate")).to_be_visible()


@pytest_asyncio.fixture(loop_scope="session", params=list(DEVICES))
async def look(request: pytest.FixtureRequest, browser: Browser, fake: FakeGateway) -> AsyncIterator[tuple[Page, str]]:
    context = await browser.new_context(base_url=fake.url, **DEVICES[request.param], reduced_motion="reduce")
    page = await open_page(context)
    yield page, request.param
    assert page.errors == []  # type: ignore[attr-defined]
    fake.release()
    await context.close()


@pytest.mark.parametrize("name", list(STATES))
async def test_axe_finds_nothing(look: tuple[Page, str], name: str, fake: FakeGateway) -> None:
    page, device = look
    await expect(page.locator("#app")).to_be_visible()
    await STATES[name](page, fake)
    await page.evaluate(AXE.read_text("utf-8") + "; undefined")
    for theme in ("light", "dark") if device == "desktop" else ("dark",):  # colours do not depend on the device
        await page.emulate_media(color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
        await page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        if folder := os.environ.get("PAGE_SHOTS"):
            await page.screenshot(path=Path(folder) / f"{name}-{device}-{theme}.png")
        assert await page.evaluate(RUN) == []
    if device == "phone":
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390, "nothing scrolls sideways"
