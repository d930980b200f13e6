"""Structured replies: their check in the log, in every dialect and on every gateway, and their repair."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.gateway.processes import Running
from tests.gateway.wire import DONE, MODEL, Gate, after_heartbeat, events


class City(BaseModel):
    name: str
    people: int
    tags: list[str]


class Metropolis(BaseModel):
    name: str
    people: int = Field(ge=1_000_000)
    """The simulator's integers are below 100."""


class Odd(BaseModel):
    """A bound that about half of the simulator's replies keep: which ones depends on the prompt."""

    people: int = Field(ge=50)


def wanted(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"name": model.__name__, "strict": True, "schema": model.model_json_schema()}
    return {"type": "json_schema", "json_schema": schema}


def body(model: type[BaseModel] = City, prompt: str = "Name a city.", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": messages, "response_format": wanted(model), **more}


@pytest.fixture
def client(one: Gate) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0, timeout=30) as made:
        yield made


def test_the_official_helper_parses_and_the_choice_says_that_it_fits(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "A city."}],
        response_format=City, max_completion_tokens=500,
    )  # fmt: skip
    assert isinstance(answer.choices[0].message.parsed, City)
    assert (answer.choices[0].model_extra or {})["structured_output"] == {"valid": True}


def test_the_official_streaming_helper_tolerates_the_extension(client: OpenAI) -> None:
    told: list[Any] = []
    for model, valid in ((City, True), (Metropolis, False)):
        chunks: list[Any] = []
        with client.chat.completions.stream(**body(model)) as stream:
            for event in stream:
                if event.type == "chunk":
                    chunks.append(event.chunk.to_dict())
            final = stream.get_final_completion()
        assert final.choices[0].finish_reason == "stop" and json.loads(final.choices[0].message.content or "")
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        told = [choice["structured_output"] for choice in choices if "structured_output" in choice]
        assert [found["valid"] for found in told] == [valid]
    assert told[0]["error"]["path"] == "/people" and "1000000" in told[0]["error"]["message"]


@pytest.mark.parametrize(("model", "result"), [(City, "valid"), (Metropolis, "invalid")])
async def test_every_gateway_and_every_reader_gets_the_same_result(
    one: Gate, two: Gate, model: type[BaseModel], result: str
) -> None:
    whole = await one.ask("POST", "/v1/chat/completions", body(model))
    assert whole.status == 200 and whole.headers["x-structured-output"] == result
    found = whole.json["choices"][0]
    assert found["finish_reason"] == "stop" and found["structured_output"]["valid"] is (result == "valid")
    stream = whole.headers["x-stream-id"]
    replays = [(await gate.ask("GET", f"/v1/streams/{stream}")).body for gate in (one, two)]
    assert replays[0] == replays[1]
    replayed = events(after_heartbeat(replays[0]))
    assert replayed[-1].data == DONE
    finish = replayed[-2]
    assert finish.json["choices"][0]["structured_output"] == found["structured_output"]
    before = replayed[-3].id
    tail = events(after_heartbeat((await two.ask("GET", f"/v1/streams/{stream}?after={before}")).body))
    assert [event.data for event in tail] == [finish.data, DONE], "a reader in the middle gets the same"


async def test_choices_are_checked_one_by_one(one: Gate) -> None:
    reply = await one.ask("POST", "/v1/chat/completions", body(Odd, n=8))
    results = {choice["index"]: choice["structured_output"]["valid"] for choice in reply.json["choices"]}
    for choice in reply.json["choices"]:
        assert results[choice["index"]] is (json.loads(choice["message"]["content"])["people"] >= 50)
    assert reply.headers["x-structured-output"] == ("valid" if all(results.values()) else "invalid")


async def test_what_is_not_checked_says_why_or_nothing(one: Gate) -> None:
    remote = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://127.0.0.1:9/x"}}}
    reply = await one.ask("POST", "/v1/chat/completions", {**body(), "response_format": remote})
    found = reply.json["choices"][0]["structured_output"]
    assert found["valid"] is None and "cannot be checked" in found["error"]["message"]
    assert reply.headers["x-structured-output"] == "unchecked"
    plain = await one.ask("POST", "/v1/chat/completions", {**body(), "response_format": {"type": "text"}})
    assert "structured_output" not in plain.json["choices"][0] and "x-structured-output" not in plain.headers


