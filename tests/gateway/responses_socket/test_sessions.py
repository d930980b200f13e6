"""The WebSocket mode of the Responses API on real gateways: events, lanes, forks, warm-ups, limits and errors."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from stream_fabric.limits import RESPONSE_LANES_MAX, RESPONSES_IN_FLIGHT_MAX, RESPONSES_WAITING_MAX
from tests.dialects.responses.fold import events
from tests.dialects.responses.specification import check_event
from tests.gateway.conftest import Tenants
from tests.gateway.responses_socket.wire import OPEN, PATH, ResponsesWire, code_of, opened, text_of
from tests.gateway.wire import Gate

SLOW = 100_000
"""Tokens of a response that runs until it is cancelled."""
NEVER = "resp_" + "0" * 32


@pytest.mark.parametrize("path", [PATH, OPEN])
@pytest.mark.parametrize("lane", [None, "a.B_-9"])
async def test_events_are_those_of_the_stream(one: Gate, two: Gate, path: str, lane: str | None) -> None:
    named = {} if lane is None else {"stream_id": lane}
    async with opened(one, path) as ws:
        await ws.create(tokens=20, reasoning={"effort": "low"}, **named)
        told: list[bytes] = []
        while not told or json.loads(told[-1])["type"] != "response.incomplete":
            raw = await asyncio.wait_for(ws.connection.recv(), 10)
            told.append(raw.encode() if isinstance(raw, str) else raw)
    response = json.loads(told[-1])["response"]
    replayed = await two.ask("GET", f"{path}/{response['id']}?stream=true")
    data = [each for each, _ in events(replayed.body.replace(b": hb\n", b""))]
    if lane is None:
        assert told == data, "byte for byte"
    else:
        assert told == [each[:-1] + b',"stream_id":"%b"}' % lane.encode() for each in data]
    if path == OPEN:
        for each in data:
            check_event(json.loads(each))
    assert (await two.ask("GET", f"{path}/{response['id']}")).json == response


async def test_lanes_run_side_by_side_and_each_in_order(one: Gate) -> None:
    async with opened(one) as ws:
        for lane in ("a", "b", None, "a", "b", None):
            await ws.create(tokens=30, **({} if lane is None else {"stream_id": lane}))
        for lane in ("a", "b", None):
            first = await ws.ended(lane)
            second = await ws.ended(lane)
            assert first["response"]["created_at"] <= second["response"]["created_at"]
            assert first["response"]["id"] != second["response"]["id"]
    changes = sum(x != y for x, y in zip(ws.order, ws.order[1:], strict=False))
    assert changes > 20, "the lanes interleave"


async def test_a_lane_waits_for_its_turn(one: Gate) -> None:
    async with opened(one) as ws:
        await ws.create(tokens=SLOW)
        running = (await ws.until("response.created"))["response"]["id"]
        await ws.create(tokens=5)
        assert (await ws.turn("other", tokens=5))["status"] == "incomplete", "another lane does not wait"
        assert [event["type"] for event in ws.lanes[None]].count("response.created") == 1
        await one.cancel(running)
        assert (await ws.ended())["response"]["status"] == "cancelled"
        assert (await ws.ended())["response"]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("path", [PATH, OPEN])
async def test_a_chain_that_nobody_stores(one: Gate, two: Gate, path: str) -> None:
    async with opened(one, path) as ws:
        first = await ws.turn(store=False, instructions="Be brief.")
        second = await ws.turn(store=False, text="And lakes?", previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        said = [
            {"role": "user", "content": "Tell me of rivers."},
            {"role": "assistant", "content": text_of(first)},
            {"role": "user", "content": "And lakes?"},
        ]
        body = {"model": first["model"], "input": said, "max_output_tokens": 10, "seed": 1, "ignore_eos": True}
        whole = (await two.ask("POST", path, body)).json
        assert text_of(second) == text_of(whole), "the same prompt, without the instructions"
        third = await ws.turn(store=False, text="Go on.", previous_response_id=second["id"])
        assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
        gone = await ws.turn(store=False, text="Back.", previous_response_id=first["id"])
        assert code_of(gone) == (404, "previous_response_not_found"), "the newest of the lane alone is remembered"
        stored = await ws.turn(text="Keep this one.", previous_response_id=third["id"])
        assert stored["store"] is True
        assert (await ws.turn(text="And on.", previous_response_id=stored["id"]))["status"] == "incomplete"
    async with opened(one, path) as ws:
        lost = await ws.turn(store=False, previous_response_id=third["id"])
        assert code_of(lost) == (404, "previous_response_not_found"), "another socket remembers nothing"
        assert (await ws.turn(store=False))["status"] == "incomplete", "and goes on"


async def test_forks_and_what_a_failure_forgets(one: Gate) -> None:
    wrong = [{"type": "function_call_output", "call_id": "call_none", "output": "x"}]
    async with opened(one) as ws:
        parent = await ws.turn("main", store=False)
        left, right = await asyncio.gather(
            *[_fork(ws, lane, parent["id"]) for lane in ("left", "right")],
        )
        assert left["previous_response_id"] == right["previous_response_id"] == parent["id"]
        failed = await ws.turn("fork", store=False, input=wrong, previous_response_id=parent["id"])
        assert code_of(failed) == (400, "invalid_request") and failed["stream_id"] == "fork"
        again = await ws.turn("fork", store=False, previous_response_id=parent["id"])
        assert again["status"] == "incomplete", "a fork that failed leaves the parent to its lane"
        failed = await ws.turn("main", store=False, input=wrong, previous_response_id=parent["id"])
        assert code_of(failed) == (400, "invalid_request")
        gone = await ws.turn("main", store=False, previous_response_id=parent["id"])
        assert code_of(gone) == (404, "previous_response_not_found")
        assert (await ws.turn("left", store=False, previous_response_id=left["id"]))["status"] == "incomplete"
        fresh = await ws.turn("left", store=False)
        assert fresh["previous_response_id"] is None, "the lane routes, and nothing else"
    async with opened(one, OPEN) as ws:
        parent = await ws.turn("main", store=False)
        await ws.turn("fork", store=False, input=wrong, previous_response_id=parent["id"])
        gone = await ws.turn("main", store=False, previous_response_id=parent["id"])
        assert code_of(gone) == (404, "previous_response_not_found"), "Open Responses: any continuation evicts"


async def _fork(ws: ResponsesWire, lane: str, parent: str) -> dict[str, Any]:
    await ws.create(store=False, text=lane, previous_response_id=parent, stream_id=lane)
    async with _READING:
        return (await ws.ended(lane))["response"]  # type: ignore[no-any-return]


_READING = asyncio.Lock()
"""One coroutine reads a socket at a time."""


async def test_a_stored_parent_outlives_a_failure(one: Gate, two: Gate) -> None:
    wrong = [{"type": "function_call_output", "call_id": "call_none", "output": "x"}]
    async with opened(one) as ws:
        parent = await ws.turn()
        assert code_of(await ws.turn(input=wrong, previous_response_id=parent["id"])) == (400, "invalid_request")
        assert (await ws.turn(previous_response_id=parent["id"]))["status"] == "incomplete"
    async with opened(two) as ws:
        assert (await ws.turn(previous_response_id=parent["id"]))["status"] == "incomplete", "on any gateway"


@pytest.mark.parametrize("path", [PATH, OPEN])
async def test_a_warm_up_makes_nothing_and_can_be_continued(one: Gate, two: Gate, path: str) -> None:
    async with opened(one, path) as ws:
        await ws.create(text="You will hear of lakes.", generate=False, instructions="Be brief.")
        types = [(await ws.receive())["type"] for _ in range(3)]
        assert types == ["response.created", "response.in_progress", "response.completed"]
        for event in ws.lanes[None]:
            check_event(event)
        warm = (await ws.ended())["response"]
        assert warm["output"] == [] and warm["usage"]["total_tokens"] == 0 and warm["instructions"] == "Be brief."
        held = await ws.turn(text="Of what?", previous_response_id=warm["id"])
        unstored = await ws.turn(text="You will hear of lakes.", generate=False, store=False)
        said = await ws.turn(text="Of what?", store=False, previous_response_id=unstored["id"])
        assert said["usage"]["input_tokens"] == held["usage"]["input_tokens"]
        assert text_of(said) == text_of(held)
        refused = await ws.turn(generate=False, model="no-such-model")
        assert code_of(refused) == (404, "model_not_found")
    assert (await two.ask("GET", f"{path}/{warm['id']}")).json == warm
    listed = (await two.ask("GET", f"{path}/{warm['id']}/input_items")).json["data"]
    assert [item["content"][0]["text"] for item in listed] == ["You will hear of lakes."]
    assert (await two.ask("GET", f"{path}/{unstored['id']}")).status == 404
    async with opened(two, path) as ws:
        assert text_of(await ws.turn(text="Of what?", previous_response_id=warm["id"])) == text_of(held)


async def test_sixteen_run_and_the_rest_waits(one: Gate) -> None:
    count = RESPONSES_IN_FLIGHT_MAX + 2
    async with opened(one) as ws:
        for number in range(count):
            await ws.create(tokens=SLOW, stream_id=f"l{number}")
        ids = [await ws.until_created() for _ in range(RESPONSES_IN_FLIGHT_MAX)]
        await ws.create(generate=False)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                while True:
                    event = await ws.receive()
                    assert event["type"] not in ("error", "response.created"), "the seventeenth waits, without an error"
        for stream in ids:
            await one.cancel(stream)
        waiting = {f"l{number}" for number in range(RESPONSES_IN_FLIGHT_MAX, count)}
        while waiting:  # the one that generates nothing may be answered before them
            event = await ws.receive()
            if event["type"] == "response.created" and event.get("stream_id") in waiting:
                waiting.remove(event["stream_id"])
                await one.cancel(event["response"]["id"])
        assert (await ws.ended())["type"] == "response.completed"


async def test_limits_of_lanes_and_of_requests_that_wait(one: Gate) -> None:
    async with opened(one) as ws:
        for number in range(RESPONSE_LANES_MAX):
            await ws.create(generate=False, store=False, stream_id=f"l{number}")
            await ws.ended(f"l{number}")
        over = await ws.turn("one-more", generate=False)
        assert code_of(over) == (400, "websocket_stream_limit_reached") and over["error"]["param"] == "stream_id"
        assert (await ws.turn(generate=False))["status"] == "completed", "the default lane is not counted"
        assert (await ws.turn("l0", generate=False))["status"] == "completed"
        await ws.create(tokens=SLOW)
        running = (await ws.until("response.created"))["response"]["id"]
        for _ in range(RESPONSES_WAITING_MAX):
            await ws.create(generate=False, store=False)
        await ws.create(generate=False)
        assert code_of(await ws.until("error")) == (429, "too_many")
        ws.lanes.clear()
        await one.cancel(running)
        for _ in range(RESPONSES_WAITING_MAX):
            await ws.until("response.completed")


async def test_errors_have_the_shape_of_the_profile(one: Gate, tenants: Tenants) -> None:
    for event, lane, status, code in (
        ({"type": "response.create"}, None, 400, "invalid_request"),
        ({"type": "response.cancel"}, None, 400, "invalid_request"),
        ({"no": "type"}, None, 400, "invalid_request"),
        ({"type": "response.create", "stream_id": ""}, None, 400, "invalid_stream_id"),
        ({"type": "response.create", "stream_id": "a b"}, None, 400, "invalid_stream_id"),
        ({"type": "response.create", "stream_id": 3}, None, 400, "invalid_stream_id"),
        ({"type": "response.create", "stream_id": "x" * 257}, None, 400, "invalid_stream_id"),
        ({"type": "response.create", "stream_id": "x" * 256, "model": "m"}, "x" * 256, 400, "invalid_request"),
        ({"type": "response.create", "background": True, "model": "m", "input": "x"}, None, 400, "unsupported"),
        ({"type": "response.create", "model": "no-such", "input": "x"}, None, 404, "model_not_found"),
        ({"type": "response.create", "model": "sim-small", "input": "x", "previous_response_id": NEVER,
          "stream_id": "a"}, "a", 404, "previous_response_not_found"),
    ):  # fmt: skip
        for path in (PATH, OPEN):
            async with opened(one, path) as ws:
                await ws.send(event)
                told = await ws.receive()
                found = code_of(told)
                if not (path == OPEN and "background" in event):
                    assert found == (status, code), told
                assert told.get("stream_id") == lane, told
                if path == OPEN:
                    assert set(told["error"]) == {"type", "code", "message", "param"}
                    assert told["error"]["type"] in ("invalid_request", "not_found")
                else:
                    assert told["error"]["type"] == "invalid_request_error" and told["error"]["request_id"]
    async with opened(tenants.acme_reader) as ws:
        assert code_of(await ws.turn()) == (403, "forbidden")
    async with opened(one) as ws:
        for _ in range(10):
            await ws.connection.send("[1]")
        with pytest.raises(ConnectionClosed):
            while True:
                await ws.receive()
        assert ws.connection.close_code == 1008


async def test_open_responses_refuses_fields_of_http_and_the_other_profile_passes_over_them(one: Gate) -> None:
    async with opened(one, OPEN) as ws:
        for name, value in (("stream", True), ("stream_options", {}), ("background", False)):
            refused = await ws.turn(**{name: value})
            assert code_of(refused) == (400, "invalid_request") and refused["error"]["param"] == name
    async with opened(one) as ws:
        assert (await ws.turn(stream=True, stream_options={}, background=False))["status"] == "incomplete"
    async with opened(one, PATH, headers={"OpenResponses-Version": "latest"}) as ws:
        assert code_of(await ws.turn(stream=True)) == (400, "invalid_request")


async def test_handshakes_that_are_refused_tell_why(one: Gate) -> None:
    for path, header, kind in ((PATH, "Bearer nobody", "authentication_error"), (OPEN, "", "invalid_request")):
        with pytest.raises(InvalidStatus) as refused:
            async with opened(one, path, headers={"Authorization": header}):
                pass
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body)["error"]["type"] == kind
    assert (await one.ask("GET", PATH)).status == 405, "without an upgrade"


async def test_steering_returns_its_input(one: Gate) -> None:
    async with opened(one) as ws:
        await ws.send({"type": "response.steer", "previous_response_id": NEVER, "input": "Be brief."})
        told = await ws.receive()
        assert told["type"] == "response.steer.failed" and told["error"]["code"] == "response_not_found"
        assert told["steer"] == {"previous_response_id": NEVER, "input": "Be brief."}
        await ws.send({"type": "response.steer"})
        assert code_of(await ws.receive()) == (400, "invalid_request")


async def test_a_failed_stream_has_one_last_event(one: Gate) -> None:
    """A deadline fails the stream: over HTTP an ``error`` comes before ``response.failed``."""
    async with opened(one) as ws:
        await ws.create(tokens=SLOW, deadline_s=0.3, store=False)
        last = await ws.ended()
        assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "deadline_exceeded"
        gone = await ws.turn(store=False, previous_response_id=last["response"]["id"])
        assert code_of(gone) == (404, "previous_response_not_found")


async def test_a_repeated_request_attaches(one: Gate, two: Gate) -> None:
    key = secrets.token_hex(8)
    async with opened(one) as ws:
        first = await ws.turn(idempotency_key=key)
    async with opened(two) as ws:
        assert await ws.turn("again", idempotency_key=key) == first
        other = await ws.turn(tokens=11, idempotency_key=key)
        assert code_of(other) == (422, "idempotency_mismatch")


async def test_a_response_that_runs_cannot_be_continued_yet(one: Gate) -> None:
    async with opened(one) as ws:
        await ws.create(tokens=SLOW, store=False)
        running = (await ws.until("response.created"))["response"]["id"]
        early = await ws.turn("fork", previous_response_id=running)
        assert code_of(early) == (400, "previous_response_running")
        await one.cancel(running)
        last = (await ws.ended())["response"]
        assert last["status"] == "cancelled"
        assert (await ws.turn("fork", store=False, previous_response_id=running))["status"] == "incomplete"


async def test_a_chain_may_begin_with_a_stored_response(one: Gate) -> None:
    async with opened(one) as ws:
        first = await ws.turn(text="I am called Ada.")
        second = await ws.turn(text="And you?", store=False, previous_response_id=first["id"])
        third = await ws.turn(text="Who am I?", store=False, previous_response_id=second["id"])
        assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
