"""Responses sockets that end: by a killed gateway, a drain, a reader that takes nothing."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from tests.dialects.responses.fold import events, fold
from tests.gateway.processes import Process, Running
from tests.gateway.responses_socket.wire import PATH, ResponsesWire, code_of, opened, text_of
from tests.gateway.test_slow_readers import GROWTH_BYTES_MAX, KERNEL_BYTES, watched
from tests.gateway.wire import Gate, connected
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform
SLOW = 100_000


@asynccontextmanager
async def own_gateway(platform: Running, *flags: str) -> AsyncIterator[tuple[Gate, Process]]:
    with await asyncio.to_thread(platform.gateway, *flags) as process:
        yield Gate(process.facts["url"], process.pid, platform.key), process


async def rest_of(gate: Gate, response: str, number: int) -> list[dict[str, Any]]:
    """The events after a number."""
    reply = await gate.ask("GET", f"{PATH}/{response}?stream=true&starting_after={number}")
    assert reply.status == 200, reply
    return [json.loads(data) for data, _ in events(reply.body.replace(b": hb\n", b""))]


async def closed(ws: ResponsesWire, within_s: float = 10.0) -> int | None:
    """The code with which the socket is closed."""
    async with asyncio.timeout(within_s):
        with pytest.raises(ConnectionClosed):
            while True:
                await ws.receive(within_s)
    return ws.connection.close_code


async def test_a_response_outlives_its_killed_gateway(platform: Running, two: Gate) -> None:
    async with own_gateway(platform) as (dying, process):
        async with opened(dying) as ws:
            await ws.create(tokens=200, seed=41)
            await ws.create(tokens=150, seed=42, stream_id="b", reasoning={"effort": "low"})
            for _ in range(60):
                await ws.receive()
            process.signal(signal.SIGKILL)
            await closed(ws)
        for lane, tokens in ((None, 200), ("b", 150)):
            told = [{k: v for k, v in event.items() if k != "stream_id"} for event in ws.lanes[lane]]
            response = told[0]["response"]["id"]
            rest = await rest_of(two, response, told[-1]["sequence_number"])
            whole = [json.dumps(event).encode() for event in (*told, *rest)]
            final = fold(whole)
            assert final == (await two.ask("GET", f"{PATH}/{response}")).json
            assert final["usage"]["output_tokens"] == tokens
        process.wait()


async def test_a_response_outlives_its_socket(one: Gate, two: Gate) -> None:
    async with opened(one) as ws:
        await ws.create(tokens=300, seed=43)
        for _ in range(20):
            await ws.receive()
    told = ws.lanes[None]
    response, number = told[0]["response"]["id"], told[-1]["sequence_number"]
    final = fold([json.dumps(event).encode() for event in (*told, *await rest_of(two, response, number))])
    assert final["usage"]["output_tokens"] == 300
    async with opened(one) as ws:
        await ws.create(tokens=SLOW, on_disconnect="cancel_after=0")
        await ws.until("response.output_text.delta")
        response = ws.lanes[None][0]["response"]["id"]
    await two.until_status(response, "cancelled")


async def test_a_response_that_nobody_can_read_again_ends_soon_after_its_socket(one: Gate, two: Gate) -> None:
    """Codex sends ``store: false``, and its user interrupts it."""
    async with opened(one) as ws:
        await ws.create(tokens=SLOW, store=False)
        await ws.until("response.output_text.delta")
        response = ws.lanes[None][0]["response"]["id"]
    await two.until_status(response, "cancelled")  # within 10 s; a stored one goes on for 30 s


async def test_a_drain_lets_responses_end(platform: Running, two: Gate) -> None:
    async with own_gateway(platform, "--drain-s", "20", "--drain-spread-s", "0.2") as (leaving, process):
        async with AsyncExitStack() as stack:
            idle = await stack.enter_async_context(opened(leaving))
            busy = await stack.enter_async_context(opened(leaving))
            parent = await busy.turn(store=False)
            await busy.create(tokens=400, previous_response_id=parent["id"])
            await busy.until("response.created")
            process.terminate()
            assert await closed(idle, 5.0) == 1012
            await busy.create(stream_id="late")
            refused = await busy.until("error", "late")
            assert code_of(refused) == (503, "draining") and refused["error"]["retriable"] is True
            last = (await busy.ended())["response"]
            assert last["usage"]["output_tokens"] == 400
            assert await closed(busy, 5.0) == 1012
        assert await asyncio.to_thread(process.wait, 10) == 0
    assert (await two.ask("GET", f"{PATH}/{last['id']}")).json == last


async def test_the_end_of_a_drain_tells_where_to_read_on(platform: Running, two: Gate) -> None:
    async with own_gateway(platform, "--drain-s", "1", "--drain-spread-s", "0") as (leaving, process):
        async with opened(leaving) as ws:
            await ws.create(tokens=600, stream_id="a", seed=44)
            await ws.until("response.created", "a")
            process.terminate()
            cut = await ws.until("error", "a")
            assert code_of(cut) == (503, "draining")
            assert await closed(ws) == 1012
        response, number = cut["error"]["response_id"], cut["error"]["starting_after"]
        told = [{k: v for k, v in event.items() if k != "stream_id"} for event in ws.lanes["a"][:-1]]
        assert number == told[-1]["sequence_number"]
        final = fold([json.dumps(event).encode() for event in (*told, *await rest_of(two, response, number))])
        assert final["usage"]["output_tokens"] == 600
        await asyncio.to_thread(process.wait, 10)


async def test_readers_that_do_not_read_cost_constant_memory(one: Gate, fast: str) -> None:
    """Sixteen lanes of fast streams on sockets that nobody reads; then everything arrives."""
    async with AsyncExitStack() as stack, watched(one) as samples:
        sockets = []
        for _ in range(4):
            sock = await connected(one, KERNEL_BYTES)
            sockets.append(await stack.enter_async_context(opened(one, sock=sock, max_queue=1)))
        for ws in sockets:
            for lane in range(8):
                await ws.create(tokens=4000, model=fast, stream_id=f"l{lane}", store=False)

        async def all_lag() -> bool:
            return await one.gauge("lagging_clients") == len(sockets)

        await eventually(all_lag, "every socket to lag")
        await asyncio.sleep(1.0)  # streams go on meanwhile
        growth = max(samples) - samples[0]
        assert growth < GROWTH_BYTES_MAX, f"{growth >> 10} KiB for {len(sockets)} sockets of 8 responses"
        for ws in sockets:
            for lane in range(8):
                last = (await ws.ended(f"l{lane}", 60))["response"]
                assert last["usage"]["output_tokens"] == 4000 and text_of(last)
    await one.until_open_streams(0)
