"""Several prompts in one completions request: one stream, choices in the order of the prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from openai import OpenAI

from tests.gateway.wire import DONE, HEARTBEAT, MODEL, Event, Gate, after_heartbeat, events

PROMPTS = ["Tell me of rivers.", "Once upon a time", "流れる"]


def body(tokens: int = 12, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPTS, "max_tokens": tokens, "seed": 1, **more}


def texts(found: Sequence[Event]) -> dict[int, str]:
    said: dict[int, str] = {}
    for event in found:
        for choice in event.json["choices"] if event.data != DONE else ():
            said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
    return said


@pytest.fixture
def client(one: Gate) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0, timeout=20) as made:
        yield made


def test_the_official_client_gets_the_choices_of_each_prompt(client: OpenAI) -> None:
    ask: Any = {**body(n=2), "model": MODEL}
    answer = client.completions.create(**ask)
    assert [choice.index for choice in answer.choices] == list(range(6))
    alone = [client.completions.create(**{**ask, "prompt": prompt}) for prompt in PROMPTS]
    assert [choice.text for choice in answer.choices] == [choice.text for each in alone for choice in each.choices]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone if each.usage)
    assert answer.usage.completion_tokens == 72
    said = dict.fromkeys(range(6), "")
    order = []
    for chunk in client.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            said[choice.index] += choice.text
            order.append(choice.index)
    assert list(said.values()) == [choice.text for choice in answer.choices]
    assert order != sorted(order), "choices come side by side"
    assert chunk.usage == answer.usage


def test_token_ids(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=[[1, 2, 3], [4]], max_tokens=4, seed=1)
    one = client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=4, seed=1)
    assert answer.choices[0].text == one.choices[0].text != answer.choices[1].text


async def test_invariant_3_a_resume_at_every_cursor_gives_exactly_the_tail(one: Gate, two: Gate) -> None:
    reply = await one.ask("POST", "/v1/completions", body(stream=True))
    found = events(reply.body)
    stream = reply.headers["x-stream-id"]
    assert set(texts(found)) == {0, 1, 2}
    cursors = [event for event in found if event.id]
    for event in cursors[:-1:3]:
        tail = await two.ask("GET", f"/v1/streams/{stream}?after={event.id}")
        assert after_heartbeat(tail.body) == after_heartbeat(reply.body)[event.end - len(HEARTBEAT) :]


async def test_invariant_5_a_cancel_is_exact_for_all_choices(one: Gate, two: Gate) -> None:
    async with one.open("POST", "/v1/completions", body(4000, stream=True, n=2)) as exchange:
        stream = exchange.headers["x-stream-id"]
        seen = await exchange.events(20)
        told = await two.cancel(stream)
        assert told["result"] == "accepted"
        await exchange.rest()
    assert len({choice["index"] for event in seen for choice in event.json["choices"]}) > 1
    replayed = events(after_heartbeat((await two.ask("GET", f"/v1/streams/{stream}")).body))
    last = int(told["at"].partition("-")[2])
    assert max(int((event.id or "0-0").partition("-")[2]) for event in replayed[:-1]) <= last
    assert replayed[-1].json["error"]["code"] == "cancelled"


async def test_what_is_refused_names_the_field(one: Gate) -> None:
    for more, param, code in (
        ({"best_of": 3}, "best_of", "unsupported"),
        ({"prompt": ["x"] * 129}, "prompt", "invalid_request"),
        ({"prompt": ["x", 1]}, "prompt", "invalid_request"),
    ):
        reply = await one.ask("POST", "/v1/completions", {**body(), **more})
        assert (reply.status, reply.json["error"]["param"], reply.json["error"]["code"]) == (400, param, code)


async def test_another_dialect_reads_all_choices_or_says_why(one: Gate) -> None:
    reply = await one.ask("POST", "/v1/completions", body(4, stream=True))
    stream = reply.headers["x-stream-id"]
    as_chat = await one.ask("GET", f"/v1/streams/{stream}?dialect=openai.chat")
    indices = {choice["index"] for event in events(as_chat.body)[:-1] for choice in event.json["choices"]}
    assert indices == {0, 1, 2}
    refused = await one.ask("GET", f"/v1/streams/{stream}?dialect=anthropic.messages")
    assert refused.status == 400 and "3 choices" in refused.json["error"]["message"]
