"""Official clients, unmodified, on the real vLLM: the programs that also run on the simulator."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from playwright.async_api import Browser

from tests.e2e.conftest import node  # noqa: F401
from tests.e2e.test_ai_sdk import bundle, chat_page, text_in_the_log  # noqa: F401
from tests.e2e.test_node import result, script
from tests.e2e.test_third_party import LANGCHAIN, LANGCHAIN_PACKAGE, LITELLM, LITELLM_PACKAGE, LLM_PACKAGE, Llm, run
from tests.gateway.processes import Process
from tests.gateway.wire import MODEL, Gate
from tests.support.venvs import venv_with
from tests.vllm.continued import CHAT
from tests.vllm.real import SMALL, Home
from tests.vllm.whole_platform import PARTITIONS, Platform

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

WITHIN_S = 240
"""vLLM compiles each schema at its first request."""


async def whole_text(platform: Platform) -> str:
    question = {"role": "user", "content": "Tell me of rivers."}
    reply = await platform.gate.ask("POST", CHAT, {"model": MODEL, "messages": [question], "max_tokens": 20, "seed": 1})
    found: str = reply.json["choices"][0]["message"]["content"]
    return found


@pytest.fixture(scope="module")
def prompt(platform: Platform) -> Iterator[Gate]:
    """A gateway that cancels a stream as soon as its reader has left: a fast machine writes a whole answer within the
    usual seconds of grace."""
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": str(PARTITIONS)}
    with Process("gateway", "--port", "0", STREAM_GW_DEV_KEY="sk-dev", STREAM_GW_PLAIN_GRACE_S="0", **env) as gateway:
        yield Gate(gateway.facts["url"], gateway.pid, "sk-dev")


@pytest.mark.parametrize(
    "name",
    ["openai_chat", "openai_responses", "openai_abort", "anthropic_messages", "ai_stream_text", "langchain_chat"],
)
async def test_a_program_for_node(platform: Platform, prompt: Gate, node: str, name: str) -> None:  # noqa: F811
    async with script(node, f"{name}.mjs", prompt, NOISE="yes") as process:
        told = await result(process, WITHIN_S)
    if "text" in told:
        assert told["text"] == await whole_text(platform) != ""
    if "reasoned" in told:
        assert told["reasoned"][0] in ("reasoning", "thinking")
    for stream in aborted(told):
        await prompt.until_status(stream, "cancelled")
    await platform.direct.until_idle(5)


async def test_openai_for_python(platform: Platform) -> None:
    """Chats and completions, whole and streamed; Responses are in ``test_dialects.py``."""
    gate = platform.gate
    question: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me of rivers."}], "seed": 1}
    tale: Any = {"model": MODEL, "prompt": "Once upon a time", "seed": 3, "max_tokens": 12}
    async with AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=gate.key, max_retries=0, timeout=120) as client:
        chunks = await client.chat.completions.create(**question, max_tokens=20, stream=True)
        said = "".join([part.choices[0].delta.content or "" async for part in chunks if part.choices])
        assert said == await whole_text(platform)
        whole = await client.completions.create(**tale)
        pieces = await client.completions.create(**tale, stream=True)
        assert "".join([part.choices[0].text async for part in pieces if part.choices]) == whole.choices[0].text != ""


@pytest.fixture(scope="module")
def embedder(platform: Platform, home: Home) -> Iterator[str]:
    """A model of the platform that makes embeddings."""
    flags = [*SMALL, "--served-model-name", "embedder", "--kv-cache-memory-bytes", str(8 << 20)]
    flags += ["--runner", "pooling", "--convert", "embed"]
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": str(PARTITIONS)}
    command = ["agent", "--engine", "vllm", "--model", home.model(), "--vllm-python", home.python]
    with Process(*command, STREAM_GW_VLLM_FLAGS=shlex.join(flags), **env):
        yield "embedder"


async def test_openai_embeds(platform: Platform, node: str, embedder: str) -> None:  # noqa: F811
    gate = platform.gate
    async with script(node, "openai_more.mjs", gate, MODEL=embedder) as process:
        told = await result(process, WITHIN_S)
    async with AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=gate.key, max_retries=0, timeout=120) as client:
        made = await client.embeddings.create(model=embedder, input=["rivers", "towns"])
    first, second = (item.embedding for item in made.data)
    assert len(first) == len(second) == told["dimensions"] and first != second


def aborted(told: dict[str, Any]) -> list[str]:
    """Streams that the program has left."""
    found = [*told.get("ids", ()), *(told[name]["aborted"] for name in ("openai", "anthropic") if name in told)]
    return [*found, told["aborted"]] if "aborted" in told else found


async def test_litellm(platform: Platform) -> None:
    python = await asyncio.to_thread(venv_with, LITELLM_PACKAGE)
    gate = platform.gate
    env = {"BASE_URL": gate.url, "KEY": gate.key, "MODEL": MODEL, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    out = await run(python, "-c", LITELLM, env=env)
    assert json.loads(out.splitlines()[-1]) == await whole_text(platform)


async def test_langchain_for_python(platform: Platform, embedder: str) -> None:
    python = await asyncio.to_thread(venv_with, LANGCHAIN_PACKAGE)
    gate = platform.gate
    env = {"BASE_URL": gate.url, "KEY": gate.key, "MODEL": MODEL}
    out = await run(python, "-c", LANGCHAIN, env=env | {"EMBEDDER": embedder})
    assert json.loads(out) == await whole_text(platform)


async def test_the_command_llm(platform: Platform, tmp_path: Path) -> None:
    python = await asyncio.to_thread(venv_with, LLM_PACKAGE)
    answers = await Llm(python, tmp_path, platform.gate).answered()
    assert answers == [(await whole_text(platform)).strip()] * 2


@pytest.mark.asyncio(loop_scope="session")  # the loop of the browser
async def test_a_page_with_use_chat_is_reloaded(platform: Platform, browser: Browser, bundle: str) -> None:  # noqa: F811
    gate = platform.gate
    async with chat_page(browser, bundle, gate.url, gate.key, maxOutputTokens=800) as page:
        await page.ask("Tell me of rivers.")
        for words in (0, 5):
            await page.until_words(words)
            await page.reload()
        await gate.until_status(page.streams[0], "completed", 120)
        await page.until_said(await text_in_the_log(gate, page.streams[0]))
        assert await page.answers.count() == 1 and len(page.streams) == 1
        assert 200 in await page.resumes()
