from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from stream_fabric.limits import SUBSCRIBERS_PER_STREAM_MAX, SWEEP_EVERY_S, UNREAD_BYTES_MAX
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.index import RedisIndex
from stream_fabric.redis.streams import RedisStreamLog, check_partitions
from stream_fabric.redis.topology import slot_of
from stream_fabric.stream.cursor import BEGINNING, Epoch
from stream_fabric.stream.frames import ErrorInfo
from stream_fabric.stream.ids import GatewayId, StreamId, TenantId, UserId, new_stream_id
from stream_gw.dialects.requests import parse_create
from stream_gw.streams.idempotency import fingerprint
from tests.gateway.conftest import Tenants
from tests.gateway.processes import Running, running
from tests.gateway.wire import (
    DONE,
    HEARTBEAT,
    MODEL,
    Event,
    Gate,
    after_heartbeat,
    chat,
    events,
    refusal,
    text,
    tokens_of_chunks,
)
from tests.support.waiting import eventually

UNKNOWN = "resp_" + "0" * 32


@asynccontextmanager
async def redis(platform: Running) -> AsyncIterator[RedisClient]:
    client = RedisClient(platform.redis_url)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def follow(gate: Gate, stream: str, after: str = "", **headers: str) -> bytes:
    """The body of a resume."""
    path = f"/v1/streams/{stream}" + (f"?after={after}" if after else "")
    reply = await gate.ask("GET", path, headers=headers)
    assert reply.status == 200, reply
    return reply.body


# --- what a streamed answer is -------------------------------------------------------------------------------


async def test_the_headers_of_a_streamed_answer(one: Gate) -> None:
    async with one.create(chat(3), {"accept-encoding": "gzip, br"}) as exchange:
        assert exchange.status == 200
        headers = exchange.headers
        assert len(headers) == len(exchange.raw_headers), "no header twice"
        stream = headers.pop("x-stream-id")
        assert re.fullmatch(r"resp_[0-9a-f]{32}", stream)
        assert re.fullmatch(r"1\.[0-9a-f]+", headers.pop("x-stream-epoch"))
        assert re.fullmatch(r"req_[0-9a-f]+", headers.pop("x-request-id"))
        assert headers == {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-store, no-transform",
            "x-accel-buffering": "no",
            "link": f'</v1/streams/{stream}>; rel="resume"',
            "transfer-encoding": "chunked",
        }
        await exchange.rest()


async def test_the_first_heartbeat_arrives_before_the_first_token(platform: Running, one: Gate) -> None:
    async with AsyncExitStack() as stack:
        with platform.silent():
            exchange = await stack.enter_async_context(one.create(chat(3)))
            assert exchange.status == 200
            assert await exchange.piece() == HEARTBEAT
            await exchange.silence(0.2)
        assert (await exchange.piece()).startswith(b"data: ")


async def test_every_event_is_one_data_line_and_an_id(one: Gate) -> None:
    stream, body = await one.finished(30)
    assert body.startswith(HEARTBEAT)
    found = events(body)  # checks every line
    assert found[-1].data == DONE
    chunks = [event.json for event in found[:-1]]
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["model"] == MODEL for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    ids = [event.id for event in found if event.id is not None]
    assert len(ids) >= 30
    assert all(re.fullmatch(r"1-[1-9][0-9]*", cursor) for cursor in ids)
    seqs = [int(cursor[2:]) for cursor in ids]
    assert seqs == sorted(seqs)
    assert text(found)
    assert (await one.info(stream))["status"] == "completed"


async def test_an_answer_that_is_not_streamed_is_json_with_the_same_text(one: Gate, two: Gate) -> None:
    _, body = await one.finished(20, seed=5)
    reply = await two.ask("POST", "/v1/chat/completions", chat(20, seed=5) | {"stream": False})
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-stream-id"].startswith("resp_")
    assert reply.json["object"] == "chat.completion"
    assert reply.json["choices"][0]["message"]["content"] == text(events(body))
    assert reply.json["usage"]["completion_tokens"] == tokens_of_chunks(e.json for e in events(body)[:-1])


async def test_completions_stream_as_completions(one: Gate) -> None:
    body = {"model": MODEL, "prompt": "Tell me of rivers.", "max_tokens": 8, "seed": 1, "stream": True}
    reply = await one.ask("POST", "/v1/completions", body)
    found = events(reply.body)
    assert found[-1].data == DONE
    assert {event.json["object"] for event in found[:-1]} == {"text_completion"}
    stream = reply.headers["x-stream-id"]
    again = await follow(one, stream)
    assert again == reply.body, "a stream is resumed in the dialect that it was created in"


