"""Chats of ``useChat``: one stream in Vercel's dialect, resumed and stopped by the id of its chat alone."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest

from stream_fabric.limits import CHAT_BEFORE_BYTES_MAX, CHAT_READ_S, CHAT_TTL_S
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.index import chat_tag
from stream_fabric.redis.topology import slot_of
from stream_fabric.stream.ids import TenantId
from tests.gateway.conftest import Tenants
from tests.gateway.processes import Running
from tests.gateway.wire import MODEL, Gate, Reply, chat, refusal
from tests.support.waiting import eventually

PATH = "/v1/ui/chat"
QUESTION = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "Tell me of rivers."}]}


def new_chat() -> str:
    return f"chat-{secrets.token_hex(6)}"


def turn(name: str, tokens: int = 30, **more: Any) -> dict[str, Any]:
    """A body of ``useChat``, with settings of the page's own."""
    return {
        "id": name, "messages": [QUESTION], "trigger": "submit-message", "model": MODEL, "maxOutputTokens": tokens,
        "seed": 1, "ignore_eos": True, **more,
    }  # fmt: skip


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["delta"] for chunk in chunks if chunk["type"] == "text-delta")


async def resumed(gate: Gate, name: str, query: str = "") -> Reply:
    return await gate.ask("GET", f"{PATH}/{name}/stream{query}")


async def test_an_answer_has_the_text_of_the_same_chat(one: Gate) -> None:
    reply = await one.ask("POST", PATH, turn(new_chat()))
    assert reply.status == 200 and reply.headers["x-vercel-ai-ui-message-stream"] == "v1"
    assert reply.headers["content-type"].startswith("text/event-stream")
    chunks = chunks_of(reply.body)
    whole = await one.ask("POST", "/v1/chat/completions", {**chat(30, 1), "stream": False})
    assert text_of(chunks) == whole.json["choices"][0]["message"]["content"]
    assert chunks[0]["type"] == "start" and chunks[-1]["finishReason"] == "length"
    assert chunks[0]["messageMetadata"]["streamId"] == reply.headers["x-stream-id"]
    assert chunks[-1]["messageMetadata"]["usage"]["outputTokens"] == 30


async def test_a_running_answer_is_replayed_whole_through_another_gateway(one: Gate, two: Gate) -> None:
    name = new_chat()
    async with one.open("POST", PATH, turn(name, 300)) as exchange:
        await exchange.events(20)
        again = await resumed(two, name)
        rest = chunks_of(again.body)
        first = await exchange.rest()
    assert again.headers["x-stream-id"] == exchange.headers["x-stream-id"]
    assert again.headers["x-vercel-ai-ui-message-stream"] == "v1"
    assert rest[0]["type"] == "start" and text_of(rest).endswith(text_of(chunks_of(first)))
    whole = await one.ask("GET", f"/v1/streams/{again.headers['x-stream-id']}")
    assert rest[0] == chunks_of(whole.body)[0], "the same id of the message"


async def test_an_answer_that_nobody_saw_the_end_of_is_kept(one: Gate, two: Gate) -> None:
    name = new_chat()
    async with one.open("POST", PATH, turn(name, 60)) as exchange:
        stream = exchange.headers["x-stream-id"]
    await two.until_status(stream, "completed")
    found = await resumed(two, name)
    assert found.headers["x-stream-id"] == stream and chunks_of(found.body)[-1]["type"] == "finish"


async def test_an_answer_that_was_read_whole_is_replayed_for_a_moment(one: Gate, two: Gate, platform: Running) -> None:
    """A page that reloads in the moment of the end loses nothing; one that comes later has the answer already."""
    name = new_chat()
    tag = chat_tag(TenantId("dev"), "", name)
    client = RedisClient(platform.redis_url)
    await client.start()

    async def kept_s() -> float:
        return int(await client.execute(slot_of(tag), "PTTL", f"sg:{{{tag}}}")) / 1000

    async def is_forgotten_soon() -> bool:
        return await kept_s() <= CHAT_READ_S

    async with one.open("POST", PATH, turn(name, 40)) as exchange:
        await exchange.events(3)
        assert CHAT_TTL_S - 60 < await kept_s() <= CHAT_TTL_S
        await exchange.rest()
    await eventually(is_forgotten_soon, "the chat to be marked as read")
    assert chunks_of((await resumed(two, name)).body)[-1]["type"] == "finish"
    assert 0 < await kept_s() <= CHAT_READ_S
    await client.execute(slot_of(tag), "DEL", f"sg:{{{tag}}}")
    assert (await resumed(two, name)).status == 204
    await client.close()


async def test_a_chat_without_a_stream_has_nothing_to_resume(one: Gate) -> None:
    reply = await resumed(one, new_chat())
    assert (reply.status, reply.body) == (204, b"") and reply.headers["cache-control"] == "no-store"
    assert (await one.ask("HEAD", f"{PATH}/{new_chat()}/stream")).status == 204


