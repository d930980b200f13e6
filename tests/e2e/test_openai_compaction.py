"""Conversations that the platform compacts by itself, with the official ``openai`` package for Python, unmodified."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.conftest import agent_of
from tests.e2e.test_openai_truncation import turns
from tests.gateway.processes import Running
from tests.gateway.wire import Gate
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

CONTEXT = 8000
MODEL, STEADY = "sim-vast", "sim-vast-steady"
ASK: dict[str, Any] = {"model": MODEL, "max_output_tokens": 20, "extra_body": {"seed": 1}}
AT_1000: Any = [{"type": "compaction", "compact_threshold": 1000}]


@pytest.fixture(scope="module")
def roomy(platform: Running) -> Iterator[str]:
    """A model with room for a summary."""
    with agent_of(platform, MODEL, CONTEXT):
        yield MODEL


@pytest.fixture
def steady(platform: Running) -> Iterator[str]:
    """A model that needs a minute for a summary."""
    with agent_of(platform, STEADY, CONTEXT, itl_ms=100):
        yield STEADY


@pytest.fixture
def client(one: Gate, roomy: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture
def other(two: Gate, roomy: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{two.url}/v1", api_key=two.key, max_retries=0, timeout=20) as made:
        yield made


def long() -> Any:
    return [{"role": "developer", "content": "Be brief."}, *turns(20), {"role": "user", "content": "And?"}]


def test_below_the_threshold_nothing_happens(client: OpenAI) -> None:
    for threshold in (100_000, 4000):
        more: Any = [{"type": "compaction", "compact_threshold": threshold}]
        made = client.responses.create(**ASK, input=long(), context_management=more)
        assert [item.type for item in made.output] == ["message"]


def test_a_compaction_comes_first_and_the_prompt_is_short(client: OpenAI, other: OpenAI) -> None:
    events = list(client.responses.create(**ASK, input=long(), context_management=AT_1000, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:5] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.output_item.added",
    ]
    last: Any = events[-1]
    compaction, answer = last.response.output
    assert (compaction.type, answer.type) == ("compaction", "message")
    added: Any = events[2]
    assert added.item == compaction and added.output_index == 0
    plain = client.responses.create(**ASK, input=long())
    assert plain.usage is not None and last.response.usage.input_tokens < plain.usage.input_tokens
    assert other.responses.retrieve(last.response.id).output == last.response.output
    streamed = list(other.responses.retrieve(last.response.id, stream=True, starting_after=2))
    assert [event.sequence_number for event in streamed] == list(range(3, len(events)))


def test_the_helper_and_a_background_have_it_too(client: OpenAI) -> None:
    # The helper fails at a response that ends at its limit
    whole = {**ASK, "max_output_tokens": openai.omit}
    with client.responses.stream(**whole, input=long(), context_management=AT_1000) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["compaction", "message"]
    begun = client.responses.create(**ASK, input=long(), context_management=AT_1000, background=True)
    for _ in client.responses.retrieve(begun.id, stream=True):
        pass
    assert [item.type for item in client.responses.retrieve(begun.id).output] == ["compaction", "message"]


def test_it_stands_for_all_before_it_by_id_and_by_value(client: OpenAI, other: OpenAI) -> None:
    made = client.responses.create(**ASK, input=long(), context_management=AT_1000)
    output: Any = [item.model_dump(exclude_none=True) for item in made.output]
    more: Any = {"role": "user", "content": "Go on."}
    by_id = other.responses.create(**ASK, previous_response_id=made.id, input=[more])
    pruned = other.responses.create(**ASK, input=[*output, more])
    unpruned = other.responses.create(**ASK, input=[*long(), *output, more])
    assert by_id.output_text == pruned.output_text == unpruned.output_text
    usages = {each.usage.input_tokens for each in (by_id, pruned, unpruned) if each.usage is not None}
    assert len(usages) == 1 and usages.pop() < 1500
    reference: Any = {"type": "item_reference", "id": made.output[0].id}
    answer: Any = {"type": "item_reference", "id": made.output[1].id}
    referred = client.responses.create(**ASK, input=[reference, answer, more])
    assert referred.output_text == by_id.output_text
    items = list(client.responses.input_items.list(by_id.id))
    assert len(items) == 1


def test_a_long_chain_is_compacted_again_and_again(client: OpenAI) -> None:
    previous, compactions, most = None, 0, 0
    for number in range(14):
        made = client.responses.create(
            **ASK,
            previous_response_id=previous,
            input=f"Question {number}: " + "what " * 150,
            context_management=AT_1000,
        )
        previous = made.id
        compactions += made.output[0].type == "compaction"
        assert made.usage is not None
        most = max(most, made.usage.input_tokens)
    assert 2 <= compactions <= 13
    assert most < 2500, "the prompt stays short"


def test_tool_loops_are_compacted_between_calls(client: OpenAI) -> None:
    items: Any = [{"role": "user", "content": "Read all files."}]
    for number in range(20):
        items.append({"type": "function_call", "call_id": f"c{number}", "name": "read", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": f"c{number}", "output": "line " * 80})
    made = client.responses.create(**ASK, input=items, context_management=AT_1000)
    output: Any = [item.model_dump(exclude_none=True) for item in made.output]
    assert output[0]["type"] == "compaction"
    # The last output is in the window: its call is known
    result: Any = {"type": "function_call_output", "call_id": "c19", "output": "again"}
    client.responses.create(**ASK, input=[*output, result])
    with pytest.raises(openai.BadRequestError, match="output of a call that is not in the input"):
        client.responses.create(**ASK, input=[*output, {**result, "call_id": "c1"}])


def test_what_is_too_long_to_be_summarised_is_truncated_if_the_client_allows_it(client: OpenAI) -> None:
    items: Any = [*turns(120), {"role": "user", "content": "And?"}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, input=items, context_management=AT_1000)
    assert refused.value.code == "context_length_exceeded"
    made = client.responses.create(**ASK, input=items, context_management=AT_1000, truncation="auto")
    assert [item.type for item in made.output] == ["message"]
    assert int(made.to_dict()["truncated_items"]) > 0  # type: ignore[call-overload]


async def test_open_responses_refuses_it(one: Gate, roomy: str) -> None:
    body = {"model": MODEL, "input": "Hi", "context_management": AT_1000}
    reply = await one.ask("POST", "/v1/open/responses", body)
    error = reply.json["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "unsupported", "context_management")


async def test_the_websocket_mode_compacts_and_chains_without_a_store(one: Gate, roomy: str) -> None:
    made = openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0, timeout=20)
    async with made as client, client.responses.connect() as connection:
        body: Any = {"type": "response.create", "model": MODEL, "max_output_tokens": 20, "store": False}
        told = []
        for more in ({"input": long()}, {"input": "Go on."}):
            chained = {"previous_response_id": told[-1].id} if told else {"context_management": AT_1000}
            await connection.send(body | more | chained)
            async for event in connection:
                assert event.type != "error", event
                if event.type in ("response.completed", "response.incomplete"):
                    told.append(event.response)
                    break
    assert [[item.type for item in each.output] for each in told] == [["compaction", "message"], ["message"]]
    assert told[1].usage is not None and told[1].usage.input_tokens < 1500


async def running_in(gate: Gate, model: str) -> int:
    """Sequences in the engines that serve a model."""
    async with gate.open("GET", "/v1/admin/ops") as exchange:
        (event,) = await exchange.events(1)
    pools = json.loads(event.data)["fleet"]["pools"]
    return sum(row["running"] for pool in pools for row in pool["replicas"] if model in row["models"])


async def test_a_summary_ends_with_the_socket_that_waits_for_it(one: Gate, steady: str) -> None:
    more: Any = [{"type": "compaction", "compact_threshold": 2000}]
    body = {"type": "response.create", "model": steady, "store": False, "context_management": more, "input": long()}
    async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0) as client:
        async with client.responses.connect() as connection:
            await connection.send(body)
            await eventually(lambda: running_in(one, steady), "the summary to begin", 20)
        began = time.monotonic()

    async def idle() -> bool:
        return await running_in(one, steady) == 0

    await eventually(idle, "the engine to be idle", 30)
    assert time.monotonic() - began < 20, "not by its own end, after 50 s"
