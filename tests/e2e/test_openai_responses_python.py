"""Responses with the official ``openai`` package for Python, unmodified."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.gateway.wire import MODEL, Gate

pytestmark = pytest.mark.platform

ASK: dict[str, Any] = {
    "model": MODEL,
    "input": "Tell me of rivers.",
    "max_output_tokens": 20,
    "extra_body": {"seed": 1},
}
LONG: dict[str, Any] = {**ASK, "max_output_tokens": 5000, "extra_body": {"seed": 1, "ignore_eos": True}}
ENDING: dict[str, Any] = {**ASK, "max_output_tokens": None}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


class River(BaseModel):
    name: str
    length_km: int


@pytest.fixture
def client(one: Gate) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture
def other(two: Gate) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{two.url}/v1", api_key=two.key, max_retries=0, timeout=20) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def aclient(one: Gate) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0, timeout=20) as made:
        yield made


def test_a_response_whole_and_streamed(client: OpenAI) -> None:
    whole = client.responses.create(**ASK)
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens" and whole.output_text
    assert whole.usage is not None and whole.usage.output_tokens == 20
    events = list(client.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    ended = client.responses.create(**ENDING)
    assert ended.status == "completed" and ended.output_text.startswith(text.split()[0])
    with client.responses.stream(**ENDING) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert said == final.output_text == ended.output_text and final.usage == ended.usage


async def test_a_response_and_a_chat_are_one_answer(aclient: AsyncOpenAI) -> None:
    response = await aclient.responses.create(**ASK, instructions="Be brief.")
    said: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK["input"]}]
    chat = await aclient.chat.completions.create(model=MODEL, messages=said, max_tokens=20, seed=1)
    assert chat.choices[0].message.content == response.output_text


def test_tools_and_their_results(client: OpenAI) -> None:
    ask = {**ENDING, "tools": [WEATHER], "tool_choice": "required"}
    whole = client.responses.create(**ask)
    (call,) = whole.output
    assert call.type == "function_call" and call.name == "weather" and whole.status == "completed"
    assert isinstance(json.loads(call.arguments)["days"], int)
    with client.responses.stream(**ask) as stream:
        partial = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call" and streamed.arguments == partial == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    chained = client.responses.create(**{**ASK, "input": [result]}, previous_response_id=whole.id, tools=[WEATHER])
    said: Any = [{"role": "user", "content": ASK["input"]}, call.to_dict(), result]
    alone = client.responses.create(**{**ASK, "input": said}, tools=[WEATHER])
    assert chained.output_text == alone.output_text != ""


def test_a_call_of_a_namespace_and_its_result(client: OpenAI, other: OpenAI) -> None:
    tools: Any = [{"type": "namespace", "name": "agents", "description": "Subagents.", "tools": [WEATHER]}]
    ask: dict[str, Any] = {"model": MODEL, "tools": tools, "extra_body": {"seed": 1}}
    with client.responses.stream(input="Ask.", tool_choice="required", **ask) as stream:
        [call] = stream.until_done().get_final_response().output
    assert call.type == "function_call"
    assert (call.name, call.namespace) == (WEATHER["name"], "agents")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    alone = other.responses.create(input=[call.to_dict(), result], **ask)
    [echoed] = alone.tools
    assert echoed.type == "namespace" and alone.output_text


def test_a_custom_tool_and_references_to_what_is_stored(client: OpenAI, other: OpenAI) -> None:
    tool: Any = {"type": "custom", "name": "sql", "description": "Runs SQL."}
    ask: dict[str, Any] = {"model": MODEL, "tools": [tool], "extra_body": {"seed": 1}}
    with client.responses.stream(input="Ask sql.", tool_choice="required", **ask) as stream:
        types = [event.type for event in stream]
        made = stream.get_final_response()
    [call] = made.output
    assert call.type == "custom_tool_call" and call.name == "sql" and not call.input.startswith("{")
    assert types[-5:-1] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "3 rows"}
    assert call.id is not None
    reference: Any = {"type": "item_reference", "id": call.id}
    told = other.responses.create(input=[reference, result], **ask)
    assert told.output_text
    stored = other.responses.input_items.list(told.id, order="asc").data
    assert [item.type for item in stored] == ["custom_tool_call", "custom_tool_call_output"]
    with pytest.raises(openai.NotFoundError, match="send the item itself") as refused:
        client.responses.create(input=[{"type": "item_reference", "id": "msg_" + "0" * 32}, result], **ask)
    assert refused.value.code == "item_not_found" and refused.value.param == "input"
    with pytest.raises(openai.BadRequestError, match="connect your client to the MCP server") as refused_tool:
        client.responses.create(model=MODEL, input="x", tools=[{"type": "mcp", "server_label": "x"}])
    assert refused_tool.value.param == "tools"


def test_structured_output(client: OpenAI) -> None:
    parsed = client.responses.parse(**ENDING, text_format=River)
    assert isinstance(parsed.output_parsed, River)
    with client.responses.stream(**ENDING, text_format=River) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    free = client.responses.create(**ENDING, text={"format": {"type": "json_object"}})
    assert isinstance(json.loads(free.output_text), dict)


def test_reasoning_and_logprobs(client: OpenAI) -> None:
    with client.responses.stream(**ENDING, reasoning={"effort": "low"}) as stream:
        thought = "".join(event.delta for event in stream if event.type == "response.reasoning_text.delta")
        final = stream.get_final_response()
    reasoning, message = final.output
    assert reasoning.type == "reasoning" and reasoning.content and reasoning.content[0].text == thought != ""
    assert message.type == "message"
    again: Any = [{"role": "user", "content": ASK["input"]}, *(item.to_dict() for item in final.output)]
    assert client.responses.create(**{**ASK, "input": again}).output_text
    whole = client.responses.create(**ASK, include=["message.output_text.logprobs"], top_logprobs=2)
    part = whole.output[0].content[0]  # type: ignore[union-attr,index]
    assert part.type == "output_text" and part.logprobs is not None and len(part.logprobs) == 20


def test_in_the_background_with_a_resume(client: OpenAI, other: OpenAI) -> None:
    stream = client.responses.create(**ENDING, background=True, stream=True)
    seen = [next(stream) for _ in range(6)]
    stream.close()
    name = seen[0].response.id  # type: ignore[union-attr]
    rest = list(other.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number))
    whole = [*seen, *rest]
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert rest[-1].type == "response.completed"
    assert other.responses.retrieve(name) == rest[-1].response
    with other.responses.stream(response_id=name, starting_after=3) as helper:
        told = list(helper)
        assert helper.get_final_response().output_text == rest[-1].response.output_text
    assert [event.sequence_number for event in told] == list(range(4, len(whole)))


async def test_in_the_background_polled_and_cancelled(aclient: AsyncOpenAI) -> None:
    made = await aclient.responses.create(**ENDING, background=True)
    assert made.status == "queued"
    async with asyncio.timeout(20):
        while (made := await aclient.responses.retrieve(made.id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.05)
    assert made.status == "completed" and made.output_text
    long = await aclient.responses.create(**LONG, background=True)
    cancelled = await aclient.responses.cancel(long.id)
    assert cancelled.status == "cancelled"
    assert (await aclient.responses.retrieve(long.id)).status == "cancelled"
    await aclient.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await aclient.responses.retrieve(made.id)


async def test_a_cancel_from_elsewhere_ends_the_stream(aclient: AsyncOpenAI, two: Gate) -> None:
    async with aclient.responses.stream(**LONG) as stream:
        last = None
        async for event in stream:
            last = event
            if event.sequence_number == 8:
                name = stream._response.headers["x-stream-id"]
                assert (await two.ask("POST", f"/v1/responses/{name}/cancel")).json["status"] == "cancelled"
    assert last is not None and last.type == "response.incomplete" and last.response.status == "cancelled"


async def test_leaving_a_plain_response_cancels_it(aclient: AsyncOpenAI, two: Gate) -> None:
    async with aclient.responses.stream(**LONG) as stream:
        name = stream._response.headers["x-stream-id"]
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
    await two.until_status(name, "cancelled")


def test_errors_are_the_sdks_classes(client: OpenAI) -> None:
    nobody = client.with_options(api_key="sk-nobody")
    with pytest.raises(openai.AuthenticationError):
        nobody.responses.create(**ASK, stream=True)
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(**{**ASK, "model": "no-such-model"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as previous:
        client.responses.create(**ASK, previous_response_id="resp_" + "0" * 32)
    assert (previous.value.code, previous.value.param) == ("previous_response_not_found", "previous_response_id")
    for wrong in ({"tools": [{"type": "web_search"}]}, {"input": [{"role": "nobody", "content": "x"}]}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**{**ASK, **wrong})
        assert refused.value.param in wrong