async def test_completions_tell_each_token_its_place_in_the_text(one: Gate, two: Gate) -> None:
    body = {"model": MODEL, "prompt": "Tell me of rivers.", "max_tokens": 8, "seed": 1, "n": 2, "logprobs": 1}
    whole = (await one.ask("POST", "/v1/completions", body)).json["choices"]
    for choice in whole:
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == 8
        for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][at : at + len(token)] == token
    reply = await two.ask("POST", "/v1/completions", body | {"stream": True})
    found = events(reply.body)

    def places(some: Sequence[Event]) -> dict[int, list[int] | None]:
        told: dict[int, list[int] | None] = {}
        for choice in (choice for event in some[:-1] for choice in event.json["choices"]):
            if choice["logprobs"] is not None:
                offsets = choice["logprobs"]["text_offset"]
                told[choice["index"]] = None if offsets is None else (told.get(choice["index"]) or []) + offsets
        return told

    assert places(found) == {choice["index"]: choice["logprobs"]["text_offset"] for choice in whole}
    stream = reply.headers["x-stream-id"]
    assert await follow(one, stream) == reply.body, "from the beginning it is the same"
    tail = events(after_heartbeat(await follow(one, stream, found[8].id or "")))
    assert places(tail) == {0: None, 1: None}, "who starts in the middle is told none, and none that is wrong"
    assert [event.id for event in tail] == [event.id for event in found[9:]]


async def test_two_readers_of_one_stream_see_the_same(one: Gate, two: Gate) -> None:
    async with one.create(chat(30)) as exchange:
        stream = exchange.headers["x-stream-id"]
        first, second, third = await asyncio.gather(exchange.rest(), follow(one, stream), follow(two, stream))
    assert first == second == third


# --- resume --------------------------------------------------------------------------------------------------


async def test_invariant_3_a_live_resume_at_every_cursor_gives_exactly_the_tail(one: Gate, two: Gate) -> None:
    resumes: list[tuple[str, asyncio.Task[bytes]]] = []
    async with one.create(chat(45)) as exchange:
        stream = exchange.headers["x-stream-id"]
        body = b""
        seen: set[str] = set()
        while part := await exchange.piece():
            body += part
            for event in events(body[: body.rfind(b"\n\n") + 2] if b"\n\n" in body else b""):
                if event.id is not None and event.id not in seen and event.data != DONE:
                    seen.add(event.id)
                    resumes.append((event.id, asyncio.create_task(_tail(two, stream, event.id))))
    found = events(body)
    ends = _ends(body)
    assert len(resumes) >= 45
    assert len(resumes) <= SUBSCRIBERS_PER_STREAM_MAX
    for cursor, task in resumes:
        assert await task == body[ends[cursor] :], f"resumed at {cursor}"
    assert found[-1].data == DONE


async def test_invariant_3_a_finished_resume_at_every_cursor_gives_exactly_the_tail(one: Gate, two: Gate) -> None:
    stream, body = await one.finished(25)
    ends = _ends(body)
    assert len(ends) >= 25
    for cursor, end in ends.items():
        assert await _tail(two, stream, cursor) == body[end:], f"resumed at {cursor}"
    assert await follow(two, stream) == await follow(one, stream, "1-0") == body


def _ends(body: bytes) -> dict[str, int]:
    """By cursor, where the first event with that id ends: who has seen it may resume there."""
    ends: dict[str, int] = {}
    for event in events(body):
        if event.id is not None:
            ends.setdefault(event.id, event.end)
    return ends


async def _tail(gate: Gate, stream: str, cursor: str) -> bytes:
    reply = await gate.ask("GET", f"/v1/streams/{stream}?after={cursor}")
    assert reply.status in (200, 204), reply
    return b"" if reply.status == 204 else after_heartbeat(reply.body)


async def test_last_event_id_stands_for_after(one: Gate, two: Gate) -> None:
    stream, body = await one.finished(10)
    cursor, end = list(_ends(body).items())[4]
    assert after_heartbeat(await follow(two, stream, **{"last-event-id": cursor})) == body[end:]
    # A browser's EventSource repeats the URL it was opened with: the header is the newer one
    assert after_heartbeat(await follow(two, stream, after="1-0", **{"last-event-id": cursor})) == body[end:]


async def test_coalesced_resume_gives_the_same_text_in_fewer_events(one: Gate, two: Gate) -> None:
    stream, body = await one.finished(60)
    coalesced = events(await follow(two, f"{stream}?mode=coalesce"))
    assert text(coalesced) == text(events(body))
    assert len(coalesced) < len(events(body)) / 2
    assert coalesced[-1].data == DONE
    refusal(await one.ask("GET", f"/v1/streams/{stream}?mode=snapshot"), 400, "invalid_request")


