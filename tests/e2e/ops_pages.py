"""Helpers for tests of the operations page: a page that must not fail, requests that telemetry knows, axe-core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import BrowserContext, Locator, Page

from tests.gateway.wire import Gate, chat
from tests.support.waiting import eventually

AXE = Path(__file__).parents[1] / "node" / "node_modules" / "axe-core" / "axe.min.js"
_AXE_RUN = """async () => {
    const found = await axe.run(document, { resultTypes: ["violations"] });
    return found.violations.map(({ id, nodes }) => [id, nodes.map(({ html }) => html.slice(0, 200))]);
}"""


async def violations(page: Page) -> list[Any]:
    """Rules of axe-core that the page breaks, with the elements."""
    await page.evaluate(await asyncio.to_thread(AXE.read_text))
    found: list[Any] = await page.evaluate(_AXE_RUN)
    return found


@asynccontextmanager
async def opened(context: BrowserContext, url: str) -> AsyncIterator[Page]:
    """A page, on which no script fails and which its policy finds nothing to forbid on."""
    page = await context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if "Content Security Policy" in line.text else None)
    await page.goto(url)
    yield page
    assert errors == []
    await page.close()


async def answered(gate: Gate, tokens: int = 40, **more: Any) -> str:
    """A request that is over and that telemetry knows of."""
    async with gate.create(chat(tokens, **more)) as exchange:
        assert exchange.status == 200
        await exchange.rest()
        return str(exchange.headers["x-stream-id"])


async def until_told(gate: Gate, stream: str) -> None:
    async def billed() -> bool:
        reply = await gate.ask("GET", f"/v1/admin/traces/{stream}/why")
        return reply.status == 200 and not reply.json["missing"]

    await eventually(billed, f"{stream} to be told", 20)


def tile(page: Page, title: str) -> Locator:
    return page.locator("#tiles .tile", has=page.locator("dt", has_text=title)).locator(".value")
