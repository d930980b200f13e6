"""The chat page beside asking: branches, settings, conversations, images, figures, links, keys."""

from __future__ import annotations

import asyncio
import json
import re
import struct
import zlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import BrowserContext, FilePayload, Page, Route, expect

from tests.client.browser import open_page
from tests.client.fake_gateway import KEY, FakeGateway
from tests.client.test_chat_page import UNDO_IS_OVER, WHOLE, answer, ask

pytestmark = pytest.mark.platform


def bodies(fake: FakeGateway) -> list[dict[str, Any]]:
    return [message["body"] for message in fake.sent_by_client("create")]


def said(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


async def done(page: Page) -> None:
    await expect(page.locator("#send")).to_be_visible()


# --- copy, regenerate, edit ------------------------------------------------------------------------------------


async def test_a_message_is_copied(page: Page, context: BrowserContext) -> None:
    await context.grant_permissions(["clipboard-read", "clipboard-write"])
    await ask(page, "say:**Bold** answer")
    await done(page)
    await page.click("article.assistant button[aria-label='Copy the message']")
    await expect(page.locator("article.assistant button[aria-label='Copied']")).to_be_visible()
    assert await page.evaluate("navigator.clipboard.readText()") == "**Bold** answer", "the Markdown, as it was written"
    await page.hover("article.user")
    await page.click("article.user button[aria-label='Copy the message']")
    assert await page.evaluate("navigator.clipboard.readText()") == "say:**Bold** answer"


async def test_another_answer_keeps_the_first(page: Page, fake: FakeGateway) -> None:
    await ask(page, "say:First")
    await done(page)
    await page.click("button[aria-label='Answer again']")
    await expect(page.locator("article.assistant .pager")).to_have_text("2 / 2")
    await done(page)
    assert bodies(fake)[0]["messages"] == bodies(fake)[1]["messages"]
    assert len(fake.streams) == 2, "another stream, not the first one again"
    await page.click("button[aria-label='Previous version']")
    await expect(page.locator("article.assistant .pager")).to_have_text("1 / 2")
    await expect(page.locator("article")).to_have_count(2)
    await page.reload()
    await expect(page.locator("article.assistant .pager")).to_have_text("1 / 2")


async def test_an_edit_makes_a_branch_and_the_first_stays(page: Page, fake: FakeGateway) -> None:
    for text in ("say:one", "say:two", "say:three"):
        await ask(page, text)
        await done(page)
    second = page.locator("article.user").nth(1)
    await second.hover()
    await second.locator("button[aria-label='Edit the message']").click()
    field = page.locator(".editor textarea")
    await expect(field).to_be_focused()
    await field.fill("say:changed")
    await field.press("Shift+Enter")
    await field.press("Backspace")
    await field.press("Enter")
    await done(page)
    await expect(page.locator("article .content")).to_have_text(["say:one", "one", "say:changed", "changed"])
    assert said(bodies(fake)[-1]) == [("user", "say:one"), ("assistant", "one"), ("user", "say:changed")]
    await page.locator("article.user").nth(1).hover()
    await page.click("article.user button[aria-label='Previous version']")
    first = ["say:one", "one", "say:two", "two", "say:three", "three"]
    await expect(page.locator("article .content")).to_have_text(first)
    await ask(page, "say:four")
    await done(page)
    assert [text for _, text in said(bodies(fake)[-1])] == [*first, "say:four"], "only its own branch is sent"
    await page.reload()
    await expect(page.locator("article .content")).to_have_text([*first, "say:four", "four"])


async def test_escape_leaves_an_edit_and_the_answer(page: Page, fake: FakeGateway) -> None:
    await ask(page, "say:one")
    await done(page)
    await page.hover("article.user")
    await page.click("button[aria-label='Edit the message']")
    await page.fill(".editor textarea", "another")
    await page.keyboard.press("Escape")
    await expect(page.locator(".editor")).to_have_count(0)
    await expect(page.locator("article.user .content")).to_have_text("say:one")
    assert len(fake.streams) == 1


async def test_a_conversation_of_an_earlier_release_is_shown_and_goes_on(
    context: BrowserContext,
    fake: FakeGateway,
) -> None:
    page = await open_page(context, "/")
    messages = [
        {"id": "a", "role": "user", "text": "Old", "status": "done", "revision": 0},
        {"id": "b", "role": "assistant", "text": "Gold", "status": "completed", "cursor": "1-2", "revision": 0},
    ]
    entries = {f"sgw.message.{each['id']}": each for each in messages} | {
        "sgw.conversation.c": {"id": "c", "title": "Old", "messages": ["a", "b"]},
        "sgw.index": [{"id": "c", "title": "Old"}],
        "sgw.models": ["sim-7b"],
    }
    for name, value in entries.items():
        await page.evaluate("([name, value]) => localStorage.setItem(name, value)", [name, json.dumps(value)])
    await page.goto(f"/?#key={KEY}")
    await page.click("#conversations .row")
    await expect(page.locator("article .content")).to_have_text(["Old", "Gold"])
    await ask(page, "say:more")
    await done(page)
    assert said(bodies(fake)[-1]) == [("user", "Old"), ("assistant", "Gold"), ("user", "say:more")]
    assert page.errors == []  # type: ignore[attr-defined]


# --- settings of a conversation --------------------------------------------------------------------------------


async def settle(page: Page, **fields: str) -> None:
    await page.click("#open-settings")
    await expect(page.locator("#settings")).to_be_visible()
    for name, value in fields.items():
        await page.fill(f"#{name}", value)
    await page.click("#settings .primary")


async def test_settings_belong_to_one_conversation(page: Page, fake: FakeGateway) -> None:
    await settle(page, system="Answer in verse.", temperature="0.3")
    await ask(page, "say:one")
    await done(page)
    first = bodies(fake)[-1]
    assert (said(first), first["temperature"]) == ([("system", "Answer in verse."), ("user", "say:one")], 0.3)
    assert "max_tokens" not in first
    await page.click("#new")
    await ask(page, "say:two")
    await done(page)
    assert said(bodies(fake)[-1]) == [("user", "say:two")] and "temperature" not in bodies(fake)[-1]
    await page.reload()
    await page.click("#conversations .row >> text=say:one")
    await expect(page.locator("#open-settings")).to_have_class(re.compile("changed"))
    await page.click("#open-settings")
    assert await page.input_value("#system") == "Answer in verse."
    await page.fill("#system", "")
    await page.fill("#temperature", "")
    await page.fill("#max-tokens", "7")
    await page.keyboard.press("Enter")
    await ask(page, "count")
    await done(page)
    assert bodies(fake)[-1]["max_tokens"] == 7 and said(bodies(fake)[-1])[0] == ("user", "say:one")


async def test_a_temperature_out_of_range_is_not_saved(page: Page) -> None:
    await page.click("#open-settings")
    await page.fill("#temperature", "3")
    await page.click("#settings .primary")
    await expect(page.locator("#settings")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.locator("#settings")).to_be_hidden()
    await expect(page.locator("#open-settings")).to_be_focused()


async def test_settings_changed_before_the_request_is_repeated_do_not_change_it(
    page: Page,
    fake: FakeGateway,
) -> None:
    """The repeat must be the same JSON value, or its idempotency key is refused."""
    fake.hold_at = 0
    fake.faults.cut_before_ok = 1
    await settle(page, temperature="0.5")
    await ask(page, "Hello")
    while not fake.streams:
        await asyncio.sleep(0.01)
    await settle(page, temperature="1.5")
    await page.reload()
    fake.release()
    await expect(answer(page)).to_have_text(WHOLE)
    assert len(fake.streams) == 1 and {body["temperature"] for body in bodies(fake)} == {0.5}


# --- conversations ---------------------------------------------------------------------------------------------


async def test_conversations_are_renamed(page: Page) -> None:
    await ask(page, "say:one")
    await done(page)
    await page.hover("#conversations li")
    await page.click(".rename")
    await page.keyboard.type("Verses")
    await page.keyboard.press("Enter")
    await expect(page.locator("#conversations .row")).to_have_text("Verses")
    assert await page.title() == "Verses · stream-gw"
    await page.dblclick("#conversations .row")
    await page.keyboard.type("Nothing")
    await page.keyboard.press("Escape")
    await page.reload()
    await expect(page.locator("#conversations .row")).to_have_text("Verses")


async def test_conversations_are_found_by_title_and_by_text(page: Page) -> None:
    for text in ("say:All that I want to know of the longest rivers of Europe: the Rhine", "say:Mountains"):
        await page.click("#new")
        await ask(page, text)
        await done(page)
    await page.fill("#search", "LONGEST")
    await expect(page.locator("#conversations .row")).to_have_count(1)
    await expect(page.locator("#conversations small")).to_have_count(0)
    await page.fill("#search", "RHINE rivers")
    await expect(page.locator("#conversations .row")).to_have_count(1)
    await expect(page.locator("#conversations small")).to_contain_text("the Rhine")
    await page.fill("#search", "nowhere")
    await expect(page.locator("#none")).to_be_visible()
    await page.press("#search", "Escape")
    await expect(page.locator("#conversations .row")).to_have_count(2)


async def test_a_deleted_conversation_is_restored_with_its_running_answer(
    page: Page,
    fake: FakeGateway,
) -> None:
    await ask(page, "say:Older")
    await done(page)
    await page.click("#new")
    fake.hold_at = 5
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word5")
    await page.locator("#conversations li").nth(0).hover()
    await page.locator("#conversations li .remove").nth(0).click()
    await expect(page.locator("#empty")).to_be_visible()
    await expect(page.locator("#toast")).to_contain_text("“Hello” is deleted.")
    await expect(page.locator("#undo")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator("#toast")).to_be_hidden()
    await expect(page.locator("#conversations .row")).to_have_text(["Hello", "say:Older"])
    fake.release()
    await expect(answer(page)).to_have_text(WHOLE)
    assert [stream.status for stream in fake.streams.values()] == ["completed", "completed"]


async def test_a_deleted_conversation_goes_for_good_by_itself(page: Page) -> None:
    await ask(page, "say:one")
    await done(page)
    await page.hover("#conversations li")
    await page.click(".remove")
    await expect(page.locator("#toast")).to_be_visible()
    await expect(page.locator("#toast")).to_be_hidden()
    assert await page.evaluate("Object.keys(localStorage).filter((key) => /message|conversation/.test(key))") == []


# --- images ----------------------------------------------------------------------------------------------------


def png(width: int, height: int) -> bytes:
    """A grey PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\x80" * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def file(name: str, data: bytes, kind: str = "image/png") -> FilePayload:
    return {"name": name, "mimeType": kind, "buffer": data}


SIZE = """async (url) => {
    const image = new Image();
    image.src = url;
    await image.decode();
    return [image.naturalWidth, image.naturalHeight];
}"""


async def test_images_are_offered_only_where_the_model_takes_them(page: Page) -> None:
    await expect(page.locator("#attach")).to_be_hidden()


@pytest_asyncio.fixture(loop_scope="session")
async def seeing(context: BrowserContext, fake: FakeGateway) -> AsyncIterator[Page]:
    """A page whose model takes images."""
    fake.modalities = ["text", "image"]
    opened = await open_page(context)
    await expect(opened.locator("#attach")).to_be_visible()
    yield opened
    assert opened.errors == []  # type: ignore[attr-defined]


async def test_images_are_scaled_sent_and_kept(seeing: Page, fake: FakeGateway) -> None:
    small, large = file("small.png", png(8, 8)), file("large.png", png(4000, 1000))
    await seeing.set_input_files("#files", [small, large])
    await expect(seeing.locator("#attached li")).to_have_count(2)
    await seeing.click("#attached button >> nth=0")
    await expect(seeing.locator("#attached li")).to_have_count(1)
    await ask(seeing, "say:Seen")
    await done(seeing)
    image, text = bodies(fake)[-1]["messages"][0]["content"]
    assert text == {"type": "text", "text": "say:Seen"}
    url = image["image_url"]["url"]
    assert url.startswith("data:image/jpeg;base64,") and await seeing.evaluate(SIZE, url) == [1568, 392]
    await expect(seeing.locator("#attached li")).to_have_count(0)
    await seeing.reload()
    await expect(seeing.locator("article.user img")).to_have_attribute("src", url)
    assert url not in await seeing.evaluate("JSON.stringify(localStorage)")
    await ask(seeing, "say:And again")
    await done(seeing)
    assert bodies(fake)[-1]["messages"][0]["content"][0] == image, "later answers see it too"


SLOW_IMAGES = """() => {
    const read = window.createImageBitmap;
    const opened = new Promise((resolve) => { window.openImages = resolve; });
    window.createImageBitmap = async (file) => { await opened; return read(file); };
}"""


async def test_a_message_sent_while_its_image_is_read_leaves_with_it(seeing: Page, fake: FakeGateway) -> None:
    await seeing.evaluate(SLOW_IMAGES)
    await seeing.set_input_files("#files", [file("a.png", png(8, 8))])
    await ask(seeing, "say:Seen")
    await expect(seeing.locator("#prompt")).to_have_value("say:Seen")
    await seeing.evaluate("openImages()")
    await expect(seeing.locator("#prompt")).to_have_value("")  # it has left; till then the page can send as well
    await done(seeing)
    assert [part["type"] for part in bodies(fake)[-1]["messages"][0]["content"]] == ["image_url", "text"]


@pytest.mark.parametrize("then", ["types on", "goes elsewhere", "the image is none"])
async def test_it_does_not_leave_when_the_user_goes_on(seeing: Page, fake: FakeGateway, then: str) -> None:
    await ask(seeing, "say:First")
    await done(seeing)
    await seeing.evaluate(SLOW_IMAGES)
    await seeing.set_input_files("#files", [file("a.png", b"x" if then == "the image is none" else png(8, 8))])
    await ask(seeing, "say:Seen")
    if then == "types on":
        await seeing.locator("#prompt").press_sequentially(" and")
    elif then == "goes elsewhere":
        await seeing.evaluate("document.getElementById('new').click()")
    await seeing.evaluate("openImages()")
    if then == "the image is none":
        await expect(seeing.locator("#notice")).to_have_text("a.png cannot be read as an image.")
    else:
        await expect(seeing.locator("#attached li")).to_have_count(1)
    await expect(seeing.locator("#send")).to_be_enabled()
    await expect(seeing.locator("#prompt")).to_have_value("say:Seen and" if then == "types on" else "say:Seen")
    assert len(bodies(fake)) == 1


async def test_an_image_alone_is_a_message(seeing: Page, fake: FakeGateway) -> None:
    await expect(seeing.locator("#send")).to_be_disabled()
    await seeing.set_input_files("#files", [file("a.png", png(8, 8))])
    await seeing.click("#send")
    await done(seeing)
    assert [part["type"] for part in bodies(fake)[-1]["messages"][0]["content"]] == ["image_url"]


async def test_what_is_no_image_or_too_much_is_refused(seeing: Page, fake: FakeGateway) -> None:
    await seeing.set_input_files("#files", [file("a.png", b"<script>window.owned = 1</script>")])
    await expect(seeing.locator("#notice")).to_have_text("a.png cannot be read as an image.")
    await seeing.set_input_files("#files", [file("a.svg", b"<svg onload='owned = 1'/>", "image/svg+xml")])
    await expect(seeing.locator("#notice")).to_contain_text("only PNG, JPEG, WebP and GIF")
    await seeing.set_input_files("#files", [file(f"{n}.png", png(8, 8)) for n in range(6)])
    await expect(seeing.locator("#notice")).to_have_text("A message holds at most 4 images.")
    await expect(seeing.locator("#attached li")).to_have_count(4)
    await ask(seeing, "say:Four")
    await done(seeing)
    assert len(bodies(fake)[-1]["messages"][0]["content"]) == 5


async def test_images_are_erased_with_their_conversation(seeing: Page) -> None:
    await seeing.set_input_files("#files", [file("a.png", png(8, 8))])
    await ask(seeing, "say:one")
    await done(seeing)
    count = """() => new Promise((resolve) => {
        const request = indexedDB.open("sgw.images");
        request.onsuccess = () => {
            const images = request.result.transaction("images").objectStore("images").count();
            images.onsuccess = () => { resolve(images.result); request.result.close(); };
        };
    })"""
    assert await seeing.evaluate(count) == 1
    await seeing.hover("#conversations li")
    await seeing.click(".remove")
    await seeing.evaluate(UNDO_IS_OVER)
    await seeing.reload()
    await expect(seeing.locator("#empty")).to_be_visible()
    while await seeing.evaluate(count):
        await asyncio.sleep(0.05)


# --- figures and endings ---------------------------------------------------------------------------------------


async def test_an_answer_tells_its_figures(page: Page, fake: FakeGateway) -> None:
    fake.token_delay_s = 0.02
    await ask(page, "Hello")
    await done(page)
    meta = page.locator("article.assistant .meta span")
    await expect(meta).to_have_text(
        [
            "Complete",
            "40 tokens",
            re.compile(r"^\d+(\.\d)? tokens/s$"),
            re.compile(r"^first token \d+\.\d\d s$"),
        ]
    )
    speed = float(((await meta.nth(2).text_content()) or "").split()[0])
    assert 0 < speed < 400, "40 tokens 20 ms apart, of which a busy machine may deliver some together"


async def test_an_interrupted_answer_has_no_speed(page: Page, fake: FakeGateway) -> None:
    """A replay is faster than the model, and a pause of the network slower."""
    fake.hold_at = 12
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word12")
    fake.cut_all()
    fake.release()
    await done(page)
    await expect(page.locator("article.assistant .meta")).to_contain_text("40 tokens")
    assert "tokens/s" not in ((await page.locator("article.assistant .meta").text_content()) or "")


@pytest.mark.parametrize(
    ("finish", "status", "stop_reason", "note"),
    [
        ("length", "completed", None, "Ended at the length limit"),
        ("content_filter", "incomplete", None, "Ended by content moderation"),
        ("length", "incomplete", "budget", "Ended by a budget of your plan"),
        ("tool_calls", "completed", None, "Ended with a tool call"),
    ],
)
async def test_an_answer_tells_why_it_ended(
    finish: str,
    status: str,
    stop_reason: str | None,
    note: str,
    page: Page,
    fake: FakeGateway,
) -> None:
    fake.finish, fake.stop_reason, fake.ends = finish, stop_reason, status
    await ask(page, "Hello")
    await done(page)
    await expect(page.locator("article.assistant .note")).to_have_text(note)
    await page.reload()
    await expect(page.locator("article.assistant .note")).to_have_text(note)


async def test_offline_is_said_where_the_text_is(
    page: Page,
    context: BrowserContext,
    fake: FakeGateway,
) -> None:
    fake.hold_at = 12
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word12")
    await context.set_offline(True)
    fake.cut_all()
    note = page.locator("article.assistant .note.held")
    await expect(note).to_contain_text("You are offline. The text so far is kept")
    await context.set_offline(False)
    await expect(note).to_have_count(0)
    fake.release()
    await expect(answer(page)).to_have_text(WHOLE)
    await context.set_offline(True)
    await expect(page.locator("#connection")).to_have_text("Offline")
    await ask(page, "say:Later")
    await expect(page.locator("article.assistant .note").last).to_contain_text("Your message is sent when")
    await context.set_offline(False)
    await expect(answer(page)).to_have_text("Later")


async def test_another_gateway_and_another_replica_are_noted(page: Page, fake: FakeGateway) -> None:
    fake.hold_at = 12
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word12")
    meta = page.locator("article.assistant .meta span")
    await expect(meta).to_have_count(0)
    stream = next(iter(fake.streams.values()))
    for reads, name in ((2, "gw_1"), (3, "gw_2")):
        await expect(meta).to_have_count(0)  # back on the same gateway, it has not moved
        fake.name = name
        fake.cut_all()
        while stream.reads < reads:
            await asyncio.sleep(0.01)
        await expect(page.locator("#connection")).to_have_text("Connected")
    stream.epoch = 2
    await fake.say_all({"t": "ok", "stream": stream.id, "epoch": "2.bb", "head": 12, "status": "live"})
    fake.release()
    await done(page)
    await expect(meta.filter(has_text="on another")).to_have_text(
        ["continued on another replica", "resumed on another gateway"]
    )
    await expect(answer(page)).to_have_text(WHOLE)


async def test_a_prompt_sent_before_the_models_are_known_waits_for_them(
    context: BrowserContext,
    fake: FakeGateway,
) -> None:
    known = asyncio.Event()

    async def late(route: Route) -> None:
        await known.wait()
        await route.continue_()

    await context.route("**/v1/models", late)
    page = await open_page(context)
    await ask(page, "say:one")
    await expect(page.locator("article.waiting")).to_be_visible()
    assert not bodies(fake)
    known.set()
    await expect(answer(page)).to_have_text("one")
    assert bodies(fake)[0]["model"] == fake.model


class NoModels:
    """The list of models, which the gateway refuses until it is open again."""

    def __init__(self) -> None:
        self.is_over = False

    async def __call__(self, route: Route) -> None:
        if self.is_over:
            await route.continue_()
            return
        error = {"code": "unavailable", "message": "Redis is away.", "retriable": True}
        await route.fulfill(status=503, json={"error": error})


async def test_a_list_of_models_that_failed_is_asked_for_again(context: BrowserContext, fake: FakeGateway) -> None:
    outage = NoModels()
    await context.route("**/v1/models", outage)
    page = await open_page(context)
    await expect(page.locator("#notice")).to_have_text("The list of models could not be loaded: Redis is away.")
    await ask(page, "say:one")
    await expect(page.locator("article.waiting")).to_be_visible()
    outage.is_over = True
    await expect(answer(page)).to_have_text("one")
    await expect(page.locator("#notice")).to_be_empty()
    assert bodies(fake)[0]["model"] == fake.model


async def test_an_answer_that_waits_for_the_models_is_stopped(context: BrowserContext, fake: FakeGateway) -> None:
    outage = NoModels()
    await context.route("**/v1/models", outage)
    page = await open_page(context)
    await ask(page, "say:one")
    await page.click("#stop")
    await expect(page.locator("article.assistant .note")).to_have_text("Stopped")
    outage.is_over = True
    await expect(page.locator("#notice")).to_be_empty()
    await ask(page, "say:two")
    await expect(answer(page)).to_contain_text("two")
    assert len(bodies(fake)) == 1


# --- code ------------------------------------------------------------------------------------------------------

PYTHON = """Look:

```python
def area(radius: float) -> str:
    # </code><script>window.owned = 1</script>
    return f"<img src=x onerror='window.owned=1'> {3.14 * radius ** 2}"
```

```nonsense
let x = 1
```
"""


async def test_code_gets_colours_only_when_there_is_code(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(urlsplit(request.url).path))
    await ask(page, "say:No code here. ```\nplain\n```")
    await done(page)
    assert not [path for path in asked if "highlight" in path]
    await ask(page, "say:" + PYTHON)
    await done(page)
    code = answer(page).locator("code").first
    await expect(code.locator(".hl-keyword").first).to_have_text("def")
    await expect(code.locator(".hl-comment")).to_have_text("# </code><script>window.owned = 1</script>")
    assert await code.text_content() == PYTHON.split("```python\n")[1].split("\n```")[0]
    assert await page.evaluate("window.owned") is None
    tags = await code.evaluate("(code) => [...new Set([...code.querySelectorAll('*')].map((node) => node.localName))]")
    assert tags == ["span"]
    attributes = await code.evaluate(
        "(code) => [...new Set([...code.querySelectorAll('*')].flatMap((node) => node.getAttributeNames()))]"
    )
    assert attributes == ["class"]
    await expect(answer(page).locator("code").last.locator("span")).to_have_count(0)
    assert [path.rsplit("/", 1)[1] for path in asked if "/vendor/highlight/" in path] == [
        "core.min.js",
        "python.min.js",
    ]


# --- links -----------------------------------------------------------------------------------------------------


async def shared(page: Page, fake: FakeGateway) -> str:
    await page.click("article.assistant .share")
    await expect(page.locator("#share-copy")).to_be_enabled()
    return await page.input_value("#share-link")


async def test_a_link_carries_a_token_of_its_own(page: Page, fake: FakeGateway) -> None:
    fake.hold_at = 12
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word12")
    link = urlsplit(await shared(page, fake))
    stream = next(iter(fake.streams))
    assert (link.path, link.query) == ("/watch", ""), "what a server sees has no token"
    assert parse_qs(link.fragment) == {"stream": [stream], "token": ["cap_link1"]}
    assert fake.link_tokens == [{"scopes": ["read"], "stream": stream, "expires_in_s": 3600}]
    await expect(page.locator("#share-until")).to_contain_text("Valid until")
    await page.keyboard.press("Escape")
    assert next(iter(fake.streams.values())).status == "live", "Escape closes the dialog and stops nothing"
    fake.release()
    await done(page)
    await expect(page.locator(".share")).to_be_hidden()


async def test_only_the_tab_with_the_key_makes_links(page: Page, context: BrowserContext, fake: FakeGateway) -> None:
    fake.hold_at = 12
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word12")
    other = await open_page(context, "/")
    await other.click("article.assistant .share")
    await expect(other.locator("#share-error")).to_contain_text("Only the tab in which you signed in")
    fake.release()


@pytest.mark.parametrize(
    ("fragment", "text"),
    [
        ("", "This link is not valid."),
        ("stream=resp_1&token=cap_x", "This link has expired, or sharing was stopped."),
        (f"stream=resp_1&token={KEY}", "This answer is no longer kept."),
    ],
)
async def test_a_link_that_does_not_work_says_why(fragment: str, text: str, context: BrowserContext) -> None:
    page = await open_page(context, f"/watch#{fragment}")
    await expect(page.locator("#log")).to_have_text(text)
    assert page.errors == []  # type: ignore[attr-defined]


async def test_a_link_is_valid_also_where_the_clock_is_wrong(
    page: Page, context: BrowserContext, fake: FakeGateway
) -> None:
    await ask(page, "say:one")
    await done(page)
    other = await context.new_page()
    await other.add_init_script("const now = Date.now; Date.now = () => now() + 1e13")
    await other.goto(f"/watch#stream={next(iter(fake.streams))}&token={KEY}&until=4000000000")  # an older page's link
    await expect(answer(other)).to_contain_text("one")


# --- keyboard and motion ---------------------------------------------------------------------------------------


async def test_the_order_of_focus(page: Page) -> None:
    await ask(page, "say:one")
    await done(page)
    await page.evaluate("document.querySelector('.skip').focus()")
    seen: list[str] = []
    told = "(node => node.id || node.ariaLabel || node.textContent)(document.activeElement)"
    while not seen or seen[-1] != "prompt":
        await page.keyboard.press("Tab")
        seen.append(await page.evaluate(told))
        assert len(seen) < 30, seen
    assert seen == [
        *["new", "search", "say:one", "Rename “say:one”", "Delete “say:one”"],
        *["theme", "sign-out", "model", "open-settings"],
        *["Copy the message", "Edit the message", "Copy the message", "Answer again", "prompt"],
    ]


async def test_reduced_motion_stops_every_animation(context: BrowserContext, fake: FakeGateway) -> None:
    page = await open_page(context)
    await page.emulate_media(reduced_motion="reduce")
    fake.hold_at = 5
    await ask(page, "Hello")
    await expect(answer(page)).to_contain_text("word5")
    assert await page.evaluate("document.getAnimations().length") == 0
    fake.release()
