from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser

from tests.client.browser import chromium
from tests.client.contract import Target
from tests.client.fake_gateway import KEY, FakeGateway


@pytest.fixture
async def fake() -> AsyncIterator[FakeGateway]:
    async with FakeGateway().serve() as gateway:
        yield gateway


@pytest.fixture
def target(fake: FakeGateway) -> Target:
    return Target(fake.url, KEY, fake.model)


@pytest.fixture
async def any_target(fake: FakeGateway) -> Target:
    """Where the contract is tried: the gateway that STREAM_GW_URL, _KEY and _MODEL name, or else the fake."""
    if "STREAM_GW_URL" in os.environ:
        return Target(os.environ["STREAM_GW_URL"], os.environ["STREAM_GW_KEY"], os.environ["STREAM_GW_MODEL"])
    return Target(fake.url, KEY, fake.model)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as launched:
        yield launched
