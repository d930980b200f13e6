"""Official clients of other dialects than the chat, on the real vLLM: their answer is the chat's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from openai.types.responses import Response

from tests.dialects.ui.official import Official
from tests.vllm.continued import CHAT
from tests.vllm.real import CONTEXT, MODEL, NAMED, TOOL, chat, folded, tokens_of
from tests.vllm.whole_platform import Platform

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

QUESTION = chat()["messages"][0]["content"]
ASK: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0}
FUNCTION: Any = {"type": "function", **TOOL["function"]}


async def the_chat_s(platform: Platform, **more: Any) -> tuple[Any, tuple[int, int, int]]:
    """The only choice of the same question as a chat, and its prompt, cached and output tokens."""
    answers, usage = folded(await platform.chunks(CHAT, chat(**more)))
    return answers[0], tokens_of(usage)


# --- OpenAI's Responses --------------------------------------------------------------------------------------


@pytest.fixture
async def openai(platform: Platform) -> AsyncIterator[AsyncOpenAI]:
    base_url = f"{platform.gate.url}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key=platform.gate.key, max_retries=0, timeout=60) as client:
        yield client


async def until_ended(openai: AsyncOpenAI, name: str) -> Response:
    async with asyncio.timeout(60):
        while (found := await openai.responses.retrieve(name)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.05)
    return found


async def test_a_response_is_the_chat_s_answer(platform: Platform, openai: AsyncOpenAI) -> None:
    expected, (prompt, _, output) = await the_chat_s(platform, max_tokens=40)
    whole = await openai.responses.create(**ASK, max_output_tokens=40)
    assert whole.output_text == expected.text != ""
    assert whole.usage is not None and (whole.usage.input_tokens, whole.usage.output_tokens) == (prompt, output)
    assert (expected.finish == "length") == (whole.status == "incomplete")
    async with openai.responses.stream(**ASK, max_output_tokens=40) as stream:
        events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.response.output_text == expected.text and last.response.status == whole.status


async def test_a_response_in_the_background_is_read_again_from_any_number(
    platform: Platform, openai: AsyncOpenAI
) -> None:
    expected, _ = await the_chat_s(platform, max_tokens=200, ignore_eos=True)
    more: dict[str, Any] = {"max_output_tokens": 200, "extra_body": {"ignore_eos": True}}
    made = await openai.responses.create(**ASK, **more, background=True)
    assert made.status == "queued"
    assert (await until_ended(openai, made.id)).output_text == expected.text
    stream = await openai.responses.create(**ASK, **more, background=True, stream=True)
    seen: list[Any] = []
    async for event in stream:
        seen.append(event)
        if len(seen) == 20:
            break
    await stream.close()
    name, after = seen[0].response.id, seen[-1].sequence_number
    rest: list[Any] = [e async for e in await openai.responses.retrieve(name, stream=True, starting_after=after)]
    assert [event.sequence_number for event in (*seen, *rest)] == list(range(len(seen) + len(rest)))
    assert rest[-1].response.output_text == expected.text
    assert await openai.responses.retrieve(name) == rest[-1].response


async def test_a_cancel_of_a_response_reaches_vllm(platform: Platform, openai: AsyncOpenAI) -> None:
    more: dict[str, Any] = {"max_output_tokens": 7000, "extra_body": {"ignore_eos": True}}
    made = await openai.responses.create(**ASK, **more, background=True)
    await platform.direct.until_idle(20, running=1)
    assert (await openai.responses.cancel(made.id)).status == "cancelled"
    await platform.direct.until_idle(20)
    assert (await openai.responses.retrieve(made.id)).status == "cancelled"


async def test_a_tool_is_called_and_its_result_goes_on_by_the_response_s_id(
    platform: Platform, openai: AsyncOpenAI
) -> None:
    expected, _ = await the_chat_s(platform, tools=[TOOL], tool_choice=NAMED, max_tokens=200)
    choice: Any = {"type": "function", "name": FUNCTION["name"]}
    async with openai.responses.stream(**ASK, tools=[FUNCTION], tool_choice=choice, max_output_tokens=200) as stream:
        partial = "".join(
            [event.delta async for event in stream if event.type == "response.function_call_arguments.delta"]
        )
        final = await stream.get_final_response()
    (call,) = final.output
    assert call.type == "function_call" and ((call.name, call.arguments),) == expected.calls
    assert partial == call.arguments and set(json.loads(partial)) == {"city", "days"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    more: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 20, "tools": [FUNCTION]}
    chained = await openai.responses.create(input=[result], previous_response_id=final.id, tool_choice="none", **more)
    items: Any = [{"role": "user", "content": QUESTION}, call.to_dict(), result]
    alone = await openai.responses.create(input=items, tool_choice="none", **more)
    assert chained.output_text == alone.output_text != ""


async def test_a_response_s_reasoning_is_the_chat_s(platform: Platform, openai: AsyncOpenAI) -> None:
    _, answer = await platform.direct.post(
        "/tokenize", {"model": MODEL, "prompt": "</think>", "add_special_tokens": False}
    )
    (end,) = json.loads(answer)["tokens"]
    for push in range(3, 12):  # until its thoughts end within the answer
        more = {"ignore_eos": True, "logit_bias": {str(end): push}, "chat_template_kwargs": {"enable_thinking": True}}
        expected, _ = await the_chat_s(platform, max_tokens=60, **more)
        if expected.reasoning and expected.text:
            break
    assert expected.reasoning and expected.text
    whole = await openai.responses.create(**ASK, max_output_tokens=60, extra_body=more)
    reasoning, message = whole.output
    assert reasoning.type == "reasoning" and reasoning.content and message.type == "message"
    assert (reasoning.content[0].text, whole.output_text) == (expected.reasoning, expected.text)


async def test_a_response_after_another_hits_the_prefix_cache(platform: Platform, openai: AsyncOpenAI) -> None:
    story = f"{time.time()} of a river and a sea. " + "Go on with the story. " * 40
    more: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 40, "extra_body": {"ignore_eos": True}}
    first = await openai.responses.create(input=story, **more)
    assert first.usage is not None and first.usage.input_tokens_details.cached_tokens == 0
    before = await platform.direct.metrics()
    second = await openai.responses.create(input="And then?", previous_response_id=first.id, **more)
    assert second.usage is not None
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached > first.usage.input_tokens / 2
    assert (await platform.direct.metrics()).prefix_hits - before.prefix_hits == cached
    said: Any = [{"role": "user", "content": story}, {"role": "assistant", "content": first.output_text}]
    alone = await openai.responses.create(input=[*said, {"role": "user", "content": "And then?"}], **more)
    assert alone.output_text == second.output_text


async def test_a_conversation_beyond_the_context_is_cut_and_its_next_turn_hits_the_cache(
    platform: Platform, openai: AsyncOpenAI
) -> None:
    more: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 20, "truncation": "auto"}
    items: list[Any] = [{"role": "developer", "content": f"It is {time.time()}."}]
    for number in range(120):
        items.append({"role": "user", "content": f"Tell me of river {number}. " + "Its length? " * 20})
        items.append({"role": "assistant", "content": "It is long. " * 30})
    told: list[Any] = []
    for question in ("And the sea?", "And the moon?"):
        items.append({"role": "user", "content": question})
        made = await openai.responses.create(input=items, **more)
        told.append(made)
        items.append({"role": "assistant", "content": made.output_text})
    first, second = told
    assert first.truncated_items > 0 and first.truncated_items % 2 == 0
    for made in told:
        assert CONTEXT * 0.6 < made.usage.input_tokens <= CONTEXT - 20, "a cut leaves a quarter out too much, not more"
    assert second.truncated_items == first.truncated_items, "the next turn is cut at the same place"
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens * 0.9


async def test_a_conversation_is_compacted_by_the_model(platform: Platform, openai: AsyncOpenAI) -> None:
    more: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 20}
    items: list[Any] = [{"role": "user", "content": "Tell me of rivers. " * 20} for _ in range(15)]
    management: Any = [{"type": "compaction", "compact_threshold": 1200}]
    plain = await openai.responses.create(input=items, **more)
    made = await openai.responses.create(input=items, context_management=management, **more)
    assert [item.type for item in made.output] == ["compaction", "message"]
    assert plain.usage is not None and made.usage is not None
    assert made.usage.input_tokens < plain.usage.input_tokens // 2
    chained = await openai.responses.create(input="Go on.", previous_response_id=made.id, **more)
    value: Any = [*made.output, {"role": "user", "content": "Go on."}]
    alone = await openai.responses.create(input=value, **more)
    assert chained.output_text == alone.output_text != ""


# --- Anthropic's dialect -------------------------------------------------------------------------------------


@pytest.fixture
async def anthropic(platform: Platform) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=platform.gate.url, api_key=platform.gate.key, max_retries=0) as client:
        yield client


async def test_a_message_is_the_chat_s_answer(platform: Platform, anthropic: AsyncAnthropic) -> None:
    body = chat(max_tokens=40)
    expected, usage = folded(await platform.chunks(CHAT, body))
    prompt, _, output = tokens_of(usage)
    ask: dict[str, Any] = {"model": MODEL, "messages": body["messages"], "extra_body": {"temperature": 0}}
    async with anthropic.messages.stream(**ask, max_tokens=40) as stream:
        final = await stream.get_final_message()
    assert "".join(block.text for block in final.content if block.type == "text") == expected[0].text != ""
    said = final.usage
    assert (said.input_tokens + (said.cache_read_input_tokens or 0), said.output_tokens) == (prompt, output)
    assert (await anthropic.messages.count_tokens(**ask)).input_tokens == prompt


async def test_a_tool_is_called_in_anthropic_s_dialect(anthropic: AsyncAnthropic) -> None:
    described = TOOL["function"]
    tool: Any = {"name": described["name"], "strict": True, "input_schema": described["parameters"]}
    message = await anthropic.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": "Rain?"}],
        tools=[tool],
        tool_choice={"type": "tool", "name": described["name"]},
        extra_body={"temperature": 0},
    )
    (call,) = message.content
    assert message.stop_reason == "tool_use" and call.type == "tool_use" and call.name == described["name"]
    assert set(call.input) == {"city", "days"}


# --- Vercel's UI stream --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def official() -> Iterator[Official]:
    made = Official()
    yield made
    made.close()


async def test_a_page_s_message_is_the_chat_s_answer(platform: Platform, official: Official) -> None:
    expected, (_, _, output) = await the_chat_s(platform, max_tokens=40)
    question = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": QUESTION}]}
    body = {"id": "one", "messages": [question], "trigger": "submit-message", "model": MODEL}
    reply = await platform.gate.ask("POST", "/v1/ui/chat", body | {"maxOutputTokens": 40, "temperature": 0})
    assert reply.status == 200, reply
    for version in (6, 7):
        told = official.ask(version, reply.body)
        (message,) = told["messages"]
        assert told["status"] == "ready" and message["metadata"]["usage"]["outputTokens"] == output
        assert "".join(part["text"] for part in message["parts"] if part["type"] == "text") == expected.text != ""
