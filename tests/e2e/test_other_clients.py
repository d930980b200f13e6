"""Other clients as they come: httpx-sse, websockets, and our own clients' contract on a real platform."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from httpx_sse import aconnect_sse
from playwright.async_api import Browser
from websockets.asyncio.client import connect

from tests.client.contract import CONTRACT, Target
from tests.client.contract_js import CONTRACT_JS, run_on
from tests.gateway.wire import MODEL, Gate, chat, text_of_chunks

pytestmark = pytest.mark.platform


@pytest.fixture
def target(one: Gate) -> Target:
    return Target(one.url, one.key, MODEL)


async def test_httpx_sse_resumes_on_the_other_gateway(one: Gate, two: Gate) -> None:
    headers = {"Authorization": f"Bearer {one.key}"}
    chunks: list[Any] = []
    last = ""
    async with httpx.AsyncClient(headers=headers, timeout=20) as http:
        url = f"{one.url}/v1/chat/completions"
        async with aconnect_sse(http, "POST", url, json=chat(30, 4)) as source:
            name = source.response.headers["x-stream-id"]
            async for event in source.aiter_sse():
                chunks.append(event.json())
                last = event.id
                if len(chunks) == 10:
                    break
        url = f"{two.url}/v1/streams/{name}"
        async with aconnect_sse(http, "GET", url, headers={"Last-Event-ID": last}) as source:
            rest = [event async for event in source.aiter_sse()]
        assert rest[-1].data == "[DONE]"
        chunks += [event.json() for event in rest[:-1]]
        whole = await http.post(f"{one.url}/v1/chat/completions", json={**chat(30, 4), "stream": False})
        assert text_of_chunks(chunks) == whole.json()["choices"][0]["message"]["content"]
        ended = await http.get(url, headers={"Last-Event-ID": rest[-1].id})
        assert ended.status_code == 204 and ended.content == b""


async def test_websockets_follow_the_protocol_to_the_letter(one: Gate, two: Gate) -> None:
    """Nothing but the package and docs/protocol.md."""
    reply = await one.ask("POST", "/v1/tokens", {"scopes": ["create", "read", "cancel"]})
    protocols: list[Any] = ["tokenstream.v1", f"bearer.{reply.json['token']}"]
    async with connect(f"ws{one.url[4:]}/v1/stream", subprotocols=protocols, proxy=None) as socket:
        assert socket.subprotocol == "tokenstream.v1"
        hi = json.loads(await socket.recv())
        assert hi["t"] == "hi"
        create = {"t": "create", "ch": 1, "dialect": "openai.chat", "body": chat(25, 5), "key": hi["conn"]}
        await socket.send(json.dumps(create))
        ok = json.loads(await socket.recv())
        assert (ok["t"], ok["ch"], ok["status"]) == ("ok", 1, "live")
        seq, chunks = 0, []
        async for raw in socket:
            message = json.loads(raw)
            if message["t"] == "end":
                break
            assert message["t"] == "d" and message.get("a", message["s"] - 1) == seq
            seq = message["s"]
            chunks += message["f"]
        assert message["status"] == "completed" and message["usage"]["output"] == 25
        assert seq in (message["s"], message["s"] - 1)
    whole = await two.ask("POST", "/v1/chat/completions", {**chat(25, 5), "stream": False})
    assert text_of_chunks(chunks) == whole.json["choices"][0]["message"]["content"]


@pytest.mark.parametrize("behaviour", CONTRACT, ids=lambda behaviour: behaviour.__name__)
async def test_the_python_client(behaviour: Callable[[Target], Awaitable[None]], target: Target) -> None:
    await behaviour(target)


@pytest.mark.parametrize("behaviour", CONTRACT_JS)
async def test_the_javascript_client(behaviour: str, browser: Browser, target: Target) -> None:
    async with asyncio.timeout(60):
        await run_on(browser, target, CONTRACT_JS[behaviour])
