from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from stream_fabric.errors import Draining, FabricUnavailable
from stream_fabric.limits import (
    IDEMPOTENCY_KEY_CHARS_MAX,
    INPUT_BYTES_MAX,
    INPUT_CONTAINERS_MAX,
    JSON_DEPTH_MAX,
    OUTBOX_BYTES_MAX,
    PAGE_ENTRIES_MAX,
    STALL_BYTES_MIN,
    STALL_S_MAX,
    STREAMS_PER_SOCKET_MAX,
    WS_APP_PING_S,
    WS_AUTH_S_MAX,
    WS_MESSAGE_BYTES_MAX,
    WS_REPLIES_BYTES_MAX,
)
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.streams import RedisStreamLog, check_partitions
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.frames import End, Usage, encode
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId, new_stream_id
from stream_fabric.stream.log import Append, AppendCode
from stream_gw.dialects.facts import StreamFacts, StreamMeta
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.streams.opened import OpenedStream
from stream_gw.transport.sweeping import StallTimer
from stream_gw.transport.ws import Session, subscribe
from stream_gw.transport.ws_socket import Channel, Socket
from tests.gateway.conftest import Tenants
from tests.gateway.in_process import WHO, Reading, in_process
from tests.gateway.processes import Running, delete_log
from tests.gateway.wire import (
    MODEL,
    Gate,
    Tokenstream,
    Track,
    chat,
    dense,
    events,
    refusal,
    text,
    text_of_chunks,
    tokens_of_chunks,
)
from tests.support.waiting import eventually

UNKNOWN = "resp_" + "0" * 32
PROTOCOL = "tokenstream.v1"


async def token(gate: Gate, **asked: Any) -> str:
    reply = await gate.ask("POST", "/v1/tokens", asked)
    assert reply.status == 200, reply
    minted: str = reply.json["token"]
    return minted


# --- a stream on a socket ------------------------------------------------------------------------------------


async def test_a_stream_from_hi_to_end(one: Gate) -> None:
    stream_text = text(events((await one.finished(25, seed=3))[1]))
    async with one.socket(subprotocols=[PROTOCOL]) as socket:
        assert socket.connection.subprotocol == PROTOCOL
        hi = await socket.receive()
        assert hi.keys() == {"t", "conn", "gateway", "ping_ms"}
        assert (hi["t"], hi["ping_ms"]) == ("hi", int(WS_APP_PING_S * 1000))
        await socket.create(7, chat(25, seed=3))
        await socket.until_ended(7)
        track = socket.track(7)
        (ok,) = track.ok
        assert ok.keys() == {"t", "ch", "stream", "epoch", "head", "status"}
        assert re.fullmatch(r"resp_[0-9a-f]{32}", ok["stream"])
        assert re.fullmatch(r"1\.[0-9a-f]+", ok["epoch"])
        assert ok["status"] == "live"
        dense(track)
        assert track.text == stream_text
        assert track.end is not None
        assert track.end["status"] == "completed"
        assert track.end["usage"]["output"] == tokens_of_chunks(_chunks(track))
        assert not track.errors
    assert (await one.info(ok["stream"]))["status"] == "completed"


async def test_chunks_are_those_of_the_sse_events(one: Gate) -> None:
    async with one.socket() as socket:
        await socket.create(1, chat(12))
        await socket.until_ended(1)
        track = socket.track(1)
        reply = await one.ask("GET", f"/v1/streams/{track.ok[0]['stream']}")
    chunks = [chunk for message in track.data for chunk in message["f"]]
    assert chunks == [event.json for event in events(reply.body)[:-1]]


async def test_many_streams_share_a_socket(one: Gate) -> None:
    wanted = {ch: text(events((await one.finished(10 + ch, seed=ch))[1])) for ch in range(1, 11)}
    async with one.socket() as socket:
        for ch in wanted:
            await socket.create(ch, chat(10 + ch, seed=ch))
        await socket.until_ended(*wanted)
        for ch, whole in wanted.items():
            dense(socket.track(ch))
            assert socket.track(ch).text == whole
        assert len({socket.track(ch).ok[0]["stream"] for ch in wanted}) == 10


