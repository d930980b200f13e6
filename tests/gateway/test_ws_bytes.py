"""Messages of WebSockets take bounded memory of a gateway, while they arrive and while they wait."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed

from stream_fabric.errors import BadRequest, GatewayFull, TooDeep, TooMany
from stream_fabric.limits import JSON_CONTAINERS_MAX, TENANT_BODIES_BYTES_MAX, WS_AUTH_BYTES_MAX
from stream_fabric.redis.client import RedisClient
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.streams.steering.items import read_item
from stream_gw.transport.ws import Session
from stream_gw.transport.ws_messages import Input, decoder
from stream_gw.transport.ws_socket import Socket
from tests.gateway.in_process import WHO, in_process
from tests.gateway.processes import Running
from tests.gateway.test_ws import Closing, Wire
from tests.gateway.wire import Gate, chat
from tests.support.waiting import eventually

MIB = 1 << 20


def test_an_item_is_read_only_after_its_objects_are_counted() -> None:
    """A message of 8 MiB can hold so many that decoding them would stop the gateway for seconds."""
    item = b"[" + b"[]," * JSON_CONTAINERS_MAX + b"[]]"
    message = decoder.decode(b'{"t":"input","id":"i","stream":"s","item":{"a":' + item + b"}}")
    assert isinstance(message, Input) and isinstance(message.item, msgspec.Raw)
    with pytest.raises(TooDeep):
        read_item(bytes(message.item))
    for wrong in (b"[]", b"5", b"null"):
        with pytest.raises(BadRequest) as refused:
            read_item(wrong)
        assert refused.value.param == "item"


async def test_messages_that_wait_are_counted_until_they_are_done(redis_client: RedisClient) -> None:
    async with in_process(redis_client) as world:
        world.gateway.bodies = BodyBytes(4000, 3000)
        wire = Wire()
        socket = Socket(wire, "conn", time.monotonic, world.gateway.bodies)  # type: ignore[arg-type]
        socket.principal = WHO
        session = Session(socket, world.gateway)
        world.pools_link.pause()  # creates wait for their places
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        body = {"model": world.model, "messages": [{"role": "user", "content": "x" * 1900}]}
        large_input = {"t": "input", "id": "i", "stream": "resp_" + "0" * 32, "item": {"text": "x" * 1900}}
        small = {"t": "cancel", "id": "k", "stream": "resp_" + "0" * 32}
        for message in (
            {"t": "create", "ch": 1, "body": body},
            {"t": "create", "ch": 2, "body": body},
            large_input,
            small,
        ):
            messages.put_nowait({"type": "websocket.receive", "text": json.dumps(message)})
        serving = asyncio.create_task(session.run(messages.get))
        await eventually(lambda: len(wire.sent) >= 3, "the answers")
        answers, held, channels = wire.sent[:], world.gateway.bodies.total, list(socket.channels)
        messages.put_nowait({"type": "websocket.disconnect"})
        await serving
        await session.end()
        assert [(sent["t"], sent.get("code"), sent.get("ch"), sent.get("id")) for sent in answers] == [
            ("error", "too_many", 2, None),
            ("error", "too_many", None, "i"),
            ("ack", None, None, "k"),
        ]
        assert channels == [1], "the refused create's channel is free"
        assert 1900 < held < 3000
        assert world.gateway.bodies.total == 0


@pytest.mark.parametrize("error", [TooMany, GatewayFull])
def test_a_message_that_has_no_room_closes_its_socket(error: type[TooMany | GatewayFull]) -> None:
    bodies = BodyBytes(1000, 100) if error is TooMany else BodyBytes(100, 1000)
    socket = Closing(Wire(), "conn", time.monotonic, bodies)  # type: ignore[arg-type]
    socket.principal = WHO
    for size, held in ((60, 60), (90, 90), (0, 0), (90, 90)):
        socket.message_grew(size)
        assert bodies.total == held
    socket.message_grew(101)
    assert socket.close_code == error.close_code and bodies.total == 90
    socket.connection_lost()
    assert bodies.total == 0


def test_a_socket_without_credential_holds_little() -> None:
    bodies = BodyBytes()
    socket = Closing(Wire(), "conn", time.monotonic, bodies)  # type: ignore[arg-type]
    socket.message_grew(WS_AUTH_BYTES_MAX)
    assert socket.close_code is None
    socket.message_grew(WS_AUTH_BYTES_MAX + 1)
    assert socket.close_code == 4401


@pytest.mark.platform
async def test_half_sent_messages_take_bounded_memory_and_the_rest_is_refused(platform: Running) -> None:
    """Three times as many bytes are sent as one tenant may; others are served meanwhile."""
    with await asyncio.to_thread(platform.gateway) as process:
        gate = Gate(process.facts["url"], process.pid, platform.key)
        async with gate.socket() as socket:
            await socket.create(1, chat(1))
            await socket.until_ended(1)
        before = gate.resident_bytes()
        count = 3 * TENANT_BODIES_BYTES_MAX // (7 * MIB)
        never = asyncio.Event()

        async def half() -> AsyncIterator[str]:
            for _ in range(7):
                yield "x" * MIB
            await never.wait()
            yield "x"

        async def send(connection: Any) -> None:
            with suppress(ConnectionClosed):
                await connection.send(half())

        async with AsyncExitStack() as stack:
            sockets = [await stack.enter_async_context(gate.socket()) for _ in range(count)]
            sending = [asyncio.create_task(send(each.connection)) for each in sockets]
            held = TENANT_BODIES_BYTES_MAX // (7 * MIB)

            def codes() -> list[int]:
                return [code for each in sockets if (code := each.connection.close_code) is not None]

            await eventually(lambda: len(codes()) >= count - held, "the refusals", 30)
            assert set(codes()) == {TooMany.close_code}
            grown = gate.resident_bytes() - before
            print(f"\n{count} messages, {count * 7} MiB sent: {grown // MIB} MiB held")
            assert grown < 2 * TENANT_BODIES_BYTES_MAX
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

        async def served() -> bool:
            return (
                await gate.ask("POST", "/v1/chat/completions", chat(1, stream=False) | {"pad": "x" * MIB})
            ).status == 200

        await eventually(served, "room after the senders left")