async def test_a_stop_cancels_and_leaves_nothing_to_resume(one: Gate, two: Gate) -> None:
    name = new_chat()
    async with one.open("POST", PATH, turn(name, 5000)) as exchange:
        await exchange.events(5)
        told = await two.ask("DELETE", f"{PATH}/{name}")
        chunks = chunks_of(await exchange.rest())
    stream = exchange.headers["x-stream-id"]
    assert told.json["result"] == "accepted" and told.json["stream"] == stream
    assert [chunk["type"] for chunk in chunks[-2:]] == ["text-end", "abort"]
    await one.until_status(stream, "cancelled")
    assert (await resumed(one, name)).status == 204
    again = await two.ask("DELETE", f"{PATH}/{name}")
    assert again.json == {"stream": None, "result": "none", "at": None, "status": None}


async def test_a_late_stop_does_not_end_the_next_turn(one: Gate, two: Gate) -> None:
    name = new_chat()
    first = await one.ask("POST", PATH, turn(name, 3))
    async with one.open("POST", PATH, turn(name, 5000)) as exchange:
        await exchange.events(5)
        stream = exchange.headers["x-stream-id"]
        late = await two.ask("DELETE", f"{PATH}/{name}?stream={first.headers['x-stream-id']}")
        assert late.json["result"] == "terminal" and late.json["stream"] == first.headers["x-stream-id"]
        assert (await two.info(stream))["status"] == "live"
        named = await two.ask("DELETE", f"{PATH}/{name}?stream={stream}")
        assert named.json["result"] == "accepted"
    refusal(await one.ask("DELETE", f"{PATH}/{name}?stream=nothing"), 404, "not_found")


async def test_the_newest_turn_is_the_one_to_resume(one: Gate, two: Gate) -> None:
    name = new_chat()
    async with one.open("POST", PATH, turn(name, 5000)) as older, one.open("POST", PATH, turn(name, 40)) as newer:
        assert (await resumed(two, name)).headers["x-stream-id"] == newer.headers["x-stream-id"]
        assert (await two.info(older.headers["x-stream-id"]))["status"] == "live", "its reader still has it"
        await two.cancel(older.headers["x-stream-id"])


async def test_chats_are_of_their_tenant_and_user(tenants: Tenants) -> None:
    acme, name = tenants.acme, new_chat()
    tokens = [(await acme.ask("POST", "/v1/tokens", {"user": user})).json["token"] for user in ("ann", "bob")]
    ann, bob = (Gate(acme.url, acme.pid, token) for token in tokens)
    async with ann.open("POST", PATH, turn(name, 100_000)) as exchange:
        stream = exchange.headers["x-stream-id"]
        for stranger in (bob, tenants.globex, acme):
            assert (await resumed(stranger, name)).status == 204
            assert (await stranger.ask("DELETE", f"{PATH}/{name}")).json["result"] == "none"
        refusal(await resumed(bob, name, "?user=ann"), 404, "not_found")
        refusal(await bob.ask("DELETE", f"{PATH}/{name}?user=ann"), 404, "not_found")
        assert (await acme.ask("HEAD", f"{PATH}/{name}/stream?user=ann")).status == 200
        assert (await acme.info(stream))["status"] == "live"
        refusal(await tenants.acme_reader.ask("DELETE", f"{PATH}/{name}?user=ann"), 403, "forbidden")
        assert (await ann.ask("DELETE", f"{PATH}/{name}")).json["result"] == "accepted"


async def test_a_page_resumes_what_its_backend_began_for_its_user(tenants: Tenants) -> None:
    acme, name = tenants.acme, new_chat()
    token = (await acme.ask("POST", "/v1/tokens", {"user": "ann"})).json["token"]
    async with acme.open("POST", PATH, turn(name, 100_000, user="ann")) as exchange:
        for gate in (acme, Gate(acme.url, acme.pid, token)):
            async with gate.open("GET", f"{PATH}/{name}/stream") as found:
                assert found.headers["x-stream-id"] == exchange.headers["x-stream-id"]
        await acme.cancel(exchange.headers["x-stream-id"])


async def test_any_id_of_a_chat_is_one(one: Gate) -> None:
    name, coded = "a/b ü%?", "a%2Fb%20%C3%BC%25%3F"
    async with one.open("POST", PATH, turn(name, 100_000)) as exchange:
        await exchange.events(3)
        assert (await one.ask("HEAD", f"{PATH}/{coded}/stream")).status == 200
        assert (await one.ask("DELETE", f"{PATH}/{coded}")).json["result"] == "accepted"
    refusal(await resumed(one, "x" * 129), 400, "invalid_request")
    refusal(await one.ask("POST", PATH, turn("")), 400, "invalid_request")


