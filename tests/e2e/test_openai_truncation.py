"""Conversations beyond a model's context, with the official ``openai`` package for Python, unmodified."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.conftest import CONTEXT, SHORT
from tests.gateway.wire import Gate

pytestmark = pytest.mark.platform

ASK: dict[str, Any] = {"model": SHORT, "max_output_tokens": 20, "extra_body": {"seed": 1}}


@pytest.fixture
def client(one: Gate, short: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0, timeout=20) as made:
        yield made


def turns(count: int) -> list[dict[str, str]]:
    """A conversation of ``count`` turns with about 80 words each."""
    items = []
    for number in range(count):
        items.append({"role": "user", "content": f"Question {number}: " + "what " * 40})
        items.append({"role": "assistant", "content": f"Answer {number}: " + "that " * 40})
    return items


def test_without_truncation_it_is_refused(client: OpenAI) -> None:
    items: Any = [*turns(60), {"role": "user", "content": "And?"}]
    for more in ({}, {"truncation": "disabled"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**ASK, **more, input=items)
        assert refused.value.code == "context_length_exceeded"


def test_the_oldest_turns_are_left_out(client: OpenAI) -> None:
    items: Any = [{"role": "developer", "content": "Be brief."}, *turns(60), {"role": "user", "content": "And?"}]
    made = client.responses.create(**ASK, truncation="auto", input=items)
    assert made.status == "incomplete" and made.output_text and made.truncation == "auto"
    left_out = made.to_dict()["truncated_items"]
    assert isinstance(left_out, int) and 80 < left_out < 120
    assert made.usage is not None and CONTEXT // 2 < made.usage.input_tokens <= CONTEXT - 20
    # The prompt is that of the client which leaves the same items out itself
    own: Any = [items[0], *items[1 + left_out :]]
    alone = client.responses.create(**ASK, input=own)
    assert (alone.output_text, alone.usage.input_tokens) == (made.output_text, made.usage.input_tokens)  # type: ignore[union-attr]


def test_what_fits_stays_whole(client: OpenAI) -> None:
    items: Any = [*turns(5), {"role": "user", "content": "And?"}]
    made = client.responses.create(**ASK, truncation="auto", input=items)
    assert made.truncation == "auto" and "truncated_items" not in made.to_dict()
    whole = client.responses.create(**ASK, input=items)
    assert whole.output_text == made.output_text and whole.truncation == "disabled"


def test_a_chain_goes_on_beyond_the_context_and_forgets_nothing(client: OpenAI) -> None:
    previous, left_out = None, []
    for number in range(12):
        made = client.responses.create(
            **ASK,
            truncation="auto",
            instructions="Be brief.",
            previous_response_id=previous,
            input=f"Question {number}: " + "what " * 120,
        )
        previous = made.id
        left_out.append(made.to_dict().get("truncated_items", 0))
    assert left_out[0] == 0 and left_out[-1] > 0 and left_out == sorted(left_out)
    # The stored conversation stays whole: without truncation it is as long as ever
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, previous_response_id=previous, input="And?")
    assert refused.value.code == "context_length_exceeded"
    again = client.responses.retrieve(previous or "")
    assert again.to_dict()["truncated_items"] == left_out[-1]


def test_tool_calls_keep_their_outputs(client: OpenAI) -> None:
    items: Any = [{"role": "user", "content": "Read all files."}]
    for number in range(40):
        items.append({"type": "function_call", "call_id": f"c{number}", "name": "read", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": f"c{number}", "output": "line " * 40})
    tools: Any = [{"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}]
    made = client.responses.create(**ASK, truncation="auto", input=items, tools=tools, tool_choice="none")
    left_out = made.to_dict()["truncated_items"]
    assert isinstance(left_out, int) and left_out % 2 == 0 and 30 < left_out < 80
    own: Any = [items[0], *items[1 + left_out :]]
    alone = client.responses.create(**ASK, input=own, tools=tools, tool_choice="none")
    assert alone.output_text == made.output_text


def test_what_must_stay_may_be_too_much(client: OpenAI) -> None:
    items: Any = [*turns(3), {"role": "user", "content": "word " * CONTEXT}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**ASK, truncation="auto", input=items, stream=stream)
        assert refused.value.code == "context_length_exceeded"
        assert re.search("truncation keeps", str(refused.value))


def test_streams_and_backgrounds_are_cut_too(client: OpenAI) -> None:
    items: Any = [*turns(60), {"role": "user", "content": "And?"}]
    whole = client.responses.create(**ASK, truncation="auto", input=items)
    events = list(client.responses.create(**ASK, truncation="auto", input=items, stream=True))
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert events[0].response.to_dict()["truncated_items"] == last.response.to_dict()["truncated_items"]  # type: ignore[union-attr]
    begun = client.responses.create(**ASK, truncation="auto", input=items, background=True)
    assert begun.to_dict()["truncated_items"] == whole.to_dict()["truncated_items"]


async def test_the_websocket_mode_cuts_too(one: Gate, short: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0, timeout=20) as client:
        whole_input: Any = [*turns(60), {"role": "user", "content": "And?"}]
        whole = await client.responses.create(**ASK, truncation="auto", input=whole_input)
        async with client.responses.connect() as connection:
            body = {"model": SHORT, "max_output_tokens": 20, "truncation": "auto", "input": whole_input, "seed": 1}
            await connection.send({"type": "response.create", **body})  # type: ignore[arg-type]
            async for event in connection:
                if event.type in ("response.completed", "response.incomplete"):
                    break
            found = event.response.to_dict()  # type: ignore[union-attr]
    assert found["truncated_items"] == whole.to_dict()["truncated_items"]