@pytest.mark.parametrize("live", [True, False], ids=["live", "finished"])
async def test_subscribing_gives_the_same_text_in_every_mode(one: Gate, two: Gate, live: bool) -> None:
    async with AsyncExitStack() as stack:
        if live:
            exchange = await stack.enter_async_context(one.create(chat(150)))
            stream = exchange.headers["x-stream-id"]
            await exchange.events(40)
            ending = asyncio.create_task(exchange.rest())
        else:
            stream, _ = await one.finished(150)
        async with two.socket() as socket:
            for ch, mode in enumerate(("tokens", "coalesce", "snapshot")):
                await socket.sub(ch, stream, mode=mode)
            await socket.sub(3, stream, after="1-30")
            await socket.until_ended(0, 1, 2, 3)
        if live:
            await ending
        whole = text(events((await one.ask("GET", f"/v1/streams/{stream}")).body))
        tokens, coalesce, snapshot, tail = (socket.track(ch) for ch in range(4))
        for track in (tokens, coalesce, snapshot):
            dense(track)
            assert track.text == whole
            assert track.ok[0]["status"] == ("live" if live else "completed")
            assert track.end is not None
            assert track.end["usage"]["output"] == tokens_of_chunks(_chunks(tokens))
        dense(tail, after=30)
        assert whole.endswith(tail.text)
        assert 0 < len(tail.text) < len(whole)
        assert len(_chunks(tokens)) >= 149
        assert len(_chunks(snapshot)) < len(_chunks(tokens))
        if not live:
            assert len(_chunks(coalesce)) < len(_chunks(tokens)) / 2
            assert len(_chunks(snapshot)) <= 3


def _chunks(track: Track) -> list[Any]:
    return [chunk for message in track.data for chunk in message["f"]]


async def test_subscribing_at_the_end_repeats_only_the_end(one: Gate, two: Gate) -> None:
    stream, _ = await one.finished(5)
    head = (await one.info(stream))["head"]
    async with two.socket() as socket:
        await socket.sub(1, stream, after=f"1-{head}")
        await socket.until_ended(1)
        assert socket.track(1).data == []
        assert socket.track(1).end == {
            "t": "end",
            "ch": 1,
            "s": head,
            "status": "completed",
            "usage": socket.track(1).end["usage"],
        }
        assert socket.track(1).end["usage"]["output"] > 0


async def test_a_key_attaches(one: Gate, two: Gate) -> None:
    key = f"ws-{time.time_ns()}"
    async with one.socket() as first, two.socket() as second:
        await first.create(1, chat(40), key=key)
        await first.until_t("d", ch=1)
        await second.create(1, chat(40), key=key)
        await second.create(2, chat(41), key=key)
        await asyncio.gather(first.until_ended(1), second.until_ended(1))
        assert first.track(1).ok[0]["stream"] == second.track(1).ok[0]["stream"]
        assert first.track(1).text == second.track(1).text
        dense(second.track(1))
        if not second.track(2).errors:
            await second.until_t("error", ch=2)
        assert second.track(2).errors[0]["code"] == "idempotency_mismatch"


async def test_unsubscribing_ends_the_channel_and_not_the_stream(one: Gate) -> None:
    stream, _ = await one.finished(1)
    async with one.socket() as socket:
        await socket.create(1, chat(3000))
        await socket.until_t("d", ch=1)
        live = socket.track(1).ok[0]["stream"]
        await socket.send("unsub", ch=1)
        await socket.send("unsub", ch=99)  # of no channel: nothing happens
        await socket.sub(2, stream)
        await socket.until_ended(2)
        seen = len(socket.track(1).data)
        await one.until_open_streams(0)
        await socket.sub(3, stream)
        await socket.until_ended(3)
        assert len(socket.track(1).data) == seen
        assert (await one.info(live))["status"] == "live", "a socket's streams are kept for a while"
        # The number is free again, and the stream is where it was left
        await socket.sub(1, live, after=f"1-{socket.track(1).data[-1]['s']}")
        await socket.until(lambda m: m.get("ch") == 1 and m["t"] == "d")
    await one.cancel(live)


async def test_a_channel_is_free_after_its_end_and_taken_before(one: Gate) -> None:
    async with one.socket() as socket:
        await socket.create(5, chat(2000))
        await socket.until_t("ok", ch=5)
        stream = socket.track(5).ok[0]["stream"]
        await socket.create(5, chat(2))
        error = await socket.until_t("error", ch=5)
        assert error["code"] == "invalid_request"
        await socket.send("cancel", id="c", stream=stream)
        await socket.until_ended(5)
        socket.tracks.clear()
        await socket.create(5, chat(2))
        await socket.until_ended(5)
        assert socket.track(5).end["status"] == "completed"


@pytest.mark.parametrize("ch", [-1, 1 << 31, 1 << 70])
async def test_a_channel_number_out_of_range(one: Gate, ch: int) -> None:
    async with one.socket() as socket:
        await socket.create(ch, chat(1))
        error = await socket.until_t("error")
        assert error["code"] == "invalid_request"


