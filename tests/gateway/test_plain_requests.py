"""A gateway says what a request's body holds, so that agents do not look for it in a long prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from inference.agent.steering.turns import Turn, steered_request
from inference.agent.structured.schema import wanted_schema
from stream_fabric.pool.records import EngineRequest
from stream_fabric.redis.client import RedisClient
from stream_fabric.stream.ids import StreamId
from stream_gw.dialects.requests import parse_create
from tests.gateway.in_process import InProcess, Reading, in_process

PIXEL = "data:image/png;base64,iVBORw0KGgo="
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


async def placed(world: InProcess, kind: Any = "chat", **fields: Any) -> EngineRequest:
    """Create a stream, and return the request that a replica gets."""
    body = {"model": world.model, "stream": True, **fields}
    body |= {} if kind == "completions" else {"messages": fields.get("messages", [{"role": "user", "content": "hi"}])}
    call = replace(world.call(), request=parse_create(msgspec.json.encode(body), kind), dialect=f"openai.{kind}")
    opened = await world.gateway.streams.create(call)
    assert opened is not None
    opened.subscribe(Reading()).close()
    work = await world.pools.work(world.model, opened.id)
    assert work is not None
    return work.request


async def test_a_request_is_plain_where_there_is_nothing_to_look_for(redis_client: RedisClient) -> None:
    async with in_process(redis_client) as world:
        for fields in ({}, {"n": 1}, {"max_tokens": 9, "stop": ["n"], "tools": []}):
            assert (await placed(world, **fields)).plain, fields
        assert (await placed(world, "completions", prompt="response_format")).plain
        for fields in ({"n": 2}, {"response_format": SCHEMA}, {"guided_json": {}}, {"messages": PICTURE}):
            assert not (await placed(world, **fields)).plain, fields
        several = await placed(world, "completions", prompt=["a", "b"])
        assert not several.plain and several.choices == 2
        assert wanted_schema(await placed(world, response_format=SCHEMA)) == b'{"type":"object"}'


def test_an_input_may_bring_media() -> None:
    request = EngineRequest(StreamId("resp_0"), "chat", "m", msgspec.Raw(b'{"messages":[]}'), plain=True)
    steered = steered_request(request, [Turn("", "a")], {"a": msgspec.json.encode(PICTURE[0])})
    assert PIXEL.encode() in bytes(steered.body) and not steered.plain


@pytest.mark.parametrize("look", [lambda request: request.choices, wanted_schema])
def test_nothing_looks_through_a_plain_body(look: Callable[[EngineRequest], object]) -> None:
    """A request of an earlier release's gateway does not say what it is, and is looked through."""
    body = msgspec.Raw(msgspec.json.encode({"messages": [{"role": "user", "content": "a word\n" * 200_000}]}))
    plain, unknown = (EngineRequest(StreamId("resp_0"), "chat", "m", body, plain=plain) for plain in (True, False))

    def process_time_s(request: EngineRequest) -> float:
        begun = time.process_time()
        look(request)
        return time.process_time() - begun

    assert look(plain) == look(unknown)
    assert min(process_time_s(plain) for _ in range(5)) * 20 < min(process_time_s(unknown) for _ in range(5))