async def test_nothing_after_the_end_is_204(one: Gate, two: Gate) -> None:
    stream, _ = await one.finished(5)
    info = await one.info(stream)
    reply = await two.ask("GET", f"/v1/streams/{stream}?after=1-{info['head']}")
    assert (reply.status, reply.body) == (204, b"")
    assert "transfer-encoding" not in reply.headers


async def test_a_cursor_beyond_the_end_is_gone(one: Gate, two: Gate) -> None:
    """204 would tell a client that it has the whole answer; a failover of Redis has lost what it has seen."""
    stream, _ = await one.finished(5)
    info = await one.info(stream)
    for cursor in (f"1-{info['head'] + 1}", "2-0"):
        refusal(await two.ask("GET", f"/v1/streams/{stream}?after={cursor}"), 410, "cursor_gone")


@pytest.mark.parametrize(
    "cursor",
    ["x", "1", "-1", "1-", "-", "1--1", "1-01", "01-1", "1-1-1", "1-x", "1-1e3", "%31-%D9%A1", "1-" + "9" * 16, "1 -1"],
)
async def test_a_cursor_that_is_none_is_refused(one: Gate, cursor: str) -> None:
    stream, _ = await one.finished(1)
    path = f"/v1/streams/{stream}?after={cursor.replace(' ', '%20')}"
    refusal(await one.ask("GET", path), 400, "cursor_invalid")


async def test_a_cursor_ahead_of_a_live_stream_is_refused(one: Gate, two: Gate) -> None:
    _, longer = await one.finished(60)
    others = list(_ends(longer))[-1]
    stream = await one.background(2000)
    try:
        for cursor in ("1-100000", "2-0", "0-0", "0-1"):
            refusal(await two.ask("GET", f"/v1/streams/{stream}?after={cursor}"), 400, "cursor_invalid")
        assert int(others[2:]) > 50
    finally:
        await one.cancel(stream)


async def test_another_streams_cursor_is_refused(one: Gate) -> None:
    longer, body = await one.finished(100)
    stream = await one.background(2000)
    try:
        head = (await one.info(stream))["head"]
        cursor = next(c for c in reversed(_ends(body)))
        assert int(cursor[2:]) > head, f"the test needs a longer stream than {longer}"
        refusal(await one.ask("GET", f"/v1/streams/{stream}?after={cursor}"), 400, "cursor_invalid")
    finally:
        await one.cancel(stream)


async def test_a_fenced_stream_ends_with_an_error_and_its_lost_cursors_are_gone(
    platform: Running, one: Gate, two: Gate
) -> None:
    client = RedisClient(platform.redis_url)
    await client.start()
    try:
        log = RedisStreamLog(client, await check_partitions(client, 4))
        async with one.create(chat(3000)) as exchange:
            stream = exchange.headers["x-stream-id"]
            await exchange.events(3)
            error = ErrorInfo("replica_lost", "its replica is gone", retriable=True)
            assert await log.fence(StreamId(stream), None, "abcd", error)
            last = events(await exchange.rest())[-1]
    finally:
        await client.close()
    told = last.json["error"]
    assert told["code"] == "replica_lost"
    assert told["stream_id"] == stream
    assert told["retriable"] is True
    assert re.fullmatch(r"[12]-\d+", told["cursor"])
    assert last.data != DONE
    info = await one.info(stream)
    assert (info["status"], info["epoch"]) == ("failed", "2.abcd")
    base = info["head"] - 1
    refusal(await two.ask("GET", f"/v1/streams/{stream}?after=1-{base + 5}"), 410, "cursor_gone")
    replayed = events(await follow(two, stream, f"1-{base}"))
    assert [event.json["error"]["code"] for event in replayed] == ["replica_lost"]


async def test_a_stream_that_is_not_there_or_anothers_is_404(one: Gate, tenants: Tenants) -> None:
    stream, _ = await one.finished(1)
    acmes = await tenants.acme.background(2000)
    for gate, name in ((one, UNKNOWN), (one, "resp_1"), (one, "x"), (tenants.acme, stream), (tenants.globex, acmes)):
        for path in ("", "/info"):
            refusal(await gate.ask("GET", f"/v1/streams/{name}{path}"), 404, "not_found")
        if name in ("resp_1", "x"):
            refusal(await gate.ask("POST", f"/v1/streams/{name}/cancel"), 404, "not_found")
        else:  # a cancel may come before its stream, and another tenant's is answered alike
            assert (await gate.cancel(name))["result"] == "pending"
        body = {"id": "i1", "item": {}}
        refusal(await gate.ask("POST", f"/v1/streams/{name}/input", body), 404, "not_found")
    assert (await tenants.acme.info(acmes))["status"] == "live", "another tenant's cancel did nothing"
    await tenants.acme.cancel(acmes)