async def test_a_socket_has_a_limit_of_channels(one: Gate) -> None:
    streams = [await one.background(3000) for _ in range(3)]
    async with one.socket() as socket:
        for ch in range(STREAMS_PER_SOCKET_MAX):
            await socket.sub(ch, streams[ch % 3])
        await socket.sub(1000, streams[0])
        error = await socket.until_t("error")
        assert (error["ch"], error["code"], error["retriable"]) == (1000, "too_many", True)
        assert all(not track.errors for ch, track in socket.tracks.items() if ch < STREAMS_PER_SOCKET_MAX)
        await socket.send("unsub", ch=0)
        await socket.sub(1001, streams[0])
        await socket.until_t("ok", ch=1001)
    for stream in streams:
        await one.cancel(stream)
    await one.until_open_streams(0)


@pytest.mark.chaos
async def test_a_ping_tells_each_channels_head(one: Gate) -> None:
    async with one.socket() as socket:
        await socket.create(4, chat(6000))
        ping = await socket.until(lambda m: m["t"] == "ping", within_s=WS_APP_PING_S + 8)
        seen = socket.track(4).data[-1]["s"]
        assert ping["head"].keys() == {"4"}
        assert ping["head"]["4"] == seen
        await socket.send("pong")
        await socket.send("cancel", id="c", stream=socket.track(4).ok[0]["stream"])
        await socket.until_ended(4)


# --- cancel and input ----------------------------------------------------------------------------------------


async def test_invariant_5_nothing_follows_an_accepted_cancel(one: Gate, two: Gate) -> None:
    async with one.socket() as reader, two.socket() as other:
        await reader.create(1, chat(3000))
        for _ in range(4):
            await reader.until_t("d", ch=1)
        stream = reader.track(1).ok[0]["stream"]
        await other.send("cancel", id="k1", stream=stream)
        ack = await other.until_t("ack")
        assert ack.keys() == {"t", "id", "result", "at", "status"}
        assert (ack["id"], ack["result"], ack["status"]) == ("k1", "accepted", "cancelled")
        await reader.until_ended(1)
        track = reader.track(1)
        at = int(ack["at"].split("-")[1])
        assert track.end["status"] == "cancelled"
        assert track.end["s"] == at + 1
        dense(track)
        assert max(m["s"] for m in track.data if text_of_chunks(m["f"])) <= at
        await reader.send("cancel", id="k2", stream=stream)
        again = await reader.until_t("ack", id="k2")
        assert (again["result"], again["at"]) == ("already", ack["at"])


async def test_an_input_is_a_users_message_as_over_http(one: Gate) -> None:
    stream = await one.background(3000)
    async with one.socket() as socket:
        for item in ("7", "[]", '""', "null", "{}", '{"a":' * JSON_DEPTH_MAX + "1" + "}" * JSON_DEPTH_MAX):
            await socket.connection.send(f'{{"t":"input","id":"i","stream":"{stream}","item":{item}}}')
            message = await socket.until(lambda m: m["t"] in ("ack", "error"))
            assert message["code"] == ("invalid_input" if item[0] in '{"' else "invalid_request"), item
        deeper = '{"a":' * (JSON_DEPTH_MAX + 1) + "1" + "}" * (JSON_DEPTH_MAX + 1)
        await socket.connection.send(f'{{"t":"input","id":"i2","stream":"{stream}","item":{deeper}}}')
        assert (await socket.until_t("error", id="i2"))["code"] == "json_too_deep"
        await socket.send("input", id="i3", stream=stream, item="x" * INPUT_BYTES_MAX)
        assert (await socket.until_t("error", id="i3"))["code"] == "body_too_large"
        parts = {"role": "user", "content": [{"type": "text", "text": "x"}] * INPUT_CONTAINERS_MAX}
        await socket.send("input", id="i5", stream=stream, item=parts)
        assert (await socket.until_t("error", id="i5"))["code"] == "json_too_deep"
    many = {"id": "i6", "item": parts}
    refusal(await one.ask("POST", f"/v1/streams/{stream}/input", many), 400, "json_too_deep")
    large = {"id": "i4", "item": "x" * INPUT_BYTES_MAX}
    refusal(await one.ask("POST", f"/v1/streams/{stream}/input", large), 413, "body_too_large")
    await one.cancel(stream)


async def test_an_id_has_a_length(one: Gate) -> None:
    async with one.socket() as socket:
        for t, more in (("cancel", {}), ("input", {"item": {}})):
            await socket.send(t, id="k" * IDEMPOTENCY_KEY_CHARS_MAX, stream="x", **more)
            assert (await socket.until_t("error"))["code"] == "not_found"
            await socket.send(t, id="k" * (IDEMPOTENCY_KEY_CHARS_MAX + 1), stream="x", **more)
            error = await socket.until_t("error")
            assert error["code"] == "invalid_request"
            assert "kkk" not in json.dumps(error), "it is not repeated"


