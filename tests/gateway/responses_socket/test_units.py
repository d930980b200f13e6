"""The parts of a Responses socket: order of lanes, what is remembered, bytes that are counted, and its events."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.errors import StreamGwError
from stream_fabric.limits import (
    INPUT_BYTES_MAX,
    INPUTS_BYTES_MAX,
    MESSAGES_MAX,
    RESPONSE_LANES_MAX,
    RESPONSES_IN_FLIGHT_MAX,
    RESPONSES_SOCKET_S_MAX,
    RESPONSES_WAITING_MAX,
    SOCKET_HISTORY_BYTES_MAX,
)
from stream_fabric.redis.client import RedisClient
from stream_fabric.stream.ids import TenantId
from stream_gw.dialects.responses.client_events import Steer
from stream_gw.dialects.responses.whole import DIALECTS, encoder_of
from stream_gw.responses import pack
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.transport.responses.lanes import Lanes
from stream_gw.transport.responses.recent import Recent, RecentResponses
from stream_gw.transport.responses.session import ResponsesSession
from stream_gw.transport.responses.socket import ResponsesSocket
from stream_gw.transport.responses.steering import SocketSteering
from stream_gw.transport.responses.turn import Turn
from tests.dialects.responses.fold import events
from tests.dialects.strategies import Stream, streams
from tests.gateway.in_process import WHO, InProcess, in_process
from tests.gateway.test_ws import Wire
from tests.support.waiting import eventually

MIB = 1 << 20
lane_names = st.none() | st.sampled_from(["a", "b", "c"])


class ClosingSocket(ResponsesSocket):
    """A socket whose close is only noted."""

    def close(self, code: int, reason: str) -> None:
        self.close_code = self.close_code or code


def socket_on(wire: Wire, bodies: BodyBytes, histories: BodyBytes | None = None, **more: Any) -> ClosingSocket:
    now = more.get("now", time.monotonic)
    is_open = more.get("is_open", False)
    return ClosingSocket(wire, "conn", now, bodies, histories or BodyBytes(), WHO, is_open=is_open)  # type: ignore[arg-type]


# --- lanes -------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(lane_names, st.booleans()), max_size=80))
def test_lanes_are_fifo_and_bounded(steps: list[tuple[str | None, bool]]) -> None:
    lanes: Lanes[int] = Lanes()
    asked: dict[str | None, list[int]] = {}
    started: dict[str | None, list[int]] = {}
    for number, (lane, ends) in enumerate(steps):
        if ends:
            lanes.finish(lane)
        else:
            asked.setdefault(lane, []).append(number)
            lanes.add(lane, number)
        before = dict(lanes.running)
        for request in lanes.startable():
            owner = next(name for name, running in lanes.running.items() if running == request)
            assert owner not in before, "one at a time in a lane"
            started.setdefault(owner, []).append(request)
        assert len(lanes.running) <= RESPONSES_IN_FLIGHT_MAX
    for lane, requests in started.items():
        assert requests == asked[lane][: len(requests)]
    assert lanes.is_idle is (not lanes.running and sum(map(len, asked.values())) == sum(map(len, started.values())))


def test_the_limits_of_lanes() -> None:
    lanes: Lanes[int] = Lanes()
    for number in range(RESPONSE_LANES_MAX):
        lanes.add(f"l{number}", number)
    assert len(lanes.startable()) == RESPONSES_IN_FLIGHT_MAX
    with pytest.raises(StreamGwError, match="32 named lanes"):
        lanes.add("more", 0)
    for _ in range(RESPONSES_WAITING_MAX - RESPONSE_LANES_MAX + RESPONSES_IN_FLIGHT_MAX):
        lanes.add(None, 0)
    with pytest.raises(StreamGwError, match="128 requests"):
        lanes.add(None, 0)
    lanes.finish("l3")
    assert lanes.startable() == [RESPONSES_IN_FLIGHT_MAX], "the first that waits"


# --- what a socket remembers --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(lane_names, st.integers(0, 5), st.integers(0, 4)), max_size=40), st.integers(2, 12))
def test_what_is_remembered_is_bounded_and_counted(steps: list[tuple[str | None, int, int]], room: int) -> None:
    shared = BodyBytes(100 * MIB, room * MIB)
    recent = RecentResponses(shared, TenantId("acme"))
    for number, (lane, size, what) in enumerate(steps):
        name = f"resp_{number}"
        if what == 4:
            recent.evict(f"resp_{size}", lane, everywhere=bool(size % 2))
        elif what == 3:
            recent.forget(lane)
        else:
            recent.keep(lane, Recent(name, (bytes(size * MIB),), size))
            found = recent.find(name)
            assert (found is not None) or size > room or size * MIB > SOCKET_HISTORY_BYTES_MAX or shared.total
        kept = [each for number in range(len(steps)) if (each := recent.find(f"resp_{number}"))]
        assert shared.total == sum(each.bytes for each in kept) <= min(SOCKET_HISTORY_BYTES_MAX, room * MIB)
        assert len(kept) <= 4, "the newest of each lane"
    recent.clear()
    assert shared.total == 0


def test_the_oldest_lane_makes_room() -> None:
    recent = RecentResponses(BodyBytes(), TenantId("acme"))
    piece = bytes(SOCKET_HISTORY_BYTES_MAX // 2)
    for lane in ("a", "b", "c"):
        recent.keep(lane, Recent(f"resp_{lane}", (piece,), 1))
    assert recent.find("resp_a") is None and recent.find("resp_b") and recent.find("resp_c")
    recent.keep("c", Recent("resp_d", (bytes(SOCKET_HISTORY_BYTES_MAX + 1),), 1))
    assert recent.find("resp_d") is None and recent.find("resp_c") is None and recent.find("resp_b")


# --- events -------------------------------------------------------------------------------------------------------


class Frames:
    """Takes what a turn sends."""

    name = "conn"
    full = False
    is_open_profile = False

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, text: bytes) -> None:
        self.sent.append(text)


@given(streams(single=True), st.sampled_from(DIALECTS), st.sampled_from([None, "lane-1"]), st.data())
def test_events_are_those_of_the_response_over_http(
    stream: Stream, dialect: str, lane: str | None, data: st.DataObject
) -> None:
    """Whatever the batches: the bodies are byte for byte the data of the server-sent events, but for ``error``."""
    encoder = encoder_of(stream.facts, dialect)
    body = encoder.opening() + b"".join(encoder.sse([line], 1, seq) for seq, line in enumerate(stream.lines, 1))
    told = [each for each, _ in events(body) if json.loads(each)["type"] != "error"]

    async def turn() -> list[bytes]:
        wire = Frames()
        made = Turn(wire, lane, b"")  # type: ignore[arg-type]
        made.begin(stream.facts.stream, encoder_of(stream.facts, dialect))
        at = 0
        while at < len(stream.lines):
            count = data.draw(st.integers(1, 5))
            made.write(1, at + 1, stream.lines[at : at + count])
            at += count
        assert made.failed is (json.loads(told[-1])["type"] == "response.failed")
        return wire.sent

    sent = asyncio.run(turn())
    tail = b"}" if lane is None else b',"stream_id":"lane-1"}'
    assert sent == [each[:-1] + tail for each in told]


# --- bytes and ends -----------------------------------------------------------------------------------------------


def create(world: InProcess, **more: Any) -> str:
    body = {"type": "response.create", "model": world.model, "input": "x" * 1900, "store": False, **more}
    return json.dumps(body)


async def test_requests_that_wait_are_counted_until_their_stream_is_made(redis_client: RedisClient) -> None:
    async with in_process(redis_client) as world:
        world.gateway.bodies = bodies = BodyBytes(10_000, 5000)
        wire = Wire()
        socket = socket_on(wire, bodies)
        session = ResponsesSession(socket, world.gateway, lambda trace, error: None)
        world.pools_link.pause()  # creates wait for their places
        for _ in range(3):
            await session.take(create(world))
        assert 3800 < bodies.total < 5000, "one runs, one waits"
        (over,) = wire.sent
        assert (over["status"], over["error"]["code"]) == (429, "too_many")
        world.pools_link.resume()
        await eventually(lambda: bodies.total < 3000, "the first stream to be made")
        await session.end()
        await eventually(lambda: bodies.total == 0, "nothing to be counted")


async def test_warm_ups_to_a_client_that_does_not_read(redis_client: RedisClient) -> None:
    async with in_process(redis_client) as world:
        wire = Wire()
        socket = socket_on(wire, world.gateway.bodies, world.gateway.histories)
        session = ResponsesSession(socket, world.gateway, lambda trace, error: None)
        for number in range(4):
            await session.take(create(world, generate=False, stream_id=f"l{number}", instructions="y" * 30_000))
        await session.wait_for_tasks()
        assert socket.close_code is None and len(wire.sent) == 12 and world.gateway.histories.total > 0
        socket.connection_paused()
        for number in range(4):
            await session.take(create(world, generate=False, stream_id=f"l{number}", instructions="y" * 30_000))
        await session.wait_for_tasks()
        assert socket.close_code == 4408
        socket.recent.clear()
        assert world.gateway.histories.total == world.gateway.bodies.total == 0


@pytest.mark.parametrize("is_open", [False, True])
def test_the_age_of_a_socket_is_limited(is_open: bool) -> None:
    wire: Any = Wire()
    wire.transport = type("Open", (), {"is_closing": lambda self: False})()
    clock = [100.0]
    socket = socket_on(wire, BodyBytes(), now=lambda: clock[0], is_open=is_open)
    socket.sweep(100.0 + RESPONSES_SOCKET_S_MAX, 0.0)
    assert socket.close_code is None and not wire.sent
    socket.sweep(101.0 + RESPONSES_SOCKET_S_MAX, 0.0)
    (told,) = wire.sent
    assert (told["status"], told["error"]["code"]) == (400, "websocket_connection_limit_reached")
    assert told["error"]["param"] is None and "stream_id" not in told
    assert socket.close_code == 1001, "official clients connect again after it"


async def test_an_unexpected_error_closes_the_socket(
    redis_client: RedisClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with in_process(redis_client) as world:
        socket = socket_on(Wire(), world.gateway.bodies)
        session = ResponsesSession(socket, world.gateway, lambda trace, error: None)

        async def broken(call: object) -> None:
            raise RuntimeError("boom")

        monkeypatch.setattr(world.gateway.streams, "create", broken)
        await session.take(create(world))
        await session.wait_for_tasks()
        await asyncio.sleep(0)
        assert socket.close_code == 1011 and "work of a websocket failed" in caplog.text
        assert world.gateway.bodies.total == 0 and socket.lanes.is_idle


async def test_a_fork_waits_until_its_parent_is_remembered(redis_client: RedisClient) -> None:
    """A large output is packed in a thread, after its client has the last event."""
    async with in_process(redis_client) as world:
        socket = socket_on(Wire(), world.gateway.bodies, world.gateway.histories)
        parent = Turn(socket, None, b"")
        socket.lanes.add(None, parent)
        socket.lanes.startable()
        parent.response = "resp_parent"
        parent.end("completed")
        wire: Any = socket._connection
        session = ResponsesSession(socket, world.gateway, lambda trace, error: None)
        await session.take(create(world, generate=False, stream_id="fork", previous_response_id="resp_parent"))
        await asyncio.sleep(0.05)
        assert not wire.sent, "neither found nor refused"
        piece, size = await pack([{"role": "user", "content": "Hello"}])
        socket.recent.keep(None, Recent("resp_parent", (piece,), size))
        parent.settled.set_result(None)
        await session.wait_for_tasks()
        assert [event["type"] for event in wire.sent][-1] == "response.completed"


async def test_a_fork_does_not_wait_for_a_parent_that_failed_unexpectedly(
    redis_client: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_process(redis_client) as world:
        socket = socket_on(Wire(), world.gateway.bodies, world.gateway.histories)
        session = ResponsesSession(socket, world.gateway, lambda trace, error: None)

        def broken(steering: SocketSteering, turn: Turn) -> None:
            raise RuntimeError("boom")

        monkeypatch.setattr(SocketSteering, "required", broken)
        await session.take(create(world, stream_id="parent"))
        parent = socket.lanes.running["parent"]
        await eventually(lambda: parent.response, "the parent to have an id")
        assert SocketSteering(socket, world.gateway).receive(WHO, Steer(parent.response, msgspec.Raw(b'"more"')))
        await session.take(create(world, generate=False, stream_id="fork", previous_response_id=parent.response))
        parent.end("completed")  # in the same turn of the loop: the fork looks before the parent's task goes on
        async with asyncio.timeout(10):
            await session.wait_for_tasks()
        assert socket.close_code == 1011


# --- steering -----------------------------------------------------------------------------------------------------


def steered(socket: ResponsesSocket, lane: str | None = None) -> Turn:
    """A response that runs in a lane, and can be steered."""
    turn = Turn(socket, lane, b"")
    turn.response, turn.settings = f"resp_{lane}", b"{}"
    socket.lanes.add(lane, turn)
    socket.lanes.startable()
    return turn


async def test_a_response_that_has_no_id_yet_is_neither_steered_nor_continued(redis_client: RedisClient) -> None:
    async with in_process(redis_client) as world:
        wire = Wire()
        socket = socket_on(wire, world.gateway.bodies)
        session = ResponsesSession(socket, world.gateway, lambda trace, error: None)
        world.pools_link.pause()  # the create waits for its place
        await session.take(create(world))
        await asyncio.sleep(0)
        await session.take('{"type":"response.steer","previous_response_id":"","input":"x"}')
        await session.take(create(world, previous_response_id="", stream_id="b"))
        await eventually(lambda: len(wire.sent) == 2, "the answers")
        codes = [event["error"]["code"] for event in wire.sent]
        assert codes == ["response_not_found", "previous_response_not_found"]
        assert socket.close_code is None
        world.pools_link.resume()
        await session.end()


async def test_a_response_of_a_socket_that_has_gone_has_no_successor(redis_client: RedisClient) -> None:
    """Nobody would read it, and what it counts would never be given back."""
    async with in_process(redis_client) as world:
        socket = socket_on(Wire(), world.gateway.bodies)
        steering, turn = SocketSteering(socket, world.gateway), steered(socket)
        assert steering.receive(WHO, Steer(turn.response, msgspec.Raw(b'"go on"'))) is turn
        turn.end("incomplete")
        socket.leave()  # while the response is being remembered
        assert steering.follow(turn) is None and world.gateway.bodies.total == 0


async def test_inputs_of_a_socket_are_bounded_together(redis_client: RedisClient) -> None:
    async with in_process(redis_client) as world:
        wire = Wire()
        socket = socket_on(wire, world.gateway.bodies)
        steering = SocketSteering(socket, world.gateway)
        one, two = steered(socket, "a"), steered(socket, "b")
        larger = msgspec.Raw(b'"%b"' % (b"x" * (INPUT_BYTES_MAX - 1)))
        assert steering.receive(WHO, Steer(one.response, larger)) is None
        assert str(INPUT_BYTES_MAX) in wire.sent[-1]["error"]["message"]
        large = msgspec.Raw(b'"%b"' % (b"x" * (INPUT_BYTES_MAX - 2)))
        for _ in range(INPUTS_BYTES_MAX // INPUT_BYTES_MAX):
            assert steering.receive(WHO, Steer(one.response, large)) is one
        assert steering.receive(WHO, Steer(two.response, large)) is None
        assert wire.sent[-1]["error"]["code"] == "too_many_pending_steers"
        one.end("incomplete")
        one.required = [{"type": "function_call_output", "call_id": "c"}]
        assert steering.follow(one) is None, "its input waits for the results of its tools"
        socket.lanes.finish("a")
        assert steering.receive(WHO, Steer(two.response, large)) is None
        steering.commit(one.response, "a")
        assert steering.receive(WHO, Steer(two.response, large)) is two
        many = msgspec.Raw(msgspec.json.encode(["x"] * (MESSAGES_MAX + 1)))
        assert steering.receive(WHO, Steer(two.response, many)) is None
        assert wire.sent[-1]["error"]["code"] == "invalid_input"
