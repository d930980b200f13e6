"""Pages of other origins call the API: in a real browser, and header by header."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.async_api import Browser

from stream_gw.transport.cors import CorsPolicy
from tests.gateway.processes import Running
from tests.gateway.wire import DONE, MODEL, Gate, chat, events, refusal

pytestmark = pytest.mark.platform

CREATE = "/v1/chat/completions"
FETCH = """async ({ url, key, body }) => {
    const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json", "Idempotency-Key": body.id };
    delete body.id;
    try {
        const response = await fetch(url, { method: "POST", headers, body: JSON.stringify(body) });
        const names = ["x-stream-id", "x-stream-epoch", "x-request-id", "link"];
        const found = Object.fromEntries(names.map((name) => [name, response.headers.get(name)]));
        return { status: response.status, headers: found, text: await response.text() };
    } catch (error) {
        return { error: error.name };
    }
}"""


@dataclass(frozen=True)
class Origins:
    """A gateway that allows pages of one origin, and a page's address in that origin and in another."""

    gate: Gate
    allowed: str
    other: str


@pytest.fixture(scope="module")
def origins(platform: Running) -> Iterator[Origins]:
    with platform.gateway("--gateway", "pages") as pages:
        port = Gate(pages.facts["url"], pages.pid, "").port
        allowed, other = f"http://gateway.test:{port}", f"http://localhost:{port}"
        listed = f"https://chat.example,{allowed}"
        with platform.gateway("--gateway", "cors", STREAM_GW_CORS_ORIGINS=listed) as process:
            yield Origins(Gate(process.facts["url"], process.pid, platform.key), allowed, other)


async def fetched(browser: Browser, origin: str, gate: Gate, key: str) -> dict[str, Any]:
    page = await browser.new_page()
    try:
        await page.goto(f"{origin}/healthz")
        asked = {"url": gate.url + CREATE, "key": key, "body": chat(5, id=f"k-{origin}-{key[-4:]}")}
        found: dict[str, Any] = await page.evaluate(FETCH, asked)
        return found
    finally:
        await page.close()


async def test_a_page_of_an_allowed_origin_streams_and_reads_the_headers(browser: Browser, origins: Origins) -> None:
    found = await fetched(browser, origins.allowed, origins.gate, origins.gate.key)
    assert found["status"] == 200 and "data: [DONE]" in found["text"]
    assert found["headers"]["x-stream-id"].startswith("resp_") and all(found["headers"].values())
    refused = await fetched(browser, origins.allowed, origins.gate, "sk-wrong")
    assert refused["status"] == 401 and "invalid_api_key" in refused["text"], "errors are readable too"


async def test_a_page_of_another_origin_is_refused_by_the_browser(browser: Browser, origins: Origins) -> None:
    assert await fetched(browser, origins.other, origins.gate, origins.gate.key) == {"error": "TypeError"}


async def test_headers_are_there_only_for_requests_of_an_origin(origins: Origins) -> None:
    gate = origins.gate
    for headers, allow, vary in (
        ({}, None, None),
        ({"origin": origins.allowed}, origins.allowed, "Origin"),
        ({"origin": origins.other}, None, "Origin"),
        ({"origin": origins.allowed + ".evil"}, None, "Origin"),
        ({"origin": "null"}, None, "Origin"),
    ):
        async with gate.open("POST", CREATE, chat(2), headers) as exchange:
            assert events(await exchange.rest())[-1].data == DONE
        assert exchange.headers.get("access-control-allow-origin") == allow
        assert exchange.headers.get("vary") == vary
        assert "access-control-allow-credentials" not in exchange.headers
        assert ("access-control-expose-headers" in exchange.headers) == (allow is not None)
    missing = await gate.ask("GET", "/v1/streams/x", None, {"origin": origins.allowed})
    assert (missing.status, missing.headers["access-control-allow-origin"]) == (404, origins.allowed)
    unserved = await gate.ask("POST", "/v1/moderations", {}, {"origin": origins.allowed})
    assert refusal(unserved, 404, "not_served")["message"].endswith("use /v1/classify with a moderation model")
    assert unserved.headers["access-control-allow-origin"] == origins.allowed, "the page can read what to use instead"
    assert "vary" not in (await gate.ask("GET", "/healthz", None, {"origin": origins.allowed})).headers


async def test_a_page_may_read_what_answers_tell_in_headers(origins: Origins) -> None:
    """Anthropic's SDK reads the id of a request from ``request-id``."""
    gate, origin = origins.gate, {"origin": origins.allowed}
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
    reply = await gate.ask("POST", "/v1/messages", body, origin)
    exposed = reply.headers["access-control-expose-headers"].split(", ")
    standard = {"content-type", "content-length", "vary"}
    told = {name for name in reply.headers if not name.startswith("access-control-")} - standard
    assert "request-id" in told and told <= set(exposed)
    assert {"x-served-model", "x-budget-warning", "retry-after"} <= set(exposed)


@pytest.mark.parametrize("path", [CREATE, "/v1/models", "/v1/streams/x/cancel", "/v1/admin/plans/p", "/v1/moderations"])
async def test_a_preflight_needs_no_key(origins: Origins, path: str) -> None:
    asked = {"authorization": "", "access-control-request-method": "POST", "access-control-request-headers": "a, b"}
    reply = await origins.gate.ask("OPTIONS", path, None, asked | {"origin": origins.allowed})
    assert reply.status == 204
    assert reply.headers["access-control-allow-origin"] == origins.allowed
    assert reply.headers["access-control-allow-headers"] == "a, b"
    assert reply.headers["access-control-allow-methods"]
    assert int(reply.headers["access-control-max-age"]) > 0 and reply.headers["vary"] == "Origin"
    for other in ({"origin": origins.other}, {}):
        reply = await origins.gate.ask("OPTIONS", path, None, asked | other)
        refusal(reply, 405, "method_not_allowed")
        assert "access-control-allow-methods" not in reply.headers


async def test_no_origin_is_allowed_by_default() -> None:
    asked = {b"origin": b"https://a.example", b"access-control-request-method": b"POST"}

    async def send(message: Any) -> None: ...

    scope = {"headers": list(asked.items())}
    assert CorsPolicy("").preflight(asked, ["POST"]) is None
    assert CorsPolicy("").sender(scope, send) is send
    assert CorsPolicy("*").preflight(asked, ["POST"]) is not None
    assert CorsPolicy("*").sender({"headers": []}, send) is send, "no cost without an origin"
