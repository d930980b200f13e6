"""The official ``openai`` package for Python, unmodified."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.gateway.processes import Running
from tests.gateway.wire import MODEL, Gate

pytestmark = pytest.mark.platform

ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me of rivers."}],
    "max_tokens": 20,
    "seed": 1,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}


class River(BaseModel):
    name: str
    length_km: int


@pytest.fixture
def client(one: Gate) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0, timeout=20) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def aclient(one: Gate) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0, timeout=20) as made:
        yield made


def test_an_answer_whole_and_streamed(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ASK)
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text and whole.choices[0].message.content == text
    assert whole.choices[0].message.role == "assistant" == chunks[0].choices[0].delta.role
    assert whole.choices[0].finish_reason == "length"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None and usage.completion_tokens == 20
        assert usage.total_tokens == usage.prompt_tokens + 20


async def test_an_answer_whole_and_streamed_async(aclient: AsyncOpenAI) -> None:
    whole = await aclient.chat.completions.create(**ASK)
    parts = []
    async for chunk in await aclient.chat.completions.create(**ASK, stream=True):
        assert chunk.usage is None and chunk.choices, "no usage unless asked for"
        parts.append(chunk.choices[0].delta.content or "")
    assert whole.choices[0].message.content == "".join(parts) != ""


def stopping(client: OpenAI) -> dict[str, Any]:
    """A request whose answer ends by itself: the helpers raise on one that was cut by its length."""
    text = client.chat.completions.create(**ASK).choices[0].message.content or ""
    return {**ASK, "stop": [text.split()[10]]}


def test_the_stream_helper(client: OpenAI) -> None:
    ask = stopping(client)
    with client.chat.completions.stream(**ask) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert len(deltas) > 5 and final.choices[0].message.content == "".join(deltas)
    assert final.choices[0].message.content == client.chat.completions.create(**ask).choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    with pytest.raises(openai.LengthFinishReasonError), client.chat.completions.stream(**ASK) as stream:
        stream.until_done().get_final_completion()


async def test_the_stream_helper_async(client: OpenAI, aclient: AsyncOpenAI) -> None:
    ask = stopping(client)
    async with aclient.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "".join(deltas)
    assert final.usage is not None and final.usage.completion_tokens == sum(map(bool, deltas))


def test_several_choices(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ASK, n=2)
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**ASK, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts[0] != texts[1]
    assert [choice.message.content for choice in whole.choices] == [texts[0], texts[1]]
    with client.chat.completions.stream(**ASK, n=2) as stream:
        final = stream.until_done().current_completion_snapshot
    assert [choice.message.content for choice in final.choices] == [texts[0], texts[1]]


def test_a_tool_call(client: OpenAI) -> None:
    ask = {**ASK, "tools": [WEATHER], "tool_choice": "required"}
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].finish_reason == "tool_calls" and whole.choices[0].message.tool_calls
    (call,) = whole.choices[0].message.tool_calls
    assert call.type == "function" and call.function.name == "weather" and call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    assert isinstance(arguments["city"], str) and isinstance(arguments["days"], int)
    with client.chat.completions.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.name == "weather" and json.loads(streamed.function.arguments) == arguments
    assert "tool_calls.function.arguments.delta" in kinds and kinds.count("tool_calls.function.arguments.done") == 1


def test_a_conversation_that_answers_a_tool_call(client: OpenAI) -> None:
    first = client.chat.completions.create(**{**ASK, "tools": [WEATHER], "tool_choice": "required"})
    message = first.choices[0].message
    assert message.tool_calls
    said: list[Any] = [
        *ASK["messages"],
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain"},
    ]
    second = client.chat.completions.create(**{**ASK, "messages": said})
    assert second.choices[0].message.content and second.choices[0].message.tool_calls is None


def test_logprobs(client: OpenAI) -> None:
    ask = {**ASK, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    assert "".join(item.token for item in whole.choices[0].logprobs.content) == whole.choices[0].message.content
    assert all(len(item.top_logprobs) == 2 for item in whole.choices[0].logprobs.content)
    streamed = [
        item
        for chunk in client.chat.completions.create(**ask, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for item in choice.logprobs.content or ()
    ]
    assert streamed == whole.choices[0].logprobs.content


def test_json_answers(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ASK, response_format={"type": "json_object"})
    assert isinstance(json.loads(whole.choices[0].message.content or ""), dict)
    parsed = client.chat.completions.parse(**ASK, response_format=River)
    assert isinstance(parsed.choices[0].message.parsed, River)
    with client.chat.completions.stream(**ASK, response_format=River) as stream:
        assert stream.until_done().get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed


def test_completions(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "seed": 3}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text and whole.choices[0].text == text and whole.object == "text_completion"
    assert whole.usage is not None and whole.usage == chunks[-1].usage
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]


def test_stop_and_content_parts(client: OpenAI) -> None:
    text = client.chat.completions.create(**ASK).choices[0].message.content or ""
    stop = text.split()[5]
    cut = client.chat.completions.create(**ASK, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop" and cut.message.content == text[: text.index(stop)]
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Tell me of rivers."}]}]
    assert client.chat.completions.create(**{**ASK, "messages": parts}).choices[0].message.content == text


def test_models(client: OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]


def test_errors_are_the_sdks_classes(client: OpenAI, one: Gate) -> None:
    with OpenAI(base_url=f"{one.url}/v1", api_key="sk-nobody", max_retries=0) as nobody:
        with pytest.raises(openai.AuthenticationError) as caught:
            nobody.chat.completions.create(**ASK, stream=True)
        assert caught.value.code == "invalid_api_key" and caught.value.request_id
        with pytest.raises(openai.AuthenticationError):
            nobody.models.list()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**ASK, "model": "no-such-model"})
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    for wrong in ({"messages": []}, {"max_tokens": 0}, {"n": 1000}, {"temperature": 9}, {"messages": "hello"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{**ASK, **wrong})
        assert refused.value.param in wrong
    with pytest.raises(openai.BadRequestError):
        client.post("/chat/completions", cast_to=object, content=b"{")
    with pytest.raises(openai.UnprocessableEntityError) as mismatch:
        for tokens in (5, 6):
            client.chat.completions.create(
                **{**ASK, "max_tokens": tokens}, extra_headers={"Idempotency-Key": f"sdk-{id(client)}"}
            )
    assert mismatch.value.code == "idempotency_mismatch"


def test_what_the_engine_refuses_is_a_bad_request_also_of_a_stream(client: OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{**ASK, "max_tokens": 1_000_000_000}, stream=stream)
        assert refused.value.code == "context_length_exceeded"


def test_a_request_is_not_sent_again_after_its_deadline(one: Gate) -> None:
    long = {**ASK, "max_tokens": 5000, "extra_body": {"deadline_s": 0.3}}
    retries = OpenAI(base_url=f"{one.url}/v1", api_key=one.key, timeout=20)
    with retries, pytest.raises(openai.InternalServerError) as caught:
        retries.chat.completions.create(**long)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


def test_a_retried_request_generates_once(client: OpenAI) -> None:
    """The SDK retries after a lost connection, with the caller's idempotency key."""
    headers = {"Idempotency-Key": f"retry-{id(client)}"}
    answers = [client.chat.completions.create(**ASK, extra_headers=headers) for _ in range(2)]
    assert answers[0].id == answers[1].id and answers[0].choices == answers[1].choices