async def test_inputs_are_acknowledged_once_durable(one: Gate, two: Gate) -> None:
    stream = await one.background(3000)
    async with one.socket() as socket, two.socket() as other:
        await socket.send("input", id="i1", stream=stream, item="ü")
        assert (await socket.until_t("ack", id="i1"))["result"] == "accepted"
        await socket.send("input", id="i1", stream=stream, item={"role": "user", "content": "ü"})
        assert (await socket.until_t("ack", id="i1"))["result"] == "duplicate"
        await other.send("input", id="i1", stream=stream, item="ü")
        assert (await other.until_t("ack", id="i1"))["result"] == "duplicate"
        await other.send("input", id="i1", stream=stream, item="another")
        assert (await other.until_t("error", id="i1"))["code"] == "idempotency_mismatch"
        await socket.send("input", id="i2", stream=UNKNOWN, item={})
        assert (await socket.until_t("error", id="i2"))["code"] == "not_found"
        await socket.send("input", id="", stream=stream, item={})
        assert (await socket.until_t("error"))["code"] == "invalid_request"
    reply = await two.ask("POST", f"/v1/streams/{stream}/input", {"id": "i1", "item": "ü"})
    assert reply.json == {"result": "duplicate"}, "another gateway knows it"
    await one.cancel(stream)


async def test_ten_thousand_cancels_disturb_nobody_else(one: Gate) -> None:
    await one.until_open_streams(0)
    victim = await one.background(3000)
    done, _ = await one.finished(1)
    whole = text(events((await one.finished(150, seed=9))[1]))
    async with one.socket() as quiet, one.socket() as flood:
        await quiet.create(1, chat(150, seed=9))

        async def send_all() -> None:
            try:
                for k in range(10_000):
                    await flood.send("cancel", id=f"k{k}", stream=victim if k % 2 else done)
            except ConnectionClosed:
                pass

        acked = 0

        async def count_acks() -> None:
            nonlocal acked
            try:
                while acked < 10_000:
                    acked += (await flood.receive())["t"] == "ack"
            except ConnectionClosed:
                pass

        await asyncio.gather(send_all(), count_acks(), quiet.until_ended(1))
        assert acked == 10_000 or flood.connection.close_code == 4429
        assert acked >= 1000, "a burst is allowed"
        dense(quiet.track(1))
        assert quiet.track(1).text == whole
        assert (await one.info(victim))["status"] == "cancelled"
    await one.until_open_streams(0)
    assert (await one.ask("GET", "/readyz")).status == 200


# --- who asks ------------------------------------------------------------------------------------------------


async def usable(socket: Tokenstream) -> None:
    await socket.create(1, chat(2))
    await socket.until_ended(1)
    assert socket.track(1).end["status"] == "completed"


async def test_authorization_by_header_message_or_subprotocol(tenants: Tenants) -> None:
    gate = tenants.acme
    capability = await token(gate)
    async with gate.socket() as socket:
        assert (await socket.receive())["t"] == "hi"
        await usable(socket)
    async with gate.socket(headers={"x-api-key": gate.key}) as socket:
        await usable(socket)
    async with gate.socket(headers={}, subprotocols=[PROTOCOL, f"bearer.{capability}"]) as socket:
        assert socket.connection.subprotocol == PROTOCOL, "the credential is not echoed"
        await usable(socket)
    for credential in (gate.key, capability):
        async with gate.socket(headers={}) as socket:
            with pytest.raises(TimeoutError):
                await socket.receive(0.1)
            await socket.send("auth", token=credential)
            assert (await socket.receive())["t"] == "hi"
            await usable(socket)


async def test_a_wrong_credential_closes_4401(one: Gate) -> None:
    async with one.socket(headers={"Authorization": "Bearer sk-wrong"}) as socket:
        assert await socket.close_code() == 4401
    async with one.socket(headers={}, subprotocols=[PROTOCOL, "bearer.cap_a.b"]) as socket:
        assert await socket.close_code() == 4401
    async with one.socket(headers={}) as socket:
        await socket.send("auth", token="sk-wrong")
        assert await socket.close_code() == 4401


async def test_nothing_is_obeyed_before_authorization(one: Gate) -> None:
    user = f"early-{time.time_ns()}"
    async with one.socket(headers={}) as socket:
        await socket.connection.send(
            json.dumps({"t": "create", "ch": 1, "body": chat(100, user=user, background=True)})
        )
        # Messages behind it are not obeyed either
        await socket.send("auth", token=one.key)
        await socket.create(2, chat(100, user=user, background=True))
        assert await socket.close_code() == 4401
        assert not socket.tracks
        assert not socket.others
    assert (await one.ask("GET", f"/v1/streams?user={user}")).json["data"] == []


