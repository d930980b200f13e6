from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from stream_fabric.limits import STALL_S_MAX
from tests.gateway.wire import DONE, MODEL, Exchange, Gate, after_heartbeat, dense, events, text
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

TOKENS = 4000
STREAMS = 5
READERS = 50
GROWTH_BYTES_MAX = 20 << 20
KERNEL_BYTES = 4096


@asynccontextmanager
async def watched(gate: Gate) -> AsyncIterator[list[int]]:
    """Samples of the gateway's resident memory."""
    samples = [gate.resident_bytes()]

    async def sample() -> None:
        while True:
            samples.append(gate.resident_bytes())
            await asyncio.sleep(0.02)

    task = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        task.cancel()


async def started(gate: Gate, model: str, count: int = STREAMS, tokens: int = TOKENS) -> list[str]:
    return [await gate.background(tokens, seed=k, model=model) for k in range(count)]


async def texts(gate: Gate, streams: Sequence[str]) -> list[str]:
    """Texts of readers that read without delay."""
    bodies = [(await gate.ask("GET", f"/v1/streams/{stream}")).body for stream in streams]
    return [text(events(body)) for body in bodies]


async def test_invariant_8_sse_readers_that_do_not_read_cost_constant_memory(one: Gate, two: Gate, fast: str) -> None:
    warm, _ = await one.finished(TOKENS, model=fast, seed=99)
    await one.ask("GET", f"/v1/streams/{warm}")
    async with AsyncExitStack() as stack, watched(one) as samples:
        streams = await started(two, fast)
        readers: list[Exchange] = []
        for k in range(READERS):
            reader = await stack.enter_async_context(one.connection(KERNEL_BYTES))
            await reader.send(one.request("GET", f"/v1/streams/{streams[k % STREAMS]}"))
            readers.append(reader)
        for stream in streams:
            await two.until_status(stream, "completed", 60)

        async def all_lag() -> bool:
            return await one.gauge("lagging_clients") == READERS

        await eventually(all_lag, "every reader to lag")
        growth = max(samples) - samples[0]
        assert growth < GROWTH_BYTES_MAX, f"{growth >> 10} KiB for {READERS} readers"
        wholes = await texts(two, streams)
        bodies = await asyncio.gather(*(_read(reader) for reader in readers))
        growth = max(samples) - samples[0]
        assert growth < GROWTH_BYTES_MAX, f"{growth >> 10} KiB while {READERS} readers caught up"
    for k, body in enumerate(bodies):
        found = events(body)
        assert found[-1].data == DONE
        assert text(found) == wholes[k % STREAMS]
        seqs = [int(event.id.partition("-")[2]) for event in found if event.id]
        assert seqs == sorted(seqs)
        assert len(found) < TOKENS, "who is behind gets deltas joined"
    await one.until_open_streams(0)
    assert await one.gauge("lagging_clients") == 0


async def _read(reader: Exchange) -> bytes:
    await reader.head()
    assert reader.status == 200
    return after_heartbeat(await reader.rest(60))


async def test_invariant_8_sockets_that_do_not_read_cost_constant_memory(one: Gate, two: Gate, fast: str) -> None:
    await one.finished(TOKENS, model=fast, seed=99)
    async with AsyncExitStack() as stack, watched(one) as samples:
        streams = await started(two, fast)
        sockets = [
            await stack.enter_async_context(one.socket(receive_buffer=KERNEL_BYTES, max_queue=1)) for _ in range(10)
        ]
        for socket in sockets:
            for ch, stream in enumerate(streams):
                await socket.sub(ch, stream)
        for stream in streams:
            await two.until_status(stream, "completed", 60)

        async def all_lag() -> bool:
            return await one.gauge("lagging_clients") == len(sockets)

        await eventually(all_lag, "every socket to lag")
        growth = max(samples) - samples[0]
        assert growth < GROWTH_BYTES_MAX, f"{growth >> 10} KiB for {len(sockets)} sockets of {STREAMS} streams"
        wholes = await texts(two, streams)
        await asyncio.gather(*(socket.until_ended(*range(STREAMS), within_s=60) for socket in sockets))
        growth = max(samples) - samples[0]
        assert growth < GROWTH_BYTES_MAX, f"{growth >> 10} KiB while {len(sockets)} sockets caught up"
        for socket in sockets:
            for ch in range(STREAMS):
                track = socket.track(ch)
                dense(track)
                assert track.text == wholes[ch]
                assert track.end is not None
                assert track.end["status"] == "completed"


async def until_one_lags(gate: Gate) -> None:
    async def lags() -> bool:
        return await gate.gauge("lagging_clients") == 1

    await eventually(lags, "the reader to lag")


