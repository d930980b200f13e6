"""The head of a new stream's response waits for the first event: a failure before it is the response."""

from __future__ import annotations

import pytest

from stream_fabric.errors import BadRequest, StreamGwError
from stream_fabric.stream.frames import End, ErrorInfo, Note, encode
from tests.gateway.test_sse_writes import OPENING, Connection, outlet_of
from tests.gateway.wire import MODEL, Gate

FAILED = encode(End("failed", error=ErrorInfo.of(BadRequest("no such image"))))
LONG_S = 60.0


def code_of(error: StreamGwError | None) -> str | None:
    return None if error is None else error.code


@pytest.mark.parametrize("before", [[], [encode(Note("prompt"))]])
async def test_a_failure_without_output_is_a_refusal(before: list[bytes]) -> None:
    outlet = outlet_of(Connection())
    waiting = outlet.refusal(LONG_S)
    outlet.write(1, 1, [*before, FAILED])
    outlet.end("failed")
    error = await waiting
    assert error is not None and (error.code, error.http_status) == ("invalid_request", 400)


async def test_a_failure_that_came_before_the_wait_is_a_refusal() -> None:
    outlet = outlet_of(Connection())
    outlet.write(1, 1, [FAILED])
    outlet.end("failed")
    assert code_of(await outlet.refusal(LONG_S)) == "invalid_request"


@pytest.mark.parametrize("joined", [True, False])
async def test_a_failure_after_output_is_an_event(joined: bool) -> None:
    connection = Connection()
    outlet = outlet_of(connection)
    if joined:
        outlet.write(1, 1, [*OPENING, FAILED])
    else:
        outlet.write(1, 1, OPENING)
        outlet.write(1, 3, [FAILED])
    outlet.end("failed")
    assert await outlet.refusal(LONG_S) is None
    outlet.open(None)
    assert b"no such image" in b"".join(connection.transport.written)


@pytest.mark.parametrize("event", ["output", "cancel", "left", "time"])
async def test_the_wait_ends_without_a_refusal(event: str) -> None:
    outlet = outlet_of(Connection())
    waiting = outlet.refusal(0.01 if event == "time" else LONG_S)
    assert not waiting.done()
    if event == "output":
        outlet.write(1, 1, OPENING)
    elif event == "cancel":
        outlet.write(1, 1, [encode(End("cancelled"))])
        outlet.end("cancelled")
    elif event == "left":
        outlet.connection_lost()
    assert await waiting is None


@pytest.mark.platform
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_what_the_engine_refuses_has_the_same_answer_streamed_and_whole(one: Gate, path: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body: dict[str, object] = {"model": MODEL, "max_tokens": 1_000_000_000, "messages": messages}
    if path == "/v1/completions":
        body["prompt"] = "Hi"
    elif path == "/v1/responses":
        body = {"model": MODEL, "input": "Hi", "max_output_tokens": 1_000_000_000}
    replies = [await one.ask("POST", path, {**body, "stream": stream}) for stream in (False, True)]
    assert [reply.status for reply in replies] == [400, 400]
    whole, streamed = [{**reply.json["error"], "request_id": ""} for reply in replies]
    assert whole == streamed and whole["code"] == "context_length_exceeded"