async def test_a_renewed_token_replaces_the_old_one(tenants: Tenants) -> None:
    gate = tenants.acme
    async with gate.socket(headers={"Authorization": f"Bearer {await token(gate, scopes=['read'])}"}) as socket:
        await socket.create(1, chat(1))
        assert (await socket.until_t("error", ch=1))["code"] == "forbidden"
        await socket.send("auth", token=await token(gate, scopes=["create", "read"]))
        await usable(socket)
        await socket.send("auth", token=tenants.globex.key)
        assert (await socket.until_t("error"))["code"] == "invalid_request", "a socket stays with its tenant"
        await socket.create(2, chat(1))
        await socket.until_ended(2)


async def test_a_tokens_scopes_hold(tenants: Tenants) -> None:
    gate = tenants.acme
    stream, _ = await gate.finished(2, user="u1")
    others, _ = await gate.finished(2, user="u2")
    reader = await token(gate, scopes=["read"], user="u1")
    async with gate.socket(headers={}, subprotocols=[PROTOCOL, f"bearer.{reader}"]) as socket:
        await socket.sub(1, stream)
        await socket.until_ended(1)
        await socket.create(2, chat(1))
        assert (await socket.until_t("error", ch=2))["code"] == "forbidden"
        await socket.send("cancel", id="c", stream=stream)
        assert (await socket.until_t("error", id="c"))["code"] == "forbidden"
        await socket.send("input", id="i", stream=stream, item={})
        assert (await socket.until_t("error", id="i"))["code"] == "forbidden"
        await socket.sub(3, others)
        assert (await socket.until_t("error", ch=3))["code"] == "not_found"


async def test_another_tenants_stream_is_not_found(one: Gate, tenants: Tenants) -> None:
    stream = await tenants.acme.background(2000)
    async with tenants.globex.socket() as socket:
        await socket.sub(1, stream)
        error = await socket.until_t("error", ch=1)
        assert (error["code"], error["retriable"]) == ("not_found", False)
        assert error["request_id"]
        await socket.send("cancel", id="c", stream=stream)
        assert (await socket.until_t("ack", id="c"))["result"] == "pending", "as for a stream that is still to come"
        await socket.sub(1, UNKNOWN)  # its number is free
        assert (await socket.until_t("error", ch=1))["code"] == "not_found"
    assert (await tenants.acme.info(stream))["status"] == "live"
    await tenants.acme.cancel(stream)


async def test_a_token_that_runs_out_closes_4401(tenants: Tenants) -> None:
    gate = tenants.acme
    for lives_s in (1, 5, 30):  # a busy machine may need longer to create the stream
        capability = await token(gate, expires_in_s=lives_s)
        async with gate.socket(headers={"Authorization": f"Bearer {capability}"}) as socket:
            with suppress(ConnectionClosed):
                await socket.create(1, chat(6000, on_disconnect="cancel_after=0"))
                await socket.until_t("ok", ch=1)
            assert await socket.close_code(lives_s + 10) == 4401
        if socket.track(1).ok:
            break
    await gate.until_status(socket.track(1).ok[0]["stream"], "cancelled")


@pytest.mark.chaos
async def test_no_authorization_in_time_closes_4401(one: Gate) -> None:
    started = time.monotonic()
    async with one.socket(headers={}) as socket:
        assert await socket.close_code(WS_AUTH_S_MAX + 8) == 4401
    assert time.monotonic() - started > WS_AUTH_S_MAX - 1


async def test_a_page_of_another_protocol_is_refused(one: Gate) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with one.socket(subprotocols=["graphql-ws"]):
            pass
    assert refused.value.response.status_code == 400
    assert PROTOCOL.encode() in refused.value.response.body


# --- what is no message --------------------------------------------------------------------------------------


async def test_a_binary_frame_closes_1008(one: Gate) -> None:
    async with one.socket() as socket:
        await socket.connection.send(b'{"t":"pong"}')
        assert await socket.close_code() == 1008


NO_MESSAGES = [
    "",
    "{",
    "[]",
    "null",
    "7",
    "{}",
    '{"t":"dance"}',
    '{"t":7}',
    '{"t":"sub","ch":"one","stream":"x"}',
    '{"t":"sub","ch":1}',
    '{"t":"sub","ch":1.5,"stream":"x"}',
    '{"t":"sub","ch":1,"stream":"x","mode":"fast"}',
    '{"t":"create","ch":1}',
    '{"t":"cancel","id":7,"stream":"x"}',
    '{"t":"input","id":"i","stream":"x"}',
    '{"t":"auth","token":"\\ud800"}',
    "[" * 100_000,
    '{"t":"input","id":"i","stream":"x","item":' + "[" * 100_000,
]


@pytest.mark.parametrize("message", NO_MESSAGES, ids=lambda m: m[:40] or "empty")
async def test_what_is_no_message_is_answered_and_the_socket_goes_on(one: Gate, message: str) -> None:
    async with one.socket() as socket:
        await socket.connection.send(message)
        error = await socket.until_t("error")
        assert error["code"] == "invalid_request"
        assert error["request_id"]
        assert len(error["message"]) < 500
        await usable(socket)