async def test_the_socket_tells_it_at_the_end(one: Gate, two: Gate) -> None:
    async with one.socket() as socket:
        await socket.create(1, body(Metropolis, stream=True))
        await socket.until_ended(1)
        track = socket.track(1)
    assert track.end is not None
    (told,) = track.end["structured_output"]
    assert told["choice"] == 0 and told["valid"] is False and told["error"]["path"] == "/people"
    (chunk,) = [c for m in track.data for c in m["f"] if c["choices"] and c["choices"][0]["finish_reason"]]
    assert chunk["choices"][0]["structured_output"] == {name: told[name] for name in ("valid", "error")}
    stream = track.ok[0]["stream"]
    for mode in ("snapshot", "coalesce"):
        async with two.socket() as socket:
            await socket.sub(1, stream, mode=mode)
            await socket.until_ended(1)
            end = socket.track(1).end
            assert end is not None and end["structured_output"] == [told], mode


def test_anthropics_client_tolerates_it(one: Gate) -> None:
    form = {"format": {"type": "json_schema", "schema": Metropolis.model_json_schema()}}
    ask: Any = {
        "model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": "A city"}],
        "extra_body": {"output_config": form},
    }  # fmt: skip
    with Anthropic(base_url=one.url, api_key=one.key, max_retries=0, timeout=30) as client:
        answer = client.messages.create(**ask)
        assert answer.to_dict()["structured_output"]["valid"] is False  # type: ignore[typeddict-item]
        with client.messages.stream(**ask) as stream:
            told = [event for event in stream if event.type == "message_delta"]
            final = stream.get_final_message()
    assert told[0].to_dict()["structured_output"]["error"]["path"] == "/people"  # type: ignore[typeddict-item]
    assert final.stop_reason == "end_turn"


# --- repair --------------------------------------------------------------------------------------------------


async def test_a_reply_that_does_not_fit_is_made_again(one: Gate) -> None:
    repaired = None
    for number in range(40):
        prompt = f"City number {number}"
        plain = await one.ask("POST", "/v1/chat/completions", body(Odd, prompt))
        if plain.headers["x-structured-output"] == "valid":
            same = await one.ask("POST", "/v1/chat/completions", body(Odd, prompt, repair=1))
            assert same.json["choices"][0]["structured_output"] == {"valid": True}
            assert same.json["usage"] == plain.json["usage"], "nothing was repaired"
            continue
        reply = await one.ask("POST", "/v1/chat/completions", body(Odd, prompt, repair=1))
        told = reply.json["choices"][0]["structured_output"]
        assert told["repairs"] == 1
        assert told["valid"] is (json.loads(reply.json["choices"][0]["message"]["content"])["people"] >= 50)
        before, after = plain.json["usage"], reply.json["usage"]
        assert after["completion_tokens"] > before["completion_tokens"], "both replies are billed"
        assert after["prompt_tokens"] > 2 * before["prompt_tokens"], "the second prompt holds the first reply"
        if told["valid"]:
            repaired = reply
            break
    assert repaired is not None
    stream = repaired.headers["x-stream-id"]
    replayed = events(after_heartbeat((await one.ask("GET", f"/v1/streams/{stream}")).body))
    said = "".join(c["delta"].get("content") or "" for e in replayed[:-1] for c in e.json["choices"])
    assert said == repaired.json["choices"][0]["message"]["content"], "the reply that did not fit is in no log"


async def test_repairs_are_bounded_by_the_plan(one: Gate) -> None:
    reply = await one.ask("POST", "/v1/chat/completions", body(Metropolis, repair=3))
    told = reply.json["choices"][0]["structured_output"]
    assert (told["valid"], told["repairs"]) == (False, 1), "the platform's plan allows one"
    assert reply.headers["x-structured-output"] == "invalid"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"stream": True}, "streamed reply cannot be taken back"),
        ({"n": 2}, "one choice"),
        ({"response_format": {"type": "text"}}, "asks for no JSON"),
    ],
)
async def test_a_repair_that_is_not_possible_is_refused(one: Gate, more: dict[str, Any], words: str) -> None:
    reply = await one.ask("POST", "/v1/chat/completions", {**body(repair=1), **more})
    assert (reply.status, reply.json["error"]["code"], reply.json["error"]["param"]) == (400, "unsupported", "repair")
    assert words in reply.json["error"]["message"]
    beyond = await one.ask("POST", "/v1/chat/completions", body(repair=4))
    assert (beyond.status, beyond.json["error"]["param"]) == (400, "repair")


async def test_agents_and_gateways_count(platform: Running, one: Gate) -> None:
    with platform.agent("counted", "--metrics-port", "0") as agent:
        for model in (City, Metropolis):
            reply = await one.ask("POST", "/v1/chat/completions", {**body(model), "model": "counted"})
            assert reply.status == 200, reply
        url = agent.facts["metrics"].removesuffix("/metrics")
        page = (await Gate(url, agent.pid, "").ask("GET", "/metrics")).body.decode()
    for result in ("valid", "invalid"):
        assert re.search(rf'structured_replies_total{{pool="counted",result="{result}"}} 1.0', page), page
    assert "frames_passed_over_total 0.0" in page
    assert await one.gauge("frames_passed_over_total") == 0