@pytest.mark.parametrize("key", ["model", "nothing"])
async def test_a_request_without_a_model_gets_the_only_one(tenants: Tenants, key: str) -> None:
    body = {name: value for name, value in turn(new_chat(), 3).items() if name != "model"}
    if key == "nothing":
        error = refusal(await tenants.acme_other_model.ask("POST", PATH, body), 400, "invalid_request")
        assert error["param"] == "model" and error["message"].endswith("may use: none")
        return
    assert MODEL in [each["id"] for each in (await tenants.acme.ask("GET", "/v1/models")).json["data"]]
    token = (await tenants.acme.ask("POST", "/v1/tokens", {"models": [MODEL]})).json["token"]
    reply = await Gate(tenants.acme.url, tenants.acme.pid, token).ask("POST", PATH, body | {"model": None})
    assert chunks_of(reply.body)[0]["messageMetadata"]["model"] == MODEL


async def test_several_models_are_named_in_the_refusal(one: Gate, fast: str) -> None:
    body = {name: value for name, value in turn(new_chat()).items() if name != "model"}

    async def are_two() -> bool:
        return {MODEL, fast} <= {model["id"] for model in (await one.ask("GET", "/v1/models")).json["data"]}

    await eventually(are_two, "two models")
    error = refusal(await one.ask("POST", PATH, body), 400, "invalid_request")
    assert error["param"] == "model" and MODEL in error["message"] and fast in error["message"]


def called(output: str = "sunny") -> dict[str, Any]:
    """An assistant's message whose tool the page has run."""
    call = {"type": "tool-weather", "toolCallId": "c1", "state": "output-available", "input": {"city": "Oslo"}}
    parts = [{"type": "step-start"}, {"type": "text", "text": "Let me look."}, {**call, "output": output}]
    return {"id": "a1", "role": "assistant", "metadata": {"kept": True}, "parts": parts}


async def test_a_message_that_goes_on_after_a_tool_is_replayed_with_its_beginning(one: Gate, two: Gate) -> None:
    name = new_chat()
    body = turn(name, 20, messages=[QUESTION, called()], messageId="a1")
    reply = await one.ask("POST", PATH, body)
    own = chunks_of(reply.body)
    assert own[0]["messageId"] == "a1" and own[1]["type"] == "start-step"
    told = chunks_of((await resumed(two, name)).body)
    assert told[0]["messageId"] == "a1" and told[0]["messageMetadata"]["kept"] is True
    kinds = [chunk["type"] for chunk in told]
    assert kinds[1:5] == ["start-step", "text-start", "text-delta", "text-end"]
    assert kinds[5:10] == ["tool-input-start", "tool-input-delta", "tool-output-available", "finish-step", "start-step"]
    assert text_of(told) == "Let me look." + text_of(own)


async def test_a_beginning_above_the_limit_is_not_kept(one: Gate, two: Gate) -> None:
    name = new_chat()
    body = turn(name, 5, messages=[QUESTION, called("x" * CHAT_BEFORE_BYTES_MAX)], messageId="a1")
    assert chunks_of((await one.ask("POST", PATH, body)).body)[0]["messageId"] == "a1"
    told = chunks_of((await resumed(two, name)).body)
    assert told[0]["messageId"].startswith("msg_"), "a message of its own loses nothing of the page's"


async def test_a_stream_is_read_in_each_dialect_that_can_express_it(one: Gate) -> None:
    reply = await one.ask("POST", PATH, turn(new_chat(), 20))
    path = f"/v1/streams/{reply.headers['x-stream-id']}"
    own = await one.ask("GET", path)
    assert chunks_of(own.body) == chunks_of(reply.body) and own.headers["x-vercel-ai-ui-message-stream"] == "v1"
    for dialect in ("openai.chat", "anthropic.messages"):
        assert (await one.ask("GET", f"{path}?dialect={dialect}")).status == 200
    made = await one.ask("POST", "/v1/chat/completions", chat(4, 1, n=2))
    refused = await one.ask("GET", f"/v1/streams/{made.headers['x-stream-id']}?dialect=vercel.ui")
    assert "2 choices" in refusal(refused, 400, "unsupported")["message"]


async def test_a_socket_creates_and_follows(one: Gate, two: Gate) -> None:
    async with two.socket() as ws:
        await ws.send("create", ch=1, dialect="vercel.ui", body=turn(new_chat(), 40))
        await ws.until_ended(1)
        stream, seen = ws.track(1).ok[0]["stream"], ws.track(1).data
        chunks = [chunk for each in seen for chunk in each["f"]]
        for ch, after in enumerate((each["s"] for each in seen[:-1:7]), 2):
            await ws.send("sub", ch=ch, stream=stream, after=f"1-{after}", dialect="vercel.ui")
            await ws.until_ended(ch)
            before = [chunk for each in seen if each["s"] <= after for chunk in each["f"]]
            assert before + [chunk for each in ws.track(ch).data for chunk in each["f"]] == chunks
        await ws.send("sub", ch=90, stream=stream, dialect="vercel.ui", mode="snapshot")
        await ws.until_ended(90)
        told = [chunk for each in ws.track(90).data for chunk in each["f"]]
        assert text_of(told) == text_of(chunks) and len(told) < len(chunks)