@pytest.mark.parametrize(
    ("message", "asker"),
    [
        ('{"t":"sub","ch":5}', {"ch": 5}),
        ('{"t":"sub","ch":5,"stream":"x","mode":"fast"}', {"ch": 5}),
        ('{"t":"create","ch":5}', {"ch": 5}),
        ('{"t":"cancel","id":"k"}', {"id": "k"}),
        ('{"t":"input","id":"k","stream":"x"}', {"id": "k"}),
        ('{"t":"sub","ch":18446744073709551615}', {}),
        ('{"t":"sub","ch":1}', {}),  # another stream is open there, and its reader waits for no answer
    ],
)
async def test_the_error_of_a_malformed_message_names_who_waits_for_it(
    one: Gate, message: str, asker: dict[str, Any]
) -> None:
    stream = await one.background(2000)
    async with one.socket() as socket:
        await socket.send("sub", ch=1, stream=stream)
        await socket.until_t("ok", ch=1)
        await socket.connection.send(message)
        error = await socket.until_t("error")
        assert {name: error[name] for name in ("ch", "id") if name in error} == asker
    await one.cancel(stream)


async def test_the_tenth_that_is_no_message_closes_1008(one: Gate) -> None:
    async with one.socket() as socket:
        for _ in range(10):
            await socket.connection.send("{")
        assert await socket.close_code() == 1008
        assert [message["t"] for message in socket.others] == ["hi"] + ["error"] * 10


BAD_COMMANDS: list[tuple[dict[str, Any], str]] = [
    ({"t": "create", "ch": 1, "body": chat(1) | {"model": "no-such-model"}}, "model_not_found"),
    ({"t": "create", "ch": 1, "body": {}}, "invalid_request"),
    ({"t": "create", "ch": 1, "body": []}, "invalid_request"),
    ({"t": "create", "ch": 1, "body": chat(1) | {"messages": "hello"}}, "invalid_request"),
    ({"t": "create", "ch": 1, "body": chat(1), "dialect": "telegram"}, "invalid_request"),
    ({"t": "create", "ch": 1, "body": chat(1), "key": ""}, "invalid_request"),
    ({"t": "sub", "ch": 1, "stream": "x"}, "not_found"),
    ({"t": "sub", "ch": 1, "stream": UNKNOWN}, "not_found"),
    ({"t": "sub", "ch": 1, "stream": UNKNOWN, "after": "soon"}, "cursor_invalid"),
]


@pytest.mark.parametrize(("message", "code"), BAD_COMMANDS)
async def test_a_command_that_cannot_be_obeyed_is_an_error_of_its_channel(
    one: Gate, message: dict[str, Any], code: str
) -> None:
    await one.until_open_streams(0)
    async with one.socket() as socket:
        await socket.connection.send(json.dumps(message))
        error = await socket.until_t("error", ch=1)
        assert error["code"] == code
        assert await one.open_streams() == 0, "nothing is left of it"
        await usable(socket)


async def test_a_subscription_that_cannot_be_obeyed(one: Gate) -> None:
    stream = await one.background(2000)
    wrong: list[Callable[[], dict[str, Any]]] = [
        lambda: {"after": "1-100000"},
        lambda: {"after": "7-1"},
        lambda: {"dialect": "telegram"},
        lambda: {"dialect": "openai.completions"},
        lambda: {"dialect": "telegram", "mode": "snapshot"},
    ]
    async with one.socket() as socket:
        for ch, more in enumerate(wrong):
            await socket.send("sub", ch=ch, stream=stream, **more())
            error = await socket.until_t("error", ch=ch)
            assert error["code"] in ("cursor_invalid", "invalid_request", "unsupported")
    await one.until_open_streams(0)
    await one.cancel(stream)


async def test_a_message_too_large_closes_1009(one: Gate) -> None:
    async with one.socket(write_limit=1 << 30) as socket:
        assert (await socket.receive())["t"] == "hi"
        with suppress(ConnectionClosed):
            await socket.connection.send("x" * (WS_MESSAGE_BYTES_MAX + 1))
        assert await socket.close_code() == 1009
    assert (await one.ask("GET", "/healthz")).status == 200


async def test_a_socket_that_vanishes_leaves_its_streams_to_the_grace(platform: Running, one: Gate, two: Gate) -> None:
    await one.until_open_streams(0)
    async with one.socket() as socket:
        await socket.create(1, chat(6000, on_disconnect="cancel_after=0.2"))
        await socket.create(2, chat(6000))
        for ch in (1, 2):  # in the order of their commits, which may be another
            await socket.until(lambda _, ch=ch: socket.track(ch).ok)
        streams = [socket.track(ch).ok[0]["stream"] for ch in (1, 2)]
        socket.connection.transport.abort()
    await one.until_open_streams(0)
    await two.until_status(streams[0], "cancelled")
    assert (await two.info(streams[1]))["status"] == "live"
    await two.cancel(streams[1])

    async def no_sockets() -> bool:
        return await one.gauge("open_websockets") == 0

    await eventually(no_sockets, "no sockets")