async def test_a_stream_has_a_limit_of_readers_on_one_gateway(one: Gate, two: Gate) -> None:
    stream = await one.background(3000)
    async with AsyncExitStack() as stack:
        for _ in range(SUBSCRIBERS_PER_STREAM_MAX):
            exchange = await stack.enter_async_context(one.open("GET", f"/v1/streams/{stream}"))
            assert exchange.status == 200
        refusal(await one.ask("GET", f"/v1/streams/{stream}"), 429, "too_many")
        async with two.open("GET", f"/v1/streams/{stream}") as elsewhere:
            assert elsewhere.status == 200
    await one.cancel(stream)
    await one.until_open_streams(0)


# --- Idempotency-Key -----------------------------------------------------------------------------------------


async def test_one_key_from_everywhere_at_once_makes_one_stream(one: Gate, two: Gate) -> None:
    key = {"idempotency-key": f"everywhere-{time.time_ns()}"}
    replies = await asyncio.gather(
        *((one, two)[k % 2].ask("POST", "/v1/chat/completions", chat(40), key) for k in range(20))
    )
    assert {reply.status for reply in replies} == {200}
    assert len({reply.headers["x-stream-id"] for reply in replies}) == 1
    assert len({reply.body for reply in replies}) == 1
    assert events(replies[0].body)[-1].data == DONE
    later = await two.ask("POST", "/v1/chat/completions", chat(40), key)
    assert later.body == replies[0].body


async def test_a_key_continues_at_last_event_id(one: Gate, two: Gate) -> None:
    key = {"idempotency-key": f"continue-{time.time_ns()}"}
    async with one.create(chat(40), key) as exchange:
        stream = exchange.headers["x-stream-id"]
        cursor = (await exchange.events(5))[4].id
        assert cursor is not None
        async with two.create(chat(40), key | {"last-event-id": cursor}) as again:
            assert again.headers["x-stream-id"] == stream
            tail = after_heartbeat(await again.rest())
    body = await follow(one, stream)
    assert tail == body[_ends(body)[cursor] :]
    head = (await one.info(stream))["head"]
    reply = await two.ask("POST", "/v1/chat/completions", chat(40), key | {"last-event-id": f"1-{head}"})
    assert reply.status == 204
    reply = await two.ask("POST", "/v1/chat/completions", chat(40), key | {"last-event-id": "later"})
    refusal(reply, 400, "cursor_invalid")


async def test_a_key_with_another_body_is_refused(one: Gate, two: Gate) -> None:
    key = {"idempotency-key": f"mismatch-{time.time_ns()}"}
    assert (await one.ask("POST", "/v1/chat/completions", chat(3), key)).status == 200
    for other in (chat(4), chat(3, seed=2), chat(3) | {"stream": False}):
        refusal(await two.ask("POST", "/v1/chat/completions", other, key), 422, "idempotency_mismatch")


async def test_a_key_belongs_to_its_tenant(one: Gate, tenants: Tenants) -> None:
    key = {"idempotency-key": f"tenant-{time.time_ns()}"}
    replies = [
        await gate.ask("POST", "/v1/chat/completions", chat(2), key) for gate in (one, tenants.acme, tenants.globex)
    ]
    assert {reply.status for reply in replies} == {200}
    assert len({reply.headers["x-stream-id"] for reply in replies}) == 3


async def test_a_key_belongs_to_the_user_of_a_token(tenants: Tenants) -> None:
    key = {"idempotency-key": f"user-{time.time_ns()}"}
    streams = []
    for user in ("u1", "u2", "u1"):
        token = (await tenants.acme.ask("POST", "/v1/tokens", {"user": user})).json["token"]
        holder = Gate(tenants.acme.url, tenants.acme.pid, token)
        reply = await holder.ask("POST", "/v1/chat/completions", chat(3), key)
        assert events(reply.body)[-1].data == DONE
        streams.append(reply.headers["x-stream-id"])
        assert (await holder.info(streams[-1]))["user"] == user
    assert streams[0] == streams[2] != streams[1]


async def claimed(platform: Running, key: str, body: Any) -> str:
    """A key that somebody has bound to a stream, and died before creating it."""
    request = parse_create(json.dumps(body).encode(), "chat")
    stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
    async with redis(platform) as client:
        await RedisIndex(client).claim(TenantId("dev"), key, stream, f"{fingerprint(request.body)}:1")
    return stream


