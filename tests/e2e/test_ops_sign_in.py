"""Signing in on the operations page while the gateway cannot answer."""

from __future__ import annotations

import pytest
from playwright.async_api import BrowserContext, Route, expect

from tests.e2e.ops_pages import opened
from tests.gateway.wire import Gate

pytestmark = pytest.mark.platform


class Tokens:
    """Answers the next requests for a token; ``None``: the connection is lost. Then the gateway answers."""

    def __init__(self, *statuses: int | None) -> None:
        self.left = list(statuses)

    async def __call__(self, route: Route) -> None:
        if not self.left:
            await route.continue_()
        elif (status := self.left.pop(0)) is None:
            await route.abort()
        else:
            await route.fulfill(status=status, body="upstream is down")


async def test_a_key_in_the_address_outlives_a_gateway_that_is_down(context: BrowserContext, one: Gate) -> None:
    tokens = Tokens(503, None)
    await context.route("**/v1/tokens", tokens)
    async with opened(context, f"{one.url}/ops#key={one.key}") as page:
        await expect(page.locator("#feed")).to_have_text("Live")
        assert tokens.left == [] and page.url == f"{one.url}/ops"
        assert await page.input_value("#key") == ""


async def test_a_reload_has_the_key_while_the_gateway_is_down(context: BrowserContext, one: Gate) -> None:
    tokens = Tokens(*[503] * 1000)
    await context.route("**/v1/tokens", tokens)
    async with opened(context, f"{one.url}/ops#key={one.key}") as page:
        await expect(page.locator("#sign-in-error")).to_contain_text("503")
        await page.reload()
        await expect(page.locator("#sign-in-error")).to_have_text("The gateway answered 503. Trying again …")
        tokens.left.clear()
        await expect(page.locator("#feed")).to_have_text("Live")


async def test_a_key_that_is_changed_ends_the_tries_with_the_old_one(context: BrowserContext, one: Gate) -> None:
    tokens = Tokens(503)
    await context.route("**/v1/tokens", tokens)
    async with opened(context, f"{one.url}/ops#key=sk-old") as page:
        await expect(page.locator("#sign-in-error")).to_contain_text("503")
        await page.fill("#key", "sk-wrong")
        await page.press("#key", "Enter")
        await expect(page.locator("#sign-in-error")).to_contain_text("unknown")
        assert page.url == f"{one.url}/ops", "a key that was refused leaves the address"
