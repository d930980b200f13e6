from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from stream_fabric.limits import WS_AUTH_S_MAX
from stream_gw.client import (
    Data,
    Gap,
    GatewayError,
    InputResult,
    Place,
    Position,
    Reset,
    StreamBroken,
    StreamGateway,
    tokens,
)
from stream_gw.client import link as link_module
from stream_gw.client.backoff import BACKOFF_S_MAX, ReconnectPolicy, backoff_s
from stream_gw.client.gateway import socket_url
from stream_gw.client.position import Filter, Verdict
from stream_gw.client.wire import decode
from tests.client.contract import CONTRACT, Target, first, read
from tests.client.cutter import Cutter
from tests.client.fake_gateway import DRAINING, KEY, SPENT, FakeGateway
from tests.support.waiting import eventually


@pytest.mark.parametrize("behaviour", CONTRACT, ids=lambda behaviour: behaviour.__name__)
async def test_contract(behaviour: Callable[[Target], Awaitable[None]], any_target: Target) -> None:
    await behaviour(any_target)


WHOLE = " ".join(f"word{n}" for n in range(1, 41))


async def test_duplicates_and_holes_never_reach_the_reader(fake: FakeGateway, target: Target) -> None:
    fake.token_delay_s = 0.03  # a hole must be answered before the next one is sent
    fake.faults.duplicate = True
    fake.faults.skip = {3, 17, 40}
    async with target.gateway() as gateway:
        assert await read(gateway.create(target.body())) == WHOLE
    assert [message["after"] for message in fake.sent_by_client("sub")] == ["1-2", "1-16", "1-39"]


async def test_a_resumed_stream_cut_before_any_frame_sends_its_cursor_again(fake: FakeGateway, target: Target) -> None:
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        await read(stream)
        fake.faults.cut_after_sub = 3
        resumed = gateway.subscribe(await stream.ready(), after="1-30")
        assert await read(resumed) == WHOLE[WHOLE.index(" word31") :]
    assert {message["after"] for message in fake.sent_by_client("sub")} == {"1-30"}


async def test_a_create_cut_before_its_ok_generates_once(fake: FakeGateway, target: Target) -> None:
    fake.faults.cut_before_ok = 2
    async with target.gateway() as gateway:
        assert await read(gateway.create(target.body())) == WHOLE
    assert len(fake.streams) == 1
    assert len({message["key"] for message in fake.sent_by_client("create")}) == 1


async def test_what_is_sent_is_what_the_caller_passed(fake: FakeGateway, target: Target) -> None:
    """Also where it is sent later or again, and the caller has changed its list of messages meanwhile."""
    fake.faults.cut_before_ok = fake.faults.drop_acks = 1
    fake.hold_at = 0
    body: dict[str, Any] = target.body("say:mine")
    item = {"role": "user", "content": "shorter"}
    async with target.gateway() as gateway:
        stream = gateway.create(body)
        body["messages"].append({"role": "assistant", "content": "say:other"})
        await eventually(lambda: fake.streams)
        body["messages"].append({"role": "user", "content": "say:another"})
        steering = asyncio.create_task(stream.input(item))
        await eventually(lambda: fake.sent_by_client("input"))
        item["content"] = "longer"
        await steering
        fake.release()
        assert await read(stream) == "mine"
    assert [len(message["body"]["messages"]) for message in fake.sent_by_client("create")] == [1, 1]
    assert [message["item"]["content"] for message in fake.sent_by_client("input")] == ["shorter"] * 2


async def test_a_body_that_is_no_json_is_told(fake: FakeGateway, target: Target) -> None:
    async with target.gateway() as gateway:
        for _ in range(2):  # before the first connection, and on it
            with pytest.raises(TypeError):
                gateway.create({"messages": [object()]})
            assert await read(gateway.create(target.body())) == WHOLE


async def test_a_cut_at_every_frame(fake: FakeGateway, target: Target) -> None:
    fake.faults.cut_after_frames = [1] * 10
    async with target.gateway(random=lambda: 0.0) as gateway:
        assert await read(gateway.create(target.body())) == WHOLE


