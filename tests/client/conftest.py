from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page

from tests.client.browser import open_page
from tests.client.contract import Target
from tests.client.fake_gateway import KEY, FakeGateway


@pytest_asyncio.fixture(loop_scope="session")
async def fake() -> AsyncIterator[FakeGateway]:
    async with FakeGateway().serve() as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def context(browser: Browser, fake: FakeGateway) -> AsyncIterator[BrowserContext]:
    context = await browser.new_context(base_url=fake.url)
    yield context
    await context.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(context: BrowserContext) -> AsyncIterator[Page]:
    page = await open_page(context)
    yield page
    assert page.errors == []  # type: ignore[attr-defined]


@pytest.fixture
def target(fake: FakeGateway) -> Target:
    return Target(fake.url, KEY, fake.model)


@pytest_asyncio.fixture(loop_scope="session")
async def any_target(fake: FakeGateway) -> Target:
    """Where the contract is tried: the gateway that STREAM_GW_URL, _KEY and _MODEL name, or else the fake."""
    if "STREAM_GW_URL" in os.environ:
        return Target(os.environ["STREAM_GW_URL"], os.environ["STREAM_GW_KEY"], os.environ["STREAM_GW_MODEL"])
    return Target(fake.url, KEY, fake.model)
