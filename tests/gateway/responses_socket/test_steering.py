"""Input for responses that run: the cut, the successor, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from stream_fabric.limits import INPUT_CONTAINERS_MAX, INPUTS_PENDING_MAX
from tests.gateway.processes import Running
from tests.gateway.responses_socket.wire import OPEN, ResponsesWire, code_of, opened, text_of
from tests.gateway.wire import Gate

LONG = 3000
NEVER = "resp_" + "0" * 32
FIELDS = {f"field_{number}": {"type": "string"} for number in range(80)}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS)}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA}
"""Its calls take so long that an input comes before their end."""


async def begun(ws: ResponsesWire, lane: str | None = None, **more: Any) -> str:
    """A response that has said something."""
    await ws.create(tokens=LONG, **more, **({} if lane is None else {"stream_id": lane}))
    response: str = (await ws.until("response.created", lane))["response"]["id"]
    await ws.until("response.output_text.delta", lane)
    return response


async def steer(ws: ResponsesWire, response: str, text: Any = "Be brief.") -> dict[str, Any]:
    await ws.send({"type": "response.steer", "previous_response_id": response, "input": text})
    seen = len(ws.steers)
    while len(ws.steers) == seen:
        await ws.receive()
    return ws.steers[-1]


async def test_the_response_ends_steered_and_its_successor_goes_on(one: Gate, two: Gate) -> None:
    async with opened(one) as ws:
        first = await begun(ws, metadata={"a": "b"}, temperature=0.5)
        accepted = await steer(ws, first)
        assert accepted["type"] == "response.steer.accepted"
        assert accepted["steer"]["previous_response_id"] == first and accepted["steer"]["id"]
        ended = (await ws.ended())["response"]
        assert ended["status"] == "incomplete" and ended["incomplete_details"] == {"reason": "steered"}
        assert ended["output"][-1]["status"] == "incomplete", "the item was cut"
        created = (await ws.until("response.created"))["response"]
        assert created["previous_response_id"] == first and created["id"] != first
        for name in ("metadata", "temperature", "max_output_tokens", "model"):
            assert created[name] == ended[name], "settings are inherited"
        info = await two.until_status(first, "incomplete")
        stopped = info["head"]
        await ws.until("response.output_text.delta")
        await one.cancel(created["id"])
        successor = (await ws.ended())["response"]
        assert successor["usage"]["input_tokens"] > ended["usage"]["input_tokens"] + ended["usage"]["output_tokens"]
        assert (await two.info(first))["head"] == stopped, "nothing came after the cut"
        whole = (await two.ask("GET", f"/v1/responses/{first}")).json
        assert whole["incomplete_details"] == {"reason": "steered"} and text_of(whole) == text_of(ended)
        chat = (await two.ask("GET", f"/v1/streams/{first}?dialect=openai.chat")).body
        assert b'"finish_reason":"length","stop_reason":"steered"' in chat and chat.endswith(
            b"data: [DONE]\nid: 1-%d\n\n" % stopped
        )


@pytest.mark.parametrize("store", [True, False])
async def test_several_inputs_are_one_successors(one: Gate, store: bool) -> None:
    async with opened(one) as ws:
        first = await begun(ws, "a", store=store)
        inputs = ["One.", [{"role": "user", "content": [{"type": "input_text", "text": "Two."}]}]]
        for text in inputs:
            await ws.send({"type": "response.steer", "previous_response_id": first, "input": text})
        assert (await ws.ended("a"))["response"]["incomplete_details"] == {"reason": "steered"}
        created = (await ws.until("response.created", "a"))["response"]
        await ws.until("response.output_text.delta", "a")
        assert created["previous_response_id"] == first
        accepted = [event for event in ws.steers if event["type"] == "response.steer.accepted"]
        assert [event["stream_id"] for event in accepted] == ["a"] * len(accepted) != []
        if store:
            asked = (await one.ask("GET", f"/v1/responses/{created['id']}/input_items?order=asc")).json["data"]
            taken = len(accepted)  # the second may come late
            texts = [part["text"] for item in asked[-taken:] for part in item["content"]]
            assert texts == ["One.", "Two."][:taken]
        await one.cancel(created["id"])
        await ws.ended("a")


async def test_an_input_at_the_natural_end_has_a_successor_as_well(one: Gate) -> None:
    outcomes = set()
    async with opened(one) as ws:
        for tokens in range(3, 24):
            await ws.create(tokens=tokens, store=False)
            response = (await ws.until("response.created"))["response"]["id"]
            await ws.until("response.output_text.delta")
            told = await steer(ws, response)
            ended = (await ws.ended())["response"]
            assert ended["id"] == response
            if told["type"] == "response.steer.accepted":
                reason = (ended["incomplete_details"] or {}).get("reason")
                assert reason in ("steered", "max_output_tokens")
                outcomes.add(reason)
                successor = (await ws.ended())["response"]
                assert successor["previous_response_id"] == response
            else:
                outcomes.add(told["error"]["code"])
                assert told["steer"]["input"] == "Be brief."
    assert "steered" in outcomes


async def test_refused_inputs_come_back(platform: Running, one: Gate) -> None:
    async with opened(one) as ws:
        assert (await steer(ws, NEVER))["error"]["code"] == "response_not_found"
        done = await ws.turn(store=False)
        assert (await steer(ws, done["id"]))["error"]["code"] == "response_already_completed"
        running = await begun(ws, store=False)
        wrong: list[Any] = [
            "", [], 5, [{"role": "assistant", "content": "x"}], [{"role": "user", "content": "x", "name": "y"}],
            [{"type": "function_call_output", "call_id": "c", "output": "x"}],
            [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * INPUT_CONTAINERS_MAX}],
        ]  # fmt: skip
        for text in wrong:
            told = await steer(ws, running, text)
            assert told["error"]["code"] == "invalid_input" and told["steer"]["input"] == text
            assert "id" not in told["steer"]
        await one.cancel(running)
        await ws.ended()
        with platform.silent():
            await ws.create(tokens=LONG, store=False)
            waiting = (await ws.until("response.created"))["response"]["id"]
            ws.steers.clear()
            # Cut before its first token, and so many inputs at once that not all are taken
            for number in range(INPUTS_PENDING_MAX + 1):
                await ws.send({"type": "response.steer", "previous_response_id": waiting, "input": f"{number}"})
            assert (await ws.ended())["response"]["incomplete_details"] == {"reason": "steered"}
            codes = [event.get("error", {}).get("code") for event in ws.steers]
            late = {"response_already_completed", "response_not_found"}  # they came after the cut
            assert set(codes) <= {None, "too_many_pending_steers", *late}
            successor = (await ws.until("response.created"))["response"]
            assert successor["previous_response_id"] == waiting
        await one.cancel(successor["id"])
        await ws.ended()


async def test_half_an_emoji_costs_an_input_and_not_the_socket(one: Gate) -> None:
    async with opened(one) as ws:
        running = await begun(ws, store=False)
        half = f'{{"type":"response.steer","previous_response_id":"{running}","input":"\\ud83d"}}'
        await ws.connection.send(half)
        assert code_of(await ws.until("error")) == (400, "invalid_request")
        ws.lanes.clear()
        await one.cancel(running)
        await ws.until("response.incomplete")


async def test_a_cancelled_response_gives_its_input_back(one: Gate) -> None:
    async with opened(one) as ws:
        response = await begun(ws, store=False)
        await one.cancel(response)
        await ws.send({"type": "response.steer", "previous_response_id": response, "input": "Be brief."})
        await ws.ended()
        while not ws.steers or ws.steers[-1]["type"] == "response.steer.accepted":
            await ws.receive()
        assert ws.steers[-1]["error"]["code"] in ("response_not_active", "response_already_completed")
        assert ws.steers[-1]["steer"]["input"] == "Be brief."


async def test_input_for_a_response_that_calls_a_tool_goes_with_the_results(one: Gate) -> None:
    async with opened(one) as ws:
        await ws.create(tokens=LONG, tools=[TOOL], tool_choice="required", store=False)
        response = (await ws.until("response.created"))["response"]["id"]
        await ws.until("response.function_call_arguments.delta")
        accepted = await steer(ws, response)
        assert accepted["type"] == "response.steer.accepted"
        called = (await ws.ended())["response"]
        (call,) = called["output"]
        assert called["status"] == "completed" and call["type"] == "function_call", "a call is not cut"
        while ws.steers[-1] is accepted:
            await ws.receive()
        pending = ws.steers[-1]
        stub = {"type": "function_call_output", "call_id": call["call_id"]}
        assert (pending["type"], pending["steer"]) == ("response.steer.pending", accepted["steer"])
        assert (pending["reason"], pending["required_input"]) == ("waiting_for_required_input", [stub])
        without = await ws.turn(store=False, input="Go on.", previous_response_id=response)
        assert without["status"] in ("completed", "incomplete") or without["type"] == "error"
        count = len(ws.steers)
        plain = await ws.turn(store=False, tools=[TOOL])
        assert len(ws.steers) == count, "each is told once"
        assert plain["status"]


async def test_pending_inputs_go_behind_the_results_once_and_survive_a_refused_request(one: Gate) -> None:
    async with opened(one) as ws:
        await ws.create(tokens=LONG, tools=[TOOL], tool_choice="required", stream_id="a")
        response = (await ws.until("response.created", "a"))["response"]["id"]
        await ws.until("response.function_call_arguments.delta", "a")
        for text in ("One.", "Two."):
            await steer(ws, response, text)
        (call,) = (await ws.ended("a"))["response"]["output"]
        while [event["type"] for event in ws.steers].count("response.steer.pending") < 2:
            await ws.receive()
        assert [event["steer"]["id"] for event in ws.steers[:2]] == [event["steer"]["id"] for event in ws.steers[2:]]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        results: dict[str, Any] = {"previous_response_id": response, "input": [result]}
        refused = await ws.turn("a", **{**results, "model": "nobody's"})
        assert refused["type"] == "error", "the inputs wait on"
        elsewhere = await ws.turn("b", **results)
        first = await ws.turn("a", **{**results, "input": [result, {"role": "user", "content": "Three."}]})
        second = await ws.turn("a", **results)

        async def asked(name: str) -> list[str]:
            items = (await one.ask("GET", f"/v1/responses/{name}/input_items?order=asc")).json["data"]
            own = items[next(n for n, item in enumerate(items) if item["type"] == "function_call_output") :]
            return [item["output"] if "output" in item else item["content"][0]["text"] for item in own]

        assert await asked(first["id"]) == ["sunny", "One.", "Two.", "Three."]
        assert await asked(second["id"]) == await asked(elsewhere["id"]) == ["sunny"], "once, and in their own lane"
        assert len(ws.steers) == 4, "nothing more is told of them"


async def test_open_responses_have_no_steering(one: Gate) -> None:
    async with opened(one, OPEN) as ws:
        response = await begun(ws, store=False)
        assert (await steer(ws, response))["error"]["code"] == "steering_not_supported"
        await one.cancel(response)
