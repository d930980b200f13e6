"""The encoder of a reader that comes late to a long stream is made beside the loop: other streams go on."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
import pytest

from stream_fabric.redis.client import RedisClient
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.frames import Open, Usage, encode, encode_text
from stream_fabric.stream.ids import new_stream_id
from stream_fabric.stream.log import Append, AppendCode
from stream_gw.dialects import encoder_for
from stream_gw.dialects.base import Encoder
from stream_gw.dialects.facts import StreamFacts, StreamMeta
from stream_gw.observe.trace import ReaderTrace
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.streams.opened import OpenedStream
from stream_gw.transport.ws import subscribe
from stream_gw.transport.ws_socket import Channel, Socket
from tests.gateway.in_process import WHO, in_process
from tests.gateway.test_ws import Stream, Wire

FRAMES = 4001
STREAM = new_stream_id(1, bytes(10))
LINES = (encode(Open(0, 0, "text")), *(encode_text(0, f" {number}") for number in range(FRAMES - 1)))
T = TypeVar("T")


async def turns_of(work: Awaitable[T]) -> tuple[int, T]:
    """Turns that the loop takes for other tasks before the work is done."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    done = await work
    counting.cancel()
    return turns, done


def opened(lines: tuple[bytes, ...]) -> OpenedStream:
    facts, at = StreamFacts(STREAM, 1, "m"), Cursor(1, len(lines))
    stream: Any = Stream()
    return OpenedStream(STREAM, "1.aa", facts, at, lines, lambda outlet: stream, attached=True)


@pytest.mark.parametrize("dialect", ["anthropic.messages", "vercel.ui", "openai.responses"])
async def test_an_encoder_of_many_frames_is_made_beside_the_loop(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def make(dialect: str, facts: StreamFacts) -> Encoder:
        threads.append(threading.get_ident())
        return encoder_for(dialect, facts)

    monkeypatch.setattr("stream_gw.streams.opened.encoder_for", make)
    await opened(LINES).encoder(dialect)
    assert threads != [threading.get_ident()]
    turns, _ = await turns_of(opened(LINES[:100]).encoder(dialect))
    assert turns == 0, "a thread costs more than a few frames, and a new stream must be read in the turn it is made"


async def test_a_snapshot_of_many_frames_is_made_beside_the_loop() -> None:
    wire = Wire()
    socket = Socket(wire, "conn", time.monotonic, BodyBytes())  # type: ignore[arg-type]
    channel = socket.channels[1] = Channel(socket, 1)
    turns, _ = await turns_of(subscribe(channel, opened(LINES), "openai.chat", whole=True))
    assert turns > 0
    ok, data = wire.sent
    assert (ok["t"], data["t"], data["a"], data["s"]) == ("ok", "d", 0, FRAMES)
    text = data["f"][0]["choices"][0]["delta"]["content"]
    assert text == "".join(f" {number}" for number in range(FRAMES - 1))


async def test_the_place_of_a_reader_among_many_frames_is_found_beside_the_loop(redis_client: RedisClient) -> None:
    async with in_process(redis_client) as world:
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        meta = msgspec.json.encode(StreamMeta(StreamFacts(stream, 1, world.model)))
        await world.log.create(stream, Epoch(1, "aa"), WHO.tenant, meta, None)
        part = Append(stream, "1.aa", 1, FRAMES, b"\n".join(LINES), Usage(1, FRAMES))
        (reply,) = await world.log.append(world.log.partition(stream), [part])
        assert reply.code is AppendCode.OK
        threads = []

        def place(facts: StreamFacts, lines: list[bytes]) -> int:
            threads.append(threading.get_ident())
            return len(lines)

        trace = ReaderTrace(world.gateway.parts.tracer, "req", "sse")
        found = await world.gateway.reads.follow_from(WHO, stream, place, trace)
        assert found is not None and len(found.seen) == FRAMES
        assert threads != [threading.get_ident()]