async def test_a_cancel_whose_ack_was_lost_is_sent_again(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 5
    fake.faults.drop_acks = 2
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        await first(stream, 5)
        assert (await stream.cancel()).at == "1-5"
        assert stream.status in ("cancelled", "live")
        await read(stream)


async def test_a_cancel_that_is_refused_by_http_is_told(fake: FakeGateway, target: Target) -> None:
    async with Cutter.before(target.url) as cutter:
        cutter.refuses_sockets = True
        async with target.gateway(cutter.url) as gateway:
            with pytest.raises(GatewayError) as caught:
                await gateway.cancel("resp_" + "0" * 32)
            assert caught.value.code == "not_found"


async def test_a_cancel_before_the_ok_reaches_the_stream(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 0
    fake.faults.cut_before_ok = 1
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        while not fake.streams:
            await asyncio.sleep(0.01)
        assert (await stream.cancel()).result == "accepted"
        assert await read(stream) == ""
    assert [each.status for each in fake.streams.values()] == ["cancelled"]


async def test_a_cancel_of_what_was_never_sent_generates_nothing(fake: FakeGateway, target: Target) -> None:
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        assert (await stream.cancel()).result == "accepted"
        assert await read(stream) == ""
    assert not fake.streams


async def test_a_stream_that_could_not_be_read_on_can_be_cancelled(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 3
    fake.faults.refuse_subs = [{"code": "too_many", "message": "full", "retriable": False}]
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        await first(stream, 3)
        fake.cut_all()
        with pytest.raises(GatewayError, match="full"):
            await read(stream)
        assert (stream.status, (await stream.cancel()).result) == ("failed", "accepted")
    assert [each.status for each in fake.streams.values()] == ["cancelled"]
    with pytest.raises(GatewayError, match="async with"):
        await stream.cancel()


async def test_leaving_the_block_early_cancels_a_create(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 5
    async with target.gateway() as gateway, gateway.create(target.body()) as stream:
        await first(stream, 3)
    assert [each.status for each in fake.streams.values()] == ["cancelled"]


async def test_a_cancelled_block_cancels_its_creates(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 5

    async def reads() -> None:
        async with target.gateway() as gateway, gateway.create(target.body()) as stream:
            await first(stream, 10)

    reading = asyncio.create_task(reads())
    await eventually(lambda: fake.streams)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert [each.status for each in fake.streams.values()] == ["cancelled"]


async def test_a_client_that_is_cancelled_while_it_closes_leaves_nothing(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 5
    others = asyncio.all_tasks()

    async def leave() -> None:
        async with target.gateway() as gateway, gateway.create(target.body()) as stream:
            await first(stream, 3)
            fake.faults.silent = True  # the cancel gets no answer

    leaving = asyncio.create_task(leave())
    await eventually(lambda: fake.sent_by_client("cancel"))
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    left = [str(task.get_coro()) for task in asyncio.all_tasks() - others]
    assert not [each for each in left if "Link." in each or "StreamGateway." in each]


async def test_leaving_the_block_early_detaches_a_subscription(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 5
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        async with gateway.subscribe(await stream.ready()) as reader:
            await first(reader, 3)
        assert reader.status == "detached"
        assert next(iter(fake.streams.values())).status == "live"


async def test_a_hint_moves_every_stream_without_a_pause(fake: FakeGateway, target: Target) -> None:
    fake.token_delay_s = 0.02
    states: list[str] = []
    async with (
        FakeGateway().serve() as other,
        StreamGateway([fake.url, other.url], token=KEY, on_state=lambda state, error: states.append(state)) as gateway,
    ):
        other.streams = fake.streams
        streams = [gateway.create(target.body()) for _ in range(2)]
        await first(streams[0], 3)
        await fake.hint_all(50)
        await asyncio.gather(*(read(stream) for stream in streams))
        assert states == ["connecting", "connected"]
        assert len(other.sockets) == 1
        assert len(other.sent_by_client("sub")) == 2
        await asyncio.sleep(0.05)
        assert not fake.sockets


async def test_a_stream_that_a_draining_gateway_refuses_moves_at_once(fake: FakeGateway, target: Target) -> None:
    async with FakeGateway().serve() as other, StreamGateway([fake.url, other.url], token=KEY) as gateway:
        await read(gateway.create(target.body()))
        await fake.hint_all(60_000)
        fake.faults.refuse_create = [DRAINING] * 9
        began = time.monotonic()
        assert await read(gateway.create(target.body())) == WHOLE
        assert len(other.sent_by_client("create")) == 1
        assert time.monotonic() - began < DRAINING["retry_after_s"]


async def test_where_every_gateway_drains_tries_are_spread(fake: FakeGateway, target: Target) -> None:
    fake.faults.refuse_create = [DRAINING | {"retry_after_s": 0}] * 3
    async with target.gateway() as gateway:
        assert await read(gateway.create(target.body())) == WHOLE
    assert len(fake.sent_by_client("create")) == 4


async def test_where_every_gateway_asks_to_reconnect_connections_are_spread(fake: FakeGateway, target: Target) -> None:
    fake.hold_at, fake.faults.drains = 3, True
    async with target.gateway(random=lambda: 1.0) as gateway:
        stream = gateway.create(target.body())
        await first(stream, 3)
        await eventually(lambda: fake.greeted >= 2)
        began = time.monotonic()
        await eventually(lambda: fake.greeted >= 4)
        assert time.monotonic() - began > 1
        fake.release()
        assert await read(stream) == WHOLE[WHOLE.index(" word4") :], "while it moves, too"


async def test_a_slow_reader_holds_a_bounded_queue(fake: FakeGateway, target: Target) -> None:
    fake.token_delay_s = 0
    async with target.gateway(queue_items=8) as gateway:
        stream = gateway.create(target.body(tokens=200))
        await eventually(lambda: len(stream._queue) >= 8, "the queue to be full")
        await asyncio.sleep(0.1)
        assert len(stream._queue) == 8
        text = await read(stream)
        assert text.endswith("word200") and text.count("word") == 200
    assert fake.sent_by_client("unsub") and fake.sent_by_client("sub")


async def test_a_full_queue_still_takes_the_result_of_an_input(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 3
    async with target.gateway(queue_items=4) as gateway:
        stream = gateway.create(target.body())
        await eventually(lambda: len(stream._queue) == 3)
        await stream.input("say:the other answer", id="mine")
        await eventually(lambda: len(stream._queue) >= 4, "the input's frame fills it")
        fake.release()
        assert [item.id async for item in stream if isinstance(item, InputResult)] == ["mine"]
        assert stream.status == "completed"


async def test_a_silent_socket_is_dead(fake: FakeGateway, target: Target) -> None:
    fake.faults.ping_ms = 100
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        await first(stream, 2)
        fake.faults.silent = True
        await asyncio.sleep(0.4)
        fake.faults.silent = False
        fake.faults.ping_ms = 15_000
        fake.cut_all()  # a socket that opened in the silence would wait for its `hi` for ten seconds
        await read(stream)
        assert stream.status == "completed"


async def test_a_head_that_nothing_follows_is_asked_for(fake: FakeGateway, target: Target) -> None:
    fake.faults.skip = {5}
    fake.hold_at = 5
    async with target.gateway(lag_s=0.1) as gateway:
        stream = gateway.create(target.body())
        await first(stream, 4)
        while len(next(iter(fake.streams.values())).frames) < 5:
            await asyncio.sleep(0.01)
        await fake.ping_all()
        await asyncio.wait_for(first(stream, 1), 20)
        assert stream.cursor == "1-5"
        assert fake.sent_by_client("pong")


async def test_a_gap_and_a_reset_are_told(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 5
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        await first(stream, 5)
        await fake.say_all({"t": "gap", "from": 6, "to": 9})
        assert await anext(stream) == Gap("1-9", 9, 6)
        await fake.say_all({"t": "reset", "epoch": "2.bb", "to": 3})
        assert await anext(stream) == Reset("2-3", 3)
        await fake.say_all({"t": "d", "s": 4, "f": []})
        assert await anext(stream) == Data("2-4", 4, [])


async def test_a_reset_into_joined_frames_reads_their_valid_part_again(fake: FakeGateway, target: Target) -> None:
    """Frames 6 and 7 are in the log under epoch 1: nothing lies after 2-5 but what epoch 2 made."""
    fake.hold_at = 5
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        await first(stream, 5)
        await fake.say_all({"t": "d", "a": 5, "s": 9, "f": []})
        assert await anext(stream) == Data("1-9", 9, [])
        await fake.say_all({"t": "reset", "epoch": "2.bb", "to": 7})
        assert await anext(stream) == Reset("1-5", 5)
        await eventually(lambda: fake.sent_by_client("sub"))
    assert [message["after"] for message in fake.sent_by_client("sub")] == ["1-5"]


async def test_a_reset_below_the_cursor_that_a_reader_began_at_is_told(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 5
    async with target.gateway() as gateway:
        begun = gateway.create(target.body())
        stream_id = await begun.ready()
        await first(begun, 5)
        begun.close()
        stream = gateway.subscribe(stream_id, after="1-5")
        await eventually(lambda: stream.status == "live")
        await fake.say_all({"t": "reset", "epoch": "2.bb", "to": 3})
        await fake.say_all({"t": "d", "s": 4, "f": []})
        assert await anext(stream) == Reset("2-3", 3)
        assert await anext(stream) == Data("2-4", 4, [])


async def test_a_reset_drops_an_input_result_with_its_frames(fake: FakeGateway, target: Target) -> None:
    """Also where the frames of the result were joined with later ones, which are void."""
    fake.hold_at = 5
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        await first(stream, 5)
        await fake.say_all({"t": "d", "a": 5, "s": 9, "f": []})
        await fake.say_all({"t": "steered", "s": 6, "id": "mine", "result": "applied"})
        await eventually(lambda: len(stream._queue) == 2, "the reader does not take them")
        await fake.say_all({"t": "reset", "epoch": "2.bb", "to": 7})
        await eventually(lambda: fake.sent_by_client("sub"))
        assert len(stream._queue) == 0
    assert [message["after"] for message in fake.sent_by_client("sub")] == ["1-5"]


async def test_text_never_papers_over_a_gap(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 5
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        await first(stream, 5)
        await fake.say_all({"t": "gap", "from": 6, "to": 9})
        with pytest.raises(StreamBroken):
            await read(stream)


async def test_an_input_arrives_once(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 5
    fake.faults.drop_acks = 1
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        ack = await gateway.input(await stream.ready(), {"type": "steer", "text": "shorter"})
        assert ack.result == "accepted"
    assert len(fake.inputs) == 1


async def test_an_inputs_id_counts_in_its_stream_alone(fake: FakeGateway, target: Target) -> None:
    """Also where the caller names inputs as the client once named cancels."""
    fake.hold_at = 5
    async with target.gateway() as gateway:
        ids = [await gateway.create(target.body()).ready() for _ in range(2)]
        inputs = [gateway.input(each, {"text": "shorter"}, id="k1") for each in ids]
        stopped, *_ = await asyncio.gather(gateway.cancel(ids[0]), *inputs)
        assert stopped.result == "accepted"
    assert [message["stream"] for message in fake.sent_by_client("input")] == ids
    assert len(fake.sent_by_client("cancel")) == 1


async def test_a_refused_token_is_replaced(fake: FakeGateway, target: Target) -> None:
    asked: list[bool] = []

    async def get_token(refresh: bool) -> str:
        asked.append(refresh)
        return KEY if refresh else "cap_expired"

    async with StreamGateway(target.url, get_token=get_token) as gateway:
        assert await read(gateway.create(target.body())) == WHOLE
    assert asked == [False, True]


@pytest.mark.parametrize("code", [1001, 1011, 1012, 1013, 4408, 4429])
async def test_close_codes_that_mean_come_back(code: int, fake: FakeGateway, target: Target) -> None:
    fake.faults.close_new_with = [code]
    async with target.gateway(random=lambda: 0.01) as gateway:
        assert await read(gateway.create(target.body())) == WHOLE


async def test_forbidden_is_not_retried(fake: FakeGateway, target: Target) -> None:
    fake.faults.close_new_with = [4403]
    async with target.gateway() as gateway:
        with pytest.raises(GatewayError) as caught:
            await read(gateway.create(target.body()))
        assert caught.value.code == "forbidden"


async def test_a_retriable_refusal_is_waited_out_and_another_is_told(fake: FakeGateway, target: Target) -> None:
    busy = {"code": "no_replica", "message": "busy", "retriable": True, "retry_after_s": 0.05}
    wrong = {"code": "invalid_request", "message": "no", "retriable": False}
    fake.faults.refuse_create = [busy, wrong]
    async with target.gateway(random=lambda: 0.0) as gateway:
        with pytest.raises(GatewayError) as caught:
            await read(gateway.create(target.body()))
        assert caught.value.code == "invalid_request"
        assert [message.get("retry") for message in fake.sent_by_client("create")] == [None, 1]
        assert await read(gateway.create(target.body())) == WHOLE


async def test_a_refusal_with_a_long_wait_is_told(fake: FakeGateway, target: Target) -> None:
    """A budget of a month may reset in weeks."""
    fake.faults.refuse_create = [SPENT]
    fake.faults.refuse_requests = [SPENT]
    async with target.gateway() as gateway:
        with pytest.raises(GatewayError) as caught:
            await read(gateway.create(target.body()))
        assert (caught.value.code, caught.value.retriable) == ("budget_exceeded", True)
        assert caught.value.retry_after_s == SPENT["retry_after_s"]
        with pytest.raises(GatewayError, match="budget_exceeded"):
            await gateway.input("resp_any", "More")


async def test_a_failed_stream_raises_after_its_text(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 3
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        await first(stream, 3)
        fake.streams[await stream.ready()].end("failed", {"code": "replica_lost", "message": "gone", "retriable": True})
        with pytest.raises(GatewayError) as caught:
            await read(stream)
        assert caught.value.code == "replica_lost" and caught.value.retriable


async def test_it_gives_up(target: Target) -> None:
    async with StreamGateway("http://127.0.0.1:9", token=KEY, give_up_s=0.2) as gateway:
        with pytest.raises(GatewayError) as caught:
            await read(gateway.create(target.body()))
        assert caught.value.code == "connection_lost"


async def test_a_token_that_never_comes_is_asked_for_again(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "GET_TOKEN_S", 0.02)
    asked = 0

    async def get_token(refused: bool) -> str:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.Event().wait()
        return target.key

    async with StreamGateway(target.url, get_token=get_token) as gateway:
        assert await read(gateway.create(target.body())) == WHOLE
    assert asked == 2


@pytest.mark.parametrize("retriable", [True, False])
async def test_it_gives_up_on_the_issuer_of_tokens(retriable: bool, target: Target) -> None:
    async def get_token(refused: bool) -> str:
        raise GatewayError("not_signed_in", "sign in", retriable=retriable)

    async with StreamGateway(target.url, get_token=get_token, give_up_s=0.05) as gateway:
        with pytest.raises(GatewayError, match="sign in") as caught:
            await read(gateway.create(target.body()))
        assert caught.value.code == ("connection_lost" if retriable else "not_signed_in")


async def test_an_address_that_no_retry_helps_is_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 301 Moved\r\nlocation: https://localhost/v1/stream\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def refused(url: str) -> str:
        async with target.gateway(url) as gateway:
            with pytest.raises(GatewayError) as caught:
                await read(gateway.create(target.body()))
        assert caught.value.code == "address_refused" and not caught.value.retriable
        return str(caught.value)

    async with await asyncio.start_server(redirect, "127.0.0.1", 0) as server:
        assert "https://localhost" in await refused(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert "label" in await refused(f"http://{'a' * 64}.test")
    monkeypatch.setenv("http_proxy", "gopher://127.0.0.1")
    assert "gopher" in await refused("http://gateway.test")


async def test_a_token_that_no_header_carries_is_not_told(fake: FakeGateway, target: Target) -> None:
    async with StreamGateway(target.url, token=f"{KEY}\n") as gateway:
        with pytest.raises(GatewayError) as caught:
            await read(gateway.create(target.body()))
    assert caught.value.code == "invalid_api_key" and KEY not in repr(caught.value)


async def test_a_missing_token_is_told_however_late(
    fake: FakeGateway, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway waits for an ``auth`` message as long as a client with a token waits for ``hi``."""
    assert link_module.CONNECT_NO_TOKEN_S > WS_AUTH_S_MAX + 5  # as often gateways look
    monkeypatch.setattr(link_module, "CONNECT_S", 0.1)
    fake.auth_s = 0.3
    async with StreamGateway(target.url) as gateway:
        with pytest.raises(GatewayError) as caught:
            await read(gateway.create(target.body()))
    assert caught.value.code == "invalid_api_key"


async def test_an_error_of_the_block_stays_itself(target: Target) -> None:
    with pytest.raises(KeyError):
        async with target.gateway():
            raise KeyError("mine")


def test_the_filter() -> None:
    filter = Filter(Position.parse("1-57"))
    assert filter.receive(57, 58) is Verdict.APPLY
    assert filter.receive(57, 58) is Verdict.DROP
    assert filter.receive(59, 60) is Verdict.HOLE
    assert filter.receive(57, 64) is Verdict.HOLE  # joined frames that overlap: only the rest would be wanted
    filter.receive_epoch("2.9f2c")
    assert str(filter.tail) == "1-58"
    assert filter.receive(58, 64) is Verdict.APPLY
    assert str(filter.tail) == "2-64"


def test_a_reset_into_joined_frames_goes_back_to_their_start() -> None:
    filter = Filter(Position.parse("1-0"))
    for after, seq in ((0, 3), (3, 9)):
        filter.receive(after, seq)
        filter.delivered(f"1-{seq}")
    assert filter.rewind("2.x", 5, None)
    assert str(filter.tail) == "1-3"


async def test_a_failure_is_told_to_one_who_has_every_frame(fake: FakeGateway, target: Target) -> None:
    """As after a cut between the last frame and the end."""
    fake.hold_at = 3
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        await first(stream, 3)
        fake.streams[await stream.ready()].end("failed", {"code": "engine_error", "message": "broken"})
        for after in ("1-3", "1-4"):
            with pytest.raises(GatewayError, match="broken"):
                await read(gateway.subscribe(await stream.ready(), after=after))


async def test_a_cancel_that_waits_for_the_id_outlives_the_reading(fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 0
    fake.faults.cut_before_ok = 1
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        reading = asyncio.create_task(read(stream))
        await eventually(lambda: fake.streams)
        stopping = asyncio.create_task(stream.cancel())
        await asyncio.sleep(0)
        stream.close()
        assert await reading == ""
        assert (await stopping).result == "accepted"
        assert stream.status in ("detached", "cancelled"), "as the answer and the end happen to come"
    assert [each.status for each in fake.streams.values()] == ["cancelled"]


async def test_a_token_that_cannot_be_had_now_is_asked_for_again(fake: FakeGateway, target: Target) -> None:
    busy = GatewayError("busy", "the issuer is busy", retriable=True)
    answers = [ConnectionRefusedError("down"), TimeoutError(), httpx.ConnectError("no network"), KeyError(), busy, KEY]

    async def get_token(refused: bool) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with StreamGateway(fake.url, get_token=get_token, random=lambda: 0.01) as gateway:
        assert await read(gateway.create(target.body())) == WHOLE


@pytest.mark.parametrize("text", ["", "1", "1-", "-1", "01-2", "1-2-3", "a-1", "1-\u0661"])
def test_what_is_no_cursor(text: str) -> None:
    with pytest.raises(GatewayError):
        Position.parse(text)


def test_backoff_is_full_jitter_under_a_ceiling() -> None:
    assert [backoff_s(attempt, lambda: 1.0) for attempt in (0, 1, 5, 99)] == [0.25, 0.5, BACKOFF_S_MAX, BACKOFF_S_MAX]
    assert backoff_s(5, lambda: 0.0) == 0


def test_policy_closes_are_bounded() -> None:
    judge = ReconnectPolicy(random=lambda: 0.0, can_refresh=False)
    verdicts: list[Any] = [judge.receive_close(1008, "", 0) for _ in range(3)]
    assert verdicts[:2] == [None, None] and verdicts[2].code == "refused"
    steady = ReconnectPolicy(random=lambda: 0.0, can_refresh=False)
    assert not any(steady.receive_close(1009, "", 60) for _ in range(5)), "a message in a while costs no other stream"


def test_addresses() -> None:
    assert socket_url("https://gw.example/") == "wss://gw.example/v1/stream"
    assert socket_url("ws://gw.example/base/v1/stream") == "ws://gw.example/base/v1/stream"
    with pytest.raises(ValueError):
        socket_url("gw.example")


async def test_messages_of_a_newer_gateway_are_passed_over_and_counted(fake: FakeGateway, target: Target) -> None:
    assert decode('{"t":"novelty","x":1}') is None
    fake.faults.novelties = True
    async with target.gateway() as gateway:
        assert await read(gateway.create(target.body())) == WHOLE
        assert gateway.messages_passed_over == 2


async def test_the_place_in_the_queue_is_told_where_it_is_asked_for(fake: FakeGateway, target: Target) -> None:
    fake.faults.places = [{"position": 2, "of": 3}, {"position": 1, "of": 3, "warming_s": 40}]
    told: list[Place | None] = []
    async with target.gateway() as gateway:
        stream = gateway.create(target.body(), on_place=told.append)
        assert await read(stream) == WHOLE
        assert told == [Place(2, 3, None), Place(1, 3, 40), None]
        assert await read(gateway.create(target.body("Another."))) == WHOLE
    assert [message["queued"] for message in fake.sent_by_client("create")] == [True, False]


@pytest.mark.parametrize("seed", range(8))
async def test_any_mix_of_faults_delivers_each_frame_once(seed: int, fake: FakeGateway, target: Target) -> None:
    chance = random.Random(seed)
    fake.token_delay_s = 0.001
    fake.faults.duplicate = chance.random() < 0.5
    fake.faults.skip = set(chance.sample(range(1, 80), 4))
    fake.faults.cut_before_ok = chance.randrange(3)
    fake.faults.cut_after_sub = chance.randrange(3)
    fake.faults.cut_after_frames = [chance.randrange(1, 30) for _ in range(6)]
    fake.faults.close_new_with = [chance.choice([1011, 4408]) for _ in range(chance.randrange(3))]
    async with target.gateway(random=lambda: chance.random() / 10, queue_items=chance.choice([4, 512])) as gateway:

        async def one(number: int) -> None:
            stream = gateway.create(target.body(f"Story {number}", tokens=80))
            seqs: list[int] = []
            async for item in stream:
                seqs.append(item.seq)
                if chance.random() < 0.02:
                    await fake.hint_all(5)
                if chance.random() < 0.02:
                    await asyncio.sleep(0.02)
            assert seqs == list(range(1, 81))
            assert stream.status == "completed"

        await asyncio.gather(*(one(number) for number in range(3)))
    assert len(fake.streams) == 3


async def test_a_client_that_is_woken_as_it_closes_ends(target: Target) -> None:
    """Its pause and the cancel end in the same loop turn, and the cancel counts."""
    async with asyncio.timeout(5), target.gateway("http://127.0.0.1:1", random=lambda: 0.9) as gateway:
        await eventually(lambda: gateway.state == "reconnecting")
        gateway.wake()
        await asyncio.sleep(0)
