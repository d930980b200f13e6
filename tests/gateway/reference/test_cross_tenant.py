"""A stream of another caller answers exactly like one that never existed: by every operation and every message."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest

from stream_gw.transport.reference.document import make_document
from stream_gw.transport.reference.operations import OPERATIONS
from tests.gateway.conftest import Tenants
from tests.gateway.wire import Gate

NEVER = "resp_" + "0" * 32
BASES = ("/v1/streams/{id}", "/v1/responses/{id}", "/v1/open/responses/{id}")
PATHS = sorted(path for path in make_document(OPERATIONS)["paths"] if path.startswith(BASES))
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
ITEM = {"id": "i", "item": {"a": 1}}
VARIANTS: list[tuple[str, Any, dict[str, str]]] = [
    ("", None, {}),
    ("", ITEM, {}),
    ("", {"id": "", "item": {}}, {}),
    ("", b"{", {}),
    ("?after=1-2&mode=coalesce", ITEM, {}),
    ("?after=9-9", ITEM, {}),
    ("?after=x", ITEM, {}),
    ("?dialect=openai.completions", ITEM, {}),
    ("?dialect=none&mode=none", ITEM, {}),
    ("", ITEM, {"last-event-id": "1-3"}),
    ("?stream=true&starting_after=3", None, {}),
]
"""Query, body and headers."""
MESSAGES: list[dict[str, Any]] = [
    *(
        {"t": "sub", "ch": 1, "after": after, "dialect": dialect, "mode": mode}
        for after in ("1-0", "1-2", "9-9", "x")
        for dialect in ("openai.chat", "openai.completions", "none")
        for mode in ("tokens", "coalesce", "snapshot")
    ),
    {"t": "cancel", "id": "c"},
    *({"t": "input", "id": id, "item": item} for id in ("", "i") for item in ({}, {"a": 1})),
]


class Stranger(NamedTuple):
    """A caller who may not see the streams."""

    gate: Gate
    streams: dict[str, str]
    """Streams of another caller by their state."""


@pytest.fixture(params=["tenant", "user"])
async def stranger(request: pytest.FixtureRequest, tenants: Tenants) -> Stranger:
    """Another tenant, or another user of the same tenant."""
    acme = tenants.acme
    more = {"user": "alice"} if request.param == "user" else {}
    cancelled = await acme.background(100_000, **more)
    await acme.cancel(cancelled)
    streams = {
        "live": await acme.background(100_000, **more),
        "completed": (await acme.finished(5, **more))[0],
        "cancelled": cancelled,
    }
    if request.param == "tenant":
        return Stranger(tenants.globex, streams)
    token = (await acme.ask("POST", "/v1/tokens", {"user": "bob"})).json["token"]
    return Stranger(Gate(acme.url, acme.pid, token), streams)


async def told(
    gate: Gate, method: str, path: str, body: Any, asked: dict[str, str], stream: str
) -> tuple[int, dict[str, str], str]:
    """The answer without its request id and the stream's id."""
    reply = await gate.ask(method, path.replace("{id}", stream), body, asked)
    headers = {name: value for name, value in reply.headers.items() if name not in ("date", "x-request-id")}
    body = reply.body.decode().replace(reply.headers["x-request-id"], "<request>")
    return reply.status, headers, body.replace(stream, "<stream>")


async def test_every_operation_answers_like_for_a_stream_that_never_existed(
    stranger: Stranger, tenants: Tenants
) -> None:
    assert len(PATHS) == 12
    for path, method, (query, body, headers) in product(PATHS, METHODS, VARIANTS):
        ask = partial(told, stranger.gate, method, path + query, body if method != "HEAD" else None, headers)
        never = await ask(NEVER)
        assert never[0] in (400, 404, 405) or path.endswith("/cancel")
        for state, stream in stranger.streams.items():
            assert await ask(stream) == never, (method, path, query, body, state)
    await assert_untouched(stranger, tenants)


async def test_every_message_is_answered_like_for_a_stream_that_never_existed(
    stranger: Stranger, tenants: Tenants
) -> None:
    async with stranger.gate.socket() as socket:

        async def ask(message: dict[str, Any], stream: str) -> str:
            await socket.connection.send(json.dumps(message | {"stream": stream}))
            answer = await socket.until(lambda each: each["t"] not in ("hi", "ping"))
            return json.dumps(answer).replace(stream, "<stream>")

        for message in MESSAGES:
            never = await ask(message, NEVER)
            assert json.loads(never)["t"] == "error" or message["t"] == "cancel"
            for state, stream in stranger.streams.items():
                assert await ask(message, stream) == never, (message, state)
    await assert_untouched(stranger, tenants)


async def assert_untouched(stranger: Stranger, tenants: Tenants) -> None:
    for state, stream in stranger.streams.items():
        assert (await tenants.acme.info(stream))["status"] == state
    await tenants.acme.cancel(stranger.streams["live"])