async def test_a_socket_that_vanishes_while_it_creates_or_subscribes_leaves_nothing(one: Gate, two: Gate) -> None:
    await one.until_open_streams(0)
    stream = await two.background(3000)
    for k in range(20):
        async with one.socket() as socket:
            await socket.receive()
            if k % 2:
                await socket.create(1, chat(6000, on_disconnect="cancel_after=0"))
            else:
                await socket.sub(1, stream)
            socket.connection.transport.abort()
    await one.until_open_streams(0, 4)
    await two.cancel(stream)


async def test_the_end_of_a_stream_whose_log_is_gone(platform: Running, one: Gate) -> None:
    stream, _ = await one.finished(5)
    head = (await one.info(stream))["head"]
    await delete_log(platform, stream)
    async with one.socket() as socket:
        await socket.sub(1, stream, after=f"1-{head}")
        assert (await socket.until_t("error", ch=1))["code"] == "stream_lost"
        await usable(socket)


async def test_a_sub_at_the_end_of_a_later_epoch_repeats_the_end(platform: Running, one: Gate) -> None:
    """With more entries than a page holds: the last page must be read, not the first."""
    stream = await ended_in_epoch_2(platform, PAGE_ENTRIES_MAX + 20)
    head = (await one.info(stream))["head"]
    async with one.socket() as socket:
        await socket.create(9, chat(3000))
        await socket.until_t("d", ch=9)
        await socket.sub(1, stream, after=f"2-{head}")
        await socket.until_ended(1)
        assert (socket.track(1).end["status"], socket.track(1).end["s"]) == ("completed", head)
        await socket.until_t("d", ch=9)
        await socket.send("cancel", id="c", stream=socket.track(9).ok[0]["stream"])
        await socket.until_ended(9)


async def ended_in_epoch_2(platform: Running, entries: int) -> str:
    """A stream that another producer took over before its first frame, with one frame an entry."""
    client = RedisClient(platform.redis_url)
    await client.start()
    try:
        log = RedisStreamLog(client, await check_partitions(client, 4), ReplicaId("taker"))
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        meta = msgspec.json.encode(StreamMeta(StreamFacts(stream, int(time.time()), MODEL)))
        await log.create(stream, Epoch(1, "aa"), TenantId("dev"), meta, None)
        taken = await log.takeover(stream, Epoch(1, "aa"), "bb")
        assert taken is not None and taken.epoch.n == 2
        frames = [b'{"k":"open","block":0,"kind":"text"}', *[b'0" x"'] * (entries - 2)]
        frames.append(encode(End("completed", Usage(1, entries))))
        for seq, frame in enumerate(frames, 1):
            status: Any = "completed" if seq == len(frames) else ""
            part = Append(stream, str(taken.epoch), seq, seq, frame, Usage(1, seq), b"", status)
            (reply,) = await log.append(log.partition(stream), [part])
            assert reply.code is AppendCode.OK, reply
        return stream
    finally:
        await client.close()


async def test_a_cancel_does_not_wait_for_a_create(redis_client: RedisClient) -> None:
    async with in_process(redis_client) as world:
        running = await world.gateway.streams.create(world.call())
        assert running is not None
        subscription = running.subscribe(Reading())
        wire = Wire()
        socket = Socket(wire, "conn", time.monotonic, BodyBytes())  # type: ignore[arg-type]
        socket.principal = WHO
        session = Session(socket, world.gateway)
        world.pools_link.pause()  # a create waits for its place, and for its timeout
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        create = {"t": "create", "ch": 1, "body": {"model": world.model, "messages": [{"role": "user", "content": ""}]}}
        cancel = {"t": "cancel", "id": "k", "stream": running.id}
        for message in (create, cancel):
            messages.put_nowait({"type": "websocket.receive", "text": json.dumps(message)})
        serving = asyncio.create_task(session.run(messages.get))
        await eventually(lambda: wire.sent, "an answer")
        assert [(sent["t"], sent.get("id")) for sent in wire.sent] == [("ack", "k")]
        messages.put_nowait({"type": "websocket.disconnect"})
        await serving
        await session.end()
        subscription.close()


# --- a channel, sans I/O -------------------------------------------------------------------------------------


class Wire:
    """A socket's connection, with a switch that makes it full."""

    close_sent = False
    listener: Any = None

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send_text(self, payload: bytes) -> None:
        self.sent.append(json.loads(payload))


