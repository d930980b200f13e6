"""Redis goes away for good: every reader hears of it within a minute."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest

from stream_fabric.limits import FABRIC_AWAY_S_MAX
from tests.gateway.processes import on_cluster, running
from tests.gateway.wire import Exchange, Reply, Tokenstream, chat, events

TOLD_S_MAX = 60.0


async def error_of(socket: Tokenstream) -> dict[str, Any]:
    while (message := await socket.receive(TOLD_S_MAX + 10))["t"] != "error":
        pass
    return message


async def answer_of(exchange: Exchange) -> Reply:
    while True:
        with suppress(TimeoutError):
            return await exchange.answer()


@pytest.mark.chaos
@pytest.mark.timeout(180)
@pytest.mark.skipif(on_cluster(), reason="ends the platform's own Redis")
async def test_every_reader_hears_that_redis_stays_away() -> None:
    with running(sim="itl_ms=100,ttft_ms=10", gateways=1, replicas=1) as platform:
        gate = platform.gates[0]
        assert platform.redis_pid is not None
        async with gate.create(chat(3000)) as sse, gate.socket() as socket, gate.connection() as whole:
            await sse.events(3)
            await socket.create(1, chat(3000))
            await socket.until_t("d", ch=1)
            await whole.send(gate.request("POST", "/v1/chat/completions", {**chat(3000), "stream": False}))
            await asyncio.sleep(1.0)
            os.kill(platform.redis_pid, signal.SIGKILL)
            began = time.monotonic()
            async with asyncio.timeout(TOLD_S_MAX + 10):
                error, body, answer = await asyncio.gather(
                    error_of(socket), sse.rest(TOLD_S_MAX + 10), answer_of(whole)
                )
            took_s = time.monotonic() - began
        assert FABRIC_AWAY_S_MAX <= took_s < TOLD_S_MAX
        last = events(body)[-1]
        for told in (last.json["error"], error, answer.json["error"]):
            assert (told["code"], told["retriable"]) == ("fabric_unavailable", True)
            assert told["cursor"]
            assert "127.0.0.1" not in told["message"], "no address of ours reaches a client"
        assert last.json["error"]["stream_id"] == sse.headers["x-stream-id"]
        assert answer.status == 503 and answer.json["error"]["stream_id"] == answer.headers["x-stream-id"]
        assert not last.id, "it is not the stream's own end"