async def test_an_error_within_the_stream_is_raised(aclient: AsyncOpenAI, two: Gate) -> None:
    stream = await aclient.chat.completions.create(**{**ASK, "max_tokens": 5000}, stream=True)
    parts = []
    with pytest.raises(openai.APIError) as caught:
        async for chunk in stream:
            parts.append(chunk.choices[0].delta.content or "")
            if len(parts) == 5:
                assert (await two.cancel(stream.response.headers["x-stream-id"]))["result"] == "accepted"
    assert caught.value.code == "cancelled" and len(parts) >= 5


async def test_closing_the_stream_cancels(aclient: AsyncOpenAI, two: Gate) -> None:
    stream = await aclient.chat.completions.create(**{**ASK, "max_tokens": 5000}, stream=True)
    async for _ in stream:
        break
    name = stream.response.headers["x-stream-id"]
    assert (await two.info(name))["status"] == "live"
    await stream.close()
    await two.until_status(name, "cancelled")


async def test_leaving_the_helper_cancels(aclient: AsyncOpenAI, two: Gate) -> None:
    async with aclient.chat.completions.stream(**{**ASK, "max_tokens": 5000}) as stream:
        name = stream._response.headers["x-stream-id"]
        async for event in stream:
            if event.type == "content.delta":
                break
    await two.until_status(name, "cancelled")


async def test_our_fields_by_extra_body(aclient: AsyncOpenAI, two: Gate) -> None:
    ask = {**ASK, "max_tokens": 60}
    stream = await aclient.chat.completions.create(**ask, stream=True, extra_body={"on_disconnect": "continue"})
    name = stream.response.headers["x-stream-id"]
    await stream.close()
    await two.until_status(name, "completed")


async def test_a_stream_is_read_on_at_the_other_gateway(aclient: AsyncOpenAI, two: Gate, platform: Running) -> None:
    """``with_streaming_response`` gives the id lines; any client of SSE continues with them."""
    whole = await aclient.chat.completions.create(**ASK)
    async with aclient.chat.completions.with_streaming_response.create(**ASK, stream=True) as response:
        name = response.headers["x-stream-id"]
        lines = [line async for line in response.iter_lines()]
    assert "data: [DONE]" in lines
    reply = await two.ask("GET", f"/v1/streams/{name}")
    assert reply.status == 200
    text = "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        for line in reply.body.decode().splitlines()
        if line.startswith("data: {")
    )
    assert text == whole.choices[0].message.content
