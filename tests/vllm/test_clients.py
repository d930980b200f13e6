"""Official clients, unmodified, on the real vLLM: the programs that also run on the simulator."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from playwright.async_api import Browser

from tests.e2e.conftest import node  # noqa: F401
from tests.e2e.test_ai_sdk import bundle, chat_page, text_in_the_log  # noqa: F401
from tests.e2e.test_node import result, script
from tests.e2e.test_third_party import LITELLM, run
from tests.gateway.wire import MODEL
from tests.support.venvs import venv_with
from tests.vllm.continued import CHAT
from tests.vllm.whole_platform import Platform

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

WITHIN_S = 240
"""vLLM compiles each schema at its first request."""


async def whole_text(platform: Platform) -> str:
    question = {"role": "user", "content": "Tell me of rivers."}
    reply = await platform.gate.ask("POST", CHAT, {"model": MODEL, "messages": [question], "max_tokens": 20, "seed": 1})
    found: str = reply.json["choices"][0]["message"]["content"]
    return found


@pytest.mark.parametrize(
    "name",
    ["openai_chat", "openai_responses", "openai_abort", "anthropic_messages", "ai_stream_text", "langchain_chat"],
)
async def test_a_program_for_node(platform: Platform, node: str, name: str) -> None:  # noqa: F811
    async with script(node, f"{name}.mjs", platform.gate, GUIDED="openai") as process:
        told = await result(process, WITHIN_S)
    if "text" in told:
        assert told["text"] == await whole_text(platform) != ""
    if "reasoned" in told:
        assert told["reasoned"][0] in ("reasoning", "thinking")
    for stream in aborted(told):
        await platform.gate.until_status(stream, "cancelled")
    await platform.direct.until_idle(5)


def aborted(told: dict[str, Any]) -> list[str]:
    """Streams that the program has left."""
    found = [*told.get("ids", ()), *(told[name]["aborted"] for name in ("openai", "anthropic") if name in told)]
    return [*found, told["aborted"]] if "aborted" in told else found


async def test_litellm(platform: Platform) -> None:
    python = await asyncio.to_thread(venv_with, "litellm==1.110.2")
    gate = platform.gate
    env = {"BASE_URL": gate.url, "KEY": gate.key, "MODEL": MODEL, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    out = await run(python, "-c", LITELLM, env=env)
    assert json.loads(out.splitlines()[-1]) == await whole_text(platform)


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
