"""Redis goes away for good: every reader hears of it within a minute. Or it loses its data."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest

from stream_fabric.limits import FABRIC_AWAY_S_MAX
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.streams import check_partitions, held_partitions
from stream_gw.main import keep_partitions
from tests.gateway.processes import on_cluster, running
from tests.gateway.wire import Exchange, Reply, Tokenstream, chat, events
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

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


async def test_the_number_of_partitions_is_set_again_when_redis_has_lost_it(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """``usage reconcile`` took the platform's Redis for one that was never used, and another number could be set."""
    client = RedisClient(redis_server.url)
    await client.start()
    await check_partitions(client, 4)
    keeping = asyncio.create_task(keep_partitions(client, 4, every_s=0.05))

    async def is_set() -> bool:
        held = await held_partitions(client)
        return held is not None and held.count == 4

    try:
        redis_server("FLUSHALL")
        await eventually(is_set, "the number to be set again")
        redis_server("SET", "sg:{p0}:partitions", 8)
        await eventually(lambda: "this process is set to 4" in caplog.text, "the log to name the other number")
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await client.close()