async def test_who_waited_for_one_key_in_vain_make_one_stream(platform: Running, one: Gate, two: Gate) -> None:
    key = f"orphan-{time.time_ns()}"
    stream = await claimed(platform, key, chat(40))
    replies = await asyncio.gather(
        *(gate.ask("POST", "/v1/chat/completions", chat(40), {"idempotency-key": key}) for gate in (one, one, two, two))
    )
    assert {reply.headers["x-stream-id"] for reply in replies} == {stream}
    assert len({reply.body for reply in replies}) == 1
    assert events(replies[0].body)[-1].data == DONE
    (placement,) = (await one.ask("GET", f"/v1/streams/{stream}/placement")).json["placements"]
    assert placement["attempt"] == 1
    await one.until_open_streams(0)


async def test_a_key_has_a_length(one: Gate) -> None:
    refusal(
        await one.ask("POST", "/v1/chat/completions", chat(1), {"idempotency-key": "k" * 257}), 400, "invalid_request"
    )


async def test_an_answer_that_is_not_streamed_attaches_too(one: Gate, two: Gate) -> None:
    key = {"idempotency-key": f"whole-{time.time_ns()}"}
    body = chat(20) | {"stream": False}
    replies = await asyncio.gather(*(gate.ask("POST", "/v1/chat/completions", body, key) for gate in (one, two, one)))
    assert {reply.status for reply in replies} == {200}
    assert len({reply.body for reply in replies}) == 1


# --- readers that leave --------------------------------------------------------------------------------------


async def test_what_becomes_of_a_stream_whose_readers_left(one: Gate, two: Gate) -> None:
    long = 6000
    wanted: dict[str, tuple[Any, dict[str, str]]] = {
        "plain": (chat(long), {}),
        "at once": (chat(long, on_disconnect="cancel_after=0"), {}),
        "short": (chat(long, on_disconnect="cancel_after=0.5"), {}),
        "background": (chat(long, background=True), {}),
        "keyed": (chat(long), {"idempotency-key": f"left-{time.time_ns()}"}),
        "session": (chat(long, session_id="s1"), {}),
        "continue": (chat(long, on_disconnect="continue"), {}),
    }
    streams: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for name, (body, headers) in wanted.items():
            exchange = await stack.enter_async_context(one.create(body, headers))
            assert exchange.status == 200, name
            streams[name] = exchange.headers["x-stream-id"]
            await exchange.events(2)
        left = time.monotonic()
    ended: dict[str, float] = {}

    async def those_ended() -> bool:
        for name, stream in streams.items():
            if name not in ended and (await two.info(stream))["status"] == "cancelled":
                ended[name] = time.monotonic() - left
        return {"plain", "at once", "short"} <= ended.keys()

    await eventually(those_ended, "the streams that nobody keeps to be cancelled", 8)
    assert ended.keys() == {"plain", "at once", "short"}
    assert 1.5 < ended["plain"] < 4.5
    assert ended["at once"] < 2
    assert 0.4 < ended["short"] < 2.5
    for name in streams.keys() - ended.keys():
        assert (await two.cancel(streams[name]))["result"] == "accepted", name


async def test_a_reader_that_comes_back_in_time_keeps_a_plain_stream(one: Gate, two: Gate) -> None:
    async with one.create(chat(3000)) as exchange:
        stream = exchange.headers["x-stream-id"]
        await exchange.events(2)
    await one.until_open_streams(0)
    async with two.open("GET", f"/v1/streams/{stream}?after=1-1") as back:
        started = time.monotonic()
        while time.monotonic() - started < 3:
            assert await back.piece()
        assert (await one.info(stream))["status"] == "live"
    await one.cancel(stream)


async def test_one_of_two_readers_leaving_changes_nothing(one: Gate, two: Gate) -> None:
    async with one.create(chat(150, on_disconnect="cancel_after=0")) as first:
        stream = first.headers["x-stream-id"]
        async with two.open("GET", f"/v1/streams/{stream}") as second:
            await first.events(3)
            first.abort()
            assert events(await second.rest())[-1].data == DONE


async def test_a_disconnect_is_noticed_while_no_token_flows(platform: Running, one: Gate) -> None:
    await one.until_open_streams(0)
    with platform.silent():
        async with one.create(chat(2000)) as exchange:
            assert await exchange.piece() == HEARTBEAT
            assert await one.open_streams() == 1
        await one.until_open_streams(0, 1.5)


