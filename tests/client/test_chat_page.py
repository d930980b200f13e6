from __future__ import annotations

import asyncio

import pytest
from playwright.async_api import Browser, BrowserContext, Page, Route, expect

from tests.client.browser import open_page
from tests.client.fake_gateway import KEY, FakeGateway

pytestmark = pytest.mark.platform

WHOLE = " ".join(f"word{n}" for n in range(1, 41))


async def ask(page: Page, text: str) -> None:
    await page.fill("#prompt", text)
    await page.press("#prompt", "Enter")


def answer(page: Page):  # type: ignore[no-untyped-def]
    return page.locator("article.assistant .content").last


async def written(page: Page) -> None:
    """Wait until the answer is complete and drawn; the page may draw it some frames after it can send again."""
    await expect(page.locator("#send")).to_be_visible()
    await expect(page.locator("article.assistant").last).to_have_attribute("aria-busy", "false")


async def frames(fake: FakeGateway, count: int) -> None:
    while not fake.streams or len(list(fake.streams.values())[-1].frames) < count:
        await asyncio.sleep(0.01)


async def test_the_key_leaves_the_address_bar_and_only_a_token_is_used(page: Page, fake: FakeGateway) -> None:
    await ask(page, "Hello")
    await expect(answer(page)).to_have_text(WHOLE)
    assert page.url == f"{fake.url}/"
    assert fake.minted == 1
    stored = await page.evaluate("[JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
    assert KEY not in stored[0] and KEY in stored[1]
    await expect(page.locator("#simulated")).to_be_visible()
    await expect(page.locator("#connection")).to_have_text("Connected")


SLEEPS_IN_A_RENDERING = """
    const real = performance.now.bind(performance);
    let lostMs = 0;
    performance.now = () => real() + lostMs;
    const set = Element.prototype.setAttribute;
    Element.prototype.setAttribute = function (name, value) {
        if (name === "aria-busy") lostMs += 3_600_000;
        set.call(this, name, value);
    };
"""


async def test_a_machine_that_sleeps_during_a_rendering_delays_the_next_one_little(context: BrowserContext) -> None:
    await context.add_init_script(SLEEPS_IN_A_RENDERING)
    page = await open_page(context)
    await ask(page, "Hello")
    await expect(answer(page)).to_have_text(WHOLE)


SLOW_LAYOUT = """async () => {
    const { MessageView } = await import("/static/chat/view.js");
    const message = { id: "m", role: "assistant", text: "", status: "running" };
    const view = new MessageView(message, {});
    let layouts = 0;
    const layout = () => {
        const endMs = performance.now() + 100;
        while (performance.now() < endMs);
        layouts += 1;
    };
    const endMs = performance.now() + 2000;
    while (performance.now() < endMs) {
        message.text += "word ";
        view.schedule(message, layout);
        await new Promise(requestAnimationFrame);
    }
    return layouts;
}"""


async def test_a_slow_layout_leaves_the_page_time_for_its_reader(page: Page) -> None:
    assert await page.evaluate(SLOW_LAYOUT) <= 3


async def test_a_token_that_never_comes_leaves_no_blank_page(context: BrowserContext) -> None:
    """After a laptop's sleep a request may hang on a dead connection."""
    hung = asyncio.Event()

    async def hang(route: Route) -> None:
        if hung.is_set():
            await route.continue_()
        hung.set()

    await context.route("**/v1/tokens", hang)
    await context.add_init_script("const real = AbortSignal.timeout; AbortSignal.timeout = (ms) => real(ms / 50);")
    page = await open_page(context)
    await ask(page, "Hello")
    await expect(answer(page)).to_have_text(WHOLE)


async def test_signing_in_by_the_form(context: BrowserContext) -> None:
    page = await open_page(context, "/")
    await page.fill("#key", "sk-wrong")
    await page.press("#key", "Enter")
    await expect(page.locator("#sign-in-error")).to_have_text("This API key is unknown.")
    await page.fill("#key", KEY)
    await page.press("#key", "Enter")
    await ask(page, "Hello")
    await expect(answer(page)).to_have_text(WHOLE)


async def test_over_plain_http_from_another_machine(browser: Browser, fake: FakeGateway) -> None:
    """There a page has neither crypto.randomUUID nor navigator.clipboard."""
    context = await browser.new_context(base_url=fake.url.replace("127.0.0.1", "gateway.test"))
    page = await open_page(context)
    assert not await page.evaluate("isSecureContext")
    await ask(page, "say:```\ncode\n```")
    await expect(answer(page).locator("code")).to_have_text("code")
    await written(page)
    for button in ("button.copy", "article.assistant button[aria-label='Copy the message']"):
        await page.click(button)
        await page.focus("#prompt")
        await page.keyboard.press("Control+V")
    await expect(page.locator("#prompt")).to_have_value("code```\ncode\n```")
    assert page.errors == []  # type: ignore[attr-defined]
    await context.close()


async def test_a_link_with_a_key_signs_in_where_the_page_is_open(context: BrowserContext, fake: FakeGateway) -> None:
    page = await open_page(context, "/")
    await expect(page.locator("#gate")).to_be_visible()
    await page.evaluate(f"location.href = '/#key={KEY}'")
    await ask(page, "Hello")
    await expect(answer(page)).to_have_text(WHOLE)
    assert page.url == f"{fake.url}/"


async def test_text_runs_in_its_own_direction(page: Page) -> None:
    await ask(page, "say:אבג.\n\n- אב\n\n> גדה\n\nHello.\n\n```\nאבג\n```")
    await expect(answer(page)).to_contain_text("Hello.")
    await written(page)
    direction = "(nodes) => nodes.map((node) => getComputedStyle(node).direction)"
    assert await page.locator("article.assistant :is(p, ul, blockquote, code)").evaluate_all(direction) == [
        *["rtl"] * 4,
        *["ltr"] * 2,
    ]
    await ask(page, "אבג")
    await expect(page.locator("#send")).to_be_visible()
    assert await page.locator("article.user .content").last.evaluate_all(direction) == ["rtl"]


async def test_a_reload_in_the_middle_continues_to_the_same_text(page: Page, fake: FakeGateway) -> None:
    fake.hold_at = 12
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word12")
    await page.reload()
    await expect(answer(page)).to_contain_text("word12")
    await page.reload()
    fake.release()
    await expect(answer(page)).to_have_text(WHOLE)
    await page.reload()
    await expect(answer(page)).to_have_text(WHOLE)
    assert len(fake.streams) == 1
    assert all(message["after"] != "1-0" for message in fake.sent_by_client("sub"))


async def test_a_reload_before_the_ok_generates_once(page: Page, fake: FakeGateway) -> None:
    fake.hold_at = 0
    fake.faults.cut_before_ok = 1
    await ask(page, "Hello")
    while not fake.streams:
        await asyncio.sleep(0.01)
    await page.reload()
    fake.release()
    await expect(answer(page)).to_have_text(WHOLE)
    assert len(fake.streams) == 1


async def test_a_position_that_is_gone_is_replayed_in_full(page: Page, fake: FakeGateway) -> None:
    fake.hold_at = 12
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word12")
    fake.faults.refuse_subs.append({"code": "cursor_gone", "message": "gone", "retriable": False})
    await page.reload()
    fake.release()
    await expect(answer(page)).to_have_text(WHOLE)


async def test_a_reset_never_leaves_void_text(page: Page, fake: FakeGateway) -> None:
    fake.hold_at = 12
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word12")
    await fake.say_all({"t": "reset", "epoch": "2.bb", "to": 3})
    fake.release()
    await expect(answer(page)).to_have_text(WHOLE)


async def test_a_prompt_that_waits_is_told_its_place(page: Page, fake: FakeGateway) -> None:
    fake.faults.places = [{"position": 3, "of": 17}, {"position": 1, "of": 9, "warming_s": 40}]
    fake.faults.place_s = 0.7
    await ask(page, "say:At last")
    note = page.locator("article.assistant .note")
    await expect(note).to_have_text("Waiting for a free replica: 3 of 17 in the queue.")
    await expect(note).to_have_text(
        "Waiting for a free replica: 1 of 9 in the queue. A replica is starting; it needs about 40 s."
    )
    await expect(answer(page)).to_have_text("At last")
    await expect(note).to_have_text("")


async def test_cuts_are_invisible(page: Page, fake: FakeGateway) -> None:
    fake.token_delay_s = 0.02
    await ask(page, "Hello")
    for count in (5, 15, 25):
        await frames(fake, count)
        fake.cut_all()
    await expect(answer(page)).to_have_text(WHOLE)


async def test_offline_and_back(page: Page, context: BrowserContext, fake: FakeGateway) -> None:
    fake.hold_at = 12
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word12")
    await context.set_offline(True)
    fake.cut_all()
    await expect(page.locator("#connection")).to_have_text("Offline")
    fake.release()
    await context.set_offline(False)
    await expect(page.locator("#connection")).to_have_text("Connected")
    await expect(answer(page)).to_have_text(WHOLE)


@pytest.mark.parametrize("how", ["button", "escape"])
async def test_stop(how: str, page: Page, fake: FakeGateway) -> None:
    fake.hold_at = 5
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word5")
    if how == "button":
        await page.click("#stop")
    else:
        await page.keyboard.press("Escape")
    await expect(page.locator("article .note").last).to_have_text("Stopped at token 5")
    await expect(page.locator("#send")).to_be_visible()
    assert [stream.status for stream in fake.streams.values()] == ["cancelled"]


async def test_stop_while_offline(page: Page, context: BrowserContext, fake: FakeGateway) -> None:
    fake.hold_at = 5
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word5")
    await context.set_offline(True)
    await expect(page.locator("#connection")).to_have_text("Offline")
    await page.click("#stop")
    await expect(page.locator("article .note").last).to_have_text("Stopping…")
    await context.set_offline(False)
    await expect(page.locator("article .note").last).to_have_text("Stopped at token 5")
    assert [stream.status for stream in fake.streams.values()] == ["cancelled"]


async def test_stop_after_a_reload(page: Page, fake: FakeGateway) -> None:
    fake.hold_at = 5
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word5")
    await page.reload()
    await page.click("#stop")
    await expect(page.locator("article .note").last).to_have_text("Stopped at token 5")
    assert [stream.status for stream in fake.streams.values()] == ["cancelled"]


async def test_two_tabs_follow_one_stream(page: Page, context: BrowserContext, fake: FakeGateway) -> None:
    fake.hold_at = 12
    other = await open_page(context, "/")  # without a key: it is lent the first tab's token
    await expect(other.locator("#empty")).to_be_visible()
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word12")
    third = await open_page(context, "/")
    await expect(answer(third)).to_contain_text("word12")
    fake.release()
    for tab in (page, third):
        await expect(answer(tab)).to_have_text(WHOLE)
    await ask(third, "And again")
    for tab in (page, third):
        await expect(tab.locator("article.assistant .content")).to_have_count(2)
        await expect(answer(tab)).to_have_text(WHOLE)
    assert len(fake.streams) == 2
    assert "sk-" not in await third.evaluate("JSON.stringify(sessionStorage)")


async def test_stop_in_the_other_tab(page: Page, context: BrowserContext, fake: FakeGateway) -> None:
    fake.hold_at = 5
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word5")
    other = await open_page(context, "/")
    await other.click("#stop")
    for tab in (page, other):
        await expect(tab.locator("article .note").last).to_have_text("Stopped at token 5")


async def test_an_error_is_shown_and_tried_again(page: Page, fake: FakeGateway) -> None:
    fake.faults.refuse_create.append({"code": "engine_error", "message": "The engine failed.", "retriable": False})
    await ask(page, "Hello")
    await expect(page.locator(".note.failed")).to_contain_text("The engine failed.")
    await page.click(".note.failed button")
    await expect(answer(page)).to_have_text(WHOLE)
    await expect(page.locator(".note.failed")).to_have_count(0)


XSS = """<script>window.owned = 1</script> <img src=x onerror="window.owned = 1">

[one](javascript:window.owned=1) [two](data:text/html,x) [three](  JaVaScRiPt:alert(1))
![four](javascript:window.owned=1)
[five](https://ok.example/?q="onmouseover="x) <https://ok.example/<script>>

```html"><script>window.owned=1</script>
<script>window.owned = 1</script>
```

| <b>a</b> | b |
| --- | --- |
| <iframe src=javascript:1> | [x](vbscript:1) |

# <svg onload=window.owned=1>"""


async def test_hostile_markdown_stays_text(page: Page) -> None:
    await ask(page, "say:" + XSS)
    await written(page)
    await expect(answer(page)).to_contain_text("<svg onload=window.owned=1>")
    assert await page.evaluate("window.owned") is None
    tags = "[...document.querySelectorAll('#log *')].map((node) => node.localName)"
    assert not {"script", "img", "iframe", "b"} & set(await page.evaluate(tags))
    links = "[...document.querySelectorAll('#log a')].map((a) => [a.protocol, a.rel, a.getAttributeNames().length])"
    for protocol, rel, attributes in await page.evaluate(links):
        assert (protocol, rel, attributes) == ("https:", "noopener noreferrer", 3)


async def test_scrolling_up_stops_following(page: Page, fake: FakeGateway) -> None:
    await page.set_viewport_size({"width": 360, "height": 500})
    fake.hold_at = 60
    await ask(page, "say:" + "\n\n".join(f"Paragraph {n}" for n in range(60)))
    await expect(answer(page)).to_contain_text("Paragraph 29")
    at_end = "(s => s.scrollHeight - s.scrollTop - s.clientHeight < 4)(document.getElementById('scroller'))"
    await page.wait_for_function(at_end)
    await page.hover("#log")
    await page.mouse.wheel(0, -600)
    await expect(page.locator("#latest")).to_be_visible()
    fake.release()
    await expect(answer(page)).to_contain_text("Paragraph 59")
    assert not await page.evaluate(at_end)
    await page.click("#latest")
    await page.wait_for_function(at_end)
    assert await page.evaluate("document.documentElement.scrollWidth") == 360


async def test_shift_enter_is_a_new_line(page: Page, fake: FakeGateway) -> None:
    await page.fill("#prompt", "one")
    await page.press("#prompt", "Shift+Enter")
    await page.keyboard.type("two")
    assert await page.input_value("#prompt") == "one\ntwo"
    assert not fake.streams


async def test_conversations_are_kept_apart(page: Page) -> None:
    await ask(page, "First question")
    await expect(answer(page)).to_have_text(WHOLE)
    await page.click("#new")
    await expect(page.locator("article")).to_have_count(0)
    await ask(page, "Second question")
    await expect(answer(page)).to_have_text(WHOLE)
    await page.click("text=First question")
    await expect(page.locator("article.user .content")).to_have_text("First question")


async def test_signing_out_leaves_the_answer_running(page: Page, fake: FakeGateway) -> None:
    fake.hold_at = 12
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word12")
    await page.click("#sign-out")
    await expect(page.locator("#gate")).to_be_visible()
    await page.fill("#key", KEY)
    await page.press("#key", "Enter")
    fake.release()
    await expect(answer(page)).to_have_text(WHOLE)
    assert len(fake.streams) == 1


UNDO_IS_OVER = """() => {
    const deleted = JSON.parse(localStorage.getItem("sgw.deleted"));
    localStorage.setItem("sgw.deleted", JSON.stringify(deleted.map((each) => ({ ...each, at: each.at - 60_000 }))));
}"""


async def test_a_deleted_conversation_leaves_nothing(page: Page, fake: FakeGateway) -> None:
    fake.hold_at = 12
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word12")
    await page.hover("#conversations li")
    await page.click(".remove")
    await expect(page.locator("#empty")).to_be_visible()
    await page.evaluate(UNDO_IS_OVER)
    await page.reload()
    while next(iter(fake.streams.values())).status != "cancelled":
        await asyncio.sleep(0.01)
    await page.wait_for_timeout(100)
    left = await page.evaluate("Object.keys(localStorage).filter((key) => /message|conversation|deleted/.test(key))")
    assert left == []


async def test_the_theme_is_kept(page: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = await page.evaluate(background)
    await page.click("#theme")
    dark = await page.evaluate(background)
    assert dark != light
    await page.reload()
    assert await page.evaluate(background) == dark
