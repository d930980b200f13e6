"""Two gateways behind a real nginx: with the documented configuration, and with nginx's defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from stream_fabric.limits import COOKIE_BYTES_MAX
from stream_gw.client import GatewayError, StreamGateway
from tests.docs.snippets import snippets
from tests.gateway.processes import Running
from tests.gateway.test_cookie import bearer, cookie, mint, set_cookie
from tests.gateway.wire import DONE, Gate, chat, events, refusal
from tests.support.nginx import NginxServer

pytestmark = pytest.mark.platform


@pytest.fixture(scope="module")
def proxied(platform: Running) -> Iterator[Gate]:
    """The gateways behind the documented nginx, without its TLS and with its path prefix."""
    page, prefix = snippets("nginx")
    assert page.page == prefix.page == Path("docs/proxies.md")
    hosts = re.findall(r"server (\S+:8080);", page.text)
    http = re.sub(r" *ssl_certificate\S* .*\n", "", page.text)
    http = http.replace("location / {", f"{prefix.text}location / {{")
    for host, gate in zip(hosts, platform.gates, strict=True):
        http = http.replace(host, f"{gate.host}:{gate.port}")
    with NginxServer(lambda address: http.replace("443 ssl http2", address)) as nginx:
        yield Gate(nginx.url, nginx.process.pid if nginx.process else 0, platform.key)


async def test_a_stream_comes_while_it_is_written(proxied: Gate, one: Gate) -> None:
    async with proxied.create(chat(400, seed=31)) as stream:
        await stream.events(3)
        assert (await one.info(stream.headers["x-stream-id"]))["status"] == "live"
        assert events(await stream.rest())[-1].data == DONE


async def test_a_websocket_opens(proxied: Gate) -> None:
    async with proxied.socket() as socket:
        await socket.create(1, chat(20, seed=32))
        await socket.until_ended(1)
        end = socket.track(1).end
        assert end is not None and end["status"] == "completed"


async def test_a_client_that_hangs_up_is_noticed(proxied: Gate, one: Gate) -> None:
    async with proxied.create(chat(4000, seed=33)) as stream:
        name = stream.headers["x-stream-id"]
        await stream.events(3)
    await one.until_status(name, "cancelled")


async def test_the_largest_bodies_and_cookies_pass(proxied: Gate, one: Gate) -> None:
    body = chat(1, stream=False, messages=[{"role": "user", "content": "word " * 1_500_000}])
    refusal(await proxied.ask("POST", "/v1/chat/completions", body), 400, "context_length_exceeded")
    token = await mint(one, scopes=["read"], models=[f"org/a-model-with-a-long-name-{n:04}" for n in range(75)])
    assert COOKIE_BYTES_MAX - 400 < len(token) < COOKIE_BYTES_MAX
    assert token in await set_cookie(proxied, token)


async def test_below_a_prefix_the_cookie_names_it(proxied: Gate, one: Gate) -> None:
    token = await mint(one, scopes=["read"])
    for method in ("POST", "DELETE"):
        reply = await proxied.ask(method, "/llm/v1/cookie", headers=bearer(token))
        assert "; Path=/llm/v1/streams;" in reply.headers["set-cookie"], method
    assert "; Path=/v1/streams;" in await set_cookie(proxied, token)
    async with one.create(chat(5, seed=34)) as stream:
        name = stream.headers["x-stream-id"]
        await stream.rest()
    reply = await proxied.ask("GET", f"/llm/v1/streams/{name}", headers=cookie(token))
    assert events(reply.body)[-1].data == DONE


async def test_figures_are_not_passed_on(proxied: Gate) -> None:
    assert (await proxied.ask("GET", "/readyz")).status == 200
    assert (await proxied.ask("GET", "/metrics")).status == 404


async def test_a_handshake_that_a_proxy_has_stripped_says_so(platform: Running, one: Gate) -> None:
    http = f"server {{ listen %s; location / {{ proxy_pass {one.url}; }} }}"
    with NginxServer(lambda address: http % address) as nginx:
        for path in ("/v1/stream", "/v1/responses", "/v1/ui/chat"):
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"{nginx.url.replace('http', 'ws')}{path}", subprotocols=[Subprotocol("tokenstream.v1")])
            assert refused.value.response.status_code == 400, path
            assert b"a proxy in front of the gateway removed it" in refused.value.response.body, path
        async with StreamGateway([nginx.url], token=one.key) as gateway:
            with pytest.raises(GatewayError, match="have the proxy pass Upgrade and Connection"):
                await gateway.create(chat(5)).ready()
