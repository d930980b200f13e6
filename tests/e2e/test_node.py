"""The official Node packages, unmodified: ``openai``, ``@anthropic-ai/sdk``, ``eventsource``. See tests/node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.e2e.conftest import NODE_FOLDER
from tests.gateway.wire import MODEL, Gate, chat, text_of_chunks
from tests.support.proxy import Proxy

pytestmark = pytest.mark.platform

SCRIPT_S = 60


@asynccontextmanager
async def script(node: str, name: str, gate: Gate, **env: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        node,
        name,
        cwd=NODE_FOLDER,
        env={"BASE_URL": gate.url, "KEY": gate.key, "MODEL": MODEL, **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def result(process: asyncio.subprocess.Process, within_s: float = SCRIPT_S) -> Any:
    """The program's printed result, after it ended with exit code 0."""
    async with asyncio.timeout(within_s):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out)


async def test_openai(node: str, one: Gate, two: Gate) -> None:
    async with script(node, "openai_chat.mjs", one) as process:
        told = await result(process)
    body = {**chat(20, 1), "stream": False}
    reply = await two.ask("POST", "/v1/chat/completions", body)
    assert reply.json["choices"][0]["message"]["content"] == told["text"]


async def test_openai_responses(node: str, one: Gate, two: Gate) -> None:
    async with script(node, "openai_responses.mjs", one) as process:
        told = await result(process)
    reply = await two.ask("POST", "/v1/chat/completions", {**chat(20, 1), "stream": False})
    assert reply.json["choices"][0]["message"]["content"] == told["text"]
    assert told["reasoned"] == ["reasoning", "message"]
    await two.until_status(told["aborted"], "cancelled")


async def test_openai_custom_tools_references_and_long_conversations(
    node: str, one: Gate, two: Gate, short: str
) -> None:
    async with script(node, "openai_context.mjs", one, SHORT=short) as process:
        told = await result(process)
    kept = {"model": short, "input": told["kept"], "max_output_tokens": 20, "seed": 1}
    reply = await two.ask("POST", "/v1/responses", kept)
    assert reply.json["output"][0]["content"][0]["text"] == told["text"], "the prompt is that of the items that remain"


async def test_openai_aborts_cancel(node: str, one: Gate, two: Gate) -> None:
    async with script(node, "openai_abort.mjs", one) as process:
        ids = (await result(process))["ids"]
    assert len(set(ids)) == 3
    for stream in ids:
        await two.until_status(stream, "cancelled")


async def test_anthropic(node: str, one: Gate, two: Gate) -> None:
    async with script(node, "anthropic_messages.mjs", one) as process:
        told = await result(process)
    reply = await two.ask("POST", "/v1/chat/completions", {**chat(20, 1), "stream": False})
    assert reply.json["choices"][0]["message"]["content"] == told["text"]
    assert told["reasoned"] == ["thinking", "text"]
    await two.until_status(told["aborted"], "cancelled")


async def test_eventsource_resumes_and_ends(node: str, one: Gate, two: Gate) -> None:
    count = 400  # lasts six seconds: it still runs when a busy machine cuts it
    stream = await one.background(count, seed=6)
    async with Proxy.before(two.port) as proxy:
        gate = Gate(f"http://127.0.0.1:{proxy.port}", two.pid, two.key)
        async with script(node, "eventsource.mjs", gate, STREAM=stream) as process:
            assert process.stderr is not None
            async with asyncio.timeout(SCRIPT_S):
                while await process.stderr.readline() != b"ten\n":
                    pass
            proxy.cut_all()
            told = await result(process)
    assert told["code"] == 204
    assert len(told["asked"]) == 3 and told["asked"][0] is None
    numbers = [int(name.partition("-")[2]) for name in told["ids"]]
    assert numbers == sorted(set(numbers)), "every event once and in order"
    assert int(told["asked"][1].partition("-")[2]) in numbers and told["asked"][2] == told["ids"][-1]
    whole = await one.ask("POST", "/v1/chat/completions", {**chat(count, 6), "stream": False})
    assert text_of_chunks(told["chunks"]) == whole.json["choices"][0]["message"]["content"]
