"""Inputs of running streams on the whole platform: over HTTP and WebSocket, read, resumed and refused everywhere."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from stream_fabric.accounts.records import KeyRecord, PlanRecord, TenantRecord
from stream_fabric.errors import KeyRevoked
from stream_fabric.limits import INPUTS_PENDING_MAX
from stream_fabric.process.host import HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.stream.frames import Note, encode
from stream_fabric.stream.ids import TenantId
from stream_gw.auth import ALL_SCOPES, KeyStore, Principal
from stream_gw.auth.principal import KeyUse
from stream_gw.client import Data, InputResult, StreamGateway
from stream_gw.streams.steering.inputs import next_prompt_tokens
from tests.gateway.conftest import Tenants
from tests.gateway.in_process import Reading, in_process
from tests.gateway.processes import Running
from tests.gateway.wire import DONE, Event, Gate, chat, events, text
from tests.support.waiting import eventually


async def steer(gate: Gate, stream: str, name: str, item: Any = "In one word, please.") -> Any:
    return await gate.ask("POST", f"/v1/streams/{stream}/input", {"id": name, "item": item})


async def begun(gate: Gate, stream: str) -> None:
    async def head() -> int:
        found: int = (await gate.info(stream))["head"]
        return found

    await eventually(head, "the first frame")


async def steered(one: Gate, two: Gate, **more: Any) -> tuple[str, bytes]:
    """A stream with an input after its first tokens, and its body."""
    async with one.create(chat(150, **more)) as exchange:
        stream = exchange.headers["x-stream-id"]
        body = b"".join([await exchange.piece() for _ in range(8)])
        reply = await steer(two, stream, "k1")
        assert (reply.status, reply.json) == (202, {"result": "accepted"})
        return stream, body + await exchange.rest()


def notes(found: list[Event]) -> list[Any]:
    return [event.json["input"] for event in found if event.data != DONE and "input" in event.json]


async def test_a_stream_goes_on_with_another_answer(one: Gate, two: Gate) -> None:
    stream, body = await steered(one, two, include_usage=True, stream_options={"include_usage": True})
    found = events(body)
    assert found[-1].data == DONE, "it ends clean"
    assert notes(found) == [{"id": "k1", "result": "applied"}]
    at = next(i for i, event in enumerate(found) if "input" in event.json)
    finishes = [c["finish_reason"] for e in found[:-1] for c in e.json["choices"] if c["finish_reason"]]
    assert finishes == ["length"], "one end for both answers"
    usage = found[-2].json["usage"]
    before = sum(bool(text([event])) for event in found[:at])
    assert usage["completion_tokens"] == before + 150, "each answer has the limit of the request"
    alone = json.loads((await one.ask("POST", "/v1/chat/completions", chat(1, stream=False))).body)["usage"]
    assert usage["prompt_tokens"] > 2 * alone["prompt_tokens"], "the prompt of the next answer is counted as well"
    # Byte-exact for whoever comes at whatever cursor, on any gateway
    for cut in [None, *(event for event in found[:: max(1, len(found) // 12)] if event.id)]:
        after = "" if cut is None else f"?after={cut.id}"
        replay = await (two if cut is None else one).ask("GET", f"/v1/streams/{stream}{after}")
        assert replay.body.endswith(body[0 if cut is None else cut.end :].removeprefix(b": hb\n")), cut


async def test_the_natural_end_and_an_input_meet(one: Gate, two: Gate) -> None:
    """Whatever wins: an accepted input is applied, and a refused one changes nothing."""
    results = set()
    for tokens in range(2, 26):
        async with one.create(chat(tokens, seed=tokens)) as exchange:
            stream = exchange.headers["x-stream-id"]
            body = b"".join([await exchange.piece() for _ in range(3)])
            reply = await steer(two, stream, "k1")
            body += await exchange.rest()
        results.add(reply.json["result"])
        found = events(body)
        assert found[-1].data == DONE
        applied = [{"id": "k1", "result": "applied"}] if reply.json["result"] == "accepted" else []
        assert notes(found) == applied, tokens
    assert results == {"accepted", "terminal"}


async def test_inputs_and_a_cancel_meet(one: Gate, two: Gate) -> None:
    for number in range(6):
        stream = await one.background(500, seed=number)
        await begun(one, stream)
        *_, cancel = await asyncio.gather(*(steer(two, stream, f"k{n}") for n in range(3)), one.cancel(stream))
        assert cancel["result"] == "accepted"
        info = await one.info(stream)
        assert (info["status"], info["head"]) == ("cancelled", int(cancel["at"].split("-")[1]) + 1)


async def test_over_a_websocket_its_place_is_told_in_every_dialect(one: Gate, two: Gate) -> None:
    async with one.socket() as socket, two.socket() as other:
        await socket.create(1, chat(3000))
        await socket.until_t("d", ch=1)
        stream = socket.track(1).ok[0]["stream"]
        await other.send("sub", ch=1, stream=stream, after="1-0", dialect="openai.responses")
        await other.until_t("d", ch=1)
        await other.send("input", id="k1", stream=stream, item={"role": "user", "content": "Shorter."})
        both: dict[str, Any] = {}
        while not {"ack", "steered"} <= both.keys():  # whichever comes first
            message = await other.receive()
            both[message["t"]] = message
        assert (both["ack"]["id"], both["ack"]["result"]) == ("k1", "accepted")
        told = await socket.until_t("steered", ch=1)
        assert told == {"t": "steered", "ch": 1, "s": told["s"], "id": "k1", "result": "applied"}
        assert both["steered"]["s"] == told["s"]
        await one.cancel(stream)
        await other.until_ended(1)
        assert other.track(1).end["s"] > told["s"]


async def test_the_other_dialects_keep_the_answers_apart(one: Gate, two: Gate) -> None:
    stream, _ = await steered(one, two)
    messages = await two.ask("GET", f"/v1/streams/{stream}?dialect=anthropic.messages")
    assert messages.body.count(b'"type":"content_block_start"') == 2
    assert b'{"type":"ping","input":{"id":"k1","result":"applied"}}' in messages.body
    ui = await two.ask("GET", f"/v1/streams/{stream}?dialect=vercel.ui")
    assert ui.body.count(b'"type":"text-start"') == 2
    assert b'{"type":"data-input","data":{"id":"k1","result":"applied"}}' in ui.body
    response = (await two.ask("GET", f"/v1/responses/{stream}")).json
    assert [item["type"] for item in response["output"]] == ["message", "message"]
    assert response["output"][0]["status"] == "completed"


async def test_a_whole_answer_says_where_its_inputs_are(one: Gate, two: Gate) -> None:
    key = {"Idempotency-Key": f"whole-{id(one)}"}
    body = chat(300, stream=False, user="whole-steered")
    asking = asyncio.create_task(one.ask("POST", "/v1/chat/completions", body, key))

    async def running() -> Any:
        return (await two.ask("GET", "/v1/streams?user=whole-steered")).json["data"]

    (found,) = await eventually(running, "the stream")
    await begun(two, found["id"])
    assert (await steer(two, found["id"], "k1")).status == 202
    whole = (await asking).json
    (note,) = whole["inputs"]
    content = whole["choices"][0]["message"]["content"]
    assert note == {"id": "k1", "result": "applied", "at": note["at"]} and note["at"] < len(content)


async def test_more_than_may_wait_are_refused(platform: Running, one: Gate) -> None:
    with platform.silent():
        stream = await one.background(100)
        replies = [await steer(one, stream, f"k{n}") for n in range(INPUTS_PENDING_MAX + 1)]
        assert [reply.status for reply in replies] == [202] * INPUTS_PENDING_MAX + [429]
        assert replies[-1].json["error"]["code"] == "too_many_pending_steers"
        again = await steer(one, stream, "k3")
        assert again.json == {"result": "duplicate"}, "one that was accepted stays so"
    await one.cancel(stream)


async def test_a_stream_that_waits_in_the_queue_takes_inputs(platform: Running, one: Gate) -> None:
    with platform.silent():
        stream = await one.background(20)
        assert (await steer(one, stream, "k1", "Begin with this.")).status == 202
    await one.until_status(stream, "completed")
    found = events((await one.ask("GET", f"/v1/streams/{stream}")).body)
    assert notes(found) == [{"id": "k1", "result": "applied"}]


async def test_who_may_not_steer(one: Gate, tenants: Tenants) -> None:
    stream = await tenants.acme.background(1000)
    assert (await steer(tenants.globex, stream, "k1")).json["error"]["code"] == "not_found"
    assert (await steer(tenants.acme_reader, stream, "k1")).json["error"]["code"] == "forbidden"
    assert (await steer(tenants.acme, stream, "k1")).json == {"result": "accepted"}
    other = await steer(tenants.acme, stream, "k1", "Something else.")
    assert (other.status, other.json["error"]["code"]) == (422, "idempotency_mismatch")
    await tenants.acme.cancel(stream)


@pytest.mark.parametrize("more", [{"n": 2}], ids=["two choices"])
async def test_what_cannot_be_steered(one: Gate, more: dict[str, Any]) -> None:
    stream = await one.background(500, **more)
    reply = await steer(one, stream, "k1")
    assert (reply.status, reply.json["error"]["code"]) == (400, "steering_not_supported")
    await one.cancel(stream)


async def test_the_python_client_steers(one: Gate) -> None:
    async with StreamGateway(one.url, token=one.key) as gateway:
        stream = gateway.create(chat(200))
        texts, told = [""], []
        async for item in stream:
            match item:
                case Data(chunks=chunks):
                    for chunk in chunks:
                        if "input" in chunk:
                            texts.append("")
                        texts[-1] += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
                    if len(texts) == 1 and not told and item.seq > 8:
                        told.append(await stream.input("In one word, please."))
                case InputResult():
                    told.append(item)
        ack, applied = told
        assert ack.result == "accepted"
        assert isinstance(applied, InputResult) and (applied.result, applied.id) == ("applied", ack.id)
        assert len(texts) == 2 and all(texts) and stream.status == "completed"


async def test_inputs_of_a_revoked_key_that_waited_are_refused(redis_client: RedisClient) -> None:
    """Its socket is closed, and the inputs that wait for those before them are not applied."""
    tenant, key = f"t-{HostRandom().token_hex(4)}", KeyRecord("k1", "digest", tuple(ALL_SCOPES))
    keys = KeyStore([PlanRecord("p"), TenantRecord(tenant, "p", (key,))])
    async with in_process(redis_client, keys=keys) as world:
        who = Principal(TenantId(tenant), ALL_SCOPES, key=KeyUse("k1"))
        opened = await world.gateway.streams.create(replace(world.call(), who=who))
        assert opened is not None
        subscription = opened.subscribe(Reading())
        assert await world.gateway.inputs.add(who, opened.id, "i1", "before") == "accepted"
        keys.apply(f"tenant:{tenant}", TenantRecord(tenant, "p"))
        with pytest.raises(KeyRevoked):
            await world.gateway.inputs.add(who, opened.id, "i2", "after")
        assert [stored.id for stored in await world.log.inputs(opened.id)] == ["i1"]
        subscription.close()


@pytest.mark.parametrize(
    ("prompts", "output", "expected"),
    [([], 5, 5), ([100], 40, 140), ([100, 160], 50, 160), ([100, 160], 90, 190)],
    ids=["not counted yet", "the first answer", "the second has just begun", "the second, 30 tokens later"],
)
def test_output_that_a_prompt_holds_counts_once(prompts: list[int], output: int, expected: int) -> None:
    structure = b"\n".join(encode(Note("prompt", tokens, 0)) for tokens in prompts)
    assert next_prompt_tokens(structure, output) == expected