def padding(size: int, *, chunked: bool) -> tuple[dict[str, str], bytes]:
    """A body that a GET has no use for, and the headers that announce it."""
    if chunked:
        return {"transfer-encoding": "chunked"}, b"%x\r\n%b\r\n0\r\n\r\n" % (size, b" " * size)
    return {"content-length": str(size)}, b" " * size


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("when", ["at once", "later"])
async def test_a_disconnect_behind_an_unread_body_is_noticed(
    platform: Running, one: Gate, two: Gate, chunked: bool, when: str
) -> None:
    await two.until_open_streams(0)
    stream = await one.background(2000)
    headers, body = padding(512 << 10, chunked=chunked)
    head = two.request("GET", f"/v1/streams/{stream}", None, headers)
    with platform.silent():
        async with two.connection() as exchange:
            await exchange.send(head + body if when == "at once" else head)
            await exchange.head()
            if when == "later":
                await exchange.send(body)
            assert exchange.status == 200
            assert await two.open_streams() == 1
        await two.until_open_streams(0, 1.5)
    await one.cancel(stream)


async def test_a_reader_with_a_large_body_gets_its_stream_and_another(one: Gate, two: Gate) -> None:
    stream, whole = await one.finished(20)
    for chunked in (False, True):
        headers, body = padding(1 << 20, chunked=chunked)
        async with two.connection() as exchange:
            request = two.request("GET", f"/v1/streams/{stream}", None, headers) + body
            await exchange.send(request + two.request("GET", f"/v1/streams/{stream}"))
            for _ in range(2):
                await exchange.head()
                assert (exchange.status, await exchange.rest()) == (200, whole)


async def test_a_reader_that_sends_without_end_is_cut(one: Gate, two: Gate) -> None:
    stream = await one.background(6000)
    headers = {"content-length": str(100 * UNREAD_BYTES_MAX)}
    async with two.open("GET", f"/v1/streams/{stream}", headers=headers) as exchange:
        assert exchange.status == 200
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 2 * UNREAD_BYTES_MAX:
                await exchange.send(b" " * 0x10000)
                sent += 0x10000
        assert sent > UNREAD_BYTES_MAX
    await two.until_open_streams(0)
    await one.cancel(stream)


async def test_a_resume_whose_reader_left_at_once_holds_nothing(one: Gate, two: Gate) -> None:
    await two.until_open_streams(0)
    stream = await one.background(2000)
    for _ in range(20):
        async with two.connection() as exchange:
            await exchange.send(two.request("GET", f"/v1/streams/{stream}"))
    await two.until_open_streams(0, 3)
    assert (await one.cancel(stream))["result"] == "accepted"


async def test_a_create_whose_caller_left_at_once_is_cancelled(one: Gate) -> None:
    user = f"leaver-{time.time_ns()}"
    for _ in range(10):
        async with one.connection() as exchange:
            await exchange.send(one.request("POST", "/v1/chat/completions", chat(6000, user=user)))
    await one.until_open_streams(0, 3)

    async def none_left() -> bool:
        return (await one.ask("GET", f"/v1/streams?user={user}")).json["data"] == []

    await eventually(none_left, "the streams to be cancelled", 8)


async def test_a_collected_answer_whose_caller_left_is_cancelled(one: Gate, two: Gate) -> None:
    user = f"collector-{time.time_ns()}"
    body = chat(6000, user=user) | {"stream": False}
    async with one.connection() as exchange:
        await exchange.send(one.request("POST", "/v1/chat/completions", body))

        async def running_there() -> Any:
            return (await two.ask("GET", f"/v1/streams?user={user}")).json["data"]

        (stream,) = await eventually(running_there, "the stream to run")
    await two.until_status(stream["id"], "cancelled", 6)


# --- cancel, input, list -------------------------------------------------------------------------------------


async def test_invariant_5_nothing_follows_an_accepted_cancel(one: Gate, two: Gate) -> None:
    async with one.create(chat(3000)) as exchange:
        stream = exchange.headers["x-stream-id"]
        body = b"".join([await exchange.piece() for _ in range(4)])
        reply = await two.cancel(stream)
        body += await exchange.rest()
    assert reply["result"] == "accepted"
    assert reply["status"] == "cancelled"
    found = events(body)
    assert found[-1].json["error"]["code"] == "cancelled"
    assert found[-1].json["error"]["stream_id"] == stream
    assert DONE not in [event.data for event in found]
    at = int(reply["at"].split("-")[1])
    last = max(int(event.id[2:]) for event in found[:-1] if event.id)
    assert last <= at
    info = await one.info(stream)
    assert (info["status"], info["head"]) == ("cancelled", at + 1)
    again = await one.cancel(stream)
    assert (again["result"], again["at"]) == ("already", reply["at"])
    assert await follow(two, stream) == body, "the replay is the same, error and all"


