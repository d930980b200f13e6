"""A headless Chromium. Missing, the test is skipped with the reason; under CI it fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from tests.client.fake_gateway import KEY
from tests.support.missing import missing

PATIENCE_MS = 30_000
"""Longest wait for something to appear on a page: tests run beside busy processes."""
_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    # A name that is no loopback address to the page, so that over plain HTTP it is what any other machine would be
    "--host-resolver-rules=MAP gateway.test 127.0.0.1",
]


def _executable(bundled: str) -> str | None:
    # The headless shell is the same engine without the browser's window: half of the CPU on our pages
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    return found or (bundled if Path(bundled).exists() else None)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        executable = _executable(playwright.chromium.executable_path)
        if executable is None:
            missing("no Chromium: set CHROMIUM or run `playwright install chromium`")
        expect.set_options(timeout=PATIENCE_MS)
        browser = await playwright.chromium.launch(executable_path=executable, args=_ARGS)
        try:
            yield browser
        finally:
            await browser.close()


async def open_page(context: BrowserContext, path: str = f"/#key={KEY}") -> Page:
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    # A violation of the content security policy shows only here.
    page.on("console", lambda line: errors.append(line.text) if "Content Security Policy" in line.text else None)
    page.errors = errors  # type: ignore[attr-defined]
    await page.goto(path)
    return page
