"""The official ``openai`` packages, unmodified, on the WebSocket mode of the Responses API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.resources.responses.responses import AsyncResponsesConnection
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseIncompleteEvent,
    ResponseSteerAcceptedEvent,
    ResponseSteerFailedEvent,
)

from tests.e2e.test_node import result, script
from tests.gateway.processes import Running
from tests.gateway.wire import MODEL, Gate, chat

pytestmark = pytest.mark.platform
ASK: dict[str, Any] = {"model": MODEL, "input": "Tell me of rivers.", "max_output_tokens": 20}
ANSWER_S = 20.0


@pytest_asyncio.fixture(loop_scope="session")
async def client(one: Gate) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0) as made:
        yield made


async def final(connection: AsyncResponsesConnection, told: list[Any] | None = None) -> Any:
    """The response of the next turn."""
    async with asyncio.timeout(ANSWER_S):
        while True:
            event = await connection.recv()
            if told is not None:
                told.append(event)
            if isinstance(event, ResponseCompletedEvent | ResponseIncompleteEvent):
                return event.response
            assert event.type != "error", event


async def test_python_turns_a_warm_up_and_a_chain(client: openai.AsyncOpenAI, one: Gate) -> None:
    async with client.responses.connect() as connection:
        told: list[Any] = []
        seeded: Any = {"type": "response.create", **ASK, "seed": 1}  # a field that the SDK does not know
        await connection.send(seeded)
        first = await final(connection, told)
        reply = await one.ask("POST", "/v1/chat/completions", {**chat(20, 1), "stream": False})
        said = reply.json["choices"][0]["message"]["content"]
        assert first.output_text == said == "".join(e.delta for e in told if e.type == "response.output_text.delta")
        assert [event.sequence_number for event in told] == list(range(len(told)))
        assert not any(getattr(event, "stream_id", None) for event in told)
        await connection.response.create(model=MODEL, input="You will hear of lakes.", generate=False, store=False)
        warm = await final(connection)
        assert warm.output == [] and warm.status == "completed"
        await connection.response.create(**{**ASK, "previous_response_id": warm.id, "store": False})
        chained = await final(connection)
        assert chained.previous_response_id == warm.id and chained.usage.input_tokens > first.usage.input_tokens
        await connection.response.create(**ASK, stream_id="a")
        await connection.response.create(**ASK, stream_id="b")
        lanes = {}
        for _ in range(2):
            events: list[Any] = []
            response = await final(connection, events)
            lanes[events[-1].stream_id] = response
        assert set(lanes) == {"a", "b"}


async def test_python_errors(client: openai.AsyncOpenAI) -> None:
    async with client.responses.connect() as connection:
        await connection.response.create(**{**ASK, "previous_response_id": "resp_" + "0" * 32, "stream_id": "a"})
        refused = await asyncio.wait_for(connection.recv(), ANSWER_S)
        assert refused.type == "error" and refused.status == 404 and refused.stream_id == "a"
        assert refused.error.code == "previous_response_not_found"
        await connection.response.steer(input="Be brief.", previous_response_id="resp_" + "0" * 32)
        steered = await asyncio.wait_for(connection.recv(), ANSWER_S)
        assert steered.type == "response.steer.failed" and steered.steer.input == "Be brief."
        await connection.response.create(**ASK)
        await final(connection)
    nobody = client.copy(api_key="sk-nobody")
    with pytest.raises(Exception, match="401"):
        async with nobody.responses.connect():
            pass


async def test_python_steers(client: openai.AsyncOpenAI, one: Gate) -> None:
    async with client.responses.connect() as connection:
        await connection.response.create(**{**ASK, "max_output_tokens": 3000, "store": False})
        created = (await asyncio.wait_for(connection.recv(), ANSWER_S)).response.id
        while (await asyncio.wait_for(connection.recv(), ANSWER_S)).type != "response.output_text.delta":
            pass
        await connection.response.steer(input="In French, please.", previous_response_id=created)
        told: list[Any] = []
        ended = await final(connection, told)
        (accepted,) = [event for event in told if event.type == "response.steer.accepted"]
        assert isinstance(accepted, ResponseSteerAcceptedEvent) and accepted.steer.previous_response_id == created
        assert ended.id == created and ended.incomplete_details.reason == "steered"
        successor = (await asyncio.wait_for(connection.recv(), ANSWER_S)).response
        assert successor.previous_response_id == created
        await connection.response.steer(input="", previous_response_id=successor.id)
        told = []
        await one.cancel(successor.id)
        await final(connection, told)
        (failed,) = [event for event in told if event.type == "response.steer.failed"]
        assert isinstance(failed, ResponseSteerFailedEvent) and failed.error.code == "invalid_input"


async def test_python_connects_again_after_a_drain(platform: Running, one: Gate) -> None:
    """The SDK's own reconnect: the gateway drains, and the next one answers."""
    with await asyncio.to_thread(platform.gateway, "--drain-s", "10", "--drain-spread-s", "0") as process:
        leaving = process.facts["url"]
        client = openai.AsyncOpenAI(base_url=f"{leaving}/v1", api_key=platform.key, max_retries=0)
        attempts: list[int] = []

        def again(event: Any) -> None:
            attempts.append(event.close_code)
            client.websocket_base_url = f"{one.url}/v1".replace("http", "ws")

        async with client, client.responses.connect(on_reconnecting=again) as connection:
            await connection.response.create(**ASK)
            first = await final(connection)
            process.terminate()
            reading = asyncio.create_task(_next_response(connection))
            async with asyncio.timeout(ANSWER_S):
                while not attempts:
                    await asyncio.sleep(0.05)
            await connection.response.create(**{**ASK, "previous_response_id": first.id})
            second = await reading
        assert attempts[0] == 1012 and second.previous_response_id == first.id
        await asyncio.to_thread(process.wait, 10)


async def _next_response(connection: AsyncResponsesConnection) -> Any:
    async with asyncio.timeout(ANSWER_S):
        async for event in connection:
            if isinstance(event, ResponseCompletedEvent | ResponseIncompleteEvent):
                return event.response
    return None


async def test_node_lanes(node: str, one: Gate, two: Gate) -> None:
    async with script(node, "openai_responses_socket.mjs", one) as process:
        told = await result(process)
    reply = await two.ask("POST", "/v1/chat/completions", {**chat(20, 1), "stream": False})
    assert told["text"] == reply.json["choices"][0]["message"]["content"]
    stored = await two.ask("GET", f"/v1/responses/{told['id']}")
    assert json.dumps(stored.json["output"]) == json.dumps(told["output"])
