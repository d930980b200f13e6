"""A headless Chromium. Missing, the test is skipped with the reason; under CI it fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Browser, async_playwright, expect

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
