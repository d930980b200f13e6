"""A very long answer: what comes costs no more than in a short one."""

from __future__ import annotations

import json

import pytest
from playwright.async_api import Browser, Page

pytestmark = pytest.mark.platform

GROW = """async ([unit, chars, frames]) => {
    const { MessageView } = await import("/static/chat/view.js");
    const scroller = document.getElementById("scroller");
    const text = unit.repeat(Math.ceil(chars / unit.length));
    const message = { id: "m", role: "assistant", text, status: "running" };
    const view = new MessageView(message, {});
    document.getElementById("log").replaceChildren(view.node);
    const drawn = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    scroller.scrollTop = scroller.scrollHeight;
    await drawn();
    for (let frame = 0; frame < frames; frame += 1) {
        if (frame === 1) console.timeStamp("grows"); // before, the whole answer is styled for the first time
        message.text += unit.slice(frame * 9, frame * 9 + 9);
        view.update(message);
        scroller.scrollTop = scroller.scrollHeight;
        await drawn();
    }
}"""
PARAGRAPH = "Backpressure is how a **slow reader** tells a fast `writer` to wait for it. " * 4 + "\n\n"
CODE = "```\n" + "value = call(1, 2)  # and what it is for\n" * 20 + "```\n\n"


@pytest.mark.parametrize("unit", [PARAGRAPH, CODE, f"{PARAGRAPH}## Title\n\n- a\n- b\n\n> quoted\n\n"])
async def test_a_frame_of_a_long_answer_restyles_its_end_alone(browser: Browser, page: Page, unit: str) -> None:
    """400,000 characters are about 80,000 tokens."""
    await browser.start_tracing(page=page, categories=["devtools.timeline"])
    await page.evaluate(GROW, [unit, 400_000, 20])
    events = json.loads(await browser.stop_tracing())["traceEvents"]
    began = next(event["ts"] for event in events if event["name"] == "TimeStamp")
    restyled = [e["args"]["elementCount"] for e in events if e["name"] == "UpdateLayoutTree" and e["ts"] > began]
    assert restyled and max(restyled) < 100, restyled
