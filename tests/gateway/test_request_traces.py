"""Traces of requests, read from the event stream of a running platform."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from stream_fabric.events import AttemptTrace, RequestTrace, decode_event
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from tests.gateway.processes import Running
from tests.gateway.wire import DONE, Gate, chat, events, whole_events
from tests.support.waiting import eventually


class Told:
    """The events of the platform."""

    def __init__(self, source: RedisEvents) -> None:
        self._source = source
        self._seen = 0
        self._events: list[RequestTrace | AttemptTrace] = []

    async def _read(self) -> None:
        while records := await self._source.read(self._seen, 500):
            self._seen = records[-1][0]
            found = (decode_event(record) for _, record in records)
            self._events += [event for event in found if isinstance(event, RequestTrace | AttemptTrace)]

    async def _matching(self, wanted: Callable[[RequestTrace | AttemptTrace], bool], count: int) -> list[object] | None:
        await self._read()
        found = [event for event in self._events if wanted(event)]
        assert len(found) <= count, found
        return [*found] if len(found) == count else None

    async def requests(self, stream: str, count: int = 1) -> list[RequestTrace]:
        return await eventually(  # type: ignore[no-any-return]
            lambda: self._matching(lambda e: isinstance(e, RequestTrace) and e.stream == stream, count),
            f"{count} readers of {stream} told",
        )

    async def attempt(self, stream: str) -> AttemptTrace:
        (found,) = await eventually(
            lambda: self._matching(lambda e: isinstance(e, AttemptTrace) and e.stream == stream, 1), "the try told"
        )
        assert isinstance(found, AttemptTrace)
        return found

    async def request(self, request_id: str) -> RequestTrace:
        (found,) = await eventually(
            lambda: self._matching(lambda e: isinstance(e, RequestTrace) and e.request_id == request_id, 1),
            "it is told",
        )
        assert isinstance(found, RequestTrace)
        return found


@pytest.fixture
async def told(platform: Running) -> AsyncIterator[Told]:
    client = RedisClient(platform.redis_url)
    await client.start()
    yield Told(RedisEvents(client))
    await client.close()


def adds_up(trace: RequestTrace) -> None:
    assert trace.phases.total_us == trace.wall_us
    # The machine may be busy with other tests: what the figure is on a quiet one is measured elsewhere
    assert abs(trace.phases.residual_us) < 0.05 * trace.wall_us + 20_000, trace


async def test_a_streamed_response_leaves_a_trace_of_gateway_and_agent(one: Gate, told: Told) -> None:
    began = time.monotonic()
    async with one.create(chat(40, user="u-7")) as exchange:
        stream, request_id = exchange.headers["x-stream-id"], exchange.headers["x-request-id"]
        await exchange.rest()
    took_us = (time.monotonic() - began) * 1e6
    (trace,) = await told.requests(stream)
    adds_up(trace)
    assert (trace.role, trace.ended, trace.transport, trace.dialect) == ("created", "completed", "sse", "openai.chat")
    assert (trace.request_id, trace.tenant, trace.tier) == (request_id, "dev", "standard")
    assert trace.user_hash and "u-7" not in trace.user_hash
    assert trace.trace_id == stream[5:]
    assert trace.output_tokens == trace.streamed_tokens == 40
    assert trace.finish_reason == "length"
    assert trace.placement in ("load", "prefix", "only", "spill")
    assert trace.scores[0].replica == trace.replica
    assert 0 < trace.ttft_us < trace.wall_us < took_us
    assert trace.phases.decode_us > 39 * 4000
    attempt = await told.attempt(stream)
    assert (attempt.replica, attempt.trace_id, attempt.billed) == (trace.replica, trace.trace_id, True)
    assert (attempt.output_tokens, attempt.prompt_tokens) == (40, trace.prompt_tokens)
    assert sum(attempt.itl_sketch) == 39


async def test_every_transport_leaves_the_same_trace(one: Gate, told: Told) -> None:
    reply = await one.ask("POST", "/v1/chat/completions", chat(25, stream=False))
    (whole,) = await told.requests(reply.headers["x-stream-id"])
    async with one.socket() as socket:
        await socket.create(3, chat(25))
        await socket.until_ended(3)
        stream = socket.track(3).ok[0]["stream"]
    (by_socket,) = await told.requests(stream)
    for trace, transport in ((whole, "whole"), (by_socket, "ws")):
        adds_up(trace)
        assert (trace.transport, trace.ended, trace.streamed_tokens, trace.output_tokens) == (
            transport, "completed", 25, 25,
        )  # fmt: skip


async def test_a_cancels_trace_names_the_last_token(one: Gate, two: Gate, told: Told) -> None:
    async with one.create(chat(2000)) as exchange:
        stream = exchange.headers["x-stream-id"]
        await exchange.events(8)
        answer = await two.cancel(stream)
        await exchange.rest()
    (trace,) = await told.requests(stream)
    adds_up(trace)
    assert (trace.ended, trace.cancel_point) == ("cancelled", answer["at"])
    attempt = await told.attempt(stream)
    assert (attempt.ended, attempt.billed) == ("cancelled", True)
    assert attempt.output_tokens == trace.output_tokens == trace.streamed_tokens > 0


async def test_a_resumed_reader_leaves_two_traces_that_join(one: Gate, two: Gate, told: Told) -> None:
    began = time.monotonic()
    async with one.create(chat(200), {"idempotency-key": f"k{time.time_ns()}"}) as exchange:
        stream = exchange.headers["x-stream-id"]
        last = (await exchange.events(20))[-1].id
    assert last
    await told.requests(stream)
    await asyncio.sleep(0.3)  # away
    async with two.open("GET", f"/v1/streams/{stream}", headers={"last-event-id": last}) as exchange:
        body = await exchange.rest()
    took_us = (time.monotonic() - began) * 1e6
    assert events(body)[-1].data == DONE
    first, second = await told.requests(stream, 2)
    assert (first.role, first.ended) == ("created", "left")
    assert (second.role, second.ended) == ("resumed", "completed")
    assert first.gateway != second.gateway
    assert second.first_seq == int(last.partition("-")[2]) + 1
    assert first.last_seq >= second.first_seq - 1
    assert second.phases.resume_gap_us > 200_000
    adds_up(second)
    # For how long nobody had watched is told in whole milliseconds
    assert 0.7 * took_us < first.wall_us + second.wall_us < took_us + 2000
    shown = len(whole_events(body))
    assert second.streamed_tokens <= 200 <= first.streamed_tokens + second.streamed_tokens
    assert shown > 0


async def test_a_slow_readers_time_counts_as_client_stall(one: Gate, fast: str, told: Told) -> None:
    async def lags() -> bool:
        return await one.gauge("lagging_clients") == 1

    async with one.connection(4096) as exchange:
        await exchange.send(one.request("POST", "/v1/chat/completions", chat(4000, model=fast)))
        await exchange.head()
        await eventually(lags, "the reader to lag")
        began = time.monotonic()
        await asyncio.sleep(0.2)  # the reader's own time, in which its buffer is full
        full_us = (time.monotonic() - began) * 1e6
        await exchange.rest(60)
    (trace,) = await told.requests(exchange.headers["x-stream-id"])
    adds_up(trace)
    assert trace.streamed_tokens == trace.output_tokens == 4000
    assert full_us < trace.phases.client_stall_us < trace.wall_us


async def test_the_clients_trace_context_is_continued(one: Gate, told: Told) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    header = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    async with one.create(chat(5), header) as exchange:
        stream = exchange.headers["x-stream-id"]
        await exchange.rest()
    (trace,) = await told.requests(stream)
    assert trace.trace_id == (await told.attempt(stream)).trace_id == trace_id
    async with one.create(chat(5), {"traceparent": f"00-{'0' * 32}-b7ad6b7169203331-01"}) as exchange:
        stream = exchange.headers["x-stream-id"]
        await exchange.rest()
    (trace,) = await told.requests(stream)
    assert trace.trace_id == stream[5:], "a context that is none is passed over"


async def test_a_refused_request_leaves_a_trace(one: Gate, told: Told) -> None:
    reply = await one.ask("POST", "/v1/chat/completions", chat(5, model="nobody's"))
    assert reply.status == 404
    trace = await told.request(reply.headers["x-request-id"])
    assert (trace.role, trace.ended, trace.http_status, trace.stream) == ("refused", "refused", 404, "")
    assert trace.error_code == reply.json["error"]["code"]
    assert trace.phases.total_us == trace.wall_us


async def test_the_check_and_the_repair_of_a_structured_reply_are_told_and_add_up(one: Gate, told: Told) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1_000_000}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    reply = await one.ask(
        "POST", "/v1/chat/completions", {**chat(30), "stream": False, "response_format": form, "repair": 1}
    )
    assert reply.headers["x-structured-output"] == "invalid", "the simulator's integers are below 100"
    (request,) = await told.requests(reply.headers["x-stream-id"])
    assert (request.schema_check, request.repairs, request.error_code) == ("invalid", 1, "schema_mismatch")
    attempt = await told.attempt(request.stream)
    assert request.phases.check_us == attempt.check_us > 0 and attempt.decoding_us == 0
    assert attempt.check_us > attempt.decode_us / 4, "the second reply takes about as long as the first"
    adds_up(request)


async def test_a_reader_in_another_dialect_is_told_with_its_own(one: Gate, told: Told) -> None:
    reply = await one.ask("POST", "/v1/chat/completions", {**chat(4), "stream": False})
    stream = reply.headers["x-stream-id"]
    await one.ask("GET", f"/v1/streams/{stream}?dialect=anthropic.messages")
    first, second = sorted(await told.requests(stream, 2), key=lambda request: request.role)
    assert (first.role, first.dialect, first.schema_check) == ("created", "openai.chat", "")
    assert (second.role, second.dialect) == ("resumed", "anthropic.messages")


async def test_inputs_of_a_running_stream_are_told_and_add_up(one: Gate, told: Told) -> None:
    async with one.create(chat(150)) as exchange:
        stream = exchange.headers["x-stream-id"]
        for _ in range(8):
            await exchange.piece()
        reply = await one.ask("POST", f"/v1/streams/{stream}/input", {"id": "k1", "item": "In one word, please."})
        assert reply.json == {"result": "accepted"}
        await exchange.rest()
    (request,) = await told.requests(stream)
    attempt = await told.attempt(stream)
    assert (request.inputs, request.inputs_refused, len(attempt.inputs)) == (1, 0, 1)
    (times,) = attempt.inputs
    assert times.result == "applied" and times.waited_us > 0 and 0 < times.answered_us <= attempt.steer_us
    assert request.at_us - request.wall_us < times.at_us < request.at_us
    assert request.phases.steer_us == attempt.steer_us
    adds_up(request)
