"""Responses over HTTP: whole, streamed, replayed from any number, in the background, cancelled, deleted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stream_fabric.limits import BODY_BYTES_MAX
from tests.dialects.anthropic.fold import fold as fold_message
from tests.dialects.responses.fold import events, fold
from tests.dialects.responses.specification import check_event, check_response
from tests.gateway.conftest import Tenants
from tests.gateway.wire import MODEL, Gate, chat, text_of_chunks
from tests.support.waiting import eventually

PATH = "/v1/responses"
OPEN = "/v1/open/responses"


def asked(tokens: int = 30, seed: int = 1, **more: Any) -> dict[str, Any]:
    """The body of a response whose text is that of ``chat``."""
    return {
        "model": MODEL,
        "input": "Tell me of rivers.",
        "max_output_tokens": tokens,
        "seed": seed,
        "ignore_eos": True,
        **more,
    }


def data_of(body: bytes) -> list[bytes]:
    return [data for data, _ in events(body.replace(b": hb\n", b""))]


def text_of(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts if part["type"] == "output_text")


async def whole_text(gate: Gate, tokens: int, seed: int) -> str:
    reply = await gate.ask("POST", "/v1/chat/completions", {**chat(tokens, seed), "stream": False})
    return reply.json["choices"][0]["message"]["content"]  # type: ignore[no-any-return]


async def test_whole_streamed_and_read_again_on_another_gateway(one: Gate, two: Gate) -> None:
    whole = await one.ask("POST", PATH, asked(30, 21))
    check_response(whole.json)
    assert whole.json["id"] == whole.headers["x-stream-id"] and whole.json["status"] == "incomplete"
    assert whole.json["incomplete_details"] == {"reason": "max_output_tokens"}
    assert text_of(whole.json) == await whole_text(one, 30, 21)
    usage = whole.json["usage"]
    assert usage["output_tokens"] == 30 and usage["total_tokens"] == usage["input_tokens"] + 30
    made = await one.ask("POST", PATH, asked(30, 21, stream=True))
    final = fold(data_of(made.body))
    assert final["output"][0]["content"] == whole.json["output"][0]["content"]
    again = await two.ask("GET", f"{PATH}/{final['id']}?stream=true")
    assert data_of(again.body) == data_of(made.body), "byte for byte"
    assert (await two.ask("GET", f"{PATH}/{final['id']}")).json == final
    assert (await two.ask("GET", f"{PATH}/{whole.json['id']}")).json == whole.json
    assert (await two.ask("HEAD", f"{PATH}/{final['id']}")).status == 200
    assert data_of((await two.ask("GET", f"/v1/streams/{final['id']}")).body) == data_of(made.body)


async def test_a_resume_at_every_number_gives_the_rest_and_the_same_response(one: Gate, two: Gate) -> None:
    made = await one.ask("POST", PATH, asked(25, 22, stream=True, reasoning={"effort": "low"}))
    told = data_of(made.body)
    final = fold(told)
    assert [item["type"] for item in final["output"]] == ["reasoning", "message"]
    for number in range(len(told)):
        rest = await two.ask("GET", f"{PATH}/{final['id']}?stream=true&starting_after={number}")
        assert rest.status == 200 and told[: number + 1] + data_of(rest.body) == told
    ahead = await two.ask("GET", f"{PATH}/{final['id']}?stream=true&starting_after={len(told)}")
    assert (ahead.status, ahead.json["error"]["code"]) == (400, "cursor_invalid")
    cursors = [id_ for _, id_ in events(made.body.replace(b": hb\n", b"")) if id_]
    tail = await two.ask("GET", f"/v1/streams/{final['id']}", headers={"last-event-id": cursors[3].decode()})
    assert data_of(tail.body) == told[-len(data_of(tail.body)) :] != []


async def test_the_tokens_of_an_input_are_those_of_its_response(one: Gate, two: Gate) -> None:
    first = (await one.ask("POST", PATH, asked(5, 28))).json
    for more in ({}, {"instructions": "Be brief."}, {"previous_response_id": first["id"], "input": "And lakes?"}):
        counted = await two.ask("POST", f"{PATH}/input_tokens", {"model": MODEL, "input": "Tell me of rivers.", **more})
        usage = (await two.ask("POST", PATH, asked(1, 28, **more))).json["usage"]
        assert counted.json == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
        assert counted.headers["x-stream-id"].startswith("resp_")
    missing = await one.ask("POST", f"{PATH}/input_tokens", {"model": MODEL})
    assert (missing.status, missing.json["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("query", ["stream=true", "stream=true&starting_after=0"])
async def test_an_event_source_that_connects_again_goes_on_after_its_last_event(
    one: Gate, two: Gate, query: str
) -> None:
    """It repeats the URL that it began with, and sends the last ``id:``."""
    made = await one.ask("POST", PATH, asked(5, 27, stream=True))
    told = events(made.body.replace(b": hb\n", b""))
    path = f"{PATH}/{made.headers['x-stream-id']}?{query}"
    cursors = {id_.decode(): number for number, (_, id_) in enumerate(told) if id_}
    *before, last = cursors
    for cursor in before:
        rest = await two.ask("GET", path, headers={"last-event-id": cursor})
        assert data_of(rest.body) == [data for data, _ in told[cursors[cursor] + 1 :]]
    assert (await two.ask("GET", path, headers={"last-event-id": last})).status == 204
    wrong = await two.ask("GET", path, headers={"last-event-id": "5"})
    assert (wrong.status, wrong.json["error"]["code"]) == (400, "cursor_invalid")


async def test_in_the_background_it_runs_without_a_reader(one: Gate, two: Gate) -> None:
    made = await one.ask("POST", PATH, asked(200, 23, background=True))
    assert made.status == 200 and made.json["status"] == "queued" and made.json["background"] is True
    check_response(made.json)
    name = made.json["id"]
    live = await two.ask("GET", f"{PATH}/{name}?stream=true")
    told = data_of(live.body)
    assert [json.loads(each)["type"] for each in told[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    final = fold(told)
    assert text_of(final) == await whole_text(one, 200, 23)
    assert (await one.ask("GET", f"{PATH}/{name}")).json == final
    streamed = await one.ask("POST", PATH, asked(20, 23, background=True, stream=True))
    assert fold(data_of(streamed.body))["background"] is True
    refused = await one.ask("POST", PATH, asked(background=True, store=False))
    assert (refused.status, refused.json["error"]["param"]) == (400, "store")


async def test_a_response_that_runs_shows_what_it_has_and_is_cancelled(one: Gate, two: Gate) -> None:
    name = (await one.ask("POST", PATH, asked(100_000, 24, background=True))).json["id"]
    async with one.open("GET", f"{PATH}/{name}?stream=true") as exchange:
        await exchange.bytes(6000)
    running = (await two.ask("GET", f"{PATH}/{name}")).json
    assert running["status"] == "in_progress" and text_of(running) and running["usage"] is None
    cancelled = await two.ask("POST", f"{PATH}/{name}/cancel")
    assert cancelled.status == 200 and cancelled.json["status"] == "cancelled"
    check_response(cancelled.json)
    assert cancelled.json["output"][0]["status"] == "incomplete" and cancelled.json["usage"]["output_tokens"] > 0
    assert (await one.ask("POST", f"{PATH}/{name}/cancel")).json == cancelled.json, "again"
    told = data_of((await one.ask("GET", f"{PATH}/{name}?stream=true")).body)
    assert fold(told) == cancelled.json and json.loads(told[-1])["type"] == "response.incomplete"
    assert (await one.ask("GET", f"{OPEN}/{name}")).json["status"] == "incomplete"


async def test_deleted_responses_are_gone_on_every_path(one: Gate, two: Gate) -> None:
    ended = (await one.ask("POST", PATH, asked(5, 25))).json["id"]
    running = (await one.ask("POST", PATH, asked(100_000, 25, background=True))).json["id"]
    for name in (ended, running):
        gone = await two.ask("DELETE", f"{PATH}/{name}")
        assert gone.json == {"id": name, "object": "response", "deleted": True}
        for method, path in (
            ("GET", f"{PATH}/{name}"),
            ("GET", f"{PATH}/{name}?stream=true"),
            ("DELETE", f"{PATH}/{name}"),
            ("POST", f"{PATH}/{name}/cancel"),
            ("GET", f"/v1/streams/{name}"),
        ):
            assert (await one.ask(method, path)).status == 404, (method, path)


async def test_what_was_not_stored_is_not_found_but_its_stream_resumes(one: Gate) -> None:
    made = await one.ask("POST", PATH, asked(5, 26, store=False))
    assert made.json["store"] is False
    assert (await one.ask("GET", f"{PATH}/{made.json['id']}")).status == 404
    again = await one.ask("GET", f"/v1/streams/{made.json['id']}")
    assert fold(data_of(again.body)) == made.json


async def test_every_dialect_is_read_in_every_other(one: Gate, two: Gate) -> None:
    said = await whole_text(one, 30, 27)
    other = (await one.ask("POST", "/v1/chat/completions", chat(30, 27))).headers["x-stream-id"]
    replayed = fold(data_of((await two.ask("GET", f"{PATH}/{other}?stream=true")).body))
    assert text_of(replayed) == said and (await two.ask("GET", f"{PATH}/{other}")).json == replayed
    own = (await one.ask("POST", PATH, asked(30, 27, stream=True))).headers["x-stream-id"]
    as_chat = await two.ask("GET", f"/v1/streams/{own}?dialect=openai.chat")
    lines = [line for line in as_chat.body.decode().splitlines() if line.startswith("data: {")]
    assert text_of_chunks([json.loads(line[6:]) for line in lines]) == said
    as_message = await two.ask("GET", f"/v1/streams/{own}?dialect=anthropic.messages")
    message = fold_message(data_of(as_message.body))
    assert "".join(block["text"] for block in message["content"]) == said
    two_choices = (await one.ask("POST", "/v1/chat/completions", chat(4, 1, n=2))).headers["x-stream-id"]
    for path in (f"{PATH}/{two_choices}", f"{PATH}/{two_choices}?stream=true"):
        refused = await one.ask("GET", path)
        assert refused.status == 400 and "2 choices" in refused.json["error"]["message"]


async def test_the_open_profile_by_path_and_by_header(one: Gate, two: Gate) -> None:
    body = asked(30, 28, stream=True, reasoning={"effort": "low"})
    by_path = await one.ask("POST", OPEN, body)
    by_header = await one.ask("POST", PATH, body, headers={"openresponses-version": "latest"})
    for made in (by_path, by_header):
        assert made.body.endswith(b"data: [DONE]\n\n") and b"\nid: " not in made.body
        told = data_of(made.body)
        for event in told:
            check_event(json.loads(event))
        assert any(b'"response.reasoning.delta"' in event for event in told)
        name = fold(told)["id"]
        for path in (PATH, OPEN):
            again = await two.ask("GET", f"{path}/{name}?stream=true&starting_after=4")
            assert data_of(again.body) == told[5:], "a stream keeps the profile that it was made with"
    ours = (await one.ask("POST", PATH, body)).headers["x-stream-id"]
    theirs = await two.ask("GET", f"{OPEN}/{ours}?stream=true")
    assert b"response.reasoning.delta" in theirs.body and b"reasoning_text.delta" not in theirs.body
    missing = await one.ask("GET", f"{OPEN}/resp_{'0' * 32}")
    assert missing.status == 404 and missing.json["error"]["type"] == "not_found"
    assert set(missing.json["error"]) == {"type", "code", "message", "param"}
    wrong = await one.ask("POST", OPEN, {"model": MODEL})
    assert wrong.json["error"]["type"] == "invalid_request" and wrong.json["error"]["param"] == "input"


async def test_over_a_websocket_from_any_cursor_and_as_a_snapshot(one: Gate, two: Gate) -> None:
    dialect = "openai.responses"
    async with two.socket() as ws:
        await ws.send("create", ch=1, dialect=dialect, body=asked(40, 29, stream=True))
        await ws.until_ended(1)
        stream, seen = ws.track(1).ok[0]["stream"], ws.track(1).data
        chunks = [json.dumps(chunk).encode() for each in seen for chunk in each["f"]]
        final = fold(chunks)
        assert text_of(final) == await whole_text(one, 40, 29)
        for ch, after in enumerate((each["s"] for each in seen[:-1:7]), 2):
            await ws.send("sub", ch=ch, stream=stream, after=f"1-{after}", dialect=dialect)
            await ws.until_ended(ch)
            before = [json.dumps(chunk).encode() for each in seen if each["s"] <= after for chunk in each["f"]]
            rest = [json.dumps(chunk).encode() for each in ws.track(ch).data for chunk in each["f"]]
            assert before + rest == chunks
        for ch, mode in ((90, "snapshot"), (91, "coalesce")):
            await ws.send("sub", ch=ch, stream=stream, dialect=dialect, mode=mode)
            await ws.until_ended(ch)
            told = [json.dumps(chunk).encode() for each in ws.track(ch).data for chunk in each["f"]]
            assert fold(told, has_gaps=True) == final and len(told) < len(chunks)


async def test_a_conversation_through_the_other_dialect_finds_its_prefix(one: Gate) -> None:
    said = [
        {"role": "user", "content": "A long question about lakes. " * 300},
        {"role": "assistant", "content": "A long answer. " * 100},
        {"role": "user", "content": "And then?"},
    ]
    system = "You know lakes. " * 100
    body = {"model": MODEL, "messages": [{"role": "system", "content": system}, *said], "max_tokens": 4}
    first = (await one.ask("POST", "/v1/chat/completions", body)).json["usage"]
    items = [{"role": each["role"], "content": [{"type": "input_text", "text": each["content"]}]} for each in said]
    second = await one.ask(
        "POST", PATH, {"model": MODEL, "input": items, "instructions": system, "max_output_tokens": 4}
    )
    assert second.json["usage"]["input_tokens_details"]["cached_tokens"] > first["prompt_tokens"] * 0.9
    placed = await one.ask("GET", f"/v1/streams/{second.json['id']}/placement")
    (placement,) = placed.json["placements"]
    assert placement["reason"] == "prefix", "the gateway knew which replica has it"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/messages"])
async def test_a_prompt_cache_key_is_a_session(one: Gate, path: str) -> None:
    key = f"cache of {path} " * 12
    more: dict[str, Any] = {"prompt_cache_key": key, "max_tokens": 4, "model": MODEL}
    body = more | ({"input": "Hi"} if path == PATH else {"messages": [{"role": "user", "content": "Hi"}]})
    await one.ask("POST", path, body)
    stream = (await one.ask("POST", path, body)).headers["x-stream-id"]
    (placement,) = (await one.ask("GET", f"/v1/streams/{stream}/placement")).json["placements"]
    assert placement["reason"] == "pin"


async def test_errors_have_the_dialects_shape(one: Gate, tenants: Tenants) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {one.key}\r\n"
    async with one.connection() as exchange:
        await exchange.send(f"{head}content-length: {BODY_BYTES_MAX + 1}\r\n\r\n".encode())
        await exchange.head()
        assert exchange.status == 413 and json.loads(await exchange.rest())["error"]["code"] == "body_too_large"
    for method, path, body, status, param in (
        ("GET", f"{PATH}/resp_{'0' * 32}", None, 404, "id"),
        ("GET", f"{PATH}/nothing", None, 404, "id"),
        ("POST", f"{PATH}/resp_{'0' * 32}/cancel", None, 404, "id"),
        ("DELETE", f"{PATH}/resp_{'0' * 32}", None, 404, "id"),
        ("GET", f"{PATH}/resp_{'0' * 32}?stream=maybe", None, 400, None),
        ("POST", PATH, asked(tools=[{"type": "web_search"}]), 400, "tools"),
        ("POST", PATH, asked(input=[{"type": "computer_call"}]), 400, "input"),
        ("POST", PATH, asked(n=2), 400, "n"),
        ("POST", PATH, asked(previous_response_id=f"resp_{'0' * 32}"), 404, "previous_response_id"),
        ("POST", PATH, asked(conversation="conv_none"), 404, None),
        ("PUT", PATH, None, 405, None),
    ):
        refused = await one.ask(method, path, body)
        assert refused.status == status, (method, path, refused.body)
        assert set(refused.json) == {"error"} and refused.json["error"]["type"] == "invalid_request_error"
        assert refused.json["error"]["param"] == param
    name = (await tenants.acme.ask("POST", PATH, asked(5, 30))).json["id"]
    for method, path in (("GET", f"{PATH}/{name}"), ("DELETE", f"{PATH}/{name}"), ("POST", f"{PATH}/{name}/cancel")):
        assert (await tenants.globex.ask(method, path)).status == 404
    for method, path in (("DELETE", f"{PATH}/{name}"), ("POST", f"{PATH}/{name}/cancel")):
        assert (await tenants.acme_reader.ask(method, path)).status == 403
    assert (await tenants.acme_reader.ask("GET", f"{PATH}/{name}")).json["status"] == "incomplete"


async def test_a_repeated_request_attaches(one: Gate) -> None:
    headers = {"idempotency-key": "responses-attach"}
    first = await one.ask("POST", PATH, asked(20, 31, background=True), headers=headers)
    second = await one.ask("POST", PATH, asked(20, 31, background=True), headers=headers)
    assert first.json["id"] == second.json["id"]
    other = await one.ask("POST", OPEN, asked(20, 31, background=True), headers=headers)
    assert (other.status, other.json["error"]["code"]) == (422, "idempotency_mismatch")


async def test_a_response_continues_another_one(one: Gate, two: Gate) -> None:
    first = await one.ask("POST", PATH, asked(12, 32, instructions="Be brief."))
    said = [
        {"role": "user", "content": "Tell me of rivers."},
        {"role": "assistant", "content": text_of(first.json)},
        {"role": "user", "content": "And lakes?"},
    ]
    whole = await two.ask("POST", PATH, asked(12, 33, input=said))
    more = {"input": "And lakes?", "previous_response_id": first.json["id"]}
    for gate in (two, one):
        second = await gate.ask("POST", PATH, asked(12, 33, **more))
        assert text_of(second.json) == text_of(whole.json), "the same prompt, without the instructions"
        assert second.json["previous_response_id"] == first.json["id"]
    await one.ask("DELETE", f"{PATH}/{first.json['id']}")
    gone = await two.ask("POST", PATH, asked(12, 33, **more))
    assert (gone.status, gone.json["error"]["code"]) == (404, "previous_response_not_found")
    unstored = await one.ask("POST", PATH, asked(5, 34, store=False))
    refused = await two.ask("POST", PATH, asked(5, 34, previous_response_id=unstored.json["id"]))
    assert refused.status == 404


async def test_a_tools_result_continues_the_response_that_called_it(one: Gate, two: Gate) -> None:
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    called = await one.ask("POST", PATH, asked(30, 35, tools=[tool], tool_choice="required"))
    (call,) = called.json["output"]
    assert call["type"] == "function_call" and called.json["status"] == "completed"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain"}
    more = {"input": [result], "previous_response_id": called.json["id"], "tools": [tool]}
    answered = await two.ask("POST", PATH, asked(10, 35, **more))
    assert answered.status == 200 and text_of(answered.json)
    wrong = await two.ask("POST", PATH, asked(10, 35, **{**more, "input": [result | {"call_id": "call_none"}]}))
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "input")
    listed = await one.ask("GET", f"{PATH}/{answered.json['id']}/input_items")
    assert [item["type"] for item in listed.json["data"]] == ["function_call_output"]


async def test_a_refused_create_leaves_neither_a_response_nor_its_key(one: Gate) -> None:
    headers = {"idempotency-key": "responses-refused"}
    body = asked(5, 36, model="no-such-model")
    assert (await one.ask("POST", PATH, body, headers=headers)).status == 404
    assert (await one.ask("POST", PATH, asked(5, 36), headers=headers)).status == 200


async def test_a_summary_ends_when_its_client_leaves(one: Gate) -> None:
    """The summary would take 20 s; its stream ends with the grace of a plain reader."""
    items = [{"role": "user", "content": "word " * 4000} for _ in range(5)]
    more = {"context_management": [{"type": "compaction", "compact_threshold": 20_000}], "user": "who-leaves"}

    async def running() -> list[Any]:
        """Return the streams with more frames than a count of tokens has."""
        data = (await one.ask("GET", "/v1/streams?user=who-leaves")).json["data"]
        return [found for found in data if found["head"] > 10]

    async with one.connection() as exchange:
        await exchange.send(one.request("POST", PATH, asked(input=items, **more)))
        (summary,) = await eventually(running, "the summary to run")
    await one.until_status(summary["id"], "cancelled")
    assert not await running(), "no answer was begun"