async def test_invariant_8_subscribing_again_and_again_without_reading_costs_constant_memory(
    one: Gate, two: Gate, fast: str
) -> None:
    (stream,) = await started(two, fast, 1, tokens=20_000)
    await two.until_status(stream, "completed", 60)
    sentinel = await two.background(6000)
    async with one.socket(receive_buffer=KERNEL_BYTES, max_queue=1) as socket, watched(one) as samples:
        for k in range(200):
            await socket.sub(k, stream, mode=("snapshot", "tokens")[k % 2])
        await socket.send("cancel", id="c", stream=sentinel)
        await two.until_status(sentinel, "cancelled", 30)  # all before it has been done
        growth = max(samples) - samples[0]
        assert growth < GROWTH_BYTES_MAX / 2, f"{growth >> 10} KiB"
        await until_one_lags(one)
        whole = (await texts(two, [stream]))[0]
        await socket.until_ended(*range(READERS), within_s=60)
        for k in range(READERS):
            dense(socket.track(k))
            assert socket.track(k).text == whole
    await one.until_open_streams(0)


async def test_a_reader_whose_connection_is_full_from_the_start_lags(one: Gate, two: Gate, fast: str) -> None:
    """By an answer before, which it has not read either."""
    (stream,) = await started(two, fast, 1)
    await two.until_status(stream, "completed", 60)
    large = {"model": MODEL, "input": ["x"] * 2000, "encoding_format": "float"}
    async with one.connection(KERNEL_BYTES) as asleep:
        await asleep.send(one.request("POST", "/v1/embeddings", large) + one.request("GET", f"/v1/streams/{stream}"))
        await until_one_lags(one)
        reply = await asleep.answer()
        assert len(reply.body) > 1 << 20
        (whole,) = await texts(two, [stream])
        assert text(events(await _read(asleep))) == whole
    await one.until_open_streams(0)


async def test_a_slow_reader_delays_nobody_else(one: Gate, two: Gate, fast: str) -> None:
    (stream,) = await started(two, fast, 1)
    async with one.connection(KERNEL_BYTES) as asleep:
        await asleep.send(one.request("GET", f"/v1/streams/{stream}"))
        awake = (await one.ask("GET", f"/v1/streams/{stream}")).body
        assert events(awake)[-1].data == DONE
        assert text(events(await _read(asleep))) == text(events(awake))


async def test_a_slow_reader_that_leaves_is_forgotten(one: Gate, two: Gate, fast: str) -> None:
    (stream,) = await started(two, fast, 1)
    async with one.connection(KERNEL_BYTES) as asleep:
        await asleep.send(one.request("GET", f"/v1/streams/{stream}"))
        await two.until_status(stream, "completed", 60)
        await one.until_open_streams(1)
    await one.until_open_streams(0)


async def test_a_cancel_reaches_a_slow_reader(one: Gate, two: Gate, fast: str) -> None:
    """All that came before the cancel, in whatever pieces, and then its error."""
    (stream,) = await started(two, fast, 1, tokens=20_000)
    async with one.connection(KERNEL_BYTES) as asleep:
        await asleep.send(one.request("GET", f"/v1/streams/{stream}"))

        async def lags() -> bool:
            return await one.gauge("lagging_clients") == 1

        await eventually(lags, "the reader to lag")
        reply = await two.cancel(stream)
        assert reply["result"] == "accepted"
        found = events(await _read(asleep))
    assert found[-1].json["error"]["code"] == "cancelled"
    (whole,) = await _cancelled_text(two, stream)
    assert text(found[:-1]) == whole


async def _cancelled_text(gate: Gate, stream: str) -> list[str]:
    return [text(events((await gate.ask("GET", f"/v1/streams/{stream}")).body)[:-1])]


@pytest.mark.chaos
async def test_invariant_8_a_reader_stalled_for_long_is_ended(one: Gate, two: Gate, fast: str) -> None:
    before = await one.gauge("stalled_readers_total")
    (stream,) = await started(two, fast, 1)
    async with AsyncExitStack() as stack:
        asleep = await stack.enter_async_context(one.connection(KERNEL_BYTES))
        await asleep.send(one.request("GET", f"/v1/streams/{stream}"))
        slow = await stack.enter_async_context(one.connection(KERNEL_BYTES))
        await slow.send(one.request("GET", f"/v1/streams/{stream}"))
        socket = await stack.enter_async_context(one.socket(receive_buffer=KERNEL_BYTES, max_queue=1))
        await socket.sub(1, stream)
        await slow.head()
        slow.pause_s = 0.5
        body = asyncio.create_task(slow.rest(120))
        began = time.monotonic()

        async def both_ended() -> bool:
            return await one.gauge("stalled_readers_total") > before and await one.gauge("open_websockets") == 0

        await eventually(both_ended, "those that take nothing to be ended", STALL_S_MAX + 20)
        assert time.monotonic() - began > STALL_S_MAX - 2
        assert not body.done()
        slow.pause_s = 0
        assert events(after_heartbeat(await body))[-1].data == DONE, "who moves, if slowly, is not stalled"
        assert await one.gauge("stalled_readers_total") == before + 1
    await one.until_open_streams(0)
