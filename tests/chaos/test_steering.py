"""Agents and gateways die between an input and its note in the log."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import msgspec
import pytest

from stream_fabric.stream.frames import Delta, Note, Open
from tests.chaos.fleet import fleet, log_of
from tests.gateway.wire import Gate
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.chaos

TOKENS, STREAMS = 60, 12


async def test_an_accepted_input_survives_its_agent_and_its_gateway(redis_server: RedisServer) -> None:
    """Each input is applied once, whoever dies before, at or after the commit; no token is lost or repeated."""
    async with (
        fleet(redis_server.url, sim="itl_ms=40,ttft_ms=40,max_num_seqs=64") as running,
        log_of(running.redis_url) as log,
    ):
        one, two = running.gates[:2]
        streams = [await one.background(TOKENS, seed=seed) for seed in range(STREAMS)]
        for stream in streams:
            await until_head(two, stream, 6)
        victim = running.agents["replica0"]
        frozen = streams[: STREAMS // 2]
        os.kill(victim.pid, signal.SIGSTOP)  # the inputs of these streams wait for a replica that never answers
        results = [await steer(two, stream) for stream in frozen]
        os.kill(victim.pid, signal.SIGCONT)
        # Those of the others come at the same moment as the death, through a gateway that dies as well
        asking = [asyncio.create_task(steer(one, stream)) for stream in streams[STREAMS // 2 :]]
        await asyncio.sleep(0)
        victim.kill()
        results += await asyncio.gather(*asking)
        os.kill(one.pid, signal.SIGKILL)
        assert results == ["accepted"] * STREAMS
        again = [await steer(two, stream) for stream in streams]
        assert set(again) <= {"duplicate"}, "another gateway knows them"
        for stream in streams:
            await two.until_status(stream, "completed", within_s=60)
            numbered, end = await log.whole(stream)  # dense, with one terminal
            frames = [frame for _, frame in numbered]
            notes = [
                msgspec.json.decode(f.body) for f in frames if isinstance(f, Note) and f.kind == "input" and f.body
            ]
            assert notes == [{"id": "k1", "result": "applied"}], stream
            texts = [frame for frame in frames if isinstance(frame, Open)]
            assert [block.block for block in texts] == [0, 1], stream
            shown = sum(frame.tokens for frame in frames if isinstance(frame, Delta))
            assert end.usage is not None and end.usage.output == shown, "what was shown is billed, and no more"
            second = sum(frame.tokens for frame in frames if isinstance(frame, Delta) and frame.block == 1)
            assert second == TOKENS, "the next answer is whole"
        await log.until_no_slot_is_taken()


async def until_head(gate: Gate, stream: str, least: int) -> None:
    async def reached() -> bool:
        return bool((await gate.info(stream))["head"] >= least)

    await eventually(reached, f"{least} frames of {stream}")


async def steer(gate: Gate, stream: str) -> Any:
    body = {"id": "k1", "item": "In one word."}
    return (await gate.ask("POST", f"/v1/streams/{stream}/input", body)).json.get("result")
