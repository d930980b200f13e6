"""The official ``anthropic`` package for Python, unmodified."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import Anthropic, AsyncAnthropic

from tests.gateway.wire import MODEL, Gate, text_of_chunks

pytestmark = pytest.mark.platform

ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me of rivers."}],
    "max_tokens": 20,
    "extra_body": {"seed": 1},
}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}
LONG: dict[str, Any] = {**ASK, "max_tokens": 5000}


@pytest.fixture
def client(one: Gate) -> Iterator[Anthropic]:
    with Anthropic(base_url=one.url, api_key=one.key, max_retries=0, timeout=20) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def aclient(one: Gate) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=one.url, api_key=one.key, max_retries=0, timeout=20) as made:
        yield made


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_whole_and_streamed(client: Anthropic, one: Gate) -> None:
    whole = client.messages.create(**ASK)
    assert whole.role == "assistant" and whole.type == "message" and whole.id.startswith("msg_")
    assert whole.stop_reason == "max_tokens" and whole.stop_sequence is None
    assert whole._request_id and whole._request_id.startswith("req_")
    events = list(client.messages.create(**ASK, stream=True))
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(whole) != ""
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 20
    assert final.usage == whole.usage and final.usage.input_tokens > 0


async def test_a_message_in_both_dialects_is_one_answer(aclient: AsyncAnthropic, one: Gate) -> None:
    async with aclient.messages.stream(**ASK, system="Be brief.") as stream:
        final = await stream.get_final_message()
    said = [{"role": "system", "content": "Be brief."}, *ASK["messages"]]
    body = {"model": MODEL, "messages": said, "max_tokens": 20, "seed": 1}
    reply = await one.ask("POST", "/v1/chat/completions", body)
    assert reply.json["choices"][0]["message"]["content"] == text_of(final)


def test_stop_sequences(client: Anthropic) -> None:
    text = text_of(client.messages.create(**ASK))
    stop = text.split()[5]
    cut = client.messages.create(**ASK, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert text_of(cut) == text[: text.index(stop)]


def test_thinking(client: Anthropic) -> None:
    with client.messages.stream(**ASK, thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    thought, said = final.content
    assert thought.type == "thinking" and thought.thinking and thought.signature
    assert said.type == "text" and said.text
    assert "thinking" in kinds and kinds.index("thinking") < kinds.index("text")
    again = [*ASK["messages"], {"role": "assistant", "content": final.content}, {"role": "user", "content": "More."}]
    assert text_of(client.messages.create(**{**ASK, "messages": again}))


def test_a_tool_call_and_its_result(client: Anthropic) -> None:
    ask = {**ASK, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    whole = client.messages.create(**ask)
    (call,) = whole.content
    assert whole.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "weather"
    assert isinstance(call.input["city"], str) and isinstance(call.input["days"], int)
    with client.messages.stream(**ask) as stream:
        partial = "".join(event.partial_json for event in stream if event.type == "input_json")
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use" and streamed.input == call.input == json.loads(partial)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain"}]}
    said = [*ASK["messages"], {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**{**ASK, "messages": said}, tools=[WEATHER])
    assert text_of(second) and second.stop_reason != "tool_use"


def test_count_tokens(client: Anthropic) -> None:
    ask = {"model": MODEL, "messages": ASK["messages"]}
    few = client.messages.count_tokens(**ask).input_tokens
    assert few == client.messages.create(**ASK).usage.input_tokens
    assert client.messages.count_tokens(**ask, system="Be brief. " * 20).input_tokens > few


def test_models(client: Anthropic) -> None:
    found = {model.id: model for model in client.models.list()}
    assert found[MODEL].type == "model" and client.models.retrieve(MODEL).id == MODEL


def test_errors_are_the_sdks_classes(client: Anthropic, one: Gate) -> None:
    with Anthropic(base_url=one.url, api_key="sk-nobody", max_retries=0) as nobody:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            nobody.messages.create(**ASK, stream=True)
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        assert caught.value.request_id
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**ASK, "model": "no-such-model"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    for wrong in ({"messages": []}, {"max_tokens": -1}, {"system": [{"type": "image"}]}, {"tools": [{"type": "bash"}]}):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**{**ASK, **wrong})
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        assert refused.value.body["error"]["param"] in wrong  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        client.get("/v1/messages/nothing", cast_to=object)


def test_the_cache_is_warmed_without_an_answer(client: Anthropic) -> None:
    warmed = client.messages.create(**{**ASK, "max_tokens": 0})
    assert (warmed.content, warmed.stop_reason) == ([], "max_tokens")
    with client.messages.stream(**{**ASK, "max_tokens": 0}) as stream:
        assert stream.get_final_message().content == []


def test_a_request_is_not_sent_again_after_its_deadline(one: Gate) -> None:
    retries = Anthropic(base_url=one.url, api_key=one.key, timeout=20)
    with retries, pytest.raises(anthropic.APIStatusError) as caught:
        retries.messages.create(**{**LONG, "extra_body": {"deadline_s": 0.3}})
    assert caught.value.status_code == 504
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


async def test_an_error_within_the_stream_is_raised(aclient: AsyncAnthropic, two: Gate) -> None:
    stream = await aclient.messages.create(**LONG, stream=True)
    seen = 0
    with pytest.raises(anthropic.APIStatusError) as caught:
        async for _ in stream:
            seen += 1
            if seen == 8:
                assert (await two.cancel(stream.response.headers["x-stream-id"]))["result"] == "accepted"
    assert caught.value.body["error"]["code"] == "cancelled"  # type: ignore[index]


async def test_leaving_the_helper_cancels(aclient: AsyncAnthropic, two: Gate) -> None:
    async with aclient.messages.stream(**LONG) as stream:
        name = stream.response.headers["x-stream-id"]
        async for event in stream:
            if event.type == "text":
                break
    await two.until_status(name, "cancelled")


async def test_a_retried_request_generates_once(aclient: AsyncAnthropic, one: Gate) -> None:
    headers = {"Idempotency-Key": f"anthropic-{id(aclient)}"}
    answers = [await aclient.messages.create(**ASK, extra_headers=headers) for _ in range(2)]
    assert answers[0].id == answers[1].id and answers[0].content == answers[1].content
    body = {"model": MODEL, "messages": ASK["messages"], "max_tokens": 20, "seed": 1}
    other = await one.ask("POST", "/v1/chat/completions", body, headers=headers)
    assert (other.status, other.json["error"]["code"]) == (422, "idempotency_mismatch")


async def test_a_stream_is_followed_in_either_dialect_from_any_cursor(aclient: AsyncAnthropic, two: Gate) -> None:
    async with aclient.messages.with_streaming_response.create(**ASK, stream=True) as response:
        name, body = response.headers["x-stream-id"], b"".join([part async for part in response.iter_bytes()])
    events = [event for event in body.replace(b": hb\n", b"").split(b"\n\n") if event]
    again = await two.ask("GET", f"/v1/streams/{name}")
    assert again.status == 200
    assert [event for event in again.body.replace(b": hb\n", b"").split(b"\n\n") if event] == events, "byte for byte"
    for number, event in enumerate(events[:-1], 1):
        _, _, cursor = event.rpartition(b"\nid: ")
        if not cursor or b"\n" in cursor:
            continue
        tail = await two.ask("GET", f"/v1/streams/{name}", headers={"last-event-id": cursor.decode()})
        assert [one for one in tail.body.replace(b": hb\n", b"").split(b"\n\n") if one] == events[number:]
    chat = await two.ask("GET", f"/v1/streams/{name}?dialect=openai.chat")
    chunks = [json.loads(line[6:]) for line in chat.body.decode().splitlines() if line.startswith("data: {")]
    said = "".join(json.loads(e.split(b"\n")[1][6:])["delta"].get("text", "") for e in events if b"text_delta" in e)
    assert text_of_chunks(chunks) == said != ""


async def test_the_example_runs(one: Gate) -> None:
    example = Path(__file__).parents[2] / "examples" / "anthropic_messages.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, example, one.url, one.key, MODEL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert "stopped: max_tokens" in out.decode() and out.decode().splitlines()[-1] == "data: [DONE]"
