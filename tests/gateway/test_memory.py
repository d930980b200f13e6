"""Memory that a gateway keeps for open streams, in a real process."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack

import pytest

from stream_fabric.limits import WATCHDOG_S
from tests.gateway.processes import Running
from tests.gateway.wire import Gate, chat

STREAMS = 1000
KIB_MAX = 12.0
"""As ``make bench``'s bound of an SSE stream."""
STILL = "model=still,ttft_ms=0,itl_ms=20,stall_after_tokens=1,max_num_seqs=2000,block_size=1024,num_blocks=4000000"
"""A model that says one token, and then nothing."""


@pytest.mark.platform
async def test_an_idle_stream_takes_little_memory(platform: Running) -> None:
    """The looks of the watchdog included, which finds that each of the streams makes no progress."""
    agent = await asyncio.to_thread(platform.agent, "still", "--sim", STILL)
    with contextlib.closing(agent), await asyncio.to_thread(platform.gateway) as process:
        gate = Gate(process.facts["url"], process.pid, platform.key)
        body = chat(2) | {"model": "still"}
        async with AsyncExitStack() as few:  # the first streams load code and tables once
            for _ in range(20):
                await few.enter_async_context(gate.create(body))
        await gate.until_open_streams(0)
        await asyncio.sleep(2 * WATCHDOG_S)
        before = gate.resident_bytes()
        async with AsyncExitStack() as streams:
            for _ in range(STREAMS):
                await streams.enter_async_context(gate.create(body))
            await gate.until_open_streams(STREAMS)
            await asyncio.sleep(2 * WATCHDOG_S + 1)  # a stream is idle from the second look on
            kib = (gate.resident_bytes() - before) / 1024 / STREAMS
        assert kib < KIB_MAX, f"{kib:.1f} KiB a stream"