async def test_what_a_cancelled_stream_used_can_be_read(one: Gate, two: Gate) -> None:
    """Its stream has no usage chunk, and yet it is billed."""
    async with one.create(chat(3000, stream_options={"include_usage": True})) as exchange:
        stream = exchange.headers["x-stream-id"]
        body = b"".join([await exchange.piece() for _ in range(4)])
        assert (await two.info(stream))["usage"] is None, "it runs"
        await two.cancel(stream)
        body += await exchange.rest()
    chunks = [event.json for event in events(body)[:-1]]
    assert not any(chunk.get("usage") for chunk in chunks)
    usage = (await two.info(stream))["usage"]
    assert usage["output"] == tokens_of_chunks(chunks) > 0
    assert usage["prompt"] > 0
    ended, _ = await one.finished(7)
    assert (await two.info(ended))["usage"]["output"] == 7


async def test_a_cancel_before_the_first_token(platform: Running, one: Gate, two: Gate) -> None:
    with platform.silent():
        async with one.create(chat(100)) as exchange:
            stream = exchange.headers["x-stream-id"]
            assert (await two.cancel(stream))["result"] == "accepted"
            (only,) = events(after_heartbeat(await exchange.rest()))
    assert only.json["error"]["code"] == "cancelled"
    info = await one.info(stream)
    assert (info["status"], info["head"]) == ("cancelled", 1)


async def test_a_cancel_of_what_ended_and_of_what_is_not_yet_there(one: Gate, two: Gate) -> None:
    stream, _ = await one.finished(2)
    reply = await two.cancel(stream)
    assert (reply["result"], reply["status"]) == ("terminal", "completed")
    reply = await two.cancel(f"resp_{time.time_ns():032x}")
    assert (reply["result"], reply["at"], reply["status"]) == ("pending", None, None)


