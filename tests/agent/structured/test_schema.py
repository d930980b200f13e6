"""The schema that a request asks for, in each way that vLLM takes it, and the request for a repair."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from inference.agent.structured.schema import repairing_request, wanted_schema
from stream_fabric.limits import REPAIR_REPLY_CHARS_MAX
from stream_fabric.stream.frames import Check
from tests.agent.engines.recorder import chat, completion

SCHEMA = {"type": "object", "required": ["a"]}
NAMED = {"name": "x", "strict": True, "schema": SCHEMA}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
)
def test_the_ways_to_ask(fields: dict[str, Any]) -> None:
    for request in (chat(1, **fields), completion(1, **fields)):
        found = wanted_schema(request)
        assert found is not None and json.loads(found) == SCHEMA


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object(fields: dict[str, Any]) -> None:
    assert wanted_schema(chat(1, **fields)) == b'{"type":"object"}'


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": "json"},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_json": None},
        {"response_format": {"type": "json_object"}, "continue_final_message": True},
    ],
)
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert wanted_schema(chat(1, **fields)) is None


def test_a_repair_says_what_is_wrong() -> None:
    request = chat(1, response_format={"type": "json_object"}, seed=3)
    repair = repairing_request(request, '{"b":1}', Check("invalid", "/b", "1 is not a string"))
    assert repair is not None and repair.stream == request.stream
    body = msgspec.json.decode(repair.body)
    assert body["messages"][:-2] == msgspec.json.decode(request.body)["messages"]
    reply, wish = body["messages"][-2:]
    assert reply == {"role": "assistant", "content": '{"b":1}'}
    assert wish["role"] == "user" and "1 is not a string, at /b" in wish["content"]
    assert (body["seed"], body["response_format"]) == (3, {"type": "json_object"})
    assert repairing_request(request, "x" * (REPAIR_REPLY_CHARS_MAX + 1), Check("invalid")) is None