class Stream:
    """The subscription of a channel."""

    head = 0

    def __init__(self) -> None:
        self.resumed = self.closed = 0
        self.local = SimpleNamespace(status="live")

    def resume(self) -> None:
        self.resumed += 1

    def close(self, why: str = "left") -> None:
        self.closed += 1


async def opened(wire: Wire, *moments: str) -> Stream:
    """A channel of a socket to which these things happen while its stream is being opened; the first one before."""
    socket = Socket(wire, "conn", time.monotonic, BodyBytes())  # type: ignore[arg-type]
    stream = Stream()
    getattr(socket, moments[0])()
    channel = socket.channels[1] = Channel(socket, 1)
    for moment in moments[1:]:
        getattr(socket, moment)()
    facts = StreamFacts(StreamId(UNKNOWN), 1, "m")
    found: Any = OpenedStream(facts.stream, "1.aa", facts, Cursor(1, 0), (), lambda outlet: stream, attached=False)  # type: ignore[arg-type,return-value]
    await subscribe(channel, found, "openai.chat")
    for channel in socket.channels.values():
        assert channel.full is socket.full
    return stream


async def test_a_socket_that_drains_while_a_channel_opens_resumes_it() -> None:
    """Its first frames may have come meanwhile, and found the socket full: nothing else would read on."""
    assert (await opened(Wire(), "connection_paused", "connection_resumed")).resumed == 1
    moments = ("connection_resumed", "connection_paused", "connection_resumed")
    assert (await opened(Wire(), *moments)).resumed == 1
    assert (await opened(Wire(), "connection_resumed", "connection_paused")).resumed == 0


async def test_a_socket_that_is_lost_while_a_channel_opens_closes_it() -> None:
    assert (await opened(Wire(), "connection_resumed", "connection_lost")).closed == 1


async def test_an_error_while_a_channel_opens_comes_after_its_ok() -> None:
    wire = Wire()
    channel = Channel(Socket(wire, "conn", time.monotonic, BodyBytes()), 7)  # type: ignore[arg-type]
    channel.fail(Draining("going away"), Cursor(1, 0))
    channel.open("1.aa", 0, "live")
    assert [message["t"] for message in wire.sent] == ["ok", "error"]
    assert wire.sent[1]["retry_after_s"] >= 1


class Closing(Socket):
    """Notes its close instead of starting the handshake."""

    __slots__ = ()

    def close(self, code: int, reason: str) -> None:
        self.close_code = code


def test_replies_to_a_client_that_does_not_read_are_bounded() -> None:
    wire = Wire()
    socket = Closing(wire, "conn", time.monotonic, BodyBytes())  # type: ignore[arg-type]
    socket.connection_paused()
    while socket.close_code is None:
        socket.reply({"t": "ack", "id": "k" * 200})
        assert len(wire.sent) * 200 < WS_REPLIES_BYTES_MAX
    assert socket.close_code == 4408
    reader = Closing(Wire(), "conn", time.monotonic, BodyBytes())  # type: ignore[arg-type]
    for _ in range(10):  # a client that takes them is never closed
        reader.connection_paused()
        reader.reply({"t": "ack", "id": "k" * (WS_REPLIES_BYTES_MAX // 2)})
        reader.connection_resumed()
    assert reader.close_code is None


def test_a_reader_that_takes_a_byte_now_and_then_is_stalled() -> None:
    timer = StallTimer()
    unsent = OUTBOX_BYTES_MAX
    for k in range(1, 100):
        if timer.is_stalled(unsent - k, now=5.0 * k):
            break
    assert 5.0 * k <= STALL_S_MAX + 10
    slow = StallTimer()
    assert not any(slow.is_stalled(unsent - k * STALL_BYTES_MIN, now=5.0 * k) for k in range(1, 100))
    fed = StallTimer()
    for k in range(1, 100):  # what was added meanwhile does not hide what was taken
        stalled = fed.is_stalled(unsent, now=5.0 * k)
        assert not stalled
        fed.sent(STALL_BYTES_MIN)


def test_the_error_that_ends_a_channel_says_where_to_resume() -> None:
    wire = Wire()
    channel = Channel(Socket(wire, "conn", time.monotonic, BodyBytes()), 7)  # type: ignore[arg-type]
    channel.set_stream(UNKNOWN, None, 0)
    channel.open("1.aa", 0, "live")
    channel.fail(FabricUnavailable("away"), Cursor(1, 9))
    error = wire.sent[-1]
    assert (error["t"], error["ch"], error["stream"], error["cursor"]) == ("error", 7, UNKNOWN, "1-9")
    assert (error["code"], error["retriable"]) == ("fabric_unavailable", True)


async def test_http_on_the_sockets_path_is_refused(one: Gate) -> None:
    refusal(await one.ask("GET", "/v1/stream"), 404, "not_found")