async def test_an_input_is_taken_once(one: Gate, two: Gate) -> None:
    stream = await one.background(2000)
    path = f"/v1/streams/{stream}/input"
    body = {"id": "i1", "item": {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ü"}]}}
    replies = [await gate.ask("POST", path, body) for gate in (one, two, one)]
    assert [(reply.status, reply.json) for reply in replies] == [
        (202, {"result": "accepted"}),
        (202, {"result": "duplicate"}),
        (202, {"result": "duplicate"}),
    ]
    await one.cancel(stream)
    reply = await one.ask("POST", path, {"id": "i2", "item": "too late"})
    assert reply.status == 409


async def test_a_users_running_streams_are_listed(one: Gate, two: Gate, tenants: Tenants) -> None:
    user = f"u-{time.time_ns()}"
    streams = [await one.background(2000, user=user) for _ in range(3)]
    await one.background(1, user=user)
    await tenants.acme.background(1000, user=user)

    async def listed() -> bool:
        return len((await two.ask("GET", f"/v1/streams?user={user}")).json["data"]) == 3

    await eventually(listed, "three running streams")
    reply = (await two.ask("GET", f"/v1/streams?user={user}")).json
    assert reply["object"] == "list"
    assert [item["id"] for item in reply["data"]] == streams[::-1], "newest first"
    assert all(item.keys() >= {"id", "status", "model", "created", "head"} for item in reply["data"])
    assert {(item["status"], item["model"]) for item in reply["data"]} == {("live", MODEL)}
    for stream in streams:
        await two.cancel(stream)
    assert (await one.ask("GET", f"/v1/streams?user={user}")).json["data"] == []
    assert (await one.ask("GET", "/v1/streams?user=nobody")).json["data"] == []
    refusal(await one.ask("GET", "/v1/streams"), 400, "invalid_request")


async def test_a_stream_that_is_listed_before_it_is_created_stays_listed(platform: Running, one: Gate) -> None:
    """Both happen side by side, in slots of different servers."""
    user = f"early-{time.time_ns()}"
    stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
    async with redis(platform) as client:
        index, log = RedisIndex(client), RedisStreamLog(client, await check_partitions(client, 4))
        await index.add_live(TenantId("dev"), UserId(user), stream, time.time_ns() // 1_000_000)
        assert (await one.ask("GET", f"/v1/streams?user={user}")).json["data"] == []
        facts = msgspec.json.encode({"facts": {"stream": stream, "created": 1, "model": MODEL}, "user": user})
        await log.create(stream, Epoch(1, "aa"), TenantId("dev"), facts, None)
        listed = (await one.ask("GET", f"/v1/streams?user={user}")).json["data"]
        assert [item["id"] for item in listed] == [stream]
        assert (await one.cancel(stream))["result"] == "accepted"
        # A stream that no longer exists is removed from the list
        gone = new_stream_id(time.time_ns() // 1_000_000 - 3_600_000, os.urandom(10))
        await index.add_live(TenantId("dev"), UserId(user), gone, 1)
        assert (await one.ask("GET", f"/v1/streams?user={user}")).json["data"] == []
        assert await index.live(TenantId("dev"), UserId(user)) == []


async def test_a_gateway_that_is_a_watcher_by_mistake_takes_itself_off(platform: Running, one: Gate, two: Gate) -> None:
    """As one whose last reader left while the fabric was away: else the stream would run on for nobody."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(redis(platform))
        log = RedisStreamLog(client, await check_partitions(client, 4))
        first = await stack.enter_async_context(one.create(chat(2000)))
        stream = StreamId(first.headers["x-stream-id"])
        k = log.partition(stream)
        watchers = await client.execute(slot_of(f"p{k}"), "HGET", f"sg:{{p{k}}}:{stream}:m", "w")
        name = GatewayId(watchers.decode().strip())
        async with two.create(chat(6000, on_disconnect="cancel_after=0")) as second:
            other = StreamId(second.headers["x-stream-id"])
            await log.watch(other, None, name, BEGINNING)
            await second.events(2)
        await two.until_status(other, "cancelled", 5)
        await one.cancel(stream)


async def test_models_are_listed(one: Gate, tenants: Tenants) -> None:
    reply = (await one.ask("GET", "/v1/models")).json
    assert reply["object"] == "list"
    assert MODEL in [model["id"] for model in reply["data"]]
    assert (await tenants.acme_other_model.ask("GET", "/v1/models")).json["data"] == []


# --- what a credential may -----------------------------------------------------------------------------------


async def test_a_key_of_few_scopes_may_do_no_more(tenants: Tenants) -> None:
    stream, body = await tenants.acme.finished(2)
    reader = tenants.acme_reader
    assert (await reader.ask("GET", f"/v1/streams/{stream}")).body == body
    assert (await reader.info(stream))["status"] == "completed"
    for method, path, data in (
        ("POST", "/v1/chat/completions", chat(1)),
        ("POST", f"/v1/streams/{stream}/cancel", None),
        ("POST", f"/v1/streams/{stream}/input", {"id": "i", "item": {}}),
        ("POST", "/v1/tokens", {"scopes": ["create"]}),
    ):
        refusal(await reader.ask(method, path, data), 403, "forbidden")
    refusal(await tenants.acme_other_model.ask("POST", "/v1/chat/completions", chat(1)), 404, "model_not_found")


async def test_a_minted_token_is_good_at_once_and_for_its_user_alone(tenants: Tenants) -> None:
    asked = {"scopes": ["create", "read"], "user": "u1", "models": [MODEL], "expires_in_s": 60}
    reply = await tenants.acme.ask("POST", "/v1/tokens", asked)
    assert reply.status == 200
    token = reply.json["token"]
    assert token.startswith("cap_")
    assert time.time() + 50 < reply.json["expires_at"] <= time.time() + 61
    holder = Gate(tenants.acme.url, tenants.acme.pid, token)
    mine, _ = await holder.finished(2)
    others, _ = await tenants.acme.finished(2, user="u2")
    assert (await holder.info(mine))["user"] == "u1", "what it creates is its user's"
    refusal(await holder.ask("GET", f"/v1/streams/{others}"), 404, "not_found")
    refusal(await holder.ask("POST", f"/v1/streams/{mine}/cancel"), 403, "forbidden")
    refusal(await holder.ask("POST", "/v1/chat/completions", chat(1, user="u2")), 400, "invalid_request")
    refusal(await holder.ask("POST", "/v1/tokens", {}), 403, "forbidden")
    refusal(await holder.ask("GET", "/v1/streams?user=u2"), 404, "not_found")
    wrong = Gate(holder.url, holder.pid, token[:-4] + "aaaa")
    refusal(await wrong.ask("GET", "/v1/models"), 401, "invalid_api_key")


# --- silence -------------------------------------------------------------------------------------------------


@pytest.mark.chaos
async def test_silence_is_broken_by_heartbeats() -> None:
    with running(sim="ttft_ms=18000,itl_ms=1", gateways=1, replicas=1) as slow:
        async with slow.gates[0].create(chat(3)) as exchange:
            assert await exchange.piece() == HEARTBEAT
            silent_since = time.monotonic()
            assert await exchange.piece(4 * SWEEP_EVERY_S) == HEARTBEAT
            assert time.monotonic() - silent_since <= 2 * SWEEP_EVERY_S + 1
            body = await exchange.rest(30)
        assert events(body)[-1].data == DONE
